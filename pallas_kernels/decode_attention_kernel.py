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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, soft_cap
from pallas_kernels import decode_attention_bytes as of_bytes
from pallas_kernels.cluster import meet_blocks
from pallas_kernels.decode_attention_parts import (
    LINE,
    each,
    merge,
    padded_heads,
    per_head,
    put,
    read,
)
from pallas_kernels.device import LOG2E
from pallas_kernels.wgmma_tiles import rows_as_copied, wgmma_transforms

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

    heads: that share a key head, padded; scales: of one key and all its heads, 0 if it has none.
    """
    c, padded = config, -(-width // LINE) * LINE
    ring = 2 * c.stages * c.tile * padded * 2
    if scales:  # bytes, and the query once more
        line = _line(1, width)
        wide = -(-width // line) * line
        ring = 2 * c.stages * c.tile * (wide + 4 * scales) + 2 * heads * wide
    parts = heads * (padded + 1) * 4 if c.cluster > 1 or scales else 0
    return ring + heads * (padded + c.tile + LINE) * 2 + parts + 4096


def _line(size_bytes: int, width: int) -> int:
    """The numbers of a row that one copy takes: 128 bytes, or the 64 of a narrow row of bytes."""
    return 2 * LINE if size_bytes == 1 and width > LINE else LINE


def _each_key(x, heads):
    """A number a key, [keys], for each of some heads."""
    x = lax.broadcast_in_dim(x, (x.shape[0], heads), (0,))
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


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
    in whole lines and the heads of a group as `padded_heads` has them.
    """
    c = static.config
    batch, n, width = q.shape
    _, size, kv_heads, _ = k.shape
    if page_table is not None:
        num_pages, page, _, _ = k.shape
        size = page_table.shape[1] * page
    together = c.tile if page_table is None else min(c.tile, page)  # keys that are neighbours
    group, dtype = n // kv_heads, q.dtype
    heads, chunks = padded_heads(group, k.dtype), -(-width // LINE)
    packed = k_scale is not None and v_scale is not None
    split_query = k.dtype == jnp.int8
    # P is multiplied by the values' scales. float16 would round what is small to few bits: there
    # the largest of these products is 1, and not the largest p.
    scale_in_top = packed and dtype == jnp.float16
    line = _line(k.dtype.itemsize, width)
    copies, per_line = -(-width // line), line // LINE
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
            # what stands behind a row's pages is not seen, whatever the table says
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

        queries = q_ref.at[row, pl.ds(head * group, heads)]
        for chunk in range(1 if split_query else chunks):
            plgpu.copy_gmem_to_smem(
                queries.at[:, columns(chunk, q_s.shape[-1])],
                q_s if split_query else rows_as_copied(q_s, (chunk,), 0, heads, static.interpret),
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

        if split_query:
            of_bytes.split_query(
                q_s, scratch["q_split"], scratch["q_scale"], interpret=static.interpret
            )
            q_scale = read(scratch["q_scale"], per_head())
        elif packed:
            of_bytes.order_query(q_s, interpret=static.interpret)

        def scales_of(ref):
            if static.interpret:  # it reshapes no reference
                x = lax.dynamic_index_in_dim(ref[...].reshape(c.tile, kv_heads), head, 1, False)
            else:
                layout = plgpu.Layout.WGMMA.reduce(1)
                x = read(ref.reshape(c.tile, kv_heads).at[:, head], layout)
            return _each_key(x, heads)

        def scores(tiles):
            """Of tiles that lie side by side, each a line of the keys' width."""

            def product(acc):
                for chunk, tile in enumerate(tiles):
                    plgpu.wgmma(acc, tile, q_s.at[chunk].T)
                return acc[...]

            return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((c.tile, heads), jnp.float32))

        def scores_of_bytes(tiles):
            if split_query:
                return of_bytes.scores_of_split(tiles, scratch["q_split"]) * each(q_scale, c.tile)
            s = None
            for i, tile in enumerate(tiles):
                lines = min(chunks - i * per_line, per_line)
                x = of_bytes.keys(tile, dtype, interpret=static.interpret)[:, : lines * LINE]
                (x,) = _compat.wgmma_ready(x, interpret=static.interpret)
                q = q_s.at[pl.ds(i * per_line, lines)]
                s = _compat.wgmma(s, x, q, transpose_b=True, interpret=static.interpret)
            return _compat.wgmma_wait(0, s)

        def scaled(s, layout: Any = plgpu.Layout.WGMMA):
            if static.softcap is None:
                return s * (static.scale * LOG2E)
            factor = static.scale / static.softcap
            bent = soft_cap.tanh(s, factor, interpret=static.interpret, layout=layout)
            return static.softcap * LOG2E * bent

        def seen(s, at):
            s = scaled(s)
            key = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
            key = key + at * c.tile
            return jnp.where((key >= first) & (key < held), s, -jnp.inf)

        def weighted(v_tile):
            def product(*accs):
                for chunk, acc in enumerate(accs):
                    plgpu.wgmma(acc, v_tile.at[chunk].T, p_s.T)
                plgpu.wgmma_wait(0)
                return tuple(acc[...] for acc in accs)

            accs = [plgpu.WGMMAAccumulatorRef((LINE, heads), jnp.float32) for _ in range(chunks)]
            return pl.run_scoped(product, *accs)

        def added_bytes(out, less, v_tile):
            parts = []
            for i in range(copies):
                lines = min(chunks - i * per_line, per_line)
                tile = v_tile.at[i]
                parts += of_bytes.values(tile, dtype, lines, interpret=static.interpret)
            plgpu.commit_smem()  # the weights are there, and nobody reads the tile any more
            ready = (*parts, *(o * less for o in out))
            ready = _compat.wgmma_ready(*ready, interpret=static.interpret)
            return [
                _compat.wgmma(o, x, p_s, transpose_b=True, interpret=static.interpret)
                for x, o in zip(ready[:chunks], ready[chunks:], strict=True)
            ]

        def step(i, carry):
            top, total, out = carry
            slot, again = slot_of(i), i + c.stages < count
            plgpu.barrier_wait(scratch["k_full"].at[slot])
            tiles = [k_s.at[slot, j] for j in range(copies)]
            if packed:
                s = scores_of_bytes(tiles) * scales_of(scratch["k_scale"].at[slot])
            else:
                s = scores(tiles)
                pl.when(again)(lambda: load("k", slot, tile_of(i + c.stages)))
            s = bound = seen(s, tile_of(i))
            if scale_in_top:
                plgpu.barrier_wait(scratch["v_full"].at[slot])
                scale = jnp.abs(scales_of(scratch["v_scale"].at[slot]))
                bits = jnp.log2(jnp.maximum(scale, 1e-30))
                bound = jnp.where(s > -jnp.inf, s + bits, -jnp.inf)  # what is not seen may be NaN
            new_top = jnp.maximum(top, jnp.max(bound, axis=0))
            if packed:  # the warps have met: all of them have read the scales
                pl.when(again)(lambda: load("k", slot, tile_of(i + c.stages)))
            less = jnp.exp2(top - new_top)
            p = jnp.exp2(s - each(new_top, c.tile))
            total = total * each(less, c.tile) + p
            less = each(less, LINE)
            if not scale_in_top:
                plgpu.barrier_wait(scratch["v_full"].at[slot])
            if packed:
                p = jnp.where(p > 0, p * scales_of(scratch["v_scale"].at[slot]), 0.0)
            p_s.T[...] = p.astype(dtype)
            if packed:
                out = added_bytes(out, less, v_s.at[slot])
                pl.when(again)(lambda: load("v", slot, tile_of(i + c.stages)))
                out = _compat.wgmma_wait(0, *out)
                return new_top, total, tuple(out) if chunks > 1 else (out,)
            plgpu.commit_smem()
            more = weighted(v_s.at[slot])
            pl.when(again)(lambda: load("v", slot, tile_of(i + c.stages)))
            return new_top, total, tuple(o * less + m for o, m in zip(out, more, strict=True))

        def filled(value, shape, layout: Any = plgpu.Layout.WGMMA):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        start = (
            filled(LOWEST, (heads,), per_head()),
            filled(0, (c.tile, heads)),
            tuple(filled(0, (LINE, heads)) for _ in range(chunks)),
        )

        def line_of(ref, chunk):
            x = ref.at[row, head, pl.ds(chunk * LINE, LINE)]
            return read(x, plgpu.Layout.WGMMA.reduce(1))

        def begin_with_new():
            """The state after the new token alone: its score, one, and its value."""
            products = 0.0
            for chunk in range(chunks):
                q_line = read(q_s.at[chunk].T, plgpu.Layout.WGMMA).astype(jnp.float32)
                k_line = line_of(new_k_ref, chunk).astype(jnp.float32)
                products = products + q_line * _each_key(k_line, heads)
            key = plgpu.broadcasted_iota(jnp.int32, (c.tile, heads), 0, layout=plgpu.Layout.WGMMA)
            values = [line_of(new_v_ref, chunk).astype(jnp.float32) for chunk in range(chunks)]
            return (
                scaled(jnp.sum(products, axis=0), plgpu.Layout.WGMMA.reduce(0)),
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
        share = each(1.0 / jnp.where(some, total, 1.0), LINE)
        outs = [out * share for out in outs]
        if packed:
            outs = of_bytes.results(outs, scratch["parts"], interpret=static.interpret)

        def leave(chunk, sums, outs):
            if parts == 1 and sinks_ref is not None:
                sums = [*sums, read(sinks_ref.at[head], per_head()) * LOG2E]
            lse, out = (sums[0], outs[0]) if len(sums) == 1 else merge(sums, outs)
            if parts == 1:
                put(outputs[0], scratch["out"], row, head, chunk, out, interpret=static.interpret)
                return
            to = outputs[0].at[row, head, part, pl.ds(chunk * LINE, LINE)]
            _compat.store(to, out, interpret=static.interpret)
            if chunk == 0:
                to = outputs[1].at[row, head, part]
                _compat.store(to, lse, interpret=static.interpret)

        if cluster == 1:
            for chunk, out in enumerate(outs):
                leave(chunk, [lse], [out])
        else:
            parts_s, sums_s, meeting = (scratch[name] for name in ("parts", "sums", "meeting"))
            sums_s[...] = lse
            for chunk, out in enumerate(outs):
                _compat.store(parts_s.at[chunk], out, interpret=static.interpret)
            meet_blocks(meeting)
            peers: list[Any] = [{"rank": jnp.int32(i)} for i in range(cluster)]
            for chunk in range(chunks):

                @pl.when(rank == chunk % cluster)
                def _(chunk=chunk):
                    sums = [read(plgpu.cluster_ref(sums_s, peer), per_head()) for peer in peers]
                    ours = [plgpu.cluster_ref(parts_s.at[chunk], peer) for peer in peers]
                    leave(chunk, sums, [read(x, plgpu.Layout.WGMMA) for x in ours])

            meet_blocks(meeting)  # none may go while others read what it has
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
        scratch["parts"] = plgpu.SMEM((chunks, LINE, heads), jnp.float32)
    if split_query:
        scratch["q"] = plgpu.SMEM((heads, copies * line), dtype)
        scratch["q_full"] = plgpu.Barrier(num_arrivals=1)
        scratch["q_split"] = plgpu.SMEM(
            (2, copies, heads, line), jnp.int8, transforms=wgmma_transforms(line, jnp.int8)
        )
        scratch["q_scale"] = plgpu.SMEM((heads,), jnp.float32)
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
        unsafe_no_auto_barriers=packed,  # 12 a tile, where 3 are needed
        **clusters,
    )(lengths, page_table, q, k, v, sinks, k_scale, v_scale, new_k, new_v)
