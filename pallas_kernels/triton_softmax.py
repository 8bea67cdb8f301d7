"""Scale, mask and softmax in official Triton, for GPUs without a Mosaic kernel.

The same call and mathematics as `pallas_kernels.scale_softmax`. A row of at most `Config.block`
numbers is read once, stays in registers and is written once. A longer row is read twice: once for
its maximum and sum, once for what is written; where such rows are few, each is shared by several
programs, and the two passes are two kernels. Causal rows are read only as far as they see, and a
mask is read as it is stored. The backward pass works on the saved result in the same two ways.
Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (the online sum).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import _triton_call, tuned
from pallas_kernels import device as device_lib
from pallas_kernels.device import Device
from pallas_kernels.options import check_options
from pallas_kernels.softmax import check, scale_gradient

MAX_WIDTH = 2**30  # columns are counted in 32 bits, those of a block past the end too
MAX_ROWS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Config:
    """How rows are shared out: changes the speed, never the result.

    block: numbers of a row that a program has at once; at least a row, or rows is 1. rows: of a
    program. warps: of a program. parts: programs that share a row longer than a block.
    """

    block: int
    rows: int
    warps: int
    parts: int = 1


def scale_softmax(
    x: Float[Array, "*B S"],
    *,
    scale: float | Float[Array, ""] = 1.0,
    mask: Bool[Array, ...] | None = None,
    causal: bool = False,
    axis: int = -1,
    config: Config | None = None,
) -> Float[Array, "*B S"]:
    """As `pallas_kernels.scale_softmax`, whose `scale_softmax_reference` it computes.

    Raises: ValueError as there. NotImplementedError without jax-triton or an NVIDIA GPU of compute
    capability 8.0, or for another dtype than bfloat16, float16 and float32.
    """
    check(x, scale, mask, causal, axis)
    check_options("scale_softmax", config, Config)
    device = device_lib.current()
    kwargs = {"scale": scale, "mask": mask, "causal": causal, "axis": axis}
    reason = why_not(x, **kwargs, device=device)
    if reason is not None:
        raise NotImplementedError(f"scale_softmax: cannot run this call in Triton: {reason}")
    if x.size == 0:
        return x
    config = (
        config
        or tuned.lookup("triton_softmax", bucket(x, **kwargs), device, Config)
        or default_config(x, **kwargs, device=device)
    )
    width = x.shape[axis]
    if config.block < width and config.rows != 1:
        raise ValueError(
            f"scale_softmax: {config} has {config.rows} rows a program, but a block that is "
            f"shorter than a row of {width}"
        )
    if mask is not None:
        mask = jnp.moveaxis(mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape), axis, -1)
    moved = jnp.moveaxis(x, axis, -1)
    steps, mask = _flat_mask(moved.shape, mask)
    learns = isinstance(scale, jax.Array)  # a traced one too
    static = _Static(steps, x.shape[-2] if causal else 0, learns, config, device)
    number = jnp.asarray(scale, jnp.float32).reshape(1)
    y = _softmax(static, moved.reshape(-1, width), number, mask)
    return jnp.moveaxis(y.reshape(moved.shape), -1, axis)


def why_not(
    x, *, scale=1.0, mask=None, causal=False, axis=-1, device: Device | None = None
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del scale, mask, causal
    if reason := _triton_call.why_not(device or device_lib.current(), x=x):
        return reason
    width = x.shape[axis]
    if width > MAX_WIDTH:
        return f"rows of {width} numbers are longer than {MAX_WIDTH}"
    if x.size > MAX_ROWS * width:
        return f"{x.size // width} rows are more than {MAX_ROWS}"
    return None


def default_config(x, *, scale=1.0, mask=None, causal=False, axis=-1, device: Device) -> Config:
    """From the width alone, but for rows so few that an SM would be idle."""
    del scale, mask, causal
    width, sms = x.shape[axis], max(device.num_sms, 1)
    count = x.size // max(width, 1)
    block = tuned.power_of_two(width)
    if block <= 16384:  # 32 numbers a thread of 16 warps
        rows = _triton_call.rows_for(count, block, device)
        return Config(block, rows, _triton_call.warps_for(rows * block))
    # A row has a program to itself if there are rows for every SM: its second reading then comes
    # from the L2 cache. Fewer rows are cut until an SM has 2 to 4 programs; the statistics of a
    # power of two of parts are read at once.
    block = 4096
    while block > 1024 and count * -(-width // block) < 2 * sms:
        block //= 2
    parts = tuned.power_of_two(-(-4 * sms // count)) if count < sms else 1
    return Config(block, 1, _triton_call.warps_for(block), min(parts, -(-width // block)))


def bucket(x, *, scale=1.0, mask=None, causal=False, axis=-1) -> str:
    """The key of a tuned row: dtype, rows up to a power of two, width, and what is masked."""
    del scale
    count = tuned.power_of_two(x.size // max(x.shape[axis], 1))
    kind = (" mask" if mask is not None else "") + (" causal" if causal else "")
    return f"{x.dtype} {count}x{x.shape[axis]}{kind}"


def candidates(x, *, scale=1.0, mask=None, causal=False, axis=-1, device: Device) -> list[Config]:
    """Whole rows where they fit, and blocks of a longer row, alone or shared."""
    kwargs = {"scale": scale, "mask": mask, "causal": causal, "axis": axis}
    default = default_config(x, **kwargs, device=device)
    width = x.shape[axis]
    block = tuned.power_of_two(width)
    found = [default]
    if block <= 32768:
        for rows in (1, 2, 4, 8, 16):
            for warps in (1, 2, 4, 8, 16, 32):
                if rows in (1, default.rows) or 4 <= rows * block // (32 * warps) <= 32:
                    found.append(Config(block, rows, warps))
    if block > 8192:
        for size in (2048, 4096, 8192):
            for parts in (1, 2, 4, 8, 16, 32):
                if parts * size < 2 * width:
                    found += [Config(size, 1, warps, parts) for warps in (4, 8, 16)]
    return list(dict.fromkeys(found))


def tuning_calls() -> list[tuned.Call]:
    """Attention scores, and rows as long as a vocabulary."""
    return [
        tuned.Call(
            (jax.ShapeDtypeStruct(shape, jnp.bfloat16),), _forward_and_backward, {"causal": causal}
        )
        for shape, causal in (
            ((32, 512), False),
            ((2, 8, 128, 128), False),
            ((8, 32, 2048, 2048), False),
            ((8, 32, 2048, 2048), True),
            ((64, 131072), False),
            ((1024, 131072), False),
        )
    ]


def _forward_and_backward(x, **keywords):
    y, pull = jax.vjp(functools.partial(scale_softmax, **keywords), x)
    return y, *pull(y)


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a kernel is compiled for.

    steps: of `_flat_mask`. queries: the T of a causal [.., T, S], else 0. learns_scale: the scale
    is an array, and so has a gradient.
    """

    steps: tuple[int, ...] | None
    queries: int
    learns_scale: bool
    config: Config
    device: Device

    def mask_constants(self) -> dict[str, Any]:
        names = ("OUTER", "MIDDLE", "INNER", "N_MIDDLE", "N_INNER", "COLUMN")
        steps = self.steps or (0, 0, 0, 1, 1, 0)
        return {"MASKED": self.steps is not None, **dict(zip(names, steps, strict=True))}


