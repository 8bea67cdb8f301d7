"""The kernel of `gemv`: a block's outputs, of one row of x.

A warp has some rows of the weight at a time, 16 bytes a thread, and adds up along them. The weight
is asked for first; while it is on its way every block makes norm(x) anew in its shared memory.
Imported only by gemv.py.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, LANES, THREADS, WARPS
from pallas_kernels.head_places import HeadPlaces
from pallas_kernels.matmul_finish import GATES

ITEMSIZE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Outputs of each half that a block owns, and inputs that it asks for at once."""

    outputs: int
    inputs: int


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for; eps and zero_centered: of the norm, if there is one."""

    config: Config
    interpret: bool
    out_dtype: str
    epilogue: str | None
    eps: float = 0.0
    zero_centered: bool = False
    heads: tuple[int, int] = (0, 0)  # of q, of k


def lanes_across(i: int) -> int:
    """Lanes that share a row of the weight, so that whole accesses fill it."""
    return next(n for n in (32, 16) if i % (n * ACCESS_BYTES // ITEMSIZE) == 0)


def grain(i: int) -> int:
    """Outputs that the warps of a block have at a time, for i inputs."""
    return WARPS * LANES // lanes_across(i)


def products(static: Static, x, weight, norm, bias, residual, angles, cache):
    """What `gemv` returns, of x [1, I] and the weight [O, I].

    norm: the norm's weight [I]; angles: cos and sin, [1, H / 2] each.
    """
    config, interpret = static.config, static.interpret
    dtype, out_dtype = x.dtype, jnp.dtype(static.out_dtype)
    o, i = weight.shape
    half = angles[0].shape[1] if angles else o // 2 if static.epilogue else o
    across, vector = lanes_across(i), ACCESS_BYTES // ITEMSIZE
    down, line = LANES // across, across * vector
    lines, step = i // line, config.inputs // line
    layout = _compat.tiled_layout(
        ((WARPS * down, line), (down, line), (vector,)), warp_dims=(-5, -4), lane_dims=(-3, -2)
    )
    each = math.gcd(i // THREADS, vector)  # numbers of x side by side in a thread
    along = plgpu.Layout.WG_STRIDED((i,), vec_size=each)

    def load(ref, of):
        return ref[...] if interpret else _compat.load(ref, of, optimized=False)

    def wide(ref, of):
        return load(ref, of).astype(jnp.float32)

    def lay_out(value):
        return value if interpret else plgpu.layout_cast(value, layout)

    def prepared(x_ref, norm_ref):
        """norm(x), rounded."""
        row = wide(x_ref.at[0], along)
        if norm_ref is None:
            return row.astype(dtype)
        scale = lax.rsqrt(jnp.sum(row * row) / i + static.eps)
        weights = wide(norm_ref, along)
        if static.zero_centered:
            return (row * scale * (1.0 + weights)).astype(dtype)
        weights = weights.astype(dtype).astype(jnp.float32)
        return ((row * scale).astype(dtype).astype(jnp.float32) * weights).astype(dtype)

    def body(x_ref, weight_ref, norm_ref, bias_ref, residual_ref, angle_refs, held, *rest):
        *out_refs, x_s = rest
        block = lax.axis_index("block")
        places = HeadPlaces(block, config.outputs, half, static.heads)
        start = block * config.outputs
        if angles:
            starts = places.starts
        else:
            starts = [start] if static.epilogue is None else [start, start + half]

        def fetch(first, count):
            return [
                [
                    load(
                        weight_ref.at[
                            pl.ds(start, config.outputs), pl.ds((first + n) * line, line)
                        ],
                        layout,
                    )
                    for n in range(count)
                ]
                for start in starts
            ]

        def multiply(weights, first, sums):
            for n in range(len(weights[0])):
                left = wide(x_s.at[pl.ds((first + n) * line, line)], layout.reduce(0))
                left = lay_out(lax.broadcast_in_dim(left, (config.outputs, line), (1,)))
                sums = [
                    total + left * part[n].astype(jnp.float32)
                    for part, total in zip(weights, sums, strict=True)
                ]
            return sums

        ahead = fetch(0, min(step, lines))
        x_s[...] = prepared(x_ref, norm_ref)
        plgpu.commit_smem()  # all threads have written
        zeros = lay_out(jnp.zeros((config.outputs, line), jnp.float32))
        sums = multiply(ahead, 0, [zeros for _ in starts])
        if lines > step:
            whole = lines // step
            sums = lax.fori_loop(
                1, whole, lambda n, s: multiply(fetch(n * step, step), n * step, s), sums
            )
            sums = multiply(fetch(whole * step, lines % step), whole * step, sums)
        place = pl.ds(starts[0], config.outputs)
        ys = [jnp.sum(total, axis=1) for total in sums]
        column = layout.reduce(1)
        if bias_ref is not None:
            ys = [
                y + wide(bias_ref.at[pl.ds(start, config.outputs)], column)
                for y, start in zip(ys, starts, strict=True)
            ]
        if static.epilogue in GATES:
            ys = [GATES[static.epilogue](ys[0]) * ys[1]]
        if static.epilogue == "rope":
            here = pl.ds(places.first, config.outputs)
            cos, sin = (rounded(wide(ref.at[0, here], column)) for ref in angle_refs)
            ys = places.turned(map(rounded, ys), cos, sin)
        if residual_ref is not None:
            ys = [ys[0] + wide(residual_ref.at[0, place], column)]
        if angles:
            found = places.targets(out_refs, held, 0)
        else:
            found = [(block >= 0, out_refs[0].at[0, place])]
        for wanted, *targets in found:

            @pl.when(wanted)
            def _(targets=targets):
                for y, target in zip(ys, targets, strict=True):
                    _compat.store(target, y.astype(out_dtype), interpret=interpret)

    def rounded(y):
        return y.astype(dtype).astype(jnp.float32)

    widths = [o // 2 if static.epilogue in GATES else o]
    if angles:
        widths = [2 * half * static.heads[0], 4 * half * static.heads[1]]
    held = None
    if cache is not None:
        widths.pop()
        held = _compat.hold(cache.k), _compat.hold(cache.v), cache.slots
    results = _compat.kernel(
        body,
        name="gemv_" + "norm_" * (norm is not None) + (static.epilogue or "plain"),
        out_type=[jax.ShapeDtypeStruct((1, width), out_dtype) for width in widths],
        scratch_types=[plgpu.SMEM((i,), dtype)],
        grid=(o // (config.outputs * (1 if static.epilogue is None else 2)),),
        grid_names=("block",),
        interpret=interpret,
        approx_math=True,
    )(x, weight, norm, bias, residual, angles, held)
    if held is not None:
        return results[0], _compat.let_go(held[0]), _compat.let_go(held[1])
    return tuple(results) if angles else results[0]
