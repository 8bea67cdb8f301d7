"""Weights to codes and scales, and back: q = round(w / s), w ~ q s.

w is a weight [O, I] and groups lie along I; divisions, roundings and sums are in float32, and
`round` is to the nearest, ties to even. `Packed` says how codes and scales lie in memory. All of it
is plain XLA, on any device; the kernel that multiplies by a `Packed` is another file's.

    int8, fp8   s = amax / 127, amax / 448: of a row, or of a group
    int4        s = amax / 7 of a group; with zero points (max - min) / 15
    nvfp4       s = e4m3(amax of 16 / 6 / g) with g = amax of the tensor / (6 * 448); w ~ q s g
    mxfp4, mxfp8  s = 2^e of 32, by one of three rules for e
    ternary     s = mean(|w|) of the tensor; q is -1, 0 or 1

Sources: OCP Microscaling Formats (MX) 1.0, 2023; NVIDIA 2025, arXiv:2509.25149 (NVFP4); Ma et al.
2024, arXiv:2402.17764 (ternary).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.options import check_arrays, check_dtype, check_flags
from pallas_kernels.packed import CODES_PER_BYTE, FIXED_GROUPS, SCHEMES, Packed
from pallas_kernels.whole_number import is_whole

MxRule = Literal["floor", "even", "ceil"]

_INT4_ZERO = 8
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
# Of the largest number of an element type: its exponent, and what follows its mantissa's first 1
_MX_ELEMENTS = {"mxfp4": (2, 1, 0.5), "mxfp8": (8, 3, 0.75)}  # (exponent, mantissa bits, fraction)


def quantize(
    w: Float[Array, "O I"],
    scheme: str,
    group_size: int | None = None,
    *,
    zero_points: bool = False,
    mx_rule: MxRule | None = None,
) -> Packed:
    """Codes and scales of a weight, as a `Packed`.

    group_size: numbers along I that share a scale. None: `default_group_size(scheme, I)`.
    zero_points: int4 over the range from the group's smallest to its largest number (0 included)
        instead of one around 0.
    mx_rule: how mxfp4 and mxfp8, and no others, choose a group's exponent. None or "floor" (OCP's):
        that of its largest number, less that of the element type's; the largest numbers may
        saturate. "even": the same, after rounding the largest number to the element type's
        mantissa. "ceil": the smallest that lets nothing saturate.
    Scales of int8, int4 and fp8 groups take w's dtype, of a weight of 8 or 64 bits float32, as row
    scales do. Those below its smallest normal number are rounded up, in float16 to the next
    subnormal, in bfloat16 and float32 to the smallest normal, so that codes do not saturate and
    nothing but zeros makes a group of zeros. Groups and rows of zeros have scale 1 (0 in MX:
    2^-127), and so does a tensor of zeros in nvfp4.
    Raises: ValueError for another scheme, an empty weight, a group size that does not divide I or
    that the scheme has not, zero points without int4, a rule without MX or an unknown one, and
    concrete weights that are NaN or infinite (traced ones make scales of NaN).
    """
    check_scheme(scheme)
    check_arrays("quantize", w=w)
    check_flags("quantize", zero_points=zero_points)
    if w.ndim != 2 or not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(
            f"quantize: a weight is [out, in] of floating point; got {list(w.shape)} of {w.dtype}"
        )
    if w.size == 0:
        raise ValueError(f"quantize: a weight {list(w.shape)} holds no numbers")
    if zero_points and scheme != "int4":
        raise ValueError(f"quantize: {scheme} has no zero points; int4 has")
    if mx_rule not in (None, "floor", "even", "ceil"):
        raise ValueError(f"quantize: mx_rule is 'floor', 'even' or 'ceil'; got {mx_rule!r}")
    if mx_rule is not None and scheme not in _MX_ELEMENTS:
        raise ValueError(
            f"quantize: {scheme} has no rule for exponents; {' and '.join(_MX_ELEMENTS)} have"
        )
    group_size = check_group_size(scheme, w.shape[1], group_size)
    check_finite(w, "the weight")
    return _quantize(jnp.asarray(w), scheme, group_size, bool(zero_points), mx_rule or "floor")


def dequantize(packed: Packed, dtype: Any = jnp.float32) -> Float[Array, "O I"]:
    """The numbers that the codes stand for: value(code) * scale * row_scale in float32 in this
    order, rounded to `dtype`.

    Without row scale, nvfp4 and numbers of MX that are no subnormals are exact in bfloat16.
    Raises: ValueError if the parts do not fit each other, or it is no `Packed`.
    """
    _check_packed("dequantize", packed)
    check_dtype("dequantize", "dtype", dtype)
    return _dequantize(packed, jnp.dtype(dtype))


def concatenate(parts: Sequence[Packed]) -> Packed:
    """The weights one below the other: [O1, I], [O2, I], ... become [O1 + O2 + ..., I].

    Exact: each output keeps its scales. A part without zero points beside one with them gets 8.
    Raises: ValueError if schemes, group sizes, inputs or dtypes of scales differ, if the parts of
    one do not fit each other, or for what is no list of `Packed`.
    """
    if not isinstance(parts, Sequence):
        raise ValueError(
            f"concatenate: parts must be a list of Packed weights, got {type(parts).__name__}"
        )
    if not parts:
        raise ValueError("concatenate: there are no weights to put together")
    for part in parts:
        _check_packed("concatenate", part)

    def kind(part: Packed):
        dtypes = tuple(None if a is None else a.dtype for a in (part.scale, part.row_scale))
        return part.scheme, part.group_size, part.shape[1], dtypes

    different = [part for part in parts if kind(part) != kind(parts[0])]
    if different:
        raise ValueError(
            "concatenate: weights must agree in scheme, group size, inputs and dtypes of scales; "
            f"got {kind(parts[0])} and {kind(different[0])}"
        )
    zeros = [part.zero for part in parts]
    if any(zero is not None for zero in zeros):
        zeros = [_zero_codes(part) for part in parts]

    def join(arrays: Sequence[Array | None], axis: int):
        return None if arrays[0] is None else jnp.concatenate(arrays, axis=axis)  # pyright: ignore

    return dataclasses.replace(
        parts[0],
        codes=join([part.codes for part in parts], 0),
        scale=join([part.scale for part in parts], 1),
        zero=join(zeros, 1),
        row_scale=join([part.row_scale for part in parts], 0),
    )


def _check_packed(name: str, packed: Any) -> None:
    if not isinstance(packed, Packed):
        raise ValueError(
            f"{name}: it takes a Packed, as quantize returns it, got {type(packed).__name__}"
        )
    if (reason := packed.problem()) is not None:
        raise ValueError(f"{name}: {reason}")


def take_rows(packed: Packed, rows: Int[Array, " R"]) -> Packed:
    """The weight [R, I] of these outputs; what lies outside is clamped to the ends."""

    def take(array: Array | None, axis: int = 0):
        # Not array.at[rows]: that counts negative ones from the end
        return None if array is None else jnp.take(array, rows, axis=axis, mode="clip")

    return dataclasses.replace(
        packed,
        codes=take(packed.codes),
        scale=take(packed.scale, 1),
        zero=take(packed.zero, 1),
        row_scale=take(packed.row_scale),
    )


def default_group_size(scheme: str, inputs: int, *, of: str = "") -> int | None:
    """int4: the largest of 128, 64 and 32 that divides the inputs, else their largest even divisor
    below 128; 16 for nvfp4, 32 for MX, None (no groups) for the others.

    Raises: ValueError for int4 of an odd number of inputs.
    """
    if scheme != "int4":
        return FIXED_GROUPS.get(scheme)
    sizes = [size for size in (128, 64, 32, *range(126, 1, -2)) if inputs % size == 0]
    if not sizes:
        raise ValueError(
            f"quantize: int4 packs two inputs in a byte, and the {inputs} inputs{of} are odd"
        )
    return sizes[0]


def check_scheme(scheme: str) -> None:
    """Raises: ValueError for a scheme that is none of `SCHEMES`."""
    if scheme not in SCHEMES:
        raise ValueError(f"quantize: scheme {scheme!r} is not one of {', '.join(SCHEMES)}")


def check_finite(w: Float[Array, "O I"], name: str) -> None:
    """Raises: ValueError if a concrete weight, which `name` tells, has NaN or infinite numbers."""
    if not isinstance(w, Tracer) and not bool(jnp.isfinite(w).all()):
        raise ValueError(f"quantize: {name} has numbers that are NaN or infinite")


def check_group_size(
    scheme: str, inputs: int, group_size: int | None, *, of: str = ""
) -> int | None:
    """The group size for a weight of so many inputs, the scheme's own if None.

    of: what an error says behind "inputs", such as " of layers.0.mlp.down_proj".
    Raises: ValueError if the scheme does not have it or it does not divide the inputs evenly.
    """
    if group_size is None:
        group_size = default_group_size(scheme, inputs, of=of)
    fixed = FIXED_GROUPS.get(scheme)
    if fixed and group_size != fixed:
        raise ValueError(f"quantize: {scheme} has groups of {fixed}, not of {group_size}")
    if scheme == "ternary":
        if group_size is not None:
            raise ValueError(
                f"quantize: ternary has one scale a weight, and no groups of {group_size}"
            )
        if inputs % 4:
            raise ValueError(
                f"quantize: ternary packs four inputs in a byte, and the {inputs} inputs{of} do "
                "not divide by four"
            )
    if group_size is None:
        return None
    if not is_whole(group_size):
        raise ValueError(f"quantize: group_size must be an integer or None, got {group_size!r}")
    even = scheme == "int4"
    if group_size < 1 or inputs % group_size or (even and group_size % 2):
        raise ValueError(
            f"quantize: groups of {group_size} do not divide the {inputs} inputs{of} evenly"
            + ("" if fixed else f"; the size must be {'even and ' * even}a divisor")
        )
    return group_size


def check_scales(packed: Packed, who: str) -> None:
    """For concrete scales from a file.

    who: what the error names, such as a tensor.
    Raises: ValueError if a scale is zero, NaN or infinite, or, but of int8, int4 and fp8, negative.
    """
    signed = packed.scheme in ("int8", "int4", "fp8")
    faults = "zero, NaN" if signed else "zero, negative, NaN"
    allowed = "a finite number other than 0" if signed else "a positive number"
    for name, scale in (("scale", packed.scale), ("row_scale", packed.row_scale)):
        if scale is None:
            continue
        if scale.dtype == jnp.uint8:  # E8M0, whose only such code is 255
            bad = int(jnp.sum(scale == np.uint8(255)))
        else:
            wide = scale.astype(jnp.float32)
            some = wide != 0 if signed else wide > 0
            bad = int(jnp.sum(~(jnp.isfinite(wide) & some)))
        if bad:
            raise ValueError(
                f"{who}: {bad} of {scale.size} numbers of {name} are {faults} or infinite; a scale "
                f"is {allowed}"
            )


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _quantize(w, scheme: str, group_size: int | None, zero_points: bool, mx_rule: str) -> Packed:
    rows = w.shape[0]
    groups = w.astype(jnp.float32).reshape(rows, -1, group_size or w.shape[1])
    largest = jnp.max(jnp.abs(groups), axis=-1)
    scale = zero = row_scale = None
    if scheme in ("int8", "fp8", "int4"):
        of_groups = group_size and jnp.dtype(w.dtype).itemsize in (2, 4)
        dtype = w.dtype if of_groups else jnp.dtype(jnp.float32)
        if zero_points:
            low = jnp.minimum(jnp.min(groups, axis=-1), np.float32(0))
            high = jnp.maximum(jnp.max(groups, axis=-1), np.float32(0))
            scale, wide = _group_scale(high - low, 15, dtype)
            zero = jnp.clip(jnp.round(_divide(-low, wide)), 0, 15).astype(jnp.uint8)
        else:
            most = {"int8": 127, "int4": 7, "fp8": _E4M3_MAX}[scheme]
            scale, wide = _group_scale(largest, most, dtype)
        codes = _codes(_divide(groups, wide[..., None]), scheme, zero)
        if not group_size:
            scale, row_scale = None, wide[:, 0]
    elif scheme == "nvfp4":
        tensor = _divide(jnp.max(largest), _E2M1_MAX * _E4M3_MAX)
        tensor = jnp.where(tensor == 0, np.float32(1), tensor)
        # Files hold the reciprocal: so it is one of those that come back from there as they were
        stored = _divide(jnp.ones_like(tensor), tensor)
        tensor = jnp.where(jnp.isfinite(stored), _divide(jnp.ones_like(tensor), stored), tensor)
        scale = jnp.clip(_divide(_divide(largest, _E2M1_MAX), tensor), 2**-9, _E4M3_MAX)
        scale, wide = _rounded(jnp.where(largest == 0, np.float32(1), scale), jnp.float8_e4m3fn)
        codes = _codes(_divide(groups, (wide * tensor)[..., None]), scheme)
        row_scale = jnp.broadcast_to(tensor, (rows,))
    elif scheme == "ternary":
        mean = jnp.maximum(jnp.mean(jnp.abs(groups)), np.float32(1e-5))
        codes = _codes(_divide(groups, mean), scheme)
        row_scale = jnp.broadcast_to(mean, (rows,))
    else:
        exponent = _mx_exponent(largest, scheme, mx_rule)
        codes = _codes(_times_power(groups, -exponent[..., None]), scheme)
        scale = jnp.where(jnp.isfinite(largest), exponent + 127, 255).astype(jnp.uint8)
    return Packed(
        codes=codes.reshape(rows, -1),
        scale=None if scale is None else scale.T,
        zero=None if zero is None else zero.T,
        row_scale=row_scale,
        scheme=scheme,
        group_size=group_size,
    )


@functools.partial(jax.jit, static_argnums=1)
def _dequantize(packed: Packed, dtype) -> Float[Array, "O I"]:
    values = _grouped_values(packed)
    if packed.scale is not None:
        if packed.scheme in ("mxfp4", "mxfp8"):
            exponent = packed.scale.T.astype(jnp.int32)[..., None] - 127
            values = jnp.where(exponent > 127, jnp.nan, _times_power(values, exponent))
        else:
            values = values * packed.scale.T.astype(jnp.float32)[..., None]
    if packed.row_scale is not None:
        values = values * packed.row_scale[:, None, None]
    return values.reshape(packed.shape).astype(dtype)


def _divide(x: Float[Array, "*B"], by: Float[Array, "*C"] | float) -> Float[Array, "*B"]:
    """x / by, rounded once on every device, so that quotients that are ties stay ties.

    XLA multiplies by the rounded reciprocal of a constant or of what it sees broadcast, and a GPU's
    division is two units off at times. What is left of x then mends the quotient; its products,
    of halves of 12 bits, are exact.
    """
    by = jnp.broadcast_to(jnp.asarray(by, jnp.float32), x.shape)
    quotient = x / by
    (q_high, q_low), (by_high, by_low) = _halves(quotient), _halves(by)
    left = x - q_high * by_high
    left = left - q_high * by_low - q_low * by_high - q_low * by_low
    return quotient + left / by


def _halves(x: Float[Array, "*B"]) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """Two numbers of 12 bits each whose sum is x."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(2**12))
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def _group_scale(span: Float[Array, "O J"], most: float, dtype):
    """span / most in `dtype`, 1 where the span is 0, and the same numbers in float32."""
    normal = jnp.finfo(dtype).tiny
    # float32's own subnormals count as 0 on some devices
    step = np.float32(max(jnp.finfo(dtype).smallest_subnormal, jnp.finfo(jnp.float32).tiny))
    scale = _divide(span, most)
    above = step * jnp.maximum(jnp.ceil(scale / step), np.float32(1))
    scale = jnp.where(scale < np.float32(normal), above, scale)
    return _rounded(jnp.where(span == 0, np.float32(1), scale), dtype)


