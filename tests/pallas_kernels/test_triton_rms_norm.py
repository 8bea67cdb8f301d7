"""RMSNorm in official Triton: whom it refuses, what it compiles to, and on a GPU what it computes.

What it computes is also tried in Triton's interpreter, by `triton_interpreted.py` in a process of
its own: how Triton runs is settled when it is imported.
"""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import H200, absent
from numerics import assert_as_accurate

from pallas_kernels import triton_rms_norm
from pallas_kernels.device import Device
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.triton_rms_norm import Config, rms_norm, why_not

A100 = Device("gpu", "NVIDIA A100", 8.0, 108)


def spec(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("x", "weight", "device", "reason"),
    [
        (spec(2, 96), spec(96), A100, None),
        (spec(2, 97), spec(97, dtype=jnp.float32), A100, None),
        (spec(2, 96), spec(96), Device("gpu", "NVIDIA GeForce RTX 5090", 12.0, 170), None),
        (spec(2, 96), spec(96), Device("cpu", "cpu"), "needs an NVIDIA GPU, found cpu"),
        (
            spec(2, 96),
            spec(96),
            Device("gpu", "Tesla T4", 7.5, 40),
            "needs compute capability 8.0 or newer, found 7.5 (Tesla T4)",
        ),
        (
            spec(2, 96, dtype=jnp.float8_e4m3fn),
            spec(96),
            A100,
            "takes bfloat16, float16 or float32, got x float8_e4m3fn",
        ),
        (
            spec(2, 96),
            spec(96, dtype=jnp.float8_e5m2),
            A100,
            "takes bfloat16, float16 or float32, got weight float8_e5m2",
        ),
        (spec(2, 16384), spec(16384), A100, None),
        (
            spec(2, 8193, dtype=jnp.float32),
            spec(8193),
            A100,
            "rows of 32772 bytes are longer than 32768, which the registers hold",
        ),
    ],
)
def test_why_not(x, weight, device, reason):
    assert why_not(x, weight, eps=1e-6, device=device) == reason


@pytest.mark.parametrize(
    ("there", "missing"),
    [((), "jax_triton and triton"), (("triton",), "jax_triton"), (("jax_triton",), "triton")],
)
def test_why_not_without_triton(monkeypatch, there, missing):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    assert (
        why_not(spec(2, 96), spec(96), eps=1e-6, device=A100)
        == f"{missing} cannot be imported: pip install 'jax-triton>=0.3.1'"
    )


@pytest.mark.usefixtures("installed")
def test_refuses_in_a_sentence():
    x, weight = jnp.ones((2, 96)), jnp.ones(96)
    sentence = "rms_norm: cannot run this call in Triton: needs an NVIDIA GPU, found cpu"
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match=sentence):
            rms_norm(x, weight, eps=1e-6)
    with pytest.raises(ValueError, match="eps must be positive and finite, got 0"):
        rms_norm(x, weight, eps=0)


@pytest.mark.usefixtures("installed")
def test_no_rows_need_no_kernel():
    x = jnp.ones((0, 96))
    with absent():
        assert rms_norm(x, jnp.ones(96), eps=1e-6) is x
        assert rms_norm(x, jnp.ones(96), eps=1e-6, residual=x) == (x, x)


@pytest.mark.parametrize("device", [A100, H200])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4096), (64, 896), (8192, 128), (8192, 16384)])
def test_configs_are_within_bounds(shape, device):
    x, weight = spec(*shape), spec(shape[-1])
    default = triton_rms_norm.default_config(x, weight, eps=1e-6, device=device)
    configs = triton_rms_norm.candidates(x, weight, eps=1e-6, device=device)
    assert configs[0] == default
    assert len(configs) == len(set(configs))
    for config in configs:
        *powers, programs, stages = dataclasses.astuple(config)
        assert all(number > 0 and number & (number - 1) == 0 for number in powers)
        assert programs >= 1
        assert stages >= 1
        assert max(config.warps, config.backward_warps) <= 32
    assert triton_rms_norm.bucket(x, weight, eps=1e-6).startswith("bfloat16 ")


def test_few_rows_are_shared_out():
    """At decode sizes each row has a program; narrow rows of a long prompt share one."""
    weight = spec(128)
    few = triton_rms_norm.default_config(spec(32, 128), weight, eps=1e-6, device=A100)
    many = triton_rms_norm.default_config(spec(8192 * 32, 128), weight, eps=1e-6, device=A100)
    assert (few.rows, many.rows) == (1, 16)


def both_ways(*, residual, **kwargs):
    """The norm and all gradients of a call of two or three arrays."""

    def run(x, weight, *rest):
        def norm(x, weight, *rest):
            return rms_norm(x, weight, residual=rest[0] if residual else None, **kwargs)

        out, pull = jax.vjp(norm, x, weight, *rest)
        return out, pull(out)

    return run


