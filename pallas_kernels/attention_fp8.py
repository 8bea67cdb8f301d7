"""What attention means where queries, keys and values are float8_e4m3fn.

A query is its scale times what is stored, and so is a key and a value: the scores are those of
`attention_reference` times q_scale k_scale, and the result is that times v_scale. A scale is one
number, or one a head: q_scale [N], k_scale and v_scale [K]; without one it is 1.

The bound. Softmax is float32; what is lost is in the weights' product with the values, where a
weight is 256 exp(score - the row's largest) as float8, rounded to 4 bits. With p the exact weights
of a query, its result is no farther from the exact one, in each column, than
    sum_s (p[s] / 16 + max(p) / 2^18) |v_scale v[s]|,
and half a unit in the last place of bfloat16, and the error of the sums.
Those are float32 in XLA. Hopper's tensor cores add 32 products of float8 at a time and keep 13 bits
behind the leading one of the largest, so that a sum of n is off by less than 35 ceil(n / 32) 2^-13
of the largest product or partial sum. A score is a sum of H: on an H200, of normal numbers,
logarithms of the denominator were off by 7e-4 at most, which next to weights of 4 bits does not
show in the result. Weights times values are summed so by blocks of at most 128 keys, and the blocks
in float32, with heads of TWO_SUMS at most; the kernel goes on in one sum over all keys where heads
are wider, and values of one sign may then lose a tenth over 4096 keys.
Source: Shah et al. 2024 (FlashAttention-3), arXiv:2407.08608, section 3.3; for the tensor cores Xie
et al. 2025, arXiv:2511.10909.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels import attention_reference as reference
from pallas_kernels.options import check_arrays

FP8 = jnp.float8_e4m3fn
LIFT = 8  # weights are rounded as 2^8 times as large: 256 of 448, far from what float8 rounds to 0
TWO_SUMS = 128  # the widest head whose registers hold a block's sums beside all others


def attention_fp8_reference(
    q,
    k,
    v,
    *,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    weights_dtype=FP8,
    scale=None,
    softcap=None,
    sinks=None,
    return_lse=False,
    return_weights=False,
    **masks,
) -> Any:
    """The mathematics in plain JAX: bfloat16 [B, T, N, H], and with `return_lse` also the float32
    [B, T, N] logarithm of the denominator, with `return_weights` what the softmax gave.

    weights_dtype: what the weights are rounded to before their product with v, as a kernel must.
    """
    mask = reference.visible(q.shape[1], k.shape[1], **{"causal": True, "window": None, **masks})
    weights, lse = reference.softmax(
        _scores(q, k, q_scale, k_scale, scale=scale, softcap=softcap), mask, sinks
    )
    rounded, unit = weights, jnp.float32(1)
    if weights_dtype == FP8:
        unit = jnp.max(weights, axis=-1, keepdims=True) * jnp.float32(2.0**-LIFT)
        rounded = weights / jnp.where(unit > 0, unit, jnp.float32(1))
        unit = jnp.swapaxes(unit, 1, 2)
    rounded = rounded.astype(weights_dtype).astype(jnp.bfloat16)
    out = reference.weighted(rounded, v.astype(jnp.bfloat16), jnp.float32) * unit
    out = out * _a_head(v_scale, v.shape[2], q.shape[2])[None, None, :, None]
    results = [out.astype(jnp.bfloat16)]
    results += [lse] if return_lse else []
    results += [weights] if return_weights else []
    return tuple(results) if len(results) > 1 else results[0]


def _scores(q, k, q_scale, k_scale, *, scale, softcap) -> jax.Array:
    """As those of `attention_reference`, of numbers that bfloat16 has as well."""
    products = reference.scores(
        q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), scale=scale, softcap=None
    )
    products = products * score_scale(q_scale, k_scale, q.shape[2], k.shape[2])[None, :, None, None]
    if softcap is None:
        return products
    return jnp.tanh(products / jnp.float32(softcap)) * jnp.float32(softcap)


def score_scale(q_scale: Any, k_scale: Any, heads: int, kv_heads: int) -> jax.Array:
    """What the products of queries and keys are multiplied by, float32 [N]."""
    return _a_head(q_scale, heads, heads) * _a_head(k_scale, kv_heads, heads)


def _a_head(scale: Any, given: int, heads: int) -> jax.Array:
    """A scale of one number, or of one for each of `given` heads, for each of `heads`."""
    scale = jnp.asarray(1 if scale is None else scale, jnp.float32)
    each = heads // given if given else 0  # of no heads none
    return jnp.repeat(jnp.broadcast_to(scale, (given,)), each)


def value_scale(v_scale: Any, kv_heads: int) -> jax.Array:
    """float32 [K]."""
    return _a_head(v_scale, kv_heads, kv_heads)


def check_scales(name: str, q: Any, k: Any, v: Any, *, q_scale, k_scale, v_scale) -> None:
    """Refuses scales that no implementation can take; `name` is who speaks.

    A scale that is traced is taken to be positive and finite, as one that is known must be.
    """
    scales = (("q", q, q_scale), ("k", k, k_scale), ("v", v, v_scale))
    for what, x, scale in scales:
        if q.dtype != FP8 and scale is not None:
            raise ValueError(
                f"{name}: {what}_scale is given and q is {q.dtype}; only float8_e4m3fn has scales"
            )
        if x.dtype != q.dtype and FP8 in (q.dtype, x.dtype):
            raise ValueError(
                f"{name}: q is {q.dtype} and {what} is {x.dtype}; all three or none must be "
                "float8_e4m3fn"
            )
        if x.dtype.itemsize == 1 and x.dtype != FP8:
            raise ValueError(f"{name}: {what} is {x.dtype}; of 8 bits it takes float8_e4m3fn")
        if scale is None:
            continue
        scale = np.float32(scale) if isinstance(scale, (int, float)) else scale
        check_arrays(name, **{f"{what}_scale": scale})
        heads = x.shape[2]
        if scale.shape not in ((), (heads,)) or scale.dtype != jnp.float32:
            raise ValueError(
                f"{name}: {what}_scale is {scale.dtype}{list(scale.shape)}; it must be float32, "
                f"one number or one a head: [] or [{heads}]"
            )
        if isinstance(scale, (Tracer, jax.ShapeDtypeStruct)):
            continue
        for head, number in enumerate(scale.reshape(-1).tolist()):
            if not 0 < number < float("inf"):
                at = f"[{head}]" if scale.shape else ""
                raise ValueError(
                    f"{name}: {what}_scale{at} is {number}; a scale must be positive and finite"
                )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward_only(name: str, operands: Any) -> Any:
    """The operands, of whose result nobody may ask a gradient; `name` is who says so.

    What is only measured beside a loss stops the gradient at the operands, not at the result.
    """
    del name
    return operands


@forward_only.defjvp
def _no_gradient(name, primals, tangents):
    del primals, tangents
    raise NotImplementedError(
        f"{name}: float8_e4m3fn has no gradient; attend in bfloat16 where one is needed"
    )
