"""LayerNorm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis.

x [*B, D], weight and bias [D]. Each row is read once and written once: of 16 bits and more than 256
numbers by lanes (`norm_lanes`; going back up to 8192, by `norm_lanes_backward`), others by
`over_rows`. The variance is the mean of (x - mean)^2, taken of the row as it lies in registers or
on chip: E[x^2] - mean^2 has no digit left where the mean is large. The backward pass reads x and dy
and takes the statistics anew, which costs no byte; by `over_rows` all sums of wide rows at once. A
block sums its shares of d_weight and d_bias in registers, and XLA adds them in a fixed order.
Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import device as device_lib
from pallas_kernels import norm_lanes, norm_lanes_backward, rows, tuned
from pallas_kernels.device import Device
from pallas_kernels.options import check_arrays, check_number, check_options
from pallas_kernels.over_rows import over_rows
from pallas_kernels.rows import Config

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Numbers a thread has of a row: of more, the sums for d_weight spill (88: 900 bytes)
MAX_SHARE = 64
KEPT = 40  # such numbers of x, dy and dy * weight that stay in registers between the sums
NEAR = 4  # numbers of a row whose mean is near the row's: at worst all are outliers, of D / 4 in D
MAX_TWO_SHARES = 40  # likewise with those for d_bias (48: 84 bytes); then XLA sums dy once more


def layer_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    *,
    eps: float,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B D"]:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias; without a bias, nothing is added.

    Dtypes: x bfloat16, float16 or float32, weight and bias in any of them. All in float32, rounded
    once at the end to x's dtype; right at a mean of 1e4 times the deviation. Gradients have the
    dtypes of their arguments.
    Raises: ValueError if shapes or dtypes disagree or eps is not positive. NotImplementedError
    without a Hopper GPU (unless `interpret`), or for rows that are no multiple of 16 bytes,
    longer than what stays on chip, or so short that a weight has fewer bytes than a warpgroup has
    threads, or a config that such rows cannot have.
    """
    check(x, weight, bias, eps)
    check_options("layer_norm", config, Config, interpret=interpret)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    reason = why_not(x, weight, bias, eps=eps, device=device)
    if reason is not None:
        raise NotImplementedError(f"layer_norm: cannot run this call: {reason}")
    key = bucket(x, weight, bias, eps=eps)
    static = _Static(
        float(eps),
        config or norm_lanes.tuned_config("layer_norm", key, x, device),
        device.num_sms,
        interpret,
    )
    flat = x.reshape(-1, x.shape[-1])
    weights = tuple(rows.copied(w) for w in (weight, bias) if w is not None)
    return _norm(static, flat, weights).reshape(x.shape)


def layer_norm_reference(x, weight, bias, *, eps):
    """The mathematics in plain JAX."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    row = lambda w: w.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + w.shape)  # noqa: E731
    y = centred * jax.lax.rsqrt(variance + eps) * row(weight)
    return (y if bias is None else y + row(bias)).astype(x.dtype)


def why_not(x, weight, bias, *, eps, device: Device | None = None) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del eps
    device = device or device_lib.current()
    if reason := device_lib.why_not_hopper(device):
        return reason
    for name, array in (("x", x), ("weight", weight), ("bias", bias)):
        if array is not None and array.dtype not in DTYPES:
            return f"takes bfloat16, float16 or float32, got {name} {array.dtype}"
    if x.ndim < 1:
        return "takes rows, got a scalar"
    if x.size == 0:
        return f"an array {list(x.shape)} holds no numbers"
    if norm_lanes_backward.plan_of(x.shape[-1], x.dtype):
        return None  # lanes norm what they can take back
    sizes = [array.dtype.itemsize for array in (weight, bias) if array is not None]
    if reason := rows.why_not_rows(x.shape[-1], x.dtype.itemsize, *sizes):
        return reason
    share = _share(x, _backward_config(x, weight, device.num_sms))
    if share > MAX_SHARE:
        return (
            f"rows of {x.shape[-1]} numbers are {share} a thread, more than the {MAX_SHARE} whose "
            "gradients it can sum up"
        )
    return None


def default_config(x, weight, bias, *, eps, device: Device | None = None) -> Config:
    """Wide rows of 16 bits by lanes; else what `rows` takes for this many bytes a number."""
    del eps
    weights = (weight,) if bias is None else (weight, bias)
    return _forward_config(x, weights, (device or device_lib.current()).num_sms)


def bucket(x, weight, bias, *, eps) -> str:
    """The key of a tuned row: the width exactly, the rows to a power of two."""
    del eps
    width, _, count = _size(x)
    rounded = tuned.power_of_two(count)
    return f"{x.dtype}-m{rounded}-d{width}-{weight.dtype}{'' if bias is None else '-bias'}"


def candidates(x, weight, bias, *, eps, device: Device | None = None) -> list[Config]:
    """By lanes, where they take such rows; else what `rows` would try."""
    del eps, device
    weights = (weight,) if bias is None else (weight, bias)
    by_lanes = norm_lanes.candidates(x.shape[-1], x.dtype)
    return by_lanes or rows.candidates(*_size(x), **_bytes(x, weights))


def tuning_calls() -> list[tuned.Call]:
    """Real widths, decode and prefill, with a bias. For rows of 896 there is one config only."""
    bf16 = jnp.bfloat16
    return [
        tuned.Call(
            (
                jax.ShapeDtypeStruct((count, width), bf16),
                *[jax.ShapeDtypeStruct((width,), bf16)] * 2,
            ),
            functools.partial(layer_norm, eps=1e-5),
            {"eps": 1e-5},
        )
        for width in (4096, 8192)
        for count in (1, 64, 8192)
    ]


def _size(x) -> tuple[int, int, int]:
    """Width, bytes of a number, rows."""
    return x.shape[-1], x.dtype.itemsize, x.size // x.shape[-1]


def _bytes(x, weights) -> dict[str, int]:
    held = sum(weight.dtype.itemsize for weight in weights)
    return {"array_bytes": x.dtype.itemsize, "held_bytes": held}


def _forward_config(x, weights, num_sms: int) -> Config:
    by_lanes = norm_lanes.default_config(x.shape[-1], x.dtype)
    sizes: dict[str, Any] = {**_bytes(x, weights), "num_sms": num_sms, "meetings": 2}
    return by_lanes or rows.default_config(*_size(x), **sizes)


def _backward_config(x, weight, num_sms: int) -> Config:
    """What `rows` takes for x, dy and two sums."""
    sizes = {"array_bytes": 2 * x.dtype.itemsize, "held_bytes": weight.dtype.itemsize}
    return rows.default_config(*_size(x), **sizes, num_sms=num_sms, sums=2)


def _share(x, config: Config) -> int:
    """Numbers of a wide row that a thread has."""
    tile = rows.row_tile(x.shape[-1], x.dtype.itemsize, warpgroups=config.warpgroups)
    return tile.chunks * tile.inner // device_lib.THREADS if tile.warps[0] == 1 else 0


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a kernel is compiled for."""

    eps: float
    config: Config | None
    num_sms: int
    interpret: bool


