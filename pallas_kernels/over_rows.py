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
from pallas_kernels.rows import MARGIN_BYTES, Config, Part, RowTile, Staged


@dataclasses.dataclass(frozen=True)
class StagedRow:
    """A row in shared memory, such as a weight, or a warpgroup's share of it."""

    ref: Any

    def load(self, part: Part) -> jax.Array:
        """The part's columns under each other, as the rows lie."""
        ref = self.ref.at[pl.ds(part.chunk, part.chunks)]
        if part.tile.lines > 1:
            if part.tile.interpret:
                return ref[...].reshape(part.shape)
            return _compat.load(ref.reshape(*part.shape), part.tile.layout, optimized=False)
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
        return _load(self._of(part), part)

    def store(self, part: Part, value: jax.Array) -> None:
        _store(self._of(part), part, value)

    def _of(self, part: Part) -> Any:
        row = self.first_row + part.row
        return self.ref.at[row if part.tile.lines > 1 else pl.ds(row, part.rows), _columns(part)]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row in device memory, likewise."""

    ref: Any

    def load(self, part: Part) -> jax.Array:
        """The part's columns under each other, as the rows lie."""
        ref = self.ref.at[_columns(part)]
        if part.tile.lines > 1:
            return _load(ref, part)
        if part.tile.interpret:
            return part.down(ref[...])
        return part.down(_compat.load(ref, part.tile.layout.reduce(0), optimized=False))


def _columns(part: Part) -> Any:
    """Of an array in device memory."""
    first = (part.tile.first_chunk + part.chunk) * part.tile.inner
    return pl.ds(first, part.chunks * part.tile.inner)


def _load(ref: Any, part: Part) -> jax.Array:
    """A part from device memory: [rows, columns], or [columns] if it lies in lines."""
    if part.tile.interpret:
        return ref[...].reshape(part.shape)
    ref = ref if part.tile.lines == 1 else ref.reshape(*part.shape)
    return _compat.load(ref, part.tile.layout, optimized=False)


def _store(ref: Any, part: Part, value: jax.Array) -> None:
    """The other way."""
    if part.tile.lines == 1:
        _compat.store(ref, value, interpret=part.tile.interpret)
    elif part.tile.interpret:
        ref[...] = value.reshape(-1)
    else:
        ref.reshape(*part.shape)[...] = value


class Group:
    """The parts of some whole rows, or of the share of them that a warpgroup has."""

    def __init__(self, parts: Sequence[Part], meet: Callable[..., list[list[jax.Array]]]):
        self.parts = tuple(parts)
        self._meet = meet

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
        """Several such sums, for which threads meet once."""
        return [functools.reduce(operator.add, shares) for shares in self.shares(*columns)]

    def shares(
        self, *columns: Iterable[jax.Array], numbers: Sequence[jax.Array] = ()
    ) -> list[list[jax.Array]]:
        """The sums of each warpgroup that shares the row, and behind them its own `numbers`.

        Parts of one shape are added first: threads meet once a row, not once a part.
        """
        sums = []
        for values in columns:
            totals: dict[tuple[int, ...], jax.Array] = {}
            for value in values:
                shape = value.shape
                totals[shape] = totals[shape] + value if shape in totals else value
            lines = [jnp.sum(total, axis=1) for total in totals.values()]
            sums.append(functools.reduce(operator.add, lines))
        return self._meet(sums, numbers)


