"""GEMV in the interpreter: what stands around the product, odd sizes, what it refuses."""

import dataclasses
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
from pallas_kernels import device as device_lib
from pallas_kernels.around_product import Cache, Norm, Rotary
from pallas_kernels.gemv import (
    Config,
    bucket,
    candidates,
    default_config,
    gemv,
    gemv_reference,
    problem,
    tuning_calls,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

EPS = 0.1  # beside a mean square of 1 one of 1e-5 would be lost in the rounding to 16 bits
HEADS, WIDTH = (3, 1), 16  # of q, of k; numbers in each


def case(o: int, i: int, dtype: Any = jnp.bfloat16, **around: Any) -> tuple[Any, ...]:
    """One row, the weight, and the keywords; True in `around` stands for an array by chance."""
    rng = np.random.default_rng(0)

    def draw(*shape: int, scale: float = 1.0, dtype: Any = dtype) -> Any:
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    x, weight = draw(1, i), draw(o, i, scale=i**-0.5)
    if (zero_centered := around.get("norm")) is not None:
        around["norm"] = Norm(draw(i, dtype=jnp.float32), EPS, zero_centered)
    if around.get("bias"):
        around["bias"] = draw(o)
    if around.get("residual"):
        around["residual"] = draw(1, o // 2 if around.get("epilogue") else o)
    if around.get("epilogue") == "rope":
        angles = rng.uniform(-4, 4, (1, WIDTH // 2))
        cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
        around["rotary"] = Rotary(cos, sin, *HEADS)
    return x, weight, around


def truth(x, weight, *, norm=None, bias=None, epilogue=None, residual=None, rotary=None):
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    y = f64(x)
    if norm is not None:
        scale = f64(norm.weight.astype(x.dtype)) if not norm.zero_centered else f64(norm.weight) + 1
        y = y / np.sqrt(np.mean(y * y, -1, keepdims=True) + norm.eps) * scale
    y = y @ f64(weight).T
    y = y if bias is None else y + f64(bias)
    if epilogue in oracles.GATES:
        gate, up = np.split(y, 2, axis=-1)
        y = oracles.glu(gate, up, activation=oracles.GATES[epilogue])
    if rotary is None:
        return (y if residual is None else y + f64(residual),)
    heads = y.reshape(1, 1, -1, WIDTH)
    tables = (f64(t.astype(x.dtype))[None] for t in rotary[:2])
    q, k, v = np.split(heads, (HEADS[0], sum(HEADS)), axis=2)
    cos, sin = tables
    q, k = (oracles.turn(part, cos, sin) for part in (q, k))
    return q.reshape(1, -1), np.concatenate([k, v], axis=2).reshape(1, -1)


CASES = {
    "plain": case(16, 256),
    "one past three steps of a thread": case(12, 7 * 256, residual=True),
    "half the lanes share a row": case(24, 3 * 128, norm=False, bias=True, residual=True),
    "float16": case(8, 512, jnp.float16, norm=True, bias=True),
    "swiglu": case(32, 256, norm=False, bias=True, epilogue="swiglu", residual=True),
    "geglu": case(16, 256, norm=True, epilogue="geglu"),
    "rope": case(5 * WIDTH, 256, norm=True, bias=True, epilogue="rope"),
}


def assert_right(ours: Any, x, weight, around) -> None:
    plain = jax.tree.leaves(gemv_reference(x, weight, **around))
    for y, near, wanted in zip(
        jax.tree.leaves(ours), plain, truth(x, weight, **around), strict=True
    ):
        assert y.dtype == near.dtype
        assert_as_accurate(y, near, wanted)


@pytest.mark.parametrize("name", CASES)
def test_gemv(name):
    x, weight, around = CASES[name]
    config = Config(4, 512) if "three steps" in name else None
    ours = interpreted(lambda x, w: gemv(x, w, **around, config=config, interpret=True), x, weight)
    assert_right(ours, x, weight, around)


def test_the_check_can_fail():
    x, weight, around = CASES["rope"]
    q, kv = gemv_reference(x, weight, **around)
    right = (q, kv)
    assert_right(right, x, weight, around)
    for wrong in ((q.at[0, 2].multiply(1.05), kv), (q, kv[:, ::-1])):
        with pytest.raises(AssertionError, match="error is"):
            assert_right(wrong, x, weight, around)


def test_results_of_another_dtype_and_leading_dimensions():
    x, weight, _ = case(16, 256)
    y = interpreted(
        lambda x, w: gemv(x.reshape(1, 1, -1), w, out_dtype=jnp.float32, interpret=True), x, weight
    )
    assert (y.shape, y.dtype) == ((1, 1, 16), jnp.float32)
    assert_as_accurate(y[0], gemv_reference(x, weight, out_dtype=jnp.float32), *truth(x, weight))


def test_eps_may_be_a_number_of_jax():
    x, weight, around = CASES["float16"]
    norm = around["norm"]._replace(eps=jnp.float32(around["norm"].eps))
    run = lambda x, w, norm: gemv(x, w, **{**around, "norm": norm}, interpret=True)  # noqa: E731
    np.testing.assert_array_equal(run(x, weight, norm), run(x, weight, around["norm"]))


def with_cache(slot: int) -> tuple[Any, ...]:
    x, weight, around = CASES["rope"]
    rng = np.random.default_rng(1)
    held = (rng.standard_normal((1, 5, HEADS[1], WIDTH)) for _ in range(2))
    k, v = (jnp.asarray(a, x.dtype) for a in held)
    return x, weight, {**around, "cache": Cache(k, v, jnp.asarray([slot], jnp.int32))}


@pytest.mark.parametrize("slot", [0, 4, 5, -1])
def test_a_token_is_written_into_a_cache(slot):
    x, weight, around = with_cache(slot)
    cache = around.pop("cache")
    q, *held = interpreted(
        lambda x, w, cache: gemv(x, w, **around, cache=cache, interpret=True), x, weight, cache
    )
    plain_q, kv = gemv_reference(x, weight, **around)
    wanted = [np.array(a, np.float32) for a in cache[:2]]
    if 0 <= slot < 5:  # elsewhere is nowhere
        heads = np.float32(kv[0]).reshape(2, HEADS[1], WIDTH)
        wanted[0][0, slot], wanted[1][0, slot] = heads
    np.testing.assert_array_equal(np.float32(q), np.float32(plain_q))
    _, *plain = gemv_reference(x, weight, **around, cache=cache)
    for a, b, c in zip(held, wanted, plain, strict=True):
        np.testing.assert_array_equal(np.float32(a), b)
        np.testing.assert_array_equal(np.float32(c), b)


@pytest.mark.own_errors
def test_a_cache_that_does_not_fit_is_refused():
    x, weight, around = with_cache(0)
    cache = around.pop("cache")
    with pytest.raises(ValueError, match="^gemv: a cache takes what 'rope' makes"):
        gemv(x, weight, cache=cache)
    for wrong in (
        cache._replace(k=cache.k[:, :4]),
        cache._replace(v=cache.v.astype(jnp.float32)),
        cache._replace(slots=jnp.zeros(2, jnp.int32)),
    ):
        with pytest.raises(ValueError, match=r"^gemv: the cache's keys, values and slots must be"):
            gemv(x, weight, **around, cache=wrong)
    with pytest.raises(ValueError, match="^gemv: slots must be integers, got float32"):
        gemv(x, weight, **around, cache=cache._replace(slots=jnp.zeros(1)))


@pytest.mark.parametrize("name", ["swiglu", "geglu", "rope"])
def test_gradients_are_the_references(name):
    """By x, the weight, and what stands around the product."""
    x, weight, around = CASES[name]
    norm, rotary = around["norm"], around.get("rotary")
    arrays = {"x": x, "weight": weight, "gain": norm.weight, "angles": rotary and rotary[:2]}
    arrays |= {name: around[name] for name in ("bias", "residual") if name in around}

    def gradient(f, arrays, **more):
        def call(gain, angles, **arrays):
            given = {**around, **arrays, "norm": norm._replace(weight=gain)}
            if angles is not None:
                given["rotary"] = Rotary(*angles, *HEADS)
            return f(**given, **more)

        y, pull = jax.vjp(lambda arrays: call(**arrays), arrays)
        # The cotangent is no function of the results, which the kernel rounds otherwise
        return pull(jax.tree.map(lambda y: jnp.ones_like(y).at[:, ::3].set(-2), y))[0]

    ours = interpreted(lambda arrays: gradient(gemv, arrays, interpret=True), arrays)
    plain = jax.jit(lambda arrays: gradient(gemv_reference, arrays))(arrays)
    for a, b in zip(*map(jax.tree.leaves, (ours, plain)), strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))
        assert np.abs(np.float32(b)).max() > 0.1


@pytest.mark.parametrize("config", [Config(4, 256), Config(8, 512), Config(16, 1024)])
def test_a_config_changes_no_more_than_the_order_of_sums(config):
    x, weight, around = case(16, 1024, norm=False)
    ours = interpreted(lambda x, w: gemv(x, w, **around, config=config, interpret=True), x, weight)
    assert_right(ours, x, weight, around)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"m": 2}, "takes one row of x, got 2"),
        ({"i": 192}, "takes inputs in multiples of 128, got 192"),
        ({"o": 18}, "takes outputs in multiples of 4, got 18"),
        ({"i": 131072}, "131072 inputs do not fit on chip"),
        ({"dtype": jnp.float32}, "takes bfloat16 or float16, got x float32 and a weight float32"),
        ({"m": 0}, "takes one row of x, got 0"),
        ({"o": 0}, "nothing to multiply: the weight is [0, 256]"),
    ],
)
def test_why_not(changed, said):
    sizes = {"m": 1, "o": 16, "i": 256, "dtype": jnp.bfloat16, **changed}
    x = jax.ShapeDtypeStruct((sizes["m"], sizes["i"]), sizes["dtype"])
    weight = jax.ShapeDtypeStruct((sizes["o"], sizes["i"]), sizes["dtype"])
    assert why_not(x, weight, device=H200) == said


