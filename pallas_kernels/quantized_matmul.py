"""Quantized matmul: norm(x) @ W^T with W packed, and what follows it before anything is written.

W [O, I] is a `Packed` of 8- or 4-bit codes, which are unpacked on chip and never lie in memory as
numbers; or, for few rows of x, of numbers of 16 bits (`Packed.of`). Sums are float32.
`quantized_matmul_kernel` says what a block does with few rows of x, `quantized_matmul_tiles` what
with more. The gradient of x is a product with the dequantised weight, which is XLA's; codes have
none. A ternary weight takes x as int8 and has a kernel of its own: `ternary_matmul`.
Source of the formats: quantize.py; of the norm: around_product.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _compat, tuned
from pallas_kernels import device as device_lib
from pallas_kernels import packed as packed_lib
from pallas_kernels import quantized_matmul_config as sizes
from pallas_kernels import quantized_matmul_kernel as kernel
from pallas_kernels import quantized_tiles_config as tiles
from pallas_kernels import ternary_matmul as ternary
from pallas_kernels.around_product import Cache, Norm, Rotary, around_heads, turn_and_write
from pallas_kernels.device import SHARED_BYTES, Device
from pallas_kernels.matmul_finish import GATES, finish
from pallas_kernels.options import check_options
from pallas_kernels.packed import PLAIN, Packed
from pallas_kernels.quantize import dequantize, quantize
from pallas_kernels.quantized_matmul_check import OUT_DTYPES, check, result_dtype
from pallas_kernels.quantized_matmul_config import MMA_ROWS, Config, Heads, Static
from pallas_kernels.quantized_matmul_tiles import tile_products
from pallas_kernels.quantized_tiles_config import Tiles
from pallas_kernels.quantized_unpack import MX
from pallas_kernels.rms_norm import rms_norm_reference

DTYPES = (jnp.bfloat16, jnp.float16)
SCHEMES = (*(scheme for scheme in packed_lib.SCHEMES if scheme != "ternary"), PLAIN)
# If this one fits on chip, one of its warps and turns does for every epilogue
SMALLEST = Config(2 * MMA_ROWS, warps=4, ahead=2, blocks=1)
SPLITS = (1, 2, 4, sizes.MOST_SPLITS)
FEW_ROWS = 16  # of x: those that a warp has registers for
TUNED_HEADS = {6144: (32, 8, 128), 1152: (14, 2, 64)}  # by outputs: heads of q, of k, width


def quantized_matmul(
    x: Float[Array, "*B I"],
    packed: Packed,
    *,
    norm: Norm | None = None,
    bias: Float[Array, " O"] | None = None,
    epilogue: str | None = None,
    residual: Float[Array, "*B F"] | None = None,
    rotary: Rotary | None = None,
    cache: Cache | None = None,
    out_dtype: Any = None,
    config: Config | Tiles | None = None,
    interpret: bool = False,
) -> Any:
    """epilogue(norm(x) @ W^T + bias) + residual: [*B, F], summed in float32 and rounded once, but
    for "rope", before which the sums are rounded too.

    norm: an RMSNorm of few rows of x. Its weight multiplies x, rounded once to x's dtype, and its
    root the sums: what is normed is never rounded itself.
    epilogue "swiglu" or "geglu": the O = 2F rows of W are gate, then up, and the result is
    silu(gate) * up, or gelu(gate) * up with gelu's tanh, [.., F]. "rope": few rows of x become
    heads of q, k and v; those of q and k are turned by `rotary` as rope.py does, and the result is
    (q [*B, N H], cache.k, cache.v) with each row's key and value in its slot of the `cache`,
    nowhere if a slot is below 0 or past S. Otherwise F is O.
    Dtypes: x bfloat16 or float16 (times a ternary weight any float, which becomes int8 a row);
    bias, cos and sin any float, slots any integers; the result and the residual have `out_dtype`:
    bfloat16, float16 or float32, x's if None, and with "rope" no other. Scales of MX above 2^21,
    and the one for NaN, count as 2^21.
    Gradients: of x, the norm's weight, bias, residual, cos, sin and the cache; of W none, unless it
    is not packed.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for what `why_not` says.
    """
    rest = {"bias": bias, "epilogue": epilogue, "residual": residual, "out_dtype": out_dtype}
    check(x, packed, norm=norm, **rest, rotary=rotary, cache=cache)
    check_options("quantized_matmul", config, Config, Tiles, interpret=interpret)
    if bias is not None:
        bias = rest["bias"] = for_lanes(bias)
    m, out = math.prod(x.shape[:-1]), result_dtype(x, out_dtype)
    around: dict[str, Any] = {**rest, "rotary": rotary}
    if config is not None and (
        problem := _problem(config, m, packed, _apart(packed, **around), out)
    ):
        raise ValueError(f"quantized_matmul: {config}: {problem}")
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    reason = why_not(x, packed, norm=norm, **around, config=config, device=device)
    if reason is not None:
        raise NotImplementedError(f"quantized_matmul: cannot run this call: {reason}")
    if packed.scheme == "ternary":
        if norm is not None:
            rest |= {"norm": norm.weight, "eps": norm.eps}
        return ternary.ternary_linear(x, packed, **rest, interpret=interpret)
    chosen: Any = (
        config
        or _tuned(x, packed, norm=norm, device=device, **around)
        or default_config(x, packed, norm=norm, **around, device=device)
    )
    if isinstance(chosen, Tiles) and interpret and (reason := device_lib.why_not_interpreted()):
        raise NotImplementedError(f"quantized_matmul: cannot run this call: {reason}")
    static = Static(
        "quantized_matmul" + "_norm" * (norm is not None) + f"_{epilogue}" * bool(epilogue),
        chosen,
        interpret,
        out.name,
        device.num_sms,
        epilogue if epilogue in GATES else None,
        *((None, False) if norm is None else (float(norm.eps), norm.zero_centered)),
    )
    angles, scale = None, None if norm is None else norm.weight
    residual = None if residual is None else residual.reshape(m, -1)
    if rotary is not None and cache is not None:
        angles = tuple(for_lanes(a).reshape(m, -1) for a in (rotary.cos, rotary.sin))
        heads = Heads(
            q=rotary.q_heads,
            kv=rotary.kv_heads,
            half=rotary.cos.shape[-1],
            slots=cache.k.shape[1],
        )
        static = dataclasses.replace(static, heads=heads)
        cache = cache._replace(slots=cache.slots.astype(jnp.int32))
    y: Any = _quantized_matmul(
        static, x.reshape(m, -1), packed, scale, bias, residual, angles, cache
    )
    y, *held = (y,) if cache is None else y
    y = y.reshape(*x.shape[:-1], -1)
    return y if cache is None else (y, *held)


def quantized_matmul_reference(
    x,
    packed,
    *,
    norm=None,
    bias=None,
    epilogue=None,
    residual=None,
    rotary=None,
    cache=None,
    out_dtype=None,
) -> Any:
    """The mathematics in plain JAX: numbers of x's dtype, row scales after the sums."""
    if norm is not None:
        normed: Any = rms_norm_reference(x, norm.weight, **norm.keywords)
        x = normed
    weight = dequantize(dataclasses.replace(packed, row_scale=None), x.dtype)
    total = jnp.matmul(x, weight.T, preferred_element_type=jnp.float32)
    gate = epilogue if epilogue in GATES else None
    y = _finished(total, packed, bias, residual, gate, result_dtype(x, out_dtype))
    if rotary is None:
        return y
    q, *held = turn_and_write(y.reshape(-1, y.shape[-1]), rotary, cache)
    return q.reshape(*x.shape[:-1], -1), *held


