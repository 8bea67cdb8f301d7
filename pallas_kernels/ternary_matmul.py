"""Ternary weights times int8 activations, exact in int32: y = (xq Wq^T) (a / 127) gamma; and what
stands before and behind such a product in decoding.

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
from jaxtyping import Array, Float, Int, Int8

from pallas_kernels import device as device_lib
from pallas_kernels import ternary_matmul_kernel as kernel
from pallas_kernels import tuned
from pallas_kernels.device import SHARED_BYTES, Device
from pallas_kernels.matmul_finish import precision
from pallas_kernels.options import check_arrays, check_dtype, check_number, check_options
from pallas_kernels.packed import Packed
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.ternary_matmul_kernel import Config
from pallas_kernels.ternary_rows import SMALLEST

OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
GATES = ("swiglu", "relu2_glu")  # epilogues of gate and up
FLOATS = (jnp.bfloat16, jnp.float16)
MOST_FLOAT_ROWS = 4  # that a kernel makes int8: each block does it anew
LONG = 24  # turns of a row of the weight that 8 warps divide instead of 4
MAX_ROWS = 64  # of x: more take longer to multiply than the codes to read
MAX_INPUTS = 2**17  # sums of codes that count 64 times stay below 2^31
WIDEST = Config(64, 4, 1)  # of what `default_config` chooses for few rows, on chip


def quantize_rows(x: Float[Array, "*B I"]) -> tuple[Int8[Array, "*B I"], Float[Array, "*B"]]:
    """Activations as int8, -128 to 127, and what 1 of them stands for: float32, max |x| / 127.

    Arithmetic in float32; rounded to the nearest, ties to even (on a GPU XLA's quotients are off by
    up to two units in the last place, so that what is nearly a tie may go either way). The scale of
    a token with a NaN or an infinity is NaN or infinite, and so is what is multiplied by it.
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
    epilogue: str | None = None,
    residual: Float[Array, "*B F"] | None = None,
    out_dtype: Any = jnp.bfloat16,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B F"]:
    """epilogue((xq Wq^T) x_scale gamma + bias) + residual: int32 sums that are exact, one rounding.

    epilogue "swiglu" or "relu2_glu": the O = 2F rows of the weight are gate, then up, and the
    result is silu(gate) up or max(gate, 0)^2 up; otherwise F is O.
    Dtypes: x_scale float32; bias bfloat16, float16 or float32; the result and the residual
    have `out_dtype`, one of these. There are no gradients: of integers there are none.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for what `why_not` says.
    """
    check_dtype("ternary_matmul", "out_dtype", out_dtype)
    out = jnp.dtype(out_dtype)
    check_arrays("ternary_matmul", xq=xq, x_scale=x_scale, bias=bias, residual=residual)
    _check("ternary_matmul", xq, packed, bias, epilogue, residual, out)
    if xq.dtype != jnp.int8:
        raise ValueError(f"ternary_matmul: xq is {xq.dtype}; it must be int8")
    if x_scale.dtype != jnp.float32 or x_scale.shape != xq.shape[:-1]:
        raise ValueError(
            f"ternary_matmul: x_scale is {x_scale.dtype}{list(x_scale.shape)}, not a float32 for "
            f"each row of x {list(xq.shape)}"
        )
    static = _static("ternary_matmul", xq, packed, epilogue, out, config, interpret)
    return _run(static, xq, x_scale, packed, None, bias, residual)


