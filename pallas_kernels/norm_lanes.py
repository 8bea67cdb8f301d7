"""LayerNorm and RMSNorm of rows of 16-bit numbers: what a thread does, told in PTX.

A block has a row, or each of its warps a narrow one. A thread has 8 numbers side by side of every
8 * threads, and keeps them two in a register, as they came: more rows are under way at a time than
with float32 in twice as many. With a residual the row is its sum with x, which is written too. What
is summed over the row (its numbers, and the squares around their mean; or the squares) is of all
its threads, for which a block meets. Weight and bias are read with the row; or after that, 8
numbers at a time, where they would take registers that other rows could have. The interpreter,
which knows no lanes, checks only what surrounds a block.
Imported only by layer_norm.py, rms_norm.py and norm_lanes_backward.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, rows, tuned
from pallas_kernels.device import ACCESS_BYTES, LANES, THREADS, WARPS, Device
from pallas_kernels.lane_arithmetic import (
    DTYPES,
    EACH,
    KINDS,
    added,
    all_floats,
    floats,
    fused,
    number,
    over_block,
    over_warp,
    product,
    reciprocal_root,
    sum_of_squares,
    words_of_floats,
)
from pallas_kernels.lane_code import (
    accesses_of_thread,
    by_thread,
    further,
    less,
    load,
    load_late,
    only_where,
    store_once,
    times,
    times_long,
    word,
)
from pallas_kernels.rows import Config

MOST_NUMBERS = 64  # of a thread
ALONE_NUMBERS = 32  # of a thread; where it would have more, two warpgroups share the row
# Of weight and bias, that a thread may hold from the start: on an H200 RMSNorm of 8192 x 8192 in
# bfloat16 takes 66.9 us so, and 67.4 with the weight late
EARLY_WORDS = 16
# LayerNorm of 64 x 4096 takes 2.1 us with the weight early and 3.4 with it late; between 64 rows
# and 8192 nothing was measured
FEW_ROWS = 512


class Kind(NamedTuple):
    """Which norm. zero_centered: the weight counts from 1."""

    name: Literal["layer_norm", "rms_norm"]
    eps: float
    zero_centered: bool = False


def _warps(width: int, warpgroups: int) -> int:
    """That share a row."""
    return 1 if width // EACH <= THREADS else WARPS * warpgroups


def takes(width: int, dtype: Any, config: Config) -> bool:
    """Whether rows of that width are normed here: with more than one access of each thread, and
    with no stream and one row at a time in the config, whose blocks_per_sm then says nothing.
    """
    accesses, warps = width // EACH, _warps(width, config.warpgroups)
    fits = width % EACH == 0 and warps * LANES < accesses <= warps * LANES * MOST_NUMBERS // EACH
    alone = (config.repeat, config.stages) == (1, 0) and (warps > 1 or config.warpgroups == 1)
    return alone and dtype in DTYPES and fits


def default_config(width: int, dtype: Any) -> Config | None:
    """Two warpgroups share a row where one had much of it; None: such rows are not normed here.

    LayerNorm of 8192 rows, H200: 4096 wide 34.2 us by one and 36.4 by two, 8192 wide 69.5 and 67.2.
    """
    config = Config(1, 0, 1, 1 if width <= ALONE_NUMBERS * THREADS else 2)
    return config if takes(width, dtype, config) else None


def candidates(width: int, dtype: Any) -> list[Config]:
    """All configs that rows of that width can have; none if they are not normed here."""
    found = [Config(1, 0, 1, warpgroups) for warpgroups in (1, 2)]
    return [config for config in found if takes(width, dtype, config)]


def tuned_config(op: str, key: str, x: jax.Array, device: Device) -> Config | None:
    """The measured config for rows like those of x, by lanes or not; the row's key holds no exact
    count of rows.
    """
    config, width = tuned.lookup(op, key, device, Config), x.shape[-1]
    if config is None:
        return None
    if default_config(width, x.dtype):
        fits = takes(width, x.dtype, config)
    else:
        fits = rows.fits(config, width, x.dtype.itemsize, x.size // width)
    return config if fits else None


def normed_rows(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    kind: Kind,
    config: Config,
    plain: Callable[..., jax.Array],
    interpret: bool,
    residual: jax.Array | None = None,
) -> list[jax.Array]:
    """[M, D] of x [M, D] and `weights`: weight [D], and a bias [D] if there is one; and
    x + residual [M, D], which is what is normed, if there is a residual.

    plain: (row [D], *weights) -> [D], for the interpreter, which knows no lanes.
    """
    (count, width), warpgroups = x.shape, config.warpgroups
    if not takes(width, x.dtype, config):
        raise NotImplementedError(
            f"{kind.name}: cannot run this call: {config} is none for rows of {width} numbers of "
            f"16 bits, which take {' or '.join(map(str, candidates(width, x.dtype)))}"
        )
    warps = _warps(width, warpgroups)
    arrays = {"x": x} | dict(zip(("weight", "bias"), weights, strict=False))
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    outs = ["out"]
    if residual is not None:
        arrays["residual"], outs = residual, ["out", "total"]

    def body(*refs, **scratch):
        every = dict(zip((*arrays, *outs), refs, strict=True))
        if interpret:
            here = lambda name: every[name].at[lax.axis_index("block")]  # noqa: E731
            row = here("x")[...]
            if residual is not None:
                row = row + here("residual")[...]
                here("total")[...] = row
            here("out")[...] = plain(row, *(every[n][...] for n in dtypes if n != "x"))
            return
        every |= scratch

        def norm(at: Any, block: Any) -> None:
            Block(at, block, dtypes, kind, x.shape, warps).run()

        by_thread(norm, every, lax.axis_index("block"))

    how: dict[str, Any] = {"grid": (count if interpret or warps > 1 else pl.cdiv(count, WARPS),)}
    if not interpret:
        how["scratch_types"] = {"board": plgpu.SMEM((2, warps), jnp.float32)} if warps > 1 else {}
        if warpgroups > 1:
            how |= {"num_threads": warpgroups, "thread_name": "warpgroup"}
    return _compat.kernel(
        body,
        name=kind.name if residual is None else f"{kind.name}_residual",
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _ in outs],
        grid_names=("block",),
        interpret=interpret,
        **how,
    )(*arrays.values())


def over_row(values: list[Any], board: Any, which: Any, warps: int) -> list[Any]:
    """The sums of all threads that share a row. board: on chip, float32 [n, warps], of which they
    take the lines from `which` on; of one warp's row there need be none.
    """
    if warps == 1:
        return [over_warp(value, "add.f32") for value in values]
    return over_block(values, "add.f32", further(board, times(which, 4 * warps)), warps)


def squares_where(inside: Any, numbers: list[Any], total: Any) -> Any:
    """total, and the squares of some numbers if they are of the row (None: they are)."""
    found = total
    for n in numbers:
        found = fused(n, n, found)
    return found if inside is None else arith.select(inside, found, total)


class Block:
    """What a thread of a block does.

    at: addresses of x and out, perhaps of residual and total [M, D], of weight, of the bias if
    there is one and, where several warps share a row, on chip of board: float32 [2, warps].
    block: which one, of these arrays'.
    warps: that share a row.
    """

    def __init__(
        self,
        at: Mapping[str, Any],
        block: Any,
        dtypes: Mapping[str, str],
        kind: Kind,
        shape: tuple[int, ...],
        warps: int,
    ):
        self.at, self.dtypes, self.kind, self.warps = at, dtypes, kind, warps
        count, self.width = shape
        self.names = [name for name in ("weight", "bias") if name in dtypes]
        row, thread, self.there = block, mgpu_utils.thread_idx(), None
        if warps == 1:
            row = arith.addi(times(row, WARPS), arith.divui(thread, word(LANES)))
            thread = arith.remui(thread, word(LANES))
            if count % WARPS:
                self.there = less(row, count)
                row = arith.minui(row, word(count - 1))
        self.mine = accesses_of_thread(self.width // EACH, warps * LANES, thread)
        words = 4 * len(self.mine) * sum(1 + (dtypes[x] == "float32") for x in self.names)
        self.early = count <= FEW_ROWS or (warps > 1 and words <= EARLY_WORDS)
        start = times_long(row, 2 * self.width)
        names = ("x", "out", "residual", "total")
        self.row = {name: further(at[name], start) for name in names if name in at}

    def run(self) -> None:
        dtype, words = self.dtypes["x"], []  # of each access four, zeros where there is none
        for place, inside in self.mine:
            found = load(self._of_row("x", place), 0, 4, once=True)
            if "residual" in self.row:
                more = load(self._of_row("residual", place), 0, 4, once=True)
                found = [added(dtype, *both) for both in zip(found, more, strict=True)]
            words.append(found if inside is None else [self._or_zero(inside, x) for x in found])
        early = [self._read(place) for place, _ in self.mine] if self.early else None
        if self.kind.name == "rms_norm":
            mean, squares = None, sum_of_squares([x for four in words for x in four], KINDS[dtype])
        else:
            mean, squares = self._around_mean(words)
        root = reciprocal_root(self._over_row(squares, 1), self.width, self.kind.eps)
        for i, ((place, inside), four) in enumerate(zip(self.mine, words, strict=True)):
            y = all_floats(four, dtype)
            y = [arith.mulf(x if mean is None else arith.subf(x, mean), root) for x in y]
            done = {"out": self._weighed(y, *(early[i] if early else self._read(place)))}
            if "total" in self.row:
                done["total"] = four
            if inside is not None and self.there is not None:
                inside = arith.andi(inside, self.there)
            inside = self.there if inside is None else inside
            for name, eight in done.items():
                only_where(inside, store_once, self._of_row(name, place), eight)

    def _of_row(self, name: str, place: Any) -> Any:
        return further(self.row[name], times(place, ACCESS_BYTES))

    def _or_zero(self, inside: Any, x: Any) -> Any:
        return arith.select(inside, x, word(0))

    def _read(self, place: Any) -> list[list[Any]]:
        """The words of weight and bias."""
        found = []
        for name in self.names:
            offsets = (0, ACCESS_BYTES) if self.dtypes[name] == "float32" else (0,)
            address = further(self.at[name], times(place, ACCESS_BYTES * len(offsets)))
            words = [load(address, i, 4) if self.early else load_late(address, i) for i in offsets]
            found.append([x for four in words for x in four])
        return found

    def _over_row(self, value: Any, which: int) -> Any:
        """The sum of all threads that share the row; which: of those that are asked for."""
        return over_row([value], self.at.get("board"), word(which), self.warps)[0]

    def _around_mean(self, words: list[list[Any]]) -> tuple[Any, Any]:
        """The row's mean, and this thread's squares around it."""
        dtype, total, squares = self.dtypes["x"], number(0), number(0)
        for four in words:
            for x in four:
                total = arith.addf(total, arith.addf(*floats(x, dtype)))
        mean = arith.mulf(self._over_row(total, 0), number(1 / self.width))
        for (_, inside), four in zip(self.mine, words, strict=True):
            centred = [arith.subf(y, mean) for y in all_floats(four, dtype)]
            squares = squares_where(inside, centred, squares)
        return mean, squares

    def _weighed(self, y: list[Any], weight: list[Any], *bias: list[Any]) -> list[Any]:
        """Eight normed numbers times the weight's words, plus the bias's, as words."""
        dtype, held, kind = self.dtypes["x"], self.dtypes["weight"], self.kind
        rounds = kind.name == "rms_norm" and not kind.zero_centered
        if not rounds or held != dtype:
            weight = all_floats(weight, held)
        if rounds:
            weight = weight if held == dtype else words_of_floats(weight, dtype)
            rounded = words_of_floats(y, dtype)
            return [product(dtype, *both) for both in zip(rounded, weight, strict=True)]
        if kind.zero_centered:
            weight = [arith.addf(number(1), w) for w in weight]
        if bias:
            more = all_floats(bias[0], self.dtypes["bias"])
            return words_of_floats(list(map(fused, y, weight, more)), dtype)
        return words_of_floats(list(map(arith.mulf, y, weight)), dtype)
