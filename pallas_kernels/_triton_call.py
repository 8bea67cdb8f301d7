"""Calls a kernel of `_triton_kernels` through jax-triton, which neither needs to be there.

Nothing of Triton is imported before a kernel is called. The GPU that it is compiled for is the
`Device` of the call, so a program for an absent GPU can be lowered.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from typing import Any

import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.device import Device

# Sums and products fuse, as XLA lets them. The newest PTX of Triton 3.9 is more than the CUDA that
# JAX brings can read; 8.8 is that of CUDA 12.9.
BACKEND_OPTIONS = {"enable_fp_fusion": True, "ptx_version": 88}

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def call(
    kernel: str,
    *arguments: Any,
    out_type: Any,
    programs: int,
    warps: int,
    device: Device,
    **constants: Any,
) -> Any:
    """What `programs` programs of `kernel` write; arguments are arrays and numbers."""
    from pallas_kernels import _triton_kernels

    jax_triton = load()
    options: dict[str, Any] = {"out_type": out_type, "backend_options": BACKEND_OPTIONS}
    if is_old(jax_triton):
        options = {"out_shape": out_type, "enable_fp_fusion": BACKEND_OPTIONS["enable_fp_fusion"]}
    return jax_triton.triton_call(
        *arguments,
        kernel=getattr(_triton_kernels, kernel),
        name=kernel,
        grid=(programs,),
        num_warps=warps,
        compute_capability=round(10 * device.capability),
        **options,
        **constants,
    )


def load() -> Any:
    """jax_triton, without what its import does to TRITON_CACHE_DIR.

    Left empty, as version 0.3 leaves it, no other user of Triton in the process can compile.
    """
    before = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton  # pyright: ignore[reportMissingImports]

    if before is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton


def is_old(jax_triton: Any) -> bool:
    """Before jax-triton 0.4, for Python 3.11 or Triton 3.6; ends with these."""
    return "out_shape" in inspect.signature(jax_triton.triton_call).parameters


def why_not(device: Device, **arrays: Any) -> str | None:
    """What keeps any kernel in Triton from a call with these arrays."""
    missing = [name for name in ("jax_triton", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported: pip install 'jax-triton>=0.3.1'"
    if device.platform != "gpu":
        return f"needs an NVIDIA GPU, found {device.name or device.platform}"
    if device.capability < 8.0:
        found = device.capability or "an unknown one"
        return f"needs compute capability 8.0 or newer, found {found} ({device.name})"
    for name, array in arrays.items():
        if array.dtype not in DTYPES:
            return f"takes bfloat16, float16 or float32, got {name} {array.dtype}"
    return None


def warps_for(numbers: int) -> int:
    """Warps for a tile: 8 numbers a thread make accesses of 16 bytes; 16 hide their latency."""
    return min(max(tuned.power_of_two(numbers) // (32 * 16), 1), 16)


def rows_for(count: int, block: int, device: Device) -> int:
    """Rows a program where rows are narrow: 2048 numbers, but not so many that an SM is idle."""
    rows = max(1, 2048 // block)
    while rows > 1 and count < rows * max(device.num_sms, 1):
        rows //= 2
    return rows
