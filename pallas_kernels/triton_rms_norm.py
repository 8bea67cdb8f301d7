"""RMSNorm in official Triton, for GPUs without a Mosaic kernel: Ampere, Ada, consumer Blackwell.

The same call, mathematics and rounding points as `pallas_kernels.rms_norm`. A program of the
forward pass owns `rows` whole rows, which stay in registers between the one read and the one
write. The backward pass reads x and dy, takes the mean anew, and each of its programs sums its
share of d_weight; XLA adds the shares in a fixed order.
Source: Zhang and Sennrich 2019, arXiv:1910.07467.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _triton_call, tuned
from pallas_kernels import device as device_lib
from pallas_kernels.device import Device
from pallas_kernels.options import check_options
from pallas_kernels.rms_norm import check

MAX_BYTES = 32768  # a row of the backward pass fits the registers of 16 warps


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows a program and warps that share them; for the backward pass too, with programs an SM and
    stages: tiles that a program has in flight or in hand.
    """

    rows: int
    warps: int
    backward_rows: int
    backward_warps: int
    backward_programs: int
    backward_stages: int


def rms_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    residual: Float[Array, "*B D"] | None = None,
    zero_centered: bool = False,
    config: Config | None = None,
) -> Any:
    """As `pallas_kernels.rms_norm`, whose `rms_norm_reference` it computes.

    Raises: ValueError as there. NotImplementedError without jax-triton or an NVIDIA GPU of compute
    capability 8.0, for another dtype than bfloat16, float16 and float32, or too wide a row.
    """
    check(x, weight, eps, residual, zero_centered)
    check_options("rms_norm", config, Config)
    device = device_lib.current()
    kwargs = {"eps": eps, "residual": residual, "zero_centered": zero_centered}
    reason = why_not(x, weight, **kwargs, device=device)
    if reason is not None:
        raise NotImplementedError(f"rms_norm: cannot run this call in Triton: {reason}")
    if x.size == 0:
        return x if residual is None else (x, residual)
    config = (
        config
        or tuned.lookup("triton_rms_norm", bucket(x, weight, **kwargs), device, Config)
        or default_config(x, weight, **kwargs, device=device)
    )
    static = _Static(float(eps), zero_centered, config, device)
    flat = x.reshape(-1, x.shape[-1])
    if residual is None:
        return _norm(static, flat, weight).reshape(x.shape)
    y, total = _norm_residual(static, flat, residual.reshape(flat.shape), weight)
    return y.reshape(x.shape), total.reshape(x.shape)


