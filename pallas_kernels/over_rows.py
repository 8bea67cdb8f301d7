"""`over_rows`: a step of a kernel over all rows of arrays [M, D], sums over rows included.

Its step sees a `Group` of parts of whole rows, which lie in device memory (`Tile`, `Row`: a block
a tile, no stream) or, brought by `rows.stream`, on chip (`rows.Staged`, `StagedRow`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, rows
from pallas_kernels.device import SHARED_BYTES, THREADS
from pallas_kernels.rows import Config, Part, RowTile, Staged

MARGIN_BYTES = 4096  # on chip beside tiles and weights: barriers, scratch for sums, alignment


@dataclasses.dataclass(frozen=True)
class StagedRow:
    """A row in shared memory, such as a weight, or a warpgroup's share of it."""

    ref: Any

    def load(self, part: Part) -> jax.Array:
        """The part's columns under each other: [rows, columns]."""
        ref = self.ref.at[pl.ds(part.chunk, part.chunks)]
        if part.tile.interpret:
            return part.down(ref[...].reshape(part.shape[1]))
        ref = ref.reshape(part.shape[1])
        return part.down(_compat.load(ref, part.tile.layout.reduce(0), optimized=False))


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile in device memory, for `Config.stages` 0: parts like those of `Staged`."""

    ref: Any
    first_row: Any

    def load(self, part: Part) -> jax.Array:
        if part.tile.interpret:
            return self._of(part)[...]
        return _compat.load(self._of(part), part.tile.layout, optimized=False)

    def store(self, part: Part, value: jax.Array) -> None:
        self._of(part)[...] = value

    def _of(self, part: Part) -> Any:
        column = (part.tile.first_chunk + part.chunk) * part.tile.inner
        return self.ref.at[
            pl.ds(self.first_row + part.row, part.rows), pl.ds(column, part.shape[1])
        ]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row in device memory, likewise."""

    ref: Any

    def load(self, part: Part) -> jax.Array:
        """The part's columns under each other: [rows, columns]."""
        column = (part.tile.first_chunk + part.chunk) * part.tile.inner
        ref = self.ref.at[pl.ds(column, part.shape[1])]
        if part.tile.interpret:
            return part.down(ref[...])
        return part.down(_compat.load(ref, part.tile.layout.reduce(0), optimized=False))


class Group:
    """The parts of some whole rows, or of the share of them that a warpgroup has."""

    def __init__(self, parts: Sequence[Part], add: Callable[..., list[jax.Array]]):
        self.parts = tuple(parts)
        self._add = add

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __getitem__(self, index: int) -> Part:
        return self.parts[index]

    def sum(self, values: Iterable[jax.Array]) -> jax.Array:
        """The sum of each row ([rows], or a scalar), of one array [rows, columns] a part."""
        return self.sums(values)[0]

    def sums(self, *columns: Iterable[jax.Array]) -> list[jax.Array]:
        """Several such sums, for which threads meet once.

        Parts of one shape are added first: threads meet once a row, not once a part.
        """
        shares = []
        for values in columns:
            totals: dict[tuple[int, ...], jax.Array] = {}
            for value in values:
                shape = value.shape
                totals[shape] = totals[shape] + value if shape in totals else value
            shares.append(tuple(totals.values()))
        return self._add(shares)


