"""The kernels of `scale_softmax`: over whole rows, or two over the pieces of longer ones.

A row on chip takes its maximum, its sum and its quotients in registers. Of a longer row one kernel
finds each block's maximum and sum, online, and a second one writes. Imported only by softmax.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, rows
from pallas_kernels.rows import Part, Staged
from pallas_kernels.softmax_tiles import NUMBERS, Mask, Plan, Static, Tile, accesses, plan_of

LOG2_E = math.log2(math.e)  # the GPU has powers of two


def _run(
    static: Static,
    plan: Plan,
    name: str,
    step: Callable[..., Any],
    *,
    arrays: Sequence[jax.Array],
    mask: jax.Array | None = None,
    numbers: Sequence[jax.Array | None] = (),
    writes: bool = True,
    carry: tuple[float, ...] = (),
) -> list[jax.Array]:
    """Runs carry = step(index, arrays, out, mask, numbers, carry) for all tiles of arrays [M, S].

    The arrays have load(part), the mask too, `out` has store(part, value); it may lie over the
    first array, so a step loads a part before it stores it. `numbers` are references to float32 in
    device memory. Each number of the carry is a result [blocks] too: a block begins with the value
    given, and returns its last.
    """
    tile, width = plan.tile, arrays[0].shape[-1]
    runs = (width // tile.inner, tile.inner) if plan.stages else (width,)
    arrays = [x.reshape(-1, plan.rows, *runs) for x in arrays]
    masks = [] if mask is None else [plan.mask_view(mask) if plan.stages else mask]
    known = [n for n in numbers if n is not None]
    out_type = [jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)] * writes
    out_type += [jax.ShapeDtypeStruct((plan.blocks,), jnp.float32)] * len(carry)

    def body(*refs):
        refs = iter(refs)
        take = lambda n: [next(refs) for _ in range(n)]  # noqa: E731
        sources, mask_refs, taken = take(len(arrays)), take(len(masks)), iter(take(len(known)))
        targets, totals = take(writes), take(len(carry))
        held = [None if n is None else next(taken) for n in numbers]
        block = jax.lax.axis_index("block")
        if not plan.stages:
            tiles = [Tile(plan, ref, block) for ref in sources]
            masked = [Mask(plan, ref, block) for ref in mask_refs]
            target = Tile(plan, targets[0], block)
            step(block, tiles, target, masked[0] if masked else None, held, ())
            return

        def tile_step(slots, state):
            index, state = state
            staged = [Staged(slot) for slot in slots[: len(arrays)]]
            masked = [Mask(plan, slot, index) for slot in slots[len(arrays) :]]
            state = step(index, staged, staged[0], masked[0] if masked else None, held, state)
            return index + plan.blocks, state

        _, last = rows.stream(
            tile_step,
            tile=tile,
            tiles=plan.tiles,
            blocks=plan.blocks,
            stages=plan.stages,
            sources=[*sources, *mask_refs],
            targets=targets,
            buffers=take(len(arrays) + len(masks)),
            barrier=next(refs),
            carry=(block, tuple(map(jnp.float32, carry))),
            places=[plan.place] * len(arrays) + [plan.mask_place] * len(masks),
            chunk_of=lambda index: plan.at(index)[2],
        )
        for ref, value in zip(totals, last, strict=True):
            ref[block] = value

    scratch = [
        *(tile.buffer(x.dtype, plan.stages) for x in arrays),
        *[plan.mask_buffer for _ in masks],
        plgpu.Barrier(num_arrivals=len(arrays) + len(masks), num_barriers=plan.stages or 1),
    ]
    results = _compat.kernel(
        body,
        name=name,
        out_type=out_type,
        grid=(plan.blocks,),
        grid_names=("block",),
        scratch_types=scratch if plan.stages else [],
        approx_math=True,  # exp2 as the hardware has it: two float32 ulps
        interpret=static.interpret,
    )(*arrays, *masks, *known)
    return [x.reshape(-1, width) if writes and i == 0 else x for i, x in enumerate(results)]


def _kept(plan: Plan, static: Static, width: int, part: Part, index: Any, mask: Any) -> Any:
    """Which numbers of a part the mask, `causal` and the width let through; None: all."""
    tile = plan.tile
    _, row, chunk = plan.at(index)
    first = chunk * tile.inner
    rules = [] if mask is None else [mask.load(part) != 0]
    if static.queries or (mask is None and width % tile.padded):
        last = width - 1 - first - part.chunk * tile.inner
        if static.queries:  # what the part's first row sees
            last = last - static.queries + 1 + row + part.row
        # Access by access: their columns differ by what is known when compiling, a constant of the
        # comparison. The columns of the whole part would each take a register for good.
        pieces = accesses(part)
        narrow = dataclasses.replace(pieces[0], chunk=0)
        ahead = narrow.columns()
        if static.queries and part.rows > 1:
            ahead = ahead - narrow.lines()
        starts = [(piece.chunk - part.chunk) * tile.inner for piece in pieces]
        rules.append(jnp.concatenate([ahead <= last - start for start in starts], axis=1))
    return functools.reduce(jnp.logical_and, rules) if rules else None


def _scale(static: Static, numbers: Sequence[Any]) -> Any:
    return numbers[0][0] if static.scale is None else jnp.float32(static.scale)


def _or_zero(top: jax.Array) -> jax.Array:
    """A maximum to subtract, of a row that may have nothing to take it of."""
    return jnp.where(top == -jnp.inf, jnp.float32(0), top)


def _inverse(total: jax.Array) -> jax.Array:
    """1 over a sum, 0 where nothing was summed."""
    return jnp.where(total == 0, jnp.float32(0), 1 / total)


def _once(group: Sequence[Part], f: Callable[[Part], Any]) -> Callable[[Part], Any]:
    """f of any part of the group: kept in registers if the group is one part, else found anew."""
    if len(group) > 1:
        return f
    value = f(group[0])
    return lambda part: value


def forward(static: Static, x, number, mask):
    """The softmax of rows [M, S]; `number` is the scale [1] if the kernel does not know it."""
    width = x.shape[-1]
    plan = plan_of(static, width, x.dtype.itemsize, static.config)
    groups = plan.tile.groups(NUMBERS)

    def scores(part, index, arrays, mask, scale):
        if static.queries and not plan.stages:
            _, row, _ = plan.at(index)
            z = arrays[0].load_seen(part, width - static.queries + row + plan.tile.rows)
        else:
            z = arrays[0].load(part)
        z = z.astype(jnp.float32) * scale
        keep = _kept(plan, static, width, part, index, mask)
        return z if keep is None else jnp.where(keep, z, -jnp.inf)

    def whole(index, arrays, out, mask, numbers, carry):
        for group in groups:
            some_rows(group, index, arrays, out, mask, _scale(static, numbers))
        return carry

    def some_rows(group, index, arrays, out, mask, scale):
        z = _once(group, lambda part: scores(part, index, arrays, mask, scale))
        top = _or_zero(functools.reduce(jnp.maximum, [jnp.max(z(p), axis=1) for p in group]))
        e = _once(group, lambda part: jnp.exp2((z(part) - part.across(top)) * LOG2_E))
        inverse = _inverse(functools.reduce(jnp.add, [jnp.sum(e(p), axis=1) for p in group]))
        for part in group:
            out.store(part, (e(part) * part.across(inverse)).astype(x.dtype))

    def statistics(index, arrays, out, mask, numbers, carry):
        (group,), (top, total) = groups, carry
        scale = _scale(static, numbers)
        for part in group:
            z = scores(part, index, arrays, mask, scale)
            new = jnp.maximum(top, jnp.max(jnp.max(z, axis=1)))
            e = jnp.exp2((z - _or_zero(new)) * LOG2_E)
            total = total * jnp.exp2((top - _or_zero(new)) * LOG2_E) + jnp.sum(jnp.sum(e, axis=1))
            top = new
        return top, total

    def write(index, arrays, out, mask, numbers, carry):
        scale = _scale(static, numbers)
        tops, totals = ([ref[part] for part in plan.parts_of_row()] for ref in numbers[1:])
        top = _or_zero(functools.reduce(jnp.maximum, tops))
        shares = [n * jnp.exp2((t - top) * LOG2_E) for t, n in zip(tops, totals, strict=True)]
        inverse = _inverse(functools.reduce(jnp.add, shares))
        for part in groups[0]:
            z = scores(part, index, arrays, mask, scale)
            y = jnp.exp2((z - top) * LOG2_E) * inverse
            out.store(part, y.astype(x.dtype))
        return carry

    run = functools.partial(_run, static, plan, arrays=[x], mask=mask)
    if not plan.pieces:
        return run("scale_softmax", whole, numbers=[number])[0]
    found = run(
        "scale_softmax_statistics",
        statistics,
        numbers=[number],
        writes=False,
        carry=(-math.inf, 0.0),
    )
    return run("scale_softmax_write", write, numbers=[number, *found])[0]


def backward(static: Static, y, number, d_y):
    """The gradient to rows [M, S]; no mask is needed, for y is 0 there."""
    width, itemsize = y.shape[-1], y.dtype.itemsize
    plan = plan_of(static, width, itemsize, static.config)
    groups = plan.tile.groups(NUMBERS // 2)

    def load(part, arrays):
        p, d = (x.load(part).astype(jnp.float32) for x in arrays)
        return p, jnp.where(p == 0, jnp.float32(0), d)  # whatever d_y is where nothing was kept

    def whole(index, arrays, out, mask, numbers, carry):
        scale = _scale(static, numbers)
        for group in groups:
            some_rows(group, arrays, out, scale)
        return carry

    def some_rows(group, arrays, out, scale):
        both = _once(group, lambda part: load(part, arrays))
        along = [jnp.sum(p * d, axis=1) for p, d in map(both, group)]
        along = functools.reduce(jnp.add, along)
        for part in group:
            p, d = both(part)
            d_x = scale * (p * (d - part.across(along)))
            out.store(part, d_x.astype(y.dtype))

    def statistics(index, arrays, out, mask, numbers, carry):
        (along,) = carry
        for part in groups[0]:
            p, d = load(part, arrays)
            along = along + jnp.sum(jnp.sum(p * d, axis=1))
        return (along,)

    def write(index, arrays, out, mask, numbers, carry):
        scale = _scale(static, numbers)
        along = functools.reduce(jnp.add, [numbers[1][part] for part in plan.parts_of_row()])
        for part in groups[0]:
            p, d = load(part, arrays)
            out.store(part, (scale * (p * (d - along))).astype(y.dtype))
        return carry

    run = functools.partial(_run, static, plan, arrays=[y, d_y])
    if not plan.pieces:
        return run("scale_softmax_backward", whole, numbers=[number])[0]
    found = run("scale_softmax_backward_statistics", statistics, writes=False, carry=(0.0,))
    return run("scale_softmax_backward_write", write, numbers=[number, *found])[0]
