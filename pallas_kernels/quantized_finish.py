"""What follows the sums of a tile of `quantized_matmul`: they meet on chip, and become the result.

As in lane_code.py, values are those of one thread. Imported only by quantized_matmul_lanes.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.device import LANES
from pallas_kernels.lane_code import (
    asm,
    further,
    gated,
    less,
    load_float,
    store_float,
    times,
    word,
)
from pallas_kernels.lane_norm import reciprocal_root
from pallas_kernels.quantized_matmul_config import ACROSS, MMA_COLUMNS, MMA_ROWS, PART_BYTES


@dataclasses.dataclass(frozen=True)
class Finish:
    """Of a tile of `rows` outputs of each half of the weight, for x [m, k].

    at: addresses, by name: out, row_scale, bias and residual, those that there are; on chip kept,
    x's rows of row_bytes. n: outputs of a row of x. out_row: of out, where x's first goes.
    eps: that of an RMSNorm of x, whose sums of squares lie behind the rows; None: there is none.
    """

    at: Mapping[str, Any]
    m: int
    k: int
    n: int
    rows: int
    halves: int
    warps: int
    scheme: str
    dtype: Any
    bias_dtype: Any
    out_dtype: Any
    row_bytes: int
    out_row: Any
    eps: float | None = None

    @property
    def tile_n(self) -> int:
        return self.halves * self.rows

    def show(self, sums: list[Any], parts: Any) -> None:
        """Writes a warp's sums, as `mma` leaves them, at parts [warps, m, tile_n]."""
        thread = mgpu_utils.thread_idx()
        warp, lane = (f(thread, word(LANES)) for f in (arith.divui, arith.remui))
        row, across = (f(lane, word(ACROSS)) for f in (arith.divui, arith.remui))
        columns = times(across, 2)
        start = arith.addi(times(warp, self.m), columns)
        start = arith.addi(times(start, self.tile_n), row)
        address = further(parts, times(start, 4))
        tiles = self.tile_n // MMA_ROWS
        count = len(sums) // (4 * tiles)
        for j in range(count):
            for e in range(2):
                column = MMA_COLUMNS * j + e

                def write(column=column, j=j, e=e):
                    for i in range(tiles):
                        for down in range(2):
                            value = sums[4 * (i * count + j) + 2 * down + e]
                            offset = 4 * (column * self.tile_n + 16 * i + 8 * down)
                            text = f"st.shared.f32 [$0 + {offset}], $1;"
                            asm(text, "", address, value, effects=True)

                if column + MMA_COLUMNS - 2 < self.m:
                    write()
                elif column < self.m:
                    with mgpu_utils.when(less(columns, self.m - column)):
                        write()

    def run(self, parts: Any, first: Any) -> None:
        """Adds the warps' sums in order, and what follows; a result is a thread's.

        first: of the tile's outputs, a half's.
        """
        count, threads = self.m * self.rows, self.warps * LANES
        for start in range(0, count, threads):
            place = arith.addi(mgpu_utils.thread_idx(), word(start))
            if start + threads <= count:
                self._one(place, parts, first)
                continue
            with mgpu_utils.when(less(place, count)):
                self._one(place, parts, first)

    def _one(self, place: Any, parts: Any, first: Any) -> None:
        one, row = (f(place, word(self.rows)) for f in (arith.divui, arith.remui))
        whole, ys = arith.addi(first, row), []
        root = None if self.eps is None else self._root(one, self.eps)
        for half in range(self.halves):
            at = arith.addi(times(one, self.tile_n), row)
            address = further(parts, times(at, 4))
            y: Any = None
            for warp in range(self.warps):
                offset = 4 * (warp * self.m * self.tile_n + half * self.rows)
                part = asm(f"ld.shared.f32 $0, [$1 + {offset}];", "f", address, effects=True)
                y = part if y is None else arith.addf(y, part)
            rest = unpack.rest(self.scheme, self.dtype)
            if rest != 1:
                y = arith.mulf(y, arith.constant(ir.F32Type.get(), rest))
            if root is not None:
                y = arith.mulf(y, root)
            if "row_scale" in self.at:
                y = arith.mulf(y, self._number("row_scale", half, whole, jnp.float32))
            if "bias" in self.at:
                y = arith.addf(y, self._number("bias", half, whole, self.bias_dtype))
            ys.append(y)
        y = ys[0] if self.halves == 1 else gated("swiglu", *ys)
        index = arith.addi(times(one, self.n), whole)
        if "residual" in self.at:
            y = arith.addf(y, self._number("residual", 0, index, self.out_dtype))
        out = jnp.dtype(self.out_dtype)
        index = arith.addi(index, times(self.out_row, self.n))
        address = further(self.at["out"], times(index, out.itemsize))
        store_float(address, y, out.name)

    def _root(self, one: Any, eps: float) -> Any:
        """Of the norm of a row of x."""
        address, total = further(self.at["kept"], times(one, self.row_bytes)), None
        for warp in range(0, self.warps, 4):
            offset = self.row_bytes - PART_BYTES + 4 * warp
            text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
            for part in asm(text, "ffff", address, effects=True):
                total = part if total is None else arith.addf(total, part)
        return reciprocal_root(total, self.k, eps)

    def _number(self, name: str, half: int, index: Any, dtype: Any) -> Any:
        index = arith.addi(index, word(half * self.n))
        address = further(self.at[name], times(index, jnp.dtype(dtype).itemsize))
        return load_float(address, jnp.dtype(dtype).name)
