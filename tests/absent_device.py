"""GPUs that this machine need not have."""

from contextlib import AbstractContextManager

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.device import Device

H200 = Device("gpu", "NVIDIA H200", 9.0, 132)


def absent(
    name: str = "NVIDIA H200", num_cores: int | None = 132, platform: str = "gpu"
) -> AbstractContextManager[object]:
    """Sets an abstract mesh that names the device."""
    device = AbstractDevice(device_kind=name, num_cores=num_cores, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
