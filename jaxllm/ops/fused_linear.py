"""A projection with what stands before and behind it: for decoding, where launches count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.ops._select import Implementation, Table, choose, pallas
from jaxllm.ops.glu import glu
from jaxllm.ops.linear import linear
from jaxllm.ops.norm import rms_norm
from jaxllm.ops.rope import rope
from pallas_kernels import device as device_lib
from pallas_kernels.around_product import Cache, Norm, Rotary, check_post_norm, write
from pallas_kernels.gemv import check, gemv
from pallas_kernels.gemv import why_not as why_not_gemv
from pallas_kernels.matmul_finish import GATES as PLAIN_GATES
from pallas_kernels.options import check_arrays, is_known
from pallas_kernels.packed import PLAIN, Packed
from pallas_kernels.quantized_matmul import FEW_ROWS, quantized_matmul
from pallas_kernels.quantized_matmul import why_not as why_not_quantized
from pallas_kernels.rms_norm import rms_norm as rms_norm_kernel
from pallas_kernels.rms_norm import why_not as why_not_rms_norm
from pallas_kernels.rope_into_cache import rope_into_cache
from pallas_kernels.rope_into_cache import why_not as why_not_rope_into_cache
from pallas_kernels.ternary_matmul import GATES as TERNARY_GATES
from pallas_kernels.ternary_matmul import ternary_linear
from pallas_kernels.ternary_matmul import why_not as why_not_ternary

PACKED_ROWS = 64  # of x: more are a prefill's, with packed weights
# Of an epilogue: the activation of its gate
GATES = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "relu2_glu": "relu2"}
EPILOGUES = {activation: epilogue for epilogue, activation in GATES.items()}


def takes_rows(count: int, *weights: Array | Packed) -> bool:
    """Whether so few rows of x are what the kernels of the op are for, with these weights: of those
    that are not packed `gemv` takes one row, and `quantized_matmul` the rest. A count that
    `jax.export` has a letter for is not few.
    """
    most = min(PACKED_ROWS if isinstance(w, Packed) else FEW_ROWS for w in weights)
    return is_known(count) and count <= most


def takes_gate(activation: str, *weights: Array | Packed) -> bool:
    """Whether the kernels of the op have such a gate in a product with each of these weights."""
    return all(EPILOGUES.get(activation) in _gates_of(weight) for weight in weights)


def _gates_of(weight: Array | Packed) -> tuple[str, ...]:
    """The epilogues with a gate that the kernel of the weight has."""
    ternary = isinstance(weight, Packed) and weight.scheme == "ternary"
    return TERNARY_GATES if ternary else tuple(PLAIN_GATES)


def gates_itself(weight: Array | Packed | None, activation: str) -> bool:
    """Whether a product with these rows of gate and up, of however many rows of x, is better had
    with its gate in it: of ternary weights that was not measured, and XLA multiplies plain ones.
    A backward pass multiplies by them once more.
    """
    return activation == "silu" and isinstance(weight, Packed) and weight.scheme != "ternary"


def fused_linear(
    x: Float[Array, "*B I"],
    weight: Float[Array, "O I"] | Packed,
    bias: Float[Array, " O"] | None = None,
    *,
    norm: Norm | None = None,
    epilogue: str | None = None,
    residual: Float[Array, "*B F"] | None = None,
    rotary: Rotary | None = None,
    cache: Cache | None = None,
    post_norm: Norm | None = None,
    implementation: str | Mapping[str, str] = "auto",
) -> Any:
    """epilogue(norm(x) @ weight.T + bias) + residual: [*B, F] in x's dtype; with a `post_norm`,
    which takes no epilogue, post_norm(norm(x) @ weight.T + bias) + residual, by `rms_norm`.

    epilogue "swiglu", "geglu" or "relu2_glu": the outputs are gate, then up, and F is half of them.
    "rope": they are the heads of q, k and v; those of q and k are normed, if `rotary` has norms,
    and turned, and the result is (q, k, v), each [*B, heads, H]; with a `cache`, k and v are its
    own, [B, S, K, H], with these in their slots.
    "xla" computes it by the ops of its parts, which round between them, by the same
    `implementation`.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError if the named implementation
    cannot run the call.
    """
    around = {
        "norm": norm,
        "epilogue": epilogue,
        "residual": residual,
        "rotary": rotary,
        "cache": cache,
    }
    plain = not isinstance(weight, Packed)
    check_arrays("fused_linear", weight=weight if plain else weight.codes)
    shape: Any = jax.ShapeDtypeStruct(weight.shape, weight.dtype if plain else x.dtype)
    who = {"who": "fused_linear", "gates": tuple(GATES)}
    check(x, shape, bias=bias, out_dtype=None, **around, **who)
    if post_norm is not None:
        if epilogue is not None:
            raise ValueError(f"fused_linear: a post_norm takes no epilogue, got {epilogue!r}")
        check_post_norm(post_norm, weight.shape[0], who="fused_linear")
        around["residual"] = None  # added behind the norm
    weight = weight.astype(x.dtype) if plain else weight
    name = choose("fused_linear", FUSED_LINEAR, implementation, x, weight, bias, **around)
    y = FUSED_LINEAR[name].run(x, weight, bias, **around, implementation=implementation)
    if post_norm is not None:
        y = rms_norm(y, post_norm.weight, **post_norm.keywords, implementation=implementation)
        return y if residual is None else residual.astype(y.dtype) + y
    if rotary is None:
        return y
    q, *kv = y
    lead, width = x.shape[:-1], rotary.width(weight.shape[0])
    if cache is None:
        kv = jnp.split(kv[0].reshape(*lead, 2 * rotary.kv_heads, width), 2, axis=-2)
    return q.reshape(*lead, rotary.q_heads, width), *kv


def _in_parts(x, weight, bias, *, norm, epilogue, residual, rotary, cache, implementation):
    same = {"implementation": implementation}
    if norm is not None:
        x = rms_norm(x, norm.weight, **norm.keywords, **same)
    y = linear(x, weight, bias, **same)
    if epilogue in GATES:
        y = glu(y, activation=GATES[epilogue], **same)
    if rotary is None:
        return y if residual is None else y + residual.astype(y.dtype)
    return _turn(y, rotary, cache, implementation)


def _turn(y, rotary: Rotary, cache: Cache | None, how):
    """What `gemv` returns of a product with the weights of q, k and v."""
    width, rows = rotary.width(y.shape[-1]), math.prod(y.shape[:-1])
    q, k, v = rotary.split(y.reshape(rows, y.shape[-1]))
    q, k = (
        z if norm is None else rms_norm(z, norm.weight, **norm.keywords, implementation=how)
        for z, norm in ((q, rotary.q_norm), (k, rotary.k_norm))
    )
    angles = (a.reshape(1, rows, a.shape[-1]) for a in rotary[:2])
    q, k = rope(q, k, *angles, sliced=not rotary.norms, implementation=how)
    if cache is not None:
        return q.reshape(*y.shape[:-1], rotary.q_heads * width), *write(cache, k[0], v[0])
    kv = jnp.concatenate([k, v], axis=2)
    return tuple(part.reshape(*y.shape[:-1], part.shape[2] * width) for part in (q, kv))


def _pallas(x, weight, bias, *, implementation=None, interpret=False, **around):
    del implementation
    weight = _packed_for_several(x, weight)
    if isinstance(weight, Packed):
        return _packed(x, weight, bias, **around, interpret=interpret)
    if (rotary := around["rotary"]) is None or not rotary.why_apart(weight.shape[0]):
        return gemv(x, weight, bias=bias, interpret=interpret, **around)
    y = gemv(x, weight, bias=bias, norm=around["norm"], interpret=interpret)
    return _turn_apart(y, rotary, around["cache"], interpret)


def _packed_for_several(x, weight):
    """What more than one row of x is multiplied by: a plain weight as a packed one, by the tensor
    cores of warps.
    """
    # H200, bfloat16, Qwen2.5-0.5B, us a decode step: one row 563 by `gemv`, 650 by warps
    several = math.prod(x.shape[:-1]) > 1
    return Packed.of(weight) if several and not isinstance(weight, Packed) else weight


def _packed(x, weight, bias, *, norm, epilogue, residual, rotary, cache, interpret):
    """One kernel: the norm, the product and what follows it. What that one does not take (`_takes`)
    has a kernel of its own: the norm before it, the turning of heads behind it.
    """
    epilogue = None if rotary is not None else epilogue
    residual = None if residual is None else residual.astype(x.dtype)
    after: dict[str, Any] = {"bias": bias, "epilogue": epilogue, "residual": residual}
    if weight.scheme == "ternary":
        before = {} if norm is None else {"norm": norm.weight, "eps": norm.eps}
        y = ternary_linear(x, weight, **before, **after, interpret=interpret)
        return y if rotary is None else _turn_apart(y, rotary, cache, interpret)
    if norm is not None and not _takes(x, weight, norm=norm, bias=bias, epilogue=epilogue):
        x, norm = rms_norm_kernel(x, norm.weight, **norm.keywords, interpret=interpret), None
    if cache is not None and _takes(x, weight, norm=norm, rotary=rotary):
        after = {"bias": bias, "epilogue": "rope", "rotary": rotary, "cache": cache}
        return quantized_matmul(x, weight, norm=norm, **after, interpret=interpret)
    y = quantized_matmul(x, weight, norm=norm, **after, interpret=interpret)
    return y if rotary is None else _turn_apart(y, rotary, cache, interpret)


def _takes(x, weight, **around) -> bool:
    """Whether the kernel of the product has the rest in it, wherever it runs."""
    return why_not_quantized(x, weight, **around, device=device_lib.INTERPRETED) is None


def _turn_apart(y, rotary: Rotary, cache: Cache | None, interpret):
    """As `_turn`, in one launch where there is a cache to write to."""
    if cache is None:
        return _turn(y, rotary, cache, "xla")
    return turned_in_one_launch(y, rotary, cache, interpret=interpret)


def turned_in_one_launch(
    y: Float[Array, "*B NKH"], rotary: Rotary, cache: Cache, *, interpret: bool
) -> tuple[Array, Array, Array]:
    """q [*B, N H] and the cache's keys and values, of a product y [*B, (N + 2 K) H]."""
    heads, cos, sin = (a.reshape(-1, a.shape[-1]) for a in (y, *rotary[:2]))
    rotary = rotary._replace(cos=cos, sin=sin)
    q, k, v = rope_into_cache(heads, rotary, cache, interpret=interpret)
    return q.reshape(*y.shape[:-1], -1), k, v


