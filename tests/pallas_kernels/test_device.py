"""Device facts: read from the abstract mesh first, then from the device that is here."""

import re
from unittest import mock

import jax
import pytest
from absent_device import absent
from jax.sharding import AbstractMesh

from jaxllm import ops
from pallas_kernels import _compat, device
from pallas_kernels.device import Device


def test_default_device_is_described():
    with jax.default_device(jax.devices("cpu")[0]):
        assert device.current() == Device("cpu", "cpu")
    with jax.default_device("cpu"):
        assert device.current() == Device("cpu", "cpu")


def test_abstract_mesh_goes_first_and_is_not_remembered():
    before = device.current()
    with absent("NVIDIA H200"):
        assert device.current() == Device("gpu", "NVIDIA H200", capability=9.0, num_sms=132)
        with absent("NVIDIA A100-SXM4-80GB", 108):
            assert device.current() == Device("gpu", "NVIDIA A100-SXM4-80GB", 8.0, 108)
        assert device.current().name == "NVIDIA H200"
    assert device.current() == before


def test_a_jax_that_does_not_lower_the_kernels_is_told():
    """All that asks for a Hopper GPU then says so, and "auto" takes XLA."""
    with absent("NVIDIA H200"):
        assert device.why_not_hopper(device.current()) is None
    with absent("NVIDIA H200"), mock.patch.object(_compat, "LOWERS", False):
        reason = device.why_not_hopper(device.current())
        assert reason is not None
        assert re.fullmatch("needs jax 0.11 or newer .* on a Hopper GPU, found .*", reason)
        x = jax.ShapeDtypeStruct((1, 512, 8, 128), "bfloat16")
        assert ops.explain("attention", x, x, x)["pallas"] == reason
        assert ops.chosen("attention", x, x, x) != "pallas"


def test_abstract_mesh_reaches_into_jit():
    seen = []
    with absent("NVIDIA H200"):
        jax.jit(lambda x: seen.append(device.current()) or x).trace(1.0)
    assert [d.capability for d in seen] == [9.0]


def test_mesh_without_a_device_leaves_the_default():
    before = device.current()
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("x",))):
        assert device.current() == before


def test_mesh_of_the_devices_here_is_described_as_they_are():
    before = device.current()
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert device.current() == before


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA B300 SXM6 AC", 10.3),
        ("NVIDIA GB200", 10.0),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 12.0),
        ("NVIDIA GeForce RTX 5090", 12.0),
        ("NVIDIA H100 80GB HBM3", 9.0),
        ("NVIDIA GH200 480GB", 9.0),
        ("NVIDIA L40S", 8.9),
        ("NVIDIA L4", 8.9),
        ("NVIDIA RTX 6000 Ada Generation", 8.9),
        ("NVIDIA A10G", 8.6),
        ("NVIDIA RTX A6000", 8.6),
        ("NVIDIA A100-PCIE-40GB", 8.0),
        ("Tesla T4", 7.5),
        ("NVIDIA Unheard-of 1", 0.0),
        ("AMD Instinct MI300X", 0.0),
    ],
)
def test_capability_by_name(name, capability):
    with absent(name, None):
        assert device.current() == Device("gpu", name, capability)


class FakeGpu:
    """What JAX's device object tells of a GPU."""

    platform = "gpu"
    device_kind = "NVIDIA Unheard-of 1"
    compute_capability = "13.1"
    core_count = 7


@pytest.mark.parametrize("lowers", [True, False])
def test_gpu_tells_its_own_numbers(lowers):
    with mock.patch.object(_compat, "LOWERS", lowers):
        assert device._of(FakeGpu()) == Device("gpu", "NVIDIA Unheard-of 1", 13.1, 7, lowers)


def test_gpu_of_another_maker_has_no_capability():
    gpu = FakeGpu()
    gpu.compute_capability = "gfx942"
    assert device._of(gpu).capability == 0.0


def test_what_keeps_a_kernel_from_a_device():
    assert device.why_not_hopper(Device("gpu", "NVIDIA H200", 9.0, 132)) is None
    unknown = device.why_not_hopper(Device("gpu", "NVIDIA H200", 9.0))
    assert unknown == (
        "needs to know how many multiprocessors NVIDIA H200 has; the mesh does not say"
    )
    with absent("NVIDIA H200", None):
        assert device.why_not_hopper(device.current()) == unknown


def test_what_the_copy_engine_takes():
    assert device.why_not_copied("rows", 48) is None
    assert device.why_not_copied("heads", 40) == (
        "heads of 40 bytes are no multiple of 16 bytes, which the copy engine needs"
    )


@pytest.mark.gpu
def test_name_and_device_agree():
    here = device.current()
    assert here.platform == "gpu"
    assert here.num_sms > 0
    assert device._capability_by_name(here.name) in (0.0, here.capability)
