"""How `quantized_matmul` goes over a weight, as plain data, and what that takes on chip."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels import quantized_unpack as unpack
from pallas_kernels.device import (
    ACCESS_BYTES,
    LANES,
    REGISTERS,
    SHARED_BYTES,
    THREAD_REGISTERS,
    WARPS,
)
from pallas_kernels.packed import PLAIN, Packed

MMA_ROWS, MMA_COLUMNS = 16, 8  # of the weight and of x, in one instruction
ACROSS = 4  # lanes that share a row in it
PART_BYTES = ACROSS * ACCESS_BYTES  # of a row, which 4 lanes multiply at a time
PARTS = 2
TURN_BYTES = PARTS * PART_BYTES  # of a row, which a warp asks for at a time
HELD_PART = 9 / 16  # of a thread's registers, that x and sums may take: with 144 of 255 some spill
TMA_NUMBERS = 64  # of a row of x side by side on chip, as the copy engine brings it
MOST_SPLITS = 8  # their float32 sums pass through memory
PLACE_BYTES = 1024  # what lies on chip begins at a multiple of them; so many a block has no use of


@dataclasses.dataclass(frozen=True)
class Config:
    """How a block goes over the weight.

    A block has tile_n rows of the weight at a time (gate and up together) and `warps` that divide
    K, and asks for codes `ahead` turns before it needs them; `blocks` share a multiprocessor. Of
    `splits`, a block has one part of K and of x alone; their sums are added in a second launch.
    held: a warp reads its part of x from the chip once, into registers. tma: the copy engine brings
    it on chip, where x is held and meets codes.
    """

    tile_n: int = 32
    warps: int = 4
    ahead: int = 4
    blocks: int = 2
    splits: int = 1
    held: bool = False
    tma: bool = False


@dataclasses.dataclass(frozen=True)
class Heads:
    """Of outputs that are heads of q, k and v in turn: how many are q's and k's, half the width of
    one, and the slots of a row of the cache.
    """

    q: int
    kv: int
    half: int
    slots: int


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for.

    eps, zero_centered: of an RMSNorm of x, which there is none if eps is None. heads: of q, k and
    v, which are turned and written to a cache. gate: what becomes of gate and up, of
    `lane_code.gated`; None where the outputs are no such.
    """

    name: str
    config: Any  # Config, or Tiles for more rows of x
    interpret: bool
    out_dtype: str
    num_sms: int
    gate: str | None = None
    eps: float | None = None
    zero_centered: bool = False
    heads: Heads | None = None

    @property
    def gated(self) -> bool:
        """Whether outputs come as gate and up."""
        return self.gate is not None

    @property
    def halves(self) -> int:
        """2 where outputs come in pairs: gate and up, or what one angle turns."""
        return 1 + (self.gated or self.heads is not None)

    def apart(self, o: int) -> int:
        """Of o outputs, how far the two of a pair are from each other; 0: there are none."""
        return self.heads.half if self.heads else o // 2 * self.gated


def turn(scheme: str) -> int:
    """Numbers of a row that a warp takes at a time."""
    return TURN_BYTES // 4 * unpack.per_word(scheme)


def part(scheme: str) -> int:
    """Numbers of a row that are multiplied at a time, 16 bytes of them by a lane."""
    return turn(scheme) // PARTS


