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
from lane_machine import Machine, dialects
from numerics import assert_as_accurate

from jaxllm import aot
from pallas_kernels import lane_code, lane_norm, norm_lanes
from pallas_kernels.layer_norm import layer_norm, layer_norm_reference
from pallas_kernels.norm_lanes import Config, Kind
from pallas_kernels.rms_norm import candidates, default_config, rms_norm, rms_norm_reference

pytestmark = pytest.mark.usefixtures("strict_jax")

EPS = 1e-5
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def case(width: int, dtype: Any, weight_dtype: Any, bias: bool, mean: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays = {"x": jnp.asarray(mean + rng.standard_normal((2, width)), dtype)}
    for name in ("weight", "bias")[: 1 + bias]:
        arrays[name] = jnp.asarray(rng.standard_normal(width), weight_dtype)
    return arrays


def by_lanes(monkeypatch, arrays: dict[str, Any], kind: Kind, warpgroups: int) -> jax.Array:
    """Two rows, each by the threads of a block."""
    held = {name: np.asarray(array) for name, array in arrays.items()}
    count, width = held["x"].shape
    held["out"] = np.full((count, width), np.nan, held["x"].dtype)
    warps = 4 * warpgroups
    machine = Machine(held, {"board": 8 * warps}, 32 * warps)
    for module in (lane_code, lane_norm, norm_lanes):
        for name, stand_in in dialects(machine).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    for row in range(count):
        at = dict(machine.at)
        for name in ("x", "out"):
            at[name] = lane_code.further(at[name], lane_code.word(2 * width * row))
        machine.run(row, partial(norm_lanes.write_row, at, dtypes, kind, width, warps))
    return jnp.asarray(machine.content("out", held["x"].dtype, (count, width)))


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
    ("kind", "width", "dtype", "weight_dtype", "bias", "mean", "warpgroups"),
    [
        (LAYER, 1032, BF16, BF16, True, 0.0, 1),  # the last access is one thread's
        (LAYER, 3072, F16, F32, True, 3.0, 1),
        (LAYER, 4864, BF16, F32, False, 0.0, 1),  # the last one is of half of the threads, less 32
        (LAYER, 5000, BF16, F16, True, 0.0, 2),
        (LAYER, 8192, BF16, BF16, True, 30.0, 2),
        (RMS, 1032, F16, F16, False, 0.0, 1),
        (RMS, 4864, BF16, F32, False, 1.0, 2),
        (CENTRED, 2304, BF16, BF16, False, 0.0, 1),
        (CENTRED, 8192, BF16, F32, False, 0.0, 2),
    ],
)
def test_a_block_has_a_row(monkeypatch, kind, width, dtype, weight_dtype, bias, mean, warpgroups):
    arrays = case(width, dtype, weight_dtype, bias, mean)
    found = by_lanes(monkeypatch, arrays, kind, warpgroups)
    assert found.dtype == dtype
    assert_right(found, arrays, kind)
    for wrong in (found[::-1], jnp.roll(found, 1, axis=1), found.at[1, width - 1].add(0.1)):
        with pytest.raises(AssertionError):
            assert_right(wrong, arrays, kind)


def test_which_rows_it_takes():
    def shapes(width: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct((64, width), dtype), jax.ShapeDtypeStruct((width,), dtype)

    one, two = Config(1, 0, 1, 1), Config(1, 0, 1, 2)
    assert default_config(*shapes(1032), eps=EPS) == one
    assert default_config(*shapes(4096, "float16"), eps=EPS) == one
    assert default_config(*shapes(4104), eps=EPS) == default_config(*shapes(16384), eps=EPS) == two
    taken = norm_lanes.takes
    assert taken(4096, BF16, one)
    assert not taken(4096, BF16, Config(1, 2, 1, 1))  # a stream
    assert not taken(1024, BF16, one)  # a warp has such a row
    assert not taken(4096, F32, one)
    assert not taken(16384, BF16, one)  # 128 numbers a thread
    found = candidates(*shapes(4096), eps=EPS)
    assert found[:2] == [one, two]
    assert len(set(found)) == len(found) > 4


@pytest.mark.aot
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
@pytest.mark.parametrize(("width", "weight_dtype"), [(8192, BF16), (4096, BF16), (3072, F32)])
def test_compiled(norm, width, weight_dtype):
    """Registers for 1024 threads a multiprocessor, and no weight is read before it is needed."""
    row = jax.ShapeDtypeStruct((width,), weight_dtype)
    x, rows = jax.ShapeDtypeStruct((64, width), BF16), [row, row] if norm is layer_norm else [row]
    kernel = aot.compile_for(partial(norm, eps=EPS), x, *rows).kernel(norm.__name__)
    assert kernel.registers <= 64
    config = norm_lanes.default_config(width, BF16)
    assert config is not None
    accesses = width // 8 // 128 // config.warpgroups
    weights = len(rows) * jnp.dtype(weight_dtype).itemsize // 2
    assert kernel.count("LDG", "128") == accesses * (1 + weights)
    assert kernel.count("STG", "EF", "128") == accesses
