"""Matmul: a @ b with wide sums, and what follows it in a model before anything is written.

a [.., M, K], b [K, N] or, as a weight lies in a checkpoint, [N, K] with `transpose_b`.
`matmul_kernel` says what a block does, `matmul_few_rows` what it does where a has few rows, as in
decoding, `matmul_finish` what follows the sums and `matmul_backward` the gradient.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels import device as device_lib
from pallas_kernels import matmul_few_rows as few_rows
from pallas_kernels import tuned
from pallas_kernels.device import Device
from pallas_kernels.matmul_backward import run
from pallas_kernels.matmul_config import (
    config_problem,
    has_blocks,
    num_vectors,
    reads_weight,
    result_dtype,
    sizes,
    tile_config,
)
from pallas_kernels.matmul_finish import BLOCK, EPILOGUES, FP8, MOST, finish, sums
from pallas_kernels.matmul_kernel import Config, Static
from pallas_kernels.options import check_arrays, check_dtype, check_flags, check_options
from pallas_kernels.wgmma_tiles import LINE_BYTES, WGMMA_ROWS

DTYPES = (jnp.bfloat16, jnp.float16, FP8, jnp.int8)
OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def matmul(
    a: Shaped[Array, "*B M K"],
    b: Array,
    *,
    transpose_b: bool = False,
    out_dtype: Any = None,
    bias: Float[Array, " N"] | None = None,
    epilogue: str | None = None,
    residual: Float[Array, "*B M F"] | None = None,
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    out_scale: Array | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Shaped[Array, "*B M F"]:
    """epilogue(a @ b * scales + bias) + residual, summed in float32 and rounded once.

    b is [K, N], or [N, K] with `transpose_b`, which costs no copy; or one of these for each of a's
    leading dimensions. epilogue "swiglu": the N = 2F columns are gate, then up, and the result is
    silu(gate) * up, [.., M, F]; otherwise F is N. "gelu" is x (1 + erf(x / sqrt(2))) / 2, and
    "gelu_pytorch_tanh" x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, as configs name them.
    a_scale is one number or one a row [.., M], b_scale one number or one a column [N]. A number a
    row may come from a itself: of an RMSNorm in front, a_scale is 1 / rms of the rows that a holds
    as they are, with the norm's weight multiplied into b's K beforehand.
    Block scales, of float8: a_scale [.., M, K / 128] and b_scale [N / 128, K / 128], both rounded
    up, of 128 numbers of a row of a and of 128 x 128 of b [N, K]; the sums of 128 of K are scaled
    and added in float32.
    Dtypes: a and b both bfloat16, float16, float8_e4m3fn or int8; bias and scales any float. int8
    is summed in int32, exactly; float8 in sums of which Hopper's tensor cores keep 13 bits behind
    the leading one (with block scales, over 128 of K only). The result and the residual have
    `out_dtype`: bfloat16, float16 or float32, a's if None (float8: bfloat16). Of int8 it may be
    int32 too, which it is if None: the sums alone. With out_scale, one number or one a column [F],
    the result is int8 or float8_e4m3fn: what came out so far times out_scale, to the nearest, ties
    to even, at most 127 or 448; it takes no residual.
    Gradients: two more products by the same kernel, in a's dtype (float8: bfloat16, and the
    gradient of a float8 array saturates at 448); an epilogue and scales compute a @ b once more.
    With block scales they go through `matmul_reference`. int8 arrays have none, what follows their
    product has; a result of out_scale passes none on, and float8 with it raises.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for what `why_not` says.
    Source of the block scales: DeepSeek-AI 2024, arXiv:2412.19437, 3.3.2.
    """
    scales = {"a_scale": a_scale, "b_scale": b_scale, "out_scale": out_scale}
    rest = {"bias": bias, "residual": residual, **scales}
    keywords = {"transpose_b": transpose_b, "out_dtype": out_dtype, "epilogue": epilogue, **rest}
    _check(a, b, **keywords)
    check_options("matmul", config, Config, interpret=interpret)
    if config is not None and (problem := config_problem(config, a, b, **keywords)):
        raise ValueError(f"matmul: {config}: {problem}")
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    reason = why_not(a, b, **keywords, device=device)
    if reason is not None:
        raise NotImplementedError(f"matmul: cannot run this call: {reason}")
    config = (
        config
        or tuned.lookup("matmul", bucket(a, b, **keywords), device, Config)
        or default_config(a, b, **keywords, device=device)
    )
    static = Static(
        "matmul" if epilogue is None else f"matmul_{epilogue}",
        config,
        device.num_sms,
        interpret,
        result_dtype(a, out_dtype).name,
        transpose_b=transpose_b,
        epilogue=epilogue,
    )
    lead = (math.prod(b.shape[:-2]),) if b.ndim > 2 else ()
    a2, residual2 = (
        None if x is None else x.reshape(*lead, -1, x.shape[-1]) for x in (a, residual)
    )
    blocks = [-1, b_scale.shape[1]] if b_scale is not None and b_scale.ndim == 2 else [-1]
    shapes = {"a_scale": blocks, "b_scale": blocks, "out_scale": [-1]}
    flat = [
        None if s is None else s.reshape(shapes[name]).astype(jnp.float32)
        for name, s in scales.items()
    ]
    if bias is not None and bias.dtype.itemsize == 1:  # a copy of so few bytes cannot be cut
        bias = bias.astype(jnp.bfloat16)
    call = functools.partial(run, static)
    if lead:
        axes = (0, 0, None, None if residual is None else 0, None, None, None)
        call = jax.vmap(call, in_axes=axes)
    y = call(a2, b.reshape(*lead, *b.shape[-2:]), bias, residual2, *flat)
    return y.reshape(*a.shape[:-1], y.shape[-1])


def matmul_reference(
    a,
    b,
    *,
    transpose_b=False,
    out_dtype=None,
    bias=None,
    epilogue=None,
    residual=None,
    a_scale=None,
    b_scale=None,
    out_scale=None,
):
    """The mathematics in plain JAX."""
    out_dtype = result_dtype(a, out_dtype)
    blocks = has_blocks(b_scale)
    total = sums(a, b, transpose_b=transpose_b, a_scale=a_scale, b_scale=b_scale)
    if blocks:  # they are in the sums
        a_scale = b_scale = None
    elif a_scale is not None and a_scale.ndim:
        a_scale = a_scale[..., None]
    after = (bias, residual, a_scale, b_scale, out_scale, epilogue)
    return finish(total, *after, out_dtype=out_dtype)


def why_not(
    a,
    b,
    *,
    transpose_b=False,
    out_dtype=None,
    bias=None,
    epilogue=None,
    residual=None,
    a_scale=None,
    b_scale=None,
    out_scale=None,
    device: Device | None = None,
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del bias, residual
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    if a.dtype == jnp.float32:
        return "the tensor cores would round float32 to 10 bits (tf32)"
    if a.dtype not in DTYPES:
        return f"takes bfloat16, float16, float8_e4m3fn or int8, got {a.dtype}"
    if a.dtype.itemsize == 1 and not transpose_b:
        return (
            f"{a.dtype} tensor cores want K innermost in both operands: b as [N, K], with "
            "transpose_b"
        )
    if epilogue == "swiglu" and not transpose_b:
        return "'swiglu' takes gate and up as rows of a weight: b as [N, K], with transpose_b"
    if b.ndim > 2 and any(scale is not None for scale in (a_scale, b_scale, out_scale)):
        return "takes scales for one b only, not for a batch of them"
    if 0 in (*a.shape, *b.shape):
        return f"nothing to multiply: a is {list(a.shape)}, b is {list(b.shape)}"
    n = b.shape[-2] if transpose_b else b.shape[-1]
    width = n // 2 if epilogue == "swiglu" else n
    if has_blocks(b_scale) and epilogue == "swiglu" and width % (BLOCK // 2):
        return f"up begins within 64 columns that share a scale: F = {width}"
    # the gradient of N columns takes them as an operand of 16 bits
    out_bytes = 1 if result_dtype(a, out_dtype).itemsize == 1 else 2
    for name, size_bytes in (("K", a.shape[-1] * a.dtype.itemsize), ("N", width * out_bytes)):
        if reason := device_lib.why_not_copied(f"rows along {name}", size_bytes):
            return reason
    return None


def default_config(
    a,
    b,
    *,
    transpose_b=False,
    out_dtype=None,
    bias=None,
    epilogue=None,
    residual=None,
    a_scale=None,
    b_scale=None,
    out_scale=None,
    device: Device,
) -> Config:
    """What was ahead on an H200 where rows are few, else the least work in the last wave."""
    del residual
    m, n, k = sizes(a, b, transpose_b)
    if m <= WGMMA_ROWS and reads_weight(a, b, transpose_b, epilogue, a_scale, b_scale, out_scale):
        few = few_rows.default_config(
            m,
            n,
            k,
            result_dtype(a, out_dtype),
            gated=epilogue == "swiglu",
            num_sms=device.num_sms,
        )
        if few is not None:
            return few
    return tile_config(
        m,
        n,
        a.dtype,
        b_rows=not transpose_b,
        gated=epilogue == "swiglu",
        num_sms=device.num_sms,
        vectors=num_vectors(bias, a_scale, b_scale, out_scale),
        blocks=has_blocks(b_scale),
        out_bytes=result_dtype(a, out_dtype).itemsize,
    )


def bucket(
    a,
    b,
    *,
    transpose_b=False,
    out_dtype=None,
    bias=None,
    epilogue=None,
    residual=None,
    a_scale=None,
    b_scale=None,
    out_scale=None,
) -> str:
    """The key of a tuned row: rows of a up to a power of two, N and K as they are."""
    del residual
    m, n, k = sizes(a, b, transpose_b)
    names = [a.dtype.name, f"m{tuned.power_of_two(m)}", f"n{n}", f"k{k}"]
    names += ["nk" if transpose_b else "kn", result_dtype(a, out_dtype).name]
    if epilogue:
        names.append(epilogue)
    if (vectors := num_vectors(bias, a_scale, b_scale, out_scale)) > 1:  # they take room on chip
        names.append(f"{vectors} vectors")
    if a_scale is not None or b_scale is not None:  # not every form takes them, nor several b
        names.append("blocks" if has_blocks(b_scale) else "scaled")
    if b.ndim > 2:
        names.append("batched")
    return "-".join(names)


def candidates(a, b, *, transpose_b=False, device: Device, **keywords) -> list[Config]:
    """What is worth a measurement: the default's neighbours."""
    default = default_config(a, b, transpose_b=transpose_b, device=device, **keywords)
    m, _, k = sizes(a, b, transpose_b)
    step = LINE_BYTES // a.dtype.itemsize
    if m <= WGMMA_ROWS:
        tiles = [(64, x, 1, y) for x in (16, 32, 64, 128) for y in (step, 2 * step, 4 * step)]
    else:
        tiles = [(128, 256, 2, step), (256, 128, 2, step), (128, 192, 2, step)]
        tiles += [(128, 128, 2, step), (128, 64, 2, step)]
        tiles += [(64, 128, 1, step), (64, 64, 1, 2 * step)]
    turns = (8,) if m <= WGMMA_ROWS else (8, 16)
    found = []
    for tile_m, tile_n, consumers, tile_k in tiles:
        for snake in turns:
            deep = [
                config
                for stages in range(12, 1, -1)
                for config in [Config(tile_m, tile_n, tile_k, consumers, stages, snake)]
                if config_problem(config, a, b, transpose_b=transpose_b, **keywords) is None
            ]
            found += deep[:1]
    found += [
        config
        for config in few_rows.candidates(m, k, gated=keywords.get("epilogue") == "swiglu")
        if config_problem(config, a, b, transpose_b=transpose_b, **keywords) is None
    ]
    return [config for config in dict.fromkeys(found) if config != default]


