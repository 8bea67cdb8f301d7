"""What follows the sums of a tile of `quantized_matmul`: they meet on chip, and become the result.

As in lane_code.py, values are those of one thread. Imported only by quantized_matmul_lanes.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.awaited import store_awaited
from pallas_kernels.device import LANES
from pallas_kernels.lane_arithmetic import reciprocal_root
from pallas_kernels.lane_code import (
    MOST_EARLY,
    asm,
    further,
    gated,
    less,
    load_float,
    load_word,
    results,
    rounded,
    store_float,
    times,
    times_long,
    word,
)
from pallas_kernels.quantized_matmul_config import (
    ACROSS,
    MMA_COLUMNS,
    MMA_ROWS,
    PART_BYTES,
    Heads,
)


@dataclasses.dataclass(frozen=True)
class Finish:
    """Of a tile of `rows` outputs of each half of the weight, for x [m, k].

    at: addresses, by name: out, row_scale, bias, residual, cos and sin, those that there are, and
    of a cache k, v and slots; on chip kept, x's rows of row_bytes. dtypes: of bias, cos and sin.
    n: outputs of a row of x. apart: the two outputs of a pair. out_row: of out, where x's first
    goes. eps: that of an RMSNorm of x, whose sums of squares lie behind the rows; None: there is
    none. heads, gate: as `Static` has them. late: other blocks of this launch have written the
    residual. With `spent` in at, others await out, as `store_awaited` has it.
    """

    at: Mapping[str, Any]
    m: int
    k: int
    n: int
    rows: int
    halves: int
    apart: int
    warps: int
    scheme: str
    dtype: Any
    dtypes: Mapping[str, Any]
    out_dtype: Any
    row_bytes: int
    out_row: Any
    eps: float | None = None
    heads: Heads | None = None
    late: bool = False
    gate: str | None = None

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

    def early(self, first: Any) -> list[dict[str, Any]]:
        """What `operands` gives for each result of a thread, if they are few: asked for before
        the tile's codes are multiplied, it is there when they are.

        first: of the tile's outputs, those of the first half.
        """
        return [self.operands(one, arith.addi(first, row), at) for one, row, at in self._few()]

    def roots(self) -> list[Any]:
        """Of the norm, for each result of a thread, if they are few: in every tile a thread's are
        of the same rows of x.
        """
        return [] if self.eps is None else [self.root(one) for one, _, _ in self._few()]

    def _few(self) -> list[tuple[Any, Any, Any]]:
        """A thread's results as `results` has them, or none, if they are many."""
        mine = results(self.m, self.rows, self.warps * LANES)
        return mine if len(mine) <= MOST_EARLY else []

    def operands(self, one: Any, whole: Any, inside: Any) -> dict[str, Any]:
        """What a result is made of beside its sums, by name; of row_scale and bias one of each
        half. whole: the output's row of the weight.
        """
        number = functools.partial(self._number, inside)
        found: dict[str, Any] = {}
        for name, dtype in (("row_scale", jnp.float32), ("bias", self.dtypes.get("bias"))):
            if name in self.at:
                indices = (arith.addi(whole, word(i * self.apart)) for i in range(self.halves))
                found[name] = [number(name, index, dtype) for index in indices]
        if "residual" in self.at:
            index = arith.addi(times(one, self.n), whole)
            found["residual"] = number("residual", index, self.out_dtype, late=self.late)
        if self.heads is not None:
            inner = arith.remui(whole, word(2 * self.heads.half))
            index = arith.addi(times(one, self.heads.half), inner)
            for name in ("cos", "sin"):
                found[name] = number(name, index, self.dtypes[name])
            found["slot"] = load_word(further(self.at["slots"], times(one, 4)), inside)
        return found

    def run(self, parts: Any, first: Any, early: list[dict[str, Any]], roots: list[Any]) -> None:
        """Adds the warps' sums in order, and what follows; a result is a thread's.

        early, roots: what the functions of these names gave, `early` for `first`.
        """
        for i, (one, row, inside) in enumerate(results(self.m, self.rows, self.warps * LANES)):
            whole = arith.addi(first, row)
            operands = early[i] if early else self.operands(one, whole, inside)
            if self.eps is not None:
                operands = {**operands, "root": roots[i] if roots else self.root(one)}
            if inside is None:
                self.complete(parts, one, row, whole, operands)
                continue
            with mgpu_utils.when(inside):
                self.complete(parts, one, row, whole, operands)

    def complete(
        self, parts: Any, one: Any, row: Any, whole: Any, operands: Mapping[str, Any]
    ) -> None:
        """Adds the warps' sums of a result in order, and writes what becomes of it.

        row: of the tile, whole: of the weight. operands: what the function of this name gave, and
        what sums are multiplied by first ("root"), or before that made "less" by, if there is such.
        """
        at = further(parts, times(arith.addi(times(one, self.tile_n), row), 4))
        ys = []
        for half in range(self.halves):
            y: Any = None
            for warp in range(self.warps):
                offset = 4 * (warp * self.m * self.tile_n + half * self.rows)
                part = asm(f"ld.shared.f32 $0, [$1 + {offset}];", "f", at, effects=True)
                y = part if y is None else arith.addf(y, part)
            rest = unpack.rest(self.scheme, self.dtype)
            if rest != 1:
                y = arith.mulf(y, arith.constant(ir.F32Type.get(), rest))
            if "less" in operands:
                y = arith.subf(y, operands["less"])
            if "root" in operands:
                y = arith.mulf(y, operands["root"])
            if "row_scale" in operands:
                y = arith.mulf(y, operands["row_scale"][half])
            if "bias" in operands:
                y = arith.addf(y, operands["bias"][half])
            ys.append(y)
        if self.heads is not None:
            self._turn(self.heads, ys, one, whole, operands)
            return
        y = ys[0] if self.gate is None else gated(self.gate, *ys)
        if "residual" in operands:
            y = arith.addf(y, operands["residual"])
        out = jnp.dtype(self.out_dtype)
        index = arith.addi(times(arith.addi(one, self.out_row), self.n), whole)
        to = further(self.at["out"], times(index, out.itemsize))
        if "spent" in self.at:
            assert out == jnp.bfloat16, "what is awaited is of that"
            store_awaited(to, y, further(self.at["spent"], times(index, out.itemsize)))
        else:
            store_float(to, y, out.name)

    def _turn(
        self, heads: Heads, ys: list[Any], one: Any, whole: Any, operands: Mapping[str, Any]
    ) -> None:
        """Writes two outputs: q's to out, k's and v's to the cache, if it has the slot; those of q
        and k turned by their angle. whole: the first one's row of the weight.
        """
        width, slot = 2 * heads.half, operands["slot"]
        head, inner = (f(whole, word(width)) for f in (arith.divui, arith.remui))
        is_q, turned = less(head, heads.q), less(head, heads.q + heads.kv)
        dtype = jnp.dtype(self.dtype)
        numbers = (*ys, operands["cos"], operands["sin"])
        left, right, cos, sin = (rounded(y, dtype.name) for y in numbers)
        first = arith.subf(arith.mulf(left, cos), arith.mulf(right, sin))
        second = arith.addf(arith.mulf(right, cos), arith.mulf(left, sin))
        ys = [arith.select(turned, first, left), arith.select(turned, second, right)]
        mine = arith.subi(head, arith.select(turned, word(heads.q), word(heads.q + heads.kv)))
        place = arith.addi(times(mine, width), inner)
        row = arith.addi(times(one, heads.slots), slot)
        size = dtype.itemsize
        to = times_long(row, heads.kv * width * size)
        to = arith.addi(to, times_long(place, size))
        to = arith.addi(arith.select(turned, self.at["k"], self.at["v"]), to)
        of_q = arith.addi(times(one, heads.q * width), whole)
        to = arith.select(is_q, further(self.at["out"], times(of_q, size)), to)
        # A slot below 0 is a large one here
        with mgpu_utils.when(arith.ori(is_q, less(slot, heads.slots))):
            for half, y in enumerate(ys):
                store_float(further(to, word(half * heads.half * size)), y, dtype.name)

    def root(self, one: Any) -> Any:
        """Of the norm of a row of x."""
        address, total = further(self.at["kept"], times(one, self.row_bytes)), None
        for warp in range(0, self.warps, 4):
            offset = self.row_bytes - PART_BYTES + 4 * warp
            text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
            for part in asm(text, "ffff", address, effects=True):
                total = part if total is None else arith.addf(total, part)
        assert self.eps is not None, "there is a norm"
        return reciprocal_root(total, self.k, self.eps)

    def _number(self, inside: Any, name: str, index: Any, dtype: Any, *, late: bool = False) -> Any:
        address = further(self.at[name], times(index, jnp.dtype(dtype).itemsize))
        return load_float(address, jnp.dtype(dtype).name, inside, late=late)
