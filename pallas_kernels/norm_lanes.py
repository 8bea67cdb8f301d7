"""LayerNorm and RMSNorm of wide rows of 16-bit numbers, a block a row: a thread's part, in PTX.

A thread has 8 numbers side by side of every 8 * threads, and keeps them two in a register, as they
came: more rows are under way at a time than with float32 in twice as many. What is summed over the
row (its numbers, and the squares around their mean; or the squares) is of all threads, for which
the block meets. Weight and bias are read 8 numbers at a time after that, and not before.
Imported only by layer_norm.py and rms_norm.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

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
    KINDS,
    floats,
    fused,
    number,
    over_block,
    product,
    reciprocal_root,
    sum_of_squares,
    words_of_floats,
)
from pallas_kernels.rows import Config

DTYPES = (jnp.bfloat16, jnp.float16)
EACH = ACCESS_BYTES // 2  # numbers of an access
MOST = 64  # numbers that a thread may have
FEW = 32  # of more, two warpgroups share a row


class Kind(NamedTuple):
    """Which norm. zero_centered: the weight counts from 1."""

    name: Literal["layer_norm", "rms_norm"]
    eps: float
    zero_centered: bool = False


def takes(width: int, dtype: Any, config: Config) -> bool:
    """Whether rows of that width, more than one access of 128 threads, are normed here."""
    accesses, threads = width // EACH, THREADS * config.warpgroups
    fits = width % EACH == 0 and threads < accesses <= threads * MOST // EACH
    alone = config.stages == 0 and config.repeat == 1
    return alone and dtype in DTYPES and fits


def default_config(width: int, dtype: Any) -> Config | None:
    """Two warpgroups share a row where one had much of it; None: such rows are not normed here.

    LayerNorm of 8192 rows, H200: 4096 wide 34.2 us by one and 36.4 by two, 8192 wide 69.5 and 67.2.
    """
    config = Config(1, 0, 1, 1 if width <= FEW * THREADS else 2)
    return config if takes(width, dtype, config) else None


def candidates(width: int, dtype: Any) -> list[Config]:
    """What `tune` tries."""
    found = [Config(1, 0, 1, warpgroups) for warpgroups in (1, 2)]
    return [config for config in found if takes(width, dtype, config)]


def normed_rows(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    kind: Kind,
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
            write_row(jax.tree.map(address_of, every), dtypes, kind, x.shape[1], warps)

        norm(every)  # pyright: ignore[reportCallIssue]

    threads: Any = {}
    if warpgroups > 1 and not interpret:
        threads = {"num_threads": warpgroups, "thread_name": "warpgroup"}
    board = plgpu.SMEM((2, warps), jnp.float32)
    return _compat.kernel(
        body,
        name=kind.name,
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
    at: Mapping[str, Any], dtypes: Mapping[str, str], kind: Kind, width: int, warps: int
) -> None:
    """One row, by all threads of a block. at: addresses of a row of x, of weight, of the bias if
    there is one, of out and, on chip, of board: float32 [2, warps].
    """
    dtype = dtypes["x"]
    mine = accesses_of_thread(width // EACH, warps * LANES)

    def here(name: str, place: Any) -> Any:
        size = 4 if dtypes.get(name) == "float32" else 2
        return further(at[name], times(place, size * EACH))

    def numbers(name: str, place: Any) -> list[Any]:
        if dtypes[name] == "float32":
            return [x for i in range(2) for x in load_again(here(name, place), 16 * i, "f")]
        return [x for each in load_again(here(name, place), 0) for x in floats(each, dtypes[name])]

    row = []  # of each access four words, zeros where there is none
    for place, inside in mine:
        words = load(here("x", place), 0, 4, once=True)
        row.append([x if inside is None else arith.select(inside, x, word(0)) for x in words])
    if kind.name == "rms_norm":
        mean, squares = None, sum_of_squares([x for words in row for x in words], KINDS[dtype])
    else:
        mean, squares = _around_mean(row, mine, dtype, at["board"], width, warps)
    board = further(at["board"], word(4 * warps))
    (squares,) = over_block([squares], "add.f32", board, warps)
    root = reciprocal_root(squares, width, kind.eps)
    for (place, inside), words in zip(mine, row, strict=True):
        y = [x for each in words for x in floats(each, dtype)]
        y = [arith.mulf(x if mean is None else arith.subf(x, mean), root) for x in y]
        weight = numbers("weight", place)
        if kind.zero_centered:
            weight = [arith.addf(number(1), w) for w in weight]
        if "bias" in dtypes:
            y = list(map(fused, y, weight, numbers("bias", place)))
        elif kind.name == "layer_norm" or kind.zero_centered:
            y = list(map(arith.mulf, y, weight))
        done = words_of_floats(y, dtype)
        if kind.name == "rms_norm" and not kind.zero_centered:
            done = list(map(partial(product, dtype), done, words_of_floats(weight, dtype)))
        only_where(inside, store_once, here("out", place), done)


def _around_mean(
    row: list[list[Any]], mine: list[Any], dtype: str, board: Any, width: int, warps: int
) -> tuple[Any, Any]:
    """The row's mean, for which the block meets; and this thread's squares around it."""
    total = squares = number(0)
    for words in row:
        for x in words:
            total = arith.addf(total, arith.addf(*floats(x, dtype)))
    (total,) = over_block([total], "add.f32", board, warps)
    mean = arith.mulf(total, number(1 / width))
    for (_, inside), words in zip(mine, row, strict=True):
        before = squares
        for x in words:
            for centred in (arith.subf(y, mean) for y in floats(x, dtype)):
                squares = fused(centred, centred, squares)
        squares = squares if inside is None else arith.select(inside, squares, before)
    return mean, squares
