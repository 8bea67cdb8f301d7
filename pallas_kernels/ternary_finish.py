"""What follows the sums of a tile of `ternary_matmul`: scales, bias, gate, residual, the result.

Values are those of one thread, told in PTX. The warps' sums lie in shared memory, for each row of x
a line of those of the tile, and behind them that of x itself, where x came as int8. Imported only
by ternary_matmul_kernel.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.device import LANES
from pallas_kernels.lane_code import (
    MOST_EARLY,
    asm,
    further,
    gated,
    less,
    load_float,
    load_shared,
    results,
    store_float,
    times,
)


@dataclasses.dataclass
class Finish:
    """Of a tile of `rows` outputs of each half of the weight, for m rows of x.

    at: addresses, by name; of row_scale and bias one of each half. n: outputs of a row of x. line:
    words between two rows of x in the sums; lines: rows that a warp has there. rows_of_x: what
    `quantise_rows` has returned, where x came as floats.
    """

    at: Mapping[str, Any]
    m: int
    n: int
    rows: int
    halves: int
    warps: int
    line: int
    lines: int
    epilogue: str | None
    out_dtype: str
    bias_dtype: str
    rows_of_x: tuple[list[Any], list[Any]] | None = None

    def early(self) -> list[dict[str, Any]]:
        """What `_operands` gives for each result of a thread, if they are few: asked for before the
        codes, they are there at the end, when nothing else would be on its way.
        """
        mine = results(self.m, self.rows, self.warps * LANES)
        if len(mine) > MOST_EARLY:
            return []
        return [self._operands(one, row) for one, row, _ in mine]

    def _operands(self, one: Any, row: Any) -> dict[str, Any]:
        """What a result is made of beside its sums, by name; of gamma and bias one of each half."""
        found: dict[str, Any] = {}
        if "x_scale" in self.at:
            found["x_scale"] = load_float(further(self.at["x_scale"], times(one, 4)), "float32")
        place = times(row, 4)
        found["row_scale"] = [
            load_float(further(p, place), "float32") for p in self.at["row_scale"]
        ]
        if "bias" in self.at:
            place = times(row, jnp.dtype(self.bias_dtype).itemsize)
            found["bias"] = [
                load_float(further(p, place), self.bias_dtype) for p in self.at["bias"]
            ]
        if "residual" in self.at:
            place = self._out_place(one, row)
            found["residual"] = load_float(further(self.at["residual"], place), self.out_dtype)
        return found

    def _out_place(self, one: Any, row: Any) -> Any:
        size = jnp.dtype(self.out_dtype).itemsize
        return times(arith.addi(times(one, self.n), row), size)

    def run(self, early: list[dict[str, Any]]) -> None:
        """Adds the warps' sums, and what follows; early: operands that are there, or none."""
        for i, (one, row, inside) in enumerate(results(self.m, self.rows, self.warps * LANES)):
            operands = early[i] if early else self._operands(one, row)
            if inside is None:
                self._finish_one(one, row, operands)
                continue
            with mgpu_utils.when(inside):
                self._finish_one(one, row, operands)

    def _finish_one(self, one: Any, row: Any, operands: Mapping[str, Any]) -> None:
        ys = [self._sum(half, one, row, operands) for half in range(self.halves)]
        y = ys[0]
        if self.epilogue is not None:
            y = gated(self.epilogue, *ys)
        if "residual" in operands:
            y = arith.addf(y, operands["residual"])
        place = further(self.at["out"], self._out_place(one, row))
        store_float(place, y, self.out_dtype)

    def _sum(self, half: int, one: Any, row: Any, operands: Mapping[str, Any]) -> Any:
        """Of a row of x and one of the weight, all but what joins gate and up."""
        start = further(self.at["parts"], times(times(one, self.line), 4))
        address = further(start, times(row, 4))
        total, tile_n = None, self.halves * self.rows
        for warp in range(self.warps):
            offset = 4 * warp * self.lines * self.line
            part = load_shared(address, offset + 4 * half * self.rows)
            if not self.rows_of_x:
                part = arith.subi(part, load_shared(start, offset + 4 * tile_n))
            total = part if total is None else arith.addi(total, part)
        assert total is not None
        if self.rows_of_x:
            scale, bytes_ = (_one_of(values, one) for values in self.rows_of_x)
            total = arith.subi(total, bytes_)
        else:
            scale = operands["x_scale"]
        y = asm("cvt.rn.f32.s32 $0, $1;", "f", total)
        y = arith.mulf(arith.mulf(y, scale), operands["row_scale"][half])
        return arith.addf(y, operands["bias"][half]) if "bias" in operands else y


def _one_of(values: list[Any], index: Any) -> Any:
    """The value with this index, a word."""
    found = values[0]
    for i, other in enumerate(values[1:]):
        found = arith.select(less(index, i + 1), found, other)
    return found
