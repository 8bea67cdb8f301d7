"""A turned token and its place in the cache, in the interpreter; what is refused."""

import functools
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
from pallas_kernels import _compat
from pallas_kernels import device as device_lib
from pallas_kernels.around_product import Cache, Norm, Rotary
from pallas_kernels.gemv import gemv
from pallas_kernels.rope_into_cache import (
    rope_into_cache,
    rope_into_cache_reference,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

S = 5


Q_NORM, K_NORM = {"zero_centered": False, "eps": 1e-6}, {"zero_centered": True, "eps": 0.5}


def case(
    B: int,
    N: int,
    K: int,
    H: int,
    slots: list[int],
    dtype: Any = jnp.bfloat16,
    norms: tuple[str, ...] = (),
    turned: int | None = None,
) -> Any:
    """turned: of a head; None: all of it."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    angles = rng.uniform(-4, 4, (B, (turned or H) // 2))
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    cache = Cache(draw(B, S, K, H), draw(B, S, K, H), jnp.asarray(slots, jnp.int32))
    heads, rotary = draw(B, (N + 2 * K) * H), Rotary(cos, sin, N, K)
    kinds = {"q_norm": Q_NORM, "k_norm": K_NORM}
    return heads, rotary._replace(**{name: Norm(draw(H), **kinds[name]) for name in norms}), cache


def assert_right(ours: Any, heads, rotary, cache) -> None:
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    angles = (f64(a.astype(heads.dtype)) for a in rotary[:2])
    truth = oracles.turn_and_write(f64(heads), *angles, rotary.q_heads, cache, rotary[4:])
    plain = rope_into_cache_reference(heads, rotary, cache)
    for a, b, wanted in zip(ours, plain, truth, strict=True):
        assert a.dtype == heads.dtype
        assert_as_accurate(a, b, wanted)


@pytest.mark.parametrize(
    ("sizes", "slots", "dtype", "norms", "turned"),
    [
        ((1, 3, 1, 64), [0], jnp.bfloat16, (), None),
        ((2, 4, 2, 96), [4, 5], jnp.float16, (), None),  # one row whose slot is past the end
        ((3, 1, 1, 32), [2, -1, 1], jnp.bfloat16, (), None),  # not the last place
        ((2, 3, 2, 64), [1, 4], jnp.bfloat16, ("q_norm", "k_norm"), None),
        ((1, 2, 1, 32), [2], jnp.float16, ("k_norm",), None),
        ((1, 3, 1, 64), [1], jnp.bfloat16, (), 32),
        ((2, 2, 1, 128), [4, 0], jnp.bfloat16, ("q_norm", "k_norm"), 96),
    ],
)
def test_rope_into_cache(sizes, slots, dtype, norms, turned):
    heads, rotary, cache = case(*sizes, slots=slots, dtype=dtype, norms=norms, turned=turned)
    ours = interpreted(made(rotary, interpret=True), heads, rotary, cache)
    assert_right(ours, heads, rotary, cache)


@pytest.mark.parametrize("norms", [("q_norm", "k_norm"), ("k_norm",)])
def test_heads_of_zeros_without_a_norm_stay(norms):
    heads, rotary, cache = case(1, 2, 1, 32, slots=[2], norms=norms)
    heads = heads.at[:, -32:].set(0)  # v's
    if "q_norm" not in norms:
        heads = heads.at[:, :64].set(0)
    q, k, v = interpreted(made(rotary, interpret=True), heads, rotary, cache)
    assert np.isfinite(np.float32(k)).all()
    assert not np.float32(v[0, 2]).any()
    assert np.float32(q).any() == ("q_norm" in norms)


def made(rotary, **more: Any) -> Any:
    """The call, of arrays alone."""

    def run(heads, given, cache):
        norms = {
            name: norm._replace(weight=getattr(given, name).weight)
            for name, norm in rotary.norms.items()
        }
        return rope_into_cache(
            heads, rotary._replace(cos=given.cos, sin=given.sin, **norms), cache, **more
        )

    return run


@pytest.mark.parametrize(("axis", "width", "turned"), [(1, 32, None), (-1, 64, 32)])
def test_under_vmap_slices_lie_along_any_axis(axis, width, turned):
    """What is written into has its slices in front for the kernel, wherever they come from."""
    cases = [case(2, 2, 1, width, slots=slots, turned=turned) for slots in ([1, 4], [3, 0])]
    cases[1] = (-cases[1][0], *cases[1][1:])
    rotary = cases[0][1]

    def run(heads, k, v, slots):
        return rope_into_cache(heads, rotary, Cache(k, v, slots), interpret=True)

    arrays = [(heads, *cache) for heads, _, cache in cases]
    stacked = [jnp.stack(each, axis) for each in zip(*arrays, strict=True)]
    found = interpreted(jax.vmap(run, axis, axis), *stacked)
    for i, (heads, _, cache) in enumerate(cases):
        ours = [jnp.take(x, i, axis=axis) for x in found]
        assert_right(ours, heads, rotary, cache)


def test_the_check_can_fail():
    heads, rotary, cache = case(2, 2, 1, 32, [1, 5])
    q, k, v = rope_into_cache_reference(heads, rotary, cache)
    assert_right((q, k, v), heads, rotary, cache)
    normed = case(2, 2, 1, 32, [1, 5], norms=("q_norm", "k_norm"))
    others = rope_into_cache_reference(*normed)
    for wrong in ((q.at[0, 3].multiply(1.1), k, v), (q, v, k), (q, k, cache.v), others):
        with pytest.raises(AssertionError, match="error is"):
            assert_right(wrong, heads, rotary, cache)


@pytest.mark.parametrize(
    ("width", "turned", "norms"), [(32, None, ()), (64, 32, ("q_norm", "k_norm"))]
)
def test_its_gradient_is_that_of_the_plain_path(width, turned, norms):
    """By heads, angles, what the cache held and the norms' weights."""
    heads, rotary, cache = case(1, 2, 1, width, [3], norms=norms, turned=turned)
    weights = {name: norm.weight for name, norm in rotary.norms.items()}

    def loss(f, heads, angles, held, weights, **more):
        norms = {name: rotary.norms[name]._replace(weight=w) for name, w in weights.items()}
        turn = rotary._replace(**dict(zip(("cos", "sin"), angles, strict=True)), **norms)
        total = jnp.float32(0)
        for i, part in enumerate(f(heads, turn, Cache(*held, cache.slots), **more)):
            by = jnp.linspace(-1, 2 + i, part.size)  # results are not rounded alike
            total += jnp.sum(part.reshape(-1).astype(jnp.float32) * by)
        return total

    given = heads, rotary[:2], cache[:2], weights
    ours, plain = (
        jax.grad(functools.partial(loss, f), (0, 1, 2, 3))
        for f in (functools.partial(rope_into_cache, interpret=True), rope_into_cache_reference)
    )
    ours, plain = (
        jax.tree.leaves(interpreted(ours, *given)),
        jax.tree.leaves(jax.jit(plain)(*given)),
    )
    assert len(ours) == 5 + len(norms)
    for a, b in zip(ours, plain, strict=True):
        assert np.any(b)
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_why_not(monkeypatch: pytest.MonkeyPatch):
    heads, rotary, cache = case(1, 2, 1, 48, [0])
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", False)
    assert "needs jax 0.11" in str(why_not(heads, rotary, cache, device=H200))
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    phrase = "takes halves of what is turned of a head in multiples of 16, got 24"
    assert why_not(heads, rotary, cache, device=H200) == phrase
    phrase = "takes what is not turned of a head in multiples of 16, got 8"
    assert why_not(*case(1, 2, 1, 40, [0], turned=32), device=H200) == phrase
    wide = [jnp.zeros((1, 128)), *case(1, 2, 1, 32, [0])[1:]]
    assert why_not(*wide, device=H200) == "takes bfloat16 or float16, got float32"
    still = rotary._replace(cos=rotary.cos[:, :0], sin=rotary.sin[:, :0])
    assert why_not(heads, still, cache, device=H200) == "nothing of a head is turned"
    none = [x[:0] if x is heads else x for x in (heads, rotary, cache)]
    assert why_not(*none, device=H200) == "nothing to turn: heads are [0, 192]"
    assert why_not(heads, rotary, cache, device=device_lib.Device("cpu")) == (
        "needs an NVIDIA GPU, found cpu"
    )
    with pytest.raises(NotImplementedError, match="^rope_into_cache: cannot run this call: needs"):
        rope_into_cache(heads, rotary, cache)


@pytest.mark.own_errors
def test_what_does_not_fit_is_refused():
    heads, rotary, cache = case(2, 2, 1, 32, [0, 1])
    for wrong, said in (
        ((heads[:, :-1], rotary, cache), r"heads must be \[2, 128\], got \[2, 127\]"),
        ((heads, rotary._replace(sin=rotary.cos[:1]), cache), r"sin must be \[2, 16\]"),
        ((heads, rotary, cache._replace(slots=cache.slots[:1])), r"slots must be \[2\], got \[1\]"),
        ((heads.astype(jnp.float16), rotary, cache), "heads are float16, but the cache holds"),
        ((heads, rotary, cache._replace(slots=jnp.zeros(2))), "slots must be integers, got float"),
        (
            (heads, rotary._replace(cos=jnp.ones((2, 16), jnp.int32)), cache),
            "cos is int32; it must",
        ),
        (
            (heads, rotary._replace(k_norm=Norm(jnp.ones(16), 1e-5)), cache),
            r"k_norm's weight must be floating point, \[H\] = \[32\], got float32\[16\]",
        ),
        (
            (heads, rotary._replace(q_norm=Norm(jnp.ones(32), -1.0)), cache),
            "q_norm's eps must be positive and finite, got -1.0",
        ),
    ):
        with pytest.raises(ValueError, match=f"^rope_into_cache: .*{said}"):
            rope_into_cache(*wrong)


@pytest.mark.aot
@pytest.mark.parametrize("slots", ["int32", "uint8"])
def test_narrow_numbers_compile(slots):
    heads, rotary, cache = case(1, 2, 1, 32, [0])
    cache = cache._replace(slots=cache.slots.astype(slots))
    narrow = rotary._replace(cos=rotary.cos.astype("float8_e5m2"))
    program = aot.compile_for(lambda *x: rope_into_cache(x[0], narrow, x[1]), heads, cache)
    assert program.mosaic_launches() == ["rope_into_cache"]
    x, weight = jnp.ones((1, 128), heads.dtype), jnp.ones((heads.shape[1], 128), heads.dtype)

    def run(x, weight, cache):
        return gemv(x, weight, epilogue="rope", rotary=rotary, cache=cache)

    assert aot.compile_for(run, x, weight, cache).mosaic_launches() == ["gemv_rope"]


@pytest.mark.gpu
@pytest.mark.parametrize("norms", [(), ("q_norm", "k_norm"), ("q_norm",)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("n", "k", "width", "turned"),
    [
        *((14, 2, 64, None), (32, 8, 128, None), (20, 5, 128, None), (32, 32, 96, None)),
        *((24, 8, 128, 96), (4, 1, 256, 64)),
    ],
)
def test_on_a_gpu(n, k, width, turned, dtype, norms):
    how = {"dtype": dtype, "norms": norms, "turned": turned}
    heads, rotary, cache = case(4, n, k, width, slots=[4, -1, 0, 5], **how)
    run = jax.jit(lambda heads, cache: rope_into_cache(heads, rotary, cache))
    assert_right(run(heads, cache), heads, rotary, cache)
