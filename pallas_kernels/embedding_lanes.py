"""Rows of a table by id: what a thread does, told in PTX.

A thread has pieces of rows, of 16 bytes in the narrower of table and result: it asks for their ids,
then for all pieces, and then stores them. Rows need not fill a warp, and nothing waits on chip. The
interpreter, which knows no lanes, copies a row a block and checks only what surrounds that.
Imported only by the modules of embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, THREADS
from pallas_kernels.lane_arithmetic import all_floats, bits, number, words_of_floats
from pallas_kernels.lane_code import (
    by_thread,
    further,
    less,
    load,
    load_four,
    load_late,
    only_where,
    store,
    times,
    times_long,
    word,
)

MOST_PIECES = 16  # of a thread: those that it has registers for
MOST = 2**31  # pieces in all, whose number is a word


def numbers_of_piece(table: Any, out: Any) -> int:
    """Numbers side by side that are 16 bytes in the narrower of two dtypes."""
    return ACCESS_BYTES // min(jnp.dtype(dtype).itemsize for dtype in (table, out))


def rows_by_id(
    table: jax.Array,
    ids: jax.Array,
    *,
    scale: float | None,
    dtype: Any,
    pieces: int,
    interpret: bool,
) -> jax.Array:
    """table[ids] in dtype, times the scale as dtype has it. ids: int32; those outside: the nearest.

    pieces: of a thread.
    """
    (v, d), (count,), out = table.shape, ids.shape, jnp.dtype(dtype)
    factor = None if scale is None else out.type(scale)
    total = count * (d // numbers_of_piece(table.dtype, out))

    def body(*refs):
        every = dict(zip(("ids", "table", "out"), refs, strict=True))
        block = lax.axis_index("block")
        if interpret:
            row = every["table"][jnp.clip(every["ids"][block], 0, v - 1)].astype(out)
            every["out"][block] = row if factor is None else row * factor
            return

        def copy(at: Any, block: Any) -> None:
            scale = None if factor is None else float(factor)
            dtypes = table.dtype.name, out.name
            Block(at, block, dtypes, (v, d), count, scale, pieces).run()

        by_thread(copy, every, block)

    [rows] = _compat.kernel(
        body,
        name="embedding",
        out_type=[jax.ShapeDtypeStruct((count, d), out)],
        grid=(count if interpret else -(-total // (pieces * THREADS)),),
        grid_names=("block",),
        interpret=interpret,
    )(ids, table)
    return rows


class Block:
    """What a thread of a block does.

    at: addresses of ids [M], table [V, D] and out [M, D]. block: which one. dtypes: of table and
    out. count: M.
    """

    def __init__(
        self,
        at: Mapping[str, Any],
        block: Any,
        dtypes: tuple[str, str],
        shape: tuple[int, int],
        count: int,
        scale: float | None,
        pieces: int,
    ):
        self.at, self.dtypes, self.scale, self.pieces = at, dtypes, scale, pieces
        self.last, width = shape[0] - 1, shape[1]
        numbers = numbers_of_piece(*dtypes)
        self.across = width // numbers
        self.total = count * self.across
        self.bytes = [numbers * jnp.dtype(dtype).itemsize for dtype in dtypes]  # of a piece
        self.first = arith.addi(times(block, pieces * THREADS), mgpu_utils.thread_idx())

    def run(self) -> None:
        places = [arith.addi(self.first, word(i * THREADS)) for i in range(self.pieces)]
        whole = self.total % (self.pieces * THREADS) == 0
        inside = [None if whole else less(place, self.total) for place in places]
        places = [arith.minui(place, word(self.total - 1)) for place in places]
        sources = [self._source(place) for place in places]
        held = [load_piece(source, self.bytes[0]) for source in sources]
        for place, words, there in zip(places, held, inside, strict=True):
            target = further(self.at["out"], times_long(place, self.bytes[1]))
            only_where(there, store_piece, target, self._result(words))

    def _source(self, place: Any) -> Any:
        row, piece = (f(place, word(self.across)) for f in (arith.divui, arith.remui))
        which = load(further(self.at["ids"], times_long(row, 4)), 0)
        which = arith.minsi(arith.maxsi(which, word(0)), word(self.last))
        start = further(self.at["table"], times_long(which, self.across * self.bytes[0]))
        return further(start, times(piece, self.bytes[0]))

    def _result(self, words: list[Any]) -> list[Any]:
        """Rounded to the result's dtype, and once more where it is scaled."""
        dtype, out = self.dtypes
        if dtype != out:
            words = words_in(out, all_floats(words, dtype))
        if self.scale is None:
            return words
        by = number(self.scale)
        return words_in(out, [arith.mulf(x, by) for x in all_floats(words, out)])


def words_in(dtype: str, floats: list[Any]) -> list[Any]:
    """Float32, rounded to the dtype, as words."""
    return list(map(bits, floats)) if dtype == "float32" else words_of_floats(floats, dtype)


def load_piece(address: Any, size_bytes: int, *, late: bool = False) -> list[Any]:
    """The words of a piece, or of several side by side; late: as `load_late`."""
    read = load_late if late else load_four
    return [x for offset in range(0, size_bytes, ACCESS_BYTES) for x in read(address, offset)]


def store_piece(address: Any, words: list[Any]) -> None:
    """Writes them."""
    for i in range(0, len(words), 4):
        store(address, 4 * i, words[i : i + 4])
