"""Small Mosaic kernels made for the tests of compilation: good ones, and some with a fault each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat

ROWS = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
WIDE_ROWS = jax.ShapeDtypeStruct((64, 65536), jnp.float32)  # 512 registers a thread
SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)


def _kernel(body: Any, name: str, grid: tuple[int, ...], scratch: Any, **keywords: Any) -> Any:
    names = ("i", "j")[: len(grid)]
    return _compat.kernel(
        body,
        name=name,
        grid=grid,
        grid_names=names,
        scratch_types=scratch,
        interpret=False,
        **keywords,
    )


def double(x: jax.Array) -> jax.Array:
    """By the copy engine, through shared memory: no row is reduced."""

    def body(x_gmem, o_gmem, smem, barrier):
        at = jax.lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x_gmem.at[at], smem, barrier)
        plgpu.barrier_wait(barrier)
        smem[...] = smem[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_gmem.at[at])
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((x.shape[1],), x.dtype), plgpu.Barrier()]
    return _kernel(body, "double", (x.shape[0],), scratch, out_type=x)(x)


def row_sum(x: jax.Array, *, vector: int = 2) -> jax.Array:
    """A row a block, straight from global memory, `vector` elements a thread at once; the row is
    kept while it is summed, so that WIDE_ROWS spill.
    """

    def body(x_gmem, o_gmem):
        at = jax.lax.axis_index("i")
        layout = plgpu.Layout.WG_STRIDED((x.shape[1],), vec_size=vector)
        row = plgpu.load(x_gmem.at[at], layout=layout, optimized=False)
        total = jnp.sum(row.astype(jnp.float32))
        o_gmem[at] = (row.astype(jnp.float32) + total).astype(x.dtype)

    return _kernel(body, "row_sum", (x.shape[0],), (), out_type=x)(x)


def product(a: jax.Array, b: jax.Array, *, columns: int = 128) -> jax.Array:
    """A 128 x `columns` tile a block on the tensor cores; 256 leave no register for the rest."""
    m, k = a.shape
    n = b.shape[1]
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, barrier):
        rows = pl.ds(jax.lax.axis_index("i") * 128, 128)
        cols = pl.ds(jax.lax.axis_index("j") * columns, columns)

        def accumulate(acc):
            @pl.loop(0, k // 64)
            def _step(step):
                at = pl.ds(step * 64, 64)
                plgpu.copy_gmem_to_smem(a_gmem.at[rows, at], a_smem, barrier)
                plgpu.copy_gmem_to_smem(b_gmem.at[at, cols], b_smem, barrier)
                plgpu.barrier_wait(barrier)
                plgpu.wgmma(acc, a_smem, b_smem)
                plgpu.wgmma_wait(0)

            return acc[...]

        acc = pl.run_scoped(accumulate, plgpu.ACC((128, columns), jnp.float32))
        o_smem[...] = acc.astype(o_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, cols])
        plgpu.wait_smem_to_gmem(0)

    scratch = [
        plgpu.SMEM((128, 64), a.dtype, transforms=tiled),
        plgpu.SMEM((64, columns), b.dtype, transforms=tiled),
        plgpu.SMEM((128, columns), a.dtype, transforms=tiled),
        plgpu.Barrier(num_arrivals=2),
    ]
    out = jax.ShapeDtypeStruct((m, n), a.dtype)
    return _kernel(body, "product", (m // 128, n // columns), scratch, out_type=out)(a, b)
