"""RoPE of one token a row, whose key and value go straight into the cache: one launch.

heads [B, (N + 2 K) H] are those of q, k and v in turn, as one product gives them. A block owns a
head of a row: if it is of q or k it norms it, where they are normed, and turns it; and writes it
where it belongs, keys and values into their slots of the cache, in the cache's own memory. What is
turned how is in rope.py, the norm in rms_norm.py.
Source: Su et al. 2021, arXiv:2104.09864; of the norm: Zhang and Sennrich 2019, arXiv:1910.07467.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels import device as device_lib
from pallas_kernels.around_product import Cache, Norm, Rotary, check_heads, turn_and_write
from pallas_kernels.device import ACCESS_BYTES, Device
from pallas_kernels.head_places import HeadPlaces
from pallas_kernels.options import check_flags

DTYPES = (jnp.bfloat16, jnp.float16)
ITEMSIZE = 2
ACROSS, WARPS, DOWN = 8, 4, 4  # lanes that hold the same number; how a column lies in a block
GRAIN = WARPS * DOWN


def rope_into_cache(
    heads: Float[Array, "B NKH"], rotary: Rotary, cache: Cache, *, interpret: bool = False
) -> tuple[Float[Array, "B NH"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """(q, cache.k, cache.v): q turned, and each row's key, turned, and value in its slot.

    A slot below 0 or from S on is nowhere. `rotary` has B rows of half of what is turned of a head,
    and the norms of q's and k's heads before they are turned, if there are any.
    Dtypes: bfloat16 or float16, of heads and cache alike; cos and sin of any float, rounded to it;
    norms' weights any float, as they are; slots any integers. Products and sums are float32,
    rounded once. Gradients are those of the plain path.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for what `why_not` says.
    """
    check_heads(heads, rotary, cache, who="rope_into_cache")
    check_flags("rope_into_cache", interpret=interpret)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    if (reason := why_not(heads, rotary, cache, device=device)) is not None:
        raise NotImplementedError(f"rope_into_cache: cannot run this call: {reason}")
    norms = rotary.q_norm, rotary.k_norm
    kinds = tuple(norm and (float(norm.eps), bool(norm.zero_centered)) for norm in norms)
    static = _Static(rotary.q_heads, rotary.kv_heads, kinds, interpret)
    cache = cache._replace(slots=cache.slots.astype(jnp.int32))  # 8 bits have no comparison on chip
    weights = tuple(norm and norm.weight for norm in norms)
    return _write(static, heads, rotary.cos, rotary.sin, weights, cache)


def rope_into_cache_reference(heads, rotary, cache):
    """The mathematics in plain JAX."""
    return turn_and_write(heads, rotary, cache)


def why_not(heads, rotary, cache, *, device: Device | None = None) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    if reason := _compat.why_not_written():
        return reason
    if heads.dtype not in DTYPES:
        return f"takes bfloat16 or float16, got {heads.dtype}"
    if 0 in heads.shape:
        return f"nothing to turn: heads are {list(heads.shape)}"
    if not (half := rotary.cos.shape[-1]):
        return "nothing of a head is turned"
    rest = cache.k.shape[-1] - 2 * half
    for what, size in (("halves of what is turned", half), ("what is not turned", rest)):
        if size % GRAIN:
            return f"takes {what} of a head in multiples of {GRAIN}, got {size}"
    return None


@dataclasses.dataclass(frozen=True)
class _Static:
    """norms: (eps, whether it is zero-centred) of q's and of k's; None where there is none."""

    q_heads: int
    kv_heads: int
    norms: tuple[tuple[float, bool] | None, ...]
    interpret: bool


def _turned(static: _Static, heads, cos, sin, weights, cache):
    (rows, _), half, dtype = heads.shape, cos.shape[-1], heads.dtype
    n, k, width = static.q_heads, static.kv_heads, cache.k.shape[-1]
    rest = width - 2 * half
    vector = ACCESS_BYTES // ITEMSIZE
    line = ACROSS * vector
    layout = _compat.tiled_layout(
        ((GRAIN, line), (DOWN, line), (vector,)), warp_dims=(-5, -4), lane_dims=(-3, -2)
    )
    column = layout.reduce(1)

    def load(ref):
        value = ref[...] if static.interpret else _compat.load(ref, column, optimized=False)
        return value.astype(jnp.float32)

    def angle(ref):
        return load(ref).astype(dtype).astype(jnp.float32)

    def normed(ys, weight_refs, places):
        head, factors, eps, there = places.head, [0.0] * len(ys), 0.0, 0.0
        for begin, count, kind, ref in zip((0, n), (n, k), static.norms, weight_refs, strict=True):
            if kind is None:
                continue
            here = ((head >= begin) & (head < begin + count)).astype(jnp.float32)
            own = (load(ref.at[pl.ds(*piece)]) + float(kind[1]) for piece in places.pieces)
            factors = [factor + here * weight for factor, weight in zip(factors, own, strict=True)]
            eps, there = eps + here * kind[0], there + here
        squares = sum(jnp.sum(y * y) for y in ys) / width
        root = lax.rsqrt(squares + eps + (1 - there))  # a head without a norm may be of zeros
        return [y * (root * factor + (1 - there)) for y, factor in zip(ys, factors, strict=True)]

    def body(heads_ref, cos_ref, sin_ref, weight_refs, held, out_ref):
        row = lax.axis_index("row")
        places = HeadPlaces(lax.axis_index("head"), half, half, (n, k), rest)
        spans = zip(places.starts, places.pieces, strict=True)
        ys = [load(heads_ref.at[row, pl.ds(start, size)]) for start, (_, size) in spans]
        if any(static.norms):
            ys = normed(ys, weight_refs, places)
        turned = places.turned(ys, angle(cos_ref.at[row]), angle(sin_ref.at[row]))
        for whether, *targets in places.targets([out_ref], held, row):

            @pl.when(whether)
            def _(targets=targets):
                for y, target in zip(turned, targets, strict=True):
                    _compat.store(target, y.astype(dtype), interpret=static.interpret)

    held = _compat.hold(cache.k), _compat.hold(cache.v), cache.slots
    q = _compat.kernel(
        body,
        name="rope_into_cache",
        out_type=jax.ShapeDtypeStruct((rows, width * n), dtype),
        grid=(n + 2 * k, rows),
        grid_names=("head", "row"),
        interpret=static.interpret,
    )(heads, cos, sin, weights, held)
    return q, _compat.let_go(held[0]), _compat.let_go(held[1])


def _forward(static: _Static, *arrays: Any):
    return _write(static, *arrays), arrays


def _backward(static: _Static, arrays: Any, cotangents: Any):
    def plain(heads, cos, sin, weights, cache):
        norms = (
            kind and Norm(weight, *kind) for kind, weight in zip(static.norms, weights, strict=True)
        )
        rotary = Rotary(cos, sin, static.q_heads, static.kv_heads, *norms)
        return turn_and_write(heads, rotary, cache)

    return jax.vjp(plain, *arrays)[1](cotangents)


_write = jax.custom_vjp(_turned, nondiff_argnums=(0,))
_write.defvjp(_forward, _backward)
_write = jax.jit(_write, static_argnums=0)  # calls alike share one compiled kernel
