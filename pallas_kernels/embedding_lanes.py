"""Rows of a table by id: what a thread does, told in PTX.

A thread has pieces of rows, of 16 bytes in the narrower of table and result: it asks for their ids,
then for all pieces, and then stores them. Rows need not fill a warp, and nothing waits on chip. The
interpreter, which knows no lanes, copies a row a block and checks only what surrounds that.
Imported only by embedding.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, THREADS
from pallas_kernels.lane_arithmetic import all_floats, bits, number, words_of_floats
from pallas_kernels.lane_code import (
    address_of,
    further,
    less,
    load,
    only_where,
    store,
    times,
    times_long,
    word,
)


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
    (v, d), (count,) = table.shape, ids.shape
    sizes = {"table": table.dtype.itemsize, "out": jnp.dtype(dtype).itemsize}
    numbers = ACCESS_BYTES // min(sizes.values())
    across = d // numbers
    total = count * across

    def body(ids_ref, table_ref, out_ref):
        block = lax.axis_index("block")
        if interpret:
            row = table_ref[jnp.clip(ids_ref[block], 0, v - 1)].astype(dtype)
            out_ref[block] = row if scale is None else row * jnp.asarray(scale, dtype)
            return
        types = plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT

        @plgpu.inline_mgpu(arg_types=types)
        def copy(_: Any, ids: Any, table: Any, out: Any, block: Any) -> Any:
            run(*map(address_of, (ids, table, out)), block.registers.item())

        copy(ids_ref, table_ref, out_ref, block)  # pyright: ignore[reportCallIssue]

    def run(ids_at: Any, table_at: Any, out_at: Any, block: Any) -> None:
        thread = arith.addi(times(block, pieces * THREADS), mgpu_utils.thread_idx())
        places = [arith.addi(thread, word(i * THREADS)) for i in range(pieces)]
        inside = [None if total % (pieces * THREADS) == 0 else less(at, total) for at in places]
        places = [arith.minui(at, word(total - 1)) for at in places]
        found = []
        for at in places:
            row, chunk = (f(at, word(across)) for f in (arith.divui, arith.remui))
            found.append((load(further(ids_at, times_long(row, 4)), 0), chunk))
        held = []
        for which, chunk in found:
            which = arith.minsi(arith.maxsi(which, word(0)), word(v - 1))
            row = further(table_at, times_long(which, d * sizes["table"]))
            held.append(words(further(row, times(chunk, numbers * sizes["table"]))))
        for at, each, there in zip(places, held, inside, strict=True):
            target = further(out_at, times_long(at, numbers * sizes["out"]))
            only_where(there, write, target, result(each))

    def words(address: Any) -> list[Any]:
        bytes_ = numbers * sizes["table"]
        return [x for at in range(0, bytes_, ACCESS_BYTES) for x in load(address, at, 4)]

    def write(address: Any, words: list[Any]) -> None:
        for i in range(0, len(words), 4):
            store(address, 4 * i, words[i : i + 4])

    def result(words: list[Any]) -> list[Any]:
        dtypes = table.dtype.name, jnp.dtype(dtype).name
        if dtypes[0] != dtypes[1]:
            words = in_words(all_floats(words, dtypes[0]), dtypes[1])
        if scale is None:
            return words
        by = number(float(jnp.asarray(scale, dtype)))
        return in_words([arith.mulf(x, by) for x in all_floats(words, dtypes[1])], dtypes[1])

    def in_words(floats: list[Any], dtype: str) -> list[Any]:
        return list(map(bits, floats)) if dtype == "float32" else words_of_floats(floats, dtype)

    blocks = count if interpret else -(-total // (pieces * THREADS))
    [rows] = _compat.kernel(
        body,
        name="embedding",
        out_type=[jax.ShapeDtypeStruct((count, d), dtype)],
        grid=(blocks,),
        grid_names=("block",),
        interpret=interpret,
    )(ids, table)
    return rows