def _flat_mask(shape: Sequence[int], mask) -> tuple[tuple[int, ...] | None, Any]:
    """How the kernels find a row's numbers in the mask, and the mask as one axis.

    The steps are OUTER, MIDDLE, INNER, N_MIDDLE, N_INNER and COLUMN of `_triton_kernels`: those of
    three groups of axes that the mask has, or lacks. A mask that would need more is spread.
    """
    if mask is None:
        return None, None
    has = [m == n for m, n in zip(mask.shape[:-1], shape[:-1], strict=True) if n > 1]
    if len(list(itertools.groupby(has))) > 3:
        mask = jnp.broadcast_to(mask, (*shape[:-1], mask.shape[-1]))
    groups: list[tuple[int, int]] = []  # from the right: rows, and the step from one to the next
    step = mask.shape[-1]
    for m, n in zip(reversed(mask.shape[:-1]), reversed(shape[:-1]), strict=True):
        if groups and (groups[-1][1] > 0) == (m == n) and n > 1:
            groups[-1] = (groups[-1][0] * n, groups[-1][1])
        elif n > 1:
            groups.append((n, step if m == n else 0))
        step *= m
    groups += [(1, 0)] * (3 - len(groups))
    (n_inner, inner), (n_middle, middle), (_, outer) = groups
    return (outer, middle, inner, n_middle, n_inner, int(mask.shape[-1] > 1)), mask.reshape(-1)


