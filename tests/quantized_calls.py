"""Calls of `quantized_matmul` by chance, and what is right of them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernels import interpreted
from numerics import assert_as_accurate

from pallas_kernels import _compat
from pallas_kernels.around_product import Cache, Norm, Rotary
from pallas_kernels.packed import PLAIN, Packed
from pallas_kernels.quantize import quantize
from pallas_kernels.quantized_matmul import quantized_matmul, quantized_matmul_reference

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
SIGNED = ("int8", "int4", "fp8")
SLOTS = 5  # of a cache
NOWHERE = {1: SLOTS, 2: -1, 4: 2**31 - 1}  # slots of these rows
# scheme, group size and zero points
FORMATS: Any = {
    "int8": ("int8", None, False),
    "int8, groups": ("int8", 128, False),
    "int4": ("int4", 128, False),
    "int4, groups of 32": ("int4", 32, False),
    "int4, groups of 512": ("int4", 512, False),
    "int4, zero points": ("int4", 128, True),
    "int4, groups of 64, zero points": ("int4", 64, True),
    "fp8": ("fp8", None, False),
    "fp8, groups": ("fp8", 64, False),
    **{scheme: (scheme, None, False) for scheme in ("nvfp4", "mxfp4", "mxfp8")},
}
# what is expanded by tiles besides; the last is the weight's dtype, and so that of its scales
TILED_FORMATS: Any = {
    **FORMATS,
    "int4, groups of 16, zero points": ("int4", 16, True),
    "int4, scales of float32": ("int4", 32, False, F32),
    "fp8, groups, scales of float32": ("fp8", 32, False, F32),
}
DTYPES = {"bfloat16": BF16, "float16": F16}


def numbers(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    x = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(x, jnp.float32).astype(dtype)


def packed_weight(form: str, o: int, i: int, dtype: Any) -> Packed:
    if form == PLAIN:
        return Packed.of(numbers(1, (o, i), dtype, i**-0.5))
    scheme, group, zeros, *wide = TILED_FORMATS[form]
    weight = numbers(1, (o, i), *wide or [dtype], i**-0.5)
    packed = quantize(weight, scheme, group, zero_points=zeros)
    return with_signs(packed) if scheme in SIGNED else packed


def with_signs(packed: Packed) -> Packed:
    """With a third of the scales negative, as those of files may be."""

    def signed(scale: Any) -> Any:
        minus = sum(np.indices(scale.shape)) % 3 == 1
        return jnp.where(minus, -scale, scale)

    return dataclasses.replace(
        packed,
        scale=None if packed.scale is None else signed(packed.scale),
        row_scale=None if packed.row_scale is None else signed(packed.row_scale),
    )


def packed_shape(form: str, o: int, i: int, dtype: Any) -> Packed:
    """As `packed_weight`, without numbers."""
    scheme, group, zeros, *wide = TILED_FORMATS[form]
    pack = functools.partial(quantize, scheme=scheme, group_size=group, zero_points=zeros)
    return jax.eval_shape(pack, jax.ShapeDtypeStruct((o, i), *wide or [dtype]))


def call(
    m: int, o: int, i: int, form: str = "int4", dtype: Any = BF16, extra: str = "", **keywords: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and keywords of a call; `extra` names further arrays: norm (centred) bias residual,
    or "heads" with how many there are of q and k, and their width.
    """
    out = keywords.get("out_dtype") or dtype
    f = o // 2 if keywords.get("epilogue") in oracles.GATES else o
    arrays: dict[str, Any] = {
        "x": numbers(0, (m, i), dtype),
        "packed": packed_weight(form, o, i, dtype),
    }
    if "norm" in extra:
        weight = numbers(4, (i,), dtype, 0.1 if "centred" in extra else 1.0)
        arrays["norm"] = Norm(weight, 1e-5, "centred" in extra)
    if "bias" in extra:
        arrays["bias"] = numbers(2, (o,), out)
    if "residual" in extra:
        arrays["residual"] = numbers(3, (m, f), out)
    if "heads" in extra:
        q_heads, kv_heads, width = map(int, extra.split("heads ")[1].split())
        angles = np.random.default_rng(5).uniform(-np.pi, np.pi, (m, width // 2))
        cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
        arrays["rotary"] = Rotary(cos, sin.astype(dtype), q_heads, kv_heads)
        k, v = (numbers(seed, (m, SLOTS, kv_heads, width), dtype) for seed in (6, 7))
        slots = jnp.asarray([NOWHERE.get(i, (3 * i + 2) % SLOTS) for i in range(m)])
        arrays["cache"] = Cache(k, v, slots.astype(jnp.int32))
        keywords["epilogue"] = "rope"
    return arrays, keywords


def interpret(arrays: dict[str, Any], keywords: dict[str, Any], config: Any = None) -> Any:
    """The result, by Pallas's interpreter."""
    around = {name: arrays[name] for name in ("norm", "rotary") if name in arrays}

    def run(arrays: dict[str, Any]) -> Any:
        found = {name: around[name]._replace(**arrays[name]) for name in around}
        return quantized_matmul(**{**arrays, **found}, **keywords, config=config, interpret=True)

    given = {name: a._asdict() for name, a in around.items()}  # of which numbers are no arrays
    given = {name: {k: x for k, x in a.items() if hasattr(x, "shape")} for name, a in given.items()}
    return interpreted(run, {**arrays, **given})


def truth(arrays: dict[str, Any], keywords: dict[str, Any]) -> Any:
    arrays = dict(arrays)
    norm, packed = arrays.pop("norm", None), arrays.pop("packed")
    rotary, cache = arrays.pop("rotary", None), arrays.pop("cache", None)
    exact = {k: np.asarray(v).astype(np.float64) for k, v in arrays.items()}
    if norm is not None:
        scale = np.asarray(norm.weight).astype(np.float64) + norm.zero_centered
        exact["x"] = oracles.rms_norm(exact["x"], scale, eps=norm.eps)
    x, weight = exact.pop("x"), oracles.packed_numbers(packed)
    if rotary is None:
        epilogue = keywords.get("epilogue")
        return oracles.matmul(x, weight, transpose_b=True, epilogue=epilogue, **exact)
    heads = oracles.matmul(x, weight, transpose_b=True, **exact)
    angles = (np.asarray(a.astype(cache.k.dtype)).astype(np.float64) for a in rotary[:2])
    return oracles.turn_and_write(heads, *angles, rotary.q_heads, cache)


def assert_right(arrays: dict[str, Any], keywords: dict[str, Any], ours: Any) -> None:
    plain = quantized_matmul_reference(**arrays, **keywords)
    exact = truth(arrays, keywords)
    for y, near, far in zip(*map(jax.tree.leaves, (ours, plain, exact)), strict=True):
        assert (y.dtype, y.shape) == (near.dtype, near.shape)
        assert_as_accurate(y, near, far)


def on_chip(monkeypatch: Any, run: Any, *arrays: Any) -> int:
    """Bytes that a block of the kernel in `run` takes, as JAX lays them out."""
    found = []

    def recorded(_body: Any, *, out_type: Any, scratch_types: Any, **_: Any) -> Any:
        for each in scratch_types.values():
            if isinstance(each, plgpu.Barrier):
                found.append(8 * int(np.prod(each.num_barriers)))
            else:
                size = int(np.prod(each.shape)) * jnp.dtype(each.dtype).itemsize
                found.append(-(-size // 1024) * 1024)
        return lambda *_: jnp.zeros(out_type.shape, out_type.dtype)

    with monkeypatch.context() as patched:
        patched.setattr(_compat, "kernel", recorded)
        jax.eval_shape(run, *arrays)
    return sum(found)
