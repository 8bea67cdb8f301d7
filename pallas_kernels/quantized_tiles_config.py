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

CODE_BYTES = 64  # of a row of the weight, in a stage
CHUNK = 64  # numbers of a row that are expanded and multiplied at a time: 128 bytes
ROWS = 64  # of the weight that a warpgroup expands at a time
HELD = 8  # numbers side by side that a thread expands: 16 bytes
COPIED_BYTES = 128  # where the copy engine writes begins at a multiple of them


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
        """Warpgroups that multiply, and share the rows of x."""
        return min(2, self.tile_m // WGMMA_ROWS)

    @property
    def expanders(self) -> int:
        """Warpgroups that expand, and share the rows of the weight."""
        return min(3 - self.consumers, self.tile_n // ROWS)

    @property
    def buffers(self) -> int:
        """Of expanded numbers: one is written while another is read."""
        return 2 if self.tile_n * self.tile_m > 128 * 128 else 4


def step(scheme: str) -> int:
    """Numbers of K in a stage."""
    return CODE_BYTES // 4 * unpack.per_word(scheme)


def grouped_arrays(packed: Packed) -> dict[str, Any]:
    """What there is a number of for each group, by name."""
    arrays = {"scale": packed.scale, "zero": packed.zero}
    return {name: each for name, each in arrays.items() if each is not None}


def groups_of(packed: Packed) -> int:
    """Of a row, in a stage."""
    return max(1, step(packed.scheme) // (packed.group_size or packed.shape[1]))


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
    """On chip: both rings, two slices of the result a consumer, what follows the sums, barriers."""
    c, halves = config, 1 + gated
    stage = c.tile_m * step(packed.scheme) * 2 + c.tile_n * CODE_BYTES
    for each in grouped_arrays(packed).values():
        wide = whole_copies(c.tile_n // halves, each.dtype) * each.dtype.itemsize
        stage += halves * groups_of(packed) * wide
    slices = 2 * c.consumers * WGMMA_ROWS * LINE_BYTES
    numbers = c.buffers * c.tile_n * CHUNK * 2
    return c.stages * stage + numbers + slices + 4096


def problem(config: Tiles, packed: Packed, *, gated: bool) -> str | None:
    """What speaks against the config."""
    c, least = config, ROWS * (1 + gated)
    steps = -(-packed.shape[1] // step(packed.scheme))
    whole = c.tile_n in (64, 128) and c.tile_n % least == 0
    gated = gated and c.splits == 1
    size_bytes = shared_bytes(c, packed, gated=gated) if whole and c.stages > 0 else 0
    problems = {
        "tile_m must be 64, 128 or 256": c.tile_m not in (64, 128, 256),
        f"tile_n must be {' or '.join(str(n) for n in (64, 128) if n >= least)}": not whole,
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
    group, size = packed.group_size or i, step(packed.scheme)
    parts = CHUNK % group == 0 and group % (2 * HELD) == 0
    wholes = group % CHUNK == 0 and (group % size == 0 or size % group == 0)
    if packed.scale is not None and not (parts or wholes):
        return f"groups of {group} straddle the {CHUNK} inputs that are expanded at a time"
    return None


def default_tiles(m: int, packed: Packed, *, gated: bool, num_sms: int) -> Tiles:
    """The tile with the least work in the last wave; K divided where tiles are few.

    Predicted, by what tiles of `matmul` measured.
    """
    o, i = packed.shape
    # more rows of x share what is expanded (128 x 256 would need more registers than four
    # warpgroups can be compiled for)
    tiles = [(64, 128, 1.5), (128, 128, 1.2), (256, 128, 1.0)]
    tiles = tiles[:1] if m <= WGMMA_ROWS else tiles[1:]

    def count(tile) -> int:
        return -(-m // tile[0]) * -(-o // tile[1])

    def cost(tile) -> float:
        return -(-count(tile) // num_sms) * tile[0] * tile[1] * tile[2]

    tile = min(tiles, key=cost)
    steps = i // step(packed.scheme)
    splits = max(1, min(MOST_SPLITS, num_sms // count(tile), steps // 4))
    for stages in (6, 4, 3, 2):
        config = Tiles(tile[0], tile[1], stages, splits)
        if problem(config, packed, gated=gated) is None:
            return config
    raise AssertionError(f"quantized_matmul: no two stages of {tile} fit the shared memory")
