"""LayerNorm told in PTX: the threads of a block by the machine of lanes, which rows it takes, what
it compiles to. What surrounds it, and a GPU, test_layer_norm.py tries.
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
from pallas_kernels import lane_code, lane_norm, layer_norm_lanes
from pallas_kernels.layer_norm import Config, candidates, default_config, layer_norm
from pallas_kernels.layer_norm import layer_norm_reference as plain

pytestmark = pytest.mark.usefixtures("strict_jax")

EPS = 1e-5
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def case(width: int, dtype: Any, weight_dtype: Any, bias: bool, mean: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays = {"x": jnp.asarray(mean + rng.standard_normal((2, width)), dtype)}
    for name in ("weight", "bias")[: 1 + bias]:
        arrays[name] = jnp.asarray(rng.standard_normal(width), weight_dtype)
    return arrays


def by_lanes(monkeypatch, arrays: dict[str, Any], warpgroups: int) -> jax.Array:
    """Two rows, each by the threads of a block."""
    held = {name: np.asarray(array) for name, array in arrays.items()}
    count, width = held["x"].shape
    held["out"] = np.full((count, width), np.nan, held["x"].dtype)
    warps = 4 * warpgroups
    machine = Machine(held, {"board": 8 * warps}, 32 * warps)
    for module in (lane_code, lane_norm, layer_norm_lanes):
        for name, stand_in in dialects(machine).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    for row in range(count):
        at = dict(machine.at)
        for name in ("x", "out"):
            at[name] = lane_code.further(at[name], lane_code.word(2 * width * row))
        machine.run(row, partial(layer_norm_lanes.write_row, at, dtypes, width, warps, EPS))
    return jnp.asarray(machine.content("out", held["x"].dtype, (count, width)))


def assert_right(found: jax.Array, arrays: dict[str, Any]) -> None:
    x, weight, bias = (arrays.get(name) for name in ("x", "weight", "bias"))
    near = plain(x, weight, bias, eps=EPS)
    given = (None if array is None else np.asarray(array) for array in (x, weight, bias))
    assert_as_accurate(found, near, oracles.layer_norm(*given, eps=EPS))


@pytest.mark.parametrize(
    ("width", "dtype", "weight_dtype", "bias", "mean", "warpgroups"),
    [
        (1032, BF16, BF16, True, 0.0, 1),  # the last access is one thread's
        (3072, F16, F32, True, 3.0, 1),
        (4864, BF16, F32, False, 0.0, 1),  # the last one half of the threads'
        (5000, BF16, F16, True, 0.0, 2),
        (8192, BF16, BF16, True, 30.0, 2),
    ],
)
def test_a_block_has_a_row(monkeypatch, width, dtype, weight_dtype, bias, mean, warpgroups):
    arrays = case(width, dtype, weight_dtype, bias, mean)
    found = by_lanes(monkeypatch, arrays, warpgroups)
    assert found.dtype == dtype
    assert_right(found, arrays)
    for wrong in (found[::-1], jnp.roll(found, 1, axis=1), found.at[1, width - 1].add(0.1)):
        with pytest.raises(AssertionError):
            assert_right(wrong, arrays)


def test_which_rows_it_takes():
    def shapes(width: int, dtype: str) -> Any:
        row = jax.ShapeDtypeStruct((width,), dtype)
        return jax.ShapeDtypeStruct((64, width), dtype), row, row

    def config(width: int, dtype: str = "bfloat16") -> Config:
        return default_config(*shapes(width, dtype), eps=EPS)

    assert config(1032) == config(4096, "float16") == Config(1, 0, 1, 1)
    assert config(4104) == config(16384) == Config(1, 0, 1, 2)
    taken = layer_norm_lanes.takes
    assert not taken(1024, BF16, 1)  # a warp has such a row
    assert not taken(4096, F32, 1)
    assert not taken(16384, BF16, 1)  # 128 numbers a thread
    found = candidates(*shapes(4096, "bfloat16"), eps=EPS)
    assert found[:2] == [Config(1, 0, 1, 1), Config(1, 0, 1, 2)]
    assert len(set(found)) == len(found) > 4


@pytest.mark.aot
@pytest.mark.parametrize(
    ("width", "weight_dtype", "registers"), [(8192, BF16, 64), (4096, BF16, 64), (3072, F32, 64)]
)
def test_compiled(width, weight_dtype, registers):
    """Registers for 1024 threads a multiprocessor, and no weight is read before it is needed."""
    row = jax.ShapeDtypeStruct((width,), weight_dtype)
    x = jax.ShapeDtypeStruct((64, width), BF16)
    kernel = aot.compile_for(partial(layer_norm, eps=EPS), x, row, row).kernel("layer_norm")
    assert kernel.registers <= registers
    accesses = width // 8 // 128 // layer_norm_lanes.default_warpgroups(width)
    each = jnp.dtype(weight_dtype).itemsize // 2
    assert kernel.count("LDG", "128") == accesses * (1 + 2 * each)
    assert kernel.count("STG", "EF", "128") == accesses
