"""The norms' backward pass told in PTX: the threads of a block by the machine of lanes, which rows
are taken, what it compiles to. test_layer_norm.py and test_rms_norm.py try what surrounds it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200
from lane_machine import Machine, stand_in
from numerics import assert_as_accurate

from jaxllm import aot
from pallas_kernels import lane_arithmetic, lane_code, norm_lanes, norm_lanes_backward
from pallas_kernels.layer_norm import layer_norm, layer_norm_reference
from pallas_kernels.layer_norm import why_not as why_not_layer_norm
from pallas_kernels.norm_lanes import Kind
from pallas_kernels.norm_lanes_backward import Plan, plan_of, ring_bytes
from pallas_kernels.rms_norm import rms_norm, rms_norm_reference
from pallas_kernels.rms_norm import why_not as why_not_rms_norm

pytestmark = pytest.mark.usefixtures("strict_jax")

EPS = 1e-5
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
LAYER, RMS, CENTRED = (
    Kind("layer_norm", EPS),
    Kind("rms_norm", EPS),
    Kind("rms_norm", EPS, zero_centered=True),
)


def case(shape: tuple[int, int], mean: float, dtype: Any, held: Any, added: bool) -> dict[str, Any]:
    """held: the weight's dtype; added: whether there is a cotangent of x + residual."""
    rng = np.random.default_rng(0)
    arrays = {"x": mean + rng.standard_normal(shape), "dy": rng.standard_normal(shape)}
    if added:
        arrays["d_total"] = rng.standard_normal(shape)
    found = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    return found | {"weight": jnp.asarray(rng.standard_normal(shape[1]), held)}


def by_lanes(monkeypatch, arrays: dict[str, Any], kind: Kind, how: Plan, blocks: int, sums: int):
    """d_x, and the blocks' shares of the sums."""
    *read, _ = arrays
    held = {name: np.asarray(array) for name, array in arrays.items()}
    count, width = held["x"].shape
    held["out"] = np.full((count, width), np.nan, held["x"].dtype)
    held["shares"] = np.full((sums, blocks, width), np.nan, np.float32)
    shared = {"ring": ring_bytes(how, width, len(read)), "board": 16 * how.block_warps}
    machine = Machine(held, shared, 32 * how.block_warps)
    stand_in(monkeypatch, machine, (lane_code, lane_arithmetic, norm_lanes, norm_lanes_backward))
    dtypes = {name: arrays[name].dtype.name for name in ("x", "weight")}

    def code(block):
        norm_lanes_backward.Block(
            machine.at, block, tuple(read), dtypes, kind, (count, width), how, blocks, sums
        ).run()

    for block in range(blocks):
        machine.run(block, code)
    return [machine.content(n, held[n].dtype, held[n].shape) for n in ("out", "shares")]


def assert_right(d_x: Any, sums: Any, arrays: dict[str, Any], kind: Kind) -> None:
    """sums: of the weight and, of a LayerNorm with a bias, of the bias, in the weight's dtype."""
    x, dy, weight = (arrays[name] for name in ("x", "dy", "weight"))
    given = [np.asarray(array, np.float64) for array in (x, weight)]
    d_out = np.asarray(dy, np.float64)
    if kind.name == "layer_norm":
        biases = (jnp.zeros_like(weight),) if len(sums) > 1 else (None,)
        norm = partial(layer_norm_reference, eps=EPS)
        truth = oracles.layer_norm(*given, *map(np.zeros_like, given[1:]), eps=EPS, d_out=d_out)
    else:
        biases, how = (), {"eps": EPS, "zero_centered": kind.zero_centered}
        norm = partial(rms_norm_reference, **how)
        truth = oracles.rms_norm(*given, **how, d_out=d_out)
    pull: Any = jax.vjp(norm, x, weight, *biases)[1]
    near = pull(dy)
    if "d_total" in arrays:
        more = arrays["d_total"].astype(jnp.float32)
        d_total = (near[0].astype(jnp.float32) + more).astype(x.dtype)
        near, truth = (d_total, *near[1:]), (truth[0] + np.asarray(more, np.float64), *truth[1:])
    assert_as_accurate(d_x, near[0], truth[0])
    centred = given[0] - given[0].mean(-1, keepdims=True) * (kind.name == "layer_norm")
    h = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True))
    terms = float(np.abs(d_out).max() * np.abs(h).max())
    some = slice(1, 1 + len(sums))
    for found, plain, right in zip(sums, near[some], truth[some], strict=True):
        assert_as_accurate(found, plain, right, largest_term=terms)


