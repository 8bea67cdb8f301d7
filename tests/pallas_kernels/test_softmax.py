"""Scale, mask and softmax in the interpreter, against float64: result, gradients, refusals."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import aot
from pallas_kernels import softmax
from pallas_kernels.device import Device
from pallas_kernels.softmax import (
    Config,
    Static,
    scale_softmax,
    scale_softmax_backward,
    scale_softmax_reference,
    why_not,
)
from pallas_kernels.softmax_tiles import plan_of

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
LONG = 8248  # 8 * 1031: in too many runs for one copy, so it is taken as a row that does not fit
FILLS = 24 * 1024  # does not fit either, and fills the threads of 8 blocks

# x, dtype, mask, then arguments. "scale" is an array with a gradient where it is one.
CASES: dict[str, tuple[tuple[int, ...], Any, tuple[int, ...] | None, dict[str, Any]]] = {
    "one row": ((96,), BF16, None, {}),
    "one access": ((3, 8), F16, None, {"scale": 2.0}),
    "a prime of rows": ((7, 96), F16, None, {"scale": 0.3}),
    "one row past a tile": ((17, 128), BF16, None, {"causal": True, "scale": -1.0}),
    "896, scale with a gradient": ((5, 896), F32, None, {"scale": np.float32(0.7)}),
    "1000, mask of all heads": ((2, 2, 5, 1000), BF16, (2, 1, 5, 1000), {}),
    "4 heads that have a mask in common": ((2, 4, 3, 1000), BF16, (2, 1, 3, 1000), {}),
    "the same, rows that fill a warp": ((2, 4, 3, 2048), BF16, (2, 1, 3, 2048), {"scale": 0.5}),
    "the same, a mask of keys and queries": ((2, 2, 3, 2048), F16, (3, 2048), {}),
    "4864": ((2, 4864), BF16, None, {"scale": np.float32(-0.5)}),
    "more than the registers hold": ((1, 8960), F16, (8960,), {}),
    "causal": ((2, 3, 5, 16), F32, None, {"causal": True}),
    "causal, one query": ((2, 1, 24), F32, None, {"causal": True}),
    "causal, several accesses": ((2, 4, 768), BF16, None, {"causal": True}),
    "causal, rows that see nothing": ((1, 520, 512), F32, (512,), {"causal": True}),
    "causal, more queries than keys": ((2, 19, 8), BF16, None, {"causal": True}),
    "causal, a whole mask": ((2, 3, 20), F32, (2, 3, 20), {"causal": True}),
    "a row a batch": ((3, 2, 4, 32), BF16, (3, 1, 1, 32), {}),
    "causal, a row a batch": ((3, 2, 4, 32), BF16, (3, 1, 1, 32), {"causal": True}),
    "a mask of keys": ((2, 3, 4, 48), F32, (48,), {"scale": np.float32(1.5)}),
    "a mask of rows": ((2, 3, 4, 16), F16, (3, 4, 1), {}),
    "one row with a mask": ((1, 16), BF16, (1, 16), {}),
    "causal, one query with a mask": ((3, 1, 16), BF16, (16,), {"causal": True}),
    "a mask of heads": ((2, 3, 2, 2, 16), F32, (3, 1, 2, 16), {}),
    "middle axis": ((3, 16, 5), BF16, (3, 16, 1), {"axis": 1}),
    "first axis": ((16, 7), F32, None, {"axis": -2, "scale": np.float32(1.0)}),
    "long rows": ((3, LONG), BF16, None, {"scale": np.float32(1.3)}),
    "long rows, mask": ((2, 2, LONG), F16, (2, 1, LONG), {}),
    "long rows, causal": ((2, 2, 16640), BF16, (1, 2, 16640), {"causal": True}),
    "long rows that fill the threads": ((2, FILLS), BF16, (2, FILLS), {}),
    "the same, causal": ((3, FILLS), F32, None, {"causal": True, "scale": 0.3}),
    "masked entries, and a scale that float32 has not": ((2, 96), F32, (2, 96), {"scale": 1e-50}),
}


def arrays(shape, dtype, mask, seed=0):
    rng = np.random.default_rng(seed)
    x, d_y = (jnp.asarray(k * rng.standard_normal(shape), dtype) for k in (3, 1))
    return x, d_y, None if mask is None else jnp.asarray(rng.random(mask) < 0.6)


def run(x, d_y, mask=None, *, scale: Any = 1.0, config=None, **kwargs):
    """y, d_x and, if the scale is an array, d_scale: ours, the plain path, the truth."""
    learned = isinstance(scale, np.floating)

    def call(x, d_y, mask, array):
        def f(x, array):
            used = array if learned else scale
            return scale_softmax(x, mask=mask, scale=used, config=config, interpret=True, **kwargs)

        y, pull = jax.vjp(f, x, array)
        d_x, d_scale = pull(d_y)
        return (y, d_x, d_scale) if learned else (y, d_x)

    ours = interpreted(call, x, d_y, mask, jnp.float32(scale))
    kwargs |= {"mask": None if mask is None else np.asarray(mask), "scale": float(scale)}
    expected = []
    for dtype in (x.dtype, np.float64):
        y = oracles.scale_softmax(np.asarray(x), **kwargs, dtype=dtype)
        both = oracles.scale_softmax(np.asarray(x), **kwargs, d_y=np.asarray(d_y), dtype=dtype)
        expected.append((y, *both) if learned else (y, both[0]))
    return ours, *expected


def check(ours, plain, truth, largest_terms):
    for terms in zip(ours, plain, map(np.asarray, truth), strict=False):
        assert_as_accurate(*terms, largest_term=largest_terms)


@pytest.mark.usefixtures("strict_jax")
@pytest.mark.parametrize("name", CASES)
def test_result_and_gradients(name):
    shape, dtype, mask_shape, kwargs = CASES[name]
    x, d_y, mask = arrays(shape, dtype, mask_shape)
    ours, plain, truth = run(x, d_y, mask, **kwargs)
    assert ours[0].dtype == ours[1].dtype == dtype
    check(ours[:2], plain, truth, None)
    for d_scale in ours[2:]:  # a sum of many that cancel
        terms = np.abs(truth[1] * np.asarray(x, np.float64)).sum() / abs(float(kwargs["scale"]))
        assert_as_accurate(d_scale, plain[2], np.asarray(truth[2]), largest_term=float(terms))
    sides = {**kwargs, "scale": 1.0, "mask": None if mask is None else np.asarray(mask)}
    seen = oracles.scale_softmax(np.zeros(shape), **sides) > 0
    assert np.all(np.asarray(ours[0])[~seen] == 0)
    assert np.all(np.asarray(ours[1])[~seen] == 0)


def test_the_check_can_fail():
    x, d_y, _ = arrays((5, 96), F32, None)
    (y, d_x), plain, truth = run(x, d_y, scale=0.5)
    check((y, d_x), plain, truth, None)
    other = run(x, d_y, scale=0.5001)[0]
    top, steep = (jnp.unravel_index(jnp.argmax(jnp.abs(z)), z.shape) for z in (y, d_x))
    for wrong in (
        (y.at[top].multiply(1.05), d_x),
        (y, d_x.at[steep].multiply(1.05)),
        (y, other[1]),
        (other[0], d_x),
        (y.astype(BF16), d_x),
        (y * jnp.nan, d_x),
    ):
        with pytest.raises(AssertionError, match=r"error is|not finite"):
            check(wrong, plain, truth, None)


@pytest.mark.parametrize("shape", [(4, 4, 16), (4, 4, LONG)])
def test_rows_that_nothing_is_left_of(shape):
    """Masked rows, rows of -inf, and whatever stands where the mask is: zeros, and no NaN."""
    x, d_y, _ = arrays(shape, F32, None)
    mask = np.ones(shape, bool)
    mask[0, 1], mask[1, 2, :-1], mask[2, :, 3] = False, False, False
    x = x.at[3, 0].set(-jnp.inf).at[3, 1, 2:5].set(-jnp.inf).at[0, 1].set(-jnp.inf)
    x = x.at[2, 0, 3].set(jnp.nan).at[2, 1, 3].set(jnp.inf).at[2, 2, 3].set(-jnp.inf)
    d_y = d_y.at[0, 1].set(jnp.inf).at[2, :, 3].set(jnp.nan)
    ours, plain, truth = run(x, d_y, jnp.asarray(mask), scale=np.float32(0.5))
    for got, near, exact in zip(ours[:2], plain, truth, strict=False):
        assert_as_accurate(got, near, exact)
    assert_as_accurate(ours[2], plain[2], np.asarray(truth[2]), largest_term=10.0)
    blind = ~(mask & (np.asarray(x) != -np.inf)).any(axis=-1)
    assert blind.sum() == 2
    for got in ours[:2]:
        assert np.all(np.asarray(got)[blind] == 0)


def test_a_nan_is_not_hidden():
    x = jnp.zeros((3, 16)).at[1, 4].set(jnp.nan).at[2, 0].set(jnp.inf)
    y = interpreted(lambda x: scale_softmax(x, interpret=True), x)
    assert np.all(np.isnan(np.asarray(y)) == np.asarray([[False], [True], [True]]))


def test_large_scores_do_not_overflow():
    x = jnp.asarray([[6e4, 6e4 - 32, -6e4, 0] * 4], F16)
    y = interpreted(lambda x: scale_softmax(x, scale=1e3, interpret=True), x)
    np.testing.assert_array_equal(np.asarray(y, np.float32), [[0.25, 0, 0, 0] * 4])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 8, 2048), (3, LONG), (2, FILLS)])
def test_every_config_gives_the_same(shape):
    x, d_y, mask = arrays(shape, BF16, (8, 2048) if shape[-1] == 2048 else shape)
    if shape[-1] in (LONG, FILLS):
        configs = [Config(stages=stages) for stages in (1, 2, 0) if stages or shape[-1] == FILLS]
    else:
        grid = itertools.product((1, 2), (1, 4), (0, 1, 3))
        configs = [Config(repeat, warps, stages) for repeat, warps, stages in grid]
    _, plain, truth = run(x, d_y, mask)
    for config in configs:

        def f(x, mask, config=config):
            return scale_softmax(x, mask=mask, config=config, interpret=True)

        assert_as_accurate(interpreted(f, x, mask), plain[0], truth[0])


@pytest.mark.parametrize(
    ("shape", "phrase"),
    [
        ((4, 24), r"has no stages, for rows that fill the threads, 4 at a time, but got 4 rows of"),
        (
            (3, 256),
            r"has no stages, for rows that fill the threads, 4 at a time, but got 3 rows of",
        ),
        ((4, LONG), f"for rows that fill the threads of all its blocks, but got rows of {LONG}"),
    ],
)
def test_a_config_that_rows_do_not_fill(shape, phrase, monkeypatch):
    x = jnp.zeros(shape, BF16)
    if shape == (4, 24):
        phrase = phrase.replace("threads, 4", "threads, 32")
    with pytest.raises(NotImplementedError, match=phrase):
        scale_softmax(x, config=Config(stages=0), interpret=True)
    # A tuned row of the same bucket is passed over
    monkeypatch.setattr(softmax.tuned, "lookup", lambda *args: Config(stages=0))
    y = interpreted(lambda x: scale_softmax(x, interpret=True), x)
    np.testing.assert_allclose(np.asarray(y, np.float32).sum(axis=-1), 1, rtol=0.02)


def test_rows_of_a_tile_have_a_row_of_the_mask_in_common():
    """Where it has queries and no heads, a tile is of heads, which lie so many rows apart."""
    queries, heads, batch = (2048, True), (32, False), (8, True)
    of = functools.partial(softmax._in_turn, queries=0, width=2048, itemsize=2)
    assert of((batch, heads, queries)) == ((batch, queries, heads), 2048)
    for groups in ((batch, (32 * 2048, False)), (queries,), ((6, False), queries)):
        assert of(groups) == (groups, 1)
    assert softmax._in_turn((heads, queries), 2048, 2048, 2) == ((heads, queries), 1)  # causal
    assert of((heads, queries), width=4096) == ((heads, queries), 1)  # of rows that a block has
    # A config whose tiles the heads do not fill takes rows in their order
    x, mask = struct(2, 4, 8, 2048), struct(2, 1, 8, 2048, dtype=bool)
    config = Config(repeat=2, warps=1, stages=0)
    run = functools.partial(scale_softmax, config=config, interpret=True)
    assert jax.eval_shape(lambda x, mask: run(x, mask=mask), x, mask).shape == x.shape


@pytest.mark.parametrize("cluster", [1, 8])
def test_shares_that_do_not_fit_on_chip(cluster):
    """On a GPU: the interpreter has room for all."""
    config = Config(stages=2 * cluster, cluster=cluster)
    static = Static(((4, False),), 1, 0, 1.0, config, 132, False)
    with pytest.raises(NotImplementedError, match="takes 786432 bytes on chip for rows of 131072"):
        plan_of(static, 131072, 2, 2 + 1)


def test_a_tuned_row_is_used(monkeypatch):
    asked = []

    def lookup(*args):
        asked.append(args[:2])
        return Config(stages=1, warps=4)

    monkeypatch.setattr(softmax.tuned, "lookup", lookup)
    x = jnp.zeros((4, 256), F32)
    jax.eval_shape(functools.partial(scale_softmax, mask=x == 0, interpret=True), x)
    assert asked == [("softmax", "float32 4x256 mask")]


@pytest.mark.parametrize("numbers", [{"warps": 2}, {"stages": -1}, {"repeat": 0}, {"cluster": 9}])
def test_a_config_that_makes_no_sense(numbers):
    with pytest.raises(ValueError, match="scale_softmax: .*warps is 1 or 4"):
        Config(**numbers)


def test_tuning_calls():
    for call in softmax.tuning_calls():
        assert softmax.bucket(*call.arguments, **call.keywords)
        default = softmax.default_config(*call.arguments, **call.keywords, device=H200)
        found = softmax.candidates(*call.arguments, **call.keywords, device=H200)
        assert len(set(found)) == len(found) > 4
        assert default in found


def test_reference_and_its_gradient():
    x, d_y, mask = arrays((2, 3, 5, 7), F32, (2, 1, 5, 7))
    x = x.at[0, 0, 0].set(-jnp.inf).at[1, 1, 2, 3].set(-jnp.inf)
    assert mask is not None
    mask = mask.at[1, 0, 1].set(False)

    def f(x, scale):
        return scale_softmax_reference(x, scale=scale, mask=mask, causal=True)

    y, pull = jax.vjp(f, x, jnp.float32(0.7))
    kwargs = {"scale": 0.7, "mask": np.asarray(mask), "causal": True}
    for dtype in (np.float32, np.float64):
        expected = [
            oracles.scale_softmax(np.asarray(x), **kwargs, dtype=dtype),
            *oracles.scale_softmax(np.asarray(x), d_y=np.asarray(d_y), **kwargs, dtype=dtype),
        ]
        if dtype == np.float32:
            plain = expected
    for ours, near, exact in zip((y, *pull(d_y)), plain, expected, strict=True):
        assert_as_accurate(ours, near, np.asarray(exact), largest_term=10.0)


def test_backward_by_itself():
    y, d_y = (x.reshape(2, 5, 48) for x in arrays((10, 48), F16, None)[:2])

    def f(y, d_y):
        return scale_softmax_backward(y, d_y, scale=0.5, interpret=True)

    p, d = (np.asarray(x, np.float64) for x in (y, d_y))
    truth = 0.5 * p * (d - (p * d).sum(axis=-1, keepdims=True))
    assert_as_accurate(interpreted(f, y, d_y), truth.astype(np.float16), truth)
    with pytest.raises(ValueError, match=r"y is float16\[2, 5, 48\], d_y float32\[2, 5, 48\]"):
        f(y, d_y.astype(F32))
    with pytest.raises(NotImplementedError, match="rows of 18 bytes"):
        f(y[..., :9], d_y[..., :9])


def test_nothing_to_do():
    for shape in ((0, 16), (3, 0)):
        x = jnp.zeros(shape, BF16)
        assert scale_softmax(x, interpret=True).shape == shape


def struct(*shape, dtype: Any = BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("x", "kwargs"),
    [
        (struct(32, 512), {}),
        (struct(8, 32, 2048, 2048), {"mask": struct(8, 1, 2048, 2048, dtype=bool)}),
        (struct(64, 131072, dtype=F32), {"causal": True}),
        (struct(16, 7), {"axis": 0}),
        (struct(1, 151936), {}),
    ],
)
def test_what_runs(x, kwargs):
    assert why_not(x, **kwargs, device=H200) is None
    config = softmax.default_config(x, **kwargs, device=H200)
    assert config in softmax.candidates(x, **kwargs, device=H200)
    assert softmax.bucket(x, **kwargs).startswith(str(x.dtype))


@pytest.mark.parametrize(
    ("x", "kwargs", "phrase"),
    [
        (struct(4, 64), {"device": Device("cpu", "cpu")}, "needs an NVIDIA GPU, found cpu"),
        (
            struct(4, 64),
            {"device": Device("gpu", "NVIDIA A100", 8.0)},
            "needs a Hopper GPU (compute capability 9.0), found 8.0 (NVIDIA A100)",
        ),
        (struct(4, 64, dtype=jnp.float64), {}, "takes bfloat16, float16 or float32, got float64"),
        (
            struct(4, 9),
            {},
            "rows of 18 bytes are no multiple of 16 bytes, which the copy engine needs",
        ),
        (
            struct(4, 8),
            {"mask": struct(4, 8, dtype=bool)},
            "a mask of rows of 8 bytes is too narrow for the copy engine",
        ),
        (
            struct(1, 262144, dtype=F32),
            {},
            "rows of 1048576 bytes are longer than 901120, what a cluster has on chip",
        ),
    ],
)
def test_why_not(x, kwargs, phrase):
    assert why_not(x, **{"device": H200, **kwargs}) == phrase


def test_a_call_that_cannot_run_says_why():
    with pytest.raises(
        NotImplementedError, match="scale_softmax: cannot run this call: rows of 18 bytes are no"
    ):
        scale_softmax(jnp.zeros((4, 9), BF16), interpret=True)


@pytest.mark.parametrize(
    ("x", "kwargs", "sentence"),
    [
        (struct(4, 8, dtype=jnp.int32), {}, "x is int32; it must be floating point"),
        (struct(4, 8), {"axis": 2}, r"axis 2 is out of range for x \(4, 8\)"),
        (struct(4, 8), {"axis": -3}, r"axis -3 is out of range for x \(4, 8\)"),
        (struct(), {}, r"axis -1 is out of range for x \(\)"),
        (struct(8), {"causal": True}, "causal is over the last two axes"),
        (struct(4, 8), {"causal": True, "axis": 0}, "causal is over the last two axes"),
        (struct(4, 8), {"scale": float("nan")}, "scale is NaN"),
        (struct(4, 8), {"scale": "1"}, "scale must be a number, got '1'"),
        (struct(4, 8), {"scale": np.float32("nan")}, "scale is NaN"),
        (struct(4, 8), {"scale": jnp.full((2,), 1.0)}, r"scale has shape \(2,\); it must be a"),
        (struct(4, 8), {"mask": struct(4, 8, dtype=jnp.int8)}, "the mask is int8; it must be bool"),
        (
            struct(4, 8),
            {"mask": struct(3, 8, dtype=bool)},
            r"mask \(3, 8\) does not broadcast to x \(4, 8\)",
        ),
        (
            struct(4, 8),
            {"mask": struct(1, 4, 8, dtype=bool)},
            r"mask \(1, 4, 8\) does not broadcast to x \(4, 8\)",
        ),
    ],
)
@pytest.mark.own_errors
def test_arguments_that_make_no_sense(x, kwargs, sentence):
    with pytest.raises(ValueError, match=f"scale_softmax: .*{sentence}"):
        jax.eval_shape(functools.partial(scale_softmax, **kwargs, interpret=True), x)


def test_concrete_nan_scale_of_an_array():
    with pytest.raises(ValueError, match="scale_softmax: scale is NaN"):
        scale_softmax(jnp.zeros((4, 16)), scale=jnp.float32("nan"), interpret=True)


@pytest.mark.aot
@pytest.mark.parametrize("name", ["one row with a mask", "causal, one query with a mask"])
def test_a_mask_of_one_short_row_compiles(name):
    shape, dtype, mask, keywords = CASES[name]
    arrays = (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(mask, bool))
    program = aot.compile_for(lambda x, mask: scale_softmax(x, mask=mask, **keywords), *arrays)
    assert program.mosaic_launches() == ["scale_softmax"]


@pytest.mark.aot
@pytest.mark.parametrize("width", [2048, 4096])
def test_a_mask_is_read_as_it_is_stored(width):
    """No copy of it is made, where rows fill the threads: one launch."""
    arrays = struct(2, 32, 64, width), struct(2, 1, 64, width, dtype=bool)
    program = aot.compile_for(lambda x, mask: scale_softmax(x, mask=mask), *arrays)
    assert [launch.name for launch in program.launches] == ["scale_softmax"]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1000, 2048, 4096])
@pytest.mark.parametrize("mask", [(2, 1, 24), (1, 1, 24), (2, 1, 1), (2, 8, 24)])
def test_masks_on_the_gpu(mask, width):
    """Alone, and under vmap, where a mask does not begin where its array does."""
    x, _, kept = arrays((2, 8, 24, width), BF16, (*mask, width))
    assert kept is not None
    masks: dict[str, Any] = {"mask": np.asarray(kept)}
    plain, exact = (
        oracles.scale_softmax(np.asarray(x), **masks, dtype=d) for d in (BF16, np.float64)
    )
    ours = jax.jit(lambda x, mask: scale_softmax(x, mask=mask))
    check([ours(x, kept)], [plain], [exact], None)
    if len(kept) > 1:
        check([jax.vmap(ours)(x, kept)], [plain], [exact], None)


def test_config_is_tiling():
    assert {f.name for f in dataclasses.fields(Config)} == {
        *("repeat", "warps", "stages", "blocks_per_sm", "cluster", "warpgroups")
    }
