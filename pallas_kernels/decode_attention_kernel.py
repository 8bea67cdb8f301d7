"""The kernels of `decode_attention`: one query a row over the keys of a cache, split over blocks.

A block has one row of the batch, one key head and a range of that head's keys, and one warpgroup.
The keys stand in the 64-row side of the tensor cores and the query heads that share them in the
narrow one: S^T = K Q^T and O^T = V^T P^T, so that 8 heads cost no more than 1 and the softmax works
on no padding but theirs. Tiles of K and V come through the copy engine (TMA) straight from where
the cache has them, into a ring deep enough to hide the memory. A row's keys are dealt out by its
length, which only the running kernel knows. Blocks of one cluster add their parts through each
other's shared memory; what several clusters leave, not rounded and with the logarithm of its sum,
a second kernel adds. Imported only by decode_attention.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.wgmma_tiles import rows_as_copied, wgmma_transforms

LINE = 64  # numbers of 16 bits in 128 bytes, the widest swizzle; also the rows of wgmma
LOG2E = math.log2(math.e)
LOWEST = -1e30  # no score is lower; finite, so that what sees nothing gives no NaN


@dataclasses.dataclass(frozen=True)
class Config:
    """A block brings `tile` keys at a time, `stages` tiles ahead.

    A row's keys go to `splits` blocks, `cluster` of which add up what they have among themselves.
    """

    tile: int = 128
    stages: int = 2
    splits: int = 1
    cluster: int = 1


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for."""

    config: Config
    interpret: bool
    scale: float
    window: int | None
    softcap: float | None


