"""Scale, mask and softmax in one: y = exp(scale * x - max) / sum over what the mask lets through.

x is [*B, S], or any axis of any array, which is then moved to the end and back: a copy each way.
A row that fits on chip (32 KB) is read once and written once: one block owns every blocks-th tile
of rows. A longer row is read twice, shared by some blocks: one kernel finds each block's maximum
and sum, online, a second one writes. The backward kernels work likewise on the saved result:
d_x = scale * y * (d_y - sum(d_y * y)). A mask is read as it is stored, one byte a number, never at
the size of x. Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (the online sum).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from pallas_kernels import _compat, rows, tuned
from pallas_kernels import device as device_lib
from pallas_kernels.device import Device
from pallas_kernels.rows import Part, RowTile, Staged

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
LOG2_E = math.log2(math.e)  # the GPU has powers of two
NUMBERS = 64  # of a row that a thread holds at once: float32 registers, with as many for the rest
MAX_PARTS = 32  # each block reads the statistics of all parts of its row


@dataclasses.dataclass(frozen=True)
class Config:
    """How rows are tiled: changes the speed, never the result.

    repeat: rows a tile, in multiples of those that the warpgroup holds side by side. warps: of a
    row that one warp could hold, 1 or 4. stages: tiles in flight a block; 0 is a block for each
    tile, from memory to registers and back. blocks_per_sm: blocks a multiprocessor that has stages.
    columns: numbers a tile of a row that does not fit on chip; parts: blocks that share such a row.
    """

    repeat: int = 1
    warps: int = 1
    stages: int = 3
    blocks_per_sm: int = 4
    columns: int = 4096
    parts: int = 1

    def __post_init__(self) -> None:
        numbers = (self.repeat, self.stages + 1, self.blocks_per_sm, self.columns, self.parts)
        if min(numbers) < 1 or self.warps not in (1, 4):
            raise ValueError(
                f"scale_softmax: {self}: warps is 1 or 4, stages may be 0, the other numbers must "
                "be 1 at least"
            )


def scale_softmax(
    x: Float[Array, "*B S"],
    *,
    scale: float | Float[Array, ""] = 1.0,
    mask: Bool[Array, ...] | None = None,
    causal: bool = False,
    axis: int = -1,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B S"]:
    """softmax(scale * x) over `axis`, of what `mask` (True: kept) and `causal` let through.

    The mask broadcasts to x; of it only a last axis of one is spread, and the whole is copied once
    as int8. With causal, x is [.., T, S] and query t sees keys s <= S - T + t: aligned to the end.
    Masked entries are 0, whatever x holds there; a row of masked entries, or of -inf, is all 0,
    and so is its gradient. The scale is a number, or an array with a gradient (which XLA computes).
    Dtypes: bfloat16, float16, float32; statistics in float32. The gradient is taken from the result
    as it is stored. An axis other than the last costs a transpose before and after.
    Raises: ValueError for another dtype than a floating one, a mask that is not boolean or does not
    broadcast, a NaN scale, an axis out of range, causal over another axis than the last of two or
    more. NotImplementedError without a Hopper GPU (unless `interpret`), or for rows that are no
    multiple of 16 bytes.
    """
    check(x, scale, mask, causal, axis)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    kwargs = {"scale": scale, "mask": mask, "causal": causal, "axis": axis}
    reason = why_not(x, **kwargs, device=device)
    if reason is not None:
        raise NotImplementedError(f"scale_softmax: cannot run this call: {reason}")
    if x.size == 0:
        return x
    moved = jnp.moveaxis(x, axis, -1)
    if mask is not None:
        mask = jnp.moveaxis(mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape), axis, -1)
    queries = moved.shape[-2] if causal else 0
    groups = _groups(moved.shape, mask, queries)
    if config is None:
        config = tuned.lookup("softmax", bucket(x, **kwargs), device, Config)
        if config is None or _misfit(config, groups, moved.shape[-1], x.dtype.itemsize):
            config = default_config(x, **kwargs, device=device)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (*mask.shape[:-1], moved.shape[-1])).astype(jnp.int8)
        mask = mask.reshape(-1, groups[-1][0] if groups[-1][1] else 1, mask.shape[-1])
    static, number = _static(groups, queries, scale, config, device, interpret)
    y = _softmax(static, moved.reshape(-1, moved.shape[-1]), number, mask)
    return jnp.moveaxis(y.reshape(moved.shape), -1, axis)


def scale_softmax_reference(x, *, scale=1.0, mask=None, causal=False, axis=-1):
    """The mathematics in plain JAX, in a form that XLA makes one kernel of."""
    x32, scale = x.astype(jnp.float32), jnp.asarray(scale, jnp.float32)
    keep = (x32 != -jnp.inf) | (scale <= 0)
    if mask is not None:
        mask = mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)
        keep &= jnp.broadcast_to(mask, x.shape)
    if causal:
        t, s = x.shape[-2:]
        keep &= jnp.broadcast_to(jnp.tri(t, s, s - t, dtype=bool), x.shape)
    scores = jnp.where(keep, jnp.where(keep, x32, 0) * scale, -jnp.inf)
    top = jnp.max(jax.lax.stop_gradient(scores), axis, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - jnp.maximum(top, jnp.finfo(jnp.float32).min))
    total = jnp.sum(weights, axis, keepdims=True)  # 0, or 1 and more
    return (weights / jnp.maximum(total, 0.5)).astype(x.dtype)


def scale_softmax_backward(
    y: Float[Array, "*B S"],
    d_y: Float[Array, "*B S"],
    *,
    scale: float | Float[Array, ""] = 1.0,
    interpret: bool = False,
) -> Float[Array, "*B S"]:
    """The gradient to x, from the result and its cotangent, over the last axis.

    What `scale_softmax` has as its gradient; by itself for those who keep y anyway. A mask is not
    needed, for y is 0 there.
    Raises: as `scale_softmax`; ValueError if y and d_y differ in shape or dtype.
    """
    check(y, scale, None, False, -1)
    if (y.shape, y.dtype) != (d_y.shape, d_y.dtype):
        raise ValueError(
            f"scale_softmax: y is {y.dtype}{list(y.shape)}, d_y {d_y.dtype}{list(d_y.shape)}"
        )
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    if (reason := why_not(y, device=device)) is not None:
        raise NotImplementedError(f"scale_softmax: cannot run this call: {reason}")
    if y.size == 0:
        return d_y
    static, number = _static((), 0, scale, Config(), device, interpret)
    rows_of = (-1, y.shape[-1])
    return _backward(static, y.reshape(rows_of), number, d_y.reshape(rows_of)).reshape(y.shape)


def why_not(
    x, *, scale=1.0, mask=None, causal=False, axis=-1, device: Device | None = None
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del scale, causal
    device = device or device_lib.current()
    if reason := device_lib.why_not_hopper(device):
        return reason
    if x.dtype not in DTYPES:
        return f"takes bfloat16, float16 or float32, got {x.dtype}"
    width = x.shape[axis]
    size = width * x.dtype.itemsize
    if size % rows.ACCESS_BYTES:
        return (
            f"rows of {size} bytes are no multiple of {rows.ACCESS_BYTES} bytes, which the copy "
            "engine needs"
        )
    if mask is not None and width < rows.ACCESS_BYTES:
        return f"a mask of rows of {width} bytes is too narrow for the copy engine"
    return None


def default_config(x, *, scale=1.0, mask=None, causal=False, axis=-1, device: Device) -> Config:
    """Whole rows of 8 to 16 KB a block, or pieces of longer rows, shared out (`_default`)."""
    del scale
    shape = [n for i, n in enumerate(x.shape) if i != axis % x.ndim] + [x.shape[axis]]
    if mask is not None:
        sizes = (1,) * (x.ndim - len(mask.shape)) + tuple(mask.shape)
        sizes = [n for i, n in enumerate(sizes) if i != axis % x.ndim] + [sizes[axis]]
        mask = jax.ShapeDtypeStruct(tuple(sizes), jnp.bool_)
    alike = _groups(shape, mask, shape[-2] if causal else 0)[-1][0]
    held = x.dtype.itemsize + (mask is not None)
    count = math.prod(shape[:-1])
    return _default(shape[-1], count, alike, x.dtype.itemsize, held, 1, device.num_sms)


def bucket(x, *, scale=1.0, mask=None, causal=False, axis=-1) -> str:
    """The key of a tuned row: dtype, rows up to a power of two, width, and what is masked."""
    del scale
    count = x.size // max(x.shape[axis], 1)
    kind = (" mask" if mask is not None else "") + (" causal" if causal else "")
    return f"{x.dtype} {1 << max(count - 1, 0).bit_length()}x{x.shape[axis]}{kind}"


def candidates(x, *, scale=1.0, mask=None, causal=False, axis=-1, device: Device) -> list[Config]:
    """Fewer and more bytes in flight around the default."""
    kwargs = {"scale": scale, "mask": mask, "causal": causal, "axis": axis}
    default = default_config(x, **kwargs, device=device)
    width, itemsize = x.shape[axis], x.dtype.itemsize
    if not _fits(width, itemsize):
        return [
            Config(stages=stages, columns=columns, parts=parts)
            for columns in (1024, 2048, 4096, 8192)
            for parts in (1, 2, 4, 8, 16, 32)
            for stages in (2, 4)
            if parts * columns < 2 * width
        ]
    found = []
    for warps in (1, 4):
        for repeat in sorted({1, 2, 4, default.repeat}):
            tile = _row_tile(width, itemsize, Config(repeat, warps), False)
            stage = tile.rows * tile.padded * (itemsize + (mask is not None))
            numbers = tile.rows * tile.padded // 128 if tile.warps[1] == 1 else 0
            if default.stages == 0 and x.size // width % tile.rows == 0:
                found.append(Config(repeat, warps, 0))
            found += [
                Config(repeat, warps, stages, blocks)
                for stages in (2, 3, 4)
                for blocks in (2, 4, 6, 8)
                if blocks * (stages * stage + 4096) <= rows.SMEM_BYTES and numbers <= 2 * NUMBERS
            ]
    return found


def tuning_calls() -> list[tuned.Call]:
    """The calls that are worth a tuned row: attention scores, and rows as long as a vocabulary."""
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    calls = [
        tuned.Call((struct(shape),), scale_softmax, {"causal": causal})
        for shape, causal in (
            ((32, 512), False),
            ((2, 8, 128, 128), False),
            ((8, 32, 2048, 2048), False),
            ((8, 32, 2048, 2048), True),
            ((8192, 8192), False),
            ((64, 131072), False),
        )
    ]
    return [*calls, tuned.Call((jax.ShapeDtypeStruct((64, 131072), jnp.float32),), scale_softmax)]


def _default(
    width: int,
    count: int,
    alike: int,
    itemsize: int,
    held_bytes: int,
    arrays: int,
    num_sms: int,
) -> Config:
    """For `count` rows, of which the mask treats `alike` in turn alike.

    `held_bytes` of each number, in `arrays` arrays and a mask, are on chip.
    """
    room = rows.SMEM_BYTES - 4096
    if _fits(width, itemsize):
        # A warp that has a row alone sums it without the others; but there must be rows for all
        # warps, registers for a row each, and room for several blocks.
        alone = width * itemsize * arrays <= 4096 and count >= rows.WARPS * num_sms
        config = Config(warps=1 if alone else 4)
        tile = _row_tile(width, itemsize, config, False)
        numbers = tile.rows * tile.padded
        repeat = max(1, 8192 // (numbers * itemsize))
        if tile.warps[1] == 1:  # all rows of a tile are in registers at once
            threads = rows.WARPS * rows.LANES
            repeat = max(1, min(repeat, NUMBERS * threads // (numbers * arrays)))
        while repeat > 1 and tile.rows * repeat * num_sms * 4 > count:
            repeat //= 2  # rows enough for all blocks first
        # Rows that fill the threads, and are read once, need no copy engine: blocks that come and
        # go keep more loads in flight (RMSNorm of 8192 x 8192 bfloat16, H200: 65.9 us against 68.4)
        direct = repeat if tile.warps[1] == 1 else 1
        while direct > 1 and alike % (tile.rows * direct):
            direct //= 2
        whole = width == tile.padded and alike % (tile.rows * direct) == 0
        if whole and len(tile.groups(NUMBERS // arrays)[0]) == 1:
            return Config(direct, config.warps, 0)
        stage = repeat * numbers * held_bytes
        stages = max(1, min(3, room // stage))
        return Config(repeat, config.warps, stages, max(1, min(8, room // (stages * stage + 2048))))
    # 4 blocks a multiprocessor, each with 4 tiles in flight, have the bytes that hide the latency
    blocks, columns = 4 * num_sms, 4096 // arrays
    while columns > 1024 and count * -(-width // columns) < blocks:
        columns //= 2
    parts = min(MAX_PARTS, max(1, blocks // max(count, 1)))
    return Config(stages=4, columns=columns, parts=parts)


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a kernel is compiled for.

    groups: the leading axes of x from left to right, neighbours that the mask treats alike taken
    together: (rows, whether the mask has them). queries: T of a causal [.., T, S], else 0. scale:
    None if it is an array.
    """

    groups: tuple[tuple[int, bool], ...]
    queries: int
    scale: float | None
    config: Config
    num_sms: int
    interpret: bool


