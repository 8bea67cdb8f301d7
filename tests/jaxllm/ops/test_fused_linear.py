"""A projection with what stands around it: every implementation, and which one runs."""

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import absent
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import ops
from jaxllm.ops import Cache, Norm, Rotary, fused_linear
from jaxllm.ops.fused_linear import PACKED_ROWS
from pallas_kernels import _compat
from pallas_kernels.quantize import quantize

HEADS, WIDTH = (2, 1), 32


def case(
    epilogue: str | None,
    dtype: Any,
    rows: int = 2,
    *,
    normed: bool = False,
    width: int = WIDTH,
    turned: int | None = None,
) -> tuple[Any, ...]:
    """width: of a head, of which the first `turned` numbers are, or all."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    outputs = 4 * width
    x, weight, bias = draw(rows, 1, 128), draw(outputs, 128) / 128**0.5, draw(outputs)
    around: dict[str, Any] = {"norm": Norm(draw(128), 1e-5), "epilogue": epilogue}
    if epilogue == "rope":
        angles = rng.uniform(-4, 4, (rows, 1, (turned or width) // 2))
        cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
        norms = [Norm(draw(width), 1e-5), Norm(draw(width), 0.5, True)] if normed else []
        around["rotary"] = Rotary(cos, sin, *HEADS, *norms)
    else:
        around["residual"] = draw(rows, 1, outputs // (1 if epilogue is None else 2))
    return x, weight, bias, around


def in_parts(x, weight, bias, *, norm, epilogue, residual: Any = None, rotary=None) -> Any:
    """The ops of its parts, one by one."""
    y = ops.linear(ops.rms_norm(x, norm.weight, eps=norm.eps), weight, bias)
    gates = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "relu2_glu": "relu2"}
    if epilogue in gates:
        y = ops.glu(*jnp.split(y, 2, axis=-1), activation=gates[epilogue])
    if rotary is None:
        return (y + residual,)
    heads = y.reshape(len(x), 1, 4, -1)
    q, k = heads[:, :, :2], heads[:, :, 2:3]
    if rotary.norms:
        norms = (rotary.q_norm, rotary.k_norm)
        q, k = (ops.rms_norm(z, n.weight, **n.keywords) for z, n in zip((q, k), norms, strict=True))
    q, k = ops.rope(q, k, rotary.cos, rotary.sin)
    return q, k, heads[:, :, 3:]


@pytest.mark.parametrize("epilogue", [None, "swiglu", "geglu", "rope"])
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(
    ("implementation", "dtype", "atol"),
    [
        ("xla", jnp.float32, 2e-5),
        ("xla", jnp.bfloat16, 0),
        ("pallas-interpret", jnp.bfloat16, 0.06),  # does not round between the parts
    ],
)
def test_every_implementation_is_the_parts(epilogue, rows, implementation, dtype, atol):
    *arrays, around = case(epilogue, dtype, rows)
    run = interpreted if "interpret" in implementation else lambda f, *args: jax.jit(f)(*args)
    ours = run(lambda *a: fused_linear(*a, **around, implementation=implementation), *arrays)
    parts = jax.jit(lambda *a: in_parts(*a, **around))(*arrays)
    for y, part in zip(jax.tree.leaves(ours), parts, strict=True):
        assert (y.shape, y.dtype) == (part.shape, dtype)
        np.testing.assert_allclose(np.float32(y), np.float32(part), atol=atol, rtol=atol / 8)


def test_the_parts_are_told_apart():
    """The twin: a product that is 3 % off is more than 0.06 and a part in 133 away."""
    x, weight, bias, around = case(None, jnp.bfloat16)
    right, wrong = (
        in_parts(x, w, bias, **around)[0].astype(jnp.float32) for w in (weight, weight * 1.03)
    )
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(right, wrong, atol=0.06, rtol=0.06 / 8)


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("epilogue", [None, "swiglu", "rope"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_are_those_of_the_parts(epilogue, rows, dtype):
    """Of x, the weight, the bias and the norm's weight."""
    *arrays, around = case(epilogue, dtype, rows)
    norm = around.pop("norm")
    arrays.append(norm.weight)

    def gradients(implementation):
        def loss(x, weight, bias, scale):
            named = {**around, "norm": norm._replace(weight=scale)}
            y = fused_linear(x, weight, bias, **named, implementation=implementation)
            parts = (jnp.tanh(part.astype(jnp.float32)) for part in jax.tree.leaves(y))
            return sum(jnp.sum(part) for part in parts)

        return jax.grad(loss, (0, 1, 2, 3))

    ours = interpreted(gradients("pallas-interpret"), *arrays)
    parts = jax.jit(gradients("xla"))
    exact = parts(*(a.astype(jnp.float32) for a in arrays))
    for mine, part, truth in zip(ours, parts(*arrays), exact, strict=True):
        assert_as_accurate(mine, part, np.asarray(truth, np.float64))
        with pytest.raises(AssertionError):  # the twin
            assert_as_accurate(mine * 1.03, part, np.asarray(truth, np.float64))