def check(x, weight, bias, eps) -> None:
    """Refuses what no implementation of LayerNorm can take."""
    check_arrays("layer_norm", x=x, weight=weight, bias=bias)
    if x.ndim < 1 or not x.shape[-1]:
        raise ValueError(f"layer_norm: x has shape {x.shape}; its rows must hold numbers")
    for name, row in (("weight", weight), ("bias", bias)):
        if row is not None and row.shape != x.shape[-1:]:
            raise ValueError(
                f"layer_norm: the {name} has shape {row.shape}, but the rows of x {x.shape} want "
                f"{x.shape[-1:]}"
            )
    for name, array in (("x", x), ("weight", weight), ("bias", bias)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"layer_norm: {name} is {array.dtype}; it must be floating point")
    check_number("layer_norm", "eps", eps, positive=True)


def _centre(static: _Static, group, x, width: int, g: Callable[..., Any] | None = None):
    """part -> x - mean in float32; and 1 / deviation, one number a row.

    With `g` (part -> [rows, columns]) also the sums of g and of g * (x - mean).
    """
    (part,) = group  # the registers hold such rows
    x32 = x.load(part).astype(jnp.float32)
    total, *more = group.sums([x32], *([] if g is None else [[g(part)]]))
    centred = x32 - part.across(total / width)
    squares, *products = group.sums(
        [_inside(part, centred, width) ** 2], *([] if g is None else [[g(part) * centred]])
    )
    return lambda _: centred, jax.lax.rsqrt(squares / width + static.eps), *more, *products