@pytest.mark.parametrize(
    ("kind", "shape", "mean", "how", "dtypes", "added"),
    [
        (LAYER, (5, 1032), 3.0, None, (BF16, BF16), False),  # the last access is one thread's
        (LAYER, (7, 3072), 0.0, None, (F16, F32), False),
        (LAYER, (5, 3080), 0.0, None, (BF16, BF16), False),
        (LAYER, (3, 8192), 30.0, None, (BF16, F16), False),
        (RMS, (6, 2048), 0.0, Plan(4, 3, 1), (BF16, BF16), False),
        (RMS, (5, 4864), 1.0, None, (F16, F16), True),
        (CENTRED, (4, 2304), 0.0, Plan(8, 3, 1), (BF16, F32), True),
        # a warp a row: the last rows are fewer than warps, the last access fewer lanes
        (LAYER, (13, 896), 2.0, None, (BF16, BF16), False),
        (LAYER, (9, 1024), 0.0, None, (F16, F32), False),  # the sums fill the ring
        (RMS, (9, 264), 0.0, None, (F16, F32), True),
        (CENTRED, (16, 1024), 0.0, Plan(1, 3, 1), (BF16, BF16), False),
    ],
)
def test_every_row(monkeypatch, kind, shape, mean, how, dtypes, added):
    """Two blocks, of several turns, the last without a row for one of them."""
    arrays = case(shape, mean, dtypes[0], dtypes[1], added)
    how = how or taken(shape[1], dtypes[0])
    d_x, shares = by_lanes(monkeypatch, arrays, kind, how, 2, 1 + (kind is LAYER))
    sums = [jnp.asarray(share.sum(0), dtypes[1]) for share in shares]
    assert_right(d_x, sums, arrays, kind)
    for wrong in (np.roll(d_x, 1, axis=1), d_x * np.asarray(1.1, d_x.dtype)):
        with pytest.raises(AssertionError):
            assert_right(wrong, sums, arrays, kind)
    for i in range(len(sums)):
        wrong = [*sums[:i], sums[i] * jnp.asarray(1.1, dtypes[1]), *sums[i + 1 :]]
        with pytest.raises(AssertionError):
            assert_right(d_x, wrong, arrays, kind)


@pytest.mark.parametrize("width", [896, 3080])
def test_without_a_bias(monkeypatch, width):
    arrays = case((5, width), 2.0, BF16, BF16, False)
    d_x, [share] = by_lanes(monkeypatch, arrays, LAYER, taken(width), 2, 1)
    assert_right(d_x, [jnp.asarray(share.sum(0), BF16)], arrays, LAYER)


def taken(width: int, dtype: Any = BF16) -> Plan:
    found = plan_of(width, dtype)
    assert found is not None
    return found


def test_which_rows_it_takes():
    assert plan_of(256, BF16) is None  # one access a lane
    assert plan_of(4096, F32) is None
    assert plan_of(1028, BF16) is None
    assert plan_of(8200, BF16) is None  # more numbers than a thread has registers for their sums
    assert [taken(width).warps for width in (264, 1024)] == [1, 1]
    assert [taken(width, F16).warps for width in (1032, 3072, 3080, 8192)] == [4, 4, 8, 8]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_what_goes_back_by_lanes_came_by_lanes(dtype):
    """No copy takes 385 runs of 8 numbers, and none is asked to."""
    widths = [width for width in range(8, 16384, 8) if plan_of(width, dtype)]
    assert widths == [*range(264, 8193, 8)]
    for width in widths:
        assert norm_lanes.default_config(width, dtype) is not None
        x, weight = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((5, width), (width,)))
        assert why_not_rms_norm(x, weight, eps=EPS, device=H200) is None
        assert why_not_layer_norm(x, weight, weight, eps=EPS, device=H200) is None