def test_why_not_elsewhere():
    x, weight, _ = CASES["plain"]
    assert why_not(x, weight, device=H200) is None
    said = why_not(x, weight, device=device_lib.Device("cpu"))
    assert said == "needs an NVIDIA GPU, found cpu"
    with pytest.raises(NotImplementedError, match="^gemv: cannot run this call: needs an NVIDIA"):
        gemv(x, weight)


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"x": jnp.ones((1, 8), jnp.int32)}, "x is int32; it must be floating point"),
        ({"weight": jnp.ones((4, 9))}, r"x \[1, 8\] and the weight \[4, 9\] are not"),
        ({"bias": jnp.ones(3)}, r"bias must be \[4\], got \[3\]"),
        ({"residual": jnp.ones((1, 5))}, r"residual must be \[1, 4\], got \[1, 5\]"),
        ({"norm": Norm(jnp.ones(7), 1e-5)}, r"norm's weight must be \[8\], got \[7\]"),
        ({"epilogue": "gelu"}, "epilogue 'gelu' is not None, 'swiglu', 'geglu' or 'rope'"),
        ({"epilogue": "swiglu", "weight": jnp.ones((3, 8))}, "two halves of outputs, got 3"),
        ({"epilogue": "rope"}, "'rope' and rotary go together"),
        (
            {"epilogue": "rope", "rotary": Rotary(jnp.ones((1, 1)), jnp.ones((1, 1)), 2, 1)},
            "4 outputs are not 4 heads of 2",
        ),
        (
            {"epilogue": "rope", "rotary": Rotary(jnp.ones((1, 2)), jnp.ones((2, 2)), 1, 0)},
            r"cos \[1, 2\] and sin \[2, 2\] must be",
        ),
        ({"out_dtype": jnp.int8}, "out_dtype .*int8.* is not bfloat16, float16 or float32"),
        (
            {"x": CASES["plain"][0], "weight": CASES["plain"][1], "config": Config(3, 8)},
            r"Config\(outputs=3, inputs=8\): outputs must be a multiple of 4 that divides 16",
        ),
    ],
)
def test_bad_calls_are_refused(arguments, said):
    given = {"x": jnp.ones((1, 8)), "weight": jnp.ones((4, 8)), **arguments}
    with pytest.raises(ValueError, match=f"^gemv: .*{said}"):
        gemv(given.pop("x"), given.pop("weight"), **given, interpret=True)


