"""The kernels of `scale_softmax`: over whole rows, or over shares of longer ones.

A row that one block has takes its maximum, its sum and its quotients in registers. Of a longer row
each block of a cluster has a share: it takes the exponentials around the share's own maximum, and
writes them when the blocks have shown each other their maxima and sums. What a thread's registers
do not hold of it is read anew from shared memory. Imported only by softmax.py.
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
from pallas_kernels.cluster import meet_blocks
from pallas_kernels.device import LOG2E, THREADS
from pallas_kernels.rows import Part, Staged
from pallas_kernels.softmax_tiles import KEPT, NUMBERS, Mask, Plan, Static, Tile, accesses, plan_of

SMALLEST, LARGEST = (float(x) for x in (jnp.finfo(jnp.float32).tiny, jnp.finfo(jnp.float32).max))


def _run(
    static: Static,
    plan: Plan,
    name: str,
    step: Callable[..., None],
    *,
    arrays: Sequence[jax.Array],
    mask: jax.Array | None = None,
    number: jax.Array | None = None,
    shown: int = 1,
) -> jax.Array:
    """Runs step(index, arrays, out, mask, number, meet) for all tiles of arrays [M, S]; [M, S].

    The arrays have load(part), the mask too, `out` has store(part, value); it may lie over the
    first array, so a step loads a part before it stores it. `number` is a reference to float32 [1]
    in device memory. meet(numbers), of `shown` numbers and once a step: for each number those of
    all blocks that share the row.
    """
    tile, width = plan.tile, arrays[0].shape[-1]
    cut = (width // tile.inner, tile.inner) if plan.stages else (width,)
    arrays = [x.reshape(-1, plan.rows, plan.apart, *cut) for x in arrays]
    masks = [] if mask is None else [plan.mask_view(mask) if plan.stages else mask]
    together = plan.cluster > 1

    def body(*refs):
        refs = iter(refs)
        take = lambda n: [next(refs) for _ in range(n)]  # noqa: E731
        sources, mask_refs = take(len(arrays)), take(len(masks))
        scale_ref = None if number is None else next(refs)
        target = next(refs)
        block = jax.lax.axis_index("block")
        *buffers, arrived = take(len(arrays) + len(masks) + 1) if plan.stages else [None]
        shared = take(2) if together else []

        def meet(turn, numbers):
            if not together:
                return [[number] for number in numbers]
            board, meeting = shared
            for i, number in enumerate(numbers):
                board[turn, i] = number
            meet_blocks(meeting)
            peers = [
                plgpu.cluster_ref(board, {"rank": jnp.int32(rank)}) for rank in range(plan.cluster)
            ]
            return [[peer[turn, i] for peer in peers] for i in range(len(numbers))]

        def tile_step(slots, state):
            index, turn = state
            staged = [Staged(slot) for slot in slots[: len(arrays)]]
            masked = [Mask(plan, slot, index) for slot in slots[len(arrays) :]]
            others = functools.partial(meet, turn)
            step(index, staged, staged[0], masked[0] if masked else None, scale_ref, others)
            return index + plan.blocks, 1 - turn

        if plan.stages:
            rows.stream(
                tile_step,
                tile=tile,
                tiles=plan.tiles,
                blocks=plan.blocks,
                stages=plan.stages,
                sources=[*sources, *mask_refs],
                targets=[target],
                buffers=buffers,
                barrier=arrived,
                carry=(block, jnp.int32(0)),
                places=[plan.place] * len(arrays) + [plan.mask_place] * len(masks),
                chunk_of=lambda index: plan.at(index)[2],
                row_of=lambda index: plan.at(index)[1],
                count=plan.rows,
            )
        else:
            tiles = [Tile(plan, ref, block) for ref in sources]
            masked = [Mask(plan, ref, block) for ref in mask_refs]
            out, others = Tile(plan, target, block), functools.partial(meet, 0)
            step(block, tiles, out, masked[0] if masked else None, scale_ref, others)
        if together:  # no block may go while others read what it shows
            meet_blocks(shared[1])

    scratch: list[Any] = []
    if plan.stages:
        scratch += [tile.buffer(x.dtype, plan.stages) for x in arrays]
        scratch += [plan.mask_buffer for _ in masks]
        count = rows.arrivals(*scratch)
        scratch.append(plgpu.Barrier(num_arrivals=count, num_barriers=plan.stages))
    clusters: dict[str, Any] = {}
    if together:
        scratch.append(plgpu.SMEM((2, shown), jnp.float32))  # steps take turns
        scratch.append(plgpu.ClusterBarrier(collective_axes=("rank",)))
        clusters = {"cluster": (plan.cluster,), "cluster_names": ("rank",)}
    result = _compat.kernel(
        body,
        name=name,
        out_type=jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype),
        grid=(plan.blocks,),
        grid_names=("block",),
        scratch_types=scratch,
        approx_math=True,  # exp2 as the hardware has it: two float32 ulps
        interpret=static.interpret,
        **clusters,
    )(*arrays, *masks, *([] if number is None else [number]))
    return result.reshape(-1, width)


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


def _scale(static: Static, number: Any) -> Any:
    return number[0] if static.scale is None else jnp.float32(static.scale)


def _or_zero(top: jax.Array) -> jax.Array:
    """A maximum to subtract, of a row that may have nothing to take it of."""
    return jnp.where(top == -jnp.inf, jnp.float32(0), top)


def _inverse(total: jax.Array) -> jax.Array:
    """1 over a sum, 0 where nothing was summed."""
    return jnp.where(total == 0, jnp.float32(0), 1 / total)


def _over(group: Sequence[Part], value: Callable[[Part], Any], both: Any, of_all: Any) -> jax.Array:
    """The sum or maximum of the parts of a row: `both` of two values, for parts of one shape before
    their threads meet, and `of_all` of one.
    """
    found: dict[tuple[int, ...], jax.Array] = {}
    for part in group:
        one = value(part)
        found[one.shape] = both(found[one.shape], one) if one.shape in found else one
    return functools.reduce(both, [of_all(of_all(one, axis=1)) for one in found.values()])


def _at_once(plan: Plan, arrays: int) -> int:
    """Numbers of a share that a thread holds of each array: all, or some that it reads anew."""
    numbers = plan.tile.padded // THREADS
    return numbers if numbers * arrays <= KEPT else NUMBERS // 2


def _once(group: Sequence[Part], f: Callable[[Part], Any]) -> Callable[[Part], Any]:
    """f of any part of the group: kept in registers if the group is one part, else found anew."""
    if len(group) > 1:
        return f
    value = f(group[0])
    return lambda part: value


def left_to_exponent(scale: float | None) -> float | None:
    """The exponent's factor of a known scale above 0, which moves no maximum; None: another scale.

    One that float32 has as 0 or as infinite would make NaN of what is masked, or of the maximum.
    """
    factor = LOG2E * (scale or 0.0)
    return factor if SMALLEST <= factor <= LARGEST else None


def forward(static: Static, x, number, mask):
    """The softmax of rows [M, S]; `number` is the scale [1] if the kernel does not know it."""
    width = x.shape[-1]
    itemsize = x.dtype.itemsize
    plan = plan_of(static, width, itemsize, itemsize + (mask is not None))
    groups = plan.tile.groups(_at_once(plan, 1) if plan.cluster else NUMBERS)
    left = left_to_exponent(static.scale)
    is_left, factor = left is not None, left or LOG2E

    def scores(part, index, arrays, mask, scale):
        if static.queries and not plan.stages:
            _, row, chunk = plan.at(index)
            seen = width - static.queries + row + plan.tile.rows
            z = arrays[0].load_seen(part, seen - chunk * plan.tile.inner)
        else:
            z = arrays[0].load(part)
        z = z.astype(jnp.float32)
        z = z if is_left else z * scale
        keep = _kept(plan, static, width, part, index, mask)
        return z if keep is None else jnp.where(keep, z, -jnp.inf)

    def whole(index, arrays, out, mask, number, meet):
        del meet
        for group in groups:
            some_rows(group, index, arrays, out, mask, _scale(static, number))

    def some_rows(group, index, arrays, out, mask, scale):
        z = _once(group, lambda part: scores(part, index, arrays, mask, scale))
        top = _or_zero(functools.reduce(jnp.maximum, [jnp.max(z(p), axis=1) for p in group]))
        e = _once(group, lambda part: jnp.exp2((z(part) - part.across(top)) * factor))
        inverse = _inverse(functools.reduce(jnp.add, [jnp.sum(e(p), axis=1) for p in group]))
        for part in group:
            out.store(part, (e(part) * part.across(inverse)).astype(x.dtype))

    def shared(index, arrays, out, mask, number, meet):
        (group,), scale = groups, _scale(static, number)

        z = _once(group, lambda part: scores(part, index, arrays, mask, scale))
        mine = _over(group, z, jnp.maximum, jnp.max)
        e = _once(group, lambda part: jnp.exp2((z(part) - _or_zero(mine)) * factor))
        tops, totals = meet([mine, _over(group, e, jnp.add, jnp.sum)])
        top = _or_zero(functools.reduce(jnp.maximum, tops))
        shares = [n * jnp.exp2((t - top) * factor) for t, n in zip(tops, totals, strict=True)]
        inverse = _inverse(functools.reduce(jnp.add, shares))
        own = jnp.exp2((mine - top) * factor) * inverse
        for part in group:
            out.store(part, (e(part) * own).astype(x.dtype))

    step = shared if plan.cluster else whole
    return _run(static, plan, "scale_softmax", step, arrays=[x], mask=mask, number=number, shown=2)


def backward(static: Static, y, number, d_y):
    """The gradient to rows [M, S]; no mask is needed, for y is 0 there."""
    width, itemsize = y.shape[-1], y.dtype.itemsize
    plan = plan_of(static, width, itemsize, 2 * itemsize)
    groups = plan.tile.groups(_at_once(plan, 2) if plan.cluster else NUMBERS // 2)

    def load(part, arrays):
        p, d = (x.load(part).astype(jnp.float32) for x in arrays)
        return p, jnp.where(p == 0, jnp.float32(0), d)  # whatever d_y is where nothing was kept

    def whole(index, arrays, out, mask, number, meet):
        del index, mask, meet
        for group in groups:
            some_rows(group, arrays, out, _scale(static, number))

    def some_rows(group, arrays, out, scale):
        both = _once(group, lambda part: load(part, arrays))
        along = [jnp.sum(p * d, axis=1) for p, d in map(both, group)]
        along = functools.reduce(jnp.add, along)
        for part in group:
            p, d = both(part)
            d_x = scale * (p * (d - part.across(along)))
            out.store(part, d_x.astype(y.dtype))

    def shared(index, arrays, out, mask, number, meet):
        del index, mask
        (group,), scale = groups, _scale(static, number)
        both = _once(group, lambda part: load(part, arrays))
        mine = _over(group, lambda part: math.prod(both(part)), jnp.add, jnp.sum)
        [sums] = meet([mine])
        along = functools.reduce(jnp.add, sums)
        for part in group:
            p, d = both(part)
            out.store(part, (scale * (p * (d - along))).astype(y.dtype))

    step = shared if plan.cluster else whole
    return _run(static, plan, "scale_softmax_backward", step, arrays=[y, d_y], number=number)