CASES = [
    *((jnp.bfloat16, shape) for shape in [(1, 96), (8192, 128), (8192, 896), (3, 1000), (5, 4864)]),
    *((jnp.bfloat16, shape) for shape in [(8192, 3072), (64, 4096), (8192, 8192), (64, 16384)]),
    *((jnp.float16, shape) for shape in [(7, 896), (8192, 4096)]),
    *((jnp.float32, shape) for shape in [(1, 96), (8192, 128), (3, 1000), (64, 8192)]),
]


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA H200"])
@pytest.mark.parametrize(
    ("dtype", "shape"), CASES, ids=[f"{jnp.dtype(dtype)}-{shape}" for dtype, shape in CASES]
)
def test_compiles_well(dtype, shape, gpu):
    """Nothing spilled, 16 bytes an access, rows reduced by shuffles."""
    from triton_programs import compile_launch, launches

    x, weight = spec(*shape, dtype=dtype), spec(shape[-1], dtype=dtype)
    for residual in (False, True):
        arrays = (x, weight, x) if residual else (x, weight)
        run = both_ways(residual=residual, eps=1e-6, zero_centered=residual)
        found = launches(run, *arrays, gpu=gpu)
        name = "rms_norm_residual" if residual else "rms_norm"
        assert [launch.kernel for launch in found] == [name, f"{name}_backward"]
        for launch in found:
            compiled = compile_launch(launch)
            assert f".entry {launch.kernel}(" in compiled.ptx
            assert compiled.spilled == 0, (launch, compiled.registers)
            assert compiled.shuffles > 0, launch
            if shape[-1] >= 128:
                assert compiled.wide > compiled.narrow, (launch, compiled.narrow)


@pytest.mark.triton
def test_compiles_for_each_kind_of_gpu():
    from triton_programs import GPUS, compile_launch, launches

    run = both_ways(residual=False, eps=1e-6)
    targets = {
        compile_launch(launch).target
        for gpu in GPUS
        for launch in launches(run, spec(64, 4096), spec(4096), gpu=gpu)
    }
    assert targets == {"sm_80", "sm_89", "sm_90a", "sm_120a"}


@pytest.mark.triton
def test_a_bad_tile_is_seen():
    """The twin: one warp has no room for a long row."""
    from triton_programs import compile_launch, launches

    run = both_ways(residual=False, eps=1e-6, config=Config(1, 1, 1, 1, 1, 1))
    _, backward = launches(run, spec(64, 4096), spec(4096))
    assert compile_launch(backward).spilled > 0


@pytest.mark.triton
def test_lowers_through_jax_triton():
    """The call as JAX would hand it to the GPU, kernel and all; needs JAX's CUDA plugin."""
    from triton_programs import calls_in_program

    run = both_ways(residual=True, eps=1e-6)
    assert calls_in_program(run, spec(64, 4096), spec(4096), spec(64, 4096)) == 2


@pytest.mark.slow
@pytest.mark.triton
def test_in_the_interpreter():
    from triton_programs import run_interpreted

    run_interpreted("rms_norm")


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [(1, 96), (8192, 128), (7, 896), (3, 1001), (64, 4096), (5, 4864), (1021, 8192), (64, 16384)],
    ids=str,
)
def test_on_a_gpu(shape, dtype, zero_centered):
    if dtype == "float32" and shape[-1] == 16384:
        pytest.skip("rows of 64 KB, which why_not refuses")
    keys = jax.random.split(jax.random.key(0), 5)
    x, residual, d_y, d_total = (jax.random.normal(key, shape, dtype) for key in keys[:4])
    weight = 1 + 0.3 * jax.random.normal(keys[4], shape[-1:], dtype)

    from triton_programs import rms_norm_truth

    def both(norm):
        def run(x, weight, residual):
            kwargs = {"eps": 1e-6, "zero_centered": zero_centered}
            alone, pull = jax.vjp(lambda x, w: norm(x, w, **kwargs), x, weight)
            out, pull_sum = jax.vjp(
                lambda x, w, r: norm(x, w, residual=r, **kwargs), x, weight, residual
            )
            return alone, pull(d_y), out, pull_sum((d_y, d_total))

        return jax.jit(run)(x, weight, residual)

    truth = rms_norm_truth(
        *map(np.asarray, (x, weight, residual, d_y, d_total)), eps=1e-6, zero_centered=zero_centered
    )
    for ours, plain, true in zip(
        *map(jax.tree.leaves, (both(rms_norm), both(rms_norm_reference), truth)), strict=True
    ):
        assert_as_accurate(ours, plain, true)
