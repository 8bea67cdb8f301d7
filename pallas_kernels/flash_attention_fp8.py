"""The forward kernel of `flash_attention` for float8_e4m3fn.

As `flash_attention_forward` works, but for what 8 bits want. The tensor cores take operands of 8
bits with the summed dimension innermost only, so the values are transposed once in memory,
[B, K, H, S]. A row of weights is rounded to float8 as 256 times exp(score - the row's largest so
far): at most 256 of 448, and normal numbers down to 2^-14 of the largest. It stays in the registers
that its scores were computed in, where a thread has columns 2c, 2c + 1, 2c + 8 and 2c + 9 of each
16, and the product wants 4c to 4c + 3: so the keys of each 16 stand in that order in the transposed
values, and nothing is moved. Each block's product with the values is a sum of its own, added in
float32, for the tensor cores' own sums of 8-bit products are shorter than that; only heads wider
than 128, for which the registers hold no second sum, go on in theirs.
Imported only by flash_attention.py. Source: Shah et al. 2024 (FlashAttention-3), arXiv:2407.08608,
section 3.3.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import llvm, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels import flash_attention_tiles as tiles
from pallas_kernels.attention_fp8 import FP8, LIFT, TWO_SUMS
from pallas_kernels.flash_attention_plan import Config, Static, bend_and_factor, plan_of
from pallas_kernels.flash_attention_tiles import REGISTERS, filled, wide
from pallas_kernels.wgmma_tiles import WGMMA_ROWS, wgmma_transforms

OUT_LINE = 64  # of the result, of 16 bits


def line_width(columns: int) -> int:
    """Numbers a row of shared memory, of 128 or 64 bytes: what pads columns least."""
    return min((128, 64), key=lambda line: -(-columns // line) * line)


def padded_width(head_width: int) -> int:
    """Of a head in shared memory and in registers."""
    line = line_width(head_width)
    return -(-head_width // line) * line


def registers(config: Config, head_width: int) -> int:
    """Of a consumer's thread: sums, scores and the weights of the block before."""
    width = padded_width(head_width)
    return (width if width <= TWO_SUMS else width // 2) + config.kv_block * 5 // 8


def shared_bytes(config: Config, head_width: int) -> int:
    """On chip: queries, stages of keys and values, results, segment ids, sums, barriers."""
    c, width = config, padded_width(head_width)
    rows = c.q_stages * c.consumers * WGMMA_ROWS + 2 * c.stages * c.kv_block
    rows += 2 * c.consumers * WGMMA_ROWS
    ids = (4 * c.q_stages * c.consumers * WGMMA_ROWS, 4 * c.stages * c.kv_block)
    # Each array begins at a multiple of 1024 bytes; sums over threads take 2048
    return rows * width + sum(-(-size // 1024) * 1024 for size in ids) + 4096


def forward(static: Static, arrays: tuple[Any, ...], score_scale: jax.Array, v_scale: jax.Array):
    """(out bfloat16 [B, T, N, H], lse float32 [B, N, T], natural logarithm; None unless save_lse).

    arrays: q, k, v, q_segment_ids, kv_segment_ids, kv_lengths, sinks. score_scale: float32 [N], of
    q and k together; v_scale: float32 [K].
    """
    q, k, v, q_segment_ids, kv_segment_ids, kv_lengths, sinks = arrays
    c = static.config
    h = q.shape[-1]
    line, width, kv_line = line_width(h), padded_width(h), line_width(c.kv_block)
    parts, kv_parts, out_parts = width // line, c.kv_block // kv_line, width // OUT_LINE
    plan, given = plan_of(static, q, k, q_segment_ids, kv_segment_ids, kv_lengths, sinks)
    given |= {"score_scale": score_scale, "v_scale": v_scale}
    bend, factor = bend_and_factor(static)
    segmented, two_sums = plan.segmented, width <= TWO_SUMS

    def body(q_ref, k_ref, v_ref, rest, out_ref, lse_ref, **scratch):
        block = tiles.Block(plan, rest, scratch, lift=LIFT)
        group, i32 = block.group, jnp.int32
        q_ring, k_ring, v_ring = (block.rings[name] for name in "qkv")

        def copy_block(name, where, kv_head, down, slot, full):
            batch = where["batch"]
            if name == "k":
                for part in range(parts):
                    rows = pl.ds(down, c.kv_block)
                    source = k_ref.at[batch, rows, kv_head, block.columns(part, line, batch)]
                    plgpu.copy_gmem_to_smem(source, block.as_copied("k", slot, part), full)
                return
            for part in range(kv_parts):
                keys = pl.ds(down + part * kv_line, kv_line)
                source = v_ref.at[batch, kv_head, block.columns(0, width, batch), keys]
                plgpu.copy_gmem_to_smem(source, block.as_copied("v", slot, part), full)

        def consume():
            if (registers := REGISTERS[c.consumers][1]) is not None:
                plgpu.set_max_registers(registers, action="increase")

            def multiply_values(sums, weights, at):
                return _compat.wgmma(
                    sums,
                    weights,
                    scratch["v"].at[v_ring.slot(at)],
                    transpose_b=True,
                    interpret=static.interpret,
                )

            def ready(sums, weights, shrink):
                """What the tensor cores add to, None if only now, and the weights."""
                begun = () if two_sums else (sums * wide(shrink, width),)
                *begun, weights = _compat.wgmma_ready(*begun, weights, interpret=static.interpret)
                return (begun[0] if begun else None), weights

            def added(sums, more, shrink):
                return sums * wide(shrink, width) + more if two_sums else more

            def tile(i, carry):
                at, index = carry
                following = block.tile_at(i + 1)
                where = block.tile_of(index)
                q_slot = q_ring.slot(i)
                row = where["start"] + group * WGMMA_ROWS
                where |= {"row": row, "q_ids": q_slot * plan.tile_rows + group * WGMMA_ROWS}
                score_scale = rest["score_scale"][where["head"]]
                if static.softcap is None:
                    where |= {"bend": bend, "factor": jnp.float32(factor) * score_scale}
                else:
                    where |= {"bend": jnp.float32(bend) * score_scale, "factor": factor}
                end = where["end"]

                def step(is_masked, step, carry):
                    sums, weights, top, total, shrink, at = carry
                    k_ring.wait(at)
                    v_ring.wait(at - 1)  # nothing but products between the products
                    block.take_turn()
                    begun, weights = ready(sums, weights, shrink)
                    scores = block.multiply_keys(i, at)
                    more = multiply_values(begun, weights, at - 1)
                    block.end_turn()
                    scores = _compat.wgmma_wait(1, scores)
                    if not (segmented and is_masked):
                        k_ring.give_back(at)
                    new_weights, top, total, new_shrink = block.softmax(
                        where, scores, at, end - 1 - step, top, total, is_masked
                    )
                    if segmented and is_masked:
                        plgpu.commit_smem()  # registers have read ids, which copies overwrite
                        k_ring.give_back(at)
                    new_weights, top, total, new_shrink = lax.optimization_barrier(
                        (new_weights, top, total, new_shrink)
                    )
                    more = _compat.wgmma_wait(0, more)
                    v_ring.give_back(at - 1)
                    sums = added(sums, more, shrink)
                    # rounded only now: no product in flight may find its registers written
                    return sums, _rounded(new_weights, static), top, total, new_shrink, at + 1

                weights, top, total, shrink = block.first_weights(where, i, at)
                sums = filled((WGMMA_ROWS, width), 0, plgpu.Layout.WGMMA)
                carry = (sums, _rounded(weights, static), top, total, shrink, at + 1)
                sums, weights, top, total, shrink, at = block.over_blocks(where, step, carry)
                if segmented:
                    plgpu.commit_smem()
                q_ring.give_back(i)
                v_ring.wait(at - 1)
                begun, weights = ready(sums, weights, shrink)
                more = multiply_values(begun, weights, at - 1)
                share = block.shares(where, top, total, lse_ref)
                share = share * rest["v_scale"][where["head"] // i32(plan.group)]
                more = _compat.wgmma_wait(0, more)
                v_ring.give_back(at - 1)
                sums = (added(sums, more, shrink) * wide(share, width)).astype(jnp.bfloat16)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
                for part in range(out_parts):
                    scratch["out"].at[group, part][...] = sums[
                        :, part * OUT_LINE : (part + 1) * OUT_LINE
                    ]
                plgpu.commit_smem()
                for part in range(out_parts):
                    plgpu.copy_smem_to_gmem(
                        block.as_copied("out", group, part),
                        out_ref.at[
                            where["batch"],
                            pl.ds(row, WGMMA_ROWS),
                            where["head"],
                            block.columns(part, OUT_LINE, row),
                        ],
                    )
                return at, following

            block.begin_turns()
            lax.fori_loop(i32(0), block.tiles, tile, (i32(0), block.tile_at(0)))
            plgpu.wait_smem_to_gmem(0)
            block.end_turns()

        lax.cond(group == c.consumers, lambda: block.produce(q_ref, copy_block), consume)

    def tile(lead, rows, line, dtype=FP8):
        return plgpu.SMEM((*lead, rows, line), dtype, transforms=wgmma_transforms(line, dtype))

    scratch = {
        "q": tile((c.q_stages, c.consumers, parts), WGMMA_ROWS, line),
        "k": tile((c.stages, parts), c.kv_block, line),
        "v": tile((c.stages, kv_parts), width, kv_line),
        "out": tile((c.consumers, out_parts), WGMMA_ROWS, OUT_LINE, jnp.bfloat16),
        **tiles.shared_scratch(plan, q_parts=parts, k_parts=parts, v_parts=kv_parts),
    }
    out_type = jax.ShapeDtypeStruct(q.shape, jnp.bfloat16)
    return tiles.call(body, plan, (q, k, _transposed(v)), given, out_type, scratch)


def _in_order(x: jax.Array) -> jax.Array:
    """Columns as the product finds weights in registers: of 16, those of a thread side by side."""
    groups = x.reshape(*x.shape[:-1], -1, 2, 4, 2)
    return jnp.swapaxes(groups, -3, -2).reshape(x.shape)


def _transposed(v: jax.Array) -> jax.Array:
    """[B, S, K, H] as [B, K, H, S], with zeros up to a multiple of 16 and keys as `_in_order`."""
    v = jnp.pad(v, ((0, 0), (0, -v.shape[1] % 16), (0, 0), (0, 0)))
    return _in_order(jnp.transpose(v, (0, 2, 3, 1)))


def _rounded(weights: jax.Array, static: Static) -> jax.Array:
    """Float8 for the left side of a product, columns as `_in_order`: no thread asks another."""
    if static.interpret:
        return _in_order(weights.astype(FP8))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(weights.shape, FP8, layout=plgpu.Layout.WGMMA_8BIT),
    )
    def narrow(_: Any, *arrays: Any) -> Any:
        pairs = arrays[0].registers.reshape(-1, 2, 2)  # 16 columns, 8 of them, half of the rows
        words = np.empty((pairs.shape[0], 2), dtype=object)
        for column, half in np.ndindex(words.shape):
            words[column, half] = _four(pairs[column, 0, half], pairs[column, 1, half])
        layout = fragmented_array.WGMMA_LAYOUT_8BIT
        registers = words.reshape(layout.registers_shape(weights.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return narrow(weights)


def _four(first: Any, second: Any) -> Any:
    """Two pairs of float32 as four numbers of 8 bits."""
    i32 = ir.IntegerType.get_signless(32)
    numbers = [
        vector.extract(x, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
        for x in (first, second)
        for i in range(2)
    ]
    word: Any = llvm.inline_asm(
        i32,
        numbers,
        """{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }""",
        "=r,f,f,f,f",
    )
    one = ir.VectorType.get((1,), i32)
    return vector.bitcast(
        ir.VectorType.get((4,), ir.Float8E4M3FNType.get()), vector.broadcast(one, word)
    )
