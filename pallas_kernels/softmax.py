"""Scale, mask and softmax in one: y = exp(scale * x - max) / sum over what the mask lets through.

x is [*B, S], or any axis of any array, which is then moved to the end and back: a copy each way.
Each row is read once and written once. A row of up to 32 KB, in no more pieces than one copy takes,
has one block, which owns every blocks-th tile of rows; a longer one is shared out among the blocks
of a cluster, which show each other their maxima and sums (`softmax_kernel`; where each number
counts and the scale is known and above 0, `softmax_lanes`). The backward kernels work likewise on
the saved result: d_x = scale * y * (d_y - sum(d_y * y)); float32 rows of more than 112,000
numbers are read twice there, if they fill the threads. A mask is read as it is stored, one byte a
number, never at the size of x; where it is of queries and not of heads, a tile is of heads, which
have a row of it in common. Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (how the sums
of parts are added).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import device as device_lib
from pallas_kernels import softmax_kernel, softmax_lanes, tuned
from pallas_kernels.device import ACCESS_BYTES, SHARED_BYTES, THREADS, WARPS, Device
from pallas_kernels.options import check_arrays, check_flags, check_options, check_scale
from pallas_kernels.rows import MARGIN_BYTES
from pallas_kernels.softmax_tiles import (
    KEPT,
    MAX_CLUSTER,
    NUMBERS,
    ROOM,
    Config,
    Static,
    fits,
    misfit,
    row_tile,
    share,
    share_bytes,
)
from pallas_kernels.whole_number import is_whole

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
LONGEST_BYTES = MAX_CLUSTER * (ROOM // 2 // 2048 * 2048)  # a row, for y and d_y are there at once


def scale_softmax(
    x: Float[Array, "*B S"],
    *,
    scale: float | Float[Array, ""] = 1.0,
    mask: Bool[Array, ...] | None = None,
    causal: bool = False,
    axis: int = -1,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B S"]:
    """softmax(scale * x) over `axis`, of what `mask` (True: kept) and `causal` let through.

    The mask broadcasts to x; of it only a last axis of one is spread (and all of a mask of rows so
    short that none can be copied alone, less than 128 numbers). Where the config has stages it is
    copied once, as int8 for the copy engine. With causal, x is [.., T, S] and query t sees keys s
    <= S - T + t: aligned to the end.
    Masked entries are 0, whatever x holds there; a row of masked entries, or at a positive scale of
    -inf, is all 0, and so is its gradient. The scale is a number, or an array with a gradient
    (which XLA computes).
    Dtypes: bfloat16, float16, float32; statistics in float32. The gradient is taken from the result
    as it is stored. An axis other than the last costs a transpose before and after.
    Raises: ValueError for another dtype than a floating one, a mask that is not boolean or does not
    broadcast, a NaN scale, an axis out of range, causal over another axis than the last of two or
    more. NotImplementedError without a Hopper GPU (unless `interpret`), or for rows that are no
    multiple of 16 bytes or longer than LONGEST_BYTES, or a mask over rows of fewer than 16 numbers.
    """
    check(x, scale, mask, causal, axis)
    check_options("scale_softmax", config, Config, interpret=interpret)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    kwargs = {"scale": scale, "mask": mask, "causal": causal, "axis": axis}
    reason = why_not(x, **kwargs, device=device)
    if reason is not None:
        raise NotImplementedError(f"scale_softmax: cannot run this call: {reason}")
    if x.size == 0:
        return x
    moved = jnp.moveaxis(x, axis, -1)
    if mask is not None:
        mask = jnp.moveaxis(mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape), axis, -1)
    queries = moved.shape[-2] if causal else 0
    groups = _groups(moved.shape, mask, queries)
    if mask is not None and not groups[-1][1] and _is_short(moved):
        mask = jnp.broadcast_to(mask, moved.shape)
        groups = tuple((n, True) for n, _ in _groups(moved.shape, None, queries))
    turned, apart = _in_turn(groups, queries, moved.shape[-1], x.dtype.itemsize)
    if config is None or misfit(config, turned, moved.shape[-1], x.dtype.itemsize) is None:
        groups = turned
    else:  # a config whose tiles have rows in their order
        apart = 1
    if config is None:
        config = tuned.lookup("softmax", bucket(x, **kwargs), device, Config)
        if config is None or misfit(config, groups, moved.shape[-1], x.dtype.itemsize):
            config = default_config(x, **kwargs, device=device)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (*mask.shape[:-1], moved.shape[-1]))
        mask = mask.astype(jnp.int8) if config.stages else mask
        mask = mask.reshape(-1, groups[-1][0] if groups[-1][1] else 1, mask.shape[-1])
    static, number = _static(groups, apart, queries, scale, config, device, interpret)
    y = _softmax(static, moved.reshape(-1, moved.shape[-1]), number, mask)
    return jnp.moveaxis(y.reshape(moved.shape), -1, axis)


def scale_softmax_reference(x, *, scale=1.0, mask=None, causal=False, axis=-1):
    """The mathematics in plain JAX, in a form that XLA makes one kernel of."""
    x32, scale = x.astype(jnp.float32), jnp.asarray(scale, jnp.float32)
    keep = (x32 != -jnp.inf) | (scale <= 0)
    if mask is not None:
        mask = mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)
        keep &= jnp.broadcast_to(mask, x.shape)
    if causal:
        t, s = x.shape[-2:]
        keep &= jnp.broadcast_to(jnp.tri(t, s, s - t, dtype=bool), x.shape)
    scores = jnp.where(keep, jnp.where(keep, x32, 0) * scale, -jnp.inf)
    top = jnp.max(jax.lax.stop_gradient(scores), axis, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - jnp.maximum(top, jnp.finfo(jnp.float32).min))
    total = jnp.sum(weights, axis, keepdims=True)  # 0, or 1 and more
    return (weights / jnp.maximum(total, 0.5)).astype(x.dtype)


def scale_softmax_backward(
    y: Float[Array, "*B S"],
    d_y: Float[Array, "*B S"],
    *,
    scale: float | Float[Array, ""] = 1.0,
    interpret: bool = False,
) -> Float[Array, "*B S"]:
    """The gradient to x, from the result and its cotangent, over the last axis.

    What `scale_softmax` has as its gradient; by itself for those who keep y anyway. A mask is not
    needed, for y is 0 there.
    Raises: as `scale_softmax`; ValueError if y and d_y differ in shape or dtype.
    """
    check(y, scale, None, False, -1)
    if (y.shape, y.dtype) != (d_y.shape, d_y.dtype):
        raise ValueError(
            f"scale_softmax: y is {y.dtype}{list(y.shape)}, d_y {d_y.dtype}{list(d_y.shape)}"
        )
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    if (reason := why_not(y, device=device)) is not None:
        raise NotImplementedError(f"scale_softmax: cannot run this call: {reason}")
    if y.size == 0:
        return d_y
    static, number = _static((), 1, 0, scale, Config(), device, interpret)
    flat = (-1, y.shape[-1])
    return _backward(static, y.reshape(flat), number, d_y.reshape(flat)).reshape(y.shape)


def why_not(
    x, *, scale=1.0, mask=None, causal=False, axis=-1, device: Device | None = None
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del scale, causal
    device = device or device_lib.current()
    if reason := device_lib.why_not_hopper(device):
        return reason
    if x.dtype not in DTYPES:
        return f"takes bfloat16, float16 or float32, got {x.dtype}"
    width = x.shape[axis]
    size = width * x.dtype.itemsize
    if reason := device_lib.why_not_copied("rows", size):
        return reason
    if size > LONGEST_BYTES:
        return f"rows of {size} bytes are longer than {LONGEST_BYTES}, what a cluster has on chip"
    if mask is not None and width < ACCESS_BYTES:
        return f"a mask of rows of {width} bytes is too narrow for the copy engine"
    return None


def default_config(x, *, scale=1.0, mask=None, causal=False, axis=-1, device: Device) -> Config:
    """Whole rows of 8 to 16 KB a block, or shares of longer rows (`_default`)."""
    del scale
    shape = [n for i, n in enumerate(x.shape) if i != axis % x.ndim] + [x.shape[axis]]
    if mask is not None:
        sizes = (1,) * (x.ndim - len(mask.shape)) + tuple(mask.shape)
        sizes = [n for i, n in enumerate(sizes) if i != axis % x.ndim] + [sizes[axis]]
        mask = jax.ShapeDtypeStruct(tuple(sizes), jnp.bool_)
    count, width, itemsize = math.prod(shape[:-1]), shape[-1], x.dtype.itemsize
    queries = shape[-2] if causal else 0
    alike = _in_turn(_groups(shape, mask, queries), queries, width, itemsize)[0][-1][0]
    held = itemsize + (mask is not None)
    config = _default(width, count, alike, itemsize, held, 1, device.num_sms)
    if mask is not None or causal or fits(width, itemsize):
        return config
    warpgroups = softmax_lanes.default_warpgroups(width, x.dtype, config.cluster)
    return dataclasses.replace(config, warpgroups=warpgroups)


def bucket(x, *, scale=1.0, mask=None, causal=False, axis=-1) -> str:
    """The key of a tuned row: dtype, rows up to a power of two, width, and what is masked."""
    del scale
    count = x.size // max(x.shape[axis], 1)
    kind = (" mask" if mask is not None else "") + (" causal" if causal else "")
    return f"{x.dtype} {tuned.power_of_two(count)}x{x.shape[axis]}{kind}"


def candidates(x, *, scale=1.0, mask=None, causal=False, axis=-1, device: Device) -> list[Config]:
    """Fewer and more bytes in flight around the default."""
    kwargs = {"scale": scale, "mask": mask, "causal": causal, "axis": axis}
    default = default_config(x, **kwargs, device=device)
    width, itemsize = x.shape[axis], x.dtype.itemsize
    if not fits(width, itemsize):
        held = itemsize + (mask is not None)
        clusters, found = (2, 4, MAX_CLUSTER), []
        for cluster, stages in itertools.product(clusters, (1, 2)):
            config = Config(1, 1, stages, 1, cluster)
            most = _most_blocks(config, width, itemsize, held)
            found += [dataclasses.replace(config, blocks_per_sm=n + 1) for n in range(most)]
        direct = (Config(1, 1, 0, 1, cluster) for cluster in clusters)
        found += [c for c in direct if misfit(c, (), width, itemsize) is None]
        if mask is None and not causal:
            found += [
                dataclasses.replace(default, warpgroups=n)
                for n in softmax_lanes.WARPGROUPS
                if softmax_lanes.takes(width, x.dtype, default.cluster, n)
            ]
        return found
    found = []
    for warps in (1, 4):
        for repeat in sorted({1, 2, 4, default.repeat}):
            tile = row_tile(width, itemsize, Config(repeat, warps), False)
            stage = tile.rows * tile.padded * (itemsize + (mask is not None))
            numbers = tile.rows * tile.padded // 128 if tile.warps[1] == 1 else 0
            if default.stages == 0 and x.size // width % tile.rows == 0:
                found.append(Config(repeat, warps, 0))
            found += [
                Config(repeat, warps, 3, blocks)
                for blocks in (4, 8)
                if blocks * (3 * stage + MARGIN_BYTES) <= SHARED_BYTES and numbers <= 2 * NUMBERS
            ]
    return found


def tuning_calls() -> list[tuned.Call]:
    """The calls that are worth a tuned row: attention scores, and rows as long as a vocabulary."""
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    calls = [
        tuned.Call((struct(shape),), scale_softmax, {"causal": causal})
        for shape, causal in (
            ((32, 512), False),
            ((2, 8, 128, 128), False),
            ((8, 32, 2048, 2048), False),
            ((8, 32, 2048, 2048), True),
            ((8192, 8192), False),
            ((64, 131072), False),
        )
    ]
    return [*calls, tuned.Call((jax.ShapeDtypeStruct((64, 131072), jnp.float32),), scale_softmax)]


def _default(
    width: int,
    count: int,
    alike: int,
    itemsize: int,
    held_bytes: int,
    arrays: int,
    num_sms: int,
) -> Config:
    """For `count` rows, of which the mask treats `alike` in turn alike.

    `held_bytes` of each number, in `arrays` arrays and a mask, are on chip.
    """
    if fits(width, itemsize):
        # A warp that has a row alone sums it without the others; but there must be rows for all
        # warps, registers for a row each, and room for several blocks.
        alone = width * itemsize * arrays <= 4096 and count >= WARPS * num_sms
        config = Config(warps=1 if alone else 4)
        tile = row_tile(width, itemsize, config, False)
        numbers = tile.rows * tile.padded
        repeat = max(1, 8192 // (numbers * itemsize))
        if tile.warps[1] == 1:  # all rows of a tile are in registers at once
            repeat = max(1, min(repeat, NUMBERS * THREADS // (numbers * arrays)))
        while repeat > 1 and tile.rows * repeat * num_sms * 4 > count:
            repeat //= 2  # rows enough for all blocks first
        # Rows that fill the threads, and are read once, need no copy engine: blocks that come and
        # go keep more loads in flight (RMSNorm of 8192 x 8192 bfloat16, H200: 65.9 us against 68.4)
        direct = repeat if tile.warps[1] == 1 else 1
        while direct > 1 and alike % (tile.rows * direct):
            direct //= 2
        whole = width == tile.padded and alike % (tile.rows * direct) == 0
        if whole and len(tile.groups(NUMBERS // arrays)[0]) == 1:
            return Config(direct, config.warps, 0)
        stage = repeat * numbers * held_bytes
        stages = max(1, min(3, ROOM // stage))
        return Config(repeat, config.warps, stages, max(1, min(8, ROOM // (stages * stage + 2048))))
    # The least shares are the most blocks, whose arithmetic hides each other's copies. H200, us, 64
    # and 1024 rows of 131072 in bfloat16, none by lanes: forward without stages 13.8 and 141, with
    # one 13.2 and 195; backward without 21.4 and 244, with one and two blocks a multiprocessor 18.8
    # and 210, with one and three blocks 15.8 and 248.
    config = Config(stages=1, blocks_per_sm=1, cluster=MAX_CLUSTER)
    most = _most_blocks(config, width, itemsize, held_bytes)
    direct = dataclasses.replace(config, stages=0)
    in_registers = arrays * share(width, itemsize, MAX_CLUSTER) <= KEPT * THREADS
    if misfit(direct, (), width, itemsize) is None and (in_registers or most < arrays):
        return direct
    wanted = 2 if arrays == 2 and count > 2 * num_sms else 3
    return dataclasses.replace(config, blocks_per_sm=max(1, min(wanted, most)))


def _most_blocks(config: Config, width: int, itemsize: int, held_bytes: int) -> int:
    """That fit on a multiprocessor side by side, four at most."""
    size_bytes = share_bytes(config, width, itemsize, held_bytes) + MARGIN_BYTES
    return min(4, SHARED_BYTES // size_bytes)


def _static(groups, apart, queries, scale, config, device, interpret) -> tuple[Static, Any]:
    """What is known when compiling, and the scale as an array [1] where it is not."""
    known = float(scale) if isinstance(scale, Real) else None
    number = None if known is not None else jnp.asarray(scale, jnp.float32).reshape(1)
    return Static(groups, apart, queries, known, config, device.num_sms, interpret), number


def check(x, scale, mask, causal, axis) -> None:
    """Refuses what no implementation of scale-softmax can take."""
    check_arrays("scale_softmax", x=x, mask=mask)
    check_flags("scale_softmax", causal=causal)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"scale_softmax: x is {x.dtype}; it must be floating point")
    if not is_whole(axis):
        raise ValueError(f"scale_softmax: axis must be an integer, got {axis!r:.60}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"scale_softmax: axis {axis} is out of range for x {x.shape}")
    if causal and (x.ndim < 2 or axis not in (-1, x.ndim - 1)):
        raise ValueError(
            f"scale_softmax: causal is over the last two axes, [.., T, S], but x is {x.shape} and "
            f"the axis {axis}"
        )
    check_scale("scale_softmax", scale)
    if mask is None:
        return
    if mask.dtype != jnp.bool_:
        raise ValueError(
            f"scale_softmax: the mask is {mask.dtype}; it must be boolean (True: kept)"
        )
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.ndim > x.ndim or any(m not in (1, n) for m, n in sizes):
        raise ValueError(f"scale_softmax: mask {mask.shape} does not broadcast to x {x.shape}")


def _is_short(x) -> bool:
    """Whether one row of a mask has fewer bytes on chip than a copy by all threads must have."""
    width, itemsize = x.shape[-1], x.dtype.itemsize
    return fits(width, itemsize) and bool(
        row_tile(width, itemsize, Config(), False).padded % THREADS
    )


def _groups(shape: Sequence[int], mask, queries: int) -> tuple[tuple[int, bool], ...]:
    """The groups of `Static`; of the mask, which has as many axes as x or is None, the shape."""
    has = [False] * len(shape) if mask is None else [n > 1 for n in mask.shape]
    groups: list[tuple[int, bool]] = []
    for i, n in enumerate(shape[:-1]):
        alone = queries and i == len(shape) - 2  # a tile of causal rows keeps to one [T, S]
        if groups and not alone and (n == 1 or groups[-1][1] == has[i]):
            groups[-1] = (groups[-1][0] * n, groups[-1][1])
        elif n > 1 or alone:
            groups.append((n, has[i]))
    return tuple(groups) or ((1, False),)


def _in_turn(
    groups: tuple[tuple[int, bool], ...], queries: int, width: int, itemsize: int
) -> tuple[tuple[tuple[int, bool], ...], int]:
    """The groups, and how far apart in x the rows of the last are.

    Where the mask has the last group and not the one before it (queries, and heads), they change
    places: the rows of a tile then have one row of the mask in common, and it is read once.
    """
    if len(groups) < 2 or queries or not fits(width, itemsize):
        return groups, 1
    (count, common), (apart, own) = groups[-2:]
    together = row_tile(width, itemsize, Config(), False).rows
    if not own or common or together == 1 or count % together:
        return groups, 1
    return (*groups[:-2], groups[-1], groups[-2]), apart


def scale_gradient(x, y, d_y):
    """The scale's gradient, [1]; XLA leaves it out of the program where nobody asks for it."""
    p = y.astype(jnp.float32)
    d, x32 = (jnp.where(p == 0, 0, z.astype(jnp.float32)) for z in (d_y, x))
    d_scores = p * (d - jnp.sum(p * d, axis=-1, keepdims=True))
    return jnp.sum(d_scores * x32).reshape(1)


