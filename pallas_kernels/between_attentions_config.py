"""How blocks of `between_attentions` go over its weights, as plain data, and what that takes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import quantized_digits as digits
from pallas_kernels import quantized_matmul_config as sizes
from pallas_kernels.around_product import Norm
from pallas_kernels.device import ACCESS_BYTES, LANES, SHARED_BYTES, THREADS
from pallas_kernels.packed import Packed
from pallas_kernels.quantized_matmul_config import PART_BYTES, PLACE_BYTES, TURN_BYTES, Static

NAMES = ("out", "gate_up", "down", "qkv")
MULTIPLYING = (4, 8, 16)  # warps: those that bring codes have whole rows of what these multiply
MARKS = 3  # words of a warp, by which x becomes int8
MEETING_WORDS = 2  # of a `meeting`
BRINGING = THREADS  # threads of a block that bring codes, beside those that multiply
MOST_JOINED = 4  # accesses of a thread to x, where it is the sum of what came before and a norm's


class NormNumbers(NamedTuple):
    """What an RMSNorm has beside its weight."""

    eps: float
    zero_centered: bool

    @classmethod
    def of(cls, norm: Norm | None) -> NormNumbers | None:
        """As Python has them, whatever they came as."""
        return None if norm is None else cls(float(norm.eps), bool(norm.zero_centered))


@dataclasses.dataclass(frozen=True)
class Config:
    """How a block goes over the weights, some rows of one at a time (`Product.tile_n`).

    `warps` divide K between them: 128 bytes of each row are a warp's, and those of all warps are
    brought on chip together, into one of `stages`; `window` of these are on their way at a time.
    """

    warps: int = 8
    stages: int = 8
    window: int = 3


@dataclasses.dataclass(frozen=True)
class Product:
    """One of the products, of one row of x; packed is a shape. late: what of it other blocks have
    written in this launch: "x", "residual", and the "stream" that is added to make x
    (between_attentions_join.py). post_norm: of what it gives, if it is normed before it is added.

    folded: a tile has half as many outputs, and of each both halves of K as rows of their own; x's
    halves are two rows, and of their products with the others' rows nobody makes use. So there are
    twice as many tiles, where there are few for the multiprocessors.
    """

    static: Static
    packed: Packed
    late: tuple[str, ...]
    folded: bool = False
    post_norm: NormNumbers | None = None

    @property
    def config(self) -> sizes.Config:
        return self.static.config

    @property
    def dtype(self) -> Any:
        """Of x, and of the result."""
        return jnp.dtype(self.static.out_dtype)

    @property
    def folds(self) -> int:
        """Rows of a tile that an output has."""
        return 1 + self.folded

    @property
    def inputs(self) -> int:
        """Of a row of a tile."""
        return self.packed.shape[1] // self.folds

    @property
    def tiles(self) -> int:
        return self.packed.shape[0] * self.folds // self.config.tile_n

    @property
    def view(self) -> Packed:
        """The weight's shapes with both halves of K as rows: as it lies in memory, if folded."""
        codes: Any = self.packed.codes
        o, i = codes.shape
        codes = codes.update(shape=(o * self.folds, i // self.folds))
        return dataclasses.replace(self.packed, codes=codes)

    @property
    def most_tiles(self) -> int:
        """Of a block; some have one less."""
        return -(-self.tiles // self.static.num_sms)

    @property
    def rounds(self) -> int:
        """Stages that a tile goes through."""
        return sizes.rounds(self.config, self.view)

    @property
    def numbers(self) -> int:
        """Of x, on chip: whole rounds."""
        return self.rounds * self.chunk

    @property
    def chunk(self) -> int:
        """Numbers of a row that a stage has."""
        return self.config.warps * sizes.turn(self.packed.scheme)

    @property
    def chunk_bytes(self) -> int:
        """Of a row of codes, in a stage."""
        return self.config.warps * TURN_BYTES

    @property
    def stride_bytes(self) -> int:
        """From row to row in a stage: such that rows side by side are in other banks."""
        return self.chunk_bytes + PART_BYTES

    @property
    def held_words(self) -> int:
        """Of x, in the registers of a thread, if it is read from the chip but once."""
        whole_numbers = self.digits or self.packed.scheme == "ternary"
        return self.rounds * sizes.turn(self.packed.scheme) // (32 if whole_numbers else 16)

    @property
    def digits(self) -> bool:
        """Whether x is multiplied as whole numbers of 8 bits: see quantized_digits.py."""
        return digits.fit(self.packed)

    @property
    def x_bytes(self) -> int:
        """On chip, of a row of x, and a warp's sums of squares behind it."""
        if self.packed.scheme == "ternary":  # both halves as one row
            return self.numbers
        if self.digits:
            return digits.x_bytes(self.numbers)
        return sizes.x_bytes(self.config, self.view)

    @property
    def sums_bytes(self) -> int:
        """On chip, of what x has beside it."""
        if self.packed.scheme == "ternary":
            return MARKS * self.config.warps * 4
        if self.digits:
            return self.folds * digits.units_bytes(self.numbers)
        return sizes.sums_bytes(self.config, self.folds, self.view)

    @property
    def groups(self) -> int:
        """Of scales, in a stage."""
        return max(1, self.chunk // (self.packed.group_size or self.chunk))

    def group_bytes(self) -> dict[str, int]:
        """Of a group of all of a tile's rows: its scales, and zeros."""
        arrays = {"scale": self.packed.scale, "zero": self.packed.zero}
        return {
            name: self.config.tile_n * array.dtype.itemsize
            for name, array in arrays.items()
            if array is not None
        }

    @property
    def stage_bytes(self) -> int:
        """On chip: codes, row by row, then scales and zeros."""
        return self.config.tile_n * self.stride_bytes + self.groups * sum(
            self.group_bytes().values()
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The products in their order, by as many blocks as there are multiprocessors."""

    config: Config
    products: tuple[Product, ...]

    @property
    def num_blocks(self) -> int:
        return self.products[0].static.num_sms

    @property
    def stage_bytes(self) -> int:
        """On chip, of a stage, of whichever product it is."""
        return -(-max(p.stage_bytes for p in self.products) // TURN_BYTES) * TURN_BYTES

    @property
    def gate(self) -> str:
        """What becomes of gate and up."""
        return next(p.static.gate for p in self.products if p.static.gate is not None)

    @property
    def joined(self) -> list[NormNumbers | None]:
        """Of each product, the norm of what the one before it gave, by which x is a sum here."""
        return [None, *(product.post_norm for product in self.products[:-1])]

    @property
    def tiles_before(self) -> list[int]:
        """Of each product, how many tiles those before it have."""
        return [sum(p.tiles for p in self.products[:i]) for i in range(len(self.products))]

    def scratch_bytes(self) -> dict[str, int]:
        """What a block has on chip, by name; but for the stages, products have it in turn."""
        found = {"ring": self.config.stages * self.stage_bytes, "barriers": 16 * self.config.stages}
        for product in self.products:
            of_tiles = product.most_tiles * product.config.warps * product.config.tile_n * 4
            x_bytes = product.folds * product.x_bytes
            own = {"kept": x_bytes, "sums": product.sums_bytes, "parts": of_tiles // product.folds}
            found |= {name: max(size, found.get(name, 0)) for name, size in own.items()}
        return found

    @property
    def shared_bytes(self) -> int:
        """On chip, all of it."""
        pieces = self.scratch_bytes().values()
        return PLACE_BYTES * (1 + sum(-(-each // PLACE_BYTES) for each in pieces))

    def problem(self) -> str | None:
        """What speaks against its config."""
        c = self.config
        problems = {
            f"warps must be one of {', '.join(map(str, MULTIPLYING))}": c.warps not in MULTIPLYING,
            "stages must be 1 at least": c.stages < 1,
            f"window must be 1 to {c.stages}, the stages that there are": (
                not 1 <= c.window <= c.stages
            ),
        }
        if found := next((sentence for sentence, there in problems.items() if there), None):
            return found
        for product in self.products:
            chunk, group = product.chunk, product.packed.group_size or product.chunk
            if chunk % group and group % chunk:
                return (
                    f"{product.static.name}: groups of {group} and the {chunk} numbers that warps "
                    "take together are no multiples of each other"
                )
        most = MOST_JOINED * c.warps * LANES * ACCESS_BYTES // 2
        for product, post_norm in zip(self.products, self.joined, strict=True):
            if post_norm is not None and product.numbers > most:
                return (
                    f"{product.static.name}: {product.packed.shape[1]} inputs, which are a sum "
                    f"with a norm, are more than the {most} that threads hold"
                )
        if self.shared_bytes > SHARED_BYTES:
            return f"takes {self.shared_bytes} of {SHARED_BYTES} bytes on chip"
        return None
