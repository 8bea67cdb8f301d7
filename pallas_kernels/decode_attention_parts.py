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
from pallas_kernels.attention_reference import LOG2E
from pallas_kernels.wgmma_tiles import WGMMA_ROWS

LINE = WGMMA_ROWS  # also the numbers of 16 bits in 128 bytes, the widest swizzle


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


def put(out_ref, o_s, row, head, chunk, out):
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


def combine(outs, sums, like, *, sinks=None, interpret: bool):
    """The result [B, K, N / K, H], for q `like`, of the parts that `attend` leaves."""
    batch, kv_heads, parts, _, heads = outs.shape
    _, n, width = like.shape
    chunks = -(-width // LINE)

    def body(outs_ref, sums_ref, sinks_ref, out_ref, o_s):
        head, row = lax.axis_index("head"), lax.axis_index("row")
        sums = [read(sums_ref.at[row, head, i], per_head()) for i in range(parts)]
        if sinks_ref is not None:
            sums.append(read(sinks_ref.at[head], per_head()) * LOG2E)
        for chunk in range(chunks):

            @pl.when(lax.axis_index("chunk") == chunk)
            def _(chunk=chunk):
                lines = [outs_ref.at[row, head, i, pl.ds(chunk * LINE, LINE)] for i in range(parts)]
                _, out = merge(sums, [read(x, plgpu.Layout.WGMMA) for x in lines])
                put(out_ref, o_s, row, head, chunk, out)

        plgpu.wait_smem_to_gmem(0)

    return _compat.kernel(
        body,
        name="decode_attention_combine",
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, n // kv_heads, width), like.dtype),
        scratch_types={"o_s": plgpu.SMEM((heads, LINE), like.dtype)},
        grid=(chunks, kv_heads, batch),
        grid_names=("chunk", "head", "row"),
        interpret=interpret,
        approx_math=True,
    )(outs, sums, sinks)