def over_rows(
    step: Callable[..., Any],
    *,
    name: str,
    inputs: Sequence[jax.Array],
    weights: Sequence[jax.Array] = (),
    outputs: Sequence[Any],
    sums: int = 0,
    row_sums: int,
    meetings: int = 1,
    config: Config | None,
    num_sms: int,
    interpret: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs sums = step(group, inputs, weights, outputs, sums) for all rows of the inputs [M, D].

    `group` is a `Group` of parts, inputs and outputs have load(part) and store(part, value),
    weights [D] load(part). `outputs` are the dtypes of the results [M, D]; output j is written over
    input j on chip, of the same dtype, so a step loads a part before it stores it. Each of the
    `sums` is a list, a part its entry: float32 [rows, columns], which the step adds to; a step
    asks for at most `row_sums` sums of a row, and meets for them `meetings` times.
    Returns the outputs and, for each sum, rows [some, D] that are still to be added up.
    """
    assert all(x.dtype == dtype for x, dtype in zip(inputs, outputs, strict=False)), name
    count, width = inputs[0].shape
    sizes = [x.dtype.itemsize for x in inputs]
    if config is None:
        config = rows.default_config(
            width,
            min(sizes),
            count,
            array_bytes=sum(sizes),
            held_bytes=sum(w.dtype.itemsize for w in weights),
            num_sms=num_sms,
            sums=sums,
            meetings=meetings,
        )
    tile = rows.row_tile(
        width,
        min(sizes),
        repeat=config.repeat,
        warpgroups=config.warpgroups,
        interpret=interpret,
    )
    if (sums and not config.stages) or not rows.fits(config, width, min(sizes), count):
        raise NotImplementedError(
            f"{name}: cannot run this call: {config} has no stream, which takes rows that fill the "
            f"threads, {tile.rows} at a time, and no sums over rows; got {count} rows of {width}"
        )
    held_bytes = sum(w.dtype.itemsize for w in weights)
    size_bytes = config.stages * tile.rows * tile.padded * sum(sizes) + tile.padded * held_bytes
    if config.stages and size_bytes > SHARED_BYTES - MARGIN_BYTES:
        raise NotImplementedError(
            f"{name}: cannot run this call: {config} takes {size_bytes} bytes on chip for rows of "
            f"{width}, more than {SHARED_BYTES - MARGIN_BYTES}"
        )
    groups = tile.groups(rows.NUMBERS)
    shared: list[Any] = []
    if tile.warpgroups > 1:
        shared = [
            plgpu.SMEM((2, len(groups) * row_sums, tile.warpgroups), jnp.float32),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=tile.warpgroups),
        ]
    run = functools.partial(
        _compat.kernel,
        name=name,
        grid_names=("block",),
        num_threads=tile.warpgroups,
        thread_name="warpgroup",
        interpret=interpret,
    )

    def steps(ins, held, outs, totals, meeting, turn):
        """All groups of a tile; shares of a row's sum meet in a place of their own."""
        places = itertools.count()

        def add(shares):
            def own():
                return [
                    functools.reduce(operator.add, (jnp.sum(x, axis=1) for x in share))
                    for share in shares
                ]

            if not meeting:
                return own()
            board, order, barrier = meeting
            mine = jax.lax.axis_index("warpgroup")
            # JAX has one scratch for sums over warps: the second warpgroup waits for the first,
            # which has waited for it at the end of the sums before.
            pl.when(mine == 1)(lambda: plgpu.barrier_wait(order))
            lines = [board.at[turn, next(places)] for _ in shares]
            for line, share in zip(lines, own(), strict=True):
                line[mine] = jnp.sum(share)  # of one row: as a scalar
            pl.when(mine == 0)(lambda: plgpu.barrier_arrive(order))
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
            return [line[0] + line[1] for line in lines]

        for parts in groups:
            totals = step(Group(parts, add), ins, held, outs, totals)
        return totals

    if config.stages == 0:

        def whole_tile(*refs):
            take = _taker(refs)
            ins, held, outs, meeting = map(
                take, (len(inputs), len(weights), len(outputs), len(shared))
            )
            first = jax.lax.axis_index("block") * tile.rows
            steps(
                [Tile(ref, first) for ref in ins],
                [Row(ref) for ref in held],
                [Tile(ref, first) for ref in outs],
                [],
                meeting,
                0,
            )

        out_type = [jax.ShapeDtypeStruct((count, width), dtype) for dtype in outputs]
        kernel = run(
            whole_tile, out_type=out_type, grid=(count // tile.rows,), scratch_types=shared
        )
        return kernel(*inputs, *weights), []

    tiles = -(-count // tile.rows)
    blocks = min(tiles, num_sms * config.blocks_per_sm)
    view = tile.view(inputs[0]).shape
    out_type = [jax.ShapeDtypeStruct(view, dtype) for dtype in outputs]
    line = max(tile.padded, THREADS)  # of narrower rows, a register load takes several
    out_type += [jax.ShapeDtypeStruct((blocks, line), jnp.float32)] * sums
    lines = [plgpu.SMEM((tile.rows * tile.padded // line, line), jnp.float32)]
    lines *= bool(sums and tile.warps[0] > 1)

    def streamed(*refs):
        take = _taker(refs)
        ins, weight_refs, outs, sum_refs = map(
            take, (len(inputs), len(weights), len(outputs), sums)
        )
        buffers, weight_rows, lines_ref, meeting, (barrier, *weight_barrier) = map(
            take, (len(inputs), len(weights), len(lines), len(shared), 1 + bool(weights))
        )
        mine = 0 if tile.warpgroups == 1 else jax.lax.axis_index("warpgroup")
        buffers, weight_rows = ([ref.at[mine] for ref in refs] for refs in (buffers, weight_rows))
        for ref, row in zip(weight_refs, weight_rows, strict=True):
            plgpu.copy_gmem_to_smem(_whole(ref, tile), row, weight_barrier[0].at[mine])
        if weights:
            plgpu.barrier_wait(weight_barrier[0].at[mine])
        on_chip = [StagedRow(row) for row in weight_rows]

        def tile_step(slots, carry):
            turn, totals = carry
            staged = [Staged(ref) for ref in slots]
            totals = steps(staged, on_chip, staged[: len(outputs)], totals, meeting, turn)
            return 1 - turn, totals

        _, totals = rows.stream(
            tile_step,
            tile=tile,
            tiles=tiles,
            blocks=blocks,
            stages=config.stages,
            sources=ins,
            targets=outs,
            buffers=buffers,
            barrier=barrier,
            first_barrier=mine * config.stages,
            carry=(jnp.int32(0), [[part.zeros() for part in groups[0]] for _ in range(sums)]),
        )
        for ref, total in zip(sum_refs, totals, strict=True):
            ref = ref.at[jax.lax.axis_index("block")]
            if lines:
                _add_lines(total[0], groups[0][0], lines_ref[0], ref)
                continue
            for part, columns in zip(groups[0], total, strict=True):
                column = (tile.first_chunk + part.chunk) * tile.inner
                ref[pl.ds(column, part.shape[1])] = jnp.sum(columns, axis=0)

    kernel = run(
        streamed,
        out_type=out_type,
        grid=(blocks,),
        scratch_types=[
            *(tile.buffer(x.dtype, tile.warpgroups, config.stages) for x in inputs),
            *(tile.row_buffer(w.dtype, tile.warpgroups) for w in weights),
            *lines,
            *shared,
            plgpu.Barrier(num_arrivals=len(inputs), num_barriers=tile.warpgroups * config.stages),
            *[
                plgpu.Barrier(num_arrivals=len(weights), num_barriers=tile.warpgroups)
                for _ in weights[:1]
            ],
        ],
    )
    results = kernel(*map(tile.view, inputs), *map(tile.view, weights))
    return (
        [x.reshape(-1, width) for x in results[: len(outputs)]],
        [x.reshape(-1, tile.padded)[:, :width] for x in results[len(outputs) :]],
    )


def _taker(refs: Sequence[Any]) -> Callable[[int], list[Any]]:
    """Hands out the references of a kernel's body from left to right."""
    rest = iter(refs)
    return lambda n: [next(rest) for _ in range(n)]


def _add_lines(total: jax.Array, part: Part, lines: Any, target: Any) -> None:
    """Adds up the rows of a part, which lie in different warps, by way of shared memory."""
    if part.tile.interpret:
        lines[...] = total.reshape(lines.shape)
    else:
        lines.reshape(*part.shape)[...] = total
    first = lines[0]
    target[...] = jax.lax.fori_loop(1, lines.shape[0], lambda i, line: line + lines[i], first)


def _whole(ref: Any, tile: RowTile) -> Any:
    """A row [n, inner] in device memory, with what lies outside cut off."""
    return ref.at[pl.ds(tile.unknown_first_chunk, tile.chunks)]