def ternary_linear(
    x: Float[Array, "*B I"],
    packed: Packed,
    *,
    norm: Float[Array, " I"] | None = None,
    eps: float = 1e-5,
    bias: Float[Array, " O"] | None = None,
    epilogue: str | None = None,
    residual: Float[Array, "*B F"] | None = None,
    out_dtype: Any = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B F"]:
    """`ternary_matmul` of x of any float, which `quantize_rows` makes int8 first.

    norm: the weight of an RMSNorm of x, with `eps`; what it gives is rounded to x's dtype. Of few
    rows of 16 bits, norm and rounding are part of the kernel.
    The result has `out_dtype`, x's if None. Gradients: of x, norm, bias and residual, as if nothing
    were made int8 but with the numbers that were (straight through); of the weight none.
    Raises: as `ternary_matmul`.
    """
    check_arrays("ternary_linear", x=x, norm=norm, bias=bias, residual=residual)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"ternary_linear: x is {x.dtype}; it must be floating point")
    check_dtype("ternary_linear", "out_dtype", out_dtype)
    out = jnp.dtype(out_dtype or x.dtype)
    _check("ternary_linear", x, packed, bias, epilogue, residual, out)
    if norm is not None:
        if norm.shape != x.shape[-1:]:
            raise ValueError(
                f"ternary_linear: norm {list(norm.shape)} is not [I] = [{x.shape[-1]}]"
            )
        check_number("ternary_linear", "eps", eps, positive=True)
        norm = norm.astype(x.dtype)
    static = _static("ternary_linear", x, packed, epilogue, out, config, interpret)
    static = dataclasses.replace(static, eps=float(eps) if norm is not None else 0.0)
    return _linear(static, x, packed, norm, bias, residual)


def in_kernel(x) -> bool:
    """Whether rows of this shape and dtype become int8 in the kernel: few do, of 16 bits, if the
    codes fit on chip.
    """
    m, k = math.prod(x.shape[:-1]), x.shape[-1]
    fits = kernel.shared_bytes(WIDEST, m, k, floats=True) <= SHARED_BYTES
    return x.dtype in FLOATS and m <= MOST_FLOAT_ROWS and fits


def _static(
    who: str, x, packed: Packed, epilogue, out: jnp.dtype, config, interpret: bool
) -> kernel.Static:
    m, (n, k) = math.prod(x.shape[:-1]), packed.shape
    form: Any = {"halves": 1 if epilogue is None else 2, "floats": in_kernel(x)}
    check_options(who, config, Config, interpret=interpret)
    if config is not None and (problem := kernel.problem(config, m, n, k, **form)):
        raise ValueError(f"{who}: {config}: {problem}")
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    reason = why_not(x, packed, epilogue=epilogue, device=device)
    if reason is not None:
        raise NotImplementedError(f"{who}: cannot run this call: {reason}")
    if config is None:
        config = tuned.lookup("ternary_matmul", bucket(x, None, packed), device, Config)
        if config is not None and kernel.problem(config, m, n, k, **form):
            config = None  # measured for a call without halves or floats
    config = config or default_config(x, None, packed, epilogue=epilogue, device=device)
    return kernel.Static(config, interpret, out.name, device.num_sms, epilogue)


def ternary_matmul_reference(
    xq: Int8[Array, "*B I"],
    x_scale: Float[Array, "*B"],
    packed: Packed,
    *,
    bias: Float[Array, " O"] | None = None,
    epilogue: str | None = None,
    residual: Float[Array, "*B F"] | None = None,
    out_dtype: Any = jnp.bfloat16,
) -> Float[Array, "*B F"]:
    """The mathematics in plain JAX."""
    y = scaled_sums(ternary_sums(xq, packed), x_scale, packed)
    return _finish(y, bias, epilogue, residual).astype(out_dtype)