def tuning_calls() -> list[tuned.Call]:
    """Square products, and the projections of real models at prefill and decode sizes."""
    shapes = [(4096, 4096, 4096), (8192, 8192, 8192)]
    for width, out in ((896, 896), (896, 4864), (4096, 4096), (4096, 14336), (14336, 4096)):
        shapes += [(m, out, width) for m in (1, 16, 64, 8192)]
    calls = []
    for m, n, k in shapes:
        arguments = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (n, k)))
        calls.append(tuned.Call(arguments, matmul, {"transpose_b": True}))
    return calls


def _check(
    a, b, *, transpose_b, out_dtype, bias, epilogue, residual, a_scale, b_scale, out_scale
) -> None:
    scales = {"a_scale": a_scale, "b_scale": b_scale, "out_scale": out_scale}
    check_arrays("matmul", a=a, b=b, bias=bias, residual=residual, **scales)
    check_flags("matmul", transpose_b=transpose_b)
    check_dtype("matmul", "out_dtype", out_dtype)
    want = "[.., N, K]" if transpose_b else "[.., K, N]"
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"matmul: a {list(a.shape)} and b {list(b.shape)} need two dimensions")
    k, n = b.shape[-2:][::-1] if transpose_b else b.shape[-2:]
    if a.shape[-1] != k or (b.ndim > 2 and a.shape[:-2] != b.shape[:-2]):
        raise ValueError(
            f"matmul: a {list(a.shape)} is [.., M, K], which b {list(b.shape)} as {want} "
            "does not fit"
        )
    for name, x in {"a": a, "b": b, "bias": bias, **scales}.items():
        either = " or int8" if name in "ab" else ""
        if x is None or jnp.issubdtype(x.dtype, jnp.floating) or (either and x.dtype == jnp.int8):
            continue
        raise ValueError(f"matmul: {name} is {x.dtype}; it must be floating point{either}")
    if a.dtype != b.dtype:
        raise ValueError(f"matmul: a is {a.dtype} and b is {b.dtype}; they must agree")
    if epilogue not in EPILOGUES:
        names = ", ".join(repr(name) for name in EPILOGUES if name)
        raise ValueError(f"matmul: no epilogue is named {epilogue!r}; there are {names}")
    if epilogue == "swiglu" and n % 2:
        raise ValueError(f"matmul: 'swiglu' takes gate and up columns, but N = {n} is odd")
    rest = {"bias": bias, "epilogue": epilogue, "residual": residual, **scales}
    out_dtype = result_dtype(a, out_dtype)
    _check_out_dtype(a, out_dtype, [name for name, x in rest.items() if x is not None])
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"matmul: bias {list(bias.shape)} is not [N] = [{n}]")
    shape = (*a.shape[:-1], n // 2 if epilogue == "swiglu" else n)
    if residual is not None and (residual.shape != shape or residual.dtype != out_dtype):
        raise ValueError(
            f"matmul: the residual is {residual.dtype}{list(residual.shape)}, but the result is "
            f"{out_dtype}{list(shape)}"
        )
    full = {"a_scale": a.shape[:-1], "b_scale": (n,), "out_scale": shape[-1:]}
    if (a_scale is not None and a_scale.ndim == a.ndim) or has_blocks(b_scale):
        _check_blocks(a, a_scale, b_scale, n, k, transpose_b)
        del full["a_scale"], full["b_scale"]
    for name, whole in full.items():
        if scales[name] is not None and scales[name].shape not in ((), whole):
            raise ValueError(
                f"matmul: {name} {list(scales[name].shape)} is neither one number nor {list(whole)}"
            )


def _check_out_dtype(a, out_dtype, given: list[str]) -> None:
    """`given` names what follows the product."""
    if out_dtype.name in MOST:
        if "out_scale" not in given:
            raise ValueError(f"matmul: a result in {out_dtype} needs out_scale")
        if "residual" in given:
            raise ValueError(f"matmul: a result in {out_dtype} takes no residual")
    elif "out_scale" in given:
        raise ValueError(f"matmul: out_scale is for {' or '.join(MOST)}, not for {out_dtype}")
    elif out_dtype == jnp.int32 and a.dtype == jnp.int8:
        if given:
            raise ValueError(
                f"matmul: {given[0]} and int32 sums do not go together; out_dtype may be a float"
            )
    elif out_dtype not in OUT_DTYPES:
        raise ValueError(f"matmul: out_dtype {out_dtype} is not bfloat16, float16 or float32")


def _check_blocks(a, a_scale, b_scale, n: int, k: int, transpose_b: bool) -> None:
    across = -(-k // BLOCK)
    want = [(*a.shape[:-1], across), (-(-n // BLOCK), across)]
    got = [None if scale is None else scale.shape for scale in (a_scale, b_scale)]
    if got != want or a.dtype != FP8 or not transpose_b:
        shapes = [None if shape is None else list(shape) for shape in got]
        raise ValueError(
            f"matmul: a_scale {shapes[0]} and b_scale {shapes[1]} are no scales of blocks: these "
            f"are {list(want[0])} and {list(want[1])}, of float8_e4m3fn, with b as [N, K]"
        )
