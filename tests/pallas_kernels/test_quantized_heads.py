"""`quantized_matmul` that turns heads and writes them to a cache, against float64.

What the lanes do is in test_quantized_lanes.py, without a cache in test_quantized_matmul.py.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import H200
from kernels import interpreted
from quantized_calls import (
    BF16,
    F16,
    F32,
    FORMATS,
    assert_right,
    call,
    interpret,
    numbers,
    packed_shape,
)

from pallas_kernels import _compat
from pallas_kernels import quantized_matmul_kernel as kernel
from pallas_kernels.around_product import Rotary
from pallas_kernels.packed import PLAIN, Packed
from pallas_kernels.quantize import quantize
from pallas_kernels.quantized_matmul import (
    quantized_matmul,
    quantized_matmul_reference,
    why_not,
)
from pallas_kernels.quantized_tiles_config import Tiles

pytestmark = pytest.mark.usefixtures("strict_jax")

written = pytest.mark.skipif(
    not _compat.WRITES_REFERENCES, reason="jax 0.10 writes into no array that is there"
)

CALLS: Any = {
    "one row, norm": partial(call, 1, 128, 256, "int4", BF16, "norm heads 2 1 32"),
    "bias": partial(call, 3, 256, 256, "int8", F16, "bias heads 2 1 64"),
    "zero points": partial(call, 2, 192, 256, "int4, zero points", BF16, "heads 2 2 32"),
}


@written
@pytest.mark.parametrize("name", CALLS)
def test_forward(name: str):
    arrays, keywords = CALLS[name]()
    assert_right(arrays, keywords, interpret(arrays, keywords))


@written
def test_the_check_sees_other_heads():
    arrays, keywords = CALLS["bias"]()
    y = interpret(arrays, keywords)
    rotary, cache = arrays["rotary"], arrays["cache"]
    for other in (
        {"rotary": rotary._replace(sin=-rotary.sin)},
        {"cache": cache._replace(slots=cache.slots.at[0].set(0))},
    ):
        with pytest.raises(AssertionError, match="error is"):
            assert_right({**arrays, **other}, keywords, y)


@written
def test_gradients():
    """Those of the plain path, to the bit."""
    arrays, keywords = CALLS["bias"]()
    rotary, cache, packed = arrays["rotary"], arrays["cache"], arrays["packed"]
    given = arrays["x"], arrays["bias"], rotary.cos, cache.k
    d_out = (
        numbers(9, (3, 128), F16),
        numbers(10, cache.k.shape, F16),
        numbers(11, cache.v.shape, F16),
    )

    def run(f: Any, d_out: Any, *given: Any, **more: Any) -> Any:
        def parts(x: Any, bias: Any, cos: Any, k: Any) -> Any:
            around = {"rotary": rotary._replace(cos=cos), "cache": cache._replace(k=k)}
            return f(x, packed, bias=bias, **around, **keywords, **more)

        return jax.vjp(parts, *given)[1](d_out)

    ours = interpreted(partial(run, quantized_matmul, interpret=True), d_out, *given)
    plain = jax.jit(partial(run, quantized_matmul_reference))(d_out, *given)
    for a, b in zip(ours, plain, strict=True):
        assert np.abs(b).max() > 0.1
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


@written
@pytest.mark.parametrize("lead", [(), (1, 3)])
def test_heads_of_leading_dimensions(lead: tuple[int, ...]):
    rows = max(1, int(np.prod(lead)))
    arrays, keywords = call(rows, 128, 256, "int4", BF16, "heads 2 1 32")
    flat = interpret(arrays, keywords)
    rotary = arrays["rotary"]
    angles = {name: getattr(rotary, name).reshape(*lead, 16) for name in ("cos", "sin")}
    shaped_ = {"x": arrays["x"].reshape(*lead, 256), "rotary": rotary._replace(**angles)}
    q, *held = interpret({**arrays, **shaped_}, keywords)
    assert q.shape == (*lead, 64)
    for y, other in zip((q.reshape(rows, -1), *held), flat, strict=True):
        np.testing.assert_array_equal(y, other)


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, BF16)


def shaped(o: int, i: int) -> Packed:
    return packed_shape("int4", o, i, BF16)


def rotary(rows: int, width: int) -> Rotary:
    """One head of q and one of k."""
    angles: Any = jax.ShapeDtypeStruct((rows, width // 2), F32)
    return Rotary(angles, angles, 1, 1)


X, W = shape(3, 256), shaped(96, 256)
TERNARY = jax.eval_shape(lambda w: quantize(w, "ternary"), shape(96, 256))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cache": None}, "'rope', rotary and a cache go together"),
        ({"epilogue": "swiglu"}, "'rope', rotary and a cache go together"),
        ({"residual": shape(1, 128)}, "'rope' takes no residual and gives x's dtype"),
        ({"out_dtype": F32}, "'rope' takes no residual and gives x's dtype"),
        ({"q_heads": 3}, r"heads must be \[1, 160\], got \[1, 128\]"),
        ({"cos": jnp.ones((1, 1, 16))}, r"cos must be \[1, 16\], got \[1, 1, 16\]"),
        ({"cos": jnp.ones(())}, r"cos must be \[1, 16\], got \[\]"),
        ({"cos": jnp.ones((1, 17))}, r"cos must be \[1, 16\], got \[1, 17\]"),
    ],
)
def test_wrong_calls(change: dict[str, Any], sentence: str):
    arrays, keywords = CALLS["one row, norm"]()
    rest = {name: x for name, x in change.items() if name not in Rotary._fields}
    own = {name: x for name, x in change.items() if name in Rotary._fields}
    arrays["rotary"] = arrays["rotary"]._replace(**own)
    with pytest.raises(ValueError, match=f"^quantized_matmul: .*{sentence}"):
        quantized_matmul(**{**arrays, **keywords, **rest}, interpret=True)


@pytest.mark.parametrize(
    ("x", "weight", "rotary", "config", "phrase"),
    [
        (X, W, rotary(3, 32), None, None),
        (X, shaped(72, 256), rotary(3, 24), None, "heads in multiples of 16 at 3 rows"),
        (X, W, rotary(3, 16), None, "16 of the 32 numbers of a head are turned"),
        (X, W, rotary(3, 32), Tiles(), "turns no heads where tiles"),
        (X, TERNARY, rotary(3, 32), None, "turns no heads of a ternary weight"),
        (
            shape(16, 14336),
            shaped(96, 14336),
            rotary(16, 32),
            None,
            "turns sums of whole rows of x, and 16 of 14336 numbers are in 4 parts",
        ),
    ],
)
def test_why_not(
    x: Any,
    weight: Any,
    rotary: Any,
    config: Any,
    phrase: str | None,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    reason = why_not(x, weight, rotary=rotary, config=config, device=H200)
    assert reason is None if phrase is None else phrase in str(reason)


def test_needs_a_cache_that_can_be_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", False)
    assert "needs jax 0.11" in str(why_not(X, W, rotary=rotary(3, 32), device=H200))
    assert why_not(X, W, device=H200) is None


@written
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, F16])
def test_angles_of_few_bits(dtype: Any):
    """No lane reads a byte; numbers of 16 bits are read as they are."""
    arrays, keywords = CALLS["bias"]()
    rotary = arrays["rotary"]
    few = rotary._replace(cos=rotary.cos.astype(dtype), sin=rotary.sin.astype(dtype))
    found = []

    def recorded(static: Any, x: Any, packed: Any, *around: Any, **_: Any):
        *_, angles, cache = around
        found.extend(a.dtype for a in angles)
        q = jnp.zeros((1, len(x), 2 * static.heads.half * static.heads.q), x.dtype)
        return q, cache.k, cache.v

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "warp_products", recorded)
        jax.clear_caches()
        quantized_matmul(**{**arrays, "rotary": few}, **keywords, interpret=True)
    jax.clear_caches()
    assert found == [BF16 if dtype == jnp.float8_e4m3fn else F16] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("form", [*FORMATS, PLAIN])
@pytest.mark.parametrize(("n", "k", "width"), [(14, 2, 64), (8, 2, 128), (4, 4, 96)])
def test_on_a_gpu(rows: int, form: str, n: int, k: int, width: int):
    i = 1024 if form == "int4, groups of 512" else 896
    for extra, dtype in (("norm", BF16), ("bias", BF16), ("bias", F16)):
        if dtype == F16 and form.startswith("mx"):
            continue  # not taken
        extra += f" heads {n} {k} {width}"
        arrays, keywords = call(rows, (n + 2 * k) * width, i, form, dtype, extra)
        run = jax.jit(
            lambda x, cache, arrays=arrays: quantized_matmul(
                **{**arrays, "x": x, "cache": cache}, epilogue="rope"
            )
        )
        assert_right(arrays, keywords, run(arrays["x"], arrays["cache"]))
