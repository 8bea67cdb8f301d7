"""Scale, mask and softmax in official Triton: whom it refuses, what it compiles to, and on a GPU
what it computes. In Triton's interpreter: `triton_interpreted.py`.
"""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import H200, absent
from numerics import assert_as_accurate

from pallas_kernels import triton_softmax
from pallas_kernels.device import Device
from pallas_kernels.softmax import scale_softmax_reference
from pallas_kernels.triton_softmax import Config, scale_softmax, why_not

A100 = Device("gpu", "NVIDIA A100", 8.0, 108)
GPUS = ["NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA H200"]


def spec(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("x", "device", "reason"),
    [
        (spec(2, 97), A100, None),
        (spec(2, 8, 128, 128), Device("gpu", "NVIDIA L4", 8.9, 58), None),
        (spec(8, 131072, dtype=jnp.float32), A100, None),
        (spec(2, 96), Device("cpu", "cpu"), "needs an NVIDIA GPU, found cpu"),
        (
            spec(2, 96),
            Device("gpu", "Tesla V100", 7.0, 80),
            "needs compute capability 8.0 or newer, found 7.0 (Tesla V100)",
        ),
        (
            spec(2, 96),
            Device("gpu", "AMD Instinct MI300X"),
            "needs compute capability 8.0 or newer, found an unknown one (AMD Instinct MI300X)",
        ),
        (
            spec(2, 96, dtype=jnp.float8_e5m2),
            A100,
            "takes bfloat16, float16 or float32, got x float8_e5m2",
        ),
        (spec(2**30 + 1), A100, "rows of 1073741825 numbers are longer than 1073741824"),
        (spec(2**31, 1), A100, "2147483648 rows are more than 2147483647"),
    ],
)
def test_why_not(x, device, reason):
    assert why_not(x, device=device) == reason


def test_why_not_without_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = "jax_triton and triton cannot be imported: pip install 'jax-triton>=0.3.1'"
    assert why_not(spec(2, 96), device=A100) == reason


@pytest.mark.usefixtures("installed")
def test_refuses_in_a_sentence():
    sentence = "scale_softmax: cannot run this call in Triton: needs an NVIDIA GPU, found cpu"
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match=sentence):
            scale_softmax(jnp.ones((2, 96)))
    with pytest.raises(ValueError, match="scale is NaN"):
        scale_softmax(jnp.ones((2, 96)), scale=float("nan"))


@pytest.mark.usefixtures("installed")
def test_a_short_block_has_one_row():
    with absent(), pytest.raises(ValueError, match="2 rows a program, but a block that is shorter"):
        scale_softmax(jnp.ones((4, 96)), config=Config(64, 2, 1))


@pytest.mark.parametrize("device", [A100, H200])
@pytest.mark.parametrize(
    "shape", [(1,), (32, 512), (2, 8, 128, 128), (8, 32, 2048, 2048), (64, 131072), (999, 100000)]
)
def test_configs_are_within_bounds(shape, device):
    default = triton_softmax.default_config(spec(*shape), device=device)
    configs = triton_softmax.candidates(spec(*shape), device=device)
    assert configs[0] == default
    assert len(configs) == len(set(configs))
    for config in configs:
        for number in dataclasses.astuple(config)[:3]:
            assert number > 0
            assert number & (number - 1) == 0
        assert config.block >= shape[-1] or config.rows == 1
        assert config.warps <= 32
        assert config.parts >= 1


def test_few_long_rows_are_shared():
    few = triton_softmax.default_config(spec(8, 131072), device=H200)
    many = triton_softmax.default_config(spec(1024, 131072), device=H200)
    alone = triton_softmax.default_config(spec(1, 32064), device=H200)
    assert (few.parts, many.parts, alone.parts) == (64, 1, 32)


def both_ways(x, mask=None, **kwargs):
    y, pull = jax.vjp(lambda x: scale_softmax(x, mask=mask, **kwargs), x)
    return y, pull(y)


