"""The kernels of `matmul` for few rows of a, whose time is that of reading a weight [N, K].

`vector_products` is for one row, and can take four: a warp has some rows of the weight, multiplies
them with a without tensor cores and adds up along them; no two blocks share a row of the weight.
`split_products` is for up to 64: the weight stands in the 64-row side of the tensor cores and a in
the narrow one, out^T = b a^T, and the blocks of a cluster divide K. Their sums, float32, meet in
shared memory, where each block adds those for some rows of a in the order of K, so that the same
call gives the same bits. Nothing is kept between tiles: blocks come and go, several to a
multiprocessor. Imported only by matmul.py.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.cluster import meet_blocks
from pallas_kernels.device import ACCESS_BYTES, LANES, SHARED_BYTES, WARPS
from pallas_kernels.matmul_kernel import Config, Static
from pallas_kernels.wgmma_tiles import LINE_BYTES, WGMMA_ROWS, rows_as_copied, wgmma_transforms

ITEMSIZE = 2  # both take 16-bit numbers
LINE = LINE_BYTES // ITEMSIZE
VECTOR_ROWS = 4  # more would compute longer than they read
GRAIN = 8  # rows of a that wgmma counts in
MAX_CLUSTER = 8  # what every Hopper GPU grants
WHOLE_ROW = 5120  # numbers of a weight's row that the registers of a warp hold


def problem(config: Config, m: int, n: int, k: int, out_dtype, *, gated: bool) -> str | None:
    """What speaks against the config for m rows of a and a weight [n, k], gate and up if gated."""
    c, halves = config, 1 + gated
    if c.form == "vectors":
        grain = halves * vector_grain(k)
        problems = {
            f"takes {VECTOR_ROWS} rows of a at most": m > VECTOR_ROWS,
            "K must be a multiple of 64, for whole accesses": grain == 0,
            f"tile_n must divide N and be a multiple of {grain}": (
                c.tile_n < 1 or grain == 0 or c.tile_n % grain or n % c.tile_n
            ),
            "tile_k must be 1 at least": c.tile_k < 1,
        }
    else:
        size_bytes = split_bytes(config, m, gated=gated)
        problems = {
            f"takes {WGMMA_ROWS} rows of a at most": m > WGMMA_ROWS,
            "the result must have 16 bits, which alone are transposed on their way on chip": (
                jnp.dtype(out_dtype).itemsize != ITEMSIZE
            ),
            f"tile_n must divide N and be a multiple of {halves * WGMMA_ROWS}, 256 at most": (
                not 0 < c.tile_n <= 256 or c.tile_n % (halves * WGMMA_ROWS) or n % c.tile_n
            ),
            f"tile_k must be a multiple of {LINE}": c.tile_k < 1 or c.tile_k % LINE,
            "stages must be 2 at least": c.stages < 2,
            f"cluster must be 1 to {MAX_CLUSTER}": not 1 <= c.cluster <= MAX_CLUSTER,
            "the blocks of a cluster have no step of K each": -(-k // c.tile_k) < c.cluster,
            f"takes {size_bytes} of {SHARED_BYTES} bytes on chip": size_bytes > SHARED_BYTES,
        }
    return next((sentence for sentence, found in problems.items() if found), None)


def default_config(
    m: int, n: int, k: int, out_dtype, *, gated: bool, num_sms: int
) -> Config | None:
    """What was ahead on an H200 (benchmarks/notes.md); None where "tiles" is.

    Not measured: "split" of gate and up, and of fewer than 2048 rows with K of 4096.
    """
    halves = 1 + gated
    if m == 1:
        # Two blocks a multiprocessor or fewer: all that they load is under way at once.
        grain = halves * vector_grain(k)
        at_once = grain and k <= WHOLE_ROW and n <= 2 * num_sms * grain
        config = Config(tile_n=grain, tile_k=k if at_once else 1024, form="vectors")
    elif 4 * n >= 3 * 128 * num_sms:
        # "tiles" of 128 columns fill the device, and read a less often
        return None
    else:
        # At most one block a multiprocessor in clusters, for more were slower, and two steps of K.
        cluster = min(MAX_CLUSTER, num_sms * halves * WGMMA_ROWS // n, -(-k // 256))
        config = Config(
            tile_n=halves * WGMMA_ROWS,
            tile_k=128,
            stages=4,
            cluster=max(1, cluster),
            form="split",
        )
    return config if problem(config, m, n, k, out_dtype, gated=gated) is None else None


def candidates(m: int, k: int, *, gated: bool) -> list[Config]:
    """What is worth a measurement; not all can run."""
    if m > WGMMA_ROWS:
        return []
    halves, grain = 1 + gated, vector_grain(k)
    found = [
        Config(tile_n=halves * grain * repeat, tile_k=numbers, form="vectors")
        for repeat in (1, 2, 4)
        for numbers in (512, 1024, 2048, k)
    ]
    found += [
        Config(tile_n=halves * 64, tile_k=numbers, stages=stages, cluster=cluster, form="split")
        for cluster in (1, 2, 3, 4, 8)
        for numbers, stages in ((64, 8), (128, 4), (128, 8))
    ]
    return found


def _lanes_across(k: int) -> int:
    """Lanes that share a row of the weight, so that whole accesses fill it; 0 if there are none."""
    return next((lanes for lanes in (32, 16, 8) if k % (lanes * ACCESS_BYTES // ITEMSIZE) == 0), 0)


def vector_grain(k: int) -> int:
    """Rows of the weight that a block of `vector_products` takes at least; 0 if it can't."""
    across = _lanes_across(k)
    return WARPS * LANES // across if across else 0


