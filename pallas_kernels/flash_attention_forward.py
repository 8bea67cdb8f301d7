"""The forward kernel of `flash_attention` for numbers of 16 bits.

One block stays on each multiprocessor. A tile is 64 queries of one head for each consumer; tiles
come in an order that shares keys and values in the L2 and puts the longest first. A warpgroup of
few registers brings queries, keys and values through the copy engine (TMA), keys and values into
rings of stages, and runs ahead into the next tile. Each consumer warpgroup goes through the blocks
of keys from the last to the first: while the tensor cores multiply the weights of one block by its
values, it computes the weights of the next from scores that they finished before. Consumers take
turns in giving the tensor cores work, so that the softmax of one runs under the products of the
other. Scores and weights never leave the registers. Only blocks that some query of the tile sees
are visited, and only those that some query does not wholly see are masked.
Imported only by flash_attention.py. Source: Shah et al. 2024 (FlashAttention-3), arXiv:2407.08608.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels import flash_attention_tiles as tiles
from pallas_kernels.flash_attention_plan import Config, Static, bend_and_factor, plan_of
from pallas_kernels.flash_attention_tiles import REGISTERS, filled, wide
from pallas_kernels.wgmma_tiles import WGMMA_ROWS, wgmma_transforms


def line_width(head_width: int) -> int:
    """Numbers a row of shared memory, of 128 or 64 bytes: what pads a head least."""
    return min((64, 32), key=lambda line: -(-head_width // line) * line)


def padded_width(head_width: int) -> int:
    """Of a head in shared memory and in registers."""
    line = line_width(head_width)
    return -(-head_width // line) * line


def shared_bytes(config: Config, head_width: int) -> int:
    """On chip: queries, stages of keys and values, segment ids, barriers."""
    c, width = config, padded_width(head_width)
    rows = c.q_stages * c.consumers * WGMMA_ROWS + 2 * c.stages * c.kv_block
    ids = 4 * (c.q_stages * c.consumers * WGMMA_ROWS + c.stages * c.kv_block)
    return rows * width * 2 + ids + 2048


def forward(static: Static, q, k, v, q_segment_ids, kv_segment_ids, kv_lengths, sinks):
    """(out [B, T, N, H], lse float32 [B, N, T], natural logarithm; None unless save_lse)."""
    c = static.config
    h, dtype = q.shape[-1], q.dtype
    line, width = line_width(h), padded_width(h)
    parts = width // line
    plan, given = plan_of(static, q, k, q_segment_ids, kv_segment_ids, kv_lengths, sinks)
    tile_rows, segmented = plan.tile_rows, plan.segmented
    bend, factor = bend_and_factor(static)

    def body(q_ref, k_ref, v_ref, rest, out_ref, lse_ref, **scratch):
        block = tiles.Block(plan, rest, scratch)
        group, i32 = block.group, jnp.int32
        q_ring, k_ring, v_ring = (block.rings[name] for name in "qkv")

        def copy_block(name, where, kv_head, down, slot, full):
            batch, source = where["batch"], {"k": k_ref, "v": v_ref}[name]
            for part in range(parts):
                plgpu.copy_gmem_to_smem(
                    source.at[
                        batch, pl.ds(down, c.kv_block), kv_head, block.columns(part, line, batch)
                    ],
                    block.as_copied(name, slot, part),
                    full,
                )

        def consume():
            if (registers := REGISTERS[c.consumers][1]) is not None:
                plgpu.set_max_registers(registers, action="increase")

            def give_back_queries(i):
                """The result, which lies in the place of a tile's queries, has left it."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                q_ring.give_back(i)

            def multiply_values(sums, weights, at):
                return _compat.wgmma(
                    sums,
                    weights,
                    scratch["v"].at[v_ring.slot(at)],
                    interpret=static.interpret,
                )

            def where_is(index):
                tile = block.tile_of(index)
                return tile | {"row": tile["start"] + group * WGMMA_ROWS}

            def tile(i, carry):
                at, index = carry
                following = block.tile_at(i + 1)
                where = where_is(index)
                q_slot = q_ring.slot(i)
                where["q_ids"] = q_slot * tile_rows + group * WGMMA_ROWS
                where |= {"bend": bend, "factor": factor}
                end = where["end"]

                def step(is_masked, step, carry):
                    sums, weights, top, total, at = carry
                    k_ring.wait(at)
                    v_ring.wait(at - 1)  # nothing but products between the products
                    block.take_turn()
                    sums, weights = _compat.wgmma_ready(sums, weights, interpret=static.interpret)
                    scores = block.multiply_keys(i, at)
                    sums = multiply_values(sums, weights, at - 1)
                    block.end_turn()
                    scores = _compat.wgmma_wait(1, scores)
                    if not (segmented and is_masked):
                        k_ring.give_back(at)
                    weights, top, total, shrink = block.softmax(
                        where, scores, at, end - 1 - step, top, total, is_masked
                    )
                    if segmented and is_masked:
                        plgpu.commit_smem()  # registers have read ids, which copies overwrite
                        k_ring.give_back(at)
                    weights, top, total, shrink = lax.optimization_barrier(
                        (weights, top, total, shrink)
                    )
                    sums = _compat.wgmma_wait(0, sums)
                    v_ring.give_back(at - 1)
                    # rounded only now: no product in flight may find its registers written
                    weights = weights.astype(dtype)
                    return sums * wide(shrink, width), weights, top, total, at + 1

                weights, top, total = block.first_weights(where, i, at)[:3]
                if c.q_stages > 1:

                    @pl.when(i > 0)
                    def _():
                        give_back_queries(i - 1)

                sums = filled((WGMMA_ROWS, width), 0, plgpu.Layout.WGMMA)
                carry = (sums, weights.astype(dtype), top, total, at + 1)
                sums, weights, top, total, at = block.over_blocks(where, step, carry)
                # worked out anew: kept through the loops it takes three registers, which heads of
                # 256 and a window would spill
                where = where_is(lax.optimization_barrier(index))
                v_ring.wait(at - 1)
                sums, weights = _compat.wgmma_ready(sums, weights, interpret=static.interpret)
                sums = multiply_values(sums, weights, at - 1)
                share = block.shares(where, top, total, lse_ref)
                sums = _compat.wgmma_wait(0, sums)
                v_ring.give_back(at - 1)
                sums = (sums * wide(share, width)).astype(dtype)
                for part in range(parts):
                    scratch["q"].at[q_slot, group, part][...] = sums[
                        :, part * line : (part + 1) * line
                    ]
                plgpu.commit_smem()
                for part in range(parts):
                    plgpu.copy_smem_to_gmem(
                        block.as_copied("q", q_slot, group, part),
                        out_ref.at[
                            where["batch"],
                            pl.ds(where["row"], WGMMA_ROWS),
                            where["head"],
                            block.columns(part, line, where["row"]),
                        ],
                    )
                if c.q_stages == 1:
                    give_back_queries(i)
                return at, following

            block.begin_turns()
            lax.fori_loop(i32(0), block.tiles, tile, (i32(0), block.tile_at(0)))
            if c.q_stages > 1:  # no block is without a tile
                give_back_queries(block.tiles - 1)
            plgpu.wait_smem_to_gmem(0)
            block.end_turns()

        lax.cond(group == c.consumers, lambda: block.produce(q_ref, copy_block), consume)

    transforms = wgmma_transforms(line, dtype)
    tile_of_keys = plgpu.SMEM((c.stages, parts, c.kv_block, line), dtype, transforms=transforms)
    scratch = {
        "q": plgpu.SMEM(
            (c.q_stages, c.consumers, parts, WGMMA_ROWS, line), dtype, transforms=transforms
        ),
        "k": tile_of_keys,
        "v": tile_of_keys,
        **tiles.shared_scratch(plan, q_parts=parts, k_parts=parts, v_parts=parts),
    }
    out, lse = tiles.call(
        body, plan, (q, k, v), given, jax.ShapeDtypeStruct(q.shape, dtype), scratch
    )
    return out, lse
