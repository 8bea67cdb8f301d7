"""The op from attention to attention: every implementation, and which one runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import absent
from between_calls import assert_right, call
from kernels import interpreted

from jaxllm import ops
from pallas_kernels import _compat
from pallas_kernels.packed import PLAIN

SMALL = (128, 256, (2, 1, 64))
MEETING = jnp.zeros(2, jnp.int32)


def run(arguments: dict[str, Any], implementation: Any) -> tuple[Any, Any]:
    """y and, as the kernel gives it, q with its heads side by side."""
    heads, x, link = arguments.values()

    def of_x(heads: jax.Array, x: jax.Array) -> Any:
        how = {"meeting": MEETING, "implementation": implementation}
        return ops.between_attentions(heads, x, link, **how)[:2]

    compiled = interpreted if "interpret" in str(implementation) else lambda f, *a: jax.jit(f)(*a)
    y, after = compiled(of_x, heads, x)
    if after is None:
        return y, None
    q, *kv = after
    assert q.shape[-1] == 2 * link.following.rotary.cos.shape[-1]
    return y, (q.reshape(*x.shape[:-1], -1), *kv)


@pytest.mark.parametrize("form", [PLAIN, "int8", "int4"])
@pytest.mark.parametrize("implementation", ["xla", "pallas-interpret"])
def test_every_implementation(form: str, implementation: str):
    if implementation != "xla" and not _compat.WRITES_REFERENCES:
        pytest.skip("jax 0.10 writes into no array that is there")
    arguments = call(*SMALL, form, bias=form == PLAIN)
    assert_right(arguments, run(arguments, implementation))


def test_of_bitnet():
    arguments = call(*SMALL, "ternary", sub_norms=True, gate="relu2_glu")
    assert_right(arguments, run(arguments, "xla"))


@pytest.mark.parametrize("form", [PLAIN, "int4"])
@pytest.mark.parametrize("implementation", ["xla", "pallas-interpret"])
def test_norms_behind_products(form: str, implementation: str):
    if implementation != "xla" and not _compat.WRITES_REFERENCES:
        pytest.skip("jax 0.10 writes into no array that is there")
    arguments = call(*SMALL, form, centred=True, gate="geglu", post_norms="out down")
    assert_right(arguments, run(arguments, implementation))


def test_the_last_layer():
    arguments = call(128, 256, None, "int8")
    assert_right(arguments, run(arguments, "auto"))


def test_weights_of_another_dtype():
    """What is not packed may be an array, and is multiplied in x's dtype."""
    arguments = call(*SMALL, PLAIN)
    out, how = arguments["link"].out, "pallas-interpret" if _compat.WRITES_REFERENCES else "xla"
    wide = out._replace(weight=out.weight.codes.astype(jnp.float32))
    given = {**arguments, "link": arguments["link"]._replace(out=wide)}
    assert_right(arguments, run(given, how))


def test_the_meeting_comes_back():
    heads, x, link = call(*SMALL, "int8").values()
    *_, meeting = ops.between_attentions(heads, x, link, meeting=ops.no_meeting())
    np.testing.assert_array_equal(meeting, [0, 0])


def test_which_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    given = tuple(call(*SMALL, "int4").values())
    with absent():
        found = ops.explain("between_attentions", *given, meeting=MEETING)
        assert ops.chosen("between_attentions", *given, meeting=MEETING) == "pallas"
    assert found["pallas"] is None
    assert "only by name" in str(found["pallas-interpret"])
    with absent("NVIDIA A100-SXM4-80GB", 108):
        assert ops.chosen("between_attentions", *given, meeting=MEETING) == "xla"
        how = {"meeting": MEETING, "implementation": "pallas"}
        with pytest.raises(NotImplementedError, match="'pallas' cannot run this call: needs a Hop"):
            ops.between_attentions(*given, **how)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        *((form, None) for form in (PLAIN, "int8", "int4", "ternary", "int4, zero points")),
        *((form, None) for form in ("int4, groups of 32", "fp8", "nvfp4", "mxfp4")),
        ("mxfp8", "out: mxfp8 in groups of 32 was not found to be faster in one launch"),
        ("int4, groups of 64, zero points", "out: int4 in groups of 64 with zeros was not found"),
    ],
)
def test_what_auto_takes(form: str, said: str | None, monkeypatch: pytest.MonkeyPatch):
    """What was timed and was faster; the rest is run by name alone."""
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    given = {"meeting": MEETING}
    arguments = tuple(call(*SMALL, form).values())
    with absent():
        reason = ops.explain("between_attentions", *arguments, **given)["pallas"]
        how = {**given, "implementation": "pallas"}
        assert ops.chosen("between_attentions", *arguments, **how) == "pallas"
    assert (reason is None) == (said is None)
    assert said is None or said in str(reason), reason