def vector_products(static: Static, a, b, bias=None, residual=None):
    """A block takes config.tile_n rows of b, gate and up together, config.tile_k of K at once."""
    c, interpret, out_dtype = static.config, static.interpret, jnp.dtype(static.out_dtype)
    m, k = a.shape
    halves = 1 + static.gated
    n, rows = b.shape[0] // halves, c.tile_n // halves
    vector, across = ACCESS_BYTES // ITEMSIZE, _lanes_across(k)
    down, line = LANES // across, across * vector
    lines = k // line
    step = min(lines, max(1, c.tile_k // line))
    layout = _compat.tiled_layout(
        ((WARPS * down, line), (down, line), (vector,)), warp_dims=(-5, -4), lane_dims=(-3, -2)
    )

    def load(ref, reduced=None):
        """Float32: rows of the weight, or with one dimension of the layout reduced, a vector."""
        if interpret:
            return ref[...].astype(jnp.float32)
        of = layout if reduced is None else layout.reduce(reduced)
        return _compat.load(ref, of, optimized=False).astype(jnp.float32)

    def lay_out(x):
        return x if interpret else plgpu.layout_cast(x, layout)

    def body(a_ref, b_ref, bias_ref, residual_ref, out_ref):
        row = lax.axis_index("block") * rows

        def add(first, count, sums):
            """The products of `count` lines of K; all of the weight is asked for first."""
            places = [pl.ds((first + i) * line, line) for i in range(count)]
            weights = [
                [load(b_ref.at[pl.ds(row + half * n, rows), place]) for place in places]
                for half in range(halves)
            ]
            for i, place in enumerate(places):
                for one in range(m):
                    left = load(a_ref.at[one, place], 0)
                    left = lay_out(lax.broadcast_in_dim(left, (rows, line), (1,)))
                    for half in range(halves):
                        sums[half][one] = sums[half][one] + left * weights[half][i]
            return sums

        zeros = lay_out(jnp.zeros((rows, line), jnp.float32))
        sums = [[zeros] * m for _ in range(halves)]
        if lines > step:
            sums = lax.fori_loop(0, lines // step, lambda i, s: add(i * step, step, s), sums)
            sums = add(lines // step * step, lines % step, sums)
        else:
            sums = add(0, lines, sums)
        for one in range(m):
            ys = [jnp.sum(sums[half][one], axis=1) for half in range(halves)]
            if bias_ref is not None:
                ys = [y + load(bias_ref.at[pl.ds(row + i * n, rows)], 1) for i, y in enumerate(ys)]
            y = jax.nn.silu(ys[0]) * ys[1] if static.gated else ys[0]
            if residual_ref is not None:
                y = y + load(residual_ref.at[one, pl.ds(row, rows)], 1)
            place = out_ref.at[one, pl.ds(row, rows)]
            _compat.store(place, y.astype(out_dtype), interpret=interpret)

    return _compat.kernel(
        body,
        name=static.name,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(n // rows,),
        grid_names=("block",),
        interpret=interpret,
        approx_math=True,
    )(a, b, bias, residual)


def _grained(m: int) -> int:
    return -(-m // GRAIN) * GRAIN


def _piece(m: int, cluster: int) -> int:
    """Rows of a whose sums one block of a cluster finishes."""
    return GRAIN * -(-_grained(m) // (GRAIN * cluster))


def split_bytes(config: Config, m: int, *, gated: bool) -> int:
    """On chip: the ring, the result, what a cluster's blocks show each other, barriers."""
    c, few = config, _grained(m)
    ring = c.stages * (c.tile_n + few) * c.tile_k * ITEMSIZE
    result = few * c.tile_n // (1 + gated) * ITEMSIZE
    pieces = -(-few // _piece(m, c.cluster))
    parts = pieces * _piece(m, c.cluster) * c.tile_n * 4 if c.cluster > 1 else 0
    return ring + result + parts + 2048


def split_products(
    static: Static, a, b, bias=None, residual=None, *, finish: Callable[[jax.Array], jax.Array]
):
    """A cluster takes config.tile_n rows of b, gate and up together, and divides K.

    finish: of the sums [M, N] in float32 the result, for the interpreter, which knows no other
    block's shared memory.
    """
    c, interpret, out_dtype = static.config, static.interpret, jnp.dtype(static.out_dtype)
    m, k = a.shape
    halves = 1 + static.gated
    n, tile = b.shape[0] // halves, c.tile_n // halves
    few, chunks, k_steps = _grained(m), c.tile_k // LINE, -(-k // c.tile_k)
    cluster = 1 if interpret else c.cluster
    parts = c.cluster // cluster
    rows = _piece(m, cluster)
    pieces = [(start, min(rows, few - start)) for start in range(0, few, rows)]
    # where each 64 rows of a tile of b lie: in gate or up, and how far from its beginning
    blocks = [divmod(start, tile) for start in range(0, c.tile_n, WGMMA_ROWS)]

    def body(a_ref, b_ref, bias_ref, residual_ref, out_ref, **scratch):
        a_s, b_s, full = scratch["a"], scratch["b"], scratch["full"]
        rank = lax.axis_index("rank") if cluster > 1 else lax.axis_index("part")
        row = lax.axis_index("tile") * tile
        begin, end = k_steps * rank // c.cluster, k_steps * (rank + 1) // c.cluster
        zero = row * 0  # what passes the end of a must be known to the run alone

        def slot_of(at):
            return lax.rem(at - begin, jnp.int32(c.stages))

        def fetch(at):
            slot = slot_of(at)
            for chunk in range(chunks):
                inner = pl.ds(at * c.tile_k + chunk * LINE, LINE)
                copies = [
                    (b_ref.at[pl.ds(row + half * n, tile), inner], b_s, half * tile, tile)
                    for half in range(halves)
                ]
                copies.append((a_ref.at[pl.ds(zero, few), inner], a_s, 0, few))
                for source, target, start, size in copies:
                    place = rows_as_copied(target, (slot, chunk), start, size, interpret)
                    plgpu.copy_gmem_to_smem(source, place, full.at[slot])

        for stage in range(c.stages):
            pl.when(begin + stage < end)(functools.partial(fetch, begin + stage))

        def finished_here(piece) -> Any:
            return pl.when(rank == piece) if cluster > 1 else lambda f: f()

        def out_at(ref, piece, whole):
            start, size = pieces[piece]
            size = size if whole else min(size, m - start)
            return ref.at[pl.ds(zero + start if whole else start, size), pl.ds(row, tile)]

        def out_slot(piece, size):
            return scratch["out"].at[pl.ds(pieces[piece][0], size)]

        if residual is not None and parts == 1:
            for piece, (_start, size) in enumerate(pieces):

                @finished_here(piece)
                def _(piece=piece, size=size):
                    source = out_at(residual_ref, piece, whole=True)
                    plgpu.copy_gmem_to_smem(source, out_slot(piece, size), scratch["residual"])

        def multiply(*accs):
            def issue(at):
                slot = slot_of(at)
                plgpu.barrier_wait(full.at[slot])
                for i, acc in enumerate(accs):
                    mine = pl.ds(i * WGMMA_ROWS, WGMMA_ROWS)
                    for chunk in range(chunks):
                        plgpu.wgmma(acc, b_s.at[slot, chunk, mine], a_s.at[slot, chunk].T)

            def step(at, carry):
                issue(at)
                plgpu.wgmma_wait(chunks * len(accs))  # those before this stage's are done
                pl.when(at - 1 + c.stages < end)(lambda: fetch(at - 1 + c.stages))
                return carry

            issue(begin)
            lax.fori_loop(begin + 1, end, step, jnp.int32(0))
            plgpu.wgmma_wait(0)
            return tuple(acc[...] for acc in accs)

        accs = [plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, few), jnp.float32) for _ in blocks]
        totals = pl.run_scoped(multiply, *accs)
        if parts > 1:
            for (half, start), total in zip(blocks, totals, strict=True):
                out_ref.at[rank, pl.ds(row + half * n + start, WGMMA_ROWS)][...] = total
            return

        def leave(piece, ys):
            """Writes [M's piece, N's tile] of the result; ys are transposed, 64 columns each."""
            size = pieces[piece][1]
            if bias_ref is not None:
                for i, (half, start_row) in enumerate(blocks):
                    place = pl.ds(row + half * n + start_row, WGMMA_ROWS)
                    column = _compat.load(
                        bias_ref.at[place], plgpu.Layout.WGMMA.reduce(1), optimized=False
                    )
                    column = lax.broadcast_in_dim(
                        column.astype(jnp.float32), (WGMMA_ROWS, size), (0,)
                    )
                    ys[i] = ys[i] + plgpu.layout_cast(column, plgpu.Layout.WGMMA)
            if static.gated:
                ups = ys[len(ys) // 2 :]
                ys = [jax.nn.silu(gate) * up for gate, up in zip(ys, ups, strict=False)]
            if residual is not None:
                plgpu.barrier_wait(scratch["residual"])
            for i, y in enumerate(ys):
                place = out_slot(piece, size).at[:, pl.ds(i * WGMMA_ROWS, WGMMA_ROWS)].T
                if residual is not None:
                    more = _compat.load(place, plgpu.Layout.WGMMA, optimized=False)
                    y = y + more.astype(jnp.float32)
                _compat.store(place, y.astype(out_dtype), interpret=interpret)
            plgpu.commit_smem()
            target = out_at(out_ref, piece, whole=False)
            plgpu.copy_smem_to_gmem(out_slot(piece, target.shape[0]), target)
            plgpu.wait_smem_to_gmem(0)

        if cluster == 1:
            leave(0, list(totals))
            return
        shown, meeting = scratch["parts"], scratch["meeting"]
        for piece, (start, size) in enumerate(pieces):
            for i, total in enumerate(totals):
                to = shown.at[piece, i, :, pl.ds(0, size)]
                _compat.store(to, total[:, start : start + size], interpret=interpret)
        meet_blocks(meeting)
        for piece, (_start, size) in enumerate(pieces):

            @finished_here(piece)
            def _(piece=piece, size=size):
                def part_of(peer, i):
                    ref = plgpu.cluster_ref(shown.at[piece, i], {"rank": jnp.int32(peer)})
                    ref = ref.at[:, pl.ds(0, size)]
                    return _compat.load(ref, plgpu.Layout.WGMMA, optimized=False)

                leave(
                    piece,
                    [
                        functools.reduce(operator.add, [part_of(p, i) for p in range(cluster)])
                        for i in range(len(blocks))
                    ],
                )

        meet_blocks(meeting)  # no block may go while others read what it has

    transforms = wgmma_transforms(LINE, a.dtype)
    scratch = {
        "a": plgpu.SMEM((c.stages, chunks, few, LINE), a.dtype, transforms=transforms),
        "b": plgpu.SMEM((c.stages, chunks, c.tile_n, LINE), b.dtype, transforms=transforms),
        "full": plgpu.Barrier(num_arrivals=chunks * (1 + halves), num_barriers=c.stages),
    }
    out_type: Any = jax.ShapeDtypeStruct((m, n), out_dtype)
    if parts > 1:
        out_type = jax.ShapeDtypeStruct((parts, n * halves, few), jnp.float32)
    else:
        scratch["out"] = plgpu.SMEM((few, tile), out_dtype)
        if residual is not None:
            scratch["residual"] = plgpu.Barrier()
    together: Any = {}
    if cluster > 1:
        shape = (len(pieces), len(blocks), WGMMA_ROWS, rows)
        scratch["parts"] = plgpu.SMEM(shape, jnp.float32)
        scratch["meeting"] = plgpu.ClusterBarrier(collective_axes=("rank",))
        together = {"cluster": (cluster,), "cluster_names": ("rank",)}
    result = _compat.kernel(
        body,
        name=static.name,
        out_type=out_type,
        scratch_types=scratch,
        grid=(n // tile, parts),
        grid_names=("tile", "part"),
        interpret=interpret,
        approx_math=True,
        **together,
    )(a, b, bias, residual)
    if parts == 1:
        return result
    return finish(functools.reduce(operator.add, list(result))[:, :m].T)
