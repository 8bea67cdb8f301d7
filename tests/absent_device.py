"""GPUs that this machine need not have."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import _compat
from pallas_kernels.device import Device

H200 = Device("gpu", "NVIDIA H200", 9.0, 132)


@contextmanager
def absent(
    name: str = "NVIDIA H200", num_cores: int | None = 132, platform: str = "gpu"
) -> Iterator[None]:
    """Sets an abstract mesh that names the device, as if any JAX lowered kernels for it."""
    device = AbstractDevice(device_kind=name, num_cores=num_cores, platform=platform)
    mesh = AbstractMesh((), (), abstract_device=device)
    with mock.patch.object(_compat, "LOWERS", True), jax.sharding.use_abstract_mesh(mesh):
        yield
