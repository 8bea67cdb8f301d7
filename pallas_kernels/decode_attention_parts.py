"""The parts of a row and key head that blocks leave, and how they are added.

A part is a result divided by the sum of its weights, and the logarithm of that sum; numbers lie as
wgmma leaves them, [64, heads]. Imported only by decode_attention_kernel.py and decode_attention.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import LOG2E
from pallas_kernels.wgmma_tiles import WGMMA_ROWS

HEADS = 8  # the least that a matrix product has
LINE = WGMMA_ROWS  # also the numbers of 16 bits in 128 bytes, the widest swizzle


def padded_heads(group: int, dtype) -> int:
    """Columns for the query heads that share a key head; wgmma of int8 has no 40 or 56 of them."""
    step = 2 * HEADS if dtype == jnp.int8 and group > 4 * HEADS else HEADS
    return -(-group // step) * step


def read(ref, layout):
    """Memory in registers; JAX need not prove that no two threads wait for one bank."""
    return _compat.load(ref, layout, optimized=False)


def per_head():
    """How a number a head lies where `each` spreads it."""
    return plgpu.Layout.WGMMA.reduce(0)


def each(x, rows):
    """A number a head, [heads], for each of some rows, as wgmma lays out its result."""
    x = lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


def merge(sums, parts):
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
        out = out + part * each(share / total, LINE)
    return top + jnp.log2(total), out


def put(out_ref, o_s, row, head, chunk, out, first: int = 0, *, interpret: bool):
    """Rounds 64 numbers of every head, [64, heads], and brings them where the result has them.

    first: of the heads that share the key head, the one that these begin with.
    """
    group, width = out_ref.shape[2:]
    count = min(group - first, out.shape[1])
    size = min(LINE, width - chunk * LINE)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    _compat.store(o_s.T, out.astype(o_s.dtype), interpret=interpret)
    plgpu.commit_smem()
    columns = pl.ds(chunk * LINE, size)
    if size == LINE:
        to = out_ref.at[row, head, pl.ds(first, count), columns]
        plgpu.copy_smem_to_gmem(o_s.at[pl.ds(0, count)], to)
    else:  # one by one, so that no copy passes the end of a row
        for i in range(count):
            to = out_ref.at[row, head, first + i, columns]
            plgpu.copy_smem_to_gmem(o_s.at[i, pl.ds(0, size)], to)


def combine(outs, sums, like, *, sinks=None, interpret: bool):
    """The result [B, K, N / K, H], for q `like`, of the parts that `attend` leaves.

    A block has 64 numbers of 8 heads, and all parts of them in registers.
    """
    batch, kv_heads, parts, *_ = outs.shape
    _, n, width = like.shape
    group = n // kv_heads
    places = [(i, j) for i in range(0, group, HEADS) for j in range(-(-width // LINE))]

    def body(outs_ref, sums_ref, sinks_ref, out_ref, o_s):
        head, row = lax.axis_index("head"), lax.axis_index("row")
        some = lambda first: pl.ds(first, HEADS)  # noqa: E731
        for place, (first, chunk) in enumerate(places):

            @pl.when(lax.axis_index("place") == place)
            def _(first=first, chunk=chunk):
                sums = [
                    read(sums_ref.at[row, head, i, some(first)], per_head()) for i in range(parts)
                ]
                if sinks_ref is not None:
                    sums.append(read(sinks_ref.at[head, some(first)], per_head()) * LOG2E)
                columns = pl.ds(chunk * LINE, LINE)
                lines = [outs_ref.at[row, head, i, columns, some(first)] for i in range(parts)]
                _, out = merge(sums, [read(x, plgpu.Layout.WGMMA) for x in lines])
                put(out_ref, o_s, row, head, chunk, out, first, interpret=interpret)

        plgpu.wait_smem_to_gmem(0)

    return _compat.kernel(
        body,
        name="decode_attention_combine",
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, group, width), like.dtype),
        scratch_types={"o_s": plgpu.SMEM((HEADS, LINE), like.dtype)},
        grid=(len(places), kv_heads, batch),
        grid_names=("place", "head", "row"),
        interpret=interpret,
        approx_math=True,
    )(outs, sums, sinks)
