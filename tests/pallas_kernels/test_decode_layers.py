"""`decode_layers`: op by op, what it refuses, how layers are dealt; on a GPU.

What its lanes do is in test_decode_layers_lanes.py.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import H200, absent
from between_calls import shapes_of
from kernels import interpreted
from layers_calls import assert_right, call, jitted, poisoned
from quantized_calls import BF16

from jaxllm import aot
from pallas_kernels import _compat, device
from pallas_kernels.around_product import Norm, Rotary
from pallas_kernels.between_attentions_config import MEETING_WORDS
from pallas_kernels.decode_layers import (
    MOST_ARRAYS,
    decode_layers,
    decode_layers_reference,
    plan_of,
    why_not,
)
from pallas_kernels.decode_layers_config import Config
from pallas_kernels.decode_layers_kernel import side_by_side
from pallas_kernels.device import Device
from pallas_kernels.packed import PLAIN

pytestmark = pytest.mark.usefixtures("strict_jax")

written = pytest.mark.skipif(
    not _compat.WRITES_REFERENCES, reason="jax 0.10 writes into no array that is there"
)
MEETING = jnp.zeros(MEETING_WORDS, jnp.int32)
SMALL = partial(call, 128, 256, (2, 1, 64))
# hidden and intermediate size, heads of q and k and their width
QWEN, PHI = (896, 4864, (14, 2, 64)), (3072, 8192, (32, 32, 96))
QWEN_3 = (1024, 3072, (16, 8, 128))
WIDE = (1024, 3584, (32, 8, 128))
BITNET = (2560, 6912, (20, 5, 128))


def interpret(arguments: dict[str, Any]) -> Any:
    run, arrays = jitted(arguments, interpret=True)
    *found, meeting = interpreted(run, *arrays)
    np.testing.assert_array_equal(meeting, 0)
    return found


@written
@pytest.mark.parametrize("form", ["int4", "ternary", PLAIN])
@pytest.mark.parametrize("more", [{}, {"head_norms": "qk", "turned": 32}])
def test_forward(form: str, more: dict[str, Any]):
    arguments = SMALL(form, bias=form == PLAIN, **more)
    assert_right(arguments, interpret(arguments))


@written
def test_the_check_sees_another_norm():
    arguments = SMALL("int4")
    found, layers = interpret(arguments), list(arguments["layers"])
    norm = layers[1].gate_up.norm
    norm = norm._replace(weight=norm.weight.at[3].multiply(4))
    layers[1] = layers[1]._replace(gate_up=layers[1].gate_up._replace(norm=norm))
    with pytest.raises(AssertionError, match="error is"):
        assert_right({**arguments, "layers": layers}, found)


@pytest.mark.parametrize("form", [PLAIN, "int8"])
def test_gradients(form: str, monkeypatch: pytest.MonkeyPatch):
    """Those of the plain path: of floats and of weights that are not packed."""
    module = sys.modules["pallas_kernels.decode_layers"]  # the package has the function's name
    arguments = SMALL(form, bias=True, head_norms="qk")

    def loss(run: Any, x: Any, bias: Any, codes: Any, k: Any, scale: Any) -> Any:
        layers = list(arguments["layers"])
        down = layers[1].down
        weight = dataclasses.replace(down.weight, codes=codes)
        down = down._replace(bias=bias, weight=weight)
        norm = layers[1].k_norm._replace(weight=scale)
        layers[1] = layers[1]._replace(down=down, k=k, k_norm=norm)
        y, caches, *_ = run(x, layers, arguments["token"])
        found = [y, *(array for both in caches for array in both)]
        return sum(jnp.sum(a.astype(jnp.float32) ** 2) for a in found)

    down = arguments["layers"][1].down
    last = arguments["layers"][1]
    given = arguments["x"], down.bias, down.weight.codes, last.k, last.k_norm.weight
    places = (0, 1, 2, 3, 4) if form == PLAIN else (0, 1, 3, 4)

    def plain(plan: Any, *arrays: Any) -> Any:
        return module._plain(plan, *arrays)

    monkeypatch.setattr(module.kernel, "layers", plain)
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    with absent():
        ours = partial(loss, partial(decode_layers, meeting=MEETING))
        found = jax.grad(ours, places)(*given)
    expected = jax.grad(partial(loss, decode_layers_reference), places)(*given)

    def larger(*call: Any) -> Any:
        y, caches = decode_layers_reference(*call)
        return jnp.bfloat16(1.1) * y, [(jnp.bfloat16(1.1) * k, v) for k, v in caches]

    other = jax.grad(partial(loss, larger), places)(*given)
    for a, b, c in zip(found, expected, other, strict=True):
        a, b, c = (np.asarray(each, np.float32) for each in (a, b, c))
        size = np.linalg.norm(b)
        # XLA rounds to bfloat16 at other places where it compiles all at once
        assert np.linalg.norm(a - b) < 2e-2 * size
        assert np.linalg.norm(a - c) > 5e-2 * size


def changed(form: str = "int4", **change: Any) -> dict[str, Any]:
    """A call, or what its layers have in common, otherwise."""
    arguments = SMALL(form)
    token = {name: change.pop(name) for name in list(change) if name in arguments["token"]._fields}
    return {**arguments, "token": arguments["token"]._replace(**token), **change}


def unlike(**change: Any) -> dict[str, Any]:
    """A call of which the second layer is another."""
    arguments = changed()
    first, second = arguments["layers"]
    return {**arguments, "layers": [first, second._replace(**change)]}


def in_another_format() -> dict[str, Any]:
    return unlike(down=SMALL("int8")["layers"][1].down)


def with_a_bias() -> dict[str, Any]:
    qkv = changed()["layers"][1].qkv
    return unlike(qkv=qkv._replace(bias=jnp.ones(128, jnp.bfloat16)))


def with_post_norms(*which: int) -> dict[str, Any]:
    """Behind the last product of the layers of these numbers."""
    layers = changed()["layers"]
    for i in which:
        norm = Norm(jnp.ones(128, jnp.bfloat16), 1e-5)
        layers[i] = layers[i]._replace(down=layers[i].down._replace(post_norm=norm))
    return changed(layers=layers)


def with_head_norms(*dtypes: Any) -> dict[str, Any]:
    """Of the queries, with weights of a dtype each layer."""
    layers = changed()["layers"]
    for i, dtype in enumerate(dtypes):
        layers[i] = layers[i]._replace(q_norm=Norm(jnp.ones(64, dtype), 1e-5))
    return changed(layers=layers)


def unturned() -> Rotary:
    none = jnp.ones((1, 0))
    return Rotary(none, none, 2, 1)


def with_the_tokens_norms() -> dict[str, Any]:
    rotary = changed()["token"].rotary
    return changed(rotary=rotary._replace(q_norm=Norm(jnp.ones(64, BF16), 1e-5)))


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (changed(), None),
        (SMALL("int4", head_norms="qk", turned=48), None),
        (with_head_norms(BF16, BF16), None),
        (with_head_norms(BF16, jnp.float32), "layer 1 is not like layer 0 in q_norm.weight"),
        (with_head_norms(jnp.float32, jnp.float32), "takes q_norm's weight in bfloat16, got float"),
        (changed(rotary=unturned()), "nothing of a head is turned"),
        (SMALL("int4", turned=40), "halves of what is turned of a head in multiples of 8, got 20"),
        (changed("ternary", gate="relu2_glu"), None),
        (in_another_format(), "layer 1 is not like layer 0 in down.weight"),
        (with_a_bias(), "layer 1 is not like layer 0 in qkv.bias"),
        (changed(layers=[]), "there are no layers"),
        (changed(x=jnp.ones((2, 128), jnp.bfloat16)), "takes one row of x, got 2"),
        (changed(x=jnp.ones((1, 128), jnp.float16)), "takes bfloat16, got x float16"),
        (changed(gate="relu2_glu"), "only ternary weights have 'relu2_glu'"),
        (with_post_norms(0, 1), "takes no post_norm"),
        (with_post_norms(1), "layer 1 is not like layer 0 in down.post_norm"),
        (call(128, 256, (4, 1, 48), PLAIN), "head width 48 is not a multiple of 32 up to 128"),
        (call(128, 256, (2, 1, 160), PLAIN), "head width 160 is not a multiple of 32 up to 128"),
        (call(128, 256, (9, 1, 32), PLAIN), "9 query heads share a key head; it takes 8 at most"),
        ({**changed(), "layers": changed()["layers"] * 43}, "86 layers have 1032 arrays; it takes"),
    ],
)
def test_why_not(arguments: dict[str, Any], phrase: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    reason = why_not(**arguments, device=H200)
    assert reason is None if phrase is None else phrase in str(reason), reason


def with_eps(*eps: Any) -> dict[str, Any]:
    """A call of which a norm of each layer has its own."""
    arguments = changed()
    layers = []
    for layer, each in zip(arguments["layers"], eps, strict=True):
        norm = layer.gate_up.norm._replace(eps=each)
        layers.append(layer._replace(gate_up=layer.gate_up._replace(norm=norm)))
    return {**arguments, "layers": layers}


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_layers_with_other_numbers_are_not_alike(kind: Any, monkeypatch: pytest.MonkeyPatch):
    """Whatever these came as: the kernel has those of the first layer."""
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    small, large = kind(2**-17), kind(2**-7)
    assert why_not(**with_eps(small, float(small)), device=H200) is None
    reason = str(why_not(**with_eps(small, large), device=H200))
    assert reason == "layer 1 is not like layer 0 in gate_up.norm.eps"


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("scale", lambda s: changed(scale=s)),
        ("window", lambda s: changed(window=s)),
    ],
)
def test_what_is_traced_is_refused(name: str, make: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)

    def call(number: Any) -> Any:
        return decode_layers(**make(number), meeting=MEETING)

    sentence = f"the {name} is part of the kernel, and here it is traced"
    with absent(), pytest.raises(NotImplementedError, match=sentence):
        jax.make_jaxpr(call)(5 if name == "window" else 1.0)


@pytest.mark.parametrize("model", [QWEN, PHI])
def test_the_interpreter_takes_layers_of_real_models(model: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    arguments = shapes_of(partial(call, *model))
    assert why_not(**arguments, device=device.INTERPRETED_OP_BY_OP) is None


def test_more_key_heads_than_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    small = Device("gpu", "NVIDIA H200", 9.0, 1)
    arguments = call(128, 256, (3, 3, 32), PLAIN)
    assert "3 key heads are more than the 1 blocks" in str(why_not(**arguments, device=small))


def test_needs_hopper_and_a_jax_that_writes(monkeypatch: pytest.MonkeyPatch):
    assert "needs an NVIDIA GPU" in str(why_not(**changed(), device=Device("cpu")))
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", False)
    assert "needs jax 0.11" in str(why_not(**changed(), device=H200))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (changed(layers=[]), "there are no layers"),
        (changed(x=jnp.ones((1, 96), jnp.bfloat16)), "layer 0: the weight of out has 128 outputs"),
        (changed(gate="glu"), "no gate is named 'glu'; there are swiglu, geglu, relu2_glu"),
        (changed(kv_lengths=jnp.ones(2, jnp.int32)), r"kv_lengths is int32\[2\], not int32\[1\]"),
        (changed(kv_lengths=jnp.ones(1)), r"kv_lengths is float32\[1\], not int32\[1\]"),
        (call(128, 256, (3, 2, 64), PLAIN), "3 query heads cannot share 2 key heads; N must be"),
        (changed(window=0), "window must be a whole number, 1 at least, or None, got 0"),
        (changed(window=2.5), "window must be a whole number, 1 at least, or None, got 2.5"),
        (unlike(k=jnp.ones((1, 40, 2, 64), jnp.bfloat16)), "layer 1, qkv: "),
        (unlike(k_norm=Norm(jnp.ones(32, BF16), 1e-5)), r"layer 1, qkv: k_norm's weight must be"),
        (with_the_tokens_norms(), "norms of heads are the layers', and not the token's"),
    ],
)
def test_wrong_calls(arguments: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=f"^decode_layers.*{sentence}"):
        decode_layers(**arguments, meeting=MEETING, interpret=True)


def test_small_arrays_side_by_side():
    words = {"a": jnp.asarray([0, -7]), "b": jnp.asarray([2**31 - 1], jnp.int32)}
    numbers = {
        "c": jnp.asarray([[1.5, -2.0]], jnp.bfloat16),
        "d": jnp.asarray([[3.0]], jnp.bfloat16),
    }
    made, starts = side_by_side(words, numbers)
    assert starts == {"a": 0, "b": 8, "c": 12, "d": 16}
    content = np.asarray(made).tobytes()
    for name, array in (words | numbers).items():
        found = np.frombuffer(content, array.dtype, array.size, starts[name])
        np.testing.assert_array_equal(found, np.asarray(array).reshape(-1))


@pytest.mark.parametrize("meeting", [jnp.zeros(3, jnp.int32), jnp.zeros(2, jnp.uint32)])
def test_wrong_meetings(meeting: jax.Array):
    with pytest.raises(ValueError, match=r"meeting is .*, not int32\[2\]"):
        decode_layers(**changed(), meeting=meeting, interpret=True)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Config(12, 2, 1), "warps must be one of 4, 8, 16"),
        (Config(8, 3, 4), "window must be 1 to 3"),
        (Config(8, 3, 3, turns=0), "turns must be 1 at least"),
        (Config(16, 40, 3), "bytes on chip"),
    ],
)
def test_wrong_configs(config: Config, sentence: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    for interpret in (False, True):
        with absent(), pytest.raises(ValueError, match=sentence):
            decode_layers(**changed(), meeting=MEETING, config=config, interpret=interpret)


def test_refuses_without_a_gpu():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        decode_layers(**changed(), meeting=MEETING)


def alike(*call_of: Any, layers: int = 24, **rest: Any) -> dict[str, Any]:
    """A call of such layers, of shapes alone."""
    found = shapes_of(partial(call, *call_of, **rest, layers=1))
    return {**found, "layers": found["layers"] * layers}


@pytest.mark.parametrize("form", [PLAIN, "int8", "int4", "ternary"])
@pytest.mark.parametrize("model", [QWEN, QWEN_3, PHI, WIDE, BITNET])
def test_the_default_fits(model: Any, form: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    arguments = alike(*model, form)
    plan = plan_of(**arguments, device=H200)
    assert plan.problem() is None
    assert why_not(**arguments, device=H200) is None
    assert len(plan.own) * plan.layers < MOST_ARRAYS
    assert [product.static.name for product in plan.products] == ["qkv", "out", "gate_up", "down"]


@pytest.mark.aot
@pytest.mark.parametrize(
    ("form", "heads", "head_norms"),
    [
        (PLAIN, (4, 2, 128), ""),
        (PLAIN, (4, 2, 128), "qk"),
        ("int4", (8, 1, 64), ""),
        ("int4", (8, 1, 128), "qk"),
        ("ternary", (4, 4, 96), ""),
        (PLAIN, (8, 1, 32), ""),
    ],
)
def test_compiled(form: str, heads: Any, head_norms: str):
    """One launch for all layers; codes are read by 16 bytes, and multiplied by tensor cores, as are
    keys and values.
    """
    run, arrays = jitted(alike(256, 512, heads, form, head_norms=head_norms, layers=3))
    program = aot.compile_for(run, *arrays)
    assert program.mosaic_launches() == ["decode_layers"]
    kernel = program.kernel("decode_layers")
    assert kernel.spill_store_bytes == 0
    assert kernel.count("LDGSTS", "128") >= 4
    assert kernel.count("HMMA", "16816") > 0
    assert kernel.count("HMMA", "1688") > 0
    assert form == PLAIN or kernel.count("IMMA") > 0


def on_device(arguments: dict[str, Any], **how: Any) -> Any:
    run, arrays = jitted(poisoned(arguments), **how)
    *found, meeting = jax.jit(run)(*arrays)
    np.testing.assert_array_equal(meeting, 0)
    return found


# Of scores, such that few keys are most of what heads see: with none of them it is another number
PEAKED = 0.5
DEVICE_CALLS: Any = {
    "Qwen2.5-0.5B": partial(call, *QWEN, bias=True, slots=512, keys=300, scale=PEAKED),
    "int8": partial(call, *QWEN, "int8", slots=2048, keys=2001, layers=3, scale=PEAKED),
    "int4": partial(call, *PHI, "int4", slots=600, keys=513, scale=PEAKED),
    "ternary": partial(call, *WIDE, "ternary", slots=300, keys=77, scale=PEAKED),
    "wide heads": partial(call, *WIDE, slots=5000, keys=4999, scale=PEAKED),
    "a window": partial(call, *WIDE, "int4", slots=1024, keys=1000, window=77, scale=PEAKED),
    "narrow heads": partial(call, 512, 1024, (8, 8, 32), slots=400, keys=400),
    "GELU's gate": partial(call, *WIDE, gate="geglu", slots=300, keys=77, scale=PEAKED),
    "Qwen3-0.6B": partial(call, *QWEN_3, head_norms="qk", slots=2048, keys=2001, slot=900),
    "Qwen3-1.7B in int4": partial(
        call, 2048, 6144, QWEN_3[2], "int4", head_norms="qk", keys=30, scale=PEAKED
    ),
    "parts of heads": partial(
        call, *WIDE, head_norms="k", centred=True, turned=96, slots=300, keys=77, scale=PEAKED
    ),
    "the first token": partial(call, *QWEN, slots=64, keys=1),
    "BitNet": partial(call, *BITNET, "ternary", sub_norms=True, gate="relu2_glu", keys=40),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", DEVICE_CALLS)
def test_on_a_gpu(name: str):
    arguments = DEVICE_CALLS[name]()
    assert_right(arguments, on_device(arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("turns", [1, 3, 100])
@pytest.mark.parametrize("warps", [4, 8, 16])
def test_configs_on_a_gpu(warps: int, turns: int):
    arguments = call(*WIDE, slots=1500, keys=1400, slot=700, head_norms="qk", scale=PEAKED)
    assert_right(arguments, on_device(arguments, config=Config(warps, 4, 2, turns)))


@pytest.mark.gpu
def test_vmap_on_a_gpu():
    """Slice by slice: blocks of two would wait for each other for ever."""
    arguments = call(*QWEN, slots=64, keys=40)
    x = arguments.pop("x")
    rows = jnp.stack([x, 2 * x, -x])
    run = partial(decode_layers, **arguments, meeting=MEETING)
    y, _, _ = jax.vmap(lambda x: run(x))(rows)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(y[i], run(row)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int8", "int4", "ternary", PLAIN])
def test_nan_on_a_gpu(form: str):
    arguments = call(*WIDE, form)
    arguments["x"] = arguments["x"].at[0, 5].set(jnp.nan)
    y, _ = on_device(arguments)
    assert np.isnan(y.astype(jnp.float32)).all()


@pytest.mark.gpu
def test_a_hundred_times_on_a_gpu():
    """The same bits each time, by one meeting and of two calls in turn: nobody reads what was not
    written yet, which would be the other's.
    """
    arguments = call(*QWEN_3, layers=4, slots=2048, keys=2000, slot=900, head_norms="qk")

    def of(sign: Any, meeting: Any) -> Any:
        x = sign * arguments["x"]
        y, caches, meeting = decode_layers(
            x, arguments["layers"], arguments["token"], meeting=meeting
        )
        return [y, *jax.tree.leaves(caches)], meeting

    def again(i: Any, carry: Any) -> Any:
        both, same, meeting = carry
        found, meeting = of(jnp.where(i % 2, -1, 1).astype(jnp.bfloat16), meeting)
        equal = [
            jnp.array_equal(jnp.where(i % 2, b, a), y) for a, b, y in zip(*both, found, strict=True)
        ]
        return both, same & jnp.all(jnp.stack(equal)), meeting

    first, meeting = jax.jit(of)(jnp.bfloat16(1), MEETING)
    second, meeting = jax.jit(of)(jnp.bfloat16(-1), meeting)
    assert not np.array_equal(first[0], second[0])
    _, same, meeting = jax.jit(partial(jax.lax.fori_loop, 0, 100, again))(
        ((first, second), jnp.bool_(True), meeting)
    )
    assert same
    np.testing.assert_array_equal(meeting, 0)


@pytest.mark.gpu
def test_the_device_sees_another_key():
    arguments = call(*QWEN, slots=64, keys=40)
    found, layers = on_device(arguments), list(arguments["layers"])
    layers[1] = layers[1]._replace(k=layers[1].k.at[0, 17].multiply(-1))
    with pytest.raises(AssertionError, match="error is"):
        assert_right({**arguments, "layers": layers}, found)
