"""The gated activation of the MLP: activation(gate) * up."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.ops._select import Implementation, Table, pallas, select, slower_for_few
from pallas_kernels.swiglu import geglu, swiglu
from pallas_kernels.swiglu import why_not as why_not_swiglu

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def glu(
    gate: Float[Array, "*B F"],
    up: Float[Array, "*B F"],
    *,
    activation: str,
    implementation: str | Mapping[str, str] = "auto",
) -> Float[Array, "*B F"]:
    """activation(gate) * up: "silu" makes it SwiGLU, "gelu" or "gelu_pytorch_tanh" GeGLU.

    Dtypes: the activation is computed in float32 and rounded to gate's dtype before the product.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"glu: activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    return select("glu", GLU, implementation, gate, up, activation=activation)(
        gate, up, activation=activation
    )


def _glu_xla(gate, up, *, activation):
    return ACTIVATIONS[activation](gate.astype(jnp.float32)).astype(gate.dtype) * up


def _glu_pallas(gate, up, *, activation, interpret=False):
    if activation == "silu":
        return swiglu(gate, up, interpret=interpret)
    approximate = activation == "gelu_pytorch_tanh"
    return geglu(gate, up, approximate=approximate, interpret=interpret)


def _why_not_pallas(gate, up, *, activation, device):
    del activation
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        return f"gate is {gate.dtype}{list(gate.shape)} and up {up.dtype}{list(up.shape)}"
    return why_not_swiglu(gate, up, device=device)


def _not_auto(gate, up, **kwargs) -> str | None:
    del up, kwargs
    if gate.dtype == jnp.float32:  # H200, 8192 x 8192: 184.6 us, XLA 184.1 us
        return "in float32 XLA is as fast"
    return slower_for_few(math.prod(gate.shape[:-1]))


GLU: Table = {**pallas(_glu_pallas, _why_not_pallas, _not_auto), "xla": Implementation(_glu_xla)}