KERNELS = ["scale_softmax", "scale_softmax_backward"]
SPLIT = ["scale_softmax_statistics", "scale_softmax_write"]
SPLIT += ["scale_softmax_backward_statistics", "scale_softmax_backward_write"]
CASES = [
    (jnp.bfloat16, (32, 512), None, False, KERNELS),
    (jnp.bfloat16, (2, 8, 128, 128), None, True, KERNELS),
    (jnp.bfloat16, (8, 32, 2048, 2048), None, False, KERNELS),
    (jnp.bfloat16, (8, 32, 2048, 2048), (8, 1, 2048, 2048), True, KERNELS),
    (jnp.bfloat16, (7, 1000), (1000,), False, KERNELS),
    (jnp.bfloat16, (64, 131072), None, False, SPLIT),
    (jnp.bfloat16, (1, 32064), None, False, SPLIT),
    (jnp.bfloat16, (1024, 131072), None, False, KERNELS),
    (jnp.float16, (256, 16384), None, False, KERNELS),
    (jnp.float32, (2, 8, 128, 128), (2, 1, 1, 128), True, KERNELS),
    (jnp.float32, (1, 12, 4096, 4096), None, True, KERNELS),
    (jnp.float32, (256, 16384), None, False, KERNELS),
    (jnp.float32, (64, 131072), None, False, SPLIT),
]


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("dtype", "shape", "mask_shape", "causal", "kernels"),
    CASES,
    ids=[f"{jnp.dtype(dtype)}-{shape}" for dtype, shape, *_ in CASES],
)
def test_compiles_well(dtype, shape, mask_shape, causal, kernels, gpu):
    """Nothing spilled, 16 bytes an access, rows reduced by shuffles; only what writes needs none.

    Not of 16 bytes: the scale, the statistics of a part, and a mask's single byte of a row.
    """
    from triton_programs import compile_launch, launches

    mask = () if mask_shape is None else (spec(*mask_shape, dtype=jnp.bool_),)
    run = functools.partial(both_ways, scale=0.125, causal=causal)
    found = launches(run, spec(*shape, dtype=dtype), *mask, gpu=gpu)
    assert [launch.kernel for launch in found] == kernels
    for launch in found:
        compiled = compile_launch(launch)
        assert f".entry {launch.kernel}(" in compiled.ptx
        assert compiled.spilled == 0, (launch, compiled.registers)
        assert compiled.wide >= 2, launch
        assert compiled.narrow <= 3, (launch, compiled.narrow)
        assert compiled.shuffles > 0 or launch.kernel.endswith("_write"), launch


@pytest.mark.triton
def test_compiles_for_each_kind_of_gpu():
    from triton_programs import GPUS, compile_launch, launches

    targets = {
        compile_launch(launch).target
        for gpu in GPUS
        for launch in launches(both_ways, spec(64, 4096), gpu=gpu)
    }
    assert targets == {"sm_80", "sm_89", "sm_90a", "sm_120a"}


@pytest.mark.triton
def test_a_bad_tile_is_seen():
    """The twin: one warp has no room for a long row."""
    from triton_programs import compile_launch, launches

    run = functools.partial(both_ways, config=Config(8192, 1, 1))
    _, backward = launches(run, spec(64, 8192, dtype=jnp.float32))
    assert compile_launch(backward).spilled > 0


@pytest.mark.triton
def test_lowers_through_jax_triton():
    from triton_programs import calls_in_program

    run = functools.partial(both_ways, causal=True)
    assert calls_in_program(run, spec(2, 3, 512)) == 2
    assert calls_in_program(run, spec(2, 3, 131072)) == 4
    assert calls_in_program(run, spec(2, 3, 512), spec(3, 1, dtype=jnp.bool_)) == 2


@pytest.mark.slow
@pytest.mark.triton
def test_in_the_interpreter():
    from triton_programs import run_interpreted

    run_interpreted("scale_softmax")


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("shape", "mask_shape", "causal"),
    [
        ((32, 512), None, False),
        ((2, 8, 128, 128), (2, 1, 1, 128), True),
        ((5, 7, 97), (7, 97), True),
        ((3, 9, 5), None, True),
        ((2, 4, 512, 1000), (2, 1, 512, 1), False),
        ((2, 4, 1021, 2048), None, True),
        ((64, 16384), None, False),
        ((7, 100001), (7, 1), False),
        ((3, 131072), None, False),
        ((1, 32064), None, False),
        ((200, 131072), None, False),
        ((2, 100, 40000), (2, 1, 40000), True),
    ],
    ids=str,
)
def test_on_a_gpu(shape, mask_shape, causal, dtype):
    from triton_programs import scale_softmax_plain, scale_softmax_truth

    keys = jax.random.split(jax.random.key(0), 3)
    x, d_y = (3 * jax.random.normal(key, shape, dtype) for key in keys[:2])
    mask = None if mask_shape is None else jax.random.bernoulli(keys[2], 0.6, mask_shape)
    keep = np.broadcast_to(True if mask is None else np.asarray(mask), shape)
    if causal:
        keep = keep & np.tri(*shape[-2:], shape[-1] - shape[-2], dtype=bool)

    @jax.jit
    def run(x, d_y, scale):
        y, pull = jax.vjp(
            lambda x, scale: scale_softmax(x, scale=scale, mask=mask, causal=causal), x, scale
        )
        return y, *pull(d_y)

    scale = jnp.float32(0.7)
    ours = run(x, d_y, scale)
    plain = scale_softmax_plain(scale_softmax_reference, x, d_y, scale, mask=mask, causal=causal)
    truth = scale_softmax_truth(*map(np.asarray, (x, d_y)), 0.7, keep)
    for one, other, true in zip(ours[:2], plain[:2], truth[:2], strict=True):
        assert_as_accurate(one, other, true)
    # A sum of terms of either sign, as many as x has numbers; the rounding of y is in each
    np.testing.assert_allclose(ours[2], plain[2], rtol=1e-3, atol=1e-3 * np.sqrt(x.size))