def _parts(config: Config, width: int) -> dict[str, int]:
    """A row in parts of whole blocks, none of them empty."""
    part = -(-width // (config.parts * config.block)) * config.block
    return {"PART": part, "PARTS": -(-width // part)}


def _call(static: _Static, width: int, **constants: Any) -> Callable[..., Any]:
    """Of any of the kernels, for rows of that width."""
    return functools.partial(
        _triton_call.call,
        warps=static.config.warps,
        device=static.device,
        WIDTH=width,
        BLOCK=static.config.block,
        QUERIES=static.queries,
        **constants,
    )


def _forward(static: _Static, x, scale, mask):
    count, width = x.shape
    config = static.config
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = _call(static, width, **static.mask_constants())
    arrays = (x, scale, x if mask is None else mask)  # without a mask, a pointer that is not used
    if config.parts == 1 or config.block >= width:
        return call(
            "scale_softmax",
            *(*arrays, count),
            out_type=out,
            programs=-(-count // config.rows),
            ROWS=config.rows,
        )
    parts = _parts(config, width)
    programs = count * parts["PARTS"]
    one = jax.ShapeDtypeStruct((programs,), jnp.float32)
    statistics = call(
        "scale_softmax_statistics",
        *(*arrays, count),
        out_type=(one, one),
        programs=programs,
        **parts,
    )
    return call(
        "scale_softmax_write",
        *(*arrays, *statistics, count),
        out_type=out,
        programs=programs,
        ALL_PARTS=tuned.power_of_two(parts["PARTS"]),
        **parts,
    )


def _backward(static: _Static, y, scale, d_y):
    count, width = y.shape
    config = static.config
    out = jax.ShapeDtypeStruct(y.shape, y.dtype)
    call = _call(static, width)
    if config.parts == 1 or config.block >= width:
        return call(
            "scale_softmax_backward",
            *(y, d_y, scale, count),
            out_type=out,
            programs=-(-count // config.rows),
            ROWS=config.rows,
        )
    parts = _parts(config, width)
    programs = count * parts["PARTS"]
    inner = call(
        "scale_softmax_backward_statistics",
        *(y, d_y, count),
        out_type=jax.ShapeDtypeStruct((programs,), jnp.float32),
        programs=programs,
        **parts,
    )
    return call(
        "scale_softmax_backward_write",
        *(y, d_y, scale, inner, count),
        out_type=out,
        programs=programs,
        ALL_PARTS=tuned.power_of_two(parts["PARTS"]),
        **parts,
    )


def _softmax_fwd(static, x, scale, mask):
    y = _forward(static, x, scale, mask)
    return y, (y, scale, x if static.learns_scale else None)


def _softmax_bwd(static, saved, d_y):
    y, scale, x = saved
    d_scale = jnp.zeros_like(scale) if x is None else scale_gradient(x, y, d_y)
    return _backward(static, y, scale, d_y), d_scale, None


_softmax = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_softmax.defvjp(_softmax_fwd, _softmax_bwd)
