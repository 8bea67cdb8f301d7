"""How the kernel of `quantized_matmul` for more rows of x is tiled, and what that takes on chip.

Imported only by quantized_matmul*.py and quantized_expand.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.device import ACCESS_BYTES, SHARED_BYTES
from pallas_kernels.packed import Packed
from pallas_kernels.quantized_matmul_config import MOST_SPLITS
from pallas_kernels.wgmma_tiles import LINE_BYTES, WGMMA_ROWS

CHUNK = 64  # numbers of a row that are expanded and multiplied at a time: 128 bytes
COPIED_BYTES = 128  # where the copy engine writes begins at a multiple of them
M_PART = 32  # rows of x that a tile has a multiple of
# Rows of x for whose sums each of so many consumers has registers
MOST_M = {1: 256, 2: 256, 3: 128, 4: 96}


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A block computes tile_m rows of x times tile_n rows of the weight (gate and up together).

    stages: of the ring that is loaded ahead. splits: blocks that divide K. snake: tiles of rows of
    x that are neighbours in the order of tiles.
    """

    tile_m: int = 128
    tile_n: int = 128
    stages: int = 2
    splits: int = 1
    snake: int = 8

    @property
    def consumers(self) -> int:
        """Warpgroups that expand and multiply, and share the rows of the weight."""
        return self.tile_n // WGMMA_ROWS


def step(packed: Packed) -> int:
    """Numbers of K in a stage: two chunks, for one is expanded while the other is multiplied. One,
    of codes of 8 bits, where two do not divide K or begin in the middle of a group.
    """
    two, (_, i) = 2 * CHUNK, packed.shape
    group = packed.group_size or i
    whole = i % two == 0 and (group % two == 0 or two % group == 0)
    return two if whole or unpack.per_word(packed.scheme) == 8 else CHUNK


def code_bytes(packed: Packed) -> int:
    """Of a row of the weight, in a stage."""
    return 4 * step(packed) // unpack.per_word(packed.scheme)


def grouped_arrays(packed: Packed) -> dict[str, Any]:
    """What there is a number of for each group, by name."""
    arrays = {"scale": packed.scale, "zero": packed.zero}
    return {name: each for name, each in arrays.items() if each is not None}


def groups_of(packed: Packed) -> int:
    """Of a row, in a stage."""
    return max(1, step(packed) // (packed.group_size or packed.shape[1]))


def whole_copies(size: int, dtype) -> int:
    """So many numbers as are whole multiples of what is copied."""
    least = COPIED_BYTES // jnp.dtype(dtype).itemsize
    return -(-size // least) * least


def too_early(width: int, dtype) -> int:
    """So many numbers before `width` a copy begins: the copy engine traps where an innermost start
    is no multiple of 16 bytes, which the interpreter does not know.
    """
    return width % (ACCESS_BYTES // jnp.dtype(dtype).itemsize)


def shared_bytes(config: Tiles, packed: Packed, *, gated: bool) -> int:
    """On chip: the ring, two slices of the result a consumer, what follows the sums, barriers.

    gated: whether gate and up meet in the kernel.
    """
    c, halves = config, 1 + gated
    stage = c.tile_m * step(packed) * 2 + c.tile_n * code_bytes(packed)
    for each in grouped_arrays(packed).values():
        early = too_early(packed.shape[0] // halves, each.dtype)
        wide = whole_copies(c.tile_n // halves + early, each.dtype) * each.dtype.itemsize
        stage += halves * groups_of(packed) * wide
    slices = 2 * c.consumers * WGMMA_ROWS * LINE_BYTES // halves
    return c.stages * stage + slices + 4096


def problem(config: Tiles, packed: Packed, *, gated: bool) -> str | None:
    """What speaks against the config."""
    c, steps = config, -(-packed.shape[1] // step(packed))
    gated = gated and c.splits == 1
    wrong_n = c.tile_n % WGMMA_ROWS != 0 or c.consumers not in MOST_M
    most_m = 0 if wrong_n else MOST_M[c.consumers]
    wrong_m = c.tile_m % M_PART != 0 or not 0 < c.tile_m <= most_m
    wrong = wrong_n or wrong_m or c.stages < 2
    size_bytes = 0 if wrong else shared_bytes(c, packed, gated=gated)
    problems = {
        f"tile_n must be a multiple of {WGMMA_ROWS} to {WGMMA_ROWS * max(MOST_M)}": wrong_n,
        f"tile_m must be a multiple of {M_PART} to {most_m} beside {c.tile_n} tile_n": wrong_m,
        "stages must be 2 at least, snake 1": c.stages < 2 or c.snake < 1,
        f"splits must be 1 to {MOST_SPLITS}, and to the {steps} steps of K": (
            not 1 <= c.splits <= min(MOST_SPLITS, steps)
        ),
        f"takes {size_bytes} of {SHARED_BYTES} bytes on chip": size_bytes > SHARED_BYTES,
    }
    return next((sentence for sentence, found in problems.items() if found), None)


def why_not(packed: Packed) -> str | None:
    """What keeps the kernel from this weight."""
    o, i = packed.shape
    if o % 16:
        return f"takes outputs in multiples of 16, got {o}"
    group, size = packed.group_size or i, step(packed)
    parts = group in (16, 32, CHUNK)
    wholes = group % CHUNK == 0 and (group % size == 0 or size % group == 0)
    if packed.scale is not None and not (parts or wholes):
        return f"groups of {group} straddle the {CHUNK} inputs that are expanded at a time"
    return None


def default_tiles(m: int, packed: Packed, *, gated: bool, num_sms: int) -> Tiles:
    """The tile with the least work in all its waves, by what tiles of six formats and 32 to 8192
    rows took on an H100 (benchmarks/notes.md).
    """
    (o, i), rows = packed.shape, -(-m // M_PART) * M_PART
    steps = i // step(packed)
    # of so many consumers: what one expands hides behind what others multiply
    shares = {1: 1.45, 2: 1.1, 3: 1.06, 4: 1.04}
    # to expand a number takes as long as to multiply it by so many rows of x; more with its scales
    expanded = 145 if groups_of(packed) * CHUNK > step(packed) else 110

    def us(config: Tiles) -> float:
        tiles = -(-m // config.tile_m) * -(-o // config.tile_n)
        waves = -(-tiles * config.splits // num_sms)
        share = shares[config.consumers] * (1.25 if config.stages == 2 else 1)
        numbers = config.tile_n * -(-steps // config.splits) * step(packed)  # of the weight
        each = max(3.64e-5, 1.83e-7 * (config.tile_m + expanded)) * share
        total = waves * numbers * each
        # sums to memory and back, and the launch that adds them
        added = 1.5 + config.splits * m * o * 8 / 3.3e6 if config.splits > 1 else 0
        return total + added

    found = [
        Tiles(tile_m, WGMMA_ROWS * consumers, stages, splits)
        for consumers, most in MOST_M.items()
        for tile_m in sorted({min(rows, each) for each in (128, 192, 256, most)})
        for splits in (1, 2, 4, MOST_SPLITS)
        for stages in ((6, 4, 3, 2) if consumers <= 2 else (4, 3, 2))
    ]
    found = [each for each in found if problem(each, packed, gated=gated) is None]
    assert found, f"quantized_matmul: no tile fits {m} rows of {packed.shape}"
    return min(found, key=us)
