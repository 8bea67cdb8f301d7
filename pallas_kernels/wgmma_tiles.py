"""Tiles in shared memory that both wgmma (matrix products) and TMA (the copy engine) take."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LINE_BYTES = 128  # of the widest swizzle: what a row of a tile has at most
WGMMA_ROWS = 64  # of one instruction


def wgmma_transforms(width: int, dtype) -> tuple[Any, ...]:
    """As wgmma reads shared memory, `width` numbers a row."""
    size_bytes = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(width * size_bytes * 8)
    return plgpu.TilingTransform((8, swizzle // size_bytes)), plgpu.SwizzleTransform(swizzle)


def rows_as_copied(ref, index, start, size, interpret):
    """Some rows of a tile one swizzle wide, as the copy engine may write or read them.

    wgmma reads [rows / 8, 1, 8, columns], which is [rows, columns] in memory; but a copy that is
    told so wants whole tiles of 8 rows and of the swizzle in global memory too.
    """
    if interpret:  # it knows no layouts
        return ref.at[*index, pl.ds(start, size)]
    unswizzle, untile = ref.transforms
    view = ref.ref.at[*index, pl.ds(start // 8, size // 8)].reshape(size, untile.tiling[1])
    return type(ref)(view.ref, (*view.transforms, unswizzle))