def _centre_at_once(static: _Static, group, x, width: int, g: Callable[..., Any], few: bool):
    """The same for rows in lines, whose sums meet: all at once, so around a number near the mean.

    That is the mean of a few numbers of the row, another one in each warpgroup. Where all of them
    are outliers, the variance loses at most D / 4 float32 ulps. few: the row stays in registers.
    """
    chunks = min(group[0].chunks, width // group[0].tile.inner)
    places = [chunks * i // NEAR for i in range(NEAR)]
    near = sum(x.number(group[0], place).astype(jnp.float32) for place in places) / NEAR

    def moved(part):
        return x.load(part).astype(jnp.float32) - near

    if few:
        moved = functools.cache(moved)
    *sums, nears = group.shares(
        (_inside(part, moved(part), width) for part in group),
        (_inside(part, moved(part), width) ** 2 for part in group),
        map(g, group),
        (g(part) * moved(part) for part in group),
        numbers=[near],
    )
    shares, count = list(zip(*sums, nears, strict=True)), width / len(nears)
    offsets = [other - near + total / count for total, _, _, _, other in shares]
    mean = sum(offsets) / len(offsets)
    squares, along = jnp.float32(0), jnp.float32(0)
    for offset, (total, square, of_g, product, other) in zip(offsets, shares, strict=True):
        squares += square - total * total / count + count * (offset - mean) ** 2
        along += product - (mean + near - other) * of_g
    scale = jax.lax.rsqrt(jnp.maximum(squares, 0.0) / width + static.eps)
    return lambda part: moved(part) - mean, scale, sum(sums[2]), along


def _inside(part, value, width: int):
    """0 behind the end of the row, where zeros were read: else each counts as the mean's square."""
    return value if part.tile.padded == width else jnp.where(part.columns() < width, value, 0.0)


def _forward(static: _Static, x, weights):
    width, config = x.shape[-1], static.config or _forward_config(x, weights, static.num_sms)
    if norm_lanes.default_config(width, x.dtype):

        def plain(row, weight, bias=None):
            return layer_norm_reference(row, weight, bias, eps=static.eps)

        (y,) = norm_lanes.normed_rows(
            x,
            weights,
            kind=norm_lanes.Kind("layer_norm", static.eps),
            config=config,
            plain=plain,
            interpret=static.interpret,
        )
        return y

    def step(group, inputs, weights, outputs, sums):
        (part,) = group
        centred, scale = _centre(static, group, inputs[0], width)
        y = centred(part) * part.across(scale)
        y = y * weights[0].load(part).astype(jnp.float32)
        for bias in weights[1:]:
            y = y + bias.load(part).astype(jnp.float32)
        outputs[0].store(part, y.astype(x.dtype))
        return sums

    (y,), _ = over_rows(
        step,
        name="layer_norm",
        inputs=[x],
        weights=weights,
        outputs=[x.dtype],
        row_sums=2,
        config=config,
        num_sms=static.num_sms,
        interpret=static.interpret,
    )
    return y


def _backward(static: _Static, x, weight, dy, has_bias: bool):
    """d_x, and the float32 sums d_weight and, if there is a bias, d_bias.

    With h = (x - mean) / deviation and g = dy * weight:
    d_x = (g - mean(g) - h mean(g h)) / deviation, d_weight = sum(dy h), d_bias = sum(dy).
    """
    width = x.shape[-1]
    if plan := norm_lanes_backward.plan_of(width, x.dtype):

        def plain(row, d, weight):
            row, weight = row.astype(jnp.float32), weight.astype(jnp.float32)
            norm = functools.partial(layer_norm_reference, eps=static.eps)
            bias = (jnp.zeros_like(weight),) if has_bias else (None,)
            _, vjp = jax.vjp(norm, row, weight, *bias)
            return vjp(d.astype(jnp.float32))[: 2 + has_bias]

        return norm_lanes_backward.gradients_of_rows(
            x,
            dy,
            weight,
            kind=norm_lanes.Kind("layer_norm", static.eps),
            biased=has_bias,
            plan=plan,
            plain=plain,
            num_sms=static.num_sms,
            interpret=static.interpret,
        )
    config = _backward_config(x, weight, static.num_sms)
    kernel_sums = 1 + (has_bias and _share(x, config) <= MAX_TWO_SHARES)

    def step(group, inputs, weights, outputs, sums):
        def load(part):
            d = inputs[1].load(part).astype(jnp.float32)
            return d, d * weights[0].load(part).astype(jnp.float32)

        few = _share(x, config) <= KEPT
        if few:  # else it is more than the registers hold, and read once more
            load = functools.cache(load)
        of_rows: Any = (static, group, inputs[0], width, lambda part: load(part)[1])
        if group[0].tile.lines == 1:
            centred, scale, total, products = _centre(*of_rows)
        else:
            centred, scale, total, products = _centre_at_once(*of_rows, few=few)
        mean, along = total / width, products * scale / width
        totals = [[] for _ in sums]
        for i, part in enumerate(group):
            d, g = load(part)
            h = centred(part) * part.across(scale)
            d_x = part.across(scale) * (g - part.across(mean) - h * part.across(along))
            outputs[0].store(part, d_x.astype(x.dtype))
            for j, share in enumerate((d * h, d)[: len(sums)]):
                totals[j].append(sums[j][i] + share)
        return totals

    (d_x,), sums = over_rows(
        step,
        name="layer_norm_backward",
        inputs=[x, dy],
        weights=[weight],
        outputs=[x.dtype],
        sums=kernel_sums,
        row_sums=5,
        config=config,
        num_sms=static.num_sms,
        interpret=static.interpret,
    )
    if has_bias and kernel_sums == 1:
        sums = [*sums, jnp.sum(dy, axis=0, dtype=jnp.float32)]
    return d_x, sums


def _norm_fwd(static, x, weights):
    return _forward(static, x, weights), (x, weights)


def _norm_bwd(static, saved, dy):
    x, weights = saved
    d_x, sums = _backward(static, x, weights[0], dy, len(weights) > 1)
    return d_x, tuple(d.astype(w.dtype) for d, w in zip(sums, weights, strict=True))


_norm = jax.custom_vjp(
    lambda static, x, weights: _norm_fwd(static, x, weights)[0], nondiff_argnums=(0,)
)
_norm.defvjp(_norm_fwd, _norm_bwd)
_norm = jax.jit(_norm, static_argnums=0)  # calls alike share one compiled kernel