def turns(packed: Packed) -> int:
    """Of a row, of all warps."""
    return -(-packed.shape[1] // turn(packed.scheme))


def share(config: Config, packed: Packed) -> int:
    """Turns of a row that a block has, of all warps; the last split may have fewer."""
    return -(-turns(packed) // config.splits)


def all_have_some(config: Config, packed: Packed) -> bool:
    """Whether the last split has a turn."""
    return (config.splits - 1) * share(config, packed) < turns(packed)


def rounds(config: Config, packed: Packed) -> int:
    """Turns of a warp in a block's part of a row."""
    return -(-share(config, packed) // config.warps)


def num_blocks(config: Config, num_tiles: int, num_sms: int) -> int:
    """Blocks of each split, which take the tiles in turn."""
    return max(1, min(num_tiles, config.blocks * num_sms // config.splits))


def group_bytes(config: Config, packed: Packed) -> dict[str, int]:
    """On chip, of a warp's turn: scales and zeros."""
    arrays = {"scale": packed.scale, "zero": packed.zero}
    groups = max(1, turn(packed.scheme) // (packed.group_size or turn(packed.scheme)))
    return {
        name: groups * config.tile_n * array.dtype.itemsize
        for name, array in arrays.items()
        if array is not None
    }


def warp_bytes(config: Config, packed: Packed) -> int:
    """On chip, of a warp's turn: codes, 16 bytes a lane and row, scales and zeros."""
    codes = config.tile_n * TURN_BYTES
    return codes + sum(group_bytes(config, packed).values())


def numbers(config: Config, packed: Packed) -> int:
    """Of a row of x, on chip: whole rounds."""
    return rounds(config, packed) * config.warps * turn(packed.scheme)


def x_bytes(config: Config, packed: Packed) -> int:
    """On chip, of a row of x; rows side by side begin in other banks."""
    return numbers(config, packed) * 2 + PART_BYTES


def kept_bytes(config: Config, m: int, packed: Packed) -> dict[str, int]:
    """On chip, by name: x, and of its norm the sums of squares, if they do not lie with it."""
    if not config.tma:
        return {"kept": m * x_bytes(config, packed)}
    rows = columns(m)
    return {"kept": rows * numbers(config, packed) * 2, "squares": rows * PART_BYTES}


def held_words(config: Config, m: int, packed: Packed) -> int:
    """Of x, in the registers of a thread."""
    of_thread = rounds(config, packed) * turn(packed.scheme) * columns(m) // LANES
    return of_thread // 2 if config.held else 0


def sums_bytes(config: Config, m: int, packed: Packed) -> int:
    """On chip, of sums of x over the parts of a row; int4 wants them."""
    count = rounds(config, packed) * config.warps * PARTS * columns(m)
    return count * 4 if packed.scheme == "int4" else ACCESS_BYTES


def shared_bytes(config: Config, m: int, packed: Packed) -> int:
    """On chip: codes on their way, x, its sums, those of the warps."""
    c = config
    parts = (
        c.ahead * c.warps * warp_bytes(c, packed),
        *kept_bytes(c, m, packed).values(),
        sums_bytes(c, m, packed),
        2 * c.warps * m * c.tile_n * 4,
    )
    return PLACE_BYTES * (1 + sum(-(-each // PLACE_BYTES) for each in parts))


def grain(packed: Packed, *, halves: int) -> int:
    """Rows of the weight that a tile has a multiple of: those of an instruction, of each half in
    whole accesses to its scales and zeros.
    """
    arrays = (packed.scale, packed.zero)
    least = min((a.dtype.itemsize for a in arrays if a is not None), default=2)
    return max(MMA_ROWS, halves * ACCESS_BYTES // least)


def problem(config: Config, m: int, packed: Packed, *, apart: int) -> str | None:
    """What speaks against the config for m rows of x; apart: as `Static` has it."""
    c, halves, span = config, 1 + (apart > 0), apart or packed.shape[0]
    multiple = grain(packed, halves=halves)
    whole = c.tile_n > 0 and c.tile_n % multiple == 0 and span % (c.tile_n // halves) == 0
    warps = 0 < c.warps <= 16 and c.warps % WARPS == 0
    splits = 1 <= c.splits <= MOST_SPLITS and all_have_some(c, packed)
    size_bytes = c.blocks * shared_bytes(c, m, packed) if whole and warps and splits else 0
    words = held_words(c, m, packed) if warps and splits else 0
    sums = c.tile_n * columns(m) // LANES
    registers = min(THREAD_REGISTERS, REGISTERS // (max(1, c.blocks * c.warps) * LANES))
    problems = {
        f"tile_n must be a multiple of {multiple} that divides {span * halves}": not whole,
        f"warps must be a multiple of {WARPS}, 16 at most": not warps,
        "ahead must be 1 at least": c.ahead < 1,
        "tma is for x that is held, and codes": c.tma and not (c.held and packed.scheme != PLAIN),
        "blocks must be 1 at least": c.blocks < 1,
        f"splits must be 1 to {MOST_SPLITS}, each with turns of a row's {turns(packed)}": (
            not splits
        ),
        f"takes {size_bytes} of {SHARED_BYTES} bytes on chip": size_bytes > SHARED_BYTES,
        f"{words} words of x and {sums} sums are too much for a thread's {registers} registers": (
            words > 0 and words + sums > registers * HELD_PART
        ),
    }
    return next((sentence for sentence, found in problems.items() if found), None)


def columns(m: int) -> int:
    """Rows of x that products are made for."""
    return -(-m // MMA_COLUMNS) * MMA_COLUMNS
