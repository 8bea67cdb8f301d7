"""What a kernel must know of the device it will run on, as plain data.

A program may be compiled for a GPU that is absent: the device that JAX's abstract mesh names goes
before the one that is here. Nothing is read at import and nothing is kept.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax

from pallas_kernels import _compat

# Of a Hopper multiprocessor, and of the copy engine (TMA) in it
ACCESS_BYTES = 16  # the widest access of a thread, and the grain of the copy engine
WARPS, LANES = 4, 32  # of a warpgroup
THREADS = WARPS * LANES  # likewise
MAX_BOX = 256  # numbers a dimension that one copy takes
REGISTERS, THREAD_REGISTERS = 65536, 255  # of 32 bits; a thread has so many at most
SHARED_BYTES = 227 * 1024  # of shared memory that blocks may have
LOG2E = math.log2(math.e)  # kernels have powers of two where the mathematics has those of e

# An abstract device tells its name but not its capability.
# Source: https://developer.nvidia.com/cuda-gpus
_CAPABILITIES = (
    (r"\bG?B300\b", 10.3),
    (r"\bG?B(100|200)\b", 10.0),
    (r"RTX PRO \d+ Blackwell|RTX 50\d\d", 12.0),
    (r"\bG?H(20|100|200|800)\b", 9.0),
    (r"\bL(4|20|40S?)\b|Ada Generation|RTX 40\d\d", 8.9),
    (r"\bA(2|10G?|16|40)\b|RTX A\d+|RTX 30\d\d", 8.6),
    (r"\bA(30|100|800)\b", 8.0),
    (r"\bT4\b|RTX 20\d\d|Quadro RTX", 7.5),
    (r"\bV100\b", 7.0),
)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device; a number that is not known, or has no meaning for the platform, is 0.

    platform is "cpu", "gpu" or another name of JAX's; capability is CUDA's compute capability (9.0
    for an H200). lowers: whether this JAX makes programs of Hopper's kernels for it.
    """

    platform: str
    name: str = ""
    capability: float = 0.0
    num_sms: int = 0
    lowers: bool = True


# What kernels are told in the interpreter: a Hopper GPU so small that each block has several tiles
INTERPRETED = Device("gpu", "NVIDIA H200", 9.0, 2)
# Kernels that the interpreter replaces by one op after the other divide whole layers among blocks,
# and take those of real models only with as many multiprocessors as there are
INTERPRETED_OP_BY_OP = dataclasses.replace(INTERPRETED, num_sms=132)


def why_not_hopper(device: Device) -> str | None:
    """What keeps a kernel that uses Hopper's copy engine and tensor cores from the device."""
    if device.platform != "gpu":
        return f"needs an NVIDIA GPU, found {device.name or device.platform}"
    if not 9.0 <= device.capability < 10.0:
        found = device.capability or "an unknown one"
        return f"needs a Hopper GPU (compute capability 9.0), found {found} ({device.name})"
    if not device.lowers:
        return _compat.why_not_lowered()
    if device.num_sms < 1:
        return f"needs to know how many multiprocessors {device.name} has; the mesh does not say"
    return None


def why_not_interpreted() -> str | None:
    """What keeps kernels that cast the layouts of registers from the interpreter."""
    if _compat.INTERPRETS_LAYOUTS:
        return None
    return "needs jax 0.11 (Python 3.12), whose interpreter casts layouts"


def why_not_copied(what: str, size_bytes: int) -> str | None:
    """What keeps the copy engine from pieces of `size_bytes` bytes; `what` says it: "rows"."""
    if size_bytes % ACCESS_BYTES == 0:
        return None
    return (
        f"{what} of {size_bytes} bytes are no multiple of {ACCESS_BYTES} bytes, which the copy "
        "engine needs"
    )


def current() -> Device:
    """The device of the abstract mesh, if one is set and names one; else JAX's default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None or isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    if abstract is None or abstract.device_kind == default.device_kind:
        return _of(default)  # the device itself knows more than its name
    return Device(
        abstract.platform,
        abstract.device_kind,
        _capability_by_name(abstract.device_kind),
        abstract.num_cores or 0,
        _compat.LOWERS,
    )


def _of(device: Any) -> Device:
    if device.platform != "gpu":
        return Device(device.platform, device.device_kind)
    capability = str(
        getattr(device, "compute_capability", "")
    )  # AMD has names here, such as gfx942
    return Device(
        device.platform,
        device.device_kind,
        float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0,
        getattr(device, "core_count", 0),
        _compat.LOWERS,
    )


def _capability_by_name(name: str) -> float:
    return next((number for pattern, number in _CAPABILITIES if re.search(pattern, name)), 0.0)