def ternary_sums(
    xq: Int8[Array, "*B I"], packed: Packed, dtype: Any = jnp.int32
) -> Int[Array, "*B O"]:
    """The products before any scale, exact in 32 bits."""
    return jax.lax.dot_general(
        xq,
        unpack(packed.codes),
        (((xq.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=dtype,
    )


def scaled_sums(
    sums: Int[Array, "*B O"], x_scale: Float[Array, "*B"], packed: Packed
) -> Float[Array, "*B O"]:
    """Sums times the scales of rows and outputs, float32."""
    return _row_scaled(sums.astype(jnp.float32) * x_scale[..., None], packed)


def _row_scaled(y, packed: Packed):
    return y if packed.row_scale is None else y * _in_last(packed.row_scale, y.ndim)


def ternary_linear_reference(
    x: Float[Array, "*B I"],
    packed: Packed,
    *,
    norm: Float[Array, " I"] | None = None,
    eps: float = 1e-5,
    bias: Float[Array, " O"] | None = None,
    epilogue: str | None = None,
    residual: Float[Array, "*B F"] | None = None,
    out_dtype: Any = None,
) -> Float[Array, "*B F"]:
    """The mathematics in plain JAX; its gradient is that of the next function."""
    if norm is not None:
        x = _normed(x, norm.astype(x.dtype), eps)
    rest: Any = {"bias": bias, "epilogue": epilogue, "residual": residual}
    return ternary_matmul_reference(
        *quantize_rows(x), packed, **rest, out_dtype=out_dtype or x.dtype
    )


def straight_through(
    x,
    packed: Packed,
    *,
    norm=None,
    eps=1e-5,
    bias=None,
    epilogue=None,
    residual=None,
    out_dtype=None,
):
    """The same but for rounding, in floats of x's dtype: what has the gradient."""
    out_dtype = out_dtype or x.dtype
    if norm is not None:
        x = _normed(x, norm.astype(x.dtype), eps)
    xq, x_scale = quantize_rows(x)
    rounded = (xq.astype(jnp.float32) * x_scale[..., None]).astype(x.dtype)
    x = x + jax.lax.stop_gradient(rounded - x)
    y = jnp.matmul(
        x,
        unpack(packed.codes).astype(x.dtype).T,
        precision=precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return _finish(_row_scaled(y, packed), bias, epilogue, residual).astype(out_dtype)


def _normed(x, norm, eps: float) -> Any:
    return rms_norm_reference(x, norm, eps=eps)


def _finish(y, bias, epilogue: str | None, residual):
    """What becomes of float32 sums."""
    y = y if bias is None else y + _in_last(bias.astype(jnp.float32), y.ndim)
    if epilogue is not None:
        gate, up = jnp.split(y, 2, axis=-1)
        y = (jax.nn.silu(gate) if epilogue == "swiglu" else jnp.square(jax.nn.relu(gate))) * up
    return y if residual is None else y + residual.astype(jnp.float32)


def _in_last(vector, ndim: int):
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


def why_not(
    x, packed: Packed, *, epilogue: str | None = None, device: Device | None = None
) -> str | None:
    """What keeps the kernel from this call; shapes suffice. x is xq, or what becomes it."""
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    m, (n, k) = math.prod(x.shape[:-1]), packed.shape
    if packed.row_scale is None:
        return f"the weight {[n, k]} has no row_scale"
    if 0 in (m, n, k):
        return f"nothing to multiply: x is {list(x.shape)}, the weight {[n, k]}"
    if m > MAX_ROWS:
        return f"takes {MAX_ROWS} rows of x at most, got {m}"
    if k % kernel.LANE or k >= MAX_INPUTS:
        return f"takes inputs in multiples of {kernel.LANE}, fewer than {MAX_INPUTS}, got {k}"
    grain = kernel.MMA_ROWS * (1 if epilogue is None else 2)
    if n % grain:
        return f"takes outputs in multiples of {grain}, got {n}"
    return None


def default_config(
    x, x_scale, packed: Packed, *, epilogue: str | None = None, device: Device
) -> Config:
    """As many rows a block as registers have room for, and as still give each multiprocessor two
    blocks.
    """
    del x_scale
    m, (n, k), halves = math.prod(x.shape[:-1]), packed.shape, 1 if epilogue is None else 2
    most = next(rows for few, rows in ((8, 32), (16, 64), (32, 32), (MAX_ROWS, 16)) if m <= few)
    grain = kernel.MMA_ROWS * halves
    found = [rows for rows in (64, 32, 16) if n % rows == 0 and grain <= rows <= max(most, grain)]
    tile_n = next((rows for rows in found if n >= 2 * rows * device.num_sms), found[-1])
    # Of more rows of x, sums leave no registers for a second turn
    configs = [Config(tile_n, 4, ahead) for ahead in ((2, 1) if m <= 32 else (1,))]
    if m <= kernel.MMA_COLUMNS and kernel.turns(k) > LONG and n % 32 == 0:
        # H200, one row, 4096 x 14336: 6.9 us, by 4 warps that ask for two turns 8.5
        configs = [Config(32, 8, ahead) for ahead in (4, 2, 1)] + configs
    form: Any = {"halves": halves, "floats": in_kernel(x)}
    return next(c for c in configs if kernel.problem(c, m, n, k, **form) is None)


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


def _check(who: str, x, packed: Packed, bias, epilogue, residual, out: jnp.dtype) -> None:
    scheme = packed.scheme if isinstance(packed, Packed) else "an array"
    if scheme != "ternary":
        raise ValueError(f"{who}: the weight is {scheme}, not ternary")
    if (reason := packed.problem()) is not None:
        raise ValueError(f"{who}: {reason}")
    n, k = packed.shape
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(
            f"{who}: x {list(x.shape)} is [.., I], which a weight [O, I] of {[n, k]} does not fit"
        )
    if out not in OUT_DTYPES:
        raise ValueError(f"{who}: out_dtype {out} is not bfloat16, float16 or float32")
    if epilogue not in (None, *GATES):
        names = ", ".join(map(repr, GATES))
        raise ValueError(f"{who}: no epilogue is named {epilogue!r}; there are {names}")
    if bias is not None and (bias.shape != (n,) or bias.dtype not in OUT_DTYPES):
        raise ValueError(f"{who}: bias is {bias.dtype}{list(bias.shape)}, not floats [O] = [{n}]")
    if epilogue is not None and n % 2:
        raise ValueError(f"{who}: {epilogue!r} needs two halves of outputs, got {n}")
    shape = (*x.shape[:-1], n if epilogue is None else n // 2)
    if residual is not None and (residual.shape, residual.dtype) != (shape, out):
        raise ValueError(
            f"{who}: the residual is {residual.dtype}{list(residual.shape)}, but the "
            f"result is {out}{list(shape)}"
        )


@functools.partial(jax.jit, static_argnums=0)  # calls alike share one compiled kernel
def _run(static: kernel.Static, x, x_scale, packed: Packed, norm, bias, residual):
    m, k = math.prod(x.shape[:-1]), x.shape[-1]

    def plain(x, packed, *, x_scale=None, **rest):
        rest |= {"epilogue": static.epilogue, "out_dtype": jnp.dtype(static.out_dtype)}
        if x_scale is None:
            return ternary_linear_reference(x, packed, eps=static.eps, **rest)
        return ternary_matmul_reference(x, x_scale, packed, **rest)

    y = kernel.warp_products(
        static,
        x.reshape(m, k),
        packed,
        x_scale=None if x_scale is None else x_scale.reshape(m),
        norm=norm,
        bias=bias,
        residual=None if residual is None else residual.reshape(m, -1),
        plain=plain,
    )
    return y.reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(static: kernel.Static, x, packed: Packed, norm, bias, residual):
    if in_kernel(x):
        return _run(static, x, None, packed, norm, bias, residual)
    if norm is not None:
        x = _normed(x, norm, static.eps)
    return _run(static, *quantize_rows(x), packed, None, bias, residual)


def _forward(static, *arrays):
    return _linear(static, *arrays), arrays


def _backward(static, arrays, d_y):
    x, packed, *rest = arrays
    how = {"eps": static.eps, "epilogue": static.epilogue, "out_dtype": static.out_dtype}

    def run(x, norm, bias, residual):
        rest = {"norm": norm, "bias": bias, "residual": residual}
        return straight_through(x, packed, **rest, **how)

    d_x, *d_rest = jax.vjp(run, x, *rest)[1](d_y)
    return d_x, None, *d_rest


_linear.defvjp(_forward, _backward)
