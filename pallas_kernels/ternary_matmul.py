"""Ternary weights times int8 activations, exact in int32: y = (xq Wq^T) (a / 127) gamma.

xq [*B, I] are the activations of a token as int8 and a their largest magnitude; Wq [O, I] is -1, 0
or 1, two bits each, with a gamma for each output (`Packed`, scheme "ternary").
Source: Ma et al. 2024, arXiv:2402.17764; Wang et al. 2024, arXiv:2410.16144.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from pallas_kernels import device as device_lib
from pallas_kernels import ternary_matmul_kernel as kernel
from pallas_kernels import tuned
from pallas_kernels.device import Device
from pallas_kernels.packed import Packed
from pallas_kernels.ternary_matmul_kernel import Config

OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
MAX_ROWS = 64  # of x: more take longer to multiply than the codes to read
MAX_INPUTS = 2**17  # sums of codes that count 64 times stay below 2^31

SMALLEST = 1e-5  # of the largest magnitude that a token is scaled by


def quantize_rows(x: Float[Array, "*B I"]) -> tuple[Int8[Array, "*B I"], Float[Array, "*B"]]:
    """Activations as int8, -128 to 127, and what 1 of them stands for: float32, max |x| / 127.

    Arithmetic in float32; `round` is to the nearest, ties to even.
    """
    x = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), np.float32(SMALLEST))
    quotients = jnp.round(x * (np.float32(127) / largest)[..., None])
    return jnp.clip(quotients, -128, 127).astype(jnp.int8), largest / np.float32(127)


def ternary_matmul(
    xq: Int8[Array, "*B I"],
    x_scale: Float[Array, "*B"],
    packed: Packed,
    *,
    bias: Float[Array, " O"] | None = None,
    residual: Float[Array, "*B O"] | None = None,
    out_dtype: Any = jnp.bfloat16,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B O"]:
    """(xq Wq^T) x_scale gamma + bias + residual: int32 sums that are exact, and one rounding.

    Dtypes: x_scale float32; bias any float; the result and the residual have `out_dtype`:
    bfloat16, float16 or float32. There are no gradients: of integers there are none.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for what `why_not` says.
    """
    _check(xq, x_scale, packed, bias, residual, out_dtype)
    m, (n, k) = math.prod(xq.shape[:-1]), packed.shape
    if config is not None and (problem := kernel.problem(config, m, n, k)):
        raise ValueError(f"ternary_matmul: {config}: {problem}")
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    reason = why_not(xq, packed, device=device)
    if reason is not None:
        raise NotImplementedError(f"ternary_matmul: cannot run this call: {reason}")
    config = (
        config
        or tuned.lookup("ternary_matmul", bucket(xq, x_scale, packed), device, Config)
        or default_config(xq, x_scale, packed, device=device)
    )
    static = kernel.Static(config, interpret, jnp.dtype(out_dtype).name)
    flat = None if residual is None else residual.reshape(m, n)
    y = _run(static, xq.reshape(m, k), x_scale.reshape(m), packed, bias, flat)
    return y.reshape(*xq.shape[:-1], n)


def ternary_linear(
    x: Float[Array, "*B I"],
    packed: Packed,
    *,
    bias: Float[Array, " O"] | None = None,
    residual: Float[Array, "*B O"] | None = None,
    out_dtype: Any = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B O"]:
    """`ternary_matmul` of x of any float, which `quantize_rows` makes int8 first.

    The result has `out_dtype`, x's if None. Gradients: of x, bias and residual, that of x as if it
    were not rounded (straight through); of the weight none.
    Raises: as `ternary_matmul`.
    """
    how = (jnp.dtype(out_dtype or x.dtype), config, interpret)
    return _linear(how, x, packed, bias, residual)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(how, x, packed: Packed, bias, residual):
    out_dtype, config, interpret = how
    return ternary_matmul(
        *quantize_rows(x),
        packed,
        bias=bias,
        residual=residual,
        out_dtype=out_dtype,
        config=config,
        interpret=interpret,
    )


def _forward(how, x, packed, bias, residual):
    like = [None if array is None else jnp.zeros((0,), array.dtype) for array in (x, bias)]
    return _linear(how, x, packed, bias, residual), (packed, like, residual is not None)


def _backward(how, saved, d_y):
    del how
    packed, (like_x, like_bias), added = saved
    wide = d_y.astype(jnp.float32)
    d_bias = None
    if like_bias is not None:
        d_bias = jnp.sum(wide, axis=tuple(range(d_y.ndim - 1))).astype(like_bias.dtype)
    wide = wide * packed.row_scale.reshape((1,) * (d_y.ndim - 1) + (-1,))
    weight = unpack(packed.codes).astype(like_x.dtype)
    d_x = jnp.matmul(wide.astype(like_x.dtype), weight, preferred_element_type=jnp.float32)
    return d_x.astype(like_x.dtype), None, d_bias, d_y if added else None


_linear.defvjp(_forward, _backward)


def ternary_matmul_reference(
    xq: Int8[Array, "*B I"],
    x_scale: Float[Array, "*B"],
    packed: Packed,
    *,
    bias: Float[Array, " O"] | None = None,
    residual: Float[Array, "*B O"] | None = None,
    out_dtype: Any = jnp.bfloat16,
) -> Float[Array, "*B O"]:
    """The mathematics in plain JAX."""
    sums = jax.lax.dot_general(
        xq,
        unpack(packed.codes),
        (((xq.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    wide = lambda x: x.astype(jnp.float32).reshape((1,) * (sums.ndim - x.ndim) + x.shape)  # noqa: E731
    y = sums.astype(jnp.float32) * x_scale[..., None] * wide(packed.row_scale)
    y = y if bias is None else y + wide(bias)
    return (y if residual is None else y + wide(residual)).astype(out_dtype)


def why_not(xq, packed: Packed, *, device: Device | None = None) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    m, (n, k) = math.prod(xq.shape[:-1]), packed.shape
    if 0 in (m, n, k):
        return f"nothing to multiply: x is {list(xq.shape)}, the weight {[n, k]}"
    if m > MAX_ROWS:
        return f"takes {MAX_ROWS} rows of x at most, got {m}"
    if k % kernel.LANE or k >= MAX_INPUTS:
        return f"takes inputs in multiples of {kernel.LANE}, fewer than {MAX_INPUTS}, got {k}"
    if n % kernel.MMA_ROWS:
        return f"takes outputs in multiples of {kernel.MMA_ROWS}, got {n}"
    return None


def default_config(xq, x_scale, packed: Packed, *, device: Device) -> Config:
    """As many rows a block as registers have room for, and as still give each multiprocessor two
    blocks.
    """
    del x_scale
    m, (n, k) = math.prod(xq.shape[:-1]), packed.shape
    most = next(rows for few, rows in ((8, 32), (16, 64), (32, 32), (MAX_ROWS, 16)) if m <= few)
    found = [rows for rows in (64, 32, 16) if n % rows == 0 and rows <= most]
    tile_n = next((rows for rows in found if n >= 2 * rows * device.num_sms), found[-1])
    # Of more rows of x, sums leave no registers for a second turn
    configs = [Config(tile_n, 4, ahead) for ahead in ((2, 1) if m <= 32 else (1,))]
    return next(config for config in configs if kernel.problem(config, m, n, k) is None)


def candidates(xq, x_scale, packed: Packed, *, device: Device) -> list[Config]:
    """More rows a block, more warps, more turns ahead; those that can run."""
    m, (n, k) = math.prod(xq.shape[:-1]), packed.shape
    found = [
        Config(tile_n, warps, ahead)
        for tile_n in (16, 32, 64)
        for warps in (4, 8)
        for ahead in (1, 2, 3)
    ]
    default = default_config(xq, x_scale, packed, device=device)
    return [c for c in found if c != default and kernel.problem(c, m, n, k) is None]


def bucket(xq, x_scale, packed: Packed) -> str:
    """The key of a tuned row: rows of x up to a power of two, the weight as it is."""
    del x_scale
    m, (n, k) = math.prod(xq.shape[:-1]), packed.shape
    return f"m{tuned.power_of_two(m)}-n{n}-k{k}"


def tuning_calls() -> list[tuned.Call]:
    """The projections of BitNet b1.58 2B, joined where they can be, and of Llama-3.1-8B."""
    shapes = ((3840, 2560), (2560, 2560), (13824, 2560), (2560, 6912))
    shapes += ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    return [
        tuned.Call(spec, ternary_matmul, make=functools.partial(random_arguments, spec))
        for n, k in shapes
        for m in (1, 8, 16)
        for spec in [shapes_of(m, n, k)]
    ]


def shapes_of(m: int, n: int, k: int) -> tuple[Any, ...]:
    """Of m rows of x and a weight [n, k]: what `ternary_matmul` takes, without the numbers."""
    spec = jax.ShapeDtypeStruct
    codes, row_scale = spec((n, k // 4), jnp.uint8), spec((n,), jnp.float32)
    packed = Packed(codes, None, None, row_scale, "ternary")  # pyright: ignore[reportArgumentType]
    return spec((m, k), jnp.int8), spec((m,), jnp.float32), packed


def random_arguments(shapes: tuple[Any, ...], key: jax.Array) -> tuple[Any, ...]:
    """Such arguments by chance: codes and int8 all equally often, scales from 1/2 to 3/2."""
    xq, x_scale, packed = shapes
    keys = jax.random.split(key, 4)
    codes = jnp.zeros(packed.codes.shape, jnp.uint8)
    for i, each in enumerate(jax.random.split(keys[0], 4)):
        some = jax.random.randint(each, codes.shape, 0, 3, jnp.uint8)
        codes = codes | some << np.uint8(2 * i)
    scales = [
        jax.random.uniform(keys[i], array.shape, jnp.float32, 0.5, 1.5)
        for i, array in ((1, x_scale), (2, packed.row_scale))
    ]
    x = jax.random.randint(keys[3], xq.shape, -128, 128, jnp.int8)
    return x, scales[0], dataclasses.replace(packed, codes=codes, row_scale=scales[1])


def unpack(codes: Any) -> Int8[Array, "O I"]:
    """-1, 0 and 1 of codes [O, I / 4]."""
    columns = jnp.stack([codes >> np.uint8(2 * i) & np.uint8(3) for i in range(4)], axis=-1)
    return columns.reshape(codes.shape[0], -1).astype(jnp.int8) - np.int8(1)


def _check(xq, x_scale, packed: Packed, bias, residual, out_dtype) -> None:
    if packed.scheme != "ternary" or packed.row_scale is None:
        raise ValueError(f"ternary_matmul: the weight is {packed.scheme}, not ternary")
    n, k = packed.shape
    if xq.dtype != jnp.int8 or xq.ndim < 1 or xq.shape[-1] != k:
        raise ValueError(
            f"ternary_matmul: xq is {xq.dtype}{list(xq.shape)}, not int8 [.., I] for a weight "
            f"[O, I] of {[n, k]}"
        )
    if x_scale.dtype != jnp.float32 or x_scale.shape != xq.shape[:-1]:
        raise ValueError(
            f"ternary_matmul: x_scale is {x_scale.dtype}{list(x_scale.shape)}, not a float32 for "
            f"each row of x {list(xq.shape)}"
        )
    if jnp.dtype(out_dtype) not in OUT_DTYPES:
        raise ValueError(
            f"ternary_matmul: out_dtype {jnp.dtype(out_dtype)} is not bfloat16, float16 or float32"
        )
    if bias is not None and (bias.shape != (n,) or bias.dtype not in OUT_DTYPES):
        raise ValueError(
            f"ternary_matmul: bias is {bias.dtype}{list(bias.shape)}, not floats [O] = [{n}]"
        )
    shape, dtype = (*xq.shape[:-1], n), jnp.dtype(out_dtype)
    if residual is not None and (residual.shape, residual.dtype) != (shape, dtype):
        raise ValueError(
            f"ternary_matmul: the residual is {residual.dtype}{list(residual.shape)}, but the "
            f"result is {dtype}{list(shape)}"
        )


@functools.partial(jax.jit, static_argnums=0)  # calls alike share one compiled kernel
def _run(static: kernel.Static, xq, x_scale, packed: Packed, bias, residual):
    def plain(xq, x_scale, codes, row_scale, bias, residual):
        part = dataclasses.replace(packed, codes=codes, row_scale=row_scale)
        return ternary_matmul_reference(
            xq, x_scale, part, bias=bias, residual=residual, out_dtype=static.out_dtype
        )

    return kernel.warp_products(static, xq, x_scale, packed, bias, residual, plain=plain)
