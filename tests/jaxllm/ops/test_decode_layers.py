"""The op of all layers: every implementation, and which one runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from absent_device import H200
from between_calls import shapes_of
from kernels import interpreted
from layers_calls import assert_right, call

from jaxllm import ops
from jaxllm.ops.decode_layers import DECODE_LAYERS
from pallas_kernels import _compat
from pallas_kernels.packed import PLAIN

SMALL = (128, 256, (2, 1, 64))


def run(arguments: dict[str, Any], implementation: str) -> Any:
    layers, token = arguments["layers"], arguments["token"]

    def of_x(x: jax.Array) -> Any:
        how = {"meeting": ops.no_meeting(), "implementation": implementation}
        return ops.decode_layers(x, layers, token, **how)[:2]

    compiled = interpreted if "interpret" in implementation else lambda f, *a: jax.jit(f)(*a)
    return compiled(of_x, arguments["x"])


@pytest.mark.parametrize("form", [PLAIN, "int4"])
@pytest.mark.parametrize("implementation", ["xla", "pallas-interpret"])
def test_every_implementation(form: str, implementation: str):
    if implementation != "xla" and not _compat.WRITES_REFERENCES:
        pytest.skip("jax 0.10 writes into no array that is there")
    arguments = call(*SMALL, form, bias=form == PLAIN, window=9)
    assert_right(arguments, run(arguments, implementation))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "phrase"),
    [
        ((896, 4864, (14, 2, 64), PLAIN, 32768), None),
        ((896, 4864, (14, 2, 64), PLAIN, 32769), "more than 16 MiB of keys and values"),
        ((4096, 14336, (32, 8, 128), "int8", 4096), None),  # 208 MiB of weights
        ((4096, 14336, (32, 8, 128), "int8", 4097), "more than 16 MiB of keys and values"),
        ((4096, 14336, (32, 8, 128), PLAIN, 64), "256 MiB of weights a layer (416.00 here)"),
        ((896, 4864, (14, 2, 64), "mxfp8", 64), "mxfp8 in groups of 32 was not found to be faster"),
    ],
)
def test_what_auto_leaves_out(of: Any, phrase: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    d, f, heads, form, slots, *norms = of
    rest = {"device": H200, "meeting": jnp.zeros(2 + heads[1], jnp.int32)}
    more = {"layers": 1, "slots": slots, "head_norms": "".join(norms)}
    arguments = shapes_of(partial(call, d, f, heads, form, **more))
    call_of = (arguments["x"], arguments["layers"], arguments["token"])
    entry = DECODE_LAYERS["pallas"]
    assert entry.why_not(*call_of, **rest) is None
    reason = entry.why_not_auto(*call_of, **rest)
    assert reason is None if phrase is None else phrase in str(reason), reason


@pytest.mark.own_errors
@pytest.mark.parametrize("implementation", ["xla", "auto"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": []}, "there are no layers"),
        ({"meeting": jnp.zeros(99)}, r"meeting is float32\[99\], not int32\[2\]"),
        ({"x": jnp.zeros((2, 128), jnp.bfloat16)}, r"cos must be \[2, 32\], got \[1, 32\]"),
    ],
)
def test_wrong_calls(change: dict[str, Any], sentence: str, implementation: str):
    """Whatever would compute it."""
    arguments = {**call(*SMALL), "meeting": ops.no_meeting(), **change}
    with pytest.raises(ValueError, match=f"^decode_layers.*{sentence}"):
        ops.decode_layers(**arguments, implementation=implementation)