def _rounded(scale, dtype):
    """The scale in `dtype`, and the same numbers in float32."""
    # Else XLA may leave out the rounding of what is at once made wide again
    scale = jax.lax.optimization_barrier(scale.astype(dtype))
    return scale, scale.astype(jnp.float32)


def _codes(q: Float[Array, "O J G"], scheme: str, zero: UInt8[Array, "O J"] | None = None):
    """Codes of quotients, packed: rounded to the scheme's numbers, saturated at its largest."""
    if scheme in ("fp8", "mxfp8"):
        # The cast itself does not saturate: 465 would become NaN
        return jnp.clip(q, -_E4M3_MAX, _E4M3_MAX).astype(jnp.float8_e4m3fn)
    if scheme == "int8":
        return jnp.clip(jnp.round(q), -127, 127).astype(jnp.int8)
    if scheme in ("nvfp4", "mxfp4"):
        return _pack(_e2m1_codes(q), scheme)
    if scheme == "ternary":
        return _pack((jnp.clip(jnp.round(q), -1, 1) + np.float32(1)).astype(jnp.uint8), scheme)
    if zero is not None:
        shifted = jnp.round(q) + zero.astype(jnp.float32)[..., None]
        return _pack(jnp.clip(shifted, 0, 15).astype(jnp.uint8), scheme)
    return _pack((jnp.clip(jnp.round(q), -7, 7) + np.float32(_INT4_ZERO)).astype(jnp.uint8), scheme)