def why_not(
    x, weight, *, eps, residual=None, zero_centered=False, device: Device | None = None
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del eps, residual, zero_centered
    device = device or device_lib.current()
    if reason := _triton_call.why_not(device, x=x, weight=weight):
        return reason
    if (size := x.shape[-1] * x.dtype.itemsize) > MAX_BYTES:
        return f"rows of {size} bytes are longer than {MAX_BYTES}, which the registers hold"
    return None


def default_config(x, weight, *, eps, residual=None, zero_centered=False, device: Device) -> Config:
    """From the width alone, but for rows so few that an SM would be idle."""
    del weight, eps, residual, zero_centered
    block = tuned.power_of_two(x.shape[-1])
    rows = _triton_call.rows_for(x.size // max(x.shape[-1], 1), block, device)
    warps = _triton_call.warps_for(rows * block)
    # Four numbers live for each of the row, so half as many a thread
    backward_warps = min(2 * warps, 16)
    # As many warps on an SM as 128 registers a thread allow
    programs = max(1, 16 // backward_warps)
    # A row that is read twice a tile, for want of registers, comes from the cache
    return Config(rows, warps, rows, backward_warps, programs, 2 if block <= 8192 else 1)


def bucket(x, weight, *, eps, residual=None, zero_centered=False) -> str:
    """The key of a tuned row: dtype, width, and rows up to a power of two."""
    del weight, eps, zero_centered
    rows = tuned.power_of_two(x.size // max(x.shape[-1], 1))
    kind = "" if residual is None else " residual"
    return f"{x.dtype} {rows}x{x.shape[-1]}{kind}"


def candidates(
    x, weight, *, eps, residual=None, zero_centered=False, device: Device
) -> list[Config]:
    """The default with other rows a program, warps, or programs an SM."""
    kwargs = {"eps": eps, "residual": residual, "zero_centered": zero_centered}
    default = default_config(x, weight, **kwargs, device=device)
    found = [default]
    for by in (0.5, 2):
        rows, warps = max(1, int(default.rows * by)), max(1, int(default.warps * by))
        backward_warps = max(1, int(default.backward_warps * by))
        found += [
            dataclasses.replace(default, rows=rows, backward_rows=rows),
            dataclasses.replace(default, warps=min(warps, 32)),
            dataclasses.replace(default, backward_warps=min(backward_warps, 32)),
        ]
    found += [dataclasses.replace(default, backward_programs=n) for n in (1, 2, 4, 8)]
    found += [dataclasses.replace(default, backward_stages=n) for n in (1, 2, 3)]
    return list(dict.fromkeys(found))


def tuning_calls() -> list[tuned.Call]:
    """Forward and backward at the widths of Qwen2.5-0.5B, Phi-3-mini and Llama-3.1-8B."""
    return [
        tuned.Call(
            (
                jax.ShapeDtypeStruct((count, width), jnp.bfloat16),
                jax.ShapeDtypeStruct((width,), jnp.bfloat16),
            ),
            _forward_and_backward,
            {"eps": 1e-5},
        )
        for width in (896, 3072, 4096)
        for count in (64, 8192)
    ]


def _forward_and_backward(x, weight, **keywords):
    y, pull = jax.vjp(functools.partial(rms_norm, **keywords), x, weight)
    return y, *pull(y)


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a kernel is compiled for."""

    eps: float
    zero_centered: bool
    config: Config
    device: Device

    def constants(self, width: int) -> dict[str, Any]:
        return {
            "WIDTH": width,
            "BLOCK": tuned.power_of_two(width),
            "EPS": self.eps,
            "ZERO_CENTERED": self.zero_centered,
        }


def _forward(static: _Static, x, weight, residual=None):
    """y; with a residual (y, x + residual)."""
    count, width = x.shape
    config = static.config
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _triton_call.call(
        "rms_norm" if residual is None else "rms_norm_residual",
        *([x] if residual is None else [x, residual]),
        weight,
        count,
        out_type=out if residual is None else (out, out),
        programs=-(-count // config.rows),
        warps=config.warps,
        device=static.device,
        ROWS=config.rows,
        **static.constants(width),
    )


def _backward(static: _Static, x, weight, d_y, d_total=None):
    """d_x and d_weight; x is the sum, and d_total its cotangent, if there was a residual."""
    count, width = x.shape
    config = static.config
    tiles = -(-count // config.backward_rows)
    programs = min(tiles, max(static.device.num_sms, 1) * config.backward_programs)
    d_x, d_weight = _triton_call.call(
        "rms_norm_backward" if d_total is None else "rms_norm_residual_backward",
        *([x, weight, d_y] if d_total is None else [x, weight, d_y, d_total]),
        count,
        out_type=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((programs, width), jnp.float32),
        ),
        programs=programs,
        warps=config.backward_warps,
        device=static.device,
        ROWS=config.backward_rows,
        PROGRAMS=programs,
        STAGES=config.backward_stages,
        **static.constants(width),
    )
    return d_x, jnp.sum(d_weight, axis=0).astype(weight.dtype)


def _norm_fwd(static, x, weight):
    return _forward(static, x, weight), (x, weight)


def _norm_bwd(static, saved, d_y):
    x, weight = saved
    return _backward(static, x, weight, d_y)


_norm = jax.custom_vjp(lambda static, x, weight: _forward(static, x, weight), nondiff_argnums=(0,))
_norm.defvjp(_norm_fwd, _norm_bwd)


def _norm_residual_fwd(static, x, residual, weight):
    y, total = _forward(static, x, weight, residual)
    return (y, total), (total, weight)


def _norm_residual_bwd(static, saved, cotangents):
    (total, weight), (d_y, d_total) = saved, cotangents
    d_x, d_weight = _backward(static, total, weight, d_y, d_total)
    return d_x, d_x, d_weight


_norm_residual = jax.custom_vjp(
    lambda static, x, residual, weight: _forward(static, x, weight, residual),
    nondiff_argnums=(0,),
)
_norm_residual.defvjp(_norm_residual_fwd, _norm_residual_bwd)
