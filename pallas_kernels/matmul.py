"""Matmul: a @ b with fp32 sums, and what follows it in a model before anything is written.

a [.., M, K], b [K, N] or, as a weight lies in a checkpoint, [N, K] with `transpose_b`.
`matmul_kernel` says what a block does, `matmul_few_rows` what it does where a has few rows, as in
decoding. The gradient is two more products, one of which reads a the other way round.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import device as device_lib
from pallas_kernels import matmul_few_rows as few_rows
from pallas_kernels import tuned
from pallas_kernels.device import SHARED_BYTES, Device
from pallas_kernels.matmul_kernel import (
    FORMS,
    Config,
    Static,
    product,
    shared_bytes,
)
from pallas_kernels.wgmma_tiles import LINE_BYTES, WGMMA_ROWS

FP8 = jnp.float8_e4m3fn
DTYPES = (jnp.bfloat16, jnp.float16, FP8)
OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
EPILOGUES = (None, "swiglu")


def matmul(
    a: Float[Array, "*B M K"],
    b: Array,
    *,
    transpose_b: bool = False,
    out_dtype: Any = None,
    bias: Float[Array, " N"] | None = None,
    epilogue: str | None = None,
    residual: Float[Array, "*B M F"] | None = None,
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B M F"]:
    """epilogue(a @ b * scales + bias) + residual, summed in float32 and rounded once.

    b is [K, N], or [N, K] with `transpose_b`, which costs no copy; or one of these for each of a's
    leading dimensions. epilogue "swiglu": the N = 2F columns are gate, then up, and the result is
    silu(gate) * up, [.., M, F]; otherwise F is N.
    a_scale is one number or one a row [.., M], b_scale one number or one a column [N].
    Dtypes: a and b both bfloat16, float16 or float8_e4m3fn; bias and scales any float; the result
    and the residual have `out_dtype`: bfloat16, float16 or float32, a's if None (fp8: bfloat16).
    Gradients: two more products by the same kernel, in a's dtype (fp8: bfloat16, and the gradient
    of an fp8 array saturates at 448); "swiglu" and scales compute a @ b once more.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for what `why_not` says.
    """
    rest = {"bias": bias, "residual": residual, "a_scale": a_scale, "b_scale": b_scale}
    keywords = {"transpose_b": transpose_b, "out_dtype": out_dtype, "epilogue": epilogue, **rest}
    _check(a, b, **keywords)
    if config is not None and (problem := _config_problem(config, a, b, **keywords)):
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
    gated = epilogue == "swiglu"
    static = Static(
        "matmul_swiglu" if gated else "matmul",
        config,
        device.num_sms,
        interpret,
        jnp.dtype(_out_dtype(a, out_dtype)).name,
        transpose_b=transpose_b,
        gated=gated,
    )
    lead = (math.prod(b.shape[:-2]),) if b.ndim > 2 else ()
    a2, residual2 = (
        None if x is None else x.reshape(*lead, -1, x.shape[-1]) for x in (a, residual)
    )
    a_scale, b_scale = (
        None if s is None else s.reshape(-1).astype(jnp.float32) for s in (a_scale, b_scale)
    )
    run = functools.partial(_matmul, static)
    if lead:
        run = jax.vmap(run, in_axes=(0, 0, None, None if residual is None else 0, None, None))
    y = run(a2, b.reshape(*lead, *b.shape[-2:]), bias, residual2, a_scale, b_scale)
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
):
    """The mathematics in plain JAX."""
    out_dtype = _out_dtype(a, out_dtype)
    if a.dtype == FP8:  # each of its numbers is a bfloat16 too
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    b = jnp.swapaxes(b, -1, -2) if transpose_b else b
    total = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    if a_scale is not None and a_scale.ndim:
        a_scale = a_scale[..., None]
    return _finish(total, bias, residual, a_scale, b_scale, epilogue == "swiglu", out_dtype)


def _finish(total, bias, residual, a_scale, b_scale, gated, out_dtype):
    """What becomes of the float32 sums; the backward pass differentiates this."""
    wide = lambda x: x.astype(jnp.float32).reshape((1,) * (total.ndim - x.ndim) + x.shape)  # noqa: E731
    for scale in (a_scale, b_scale):
        total = total if scale is None else total * wide(scale)
    total = total if bias is None else total + wide(bias)
    if gated:
        gate, up = jnp.split(total, 2, axis=-1)
        total = jax.nn.silu(gate) * up
    return (total if residual is None else total + wide(residual)).astype(out_dtype)


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
    device: Device | None = None,
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del out_dtype, bias, residual
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    if a.dtype == jnp.float32:
        return "the tensor cores would round float32 to 10 bits (tf32)"
    if a.dtype not in DTYPES:
        return f"takes bfloat16, float16 or float8_e4m3fn, got {a.dtype}"
    if a.dtype == FP8 and not transpose_b:
        return "fp8 tensor cores want K innermost in both operands: b as [N, K], with transpose_b"
    if epilogue == "swiglu" and not transpose_b:
        return "'swiglu' takes gate and up as rows of a weight: b as [N, K], with transpose_b"
    if b.ndim > 2 and not (a_scale is None and b_scale is None):
        return "takes scales for one b only, not for a batch of them"
    if 0 in (*a.shape, *b.shape):
        return f"nothing to multiply: a is {list(a.shape)}, b is {list(b.shape)}"
    n = b.shape[-2] if transpose_b else b.shape[-1]
    # the gradient of N columns takes them as an operand of 16 bits
    for name, size_bytes in (
        ("K", a.shape[-1] * a.dtype.itemsize),
        ("N", (n if epilogue is None else n // 2) * 2),
    ):
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
    device: Device,
) -> Config:
    """The tile with the least work in the last wave; as many stages as the shared memory holds."""
    del residual
    m, n, k = _sizes(a, b, transpose_b)
    if m <= WGMMA_ROWS and _reads_weight(a, b, transpose_b, a_scale, b_scale):
        few = few_rows.default_config(
            m,
            n,
            k,
            _out_dtype(a, out_dtype),
            gated=epilogue == "swiglu",
            num_sms=device.num_sms,
        )
        if few is not None:
            return few
    return _tile_config(
        m,
        n,
        a.dtype,
        b_rows=not transpose_b,
        gated=epilogue == "swiglu",
        num_sms=device.num_sms,
        vectors=_vectors(bias, a_scale, b_scale),
    )


def _tile_config(m, n, dtype, *, b_rows, gated, num_sms, vectors) -> Config:
    tile_k = LINE_BYTES // dtype.itemsize
    if m <= WGMMA_ROWS:
        # Few rows: the weight's bytes are the time. The widest tile that still gives three in four
        # multiprocessors some of it to load; two times 128 bytes of K are worth a round.
        least = 128 if gated else 64 if b_rows else 16
        widths = [w for w in (128, 64, 32, 16) if w >= least]
        width = next((w for w in widths if 4 * n >= 3 * w * num_sms), least)
        choice = Config(WGMMA_ROWS, width, 2 * tile_k, consumers=1)
    else:
        # A tile of 128 x 256 reads least from shared memory a product (two of 64 x 256); smaller
        # ones waste less of the last wave but feed the tensor cores worse by about this much.
        tiles = [(128, 256, 2, 1.0), (256, 128, 2, 1.0), (128, 128, 2, 1.2), (64, 128, 1, 1.6)]
        tiles += [] if gated else [(128, 64, 2, 1.6), (64, 64, 1, 2.2)]

        def cost(tile):
            tile_m, tile_n, _, slower = tile
            waves = -(-(-(-m // tile_m) * -(-n // tile_n)) // num_sms)
            return waves * tile_m * tile_n * slower

        tile_m, tile_n, consumers, _ = min(tiles, key=cost)
        choice = Config(tile_m, tile_n, tile_k, consumers)
    for stages in range(12, 1, -1):  # more than about 100 KB in flight gain nothing
        config = dataclasses.replace(choice, stages=stages)
        if shared_bytes(config, dtype, vectors) <= SHARED_BYTES:
            return config
    raise AssertionError(f"matmul: no two stages of {choice} fit the shared memory")


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
) -> str:
    """The key of a tuned row: rows of a up to a power of two, N and K as they are."""
    del residual
    m, n, k = _sizes(a, b, transpose_b)
    names = [a.dtype.name, f"m{tuned.power_of_two(m)}", f"n{n}", f"k{k}"]
    names += ["nk" if transpose_b else "kn", jnp.dtype(_out_dtype(a, out_dtype)).name]
    if epilogue:
        names.append(epilogue)
    if (vectors := _vectors(bias, a_scale, b_scale)) > 1:  # they take room on chip
        names.append(f"{vectors} vectors")
    if a_scale is not None or b_scale is not None:  # not every form takes them, nor several b
        names.append("scaled")
    if b.ndim > 2:
        names.append("batched")
    return "-".join(names)


def candidates(a, b, *, transpose_b=False, device: Device, **keywords) -> list[Config]:
    """What is worth a measurement: the default's neighbours."""
    default = default_config(a, b, transpose_b=transpose_b, device=device, **keywords)
    m, n, k = _sizes(a, b, transpose_b)
    step = LINE_BYTES // a.dtype.itemsize
    if m <= WGMMA_ROWS:
        tiles = [(64, x, 1, y) for x in (16, 32, 64, 128) for y in (step, 2 * step, 4 * step)]
    else:
        tiles = [(128, 256, 2, step), (256, 128, 2, step), (128, 192, 2, step)]
        tiles += [(128, 128, 2, step), (128, 64, 2, step)]
        tiles += [(64, 128, 1, step), (64, 64, 1, 2 * step)]
    # a cluster of two has measured no faster than one block (4096^3 on an H200)
    turns = (8,) if m <= WGMMA_ROWS else (8, 16)
    found = []
    for tile_m, tile_n, consumers, tile_k in tiles:
        for snake in turns:
            deep = [
                config
                for stages in range(12, 1, -1)
                for config in [Config(tile_m, tile_n, tile_k, consumers, stages, snake)]
                if _config_problem(config, a, b, transpose_b=transpose_b, **keywords) is None
            ]
            found += deep[:1]
    found += [
        config
        for config in few_rows.candidates(m, n, k, gated=keywords.get("epilogue") == "swiglu")
        if _config_problem(config, a, b, transpose_b=transpose_b, **keywords) is None
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


def _sizes(a, b, transpose_b) -> tuple[int, int, int]:
    """M (of one product), N, K."""
    m = a.shape[-2] if b.ndim > 2 else math.prod(a.shape[:-1])
    return m, b.shape[-2] if transpose_b else b.shape[-1], a.shape[-1]


def _out_dtype(a, out_dtype) -> jnp.dtype:
    return jnp.dtype(out_dtype or (jnp.bfloat16 if a.dtype == FP8 else a.dtype))


def _check(a, b, *, transpose_b, out_dtype, bias, epilogue, residual, a_scale, b_scale) -> None:
    want = "[.., N, K]" if transpose_b else "[.., K, N]"
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"matmul: a {list(a.shape)} and b {list(b.shape)} need two dimensions")
    k, n = b.shape[-2:][::-1] if transpose_b else b.shape[-2:]
    if a.shape[-1] != k or (b.ndim > 2 and a.shape[:-2] != b.shape[:-2]):
        raise ValueError(
            f"matmul: a {list(a.shape)} is [.., M, K], which b {list(b.shape)} as {want} "
            "does not fit"
        )
    for name, x in (("a", a), ("b", b), ("bias", bias), ("a_scale", a_scale), ("b_scale", b_scale)):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"matmul: {name} is {x.dtype}; it must be floating point")
    if a.dtype != b.dtype:
        raise ValueError(f"matmul: a is {a.dtype} and b is {b.dtype}; they must agree")
    out_dtype = _out_dtype(a, out_dtype)
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"matmul: out_dtype {out_dtype} is not bfloat16, float16 or float32")
    if epilogue not in EPILOGUES:
        raise ValueError(f"matmul: no epilogue is named {epilogue!r}; there is 'swiglu'")
    if epilogue == "swiglu" and n % 2:
        raise ValueError(f"matmul: 'swiglu' takes gate and up columns, but N = {n} is odd")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"matmul: bias {list(bias.shape)} is not [N] = [{n}]")
    shape = (*a.shape[:-1], n // 2 if epilogue == "swiglu" else n)
    if residual is not None and (residual.shape, residual.dtype) != (shape, out_dtype):
        raise ValueError(
            f"matmul: the residual is {residual.dtype}{list(residual.shape)}, but the result is "
            f"{out_dtype}{list(shape)}"
        )
    for name, scale, full in (("a_scale", a_scale, a.shape[:-1]), ("b_scale", b_scale, (n,))):
        if scale is not None and scale.shape not in ((), full):
            raise ValueError(
                f"matmul: {name} {list(scale.shape)} is neither one number nor {list(full)}"
            )


def _config_problem(
    config: Config,
    a,
    b,
    *,
    transpose_b=False,
    out_dtype=None,
    epilogue=None,
    bias=None,
    a_scale=None,
    b_scale=None,
    **_,
) -> str | None:
    """What the hardware has against a tile, or a form against the call."""
    c, step = config, LINE_BYTES // a.dtype.itemsize
    if c.form not in FORMS:
        return f"form must be one of {', '.join(FORMS)}"
    if c.form != "tiles":
        if not _reads_weight(a, b, transpose_b, a_scale, b_scale):
            return f"{c.form!r} takes one weight [N, K] of 16 bits, with transpose_b, and no scales"
        m, n, k = _sizes(a, b, transpose_b)
        wide = _out_dtype(a, out_dtype)
        return few_rows.problem(c, m, n, k, wide, gated=epilogue == "swiglu")
    least = 128 if epilogue == "swiglu" else 64
    small = transpose_b and epilogue is None and c.tile_n in (16, 32)
    size_bytes = shared_bytes(config, a.dtype, _vectors(bias, a_scale, b_scale))
    problems = {
        "consumers must be 1 or 2": c.consumers not in (1, 2),
        "tile_m must be 64, 128 or 256": c.tile_m not in (64, 128, 256),
        "a consumer takes 64 rows at least": c.tile_m < WGMMA_ROWS * c.consumers,
        f"tile_n must be a multiple of {least}, 256 at most (or 16 or 32 where b is [N, K])": (
            not small and (not 0 < c.tile_n <= 256 or c.tile_n % least)
        ),
        f"tile_k must be a multiple of {step}": c.tile_k < 1 or c.tile_k % step,
        "a consumer can hold 64 x 256 sums": c.tile_m * c.tile_n > c.consumers * 64 * 256,
        "stages must be 2 at least, snake 1": c.stages < 2 or c.snake < 1,
        "cluster must be 1 or 2": c.cluster not in (1, 2),
        f"takes {size_bytes} of {SHARED_BYTES} bytes on chip": size_bytes > SHARED_BYTES,
    }
    return next((problem for problem, found in problems.items() if found), None)


def _reads_weight(a, b, transpose_b, a_scale, b_scale) -> bool:
    """Whether the forms for few rows could take the call, if its rows are few."""
    scaled = not (a_scale is None and b_scale is None)
    return bool(transpose_b) and b.ndim == 2 and a.dtype.itemsize == 2 and not scaled


def _vectors(bias, a_scale, b_scale) -> int:
    """How many of them have a number for each row or column."""
    return sum(x is not None and x.size > 1 for x in (bias, a_scale, b_scale))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(static: Static, a, b, bias, residual, a_scale, b_scale):
    if static.config.form == "vectors":
        return few_rows.vector_products(static, a, b, bias, residual)
    if static.config.form == "split":
        return few_rows.split_products(
            static,
            a,
            b,
            bias,
            residual,
            finish=lambda total: _finish(
                total, bias, residual, None, None, static.gated, static.out_dtype
            ),
        )
    return product(static, a, b, bias, residual, a_scale, b_scale)


def _matmul_forward(static, *arrays):
    return _matmul(static, *arrays), arrays


def _matmul_backward(static, arrays, dy):
    a, b, bias, residual, a_scale, b_scale = arrays
    dtype = jnp.dtype(jnp.bfloat16 if a.dtype == FP8 else a.dtype)
    shape = (dy.shape[0], b.shape[0] if static.transpose_b else b.shape[1])
    if static.gated or a_scale is not None or b_scale is not None:
        config = static.config
        if config.form != "tiles":
            config = _tile_config(
                *shape, a.dtype, b_rows=False, gated=False, num_sms=static.num_sms, vectors=0
            )
        again = dataclasses.replace(
            static, name="matmul_recomputed", gated=False, out_dtype="float32", config=config
        )
        total = product(again, a, b)
    else:  # what follows is linear: the sums do not matter
        total = jnp.zeros(shape, jnp.float32)
    columns = None if a_scale is None else a_scale[:, None]

    def finish(total, bias, residual, columns, b_scale):
        return _finish(total, bias, residual, columns, b_scale, static.gated, dy.dtype)

    _, pull = jax.vjp(finish, total, bias, residual, columns, b_scale)
    d_total, d_bias, d_residual, d_columns, d_b_scale = pull(dy)
    d_total = d_total.astype(dtype)
    a16, b16 = a.astype(dtype), b.astype(dtype)
    d_a = _gradient(static, "a", d_total, b16, transpose_b=not static.transpose_b)
    operands = (d_total, a16) if static.transpose_b else (a16, d_total)
    d_b = _gradient(static, "b", *operands, transpose_a=True)
    d_a_scale = None if d_columns is None else d_columns[:, 0]
    return _saturate(d_a, a), _saturate(d_b, b), d_bias, d_residual, d_a_scale, d_b_scale


def _gradient(static: Static, of: str, a, b, *, transpose_a=False, transpose_b=False):
    m = a.shape[1] if transpose_a else a.shape[0]
    n = b.shape[0] if transpose_b else b.shape[1]
    config = _tile_config(
        m, n, a.dtype, b_rows=not transpose_b, gated=False, num_sms=static.num_sms, vectors=0
    )
    return product(
        Static(
            f"matmul_backward_{of}",
            config,
            static.num_sms,
            static.interpret,
            a.dtype.name,
            transpose_a,
            transpose_b,
        ),
        a,
        b,
    )


def _saturate(gradient, like):
    """In the dtype of what it is the gradient of; fp8 would turn what it cannot hold into NaN."""
    if like.dtype == FP8:
        limit = jnp.asarray(jnp.finfo(FP8).max, gradient.dtype)
        gradient = jnp.clip(gradient, -limit, limit)
    return gradient.astype(like.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)
# Calls alike share one compiled kernel
_matmul = jax.jit(_matmul, static_argnums=0)  # pyright: ignore[reportAssignmentType]