def shared_bytes(config: Config, width: int, heads: int, scales: int) -> int:
    """On chip: the ring of K and V, Q, P, parts that a cluster shares, the result, barriers.

    heads: that share a key head; scales: of one key and all its heads, 0 if it has none.
    """
    c, padded, heads = config, -(-width // LINE) * LINE, -(-heads // 8) * 8
    ring = 2 * c.stages * c.tile * padded * 2
    if scales:  # bytes, and one tile of 16 bits
        line = _line(1, width)
        ring = 2 * c.stages * c.tile * (-(-width // line) * line + 4 * scales)
        ring += 2 * c.tile * padded
    parts = heads * (padded + 1) * 4 if c.cluster > 1 else 0
    return ring + heads * (padded + c.tile + LINE) * 2 + parts + 4096


def _line(size_bytes: int, width: int) -> int:
    """The numbers of a row that one copy takes: 128 bytes, or the 64 of a narrow row of bytes."""
    return 2 * LINE if size_bytes == 1 and width > LINE else LINE


def _load(ref, layout):
    return _compat.load(ref, layout, optimized=False)


def _per_head():
    return plgpu.Layout.WGMMA.reduce(0)


def _each(x, rows):
    """A number a head, [heads], for each of some rows, as wgmma lays out its result."""
    x = lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


def _each_key(x, heads):
    """A number a key, [keys], for each of some heads."""
    x = lax.broadcast_in_dim(x, (x.shape[0], heads), (0,))
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


def _merge(sums, parts):
    """Adds parts, each divided by its sum, of which `sums` are log2: the same of all of them."""
    top = sums[0]
    for other in sums[1:]:
        top = jnp.maximum(top, other)
    shares = [jnp.exp2(x - top) for x in sums]
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    out = 0.0
    for part, share in zip(parts, shares, strict=False):  # a sink has a sum, but no part
        out = out + part * _each(share / total, LINE)
    return top + jnp.log2(total), out


def _put(out_ref, o_s, row, head, chunk, out):
    """Rounds 64 numbers of every head, [64, heads], and brings them where the result has them."""
    group, width = out_ref.shape[2:]
    size = min(LINE, width - chunk * LINE)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    o_s.T[...] = out.astype(o_s.dtype)
    plgpu.commit_smem()
    columns = pl.ds(chunk * LINE, size)
    if size == LINE:
        plgpu.copy_smem_to_gmem(o_s.at[pl.ds(0, group)], out_ref.at[row, head, :, columns])
    else:  # one by one, so that no copy passes the end of a row
        for i in range(group):
            plgpu.copy_smem_to_gmem(o_s.at[i, pl.ds(0, size)], out_ref.at[row, head, i, columns])


def attend(
    static: Static,
    q,
    k,
    v,
    lengths,
    *,
    sinks=None,
    page_table=None,
    k_scale=None,
    v_scale=None,
    new_k=None,
    new_v=None,
) -> Any:
    """The result [B, K, N / K, H]; or with more splits than a cluster's, the clusters' parts.

    q [B, N, H], lengths [B], k and v [B, S, K, H] or, with a page table [B, pages], pages
    [P, page, K, H]; a cache of bytes has scales, shaped alike without H; sinks [K, heads].
    With new_k and new_v [B, K, H], k and v are references, whose last key of each row they become.
    Parts: [B, K, clusters, H, heads] float32 and log2 of their sums [B, K, clusters, heads], with H
    in whole lines and the heads of a group up to a multiple of 8.
    """
    c = static.config
    batch, n, width = q.shape
    _, size, kv_heads, _ = k.shape
    if page_table is not None:
        num_pages, page, _, _ = k.shape
        size = page_table.shape[1] * page
    together = c.tile if page_table is None else min(c.tile, page)  # keys that are neighbours
    group, dtype = n // kv_heads, q.dtype
    heads, chunks = -(-group // 8) * 8, -(-width // LINE)
    packed = k_scale is not None and v_scale is not None
    line = _line(k.dtype.itemsize, width)
    copies = -(-width // line)
    cluster = 1 if static.interpret else c.cluster  # it knows no other block's shared memory
    parts = c.splits // cluster

    def body(
        lengths_ref,
        table_ref,
        q_ref,
        k_ref,
        v_ref,
        sinks_ref,
        k_scale_ref,
        v_scale_ref,
        new_k_ref,
        new_v_ref,
        *outputs,
        **scratch,
    ):
        q_s, k_s, v_s, p_s = (scratch[name] for name in ("q", "k", "v", "p"))
        part, head, row = (lax.axis_index(name) for name in ("part", "head", "row"))
        rank = lax.axis_index("rank") if cluster > 1 else 0
        split = part * cluster + rank

        def columns(i, line):  # the last may pass the end of a row, which only traced starts may
            start = i * line
            return pl.ds(row * 0 + start if start + line > width else start, line)

        def place(start):
            """Where a key lies, and its neighbours: the first two indices."""
            if page_table is None:
                return row, start
            # what stands behind a row's pages is not read, whatever the table says
            index = jnp.minimum(start // page, page_table.shape[1] - 1)
            return jnp.clip(table_ref[row, index], 0, num_pages - 1), lax.rem(start, page)

        def load(name, slot, at):
            ref, barrier = (k_ref, v_ref)[name == "v"], scratch[f"{name}_full"].at[slot]
            for inner in range(0, c.tile, together):
                number, start = place(at * c.tile + inner)
                for i in range(copies):
                    plgpu.copy_gmem_to_smem(
                        ref.at[number, pl.ds(start, together), head, columns(i, line)],
                        rows_as_copied(scratch[name], (slot, i), inner, together, static.interpret),
                        barrier,
                    )
                if packed:  # of all heads: they lie together
                    scales = (k_scale_ref, v_scale_ref)[name == "v"]
                    lines = together * kv_heads // LINE
                    first_line = start * kv_heads // LINE
                    plgpu.copy_gmem_to_smem(
                        scales.at[number, pl.ds(first_line, lines)],
                        scratch[f"{name}_scale"].at[slot, pl.ds(inner * kv_heads // LINE, lines)],
                        barrier,
                    )

        for chunk in range(chunks):
            plgpu.copy_gmem_to_smem(
                q_ref.at[row, pl.ds(head * group, heads), columns(chunk, LINE)],
                rows_as_copied(q_s, (chunk,), 0, heads, static.interpret),
                scratch["q_full"],
            )
        # Tiles are dealt in turn, so that the first does not hang on the length: it is on its way
        # when the length arrives, at the price of a tile too much where a row is very short.
        early = static.window is None and c.splits * c.tile <= size
        if early:
            load("k", 0, split)
            load("v", 0, split)
        length = jnp.clip(lengths_ref[row], 0, size)
        held = length if new_k is None else jnp.maximum(length - 1, 0)  # in the cache already
        first = jnp.int32(0) if static.window is None else jnp.maximum(length - static.window, 0)
        low = first // c.tile
        count = jnp.maximum(pl.cdiv(held, c.tile) - low - split + c.splits - 1, 0) // c.splits
        has_new = (length > held) & (lax.rem(held // c.tile - low, c.splits) == split)

        def tile_of(i):
            return low + split + i * c.splits

        def slot_of(i):
            return lax.rem(i, jnp.int32(c.stages))

        for stage in range(c.stages):
            for name in "kv":
                if stage or not early:
                    pl.when(stage < count)(
                        lambda stage=stage, name=name: load(name, stage, tile_of(stage))
                    )
        plgpu.barrier_wait(scratch["q_full"])
        if early:

            @pl.when(count == 0)
            def _():
                plgpu.barrier_wait(scratch["k_full"].at[jnp.int32(0)])
                plgpu.barrier_wait(scratch["v_full"].at[jnp.int32(0)])

        def widened(ring):
            """What a tile of bytes holds, in 16 bits."""
            # 8 numbers a thread, so that neither the load nor the store meets a bank twice
            layout = _compat.tiled_layout(
                ((32, 32), (8, 32), (8, 8)), warp_dims=(-6,), lane_dims=(-3, -2)
            )
            for i in range(copies):
                x = _compat.load(ring.at[i], layout)
                x = x[:, : min(line, chunks * LINE - i * line)]
                if k.dtype == jnp.float8_e4m3fn:  # the one step that the hardware knows
                    x = x.astype(jnp.float16)
                    x = x if dtype == jnp.float16 else x.astype(jnp.float32)
                scratch["wide"].at[:, pl.ds(i * line, x.shape[1])][...] = x.astype(dtype)
            plgpu.commit_smem()
            return scratch["wide"]

        def scales_of(ref):
            if static.interpret:  # it reshapes no reference
                x = lax.dynamic_index_in_dim(ref[...].reshape(c.tile, kv_heads), head, 1, False)
            else:
                layout = plgpu.Layout.WGMMA.reduce(1)
                x = _load(ref.reshape(c.tile, kv_heads).at[:, head], layout)
            return _each_key(x, heads)

        def line_of_tile(tile, chunk):
            return tile.at[:, pl.ds(chunk * LINE, LINE)] if packed else tile.at[chunk]

        def scores(k_tile):
            def product(acc):
                for chunk in range(chunks):
                    plgpu.wgmma(acc, line_of_tile(k_tile, chunk), q_s.at[chunk].T)
                return acc[...]

            return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((c.tile, heads), jnp.float32))

        def scaled(s):
            if static.softcap is None:
                return s * (static.scale * LOG2E)
            # tanh(x) = 1 - 2 / (exp(2 x) + 1); the GPU's own tanh is right to 11 bits only
            e = jnp.exp2(s * (static.scale * 2 * LOG2E / static.softcap))
            return static.softcap * LOG2E * (1.0 - 2.0 / (e + 1.0))

        def seen(s, at):
            s = scaled(s)
            key = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
            key = key + at * c.tile
            return jnp.where((key >= first) & (key < held), s, -jnp.inf)

        def weighted(v_tile):
            def product(*accs):
                for chunk, acc in enumerate(accs):
                    plgpu.wgmma(acc, line_of_tile(v_tile, chunk).T, p_s.T)
                plgpu.wgmma_wait(0)
                return tuple(acc[...] for acc in accs)

            accs = [plgpu.WGMMAAccumulatorRef((LINE, heads), jnp.float32) for _ in range(chunks)]
            return pl.run_scoped(product, *accs)

        def step(i, carry):
            top, total, out = carry
            slot, again = slot_of(i), i + c.stages < count
            plgpu.barrier_wait(scratch["k_full"].at[slot])
            s = scores(widened(k_s.at[slot]) if packed else k_s.at[slot])
            if packed:
                s = s * scales_of(scratch["k_scale"].at[slot])
            pl.when(again)(lambda: load("k", slot, tile_of(i + c.stages)))
            s = seen(s, tile_of(i))
            new_top = jnp.maximum(top, jnp.max(s, axis=0))
            less = jnp.exp2(top - new_top)
            p = jnp.exp2(s - _each(new_top, c.tile))
            total = total * _each(less, c.tile) + p
            plgpu.barrier_wait(scratch["v_full"].at[slot])
            if packed:
                p = jnp.where(p > 0, p * scales_of(scratch["v_scale"].at[slot]), 0.0)
            p_s.T[...] = p.astype(dtype)
            if packed:
                v_tile = widened(v_s.at[slot])
            else:
                v_tile = v_s.at[slot]
                plgpu.commit_smem()
            more = weighted(v_tile)
            pl.when(again)(lambda: load("v", slot, tile_of(i + c.stages)))
            less = _each(less, LINE)
            return new_top, total, tuple(o * less + m for o, m in zip(out, more, strict=True))

        def filled(value, shape, layout: Any = plgpu.Layout.WGMMA):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        start = (
            filled(LOWEST, (heads,), _per_head()),
            filled(0, (c.tile, heads)),
            tuple(filled(0, (LINE, heads)) for _ in range(chunks)),
        )

        def line_of(ref, chunk):
            x = ref.at[row, head, pl.ds(chunk * LINE, LINE)]
            return _load(x, plgpu.Layout.WGMMA.reduce(1))

        def begin_with_new():
            """The state after the new token alone: its score, one, and its value."""
            products = 0.0
            for chunk in range(chunks):
                q_line = _load(q_s.at[chunk].T, plgpu.Layout.WGMMA).astype(jnp.float32)
                k_line = line_of(new_k_ref, chunk).astype(jnp.float32)
                products = products + q_line * _each_key(k_line, heads)
            key = plgpu.broadcasted_iota(jnp.int32, (c.tile, heads), 0, layout=plgpu.Layout.WGMMA)
            values = [line_of(new_v_ref, chunk).astype(jnp.float32) for chunk in range(chunks)]
            return (
                scaled(jnp.sum(products, axis=0)),
                jnp.where(key == 0, 1.0, 0.0),
                tuple(_each_key(x, heads) for x in values),
            )

        if new_k is not None:
            start = lax.cond(has_new, begin_with_new, lambda: start)
        top, total, outs = lax.fori_loop(0, count, step, start)
        if new_k is not None:

            @pl.when(has_new)  # after all of the row was read that this block reads
            def _():
                number, key = place(held)
                for chunk in range(chunks):
                    for cache, new in ((k_ref, new_k_ref), (v_ref, new_v_ref)):
                        to = cache.at[number, key, head, pl.ds(chunk * LINE, LINE)]
                        to[...] = line_of(new, chunk)

        total = jnp.sum(total, axis=0)
        some = total > 0
        lse = jnp.where(some, top + jnp.log2(total), LOWEST)
        share = _each(1.0 / jnp.where(some, total, 1.0), LINE)
        outs = [out * share for out in outs]

        def leave(chunk, sums, outs):
            if parts == 1 and sinks_ref is not None:
                sums = [*sums, _load(sinks_ref.at[head], _per_head()) * LOG2E]
            lse, out = (sums[0], outs[0]) if len(sums) == 1 else _merge(sums, outs)
            if parts == 1:
                _put(outputs[0], scratch["out"], row, head, chunk, out)
                return
            outputs[0].at[row, head, part, pl.ds(chunk * LINE, LINE)][...] = out
            if chunk == 0:
                outputs[1].at[row, head, part][...] = lse

        if cluster == 1:
            for chunk, out in enumerate(outs):
                leave(chunk, [lse], [out])
        else:
            parts_s, sums_s, meeting = (scratch[name] for name in ("parts", "sums", "meeting"))
            sums_s[...] = lse
            for chunk, out in enumerate(outs):
                parts_s.at[chunk][...] = out
            plgpu.barrier_arrive(meeting)
            plgpu.barrier_wait(meeting)
            peers: list[Any] = [{"rank": jnp.int32(i)} for i in range(cluster)]
            for chunk in range(chunks):

                @pl.when(rank == chunk % cluster)
                def _(chunk=chunk):
                    sums = [_load(plgpu.cluster_ref(sums_s, peer), _per_head()) for peer in peers]
                    ours = [plgpu.cluster_ref(parts_s.at[chunk], peer) for peer in peers]
                    leave(chunk, sums, [_load(x, plgpu.Layout.WGMMA) for x in ours])

            plgpu.barrier_arrive(meeting)  # no block may go while others read what it has
            plgpu.barrier_wait(meeting)
        if parts == 1:
            plgpu.wait_smem_to_gmem(0)

    of_16_bits = wgmma_transforms(LINE, dtype)
    ring = plgpu.SMEM(
        (c.stages, copies, c.tile, line), k.dtype, transforms=wgmma_transforms(line, k.dtype)
    )
    per_tile = (copies + packed) * (c.tile // together)
    scratch = {
        "q": plgpu.SMEM((chunks, heads, LINE), dtype, transforms=of_16_bits),
        "k": ring,
        "v": ring,
        "p": plgpu.SMEM((heads, c.tile), dtype, transforms=of_16_bits),
        "q_full": plgpu.Barrier(num_arrivals=chunks),
        "k_full": plgpu.Barrier(num_arrivals=per_tile, num_barriers=c.stages),
        "v_full": plgpu.Barrier(num_arrivals=per_tile, num_barriers=c.stages),
    }
    if k_scale is not None and v_scale is not None:
        k_scale, v_scale = (x.reshape(x.shape[0], -1, LINE) for x in (k_scale, v_scale))
        scales = plgpu.SMEM((c.stages, c.tile * kv_heads // LINE, LINE), jnp.float32)
        scratch["k_scale"] = scratch["v_scale"] = scales
        scratch["wide"] = plgpu.SMEM((c.tile, chunks * LINE), dtype, transforms=of_16_bits)
    out_type: Any = jax.ShapeDtypeStruct((batch, kv_heads, group, width), dtype)
    if parts == 1:
        scratch["out"] = plgpu.SMEM((heads, LINE), dtype)
    else:
        lead = (batch, kv_heads, parts)
        out_type = [
            jax.ShapeDtypeStruct((*lead, *rest), jnp.float32)
            for rest in ((chunks * LINE, heads), (heads,))
        ]
    clusters: Any = {}
    if cluster > 1:
        scratch["parts"] = plgpu.SMEM((chunks, LINE, heads), jnp.float32)
        scratch["sums"] = plgpu.SMEM((heads,), jnp.float32)
        scratch["meeting"] = plgpu.ClusterBarrier(collective_axes=("rank",))
        clusters = {"cluster": (cluster,), "cluster_names": ("rank",)}
    return _compat.kernel(
        body,
        name="decode_attention",
        out_type=out_type,
        scratch_types=scratch,
        grid=(parts, kv_heads, batch),
        grid_names=("part", "head", "row"),
        interpret=static.interpret,
        approx_math=True,
        **clusters,
    )(lengths, page_table, q, k, v, sinks, k_scale, v_scale, new_k, new_v)


def combine(static: Static, outs, sums, like, *, sinks=None):
    """The result [B, K, N / K, H], for q `like`, of the parts that `attend` leaves."""
    batch, kv_heads, parts, _, heads = outs.shape
    _, n, width = like.shape
    chunks = -(-width // LINE)

    def body(outs_ref, sums_ref, sinks_ref, out_ref, o_s):
        head, row = lax.axis_index("head"), lax.axis_index("row")
        sums = [_load(sums_ref.at[row, head, i], _per_head()) for i in range(parts)]
        if sinks_ref is not None:
            sums.append(_load(sinks_ref.at[head], _per_head()) * LOG2E)
        for chunk in range(chunks):

            @pl.when(lax.axis_index("chunk") == chunk)
            def _(chunk=chunk):
                lines = [outs_ref.at[row, head, i, pl.ds(chunk * LINE, LINE)] for i in range(parts)]
                _, out = _merge(sums, [_load(x, plgpu.Layout.WGMMA) for x in lines])
                _put(out_ref, o_s, row, head, chunk, out)

        plgpu.wait_smem_to_gmem(0)

    return _compat.kernel(
        body,
        name="decode_attention_combine",
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, n // kv_heads, width), like.dtype),
        scratch_types={"o_s": plgpu.SMEM((heads, LINE), like.dtype)},
        grid=(chunks, kv_heads, batch),
        grid_names=("chunk", "head", "row"),
        interpret=static.interpret,
        approx_math=True,
    )(outs, sums, sinks)
