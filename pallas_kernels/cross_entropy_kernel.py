"""The kernels of `cross_entropy`: three matrix products, and what becomes of the first one's sums.

    E[v, t] = exp(logit[t, v] - reference[t])   of tiles of hidden @ head.T, with their sums over v
    d_hidden = factor * (E.T @ head)            d_head = E @ (factor * hidden)

Each is the pipeline of `matmul_kernel`: a block stays on its multiprocessor and takes tiles of
128 x 256 in an order that snakes, one warpgroup brings stages of 64 numbers of K through the copy
engine, two multiply and finish. The exponentials leave transposed, 64 x 64 at a time (stmatrix), so
that a row of them belongs to a row of the head: there they may lie in the memory of the head's
gradient, from which each slab of that is then multiplied.
Imported only by cross_entropy.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, soft_cap
from pallas_kernels.device import LOG2E
from pallas_kernels.ring import Ring
from pallas_kernels.wgmma_tiles import LINE_BYTES, WGMMA_ROWS, rows_as_copied, wgmma_transforms

CONSUMERS = 2
TILE_M, TILE_N, TILE_K = CONSUMERS * WGMMA_ROWS, 256, 64
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # 40 + 2 * 232 of the 512 that three share
STAGES = 4  # loaded ahead
# Tiles of rows that are neighbours in the order of tiles. H200, warm, 4096 x 128256 x 4096 with
# both gradients: 19.2 to 19.5 ms with 4 to 16, where three plain products of cuBLAS take 18.8; no
# faster where two blocks, one above the other, loaded each tile of the right operand once for both.
SNAKE = 8
BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Static:
    """What the kernels are compiled for; shape is T (whole tiles), V, D."""

    shape: tuple[int, int, int]
    softcap: float | None
    num_sms: int
    interpret: bool
    shift: int = 0  # rows of the exponentials that lie in `first`; the others lie so many higher


@dataclasses.dataclass(frozen=True)
class _Product:
    """[m, k] @ [k, n]; in memory a is [k, m] with transpose_a, b is [n, k] with transpose_b.

    The result leaves by slices of 64 rows and `slice_width` columns of `dtype`.
    """

    name: str
    sizes: tuple[int, int, int]
    transpose_a: bool
    transpose_b: bool
    dtype: Any
    slice_width: int

    @property
    def slices(self) -> range:
        return range(0, TILE_N, self.slice_width)


def exponentials(static: Static, hidden, head, reference, targets, marks, *, into, go=None):
    """Their sums over each tile of V, [tiles of V, T] float32, those of the targets left out.

    hidden [T, D], T in whole tiles; head [V, D]; reference float32 [T], in bits, inf for a row of
    zeros; targets int32 [T]; marks int32 [tiles of T, tiles of V]: not 0 where a tile has targets
    or passes V. into: references to the exponentials bfloat16 [.., row of T] and to the first
    `shift` rows of them; empty if only the sums are wanted, None for the greatest logits in bits
    instead of sums. go: int32 [1], 0 for nothing to be done.
    """
    (t, v, d), shift = static.shape, static.shift
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    width = WGMMA_ROWS
    tops = into is None
    places = tuple(into or ())
    product = _Product(
        "linear_cross_entropy_tops" if tops else "linear_cross_entropy",
        (t, v, d),
        transpose_a=False,
        transpose_b=True,
        dtype=BF16,
        slice_width=width,
    )
    inputs = {"hidden": hidden, "head": head, "reference": reference, "targets": targets}
    inputs |= {"marks": marks} | ({} if go is None else {"go": go})
    inputs |= dict(zip(("exps", "first"), places, strict=False))

    def load(refs, row, column, inner, copy_a, copy_b):
        copy_a(refs["hidden"].at[pl.ds(row, TILE_M), pl.ds(inner, TILE_K)])
        copy_b(refs["head"].at[pl.ds(column, TILE_N), pl.ds(inner, TILE_K)])

    def wide(x):
        x = lax.broadcast_in_dim(x, (WGMMA_ROWS, width), (0,))
        return x if static.interpret else plgpu.layout_cast(x, plgpu.Layout.WGMMA)

    def finish(refs, total, row, column, leave):
        rows = pl.ds(row, WGMMA_ROWS)
        level = _compat.load(refs["reference"].at[rows], row_layout, optimized=False)
        mark = refs["marks"][row // TILE_M, column // TILE_N]

        def masked(x, start):
            target = _compat.load(refs["targets"].at[rows], row_layout, optimized=False)
            place = plgpu.broadcasted_iota(
                jnp.int32, (WGMMA_ROWS, width), 1, layout=plgpu.Layout.WGMMA
            )
            left_out = (place == wide(target - start)) | (place >= v - start)
            return jnp.where(left_out, -jnp.inf if tops else jnp.float32(0), x)

        found = None
        for i, across in enumerate(product.slices):
            start = column + across
            x = total[:, across : across + width]
            slope = None
            if static.softcap is None:
                x = x * LOG2E
            else:
                bent = soft_cap.tanh(x, 1 / static.softcap, interpret=static.interpret)
                x, slope = bent * (static.softcap * LOG2E), 1.0 - bent * bent
            if not tops:
                x = jnp.exp2(x - wide(level))
            x = lax.cond(mark > 0, functools.partial(masked, start=start), lambda x: x, x)
            part = jnp.max(x, axis=1) if tops else jnp.sum(x, axis=1)
            join = jnp.maximum if tops else jnp.add
            found = part if found is None else join(found, part)
            if not places:
                continue
            y = (x if slope is None else x * slope).astype(BF16)

            choices = [(True, "exps", start)]
            if shift:
                choices = [(start < shift, "first", start), (start >= shift, "exps", start - shift)]
            to = [(when, refs[name].at[pl.ds(at, width), rows]) for when, name, at in choices]
            leave(i, y, *to, transpose=True)
        refs["sums"][column // TILE_N, rows] = found

    sums = jax.ShapeDtypeStruct((-(-v // TILE_N), t), jnp.float32)
    return _run(static, product, inputs, {"sums": sums}, load, finish)


def d_hidden(static: Static, exps, first, head, factor, dtype):
    """factor * (E.T @ head): [T, D]; factor float32 [T]. `first` is None without a shift."""
    (t, v, d), shift = static.shape, static.shift
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    width = LINE_BYTES // jnp.dtype(dtype).itemsize
    product = _Product(
        "linear_cross_entropy_d_hidden",
        (t, d, v),
        transpose_a=True,
        transpose_b=False,
        dtype=dtype,
        slice_width=width,
    )
    inputs = {"exps": exps, "head": head, "factor": factor}
    inputs |= {"first": first} if shift else {}

    def load(refs, row, column, inner, copy_a, copy_b):
        def rows_of(name, start):
            copy_a(refs[name].at[pl.ds(start, TILE_K), pl.ds(row, TILE_M)])

        if shift:
            pl.when(inner < shift)(functools.partial(rows_of, "first", inner))
            pl.when(inner >= shift)(functools.partial(rows_of, "exps", inner - shift))
        else:
            rows_of("exps", inner)
        copy_b(refs["head"].at[pl.ds(inner, TILE_K), pl.ds(column, TILE_N)])

    def finish(refs, total, row, column, leave):
        rows = pl.ds(row, WGMMA_ROWS)
        factor = _compat.load(refs["factor"].at[rows], row_layout, optimized=False)
        factor = lax.broadcast_in_dim(factor, (WGMMA_ROWS, width), (0,))
        if not static.interpret:
            factor = plgpu.layout_cast(factor, plgpu.Layout.WGMMA)
        for i, across in enumerate(product.slices):
            y = (total[:, across : across + width] * factor).astype(dtype)
            leave(i, y, (True, refs["out"].at[rows, pl.ds(column + across, width)]))

    out = jax.ShapeDtypeStruct((t, d), dtype)
    return _run(static, product, inputs, {"out": out}, load, finish)


def d_head(static: Static, exps, hidden, *, dtype):
    """E @ hidden: [V, D]."""
    _, v, d = static.shape
    out = jax.ShapeDtypeStruct((v, d), dtype)
    return _d_head(static, {"exps": exps}, hidden, {"out": out}, rows=v)


def add_d_head(static: Static, exps, hidden, total):
    """total += E @ hidden, a reference to float32 [V, D]."""
    _, v, _ = static.shape
    _d_head(static, {"exps": exps, "out": total}, hidden, {}, rows=v)


def d_head_in_place(static: Static, exps, first, hidden):
    """E @ hidden into the reference `exps`, whose rows are E's from `shift` on.

    The last slab comes first: what it writes over has not been E since, or has been read.
    """
    (_, v, _), shift = static.shape, static.shift
    for start in reversed(range(0, v, shift)):
        inputs = {"out": exps} | ({"first": first} if start == 0 else {})
        inputs["place"] = jnp.full((1,), start, jnp.int32)
        _d_head(static, inputs, hidden, {}, rows=min(shift, v - start))


def _d_head(static: Static, inputs, hidden, out_type, *, rows):
    t, _, d = static.shape
    dtype = {**inputs, **out_type}["out"].dtype
    width = LINE_BYTES // jnp.dtype(dtype).itemsize
    adds = "exps" in inputs and "out" in inputs
    product = _Product(
        "linear_cross_entropy_d_head",
        (rows, d, t),
        transpose_a=False,
        transpose_b=False,
        dtype=dtype,
        slice_width=width,
    )

    def load(refs, row, column, inner, copy_a, copy_b):
        if "exps" in refs:
            source, start = refs["exps"], row
        elif "first" in refs:
            source, start = refs["first"], row
        else:
            source, start = refs["out"], row + refs["place"][0] - static.shift
        copy_a(source.at[pl.ds(start, TILE_M), pl.ds(inner, TILE_K)])
        copy_b(refs["hidden"].at[pl.ds(inner, TILE_K), pl.ds(column, TILE_N)])

    def finish(refs, total, row, column, leave):
        start = row + refs["place"][0] if "place" in refs else row

        for i, across in enumerate(product.slices):
            to = refs["out"].at[pl.ds(start, WGMMA_ROWS), pl.ds(column + across, width)]
            leave(i, total[:, across : across + width].astype(dtype), (True, to), add=adds)

    inputs = {**inputs, "hidden": hidden}
    return _run(static, product, inputs, out_type, load, finish, adds=adds)


def _run(
    static: Static,
    product: _Product,
    inputs: dict[str, Any],
    out_type: dict[str, Any],
    load: Callable[..., None],
    finish: Callable[..., None],
    *,
    adds: bool = False,
) -> Any:
    """The result of `out_type`, None if that is empty.

    load(refs, row, column, inner, copy_a, copy_b) copies the tiles of a stage; finish(refs, total,
    row, column, leave) does what follows the sums of a consumer's 64 rows. leave(i, y, *places)
    writes the i-th slice to the one of `(when, place)` whose `when` holds, or with `add` adds it.
    """
    p, interpret = product, static.interpret
    m, n, k = p.sizes
    tiles = (-(-m // TILE_M), -(-n // TILE_N))
    k_steps = -(-k // TILE_K)
    names = [*inputs, *out_type]

    def body(*given, **scratch):
        refs = dict(zip(names, given, strict=True))
        group = lax.axis_index("group")
        a, b, slots = scratch["a"], scratch["b"], scratch["slots"]
        ring = Ring(scratch["full"], scratch["empty"], STAGES)

        def each_tile(step) -> Any:
            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block", init_carry=jnp.int32(0))
            def end(info, carry):
                down, across = plgpu.planar_snake(info.index[0], tiles, 0, SNAKE)
                return step(down * TILE_M, across * TILE_N, carry)

            return end

        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def tile(row, column, at):
                def stage(i, at):
                    slot = ring.claim(at)
                    full = ring.full.at[slot]

                    def copy(ref, rows, transposed):
                        target = ref.at[slot]
                        if not transposed:  # K innermost: any number of rows
                            target = rows_as_copied(ref, (slot,), 0, rows, interpret)
                        return lambda source: plgpu.copy_gmem_to_smem(source, target, full)

                    load(
                        refs,
                        row,
                        column,
                        i * TILE_K,
                        copy(a, TILE_M, p.transpose_a),
                        copy(b, TILE_N, not p.transpose_b),
                    )
                    return at + 1

                return lax.fori_loop(0, k_steps, stage, at)

            ring.drain(each_tile(tile))

        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            mine = pl.ds(group * WGMMA_ROWS, WGMMA_ROWS)

            def multiply(at, acc):
                def issue(at):
                    slot = ring.wait(at)
                    left, right = a.at[slot], b.at[slot]
                    left = left.at[:, mine].T if p.transpose_a else left.at[mine]
                    plgpu.wgmma(acc, left, right.T if p.transpose_b else right)

                def next_stage(_, at):
                    issue(at)
                    plgpu.wgmma_wait(1)  # the one before this is done
                    ring.give_back(at - 1)
                    return at + 1

                issue(at)
                end = lax.fori_loop(1, k_steps, next_stage, at + 1)
                total = acc[...]
                ring.give_back(end - 1)
                return total

            def leave(i, y, *places, transpose=False, add=False):
                here = (group, i % 2)
                slot = slots.at[*here]
                copied = rows_as_copied(slots, here, 0, WGMMA_ROWS, interpret)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before the last
                if add and interpret:  # which knows no copies that add
                    plgpu.wait_smem_to_gmem(0)
                    barrier = scratch["more"].at[group]
                    plgpu.copy_gmem_to_smem(places[0][1], copied, barrier)
                    plgpu.barrier_wait(barrier)
                    y = y + slot[...]
                (slot.T if transpose else slot)[...] = y
                plgpu.commit_smem()
                for when, place in places:
                    op = "add" if add and not interpret else None
                    copy = functools.partial(
                        plgpu.copy_smem_to_gmem,
                        copied,
                        place,
                        commit_group=False,
                        reduction_op=op,
                    )
                    copy() if when is True else pl.when(when)(copy)
                plgpu.commit_smem_to_gmem_group()

            def tile(row, column, at):
                total = pl.run_scoped(
                    functools.partial(multiply, at),
                    plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, TILE_N), jnp.float32),
                )
                finish(refs, total, row + group * WGMMA_ROWS, column, leave)
                return at + k_steps

            each_tile(tile)
            plgpu.wait_smem_to_gmem(0)

        def work():
            lax.cond(group == CONSUMERS, produce, consume)

        if "go" in refs:
            pl.when(refs["go"][0] > 0)(work)
        else:
            work()

    a_tile = (TILE_K, TILE_M) if p.transpose_a else (TILE_M, TILE_K)
    b_tile = (TILE_N, TILE_K) if p.transpose_b else (TILE_K, TILE_N)

    def shared(*shape, dtype):
        return plgpu.SMEM(shape, dtype, transforms=wgmma_transforms(shape[-1], dtype))

    scratch = {
        "a": shared(STAGES, *a_tile, dtype=BF16),
        "b": shared(STAGES, *b_tile, dtype=BF16),
        "slots": shared(CONSUMERS, 2, WGMMA_ROWS, p.slice_width, dtype=p.dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
    }
    if adds and interpret:
        scratch["more"] = plgpu.Barrier(num_barriers=CONSUMERS)
    found = _compat.kernel(
        body,
        name=p.name,
        out_type=tuple(out_type.values()),
        scratch_types=scratch,
        grid=(min(static.num_sms, tiles[0] * tiles[1]),),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="group",
        interpret=interpret,
        approx_math=True,
    )(*inputs.values())
    return found[0] if out_type else None