def _why_not_pallas(
    x, weight, bias, *, device, norm, epilogue, rotary, cache, post_norm=None, **rest
) -> str | None:
    del post_norm  # by `rms_norm`, behind it
    weight = _packed_for_several(x, weight)
    if epilogue in GATES and epilogue not in _gates_of(weight):
        scheme = weight.scheme if isinstance(weight, Packed) else PLAIN
        return f"{scheme} weights have no {epilogue!r}"
    plain = not isinstance(weight, Packed)
    if plain and (rotary is None or not rotary.why_apart(weight.shape[0])):
        around = {"norm": norm, "epilogue": epilogue, "rotary": rotary, "cache": cache, **rest}
        return why_not_gemv(x, weight, bias=bias, **around, device=device)
    if cache is not None and (plain or not _takes(x, weight, rotary=rotary)):
        heads = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), weight.shape[0]), x.dtype)
        if (reason := why_not_rope_into_cache(heads, rotary, cache, device=device)) is not None:
            return f"its rotation: {reason}"
    if plain:
        return why_not_gemv(x, weight, norm=norm, bias=bias, device=device)
    epilogue = None if rotary is not None else epilogue
    if weight.scheme == "ternary":
        if norm is not None and norm.zero_centered:
            return "the norm before a ternary weight adds no 1 to its own"
        return why_not_ternary(x, weight, epilogue=epilogue, device=device)
    after = {"bias": bias, "epilogue": epilogue}
    if norm is not None and not _takes(x, weight, norm=norm, **after):
        reason = why_not_rms_norm(x, norm.weight, eps=norm.eps, device=device)
        if reason is not None:
            return f"its norm: {reason}"
    return why_not_quantized(x, weight, **after, device=device)


def _not_auto(x, weight, bias, *, norm, epilogue, **around) -> str | None:
    # H200, bfloat16, us a decode step, by warps and by XLA in parts: of Qwen2.5-0.5B 653 and 886
    # with 2 rows, 785 and 908 with 16; of Llama-3.1-8B 3831 and 4186, 4434 and 4505
    del around
    if isinstance(weight, Packed):
        return None
    weight = _packed_for_several(x, weight)
    if not isinstance(weight, Packed):
        return None
    if x.dtype != jnp.bfloat16:
        return f"several rows of x were measured in bfloat16, these are {x.dtype}"
    if norm is None:
        return None
    within = {"norm": norm, "bias": bias, "epilogue": epilogue, "device": device_lib.INTERPRETED}
    if (reason := why_not_quantized(x, weight, **within)) is None:
        return None
    return f"its norm would be a launch of its own, which was not measured: {reason}"


FUSED_LINEAR: Table = {
    **pallas(_pallas, _why_not_pallas, _not_auto),
    "xla": Implementation(_in_parts),
}