def over_rows(
    step: Callable[..., Any],
    *,
    name: str,
    inputs: Sequence[jax.Array],
    weights: Sequence[jax.Array] = (),
    outputs: Sequence[Any],
    sums: int = 0,
    row_sums: int,
    config: Config | None,
    num_sms: int,
    interpret: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs sums = step(group, inputs, weights, outputs, sums) for all rows of the inputs [M, D].

    `group` is a `Group` of parts, inputs and outputs have load(part) and store(part, value),
    weights [D] load(part). `outputs` are the dtypes of the results [M, D]; output j is written over
    input j on chip, of the same dtype, so a step loads a part before it stores it. Each of the
    `sums` is a list, a part its entry: float32 [rows, columns], which the step adds to; a step
    asks for at most `row_sums` sums of a row.
    Returns the outputs and the sums [D], whose shares XLA adds up in a fixed order.
    """
    assert all(x.dtype == dtype for x, dtype in zip(inputs, outputs, strict=False)), name
    count, width = inputs[0].shape
    sizes = [x.dtype.itemsize for x in inputs]
    held_bytes = sum(w.dtype.itemsize for w in weights)
    if config is None:
        config = rows.default_config(
            width,
            min(sizes),
            count,
            array_bytes=sum(sizes),
            held_bytes=held_bytes,
            num_sms=num_sms,
            sums=sums,
        )
    tile = rows.row_tile(
        width,
        min(sizes),
        repeat=config.repeat,
        warpgroups=config.warpgroups,
        # A block that comes and goes sums faster as JAX does it: LayerNorm of 8192 x 8192 bfloat16,
        # when it came here, took 71.8 us so, 73.7 in lines; a stream gains by lines (its backward
        # pass: 164 to 109).
        in_lines=config.stages > 0 or config.warpgroups > 1,
        interpret=interpret,
    )
    if (sums and not config.stages) or not rows.fits(config, width, min(sizes), count):
        raise NotImplementedError(
            f"{name}: cannot run this call: {config} has no stream, which takes rows that fill the "
            f"threads, {tile.rows} at a time, and no sums over rows; got {count} rows of {width}"
        )
    size_bytes = config.stages * tile.rows * tile.padded * sum(sizes) + tile.padded * held_bytes
    if config.stages and size_bytes > SHARED_BYTES - MARGIN_BYTES:
        raise NotImplementedError(
            f"{name}: cannot run this call: {config} takes {size_bytes} bytes on chip for rows of "
            f"{width}, more than {SHARED_BYTES - MARGIN_BYTES}"
        )
    groups = tile.groups(rows.NUMBERS)
    shared: list[Any] = []
    if tile.lines > 1:
        shared = [
            plgpu.SMEM((2, len(groups) * row_sums, tile.warpgroups * tile.lines), jnp.float32),
            *[plgpu.Barrier(num_arrivals=tile.warpgroups)] * (tile.warpgroups > 1),
        ]
    run = functools.partial(
        _compat.kernel,
        name=name,
        grid_names=("block",),
        num_threads=tile.warpgroups,
        thread_name="warpgroup",
        # In lines a thread stores only where it alone has read, but where `meet` waits. Else sums
        # of columns follow each other in one place on chip, with JAX's barriers between them.
        unsafe_no_auto_barriers=tile.lines > 1,
        interpret=interpret,
    )

    def steps(ins, held, outs, totals, meeting, turn):
        """All groups of a tile; shares of a row's sum meet in a place of their own."""
        places = itertools.count()

        def meet(sums, numbers):
            if not meeting:
                return [[found] for found in (*sums, *numbers)]
            board, *barrier = meeting
            mine = jax.lax.axis_index("warpgroup") if barrier else 0
            rows_of_board = [board.at[turn, next(places)] for _ in (*sums, *numbers)]
            for row, found in zip(rows_of_board, sums, strict=False):
                row[pl.ds(mine * tile.lines, tile.lines)] = found
            for row, found in zip(rows_of_board[len(sums) :], numbers, strict=True):
                row[mine * tile.lines] = found
            plgpu.commit_smem()  # all threads of the warpgroup have written
            if barrier:
                plgpu.barrier_arrive(barrier[0])
                plgpu.barrier_wait(barrier[0])
            shares = [
                [[row[w * tile.lines + i] for i in range(tile.lines)] for row in rows_of_board]
                for w in range(tile.warpgroups)
            ]
            return [
                [functools.reduce(operator.add, share[i]) for share in shares]
                for i in range(len(sums))
            ] + [[share[len(sums) + i][0] for share in shares] for i in range(len(numbers))]

        for parts in groups:
            totals = step(Group(parts, meet), ins, held, outs, totals)
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
    out_type += [jax.ShapeDtypeStruct((sums, blocks, line), jnp.float32)] * bool(sums)
    lines = [plgpu.SMEM((tile.rows * tile.padded // line, line), jnp.float32)]
    lines *= bool(sums and tile.warps[0] > 1)

    def streamed(*refs):
        take = _taker(refs)
        ins, weight_refs, outs, sum_refs = map(
            take, (len(inputs), len(weights), len(outputs), bool(sums))
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
        for i, total in enumerate(totals):
            ref = sum_refs[0].at[i, jax.lax.axis_index("block")]
            if lines:
                _add_lines(total[0], groups[0][0], lines_ref[0], ref)
                continue
            for part, columns in zip(groups[0], total, strict=True):
                _store(ref.at[_columns(part)], part, columns)

    buffers = [tile.buffer(x.dtype, tile.warpgroups, config.stages) for x in inputs]
    kernel = run(
        streamed,
        out_type=out_type,
        grid=(blocks,),
        scratch_types=[
            *buffers,
            *(tile.row_buffer(w.dtype, tile.warpgroups) for w in weights),
            *lines,
            *shared,
            plgpu.Barrier(
                num_arrivals=rows.arrivals(*buffers), num_barriers=tile.warpgroups * config.stages
            ),
            *[
                plgpu.Barrier(num_arrivals=len(weights), num_barriers=tile.warpgroups)
                for _ in weights[:1]
            ],
        ],
    )
    results = kernel(*map(tile.view, inputs), *map(tile.view, weights))
    results, shares = results[: len(outputs)], results[len(outputs) :]
    totals = [jnp.sum(x.reshape(sums, -1, tile.padded), axis=1) for x in shares]
    return [x.reshape(-1, width) for x in results], [row[:width] for x in totals for row in x]


def _taker(refs: Sequence[Any]) -> Callable[[int], list[Any]]:
    """Hands out the references of a kernel's body from left to right."""
    rest = iter(refs)
    return lambda n: [next(rest) for _ in range(n)]


def _add_lines(total: jax.Array, part: Part, lines: Any, target: Any) -> None:
    """Adds up the rows of a part, which lie in different warps, by way of shared memory."""
    plgpu.commit_smem()  # all threads have read what a sum before has left there
    if part.tile.interpret:
        lines[...] = total.reshape(lines.shape)
    else:
        _compat.store(lines.reshape(*part.shape), total, interpret=False)
    plgpu.commit_smem()  # all threads have written
    first = lines[0]
    target[...] = jax.lax.fori_loop(1, lines.shape[0], lambda i, line: line + lines[i], first)


def _whole(ref: Any, tile: RowTile) -> Any:
    """A row [n, inner] in device memory, with what lies outside cut off."""
    return ref.at[pl.ds(tile.unknown_first_chunk, tile.chunks)]
