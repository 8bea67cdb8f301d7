"""Parts of rows that lie apart in device memory, one by one on their way through a multiprocessor.

Of the embedding's gradient: a row [D] is cut into parts of equal width, and a block has one part of
some rows on chip, each brought by a copy of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, MAX_BOX, SHARED_BYTES, THREADS

ALIGNED = 128  # bytes, of what a copy writes on chip
MAX_WIDTH = 8192  # numbers of a part that a block adds up: 64 a thread


@dataclasses.dataclass(frozen=True)
class Part:
    """How a part of a row lies on chip: [chunks, inner], zeros added behind its `width` numbers.

    `vector` numbers of the narrowest dtype are one access. `interpret`: it is for the interpreter,
    which knows no layouts and reshapes values, not references.
    """

    parts: int
    width: int
    inner: int
    chunks: int
    vector: int
    interpret: bool

    @property
    def padded(self) -> int:
        """Numbers on chip."""
        return self.chunks * self.inner

    @property
    def row(self) -> tuple[int, int, int]:
        """A row as the kernel takes it: [parts, n, inner]."""
        return self.parts, self.width // self.inner, self.inner

    def view(self, x: jax.Array) -> jax.Array:
        """[M, D] as the kernel takes it: [M, parts, n, inner]."""
        return x.reshape(x.shape[0], *self.row)

    def buffer(self, rows: int, dtype: Any) -> Any:
        """Shared memory for a part of some rows."""
        return plgpu.SMEM((rows, self.chunks, self.inner), dtype)

    def at(self, ref: Any, rows: Any, part: Any) -> Any:
        """The part of some rows of such an array, with what lies outside cut off."""
        nothing = jax.lax.axis_index("block") * 0  # JAX refuses a known offset that passes the end
        return ref.at[rows, part, pl.ds(nothing, self.chunks)]

    def write(self, buffer: Any, ref: Any, first: Any, rows: int, part: Any, count: int) -> None:
        """Copies rows on chip to where they belong among the `count` rows of such an array.

        JAX copies what looks contiguous in one piece, zeros behind the width included, which would
        fall on the next row: such rows go one by one without them.
        """
        n = self.width // self.inner
        if n == self.chunks or (rows > 1 and n * self.parts != self.chunks):
            target = self.at(ref, pl.ds(first, rows), part)
            plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)
        else:

            def copy(r):
                source = buffer.at[r, pl.ds(0, n)]
                plgpu.copy_smem_to_gmem(source, ref.at[first + r, part], commit_group=False)

            for r in range(rows):
                pl.when(first + r < count)(functools.partial(copy, r))
        plgpu.commit_smem_to_gmem_group()

    def load(self, ref: Any) -> jax.Array:
        """A row on chip in registers, 16 bytes a thread and access."""
        if self.interpret:
            return ref[...].reshape(self.padded)
        return _compat.load(ref.reshape(self.padded), self._layout)

    def store(self, ref: Any, value: jax.Array) -> None:
        """The other way."""
        if self.interpret:
            ref[...] = value.reshape(ref.shape)
        else:
            ref.reshape(value.size)[...] = value

    def zeros(self, dtype: Any = jnp.float32) -> jax.Array:
        """A row of them in registers."""
        nothing = jnp.zeros((self.padded,), dtype)
        return nothing if self.interpret else plgpu.layout_cast(nothing, self._layout)

    @property
    def _layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.padded,), vec_size=self.vector)


def part_of(width: int, parts: int, itemsize: int, *, interpret: bool = False) -> Part:
    """`itemsize`: of the narrowest dtype."""
    width, vector = width // parts, ACCESS_BYTES // itemsize
    inner = math.gcd(width, MAX_BOX)
    chunks = -(-width // inner)
    while chunks * inner % (ALIGNED // itemsize) or chunks * inner % (THREADS * vector):
        chunks += 1
    return Part(parts, width, inner, chunks, vector, interpret)


def fewest_parts(width: int, sizes: tuple[int, ...], *, most: int = MAX_WIDTH) -> int | None:
    """Into how many parts a row must be cut for a block to add it up, `most` numbers a part; None:
    it cannot be had in accesses of 16 bytes and copies that the hardware takes.

    sizes: bytes of a number, in each of the buffers that a row has on chip.
    """
    for parts in (1, 2, 4, 8, 16, 32):
        if width // parts > most or width % parts or width // parts * min(sizes) % ACCESS_BYTES:
            continue
        part = part_of(width, parts, min(sizes))
        if part.chunks <= MAX_BOX and part.padded * sum(sizes) + 1024 <= SHARED_BYTES:
            return parts
    return None