def _e2m1_codes(x: Float[Array, "O J G"]) -> UInt8[Array, "O J G"]:
    """sign << 3 | index among 0, .5, 1, 1.5, 2, 3, 4, 6 of the nearest, ties to even."""
    size = jnp.abs(x)
    index = jnp.zeros(x.shape, jnp.uint8)
    for bound, up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        beyond = size >= np.float32(bound) if up else size > np.float32(bound)
        index = index + beyond.astype(jnp.uint8)
    return index | jnp.signbit(x).astype(jnp.uint8) << np.uint8(3)


def _mx_exponent(largest: Float[Array, "O J"], scheme: str, rule: str) -> Int[Array, "O J"]:
    """e of the groups' scales 2^e, from -127 to 127, by arithmetic on the bits of float32."""
    exponent, mantissa, fraction = _MX_ELEMENTS[scheme]
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    if rule == "even":
        bits = bits + np.int32(1 << (22 - mantissa))
    found = (bits >> np.int32(23)) - np.int32(127 + exponent)
    if rule == "ceil":
        beyond = (bits & np.int32(0x7FFFFF)) > np.int32(fraction * 2**23)
        found = found + beyond.astype(jnp.int32)
    return jnp.clip(found, -127, 127)


def _times_power(x: Float[Array, "*B"], exponent: Int[Array, "*C"]) -> Float[Array, "*B"]:
    """x 2^exponent, for -127 to 127, in two steps: a subnormal power would count as 0."""
    half = exponent >> np.int32(1)
    for part in (half, exponent - half):
        power = jax.lax.bitcast_convert_type((part + np.int32(127)) << np.int32(23), jnp.float32)
        x = x * power
    return x


