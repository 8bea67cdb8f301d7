"""AdamW with moments of eight bits, the step of bfloat16 weights that rounds stochastically, and
learning rates with a warm-up.

    optimizer = adamw_8bit(learning_rates(1e-4, steps), weight_decay=0.1, mask=matrices)
    params = apply_updates_stochastically(params, updates, key)

Moments cost 2 bytes a parameter instead of 8, plus a scale for each block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, UInt8

from jaxllm.integers import integer
from pallas_kernels.options import is_number

BLOCK = 256  # numbers that share a scale
MIN_SIZE = 4096  # a smaller parameter keeps its moments in float32


DECADES = 7  # of magnitudes that the codes cover


def dynamic_code(signed: bool) -> np.ndarray:
    """The 256 numbers in [-1, 1], or in [0, 1], that a byte stands for, in ascending order.

    Dynamic tree quantisation: seven decades, each divided into twice as many equal parts as the one
    below (the lowest into one, or two if there are no signs), whose middles they are; and 0 and 1.
    Source: Dettmers et al. 2021, arXiv:2110.02861, section 1.2.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        ends = np.linspace(0.1, 1.0, _parts(decade, signed) + 1)
        middles = 10.0 ** (decade - DECADES + 1) * (ends[:-1] + ends[1:]) / 2
        values += [*middles, *(-middles if signed else [])]
    assert len(set(values)) == 256, len(set(values))
    return np.sort(np.asarray(values))


