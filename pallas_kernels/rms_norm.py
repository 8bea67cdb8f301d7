"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight over the last axis, and with a residual of x + r.

x [*B, D], weight [D]. Each row is read once and written once, its mean is a sum by shuffles in
float32: rows of 16 bits and more than 256 numbers by lanes (`norm_lanes`; going back up to 8192, by
`norm_lanes_backward`), others by `over_rows`. The backward pass reads x and dy again and takes the
mean anew, which costs no byte; a block sums its share of d_weight in registers, and the shares are
added by XLA in a fixed order.
Source: Zhang and Sennrich 2019, arXiv:1910.07467.
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
from pallas_kernels import norm_lanes, norm_lanes_backward, rows, tuned
from pallas_kernels.device import Device
from pallas_kernels.options import check_arrays, check_flags, check_number, check_options
from pallas_kernels.over_rows import over_rows
from pallas_kernels.rows import Config

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def rms_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    residual: Float[Array, "*B D"] | None = None,
    zero_centered: bool = False,
    config: Config | None = None,
    interpret: bool = False,
) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight; (norm, x + residual) with a residual.

    `zero_centered` (Gemma) multiplies by 1 + weight.
    Dtypes: x and residual bfloat16, float16 or float32; the weight in any of them. Statistics in
    float32; x + residual and the normalised row are rounded to x's dtype, with zero_centered the
    product is taken in float32 and rounded once. Gradients have the dtypes of their arguments.
    Raises: ValueError if shapes or dtypes disagree or eps is not positive and finite.
    NotImplementedError without a Hopper GPU (unless `interpret`), or for rows that are no multiple
    of 16 bytes, longer than what stays on chip, or so short that a weight has fewer bytes than a
    warpgroup has threads, or a config that such rows cannot have.
    """
    check(x, weight, eps, residual, zero_centered)
    check_options("rms_norm", config, Config, interpret=interpret)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    kwargs = {"eps": eps, "residual": residual, "zero_centered": zero_centered}
    reason = why_not(x, weight, **kwargs, device=device)
    if reason is not None:
        raise NotImplementedError(f"rms_norm: cannot run this call: {reason}")
    key = bucket(x, weight, **kwargs)
    config = config or norm_lanes.tuned_config("rms_norm", key, x, device)
    static = _Static(float(eps), zero_centered, config, device.num_sms, interpret)
    flat, weight = x.reshape(-1, x.shape[-1]), rows.copied(weight)
    if residual is None:
        return _norm(static, flat, weight).reshape(x.shape)
    y, total = _norm_residual(static, flat, residual.reshape(flat.shape), weight)
    return y.reshape(x.shape), total.reshape(x.shape)


def rms_norm_reference(x, weight, *, eps, residual=None, zero_centered=False):
    """The mathematics in plain JAX."""
    total = x if residual is None else x + residual
    x32 = total.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    if zero_centered:
        y = (y * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    else:
        y = y.astype(x.dtype) * weight.astype(x.dtype)
    return y if residual is None else (y, total)


def why_not(
    x, weight, *, eps, residual=None, zero_centered=False, device: Device | None = None
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del eps, zero_centered
    device = device or device_lib.current()
    if x.ndim < 1:
        return "takes rows, got a scalar"
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        return f"takes a residual like x, got {residual.dtype}{list(residual.shape)}"
    if reason := device_lib.why_not_hopper(device):
        return reason
    for name, dtype in (("x", x.dtype), ("weight", weight.dtype)):
        if dtype not in DTYPES:
            return f"takes bfloat16, float16 or float32, got {name} {dtype}"
    if x.size == 0:
        return f"an array {list(x.shape)} holds no numbers"
    if norm_lanes_backward.plan_of(x.shape[-1], x.dtype):
        return None  # lanes norm what they can take back
    return rows.why_not_rows(x.shape[-1], x.dtype.itemsize, weight.dtype.itemsize)


def default_config(
    x, weight, residual=None, *, eps, zero_centered=False, device: Device | None = None
) -> Config:
    """Wide rows of 16 bits by lanes; else what `rows` takes for this many bytes a number."""
    del eps, zero_centered
    return _forward_config(x, weight, residual, (device or device_lib.current()).num_sms)


def _forward_config(x, weight, residual, num_sms: int) -> Config:
    by_lanes = norm_lanes.default_config(x.shape[-1], x.dtype)
    sizes = _bytes(x, weight, residual)
    return by_lanes or rows.default_config(*_size(x), **sizes, num_sms=num_sms)


def bucket(x, weight, residual=None, *, eps, zero_centered=False) -> str:
    """The key of a tuned row: the width exactly, the rows to a power of two."""
    del eps, zero_centered
    width, _, count = _size(x)
    rounded = tuned.power_of_two(count)
    return f"{x.dtype}-m{rounded}-d{width}-{weight.dtype}{'' if residual is None else '-residual'}"


def candidates(
    x, weight, residual=None, *, eps, zero_centered=False, device: Device | None = None
) -> list[Config]:
    """By lanes, where they take such rows; else what `rows` would try."""
    del eps, zero_centered, device
    by_lanes = norm_lanes.candidates(x.shape[-1], x.dtype)
    return by_lanes or rows.candidates(*_size(x), **_bytes(x, weight, residual))


def tuning_calls() -> list[tuned.Call]:
    """Widths of real models, decode and prefill, alone and with a residual. For rows of 896 there
    is one config only.
    """

    def run(x, weight, residual=None, **keywords):
        return rms_norm(x, weight, residual=residual, **keywords)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    calls = []
    for width in (3072, 4096, 8192):
        for count in (1, 64, 8192):
            x, weight = shape((count, width)), shape((width,))
            calls += [
                tuned.Call(call, run, {"eps": 1e-5}) for call in ((x, weight), (x, weight, x))
            ]
    return calls


def _size(x) -> tuple[int, int, int]:
    """Width, bytes of a number, rows."""
    return x.shape[-1], x.dtype.itemsize, math.prod(x.shape[:-1])


def _bytes(x, weight, residual) -> dict[str, int]:
    arrays = 1 if residual is None else 2
    return {"array_bytes": arrays * x.dtype.itemsize, "held_bytes": weight.dtype.itemsize}


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a kernel is compiled for."""

    eps: float
    zero_centered: bool
    config: Config | None
    num_sms: int
    interpret: bool