def assert_as_in_parts(scheme, epilogue, implementation, atol, dtype):
    x, weight, bias, around = case(epilogue, dtype)
    packed = quantize(weight, scheme)
    run = interpreted if "interpret" in implementation else lambda f, *args: jax.jit(f)(*args)
    ours = run(
        lambda *a: fused_linear(*a, **around, implementation=implementation), x, packed, bias
    )
    parts = jax.jit(lambda *a: in_parts(*a, **around))(x, packed, bias)
    for y, part in zip(jax.tree.leaves(ours), parts, strict=True):
        assert (y.shape, y.dtype) == (part.shape, dtype)
        np.testing.assert_allclose(np.float32(y), np.float32(part), atol=atol)


@pytest.mark.parametrize("epilogue", [None, "swiglu", "geglu", "rope"])
@pytest.mark.parametrize(
    ("implementation", "atol"),
    [("xla", 0), ("pallas-interpret", 0.06)],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_packed_weight(epilogue, implementation, atol, dtype):
    """With the norm in the product, and, in float16, where the product takes none, before it."""
    assert_as_in_parts("int8", epilogue, implementation, atol, dtype)


@pytest.mark.parametrize("epilogue", [None, "swiglu", "relu2_glu", "rope"])
@pytest.mark.parametrize(
    ("implementation", "dtype", "atol"),
    [("xla", jnp.float32, 1e-4), ("pallas-interpret", jnp.float16, 0.06)],
)
def test_a_ternary_weight(epilogue, implementation, dtype, atol):
    assert_as_in_parts("ternary", epilogue, implementation, atol, dtype)


def test_what_only_ternary_weights_have():
    x, weight, _, around = case("swiglu", jnp.bfloat16)
    around = {"norm": around["norm"], "epilogue": "relu2_glu"}
    with absent("NVIDIA H200"):
        reasons = ops.explain("fused_linear", x, quantize(weight, "int8"), **around)
        assert reasons["pallas"] == "int8 weights have no 'relu2_glu'"
        packed = quantize(weight, "ternary")
        assert ops.explain("fused_linear", x, packed, **around)["pallas"] is None
        around["norm"] = around["norm"]._replace(zero_centered=True)
        assert "adds no 1" in str(ops.explain("fused_linear", x, packed, **around)["pallas"])


def test_what_ternary_weights_have_not():
    x, weight, _, around = case("geglu", jnp.bfloat16)
    around = {"norm": around["norm"], "epilogue": "geglu"}
    with absent("NVIDIA H200"):
        for scheme, said in (("ternary", "ternary weights have no 'geglu'"), ("int8", None)):
            reasons = ops.explain("fused_linear", x, quantize(weight, scheme), **around)
            assert reasons["pallas"] == said


@pytest.mark.parametrize("scheme", [None, "int8", "ternary"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("implementation", "atol"), [("xla", 0), ("pallas-interpret", 0.06)])
def test_a_norm_behind_the_product(scheme, rows, implementation, atol):
    """Of product and bias, before the residual."""
    x, weight, bias, around = case(None, jnp.bfloat16, rows)
    weight = weight if scheme is None else quantize(weight, scheme)
    norm, residual = around["norm"], around["residual"]
    behind = Norm(jnp.linspace(-0.5, 0.5, 128).astype(jnp.bfloat16), 0.25, True)
    run = interpreted if "interpret" in implementation else lambda f, *args: jax.jit(f)(*args)
    how = {"norm": norm, "post_norm": behind, "implementation": implementation}

    def parts(x, weight, bias, residual):
        y = ops.linear(ops.rms_norm(x, norm.weight, eps=norm.eps), weight, bias)
        return residual + ops.rms_norm(y, behind.weight, **behind.keywords)

    arrays = x, weight, bias
    ours = run(lambda *a: fused_linear(*a[:3], residual=a[3], **how), *arrays, residual)
    np.testing.assert_allclose(
        np.float32(ours), np.float32(jax.jit(parts)(*arrays, residual)), atol=atol
    )
    alone = run(lambda *a: fused_linear(*a, **how), *arrays)
    expected = jax.jit(parts)(*arrays, jnp.zeros_like(residual))
    np.testing.assert_allclose(np.float32(alone), np.float32(expected), atol=atol)


def test_a_norm_behind_a_gate_is_refused():
    x, weight, bias, around = case("swiglu", jnp.float32)
    with pytest.raises(ValueError, match="^fused_linear: a post_norm takes no epilogue, got 'swig"):
        fused_linear(x, weight, bias, **around, post_norm=around["norm"])


def test_a_wrong_norm_behind_a_product_is_refused():
    x, weight, bias, around = case(None, jnp.float32)
    norm = around["norm"]
    for wrong, said in (
        (norm._replace(eps=0.0), "the post_norm's eps must be positive"),
        (
            norm._replace(weight=jnp.ones(7)),
            r"the post_norm's weight must be floating point, \[O\]",
        ),
    ):
        with pytest.raises(ValueError, match=f"^fused_linear: {said}"):
            fused_linear(x, weight, bias, **around, post_norm=wrong)


@pytest.mark.parametrize(
    "weights",
    [
        *("plain", "plain, one row", "int8", "int8, turned apart", "ternary"),
        *("plain, normed", "plain, one row, normed", "int8, normed", "ternary, normed"),
        *("plain, one row, part of a head", "int8, part of a head"),
    ],
)
@pytest.mark.parametrize(("implementation", "atol"), [("xla", 0), ("pallas-interpret", 0.06)])
def test_tokens_go_into_a_cache(weights, implementation, atol, monkeypatch):
    """Turned where they are summed, or by a kernel of its own where that one does not take it."""
    if not _compat.WRITES_REFERENCES and "interpret" in implementation:
        pytest.skip("jax 0.10 has no kernels that write into what they are given")
    dtype = jnp.float16 if weights == "ternary" else jnp.bfloat16
    slots = [2, 0][: 1 if "one row" in weights else 2]
    part = {"width": 64, "turned": 32} if "part" in weights else {}
    x, weight, bias, around = case("rope", dtype, len(slots), normed="normed" in weights, **part)
    held = jnp.zeros((len(slots), 3, HEADS[1], len(weight) // 4), dtype)
    cache = Cache(held, held + 1, jnp.asarray(slots, jnp.int32))
    scheme = weights.split(",")[0]
    arrays = x, weight if scheme == "plain" else quantize(weight, scheme), bias, cache
    module = importlib.import_module("jaxllm.ops.fused_linear")
    refuses, apart, turned = module.why_not_quantized, module.rope_into_cache, []

    def without_heads(*args: Any, rotary: Any = None, **rest: Any) -> str | None:
        return "asked for" if rotary is not None else refuses(*args, **rest)

    def recorded(*args: Any, **rest: Any) -> Any:
        turned.append(1)
        return apart(*args, **rest)

    if "apart" in weights:
        monkeypatch.setattr(module, "why_not_quantized", without_heads)
    monkeypatch.setattr(module, "rope_into_cache", recorded)
    run = interpreted if "interpret" in implementation else lambda f, *args: jax.jit(f)(*args)
    q, k, v = run(
        lambda x, weight, bias, cache: fused_linear(
            x, weight, bias, **around, cache=cache, implementation=implementation
        ),
        *arrays,
    )
    apart_by = any(word in weights for word in ("apart", "ternary", "normed", "part"))
    own = implementation != "xla" and apart_by
    assert bool(turned) == own
    parts = jax.jit(lambda *a: in_parts(*a, **around))(*arrays[:3])
    np.testing.assert_allclose(np.float32(q), np.float32(parts[0]), atol=atol)
    for row, slot in enumerate(slots):
        for ours, part, before in ((k, parts[1], 0), (v, parts[2], 1)):
            here = np.asarray(ours[row], np.float32)
            np.testing.assert_allclose(here[slot], np.float32(part[row, 0]), atol=atol)
            assert (np.delete(here, slot, axis=0) == before).all()


def test_which_one_runs():
    x, weight, _, around = case("swiglu", jnp.bfloat16)
    packed = quantize(weight, "int8")
    with absent("NVIDIA H200"):
        assert ops.chosen("fused_linear", x, packed, **around) == "pallas"
        assert ops.chosen("fused_linear", x[:1], weight, norm=around["norm"]) == "pallas"
        wide = jax.ShapeDtypeStruct((1, PACKED_ROWS + 1, 128), jnp.bfloat16)
        reasons = ops.explain("fused_linear", wide, packed, norm=around["norm"])
    assert list(reasons) == ["pallas", "pallas-interpret", "xla"]
    assert reasons["pallas"] is None  # a kernel for the norm, and one for tiles of 65 rows
    if jax.default_backend() == "cpu":
        here = ops.explain("fused_linear", x, weight, **around)
        assert here["pallas"] == "needs an NVIDIA GPU, found cpu"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"rows": rows}, None) for rows in (1, 2, 16)),
        ({"rows": 17}, "multiplies no 17 rows of 128 numbers by a weight that is not packed"),
        ({"inputs": 144}, "plain takes inputs in multiples of 32, got 144"),
        ({"dtype": jnp.float32}, "takes x in bfloat16 or float16, got float32"),
        ({"dtype": jnp.float16}, "several rows of x were measured in bfloat16, these are float16"),
        ({"rows": 16, "inputs": 5632}, None),  # the README says so
        (
            {"rows": 16, "inputs": 5664},
            "its norm would be a launch of its own, which was not measured: norms whole rows of "
            "x, and 16 of 5664 numbers are in 2 parts",
        ),
        ({"norm": None}, None),
        ({"rows": 1, "dtype": jnp.float16}, None),
    ],
)
def test_what_auto_takes_of_a_plain_weight(changes, said):
    sizes: dict[str, Any] = {"rows": 2, "inputs": 128, "dtype": jnp.bfloat16, **changes}
    i, dtype = sizes["inputs"], sizes["dtype"]
    shapes = (sizes["rows"], 1, i), (64, i), (i,)
    arrays: Any = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    x, weight, scale = arrays
    around = {"norm": sizes.get("norm", Norm(scale, 1e-5)), "epilogue": "swiglu"}
    with absent("NVIDIA H200"):
        assert ops.explain("fused_linear", x, weight, **around)["pallas"] == said