def test_blocks_have_as_many_rows():
    blocks = norm_lanes_backward._blocks
    assert blocks(8192, 132) == 128
    assert blocks(8448, 132) == blocks(65536, 132) == 132  # nothing, or next to it, is gained
    assert blocks(5, 132) == 5
    assert blocks(9, 2) == 2


GRID = [(LAYER, False), (RMS, False), (CENTRED, False), (RMS, True)]


def gradients(kind: Kind, added: bool, x, weight, dy, d_total=None) -> Any:
    """d_x, d_weight and, of a LayerNorm, d_bias, of what users call."""
    if kind is LAYER:
        norm = partial(layer_norm, eps=EPS)
        return jax.vjp(norm, x, weight, jnp.zeros_like(weight))[1](dy)
    norm = partial(rms_norm, eps=EPS, zero_centered=kind.zero_centered)
    if not added:
        return jax.vjp(norm, x, weight)[1](dy)
    f = lambda x, weight: norm(x, weight, residual=jnp.zeros_like(x))  # noqa: E731
    return jax.vjp(f, x, weight)[1]((dy, d_total))


@pytest.mark.aot
@pytest.mark.parametrize(("kind", "added"), GRID, ids=str)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(8192, BF16), (8192, F32), (4096, BF16), (3080, F32), (2048, F16), (896, BF16), (1024, F32)],
)
def test_compiled(kind, added, width, dtype):
    """Wide accesses, nothing spilled, and registers for as many blocks as are asked for."""
    x, weight = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((8192, width), (width,)))
    weight = jax.ShapeDtypeStruct((width,), dtype)
    program = aot.compile_for(partial(gradients, kind, added), x, weight, x, *[x] * added)
    kernel = program.kernel(f"{kind.name}{'_residual' * added}_backward")
    how = taken(width)
    assert kernel.spill_store_bytes == 0
    assert kernel.registers * 32 * how.block_warps * how.blocks_per_sm <= 65536
    accesses = -(-width // 8 // (32 * how.warps))
    assert kernel.count("LDGSTS", "128") == accesses * (2 + added) * how.ahead
    assert kernel.count("STG", "EF", "128") == accesses
    assert kernel.count("SHFL") > 0


@pytest.mark.gpu
@pytest.mark.parametrize("width", [264, 896, 1024, 1032, 3072, 3080, 4096, 8192])
@pytest.mark.parametrize(("kind", "added"), GRID, ids=str)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F32)])
def test_on_the_gpu(kind, added, width, dtypes):
    """Of more rows than blocks, of few, and under vmap; twice the same bits."""
    for count in (1500, 3):
        arrays = case((count, width), 0.5, dtypes[0], dtypes[1], added)
        given = [arrays[name] for name in ("x", "weight", "dy", "d_total") if name in arrays]
        f = jax.jit(partial(gradients, kind, added))
        d_x, *sums = f(*given)
        assert_right(d_x, sums, arrays, kind)
        for again, before in zip(f(*given), (d_x, *sums), strict=True):
            np.testing.assert_array_equal(again, before)
    x, weight, *others = given
    each = [array.reshape(3, 1, width) for array in (x, *others)]
    axes = (0, None, *[0] * len(others))
    over_three: Any = jax.vmap(partial(gradients, kind, added), in_axes=axes)
    many, *shares = over_three(each[0], weight, *each[1:])
    np.testing.assert_array_equal(many.reshape(d_x.shape), d_x)
    for share, whole in zip(shares, sums, strict=True):
        assert share.shape == (3, *whole.shape)