def _grouped_values(packed: Packed) -> Float[Array, "O J G"]:
    """What the codes stand for without scales, in float32."""
    scheme, rows = packed.scheme, packed.codes.shape[0]
    group = packed.group_size or packed.shape[1]
    shape = (rows, packed.shape[1] // group, group)
    if scheme not in CODES_PER_BYTE:
        return packed.codes.astype(jnp.float32).reshape(shape)
    codes = _unpack(packed.codes, CODES_PER_BYTE[scheme]).astype(jnp.int32)
    codes = codes.reshape(shape)
    if scheme == "ternary":
        return (codes - np.int32(1)).astype(jnp.float32)
    if scheme == "int4":
        zero = np.int32(_INT4_ZERO)
        if packed.zero is not None:
            zero = packed.zero.T.astype(jnp.int32)[..., None]
        return (codes - zero).astype(jnp.float32)
    # E2M1, in halves: m of exponent 0, else 2 + m moved up by exponent - 1
    index = codes & np.int32(7)
    moved = (np.int32(2) | index & np.int32(1)) << jnp.maximum((index >> 1) - 1, 0)
    halves = jnp.where(index < 2, index, moved).astype(jnp.float32) * np.float32(0.5)
    return jnp.where(codes > 7, -halves, halves)


def _pack(codes: UInt8[Array, "O J G"], scheme: str) -> UInt8[Array, "O P"]:
    """Codes side by side in bytes, the first in a byte's lowest bits."""
    per_byte = CODES_PER_BYTE[scheme]
    columns = codes.reshape(codes.shape[0], -1, per_byte)
    bits = 8 // per_byte
    out = columns[..., 0]
    for place in range(1, per_byte):
        out = out | columns[..., place] << np.uint8(place * bits)
    return out


def _unpack(codes: UInt8[Array, "O P"], per_byte: int) -> UInt8[Array, "O I"]:
    bits = 8 // per_byte
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    columns = codes[..., None] >> shifts[None, None] & np.uint8(2**bits - 1)
    return columns.reshape(codes.shape[0], codes.shape[1] * per_byte)


def _zero_codes(packed: Packed) -> UInt8[Array, "J O"]:
    if packed.zero is not None:
        return packed.zero
    assert packed.scale is not None  # int4 has groups
    return jnp.full(packed.scale.shape, _INT4_ZERO, jnp.uint8)