def check(x, weight, eps, residual, zero_centered) -> None:
    """Refuses what no implementation of RMSNorm can take."""
    check_arrays("rms_norm", x=x, weight=weight, residual=residual)
    check_flags("rms_norm", zero_centered=zero_centered)
    if x.ndim < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: the weight has shape {weight.shape}, but the rows of x {x.shape} want "
            f"{x.shape[-1:]}"
        )
    for name, array in (("x", x), ("weight", weight)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"rms_norm: {name} is {array.dtype}; it must be floating point")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"rms_norm: the residual is {residual.dtype}{list(residual.shape)}, not as x is: "
            f"{x.dtype}{list(x.shape)}"
        )
    check_number("rms_norm", "eps", eps, positive=True)


def _forward(static: _Static, x, weight, residual=None):
    """y, and x + residual if there is a residual."""
    width = x.shape[-1]
    config = static.config or _forward_config(x, weight, residual, static.num_sms)
    if norm_lanes.default_config(width, x.dtype):
        how: dict[str, Any] = {"eps": static.eps, "zero_centered": static.zero_centered}

        def plain(row, weight) -> Any:
            return rms_norm_reference(row, weight, **how)

        return norm_lanes.normed_rows(
            x,
            [weight],
            kind=norm_lanes.Kind("rms_norm", **how),
            config=config,
            plain=plain,
            interpret=static.interpret,
            residual=residual,
        )

    def step(group, inputs, weights, outputs, sums):
        (part,) = group  # the registers hold such rows
        total = inputs[0].load(part)
        if residual is not None:
            total = total + inputs[1].load(part)
            outputs[1].store(part, total)
        total = total.astype(jnp.float32)
        scale = jax.lax.rsqrt(group.sum([total**2]) / width + static.eps)
        y = total * part.across(scale)
        w = weights[0].load(part)
        if static.zero_centered:
            y = (y * (1.0 + w.astype(jnp.float32))).astype(x.dtype)
        else:
            y = y.astype(x.dtype) * w.astype(x.dtype)
        outputs[0].store(part, y)
        return sums

    inputs = [x] if residual is None else [x, residual]
    outputs, _ = over_rows(
        step,
        name="rms_norm" if residual is None else "rms_norm_residual",
        inputs=inputs,
        weights=[weight],
        outputs=[x.dtype] * len(inputs),
        row_sums=1,
        config=config,
        num_sms=static.num_sms,
        interpret=static.interpret,
    )
    return outputs


