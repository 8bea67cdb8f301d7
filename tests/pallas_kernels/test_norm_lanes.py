"""Norms told in PTX: the threads of a block by the machine of lanes, which rows are taken, what it
compiles to. What surrounds them, and a GPU, test_layer_norm.py and test_rms_norm.py try.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from kernels import interpreted
from lane_machine import Machine, stand_in
from numerics import assert_as_accurate

from jaxllm import aot
from pallas_kernels import lane_arithmetic, lane_code, norm_lanes
from pallas_kernels.layer_norm import layer_norm, layer_norm_reference
from pallas_kernels.norm_lanes import Config, Kind
from pallas_kernels.rms_norm import candidates, default_config, rms_norm, rms_norm_reference

pytestmark = pytest.mark.usefixtures("strict_jax")

EPS = 0.1  # beside a variance of 1 one of 1e-5 would be lost in the rounding to 16 bits
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def case(shape: tuple[int, int], mean: float, dtype: Any, *dtypes: Any) -> dict[str, Any]:
    """dtypes: of the weight, and of the bias if there is one."""
    rng = np.random.default_rng(0)
    arrays = {"x": jnp.asarray(mean + rng.standard_normal(shape), dtype)}
    for name, of_row in zip(("weight", "bias"), dtypes, strict=False):
        arrays[name] = jnp.asarray(rng.standard_normal(shape[1]), of_row)
    return arrays


def by_lanes(monkeypatch, arrays: dict[str, Any], kind: Kind, warps: int) -> Any:
    """All rows, block by block; warps: that share one. With a residual, both results."""
    held = {name: np.asarray(array) for name, array in arrays.items()}
    shape = held["x"].shape
    outs = ["out", "total"] if "residual" in arrays else ["out"]
    held |= {name: np.full(shape, np.nan, held["x"].dtype) for name in outs}
    machine = Machine(held, {"board": 8 * warps}, 32 * max(warps, 4))
    stand_in(monkeypatch, machine, (lane_code, lane_arithmetic, norm_lanes))
    dtypes = {name: array.dtype.name for name, array in arrays.items()}

    def code(block):
        norm_lanes.Block(machine.at, block, dtypes, kind, shape, warps).run()

    for block in range(shape[0] if warps > 1 else -(-shape[0] // 4)):
        machine.run(block, code)
    found = [jnp.asarray(machine.content(name, held["x"].dtype, shape)) for name in outs]
    return found if len(outs) > 1 else found[0]


def assert_right(found: jax.Array, arrays: dict[str, Any], kind: Kind) -> None:
    x, weight, bias = (arrays.get(name) for name in ("x", "weight", "bias"))
    if kind.name == "layer_norm":
        near = layer_norm_reference(x, weight, bias, eps=EPS)
        given: Any = (None if array is None else np.asarray(array) for array in (x, weight, bias))
        assert_as_accurate(found, near, oracles.layer_norm(*given, eps=EPS))
        return
    how: Any = {"eps": EPS, "zero_centered": kind.zero_centered}
    near = rms_norm_reference(x, weight, **how)
    assert_as_accurate(found, near, oracles.rms_norm(np.asarray(x), np.asarray(weight), **how))


LAYER, RMS, CENTRED = (
    Kind("layer_norm", EPS),
    Kind("rms_norm", EPS),
    Kind("rms_norm", EPS, zero_centered=True),
)


@pytest.mark.parametrize(
    ("kind", "shape", "mean", "warps", "dtypes"),
    [
        (LAYER, (2, 1032), 0.0, 4, (BF16, BF16, BF16)),  # the last access is one thread's
        (LAYER, (2, 3072), 3.0, 4, (F16, F32, F32)),
        (LAYER, (1, 4864), 0.0, 4, (BF16, F32)),
        (LAYER, (2, 5000), 0.0, 8, (BF16, F16, F32)),
        (LAYER, (2, 8192), 30.0, 8, (BF16, BF16, F16)),
        (RMS, (2, 1032), 0.0, 4, (F16, F16)),
        (RMS, (2, 4864), 1.0, 8, (BF16, F32)),
        (RMS, (2, 2048), 0.0, 4, (BF16, F16)),
        (CENTRED, (2, 2304), 0.0, 4, (BF16, BF16)),
        (CENTRED, (2, 8192), 0.0, 8, (BF16, F32)),
        # a warp a row: the last block has fewer rows than warps, the last access fewer lanes
        (LAYER, (5, 896), 2.0, 1, (BF16, BF16, F32)),
        (LAYER, (4, 1024), 0.0, 1, (F16, F32)),
        (RMS, (7, 264), 0.0, 1, (BF16, BF16)),
        (CENTRED, (6, 640), 0.0, 1, (BF16, F32)),
    ],
)
def test_every_row(monkeypatch, kind, shape, mean, warps, dtypes):
    arrays = case(shape, mean, *dtypes)
    found = by_lanes(monkeypatch, arrays, kind, warps)
    assert found.dtype == dtypes[0]
    assert_right(found, arrays, kind)
    for wrong in (jnp.roll(found, 1, axis=1), 1.1 * found, found.at[-1, -1].add(0.1)):
        with pytest.raises(AssertionError):
            assert_right(wrong.astype(dtypes[0]), arrays, kind)
    monkeypatch.setattr(norm_lanes, "FEW_ROWS", 0)  # many: weights are read late
    np.testing.assert_array_equal(by_lanes(monkeypatch, arrays, kind, warps), found)


@pytest.mark.parametrize(
    ("kind", "shape", "warps", "dtypes"),
    [
        (RMS, (2, 1032), 4, (BF16, BF16)),
        (CENTRED, (1, 8192), 8, (F16, F32)),
        (RMS, (5, 896), 1, (F16, BF16)),
    ],
)
def test_with_a_residual(monkeypatch, kind, shape, warps, dtypes):
    arrays = case(shape, 0.0, *dtypes)
    arrays["residual"] = jnp.roll(arrays["x"], 7, axis=1) * 3
    y, total = by_lanes(monkeypatch, arrays, kind, warps)
    np.testing.assert_array_equal(total, arrays["x"] + arrays["residual"])
    assert_right(y, {"x": total, "weight": arrays["weight"]}, kind)
    with pytest.raises(AssertionError):
        assert_right(y, arrays, kind)


@pytest.mark.parametrize("kind", [LAYER, CENTRED])
def test_what_surrounds_a_block(kind):
    """In the interpreter, which has the reference for lanes; alone and under vmap."""
    arrays = case((6, 1032), 0.0, BF16, F32)
    if kind is LAYER:
        f = partial(layer_norm, bias=None, eps=EPS, interpret=True)
    else:
        f = partial(rms_norm, eps=EPS, zero_centered=True, interpret=True)
    x, weight = arrays.values()
    assert_right(interpreted(f, x, weight), arrays, kind)
    many = interpreted(jax.vmap(f, in_axes=(0, None)), x.reshape(2, 3, -1), weight)
    assert_right(many.reshape(x.shape), arrays, kind)


def test_which_rows_it_takes():
    def shapes(width: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct((64, width), dtype), jax.ShapeDtypeStruct((width,), dtype)

    one, two = Config(1, 0, 1, 1), Config(1, 0, 1, 2)
    assert default_config(*shapes(264), eps=EPS) == default_config(*shapes(1032), eps=EPS) == one
    assert default_config(*shapes(4096, "float16"), eps=EPS) == one
    assert default_config(*shapes(4104), eps=EPS) == default_config(*shapes(16384), eps=EPS) == two
    taken = norm_lanes.takes
    assert taken(4096, BF16, one)
    assert not taken(4096, BF16, Config(1, 2, 1, 1))  # a stream
    assert not taken(256, BF16, one)  # one access a lane
    assert not taken(1024, BF16, two)  # a warp has such a row
    assert not taken(4096, F32, one)
    assert not taken(16384, BF16, one)  # 128 numbers a thread
    assert candidates(*shapes(4096), eps=EPS) == [one, two]
    assert len(candidates(*shapes(256), eps=EPS)) > 2


@pytest.mark.parametrize(
    ("width", "config", "others"),
    [
        (4096, Config(1, 2, 1), 2),  # a stream
        (4096, Config(2, 0, 1), 2),
        (1032, Config(1, 0, 1, 2), 1),  # one access for all but a thread
    ],
)
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_a_config_that_does_not_fit_says_so(norm, width, config, others):
    x, row = jnp.ones((2, width), BF16), jnp.ones(width, BF16)
    given = [x, row] if norm is rms_norm else [x, row, row]
    with pytest.raises(NotImplementedError) as raised:
        norm(*given, eps=EPS, config=config, interpret=True)
    words = f"{norm.__name__}: cannot run this call: {config} is none for rows of {width} numbers"
    assert str(raised.value).startswith(words)
    assert str(raised.value).count("Config(") == 1 + others


@pytest.mark.aot
@pytest.mark.parametrize("count", [64, 8192])
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
@pytest.mark.parametrize(("width", "dtype"), [(8192, BF16), (4096, BF16), (3072, F32), (896, BF16)])
def test_compiled(norm, width, dtype, count):
    """Wide accesses, nothing spilled, and of many rows registers for 1024 threads at a time."""
    row, x = (jax.ShapeDtypeStruct((width,), dtype), jax.ShapeDtypeStruct((count, width), BF16))
    rows = [row, row] if norm is layer_norm else [row]
    kernel = aot.compile_for(partial(norm, eps=EPS), x, *rows).kernel(norm.__name__)
    assert kernel.spill_store_bytes == 0
    assert kernel.registers <= (64 if count > norm_lanes.FEW_ROWS else 128)
    config = norm_lanes.default_config(width, BF16)
    assert config is not None
    accesses = -(-width // 8 // (32 if width <= 1024 else 128 * config.warpgroups))
    weights = len(rows) * jnp.dtype(dtype).itemsize // 2
    assert kernel.count("LDG", "128") == accesses * (1 + weights)
    assert kernel.count("STG", "EF", "128") == accesses


@pytest.mark.gpu
@pytest.mark.parametrize("width", [264, 896, 1032, 4096, 16384])
@pytest.mark.parametrize("kind", [LAYER, RMS, CENTRED], ids=str)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F16), (BF16, F32)])
def test_on_the_gpu(kind, width, dtypes):
    """Alone, and under vmap, where a block is not its number in the grid."""
    arrays = case((70, width), 0.5, *dtypes, *dtypes[-1:] * (kind is LAYER))
    if kind is LAYER:
        f = partial(layer_norm, eps=EPS)
    else:
        f = partial(rms_norm, eps=EPS, zero_centered=kind.zero_centered)
    x, *rest = arrays.values()
    assert_right(f(x, *rest), arrays, kind)
    many = jax.vmap(f, in_axes=(0, *[None] * len(rest)))(x.reshape(7, 10, width), *rest)
    np.testing.assert_array_equal(many.reshape(x.shape), f(x, *rest))