def _static(groups, queries, scale, config, device, interpret) -> tuple[_Static, Any]:
    """What is known when compiling, and the scale as an array [1] where it is not."""
    known = float(scale) if isinstance(scale, Real) else None
    number = None if known is not None else jnp.asarray(scale, jnp.float32).reshape(1)
    return _Static(groups, queries, known, config, device.num_sms, interpret), number


def check(x, scale, mask, causal, axis) -> None:
    """Refuses what no implementation of scale-softmax can take."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"scale_softmax: x is {x.dtype}; it must be floating point")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"scale_softmax: axis {axis} is out of range for x {x.shape}")
    if causal and (x.ndim < 2 or axis not in (-1, x.ndim - 1)):
        raise ValueError(
            f"scale_softmax: causal is over the last two axes, [.., T, S], but x is {x.shape} and "
            f"the axis {axis}"
        )
    if jnp.shape(scale) != ():
        raise ValueError(f"scale_softmax: scale has shape {jnp.shape(scale)}; it must be a number")
    if not isinstance(scale, Tracer) and math.isnan(scale):
        raise ValueError("scale_softmax: scale is NaN")
    if mask is None:
        return
    if mask.dtype != jnp.bool_:
        raise ValueError(
            f"scale_softmax: the mask is {mask.dtype}; it must be boolean (True: kept)"
        )
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.ndim > x.ndim or any(m not in (1, n) for m, n in sizes):
        raise ValueError(f"scale_softmax: mask {mask.shape} does not broadcast to x {x.shape}")


def _groups(shape: Sequence[int], mask, queries: int) -> tuple[tuple[int, bool], ...]:
    """The groups of `_Static`; of the mask, which has as many axes as x or is None, the shape."""
    has = [False] * len(shape) if mask is None else [n > 1 for n in mask.shape]
    groups: list[tuple[int, bool]] = []
    for i, n in enumerate(shape[:-1]):
        alone = queries and i == len(shape) - 2  # a tile of causal rows keeps to one [T, S]
        if groups and not alone and (n == 1 or groups[-1][1] == has[i]):
            groups[-1] = (groups[-1][0] * n, groups[-1][1])
        elif n > 1 or alone:
            groups.append((n, has[i]))
    return tuple(groups) or ((1, False),)


def _inner(width: int, vector: int) -> int:
    """The longest run of numbers that divides the width."""
    return next(n for n in (256, 128, 64, 32, 16, 8, 4) if n >= vector and width % n == 0)


def _fits(width: int, itemsize: int) -> bool:
    """Whether a row stays on chip, in few enough runs for one copy."""
    runs = width // _inner(width, rows.ACCESS_BYTES // itemsize) if width else 0
    return width * itemsize <= rows.MAX_ROW_BYTES and runs <= rows.MAX_BOX


def _row_tile(width: int, itemsize: int, config: Config, interpret: bool) -> RowTile:
    """Whole rows."""
    tile = rows.row_tile(width, itemsize, repeat=config.repeat, interpret=interpret)
    if config.warps == 1 and tile.warps == (1, 4) and width <= NUMBERS * rows.LANES:
        step = rows.LANES * tile.vector
        grain = step // math.gcd(step, tile.inner)
        chunks = -(-width // (tile.inner * grain)) * grain
        tile = dataclasses.replace(tile, warps=(4, 1), rows=4 * config.repeat, chunks=chunks)
    return tile


def _piece_tile(width: int, itemsize: int, columns: int, interpret: bool) -> RowTile:
    """A piece of a row that has the warpgroup: about `columns` numbers."""
    vector = rows.ACCESS_BYTES // itemsize
    inner = _inner(width, vector)
    step = rows.WARPS * rows.LANES * vector
    columns = max(step, min(columns, rows.MAX_BOX * inner) // step * step)
    return RowTile(
        width=width,
        rows=1,
        inner=inner,
        chunks=columns // inner,
        vector=vector,
        warps=(1, rows.WARPS),
        lanes=(1, rows.LANES),
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which tile of the rows [groups, rows, S] which block has when.

    stages: tiles in flight a block; 0: a block has one tile and needs no copy engine. pieces: tiles
    of a row, which `parts` blocks take in turn; 0: tiles are whole rows. No tile lies wholly behind
    the end of a row, for what a copy of one row writes there is not cut off.
    """

    tile: RowTile
    groups: tuple[tuple[int, bool], ...]
    blocks: int
    stages: int
    parts: int
    pieces: int

    @property
    def count(self) -> int:
        """All rows."""
        return math.prod(n for n, _ in self.groups)

    @property
    def rows(self) -> int:
        return self.groups[-1][0]

    @property
    def tiles(self) -> int:
        if self.pieces:
            return self.count * self.pieces
        return self.count // self.rows * -(-self.rows // self.tile.rows)

    def at(self, index: Any) -> tuple[Any, Any, Any]:
        """Where tile `index` begins: group, row, chunk."""
        div, rem = jax.lax.div, jax.lax.rem
        if not self.pieces:
            tiles = -(-self.rows // self.tile.rows)
            zero = jax.lax.axis_index("block") * 0
            return div(index, tiles), rem(index, tiles) * self.tile.rows, zero
        row, piece = rem(index, self.count), div(index, self.count)
        return div(row, self.rows), rem(row, self.rows), piece * self.tile.chunks

    def parts_of_row(self) -> list[Any]:
        """The blocks that share the row of the block that asks."""
        row = jax.lax.rem(jax.lax.axis_index("block"), self.count)
        return [row + part * self.count for part in range(self.parts)]

    def place(self, ref: Any, index: Any, chunks: int) -> Any:
        """Tile `index` of rows in device memory, [groups, rows, n, inner], or its first chunks."""
        group, row, chunk = self.at(index)
        return ref.at[group, pl.ds(row, self.tile.rows), pl.ds(chunk, chunks)]

    @property
    def mask_inner(self) -> int:
        return math.gcd(rows.MAX_BOX, self.tile.padded)

    @property
    def mask_buffer(self) -> Any:
        count = self.tile.rows if self.groups[-1][1] else 1
        shape = (self.stages, count, self.tile.padded // self.mask_inner, self.mask_inner)
        return plgpu.SMEM(shape, jnp.int8)

    def mask_view(self, mask: jax.Array) -> jax.Array:
        """int8 [groups, rows, S] as the copy engine takes it, rows filled up if they must be."""
        inner = self.mask_inner
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, -mask.shape[-1] % inner)))
        return mask.reshape(*mask.shape[:-1], mask.shape[-1] // inner, inner)

    def mask_at(self, index: Any) -> tuple[Any, Any, Any]:
        """Where the mask of tile `index` begins; it is one row if all rows have it in common."""
        rest, row, chunk = self.at(index)
        zero = jax.lax.axis_index("block") * 0
        group, stride = zero, 1
        for n, has in reversed(self.groups[:-1]):
            if has:
                group = group + jax.lax.rem(rest, n) * stride
                stride *= n
            rest = jax.lax.div(rest, n)
        return group, row if self.groups[-1][1] else zero, chunk

    def mask_place(self, ref: Any, index: Any, chunks: int) -> Any:
        del chunks  # of x; those of the mask are its buffer's
        group, row, chunk = self.mask_at(index)
        _, count, wide, inner = self.mask_buffer.shape
        return ref.at[group, pl.ds(row, count), pl.ds(chunk * self.tile.inner // inner, wide)]


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile in device memory, for `stages` 0; its parts go to registers and back."""

    plan: _Plan
    ref: Any  # [groups, rows, S]
    index: Any

    def load(self, part: Part) -> jax.Array:
        if part.tile.interpret:
            return self._of(part)[...]
        return _compat.load(self._of(part), part.tile.layout, optimized=False)

    def load_seen(self, part: Part, columns: Any) -> jax.Array:
        """Zeros instead of what lies wholly behind the first `columns` of the row: a byte saved."""
        pieces = []
        for piece in _accesses(part):
            nothing = functools.partial(lambda p: p.zeros().astype(self.ref.dtype), piece)
            some = functools.partial(self.load, piece)
            pieces.append(jax.lax.cond(piece.chunk * piece.tile.inner < columns, some, nothing))
        return jnp.concatenate(pieces, axis=1)

    def store(self, part: Part, value: jax.Array) -> None:
        self._of(part)[...] = value

    def _of(self, part: Part) -> Any:
        group, row, _ = self.plan.at(self.index)
        columns = pl.ds(part.chunk * part.tile.inner, part.shape[1])
        return self.ref.at[group, pl.ds(row + part.row, part.rows), columns]


@dataclasses.dataclass(frozen=True)
class _Mask:
    """The mask of a tile, in shared memory or, for `stages` 0, in device memory."""

    plan: _Plan
    ref: Any
    index: Any

    def load(self, part: Part) -> jax.Array:
        """int8 [rows, columns]."""
        tile, shared = part.tile, not self.plan.groups[-1][1]
        first, columns = part.chunk * tile.inner, part.shape[1]
        if self.plan.stages:
            inner = self.plan.mask_inner
            at = (pl.ds(first // inner, columns // inner),)
            ref = self.ref
        else:
            group, row, _ = self.plan.mask_at(self.index)
            ref = self.ref.at[group, pl.ds(row, 1 if shared else tile.rows)]
            at = (pl.ds(first, columns),)
        ref = ref.at[(0, *at) if shared else (pl.ds(part.row, part.rows), *at)]
        shape = (columns,) if shared else part.shape
        if tile.interpret:
            values = ref[...].reshape(shape)
        else:
            ref = ref.reshape(*shape) if self.plan.stages else ref
            layout = tile.layout.reduce(0) if shared else tile.layout
            values = _compat.load(ref, layout, optimized=bool(self.plan.stages))
        return part.down(values) if shared else values


def _misfit(
    config: Config, groups: Sequence[tuple[int, bool]], width: int, itemsize: int
) -> str | None:
    """What keeps a config without stages from rows of this width."""
    if config.stages:
        return None
    if not _fits(width, itemsize):
        return f"{config} has no stages, but rows of {width} do not fit on chip"
    tile, count = _row_tile(width, itemsize, config, False), groups[-1][0]
    if width < tile.padded or count % tile.rows:
        return (
            f"{config} has no stages, for rows that fill the threads, {tile.rows} at a time, but "
            f"got {count} rows of {width}"
        )
    return None


def _plan(static: _Static, width: int, itemsize: int, config: Config) -> _Plan:
    if (reason := _misfit(config, static.groups, width, itemsize)) is not None:
        raise NotImplementedError(f"scale_softmax: cannot run this call: {reason}")
    if _fits(width, itemsize):
        tile = _row_tile(width, itemsize, config, static.interpret)
        plan = _Plan(tile, static.groups, 1, config.stages, 1, 0)
        blocks = static.num_sms * config.blocks_per_sm
        blocks = min(plan.tiles, blocks) if plan.stages else plan.tiles
        return dataclasses.replace(plan, blocks=blocks)
    tile = _piece_tile(width, itemsize, config.columns, static.interpret)
    tiles = -(-width // tile.padded)
    parts = min(config.parts, MAX_PARTS, tiles)
    plan = _Plan(tile, static.groups, 1, config.stages, parts, tiles)
    return dataclasses.replace(plan, blocks=plan.count * parts)


def _run(
    static: _Static,
    plan: _Plan,
    name: str,
    step: Callable[..., Any],
    *,
    arrays: Sequence[jax.Array],
    mask: jax.Array | None = None,
    numbers: Sequence[jax.Array | None] = (),
    writes: bool = True,
    carry: tuple[float, ...] = (),
) -> list[jax.Array]:
    """Runs carry = step(index, arrays, out, mask, numbers, carry) for all tiles of arrays [M, S].

    The arrays have load(part), the mask too, `out` has store(part, value); it may lie over the
    first array, so a step loads a part before it stores it. `numbers` are references to float32 in
    device memory. Each number of the carry is a result [blocks] too: a block begins with the value
    given, and returns its last.
    """
    tile, width = plan.tile, arrays[0].shape[-1]
    runs = (width // tile.inner, tile.inner) if plan.stages else (width,)
    arrays = [x.reshape(-1, plan.rows, *runs) for x in arrays]
    masks = [] if mask is None else [plan.mask_view(mask) if plan.stages else mask]
    known = [n for n in numbers if n is not None]
    out_type = [jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)] * writes
    out_type += [jax.ShapeDtypeStruct((plan.blocks,), jnp.float32)] * len(carry)

    def body(*refs):
        refs = iter(refs)
        take = lambda n: [next(refs) for _ in range(n)]  # noqa: E731
        sources, mask_refs, taken = take(len(arrays)), take(len(masks)), iter(take(len(known)))
        targets, totals = take(writes), take(len(carry))
        held = [None if n is None else next(taken) for n in numbers]
        block = jax.lax.axis_index("block")
        if not plan.stages:
            tiles = [_Tile(plan, ref, block) for ref in sources]
            masked = [_Mask(plan, ref, block) for ref in mask_refs]
            target = _Tile(plan, targets[0], block)
            step(block, tiles, target, masked[0] if masked else None, held, ())
            return

        def tile_step(slots, state):
            index, state = state
            staged = [Staged(slot) for slot in slots[: len(arrays)]]
            masked = [_Mask(plan, slot, index) for slot in slots[len(arrays) :]]
            state = step(index, staged, staged[0], masked[0] if masked else None, held, state)
            return index + plan.blocks, state

        _, last = rows.stream(
            tile_step,
            tile=tile,
            tiles=plan.tiles,
            blocks=plan.blocks,
            stages=plan.stages,
            sources=[*sources, *mask_refs],
            targets=targets,
            buffers=take(len(arrays) + len(masks)),
            barrier=next(refs),
            carry=(block, tuple(map(jnp.float32, carry))),
            places=[plan.place] * len(arrays) + [plan.mask_place] * len(masks),
            chunk_of=lambda index: plan.at(index)[2],
        )
        for ref, value in zip(totals, last, strict=True):
            ref[block] = value

    scratch = [
        *(tile.buffer(x.dtype, plan.stages) for x in arrays),
        *[plan.mask_buffer for _ in masks],
        plgpu.Barrier(num_arrivals=len(arrays) + len(masks), num_barriers=plan.stages or 1),
    ]
    results = _compat.kernel(
        body,
        name=name,
        out_type=out_type,
        grid=(plan.blocks,),
        grid_names=("block",),
        scratch_types=scratch if plan.stages else [],
        approx_math=True,  # exp2 as the hardware has it: two float32 ulps
        interpret=static.interpret,
    )(*arrays, *masks, *known)
    return [x.reshape(-1, width) if writes and i == 0 else x for i, x in enumerate(results)]


def _kept(plan: _Plan, static: _Static, width: int, part: Part, index: Any, mask: Any) -> Any:
    """Which numbers of a part the mask, `causal` and the width let through; None: all."""
    tile = plan.tile
    _, row, chunk = plan.at(index)
    first = chunk * tile.inner
    rules = [] if mask is None else [mask.load(part) != 0]
    if static.queries or (mask is None and width % tile.padded):
        last = width - 1 - first - part.chunk * tile.inner
        if static.queries:  # what the part's first row sees
            last = last - static.queries + 1 + row + part.row
        # Access by access: their columns differ by what is known when compiling, a constant of the
        # comparison. The columns of the whole part would each take a register for good.
        pieces = _accesses(part)
        narrow = dataclasses.replace(pieces[0], chunk=0)
        ahead = narrow.columns()
        if static.queries and part.rows > 1:
            ahead = ahead - narrow.lines()
        starts = [(piece.chunk - part.chunk) * tile.inner for piece in pieces]
        rules.append(jnp.concatenate([ahead <= last - start for start in starts], axis=1))
    return functools.reduce(jnp.logical_and, rules) if rules else None


def _accesses(part: Part) -> list[Part]:
    """The part from left to right in the narrowest parts that all threads have a share of."""
    tile = part.tile
    step = max(1, tile.warps[1] * tile.lanes[1] * tile.vector // tile.inner)
    starts = range(part.chunk, part.chunk + part.chunks, step)
    return [dataclasses.replace(part, chunk=start, chunks=step) for start in starts]


def _scale(static: _Static, numbers: Sequence[Any]) -> Any:
    return numbers[0][0] if static.scale is None else jnp.float32(static.scale)


def _or_zero(top: jax.Array) -> jax.Array:
    """A maximum to subtract, of a row that may have nothing to take it of."""
    return jnp.where(top == -jnp.inf, jnp.float32(0), top)


def _inverse(total: jax.Array) -> jax.Array:
    """1 over a sum, 0 where nothing was summed."""
    return jnp.where(total == 0, jnp.float32(0), 1 / total)


def _once(group: Sequence[Part], f: Callable[[Part], Any]) -> Callable[[Part], Any]:
    """f of any part of the group: kept in registers if the group is one part, else found anew."""
    if len(group) > 1:
        return f
    value = f(group[0])
    return lambda part: value


def _forward(static: _Static, x, number, mask):
    width = x.shape[-1]
    plan = _plan(static, width, x.dtype.itemsize, static.config)
    groups = plan.tile.groups(NUMBERS)

    def scores(part, index, arrays, mask, scale):
        if static.queries and not plan.stages:
            _, row, _ = plan.at(index)
            z = arrays[0].load_seen(part, width - static.queries + row + plan.tile.rows)
        else:
            z = arrays[0].load(part)
        z = z.astype(jnp.float32) * scale
        keep = _kept(plan, static, width, part, index, mask)
        return z if keep is None else jnp.where(keep, z, -jnp.inf)

    def whole(index, arrays, out, mask, numbers, carry):
        for group in groups:
            some_rows(group, index, arrays, out, mask, _scale(static, numbers))
        return carry

    def some_rows(group, index, arrays, out, mask, scale):
        z = _once(group, lambda part: scores(part, index, arrays, mask, scale))
        top = _or_zero(functools.reduce(jnp.maximum, [jnp.max(z(p), axis=1) for p in group]))
        e = _once(group, lambda part: jnp.exp2((z(part) - part.across(top)) * LOG2_E))
        inverse = _inverse(functools.reduce(jnp.add, [jnp.sum(e(p), axis=1) for p in group]))
        for part in group:
            out.store(part, (e(part) * part.across(inverse)).astype(x.dtype))

    def statistics(index, arrays, out, mask, numbers, carry):
        (group,), (top, total) = groups, carry
        scale = _scale(static, numbers)
        for part in group:
            z = scores(part, index, arrays, mask, scale)
            new = jnp.maximum(top, jnp.max(jnp.max(z, axis=1)))
            e = jnp.exp2((z - _or_zero(new)) * LOG2_E)
            total = total * jnp.exp2((top - _or_zero(new)) * LOG2_E) + jnp.sum(jnp.sum(e, axis=1))
            top = new
        return top, total

    def write(index, arrays, out, mask, numbers, carry):
        scale = _scale(static, numbers)
        tops, totals = ([ref[part] for part in plan.parts_of_row()] for ref in numbers[1:])
        top = _or_zero(functools.reduce(jnp.maximum, tops))
        shares = [n * jnp.exp2((t - top) * LOG2_E) for t, n in zip(tops, totals, strict=True)]
        inverse = _inverse(functools.reduce(jnp.add, shares))
        for part in groups[0]:
            z = scores(part, index, arrays, mask, scale)
            y = jnp.exp2((z - top) * LOG2_E) * inverse
            out.store(part, y.astype(x.dtype))
        return carry

    run = functools.partial(_run, static, plan, arrays=[x], mask=mask)
    if not plan.pieces:
        return run("scale_softmax", whole, numbers=[number])[0]
    found = run(
        "scale_softmax_statistics",
        statistics,
        numbers=[number],
        writes=False,
        carry=(-math.inf, 0.0),
    )
    return run("scale_softmax_write", write, numbers=[number, *found])[0]


def _backward(static: _Static, y, number, d_y):
    width, itemsize = y.shape[-1], y.dtype.itemsize
    # No mask is needed, for y is 0 there: the rows are one group.
    static = dataclasses.replace(static, groups=((y.shape[0], False),), queries=0)
    config = _default(width, y.shape[0], y.shape[0], itemsize, 2 * itemsize, 2, static.num_sms)
    plan = _plan(static, width, itemsize, config)
    groups = plan.tile.groups(NUMBERS // 2)

    def load(part, arrays):
        p, d = (x.load(part).astype(jnp.float32) for x in arrays)
        return p, jnp.where(p == 0, jnp.float32(0), d)  # whatever d_y is where nothing was kept

    def whole(index, arrays, out, mask, numbers, carry):
        scale = _scale(static, numbers)
        for group in groups:
            some_rows(group, arrays, out, scale)
        return carry

    def some_rows(group, arrays, out, scale):
        both = _once(group, lambda part: load(part, arrays))
        along = [jnp.sum(p * d, axis=1) for p, d in map(both, group)]
        along = functools.reduce(jnp.add, along)
        for part in group:
            p, d = both(part)
            d_x = scale * (p * (d - part.across(along)))
            out.store(part, d_x.astype(y.dtype))

    def statistics(index, arrays, out, mask, numbers, carry):
        (along,) = carry
        for part in groups[0]:
            p, d = load(part, arrays)
            along = along + jnp.sum(jnp.sum(p * d, axis=1))
        return (along,)

    def write(index, arrays, out, mask, numbers, carry):
        scale = _scale(static, numbers)
        along = functools.reduce(jnp.add, [numbers[1][part] for part in plan.parts_of_row()])
        for part in groups[0]:
            p, d = load(part, arrays)
            out.store(part, (scale * (p * (d - along))).astype(y.dtype))
        return carry

    run = functools.partial(_run, static, plan, arrays=[y, d_y])
    if not plan.pieces:
        return run("scale_softmax_backward", whole, numbers=[number])[0]
    found = run("scale_softmax_backward_statistics", statistics, writes=False, carry=(0.0,))
    return run("scale_softmax_backward_write", write, numbers=[number, *found])[0]


def _scale_gradient(x, y, d_y):
    """[1]; XLA leaves it out of the program where nobody asks for it."""
    p = y.astype(jnp.float32)
    d, x32 = (jnp.where(p == 0, 0, z.astype(jnp.float32)) for z in (d_y, x))
    d_scores = p * (d - jnp.sum(p * d, axis=-1, keepdims=True))
    return jnp.sum(d_scores * x32).reshape(1)


def _softmax_fwd(static, x, number, mask):
    y = _forward(static, x, number, mask)
    return y, (None if number is None else x, y, number)


def _softmax_bwd(static, saved, d_y):
    x, y, number = saved
    d_x = _backward(static, y, number, d_y)
    return d_x, None if number is None else _scale_gradient(x, y, d_y), None


_softmax = jax.custom_vjp(
    lambda static, x, number, mask: _softmax_fwd(static, x, number, mask)[0],
    nondiff_argnums=(0,),
)
_softmax.defvjp(_softmax_fwd, _softmax_bwd)
_softmax = jax.jit(_softmax, static_argnums=0)  # calls alike share one compiled kernel
