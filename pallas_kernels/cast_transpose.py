"""Cast and transpose: numbers in 8 bits, row by row and column by column.

x [M, N] becomes y = x * (1 / scale) in float8_e4m3fn or float8_e5m2, and its transpose [N, M]
beside it. Tensor cores multiply 8-bit numbers along rows only, so a layer that is trained in fp8
needs both: x for y = x W^T and x^T for dW = dy^T x. One block owns one tile: a thread has 8 numbers
of each of 16 rows, from memory to registers, rounds them, and turns them there, byte by byte. A
warp reads 64 numbers of a row at a time, and writes 64 of it and 64 of a column. x is read once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels import device as device_lib
from pallas_kernels.device import Device
from pallas_kernels.lane_code import array_of, asm, register_of, words_of
from pallas_kernels.options import check_arrays, check_dtype, check_flags

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
OUT_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
MOST_NUMBERS = 2**31
MOST_TILES = 65535  # under each other: of CUDA, in that direction of a grid
HELD = (16, 8)  # rows and columns of what a thread has: those of a column are one access
WORD = 4  # numbers
WARP_TILE = (64, 64)  # 4 x 8 threads
TILE = (128, 128)  # 2 x 2 warps


def cast_transpose(
    x: Float[Array, "M N"],
    scale: Float[Array, ""],
    dtype: Any = jnp.float8_e4m3fn,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "M N"], Float[Array, "N M"]]:
    """(y, y^T): y = x * (1 / scale), rounded to `dtype` to the nearest, ties to even.

    What is beyond the largest number of the dtype becomes that number, and NaN stays NaN.
    Dtypes: x bfloat16, float16 or float32; scale float32; dtype float8_e4m3fn or float8_e5m2. No
    gradient passes through.
    Raises: ValueError if shapes or dtypes are others. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for what `why_not` says.
    Source: Micikevicius et al. 2022, arXiv:2209.05433.
    """
    check(x, scale, dtype)
    check_flags("cast_transpose", interpret=interpret)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    if reason := why_not(x, scale, dtype, device=device):
        raise NotImplementedError(f"cast_transpose: cannot run this call: {reason}")
    return _run(jnp.dtype(dtype), interpret, x, scale)


def cast_transpose_reference(x, scale, dtype=jnp.float8_e4m3fn):
    """The mathematics in plain JAX."""
    y = _rounded(lax.stop_gradient(x), lax.stop_gradient(1 / scale), dtype)
    return y, y.T


def why_not(x, scale=None, dtype=jnp.float8_e4m3fn, *, device: Device | None = None) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del scale, dtype
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    if x.dtype not in DTYPES:
        return f"takes bfloat16, float16 or float32, got {x.dtype}"
    if x.size == 0 or any(size % tile for size, tile in zip(x.shape, TILE, strict=True)):
        return f"takes rows and columns in multiples of {TILE[0]}: {list(x.shape)}"
    if x.shape[0] > MOST_TILES * TILE[0]:
        return f"{x.shape[0]} rows are more than {MOST_TILES * TILE[0]}"
    if x.size >= MOST_NUMBERS:
        return f"an array of {x.size} numbers has no index of 32 bits"
    return None


def check(x, scale, dtype) -> None:
    """Refuses what no implementation can take."""
    check_arrays("cast_transpose", x=x)
    check_dtype("cast_transpose", "dtype", dtype)
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"cast_transpose: x is {x.dtype}{list(x.shape)}; it must be [M, N] of floating point"
        )
    shape, scale_dtype = jnp.shape(scale), jnp.result_type(scale)
    if shape != () or scale_dtype != jnp.float32:
        raise ValueError(
            f"cast_transpose: scale is {scale_dtype}{list(shape)}; it must be one float32"
        )
    if jnp.dtype(dtype) not in OUT_DTYPES:
        raise ValueError(
            f"cast_transpose: dtype is {jnp.dtype(dtype)}; it must be float8_e4m3fn or float8_e5m2"
        )


def _rounded(x, inverse, dtype):
    most = float(jnp.finfo(dtype).max)  # XLA makes NaN of what is larger
    return jnp.clip(x.astype(jnp.float32) * inverse, -most, most).astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))  # calls alike share one compiled kernel
def _run(dtype, interpret: bool, x, scale):
    m, n = x.shape

    def body(x_ref, inverse_ref, y_ref, turned_ref):
        down = pl.ds(lax.axis_index("down") * TILE[0], TILE[0])
        across = pl.ds(lax.axis_index("across") * TILE[1], TILE[1])
        tile = x_ref.at[down, across]
        tile = tile[...] if interpret else _compat.load(tile, _layout(), optimized=False)
        y = _rounded(tile, inverse_ref[0], dtype)
        y_ref.at[down, across][...] = y
        turned_ref.at[across, down][...] = y.T if interpret else _turned(y, dtype)

    x, scale = lax.stop_gradient((x, scale))
    return _compat.kernel(
        body,
        name="cast_transpose",
        out_type=(jax.ShapeDtypeStruct((m, n), dtype), jax.ShapeDtypeStruct((n, m), dtype)),
        grid=(m // TILE[0], n // TILE[1]),
        grid_names=("down", "across"),
        interpret=interpret,
    )(x, (1 / scale).reshape(1))


def _layout() -> Any:
    """Of a tile in registers: a thread has 8 columns of 16 rows, those of a row in one register."""
    tiles = (TILE, WARP_TILE, HELD, (HELD[1],))
    return _compat.tiled_layout(tiles, warp_dims=(-7, -6), lane_dims=(-5, -4))


def _turned_layout() -> Any:
    """Of a tile's transpose: a thread has the same numbers, those of a column in one register."""
    tiles = (TILE[::-1], WARP_TILE[::-1], HELD[::-1], (HELD[0],))
    return _compat.tiled_layout(tiles, warp_dims=(-6, -7), lane_dims=(-4, -5))


def _turned(y, dtype):
    """A tile's transpose; no number leaves its thread."""
    before, after = _layout(), _turned_layout()

    @plgpu.inline_mgpu(
        arg_types=(before,),
        return_type=plgpu.ShapeDtypeStruct(TILE[::-1], dtype, layout=after),
    )
    def turned(_: Any, *arrays: Any) -> Any:
        rows = arrays[0].registers.reshape(-1)
        words = [words_of(row) for row in rows]
        columns: list[list[Any]] = [[] for _ in range(HELD[1])]
        for down in range(0, HELD[0], WORD):
            for across in range(HELD[1] // WORD):
                block = [row[across] for row in words[down : down + WORD]]
                for i, word in enumerate(_turned_words(*block)):
                    columns[across * WORD + i].append(word)
        number = ir.VectorType(rows[0].type).element_type
        registers = [register_of(column, number) for column in columns]
        return array_of(registers, TILE[::-1], after)

    return turned(y)


def _turned_words(a: Any, b: Any, c: Any, d: Any) -> list[Any]:
    """Four words of four bytes, turned: the first has the first byte of each."""

    def picked(order: str, x: Any, y: Any) -> Any:
        return asm(f"prmt.b32 $0, $1, $2, {order};", "r", x, y)

    halves = [(picked(order, a, b), picked(order, c, d)) for order in ("0x5140", "0x7362")]
    return [picked(order, *half) for half in halves for order in ("0x5410", "0x7632")]