def test_how_many_rows_it_is_for():
    _, weight, *_ = case(None, jnp.bfloat16)
    packed = quantize(weight, "int8")
    assert ops.takes_rows(16, weight, packed)
    assert not ops.takes_rows(17, weight, packed)
    assert ops.takes_rows(PACKED_ROWS, packed)
    assert not ops.takes_rows(PACKED_ROWS + 1, packed)


@pytest.mark.own_errors
def test_a_wrong_call_is_refused():
    x, weight, bias, around = case("swiglu", jnp.bfloat16)
    for w in (weight, quantize(weight, "int8")):
        wrong = {**around, "residual": x}
        with pytest.raises(ValueError, match=r"^fused_linear: residual must be \[2, 1, 64\], got"):
            fused_linear(x, w, bias, **wrong)
        wrong = {"norm": around["norm"], "epilogue": "gelu"}
        said = "^fused_linear: epilogue 'gelu' is not None, 'swiglu', 'geglu', 'relu2_glu' or"
        with pytest.raises(ValueError, match=said):
            fused_linear(x, w, bias, **wrong, implementation="xla")


@pytest.mark.parametrize("eps", [0.0, -1e-3, math.nan])
def test_the_eps_of_a_norm_is_positive(eps):
    x, weight, _, around = case("swiglu", jnp.bfloat16)
    norm = around["norm"]._replace(eps=eps)
    for w in (weight, quantize(weight, "int8")):
        for implementation in ("xla", "pallas-interpret"):
            with pytest.raises(ValueError, match=r"eps"):
                fused_linear(x, w, norm=norm, epilogue="swiglu", implementation=implementation)


def test_a_residual_of_another_dtype_leaves_the_results_alone():
    x, weight, bias, around = case(None, jnp.bfloat16)
    for w in (weight, quantize(weight, "int8")):
        wide = {**around, "residual": around["residual"].astype(jnp.float32)}
        y = fused_linear(x, w, bias, **wide, implementation="xla")
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            np.float32(y), np.float32(fused_linear(x, w, bias, **around, implementation="xla"))
        )
