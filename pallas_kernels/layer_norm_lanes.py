"""LayerNorm of wide rows of 16-bit numbers, a block a row: what a thread does, told in PTX.

A thread has 8 numbers side by side of every 8 * threads, and keeps them two in a register, as they
came: more rows are under way at a time than with float32 in twice as many. Their mean, and the
squares around it, are sums of all threads, for which the block meets twice. Weight and bias are
read 8 numbers at a time once both are known, and not before. Imported only by layer_norm.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, LANES, THREADS, WARPS
from pallas_kernels.lane_code import (
    accesses_of_thread,
    address_of,
    further,
    load,
    load_again,
    only_where,
    store_once,
    times,
    word,
)
from pallas_kernels.lane_norm import (
    floats,
    fused,
    number,
    over_block,
    reciprocal_root,
    words_of_floats,
)

DTYPES = (jnp.bfloat16, jnp.float16)
EACH = ACCESS_BYTES // 2  # numbers of an access
MOST = 64  # numbers that a thread may have
FEW = 32  # of more, two warpgroups share a row


def takes(width: int, dtype: Any, warpgroups: int) -> bool:
    """Whether rows of that width, more than one access of 128 threads, are divided so here."""
    accesses, threads = width // EACH, THREADS * warpgroups
    return dtype in DTYPES and width % EACH == 0 and threads < accesses <= threads * MOST // EACH


def default_warpgroups(width: int) -> int:
    """Among how many a row is divided: of 8192 rows on an H200 one takes 34.2 us at a width of 4096
    and 69.5 at 8192, two take 36.4 and 67.2; float32 in registers (`over_rows`) took 35.3 and 72.3.
    """
    return 1 if width <= FEW * THREADS else 2


def normed_rows(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    eps: float,
    warpgroups: int,
    plain: Callable[..., jax.Array],
    interpret: bool,
) -> jax.Array:
    """[M, D] of x [M, D] and `weights`: weight [D], and a bias [D] if there is one.

    plain: (row [D], *weights) -> [D], for the interpreter, which knows no lanes.
    """
    names, warps = ("weight", "bias")[: len(weights)], WARPS * warpgroups
    dtypes = {"x": x.dtype.name}
    dtypes |= {name: array.dtype.name for name, array in zip(names, weights, strict=True)}

    def body(x_ref, *refs, **scratch):
        *held, out_ref = refs
        row = lax.axis_index("row")
        if interpret:
            out_ref.at[row][...] = plain(x_ref.at[row][...], *(ref[...] for ref in held))
            return
        every = {"x": x_ref.at[row], "out": out_ref.at[row], **scratch}
        every |= dict(zip(names, held, strict=True))

        @plgpu.inline_mgpu(arg_types=(jax.tree.map(lambda _: plgpu.RefType(), every),))
        def norm(_: Any, every: Any) -> Any:
            write_row(jax.tree.map(address_of, every), dtypes, x.shape[1], warps, eps)

        norm(every)  # pyright: ignore[reportCallIssue]

    threads: Any = {}
    if warpgroups > 1 and not interpret:
        threads = {"num_threads": warpgroups, "thread_name": "warpgroup"}
    board = plgpu.SMEM((2, warps), jnp.float32)
    return _compat.kernel(
        body,
        name="layer_norm",
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types={} if interpret else {"board": board},
        grid=(x.shape[0],),
        grid_names=("row",),
        interpret=interpret,
        approx_math=True,
        unsafe_no_auto_barriers=True,  # what is on chip is told here
        **threads,
    )(x, *weights)


def write_row(
    at: Mapping[str, Any], dtypes: Mapping[str, str], width: int, warps: int, eps: float
) -> None:
    """One row, by all threads of a block. at: addresses of a row of x, of weight, of the bias if
    there is one, of out and, on chip, of board: float32 [2, warps].
    """
    mine = accesses_of_thread(width // EACH, warps * LANES)

    def here(name: str, place: Any) -> Any:
        size = 4 if dtypes.get(name) == "float32" else 2
        return further(at[name], times(place, size * EACH))

    row = []  # of each access four words, zeros where there is none
    for place, inside in mine:
        words = load(here("x", place), 0, 4, once=True)
        row.append([x if inside is None else arith.select(inside, x, word(0)) for x in words])
    total = squares = number(0)
    for words in row:
        for x in words:
            total = arith.addf(total, arith.addf(*floats(x, dtypes["x"])))
    (total,) = over_block([total], "add.f32", at["board"], warps)
    mean = arith.mulf(total, number(1 / width))
    for (_, inside), words in zip(mine, row, strict=True):
        before = squares
        for x in words:
            for centred in (arith.subf(y, mean) for y in floats(x, dtypes["x"])):
                squares = fused(centred, centred, squares)
        squares = squares if inside is None else arith.select(inside, squares, before)
    (squares,) = over_block([squares], "add.f32", further(at["board"], word(4 * warps)), warps)
    root = reciprocal_root(squares, width, eps)

    def numbers(name: str, place: Any) -> list[Any]:
        if dtypes[name] == "float32":
            return [x for i in range(2) for x in load_again(here(name, place), 16 * i, "f")]
        return [x for each in load_again(here(name, place), 0) for x in floats(each, dtypes[name])]

    for (place, inside), words in zip(mine, row, strict=True):
        y = [x for each in words for x in floats(each, dtypes["x"])]
        y = [arith.mulf(arith.subf(x, mean), root) for x in y]
        weight = numbers("weight", place)
        if "bias" in dtypes:
            y = list(map(fused, y, weight, numbers("bias", place)))
        else:
            y = list(map(arith.mulf, y, weight))
        only_where(inside, store_once, here("out", place), words_of_floats(y, dtypes["x"]))