def test_candidates_are_legal_for_every_call_of_a_key():
    """A row's config is not looked at before it runs, and its key does not tell a head's width.

    But `why_not` lets through no head that is not made of a default's outputs.
    """
    for call in tuning_calls():
        (x, weight), around = call.arguments, call.keywords
        assert why_not(x, weight, **around, device=H200) is None
        found = candidates(x, weight, **around, device=H200)
        assert len(set(found)) == len(found) > 4
        assert default_config(x, weight, **around) not in found
        for config in found:
            assert config.outputs == default_config(x, weight, **around).outputs
            assert problem(config, x, weight, **around) is None
            no_whole_line = dataclasses.replace(config, inputs=config.inputs + 8)
            assert "inputs" in str(problem(no_whole_line, x, weight, **around))


@pytest.mark.aot
@pytest.mark.parametrize("which", range(4))
def test_what_is_tuned_is_one_kernel(which):
    """What a call closes over are constants, and those of one number XLA makes by a kernel."""
    call = tuning_calls()[which]

    def launches(around):
        run = functools.partial(call.run, **around)
        return [launch.name for launch in aot.compile_for(run, *call.arguments).launches]

    assert len(launches(call.keywords)) == 1
    ones = lambda a: jnp.ones_like(a) if isinstance(a, jax.Array) else a  # noqa: E731
    assert len(launches(jax.tree.map(ones, call.keywords))) > 1  # the twin


def test_the_default_is_legal_at_the_sizes_of_models():
    for o, i, epilogue, width in (
        (1152, 896, "rope", 64),
        (9728, 896, "swiglu", 0),
        (896, 4864, None, 0),
        (6144, 4096, "rope", 128),
        (28672, 4096, "swiglu", 0),
        (4096, 14336, None, 0),
        (9216, 3072, "rope", 96),
        (16384, 3072, "swiglu", 0),
        (3072, 8192, None, 0),
    ):
        x = jax.ShapeDtypeStruct((1, i), jnp.bfloat16)
        weight = jax.ShapeDtypeStruct((o, i), jnp.bfloat16)
        table: Any = jax.ShapeDtypeStruct((1, width // 2), jnp.float32)
        rotary = Rotary(table, table, o // width - 2, 1) if width else None
        around = {"epilogue": epilogue, "rotary": rotary}
        assert why_not(x, weight, **around, device=H200) is None
        config = default_config(x, weight, **around)
        assert problem(config, x, weight, **around) is None
        assert bucket(x, weight, **around).startswith(f"bfloat16-m1-n{o}-k{i}-")
    assert problem(Config(4, 100), x, weight) == "inputs must be a multiple of 256"
