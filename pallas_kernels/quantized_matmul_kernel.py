"""The kernel of `quantized_matmul` for few rows of x, whose time is that of reading the codes.

A block takes some rows of the weight after others, and its warps divide K: each goes over 128 bytes
of a row at a time, and multiplies what it has unpacked in registers (mma, the tensor cores of a
warp) with x, which lies on chip, in the order in which the codes come out of their words (brought
by the copy engine, `quantized_tma`, it is put in order on its way into registers). Codes and scales
of the next turns, of the next rows too, are on their way into a ring on chip. The warps'
sums meet on chip and are added in the order of the warps, so that the same call gives the same
bits. A scale of a group that is half a turn or more multiplies its float32 sums; that of a smaller
group multiplies the numbers. A norm of x costs no launch: its weight multiplies x on the way on
chip, its root the sums. Where x does not lie on chip whole, or where that is faster, K is split
over blocks too, each of which writes the sums of its part. Where the outputs are heads of q, k and
v, a tile has as many rows of a head's first half as of its second, and what one angle turns meets
in a thread, which writes it where it belongs, keys and values into the cache's own memory. Imported
only by quantized_matmul.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels import quantized_matmul_config as sizes
from pallas_kernels.device import WARPS
from pallas_kernels.head_places import HeadPlaces
from pallas_kernels.lane_code import address_of
from pallas_kernels.packed import Packed
from pallas_kernels.quantized_matmul_config import Static
from pallas_kernels.quantized_matmul_lanes import Block


def warp_products(
    static: Static,
    x,
    packed: Packed,
    norm=None,
    bias=None,
    residual=None,
    angles=None,
    cache=None,
    *,
    plain: Callable[..., jax.Array],
):
    """[splits, M, N] of x [M, K]: of more splits than one each its part of the sums. norm: the
    weight [K] of an RMSNorm of x. angles: cos and sin, [M, H / 2] each; then q's outputs alone are
    N, and the cache's keys and values come with them.
    plain: (static, x, weight, norm, bias, residual) -> the same of a block's rows in plain JAX,
    heads not turned yet, for the interpreter, which knows neither a warp's products nor a lane's
    registers.
    """
    c, interpret, heads = static.config, static.interpret, static.heads
    m, halves, apart = x.shape[0], static.halves, static.apart(packed.shape[0])
    n, rows = packed.shape[0] // (1 + static.gated), c.tile_n // halves
    tiles = packed.shape[0] // c.tile_n
    blocks = tiles if interpret else sizes.num_blocks(c, tiles, static.num_sms)
    parts = ("codes", "scale", "zero", "row_scale")
    # by name: an array, and which of its dimensions is that of the weight's rows
    arrays = {name: (getattr(packed, name), 0 if name == "codes" else -1) for name in parts}
    arrays |= {"bias": (bias, -1)}
    arrays = {name: x for name, x in arrays.items() if x[0] is not None}

    # x as the copy engine brings it: see quantized_tma.py
    as_copied = (
        plgpu.TilingTransform((sizes.columns(m), sizes.TMA_NUMBERS)),
        plgpu.SwizzleTransform(128),
    )

    def body(x_ref, norm_ref, residual_ref, angle_refs, held, *refs, **scratch):
        *given, out_ref = refs
        given = dict(zip(arrays, given, strict=True))
        if interpret:
            block = lax.axis_index("block")
            starts = [block * rows + half * apart for half in range(halves)]
            if heads is not None:
                places = HeadPlaces(block, rows, heads.half, (heads.q, heads.kv))
                starts = places.starts
            place = [pl.ds(start, rows) for start in starts]

            def both(name):
                ref, along = given[name], arrays[name][1]
                wide = along == -1 and len(ref.shape) == 2
                pieces = [ref[:, at] if wide else ref[at] for at in place]
                return jnp.concatenate(pieces, axis=along)

            whole = {name: both(name) for name in given}
            added = whole.pop("bias", None)
            weight = dataclasses.replace(packed, **whole)
            more = None if residual_ref is None else residual_ref[:, place[0]]
            scale = None if norm_ref is None else norm_ref[...]
            split = lax.axis_index("split")
            of_split = jnp.arange(x.shape[1]) // (
                sizes.share(c, packed) * sizes.turn(packed.scheme)
            )
            part = jnp.where(of_split == split, x_ref[...], 0)
            y = plain(static, part, weight, scale, added, more)
            if heads is None:
                out_ref[pl.ds(split * m, m), place[0]] = y
                return

            def rounded(a):
                return a.astype(x.dtype).astype(jnp.float32)

            for one in range(m):
                here = pl.ds(places.first, rows)
                cos, sin = (rounded(ref[one, here]) for ref in angle_refs)
                turned = places.turned(jnp.split(rounded(y[one]), 2), cos, sin)
                for whether, *targets in places.targets([out_ref], held, one):

                    @pl.when(whether)
                    def _(turned=turned, targets=targets):
                        for part, target in zip(turned, targets, strict=True):
                            target[...] = part.astype(x.dtype)

            return
        refs = {"x": x_ref, **given, "out": out_ref, **scratch}
        optional = {"norm": norm_ref, "residual": residual_ref}
        if heads is not None:
            optional |= dict(zip(("cos", "sin"), angle_refs, strict=True))
            optional |= dict(zip(("k", "v", "slots"), held, strict=True))
        refs |= {name: ref for name, ref in optional.items() if ref is not None}

        arrived = refs.pop("arrived", None)
        types = jax.tree.map(lambda _: plgpu.RefType(), refs)
        if c.tma:
            types["kept"] = plgpu.RefType(as_copied)
        index = lax.axis_index("block")

        def of_block(do: Callable[[Block], None]) -> None:
            @plgpu.inline_mgpu(arg_types=(types, plgpu.Layout.WG_SPLAT))
            def run(_: Any, refs: Any, block: Any) -> Any:
                pointers = jax.tree.map(address_of, refs)
                do(Block(static, x, packed, dtypes, pointers, block.registers.item()))

            run(refs, index)  # pyright: ignore[reportCallIssue]

        if c.tma:

            @pl.when(lax.axis_index("group") == 0 if threads else True)
            def _():
                # Where it begins must be known to the run alone: it may pass the end of x
                start = lax.rem(index, c.splits) * sizes.share(c, packed)
                rows, numbers = scratch["kept"].shape
                source = pl.ds(index * 0, rows), pl.ds(start * sizes.turn(packed.scheme), numbers)
                plgpu.copy_gmem_to_smem(x_ref.at[*source], scratch["kept"], arrived)

            of_block(Block.ask)
            plgpu.barrier_wait(arrived)
        of_block(Block.run)

    cos, sin = angles or (None, None)
    named = {"bias": bias, "cos": cos, "sin": sin}
    dtypes = {name: array.dtype for name, array in named.items() if array is not None}
    held = None if cache is None else (_compat.hold(cache.k), _compat.hold(cache.v), cache.slots)
    width = n if heads is None else 2 * heads.half * heads.q
    threads: Any = {}
    if c.warps > WARPS and not interpret:
        threads = {"num_threads": c.warps // WARPS, "thread_name": "group"}
    scratch: dict[str, Any] = {}
    if not interpret:
        sizes_bytes = {
            "ring": c.ahead * c.warps * sizes.warp_bytes(c, packed),
            "sums": sizes.sums_bytes(c, m, packed),
            **sizes.kept_bytes(c, m, packed),
        }
        scratch = {name: plgpu.SMEM((size,), jnp.uint8) for name, size in sizes_bytes.items()}
        scratch["parts"] = plgpu.SMEM((2, c.warps, m, c.tile_n), jnp.float32)
        if c.tma:
            of_x = (sizes.columns(m), sizes.numbers(c, packed))
            scratch["kept"] = plgpu.SMEM(of_x, x.dtype, transforms=as_copied)
            scratch["arrived"] = plgpu.Barrier(num_arrivals=1)
    y = _compat.kernel(
        body,
        name=static.name,
        out_type=jax.ShapeDtypeStruct((c.splits * m, width), static.out_dtype),
        scratch_types=scratch,
        grid=(blocks, c.splits) if interpret else (blocks * c.splits,),
        grid_names=("block", "split") if interpret else ("block",),
        interpret=interpret,
        approx_math=True,
        **threads,
    )(x, norm, residual, angles, held, *(x for x, _ in arrays.values()))
    y = y.reshape(c.splits, m, width)
    return y if held is None else (y, _compat.let_go(held[0]), _compat.let_go(held[1]))