def _parts(decade: int, signed: bool) -> int:
    return 2 ** (decade if signed else decade + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A moment in eight bits: codes with the parameter's shape, and a float32 scale for each block
    of `BLOCK` numbers of its last axis (the last block may be shorter).
    """

    codes: UInt8[Array, "*B I"]
    scales: Float[Array, "*B I_blocks"]


def quantize(x: Float[Array, "*B I"], *, signed: bool) -> Quantized:
    """The nearest code of each number over the largest magnitude of its block.

    A positive number of an unsigned moment never becomes zero: what is divided by its root would
    go astray.
    """
    # Arithmetic, not a search in the table of codes: XLA makes one kernel of it. And of few
    # operations, for each parameter has its own and XLA takes its time over them.
    blocks = _blocks(x)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    ratios = blocks / jnp.where(scales > 0, scales, 1)[..., None]
    size = jnp.abs(ratios)
    # The place among the codes from 0 on: a decade's first place is its count of parts (less one
    # without signs), then its parts follow. 0 and 1 are decades of one part.
    first = jnp.zeros(size.shape, jnp.int32)
    parts_of_one = jnp.zeros(size.shape, jnp.float32)
    for border, place, slope in _decades(signed):
        above = size > border
        first = jnp.where(above, place, first)
        parts_of_one = jnp.where(above, slope, parts_of_one)
    parts = jnp.maximum(first, 1) if signed else first + 1
    part = jnp.floor(size * parts_of_one - parts.astype(jnp.float32) / 9).astype(jnp.int32)
    place = first + jnp.clip(part, 0, parts - 1)
    codes = 127 + jnp.where(ratios < 0, -jnp.minimum(place, 127), place) if signed else place
    codes = codes.astype(jnp.uint8).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    return Quantized(codes, scales)


@functools.cache  # not once for each parameter
def _decades(signed: bool) -> list[tuple[np.float32, int, np.float32]]:
    """Of each decade, and of the code 1 behind them: the border above which numbers are in it, the
    place of its first part among the codes from 0 on, and how many such parts 1 would have.
    """
    code = dynamic_code(signed)[127 if signed else 0 :]
    decades, place = [], 1
    for decade in range(DECADES + 1):
        # The first border of an unsigned moment is 0: what is positive stays so
        border = (code[place - 1] + code[place]) / 2 if decade or signed else 0.0
        last = decade == DECADES
        parts = 0 if last else _parts(decade, signed)
        decades.append(
            (np.float32(border), place, np.float32(parts / 0.9 * 10.0 ** (DECADES - 1 - decade)))
        )
        place += parts
    return decades


def dequantize(x: Quantized, *, signed: bool) -> Float[Array, "*B I"]:
    """The numbers that the codes stand for, float32.

    Arithmetic too: XLA writes new codes over the old ones, which it would not if they were looked
    up in a table.
    """
    codes = x.codes.astype(jnp.int32)
    place = jnp.abs(codes - 127) if signed else codes + 1
    # A place counts from its decade's first, a power of two: as a float32, its exponent is the
    # decade, and the rest of it how far in that decade the place is. Half a part more is its middle
    bits = jax.lax.bitcast_convert_type(place.astype(jnp.float32) + np.float32(0.5), jnp.int32)
    middle = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32)
    top = jnp.full(place.shape, np.float32(10.0 ** (1 - DECADES)))
    for decade in range(1, DECADES):
        above = place >= _parts(decade, signed)
        top = jnp.where(above, np.float32(10.0 ** (decade - DECADES + 1)), top)
    values = top * (np.float32(0.1) + np.float32(0.9) * (middle - 1))
    values = jnp.where(codes == 255, 1, jnp.where(place == (0 if signed else 1), 0, values))
    if signed:
        values = jnp.where(codes < 127, -values, values)
    blocks = _blocks(values) * x.scales[..., None]
    return blocks.reshape(*x.codes.shape[:-1], -1)[..., : x.codes.shape[-1]]


def _blocks(x: Array) -> Array:
    """[..., I] as [..., blocks, BLOCK], filled up with zeros."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)])
    return x.reshape(*x.shape[:-1], -1, BLOCK)


class Adam8BitState(NamedTuple):
    """The count of steps, and the moments: `Quantized`, or float32 where a parameter is small."""

    count: Int[Array, ""]
    mu: Any
    nu: Any


def scale_by_adam_8bit(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, *, min_size: int = MIN_SIZE
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with moments in eight bits between the steps.

    A parameter of fewer than `min_size` numbers or less than two axes keeps float32 moments.
    `min_size` is static, so `optax.inject_hyperparams` needs it among its `static_args`.
    Within a step the moments are float32, and so are the updates: one parameter's at a time, but
    where `jax.shard_map` is, in which XLA may hold those of all.
    Raises: ValueError for a b1 or b2 outside [0, 1), and a traced `min_size`.
    Source: Dettmers et al. 2021, arXiv:2110.02861; blocks of 256, of the last axis only.
    """
    if isinstance(min_size, Tracer):
        raise ValueError(
            "scale_by_adam_8bit: min_size is a traced number, but state depends on it; give "
            "optax.inject_hyperparams static_args=('min_size',)"
        )
    for name, b in (("b1", b1), ("b2", b2)):
        traced = isinstance(b, Tracer)  # of optax.inject_hyperparams
        if not traced and not (is_number(b) and 0 <= b < 1):
            raise ValueError(f"scale_by_adam_8bit: {name} must be in [0, 1), got {b!r:.60}")

    def small(param: Any) -> bool:
        return param.ndim < 2 or param.size < min_size

    def start(param: Any, signed: bool) -> Any:
        if small(param):
            return jnp.zeros(param.shape, jnp.float32)
        # Said and not quantised, for XLA would compute it on the host: 4 s for 17 million zeros
        zero = jnp.full(param.shape, 127 if signed else 0, jnp.uint8)
        *rows, width = param.shape
        return Quantized(zero, jnp.zeros((*rows, -(-width // BLOCK)), jnp.float32))

    # Traced once for all parameters of a shape
    @jax.jit
    def leaf(g, mu, nu, corrections):
        packed = isinstance(mu, Quantized)
        g = g.astype(jnp.float32)
        if packed:
            mu, nu = dequantize(mu, signed=True), dequantize(nu, signed=False)
        mu = jnp.float32(b1) * mu + jnp.float32(1 - b1) * g
        nu = jnp.float32(b2) * nu + jnp.float32(1 - b2) * (g * g)
        step = (mu / corrections[0]) / (jnp.sqrt(nu / corrections[1]) + jnp.float32(eps))
        if packed:
            mu, nu = quantize(mu, signed=True), quantize(nu, signed=False)
        return step, (mu, nu)

    def init(params: optax.Params) -> Adam8BitState:
        moments = [jax.tree.map(lambda p, s=s: start(p, s), params) for s in (True, False)]
        return Adam8BitState(jnp.zeros((), jnp.int32), *moments)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Adam8BitState]:
        del params
        count = state.count + 1
        steps = count.astype(jnp.float32)
        corrections = [1 - jnp.float32(b) ** steps for b in (b1, b2)]

        leaves, tree = jax.tree.flatten(updates)
        steps_, new, last = [], [], None
        # Within a `shard_map` a barrier would make all vary over its axes
        spread = bool(jax.sharding.get_abstract_mesh().manual_axes)
        for old in zip(
            leaves, tree.flatten_up_to(state.mu), tree.flatten_up_to(state.nu), strict=True
        ):
            if isinstance(old[0], Tracer) and isinstance(old[1], Quantized) and not spread:
                if last is not None:  # one after the other: else XLA holds all moments in float32
                    old, new[last] = jax.lax.optimization_barrier((old, new[last]))
                last = len(new)
            step, moment = leaf(*old, corrections)
            steps_.append(step)
            new.append(moment)
        mu, nu = zip(*new, strict=True) if new else ((), ())
        steps_, mu, nu = (tree.unflatten(part) for part in (steps_, mu, nu))
        return steps_, Adam8BitState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def adamw_8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    min_size: int = MIN_SIZE,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw` over `scale_by_adam_8bit`; the other arguments are those of optax."""
    return optax.chain(
        scale_by_adam_8bit(b1, b2, eps, min_size=min_size),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


BY_NAME = {"adamw": optax.adamw, "adamw_8bit": adamw_8bit}
SCHEDULES = ("cosine", "linear", "constant")


def usual_warmup(steps: int) -> int:
    """A twentieth of all steps; 1 at least, but none of an only one."""
    return 0 if steps < 2 else max(1, steps // 20)


def learning_rates(
    rate: float, steps: int, *, warmup_steps: int | None = None, schedule: str = "cosine"
) -> optax.Schedule:
    """The learning rates of `steps` updates: up to `rate` in a warm-up, and then down, or constant.

    i / (warmup_steps + 1) of `rate` in the i-th, counted from 1, so that the one after the warm-up
    (None: `usual_warmup`; 0: none) has all of it. From there "cosine" goes down to a tenth and
    "linear" to nothing, which the update after the last would have; "constant" stays.
    Raises: ValueError for another schedule, and for numbers of steps that are no integers, fewer
    than 1, or (of the warm-up) below 0.
    """
    steps = integer("steps", steps, 1, who="optimizers")
    warm = usual_warmup(steps) if warmup_steps is None else warmup_steps
    warm = integer("warmup_steps", warm, 0, who="optimizers")
    left = max(steps - warm, 1)
    if schedule == "cosine":
        after = optax.cosine_decay_schedule(rate, left, alpha=0.1)
    elif schedule == "linear":
        after = optax.linear_schedule(rate, 0.0, left)
    elif schedule == "constant":
        after = optax.constant_schedule(rate)
    else:
        raise ValueError(
            f"optimizers: schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r:.60}"
        )
    if not warm:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(rate / (warm + 1), rate, warm), after], boundaries=[warm]
    )


def matrices(params: optax.Params) -> optax.Params:
    """Which parameters weight decay is usual for, as optax's `mask`: not norms and biases."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def apply_updates_stochastically(
    params: optax.Params, updates: optax.Updates, key: Array
) -> optax.Params:
    """params + updates, where a bfloat16 parameter gets one of the two bfloat16 numbers around the
    float32 sum, the nearer one likelier: on average it is the sum.

    So a step far smaller than a weight's last digit is not lost. The key must be new at each step.
    Float32 parameters get the sum. Raises: ValueError for another dtype.
    Source: Gupta et al. 2015, arXiv:1502.02551, section 3.
    """
    leaves, tree = jax.tree.flatten(params)
    results = []
    for i, (param, update) in enumerate(zip(leaves, tree.flatten_up_to(updates), strict=True)):
        total = param.astype(jnp.float32) + update.astype(jnp.float32)
        if param.dtype == jnp.bfloat16:
            total = round_stochastically(total, jax.random.fold_in(key, i))
        elif param.dtype != jnp.float32:
            raise ValueError(
                f"optimizers: a parameter is {param.dtype}, but weights that are rounded "
                "stochastically are bfloat16 (float32 ones are added to as they are)"
            )
        results.append(total)
    return tree.unflatten(results)


def round_stochastically(x: Float[Array, "*B"], key: Array) -> Float[Array, "*B"]:
    """float32 to bfloat16, up or down by chance, so that the mean is x.

    What is not finite stays so; a number above the largest bfloat16 may become infinite.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # The lower half of a float32 says how far it is from the bfloat16 towards zero: to that, a
    # uniform draw is added, and what carries over moves the number away from zero.
    moved = bits + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    finite = jnp.isfinite(x)
    upper = (jnp.where(finite, moved, bits) >> np.uint32(16)).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(finite, rounded, x.astype(jnp.bfloat16))