def _backward(static: Static, y, number, d_y):
    """The gradient to rows [M, S], which are one group: y is 0 where a mask was."""
    (count, width), itemsize = y.shape, y.dtype.itemsize
    config = _default(width, count, count, itemsize, 2 * itemsize, 2, static.num_sms)
    static = dataclasses.replace(
        static, groups=((count, False),), apart=1, queries=0, config=config
    )
    return softmax_kernel.backward(static, y, number, d_y)


def _forward(static: Static, x, number, mask):
    """The softmax of rows [M, S]."""
    width, scale = x.shape[-1], static.scale
    factor = softmax_kernel.left_to_exponent(scale)
    how = {"cluster": static.config.cluster, "warpgroups": static.config.warpgroups}
    seen = mask is None and not static.queries  # every number
    taken = (
        seen and not fits(width, x.dtype.itemsize) and softmax_lanes.takes(width, x.dtype, **how)
    )
    if scale is None or factor is None or not taken:
        return softmax_kernel.forward(static, x, number, mask)
    return softmax_lanes.softmax_of_rows(
        x,
        factor=factor,
        **how,
        plain=functools.partial(scale_softmax_reference, scale=scale),
        interpret=static.interpret,
    )


def _softmax_fwd(static, x, number, mask):
    y = _forward(static, x, number, mask)
    return y, (None if number is None else x, y, number)


def _softmax_bwd(static, saved, d_y):
    x, y, number = saved
    d_x = _backward(static, y, number, d_y)
    return d_x, None if number is None else scale_gradient(x, y, d_y), None


_softmax = jax.custom_vjp(
    lambda static, x, number, mask: _softmax_fwd(static, x, number, mask)[0],
    nondiff_argnums=(0,),
)
_softmax.defvjp(_softmax_fwd, _softmax_bwd)
_softmax = jax.jit(_softmax, static_argnums=0)  # calls alike share one compiled kernel