def why_not(
    x,
    packed,
    *,
    norm=None,
    bias=None,
    epilogue=None,
    residual=None,
    rotary=None,
    out_dtype=None,
    config: Config | Tiles | None = None,
    device: Device | None = None,
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del bias, residual, out_dtype
    if packed.scheme == "ternary":
        if rotary is not None:
            return "turns no heads of a ternary weight"
        if norm is not None and norm.zero_centered:
            return "the norm before a ternary weight adds no 1 to its own"
        return ternary.why_not(x, packed, epilogue=epilogue, device=device)
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    if rotary is not None and (reason := _compat.why_not_written()):
        return reason
    if rotary is not None and (reason := rotary.why_apart(packed.shape[0])):
        return reason
    if x.dtype not in DTYPES:
        return f"takes x in bfloat16 or float16, got {x.dtype}"
    if packed.scheme not in SCHEMES:
        return f"takes {', '.join(SCHEMES)}, got {packed.scheme}"
    if packed.scheme == PLAIN and packed.codes.dtype != x.dtype:
        return f"takes numbers of x's dtype, {x.dtype}, got {packed.codes.dtype}"
    if packed.scheme in MX and x.dtype == jnp.float16:
        return f"float16 has not the exponents of {packed.scheme}'s scales; x must be bfloat16"
    if norm is not None and x.dtype == jnp.float16:
        return "x times a norm's weight may pass what float16 holds; x must be bfloat16"
    if norm is not None and norm.weight.dtype != x.dtype:
        return f"takes a norm's weight in bfloat16, got {norm.weight.dtype}"
    m, (o, i) = math.prod(x.shape[:-1]), packed.shape
    if 0 in (m, o, i):
        return f"nothing to multiply: x is {list(x.shape)}, the weight {[o, i]}"
    if i % (part := sizes.part(packed.scheme)):
        return f"{packed.scheme} takes inputs in multiples of {part}, got {i}"
    if isinstance(config, Tiles) or (config is None and not _is_few(m, packed)):
        if norm is not None and m > FEW_ROWS:
            return f"norms {FEW_ROWS} rows of x at most, got {m}"
        if norm is not None:
            return f"norms no rows of x where tiles multiply them: {m} of {i} numbers"
        if rotary is not None:
            return f"turns no heads where tiles multiply rows of x: {m} of {i} numbers"
        if packed.scheme == PLAIN:
            return f"multiplies no {m} rows of {i} numbers by a weight that is not packed"
        return tiles.why_not(packed)
    splits = config.splits if config else _fewest_splits(m, packed)
    if norm is not None and splits != 1:
        return f"norms whole rows of x, and {m} of {i} numbers are in {splits} parts"
    if rotary is not None and splits != 1:
        return f"turns sums of whole rows of x, and {m} of {i} numbers are in {splits} parts"
    apart = _apart(packed, epilogue=epilogue, rotary=rotary)
    grain = sizes.grain(packed, halves=1 + (apart > 0))
    if (2 * apart or o) % grain:
        of = "heads" if rotary is not None else "outputs"
        return f"takes {of} in multiples of {grain} at {m} rows, got {2 * apart or o}"
    if _straddles(packed):
        return f"groups of {packed.group_size} straddle the inputs of a lane"
    return None


def _is_few(m: int, packed: Packed) -> bool:
    """Whether warps multiply what they unpack."""
    return m <= FEW_ROWS and _fewest_splits(m, packed) is not None and not _straddles(packed)


def _fewest_splits(m: int, packed: Packed) -> int | None:
    """Of K, so that x lies on chip."""
    for splits in SPLITS:
        config = dataclasses.replace(SMALLEST, splits=splits)
        if sizes.shared_bytes(config, m, packed) <= SHARED_BYTES:
            return splits if sizes.all_have_some(config, packed) else None
    return None


def for_lanes(array: jax.Array) -> jax.Array:
    """Of 16 or 32 bits a number: no lane and no copy takes others."""
    if array.dtype in OUT_DTYPES:
        return array
    return array.astype(jnp.bfloat16 if array.dtype.itemsize == 1 else jnp.float32)


def _apart(packed: Packed, *, epilogue=None, rotary=None, **rest: Any) -> int:
    """As `Static.apart`."""
    del rest
    if rotary is not None:
        return rotary.cos.shape[-1]
    return packed.shape[0] // 2 if epilogue in GATES else 0


def _problem(config: Config | Tiles, m: int, packed: Packed, apart: int, out) -> str | None:
    """out: the dtype of the result; a tile's float32 sums leave it before their gate."""
    if packed.scheme == "ternary":
        return "a ternary weight has tiles of its own: give them to ternary_linear"
    if isinstance(config, Tiles):
        return tiles.problem(config, packed, gated=apart > 0 and out != jnp.float32)
    if m > FEW_ROWS:
        return f"warps take {FEW_ROWS} rows of x at most"
    return sizes.problem(config, m, packed, apart=apart)


def _straddles(packed: Packed) -> bool:
    """Whether groups are neither whole shares of a lane and of turns nor whole parts of a share."""
    if not packed.group_size:
        return False
    turn, group = sizes.turn(packed.scheme), packed.group_size
    lane = sizes.part(packed.scheme) // sizes.ACROSS
    shares = group % lane == 0 and (group % turn == 0 or turn % group == 0)
    return not (shares or (lane % group == 0 and group >= lane // 4))


def _tuned(x, packed, *, norm, device: Device, **rest) -> Config | Tiles | None:
    """The row of this call with a norm or without, if both can run it; where heads are turned and
    no row is theirs, that of their sums alone.
    """
    m = math.prod(x.shape[:-1])
    kind = Config if _is_few(m, packed) else Tiles
    keys = [bucket(x, packed, **rest)]
    if turns := rest.get("rotary") is not None:
        keys.append(bucket(x, packed, **{**rest, "epilogue": None}))
    rows = (tuned.lookup("quantized_matmul", key, device, kind) for key in keys)
    found = next((row for row in rows if row is not None), None)
    if found is None or ((norm is not None or turns) and found.splits > 1):
        return None
    out = result_dtype(x, rest.get("out_dtype"))
    return None if turns and _problem(found, m, packed, _apart(packed, **rest), out) else found


def default_config(
    x,
    packed,
    *,
    norm=None,
    bias=None,
    epilogue=None,
    residual=None,
    rotary=None,
    cache=None,
    out_dtype=None,
    device: Device,
) -> Config | Tiles:
    """As many rows a block as x's bytes ask for, and as still give each multiprocessor a block."""
    del bias, residual, cache
    m, (o, k), gated = math.prod(x.shape[:-1]), packed.shape, epilogue in GATES
    if not _is_few(m, packed):
        gated = gated and result_dtype(x, out_dtype) != jnp.float32
        return tiles.default_tiles(m, packed, gated=gated, num_sms=device.num_sms)
    splits = _fewest_splits(m, packed)
    assert splits is not None, "few rows lie on chip"
    apart = _apart(packed, epilogue=epilogue, rotary=rotary)
    wide = o * splits >= 4 * 32 * device.num_sms
    grain = sizes.grain(packed, halves=1 + (apart > 0))
    # Tiles of 32 rows where there are several a block; else 16, that each has one (H200). Those
    # that hold x have the fewest there can be.
    tile_n = 32 if wide or gated else max(16, grain)
    tile_n = tile_n if (2 * apart or o) % tile_n == 0 else grain
    rounds = -(-sizes.turns(packed) // (8 * splits))
    found, few = [], m <= sizes.MMA_COLUMNS
    of_fewest = functools.partial(Config, splits=splits)
    # H100, int4 in groups of 128, products of four models (notes.md): which x is held, and how; an
    # H200 was not to be had for it
    if packed.scheme == "int4" and ((k > 2048 and m > 4) if few else (k > 1024 or wide)):
        whole_rows = norm is not None or rotary is not None
        parts = splits if whole_rows else max(splits, _splits_of_held(packed, few=few))
        ahead = 3 if wide or parts > 1 else 2
        found.append(Config(grain, 8, ahead, 1, parts, held=True, tma=True))
    if packed.scheme == "int4" and wide:
        found.append(of_fewest(tile_n, 8, 2, 1))
    elif packed.scheme == "int4" and few and rounds == 2:
        found.append(of_fewest(grain, 8, 2, 1, held=True))
    found += [of_fewest(tile_n, 4, min(2, rounds), 4)] if k <= 1024 else []
    found += [of_fewest(tile_n, 8, ahead, blocks) for blocks in (2, 1) for ahead in (2, 1)]
    found += [of_fewest(tile_n, 4, 2, 1), dataclasses.replace(SMALLEST, splits=splits)]
    for config in found:
        if sizes.problem(config, m, packed, apart=apart) is None:
            return config
    raise AssertionError(f"quantized_matmul: no tile fits {m} rows of {packed.shape}")


def _splits_of_held(packed: Packed, *, few: bool) -> int:
    """So many that 8 warps hold x in two rounds; of 8 rows at most in three, or in four if that
    saves the second launch.
    """
    turns = sizes.turns(packed)
    if few and turns <= 32:
        return 1
    each = 24 if few else 16
    return next((splits for splits in SPLITS if turns <= splits * each), sizes.MOST_SPLITS)


def candidates(x, packed, *, device: Device, **keywords) -> list[Config | Tiles]:
    """What is worth a measurement beside the default."""
    m, apart = math.prod(x.shape[:-1]), _apart(packed, **keywords)
    rows = -(-m // tiles.M_PART) * tiles.M_PART
    # A launch more costs a decoding row more than splits gain
    few_splits = SPLITS[:1] if m == 1 else SPLITS[:3]
    found: list[Config | Tiles] = [
        Config(tile_n, warps, ahead, blocks, splits, held, tma)
        for held, tma in ((False, False), (True, False), (True, True))
        if not tma or m > 1
        for splits in few_splits
        for tile_n in (16, 32)
        for warps in (4, 8, 16)
        for ahead in (1, 2, 3, 4)
        for blocks in (2, 1)
    ]
    found += [
        Tiles(tile_m, tile_n, stages, splits)
        for tile_m in (32, 64, 96, 128, 192, 256)
        for tile_n in (64, 128, 192, 256)
        for stages in (2, 3, 4, 6)
        for splits in SPLITS
        if not _is_few(m, packed) and min(rows, 128) <= tile_m <= rows
    ]
    default = default_config(x, packed, device=device, **keywords)
    out = result_dtype(x, keywords.get("out_dtype"))
    return [c for c in found if c != default and _problem(c, m, packed, apart, out) is None]


def tuning_calls() -> list[tuned.Call]:
    """The projections of real models, in int4 and int8: what decodes one row first; and not packed,
    where several do.
    """
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    shapes += [(1152, 896), (896, 896), (9728, 896), (896, 4864)]
    calls = []
    kinds = [(scheme, m) for scheme in ("int4", "int8") for m in (1, 16, 8, 64, 512)]
    kinds += [(PLAIN, m) for m in (16, 8, 4, 2)]
    for (scheme, m), (o, i) in itertools.product(kinds, shapes):
        make = functools.partial(_random_call, m, o, i, scheme)
        arguments: Any = jax.eval_shape(make, jax.random.key(0))
        keywords: dict[str, Any] = {"epilogue": "swiglu"} if o in (28672, 9728) else {}
        calls.append(tuned.Call(arguments, quantized_matmul, keywords, jax.jit(make)))
        if m == 1 and o in TUNED_HEADS:
            heads, kv_heads, width = TUNED_HEADS[o]
            keywords = around_heads(i, heads, kv_heads, width)
            keywords["cache"] = _one_slot(kv_heads, width)
            calls.append(tuned.Call(arguments, quantized_matmul, keywords, jax.jit(make)))
    return calls


def _one_slot(kv_heads: int, width: int) -> Cache:
    """For one row: what XLA makes of it, or copies, is timed with the product, so it is little."""
    empty = jnp.zeros((1, 1, kv_heads, width), jnp.bfloat16)
    return Cache(empty, empty, jnp.zeros(1, jnp.int32))


def _random_call(m: int, o: int, i: int, scheme: str, key: jax.Array) -> tuple[Any, Any]:
    one, other = jax.random.split(key)
    weight = jax.random.normal(other, (o, i), jnp.bfloat16)
    packed = Packed.of(weight) if scheme == PLAIN else quantize(weight, scheme)
    return jax.random.normal(one, (m, i), jnp.bfloat16), packed


def bucket(x, packed, *, epilogue=None, out_dtype=None, **rest: Any) -> str:
    """The key of a tuned row: rows of x up to a power of two, the weight as it is."""
    del rest
    m, (o, i) = math.prod(x.shape[:-1]), packed.shape
    names = [packed.scheme, *([f"g{packed.group_size}"] if packed.group_size else [])]
    names += [*(["zeros"] if packed.zero is not None else []), x.dtype.name]
    names += ["tiles"] * (not _is_few(m, packed))
    names += [f"m{tuned.power_of_two(m)}", f"n{o}", f"k{i}", result_dtype(x, out_dtype).name]
    return "-".join([*names, *([epilogue] if epilogue else [])])


def _plain(static: Static, x, packed, norm, bias, residual, angles=None, cache=None):
    rotary, heads = None, static.heads
    if heads is not None and angles is not None:  # but for a block of the interpreter
        rotary = Rotary(angles[0], angles[1], heads.q, heads.kv)
    return quantized_matmul_reference(
        x,
        packed,
        norm=None if static.eps is None else Norm(norm, static.eps, static.zero_centered),
        bias=bias,
        epilogue=static.gate,
        residual=residual,
        rotary=rotary,
        cache=cache,
        out_dtype=static.out_dtype,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized_matmul(static: Static, x, packed, norm, bias, residual, angles, cache):
    def products(static, packed, norm=None, bias=None, residual=None):
        if isinstance(static.config, Tiles):
            y = tile_products(static, x, packed, bias, residual)
            return y[None] if y.ndim == 2 else y
        around = (norm, bias, residual, angles, cache)
        return kernel.warp_products(static, x, packed, *around, plain=_plain)

    if cache is not None:
        y, *held = products(static, packed, norm, bias)
        return y[0], *held
    apart = isinstance(static.config, Tiles) and static.out_dtype == "float32"
    if static.config.splits == 1 and not apart:
        return products(static, packed, norm, bias, residual)[0]
    assert norm is None, "a norm's root is that of whole rows"
    of_sums = dataclasses.replace(static, out_dtype="float32", gate=None)
    parts = products(of_sums, dataclasses.replace(packed, row_scale=None))
    total = functools.reduce(jnp.add, list(parts))  # in order
    return _finished(total, packed, bias, residual, static.gate, static.out_dtype)


def _finished(total, packed, bias, residual, gate: str | None, out_dtype):
    """What follows the sums, in plain JAX."""
    after = {"epilogue": gate, "out_dtype": out_dtype}
    return finish(total, bias, residual, b_scale=packed.row_scale, **after)


def _forward(static, *arrays):
    return _quantized_matmul(static, *arrays), arrays


def _backward(static, arrays, dy):
    x, packed, *rest = arrays
    if packed.scheme == PLAIN:
        return jax.vjp(functools.partial(_plain, static), *arrays)[1](dy)
    # Behind the barrier the weight becomes numbers when it is needed, not for all layers at once
    dy, packed = jax.lax.optimization_barrier((dy, packed))

    def plain(x, *rest):
        return _plain(static, x, packed, *rest)

    d_x, *d_rest = jax.vjp(plain, x, *rest)[1](dy)
    return d_x, None, *d_rest


_quantized_matmul.defvjp(_forward, _backward)
# Calls alike share one compiled kernel
_quantized_matmul = jax.jit(_quantized_matmul, static_argnums=0)  # pyright: ignore[reportAssignmentType]