def _backward(static: _Static, x, weight, dy, d_total=None):
    """d_x and d_weight; `d_total` is the cotangent of x + residual, if there is one.

    With h = x / rms and g = dy * weight: d_x = (g - h mean(g h)) / rms, d_weight = sum(dy h).
    """
    width = x.shape[-1]
    if plan := norm_lanes_backward.plan_of(width, x.dtype):

        def plain(row, d, weight):
            norm = functools.partial(
                rms_norm_reference, eps=static.eps, zero_centered=static.zero_centered
            )
            _, vjp = jax.vjp(norm, row.astype(jnp.float32), weight.astype(jnp.float32))
            return vjp(d.astype(jnp.float32))

        d_x, (d_weight,) = norm_lanes_backward.gradients_of_rows(
            x,
            dy,
            weight,
            d_total,
            kind=norm_lanes.Kind("rms_norm", static.eps, static.zero_centered),
            biased=False,
            plan=plan,
            plain=plain,
            num_sms=static.num_sms,
            interpret=static.interpret,
        )
        return d_x, d_weight.astype(weight.dtype)

    def step(group, inputs, weights, outputs, sums):
        def load(part):
            x32, d = (ref.load(part).astype(jnp.float32) for ref in inputs[:2])
            w = weights[0].load(part).astype(jnp.float32)
            return x32, d, d * (1.0 + w if static.zero_centered else w)

        if len(group) == 1:  # else it is more than the registers hold, and read once more
            load = functools.cache(load)
        squares, products = group.sums(
            (load(part)[0] ** 2 for part in group),
            (load(part)[0] * load(part)[2] for part in group),
        )
        scale = jax.lax.rsqrt(squares / width + static.eps)
        along = products * scale * scale / width
        totals = []
        for part, total in zip(group, sums[0], strict=True):
            x32, d, g = load(part)
            d_x = part.across(scale) * (g - x32 * part.across(along))
            if d_total is not None:
                d_x = d_x + inputs[2].load(part).astype(jnp.float32)
            outputs[0].store(part, d_x.astype(x.dtype))
            totals.append(total + d * x32 * part.across(scale))
        return [totals]

    outputs, sums = over_rows(
        step,
        name="rms_norm_backward" if d_total is None else "rms_norm_residual_backward",
        inputs=[x, dy] if d_total is None else [x, dy, d_total],
        weights=[weight],
        outputs=[x.dtype],
        sums=1,
        row_sums=2,
        config=None,
        num_sms=static.num_sms,
        interpret=static.interpret,
    )
    return outputs[0], sums[0].astype(weight.dtype)


def _norm_fwd(static, x, weight):
    return _forward(static, x, weight)[0], (x, weight)


def _norm_bwd(static, saved, dy):
    x, weight = saved
    return _backward(static, x, weight, dy)


_norm = jax.custom_vjp(
    lambda static, x, weight: _norm_fwd(static, x, weight)[0], nondiff_argnums=(0,)
)
_norm.defvjp(_norm_fwd, _norm_bwd)
_norm = jax.jit(_norm, static_argnums=0)  # calls alike share one compiled kernel


def _norm_residual_fwd(static, x, residual, weight):
    y, total = _forward(static, x, weight, residual)
    return (y, total), (total, weight)


def _norm_residual_bwd(static, saved, cotangents):
    (total, weight), (dy, d_total) = saved, cotangents
    d_x, d_weight = _backward(static, total, weight, dy, d_total)
    return d_x, d_x, d_weight


_norm_residual = jax.custom_vjp(
    lambda static, x, residual, weight: _norm_residual_fwd(static, x, residual, weight)[0],
    nondiff_argnums=(0,),
)
_norm_residual.defvjp(_norm_residual_fwd, _norm_residual_bwd)
_norm_residual = jax.jit(_norm_residual, static_argnums=0)  # calls alike share one compiled kernel
