"""`between_attentions`: product by product, what it refuses, how it goes over weights; on a GPU.

What its lanes do is in test_between_attentions_lanes.py.
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
from between_calls import assert_right, call, jitted, shapes_of
from kernels import interpreted
from quantized_calls import FORMATS

from jaxllm import aot
from pallas_kernels import _compat, ternary_matmul
from pallas_kernels.around_product import Norm
from pallas_kernels.between_attentions import (
    Config,
    between_attentions,
    between_attentions_reference,
    plan_of,
    why_not,
)
from pallas_kernels.device import SHARED_BYTES, Device
from pallas_kernels.packed import PLAIN
from pallas_kernels.quantize import quantize
from pallas_kernels.quantized_matmul import quantized_matmul_reference

pytestmark = pytest.mark.usefixtures("strict_jax")

written = pytest.mark.skipif(
    not _compat.WRITES_REFERENCES, reason="jax 0.10 writes into no array that is there"
)
MEETING = jnp.zeros(2, jnp.int32)
SMALL = partial(call, 128, 256, (2, 1, 64))
# hidden and intermediate size, heads of q and k and their width
QWEN, LLAMA_1B, PHI = (
    (896, 4864, (14, 2, 64)),
    (2048, 8192, (32, 8, 64)),
    (3072, 8192, (32, 32, 96)),
)
BITNET = (2560, 6912, (20, 5, 128))
QWEN3 = (1024, 3072, (16, 8, 128))
GEMMA3_1B, GEMMA2_2B = (1152, 6912, (4, 1, 256)), (2304, 9216, (8, 4, 256))
GEMMA3_27B = (5376, 21504, (32, 16, 128))


def interpret(arguments: dict[str, Any]) -> Any:
    run, arrays = jitted(arguments, interpret=True)
    *found, meeting = interpreted(run, *arrays)
    np.testing.assert_array_equal(meeting, 0)
    return found


@written
@pytest.mark.parametrize("form", ["int4", "int8", "ternary", PLAIN])
def test_forward(form: str):
    arguments = SMALL(form, bias=form == PLAIN)
    assert_right(arguments, interpret(arguments))


@written
def test_norms_before_all_products():
    arguments = SMALL("ternary", sub_norms=True, gate="relu2_glu")
    assert_right(arguments, interpret(arguments))


@written
def test_the_last_layer():
    arguments = call(128, 256, None, "int4", centred=True)
    y, after = interpret(arguments)
    assert after is None
    assert_right(arguments, (y, None))


# By name, which norms behind products there are, and what is otherwise with them
POST_NORMS: Any = {
    "both": partial(SMALL, PLAIN, centred=True, gate="geglu", post_norms="out down"),
    "one": partial(SMALL, "int4", post_norms="out"),
    "the other, the product alone": partial(SMALL, "int8", turned=False, post_norms="down"),
    "the last layer": partial(call, 128, 256, None, "int8", bias=True, post_norms="out down"),
    "the last layer, one": partial(call, 128, 256, None, PLAIN, post_norms="down"),
}


@written
@pytest.mark.parametrize("name", POST_NORMS)
def test_norms_behind_products(name: str):
    arguments = POST_NORMS[name]()
    assert_right(arguments, interpret(arguments))


@written
def test_the_check_sees_another_norm_behind_a_product():
    arguments = POST_NORMS["both"]()
    found, link = interpret(arguments), arguments["link"]
    norm = link.down.post_norm._replace(eps=0.5)
    other = link._replace(down=link.down._replace(post_norm=norm))
    with pytest.raises(AssertionError, match="error is"):
        assert_right({**arguments, "link": other}, found)


@written
@pytest.mark.parametrize("form", ["int4", "ternary"])
def test_the_product_of_the_next_layer_alone(form: str):
    arguments = SMALL(form, turned=False)
    y, after = interpret(arguments)
    assert [a.shape for a in after] == [(1, 256)]  # all heads
    assert_right(arguments, (y, after))


@written
@pytest.mark.parametrize("form", ["int4", "ternary"])
def test_the_check_sees_another_norm(form: str):
    arguments = SMALL(form)
    found, link = interpret(arguments), arguments["link"]
    norm = link.gate_up.norm._replace(weight=link.gate_up.norm.weight.at[3].multiply(4))
    other = link._replace(gate_up=link.gate_up._replace(norm=norm))
    with pytest.raises(AssertionError, match="error is"):
        assert_right({**arguments, "link": other}, found)


@written
@pytest.mark.parametrize("form", ["int8", "ternary"])
@pytest.mark.parametrize("lead", [(), (1, 1)])
def test_leading_dimensions(lead: tuple[int, ...], form: str):
    arguments = SMALL(form)
    flat = interpret(arguments)
    following = arguments["link"].following
    angles = {name: getattr(following.rotary, name).reshape(*lead, -1) for name in ("cos", "sin")}
    following = following._replace(rotary=following.rotary._replace(**angles))
    shaped = {name: arguments[name].reshape(*lead, -1) for name in ("heads", "x")}
    shaped["link"] = arguments["link"]._replace(following=following)
    y, (q, *held) = interpret(shaped)
    assert (y.shape, q.shape) == ((*lead, 128), (*lead, 128))
    y, q = (a.reshape(1, -1) for a in (y, q))
    for a, b in zip((y, q, *held), jax.tree.leaves(flat), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", [PLAIN, "int8", "ternary", "mixed"])
def test_gradients(form: str, monkeypatch: pytest.MonkeyPatch):
    """Those of the plain path: of floats and of weights that are not packed, straight through where
    x becomes int8.
    """
    module = sys.modules["pallas_kernels.between_attentions"]  # the package has the function's name
    arguments = SMALL("int8" if form == "mixed" else form, bias=True)
    if form == "mixed":
        arguments["link"] = arguments["link"]._replace(down=SMALL(PLAIN, bias=True)["link"].down)
    reference = partial(
        module.in_parts, quantized_matmul_reference, ternary_matmul.straight_through
    )

    def plain(plan: Any, *arrays: Any) -> Any:
        return module._plain(plan, *arrays)

    def loss(run: Any, heads: Any, x: Any, bias: Any, codes: Any) -> Any:
        down = arguments["link"].down
        weight = dataclasses.replace(down.weight, codes=codes)
        link = arguments["link"]._replace(down=down._replace(bias=bias, weight=weight))
        y, (q, k, _), *_ = run(heads, x, link)
        return sum(jnp.sum(a.astype(jnp.float32) ** 2) for a in (y, q, k))

    down = arguments["link"].down
    given = arguments["heads"], arguments["x"], down.bias, down.weight.codes
    places = (0, 1, 2, 3) if form in (PLAIN, "mixed") else (0, 1, 2)
    monkeypatch.setattr(module.kernel, "products", plain)
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    with absent():
        ours = partial(loss, partial(between_attentions, meeting=MEETING))
        found = jax.grad(ours, places)(*given)
    expected = jax.grad(partial(loss, reference), places)(*given)
    other = jax.grad(partial(loss, partial(larger, reference)), places)(*given)
    for a, b, c in zip(found, expected, other, strict=True):
        a, b, c = (np.asarray(each, np.float32) for each in (a, b, c))
        size = np.linalg.norm(b)
        # XLA rounds to bfloat16 at other places where it compiles all at once
        assert np.linalg.norm(a - b) < 2e-2 * size
        assert np.linalg.norm(a - c) > 5e-2 * size


@pytest.mark.parametrize("name", POST_NORMS)
def test_gradients_of_norms_behind_products(name: str, monkeypatch: pytest.MonkeyPatch):
    """Of x and of the norms' weights, as of the plain path."""
    module = sys.modules["pallas_kernels.between_attentions"]
    arguments = POST_NORMS[name]()
    monkeypatch.setattr(module.kernel, "products", module._plain)
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    products = [part for part in ("out", "down") if getattr(arguments["link"], part).post_norm]

    def loss(run: Any, x: Any, weights: Any) -> Any:
        link = arguments["link"]
        for part, weight in zip(products, weights, strict=True):
            product = getattr(link, part)
            norm = product.post_norm._replace(weight=weight)
            link = link._replace(**{part: product._replace(post_norm=norm)})
        y, *_ = run(arguments["heads"], x, link)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    weights = [getattr(arguments["link"], part).post_norm.weight for part in products]
    with absent():
        ours = partial(loss, partial(between_attentions, meeting=MEETING))
        found = jax.grad(ours, (0, 1))(arguments["x"], weights)
    expected = jax.grad(partial(loss, between_attentions_reference), (0, 1))
    for a, b in zip(*map(jax.tree.leaves, (found, expected(arguments["x"], weights))), strict=True):
        a, b = (np.asarray(each, np.float32) for each in (a, b))
        assert np.linalg.norm(b) > 0.1
        # XLA rounds to bfloat16 at other places where it compiles all at once
        assert np.linalg.norm(a - b) < 2e-2 * np.linalg.norm(b)


def larger(reference: Any, *call: Any) -> Any:
    y, after = reference(*call)
    return jnp.bfloat16(1.1) * y, after


def changed(**change: Any) -> dict[str, Any]:
    """A call, or one of its products, otherwise."""
    arguments = SMALL(change.pop("form", "int4"))
    link = arguments["link"]
    for name, parts in change.items():
        if parts is None:
            link = link._replace(**{name: None})
        elif name in link._fields[:4]:
            link = link._replace(**{name: getattr(link, name)._replace(**parts)})
        elif name == "gate":
            link = link._replace(gate=parts)
        else:
            arguments[name] = parts
    return {**arguments, "link": link}


NORMED = changed()["link"].following.rotary._replace(q_norm=Norm(jnp.ones(64), 1e-5))


def in_groups(size: int) -> dict[str, Any]:
    """int8 in such groups, which neither a lane nor all warps have whole."""
    arguments = call(384, 1152, (6, 2, 64), PLAIN)
    link = arguments["link"]

    def packed(product: Any) -> Any:
        return product._replace(weight=quantize(product.weight.codes, "int8", size))

    qkv = packed(link.following.qkv)
    out, gate_up, down = map(packed, link[:3])
    following = link.following._replace(qkv=qkv)
    return {**arguments, "link": type(link)(out, gate_up, down, following)}


BEHIND = Norm(jnp.ones(128, jnp.bfloat16), 1e-5)


def wider(bits: int) -> Any:
    return changed()["link"].gate_up.norm._replace(weight=jnp.ones(128, f"float{bits}"))


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (changed(), None),
        (changed(form="ternary", gate="relu2_glu"), None),
        (
            {
                **changed(),
                "x": jnp.ones((2, 128), jnp.bfloat16),
                "heads": jnp.ones((2, 128), jnp.bfloat16),
            },
            "takes one row of x, got 2",
        ),
        (changed(x=jnp.ones((1, 128), jnp.float16)), "takes bfloat16, got x float16"),
        (changed(gate="relu2_glu"), "only ternary weights have 'relu2_glu'"),
        (
            changed(gate_up={"norm": wider(32)}),
            "gate_up: takes a norm's weight in bfloat16, got float32",
        ),
        (
            changed(form="ternary", gate_up={"norm": wider(32)}),
            "gate_up: takes a norm's weight in bfloat16, got float32",
        ),
        (
            changed(
                form="ternary",
                gate_up={"norm": changed()["link"].gate_up.norm._replace(zero_centered=True)},
            ),
            "gate_up: the norm before a ternary weight adds no 1 to its own",
        ),
        (call(128, 72, (2, 1, 64), PLAIN), "down: plain takes inputs in multiples of 32, got 72"),
        (call(128, 192, (2, 1, 24), PLAIN), "out: plain takes inputs in multiples of 32, got 48"),
        (call(96, 192, (4, 2, 24), PLAIN), "qkv: takes heads in multiples of 16 at 1 rows, got 24"),
        (
            call(128, 160, (8, 2, 24), "ternary"),
            "down: takes inputs in multiples of 64",
        ),
        (call(256, 256, (16, 2, 20), "ternary"), "qkv: takes halves of heads in multiples of 8"),
        (in_groups(192), "out: groups of 192 straddle the inputs of a lane"),
        (
            changed(following={"rotary": NORMED}),
            "qkv: heads are normed before they are turned",
        ),
        (
            changed(form="ternary", following={"rotary": NORMED}),
            "qkv: heads are normed before they are turned",
        ),
        (changed(gate="geglu", out={"post_norm": BEHIND}, down={"post_norm": BEHIND}), None),
        (changed(form="ternary", gate="geglu"), "gate_up: ternary weights have no 'geglu'"),
        *(
            (changed(form="ternary", **{part: {"post_norm": BEHIND}}), f"{name}: x of a ternary")
            for part, name in (("out", "gate_up"), ("down", "qkv"))
        ),
        (changed(form="ternary", down={"post_norm": BEHIND}, following=None), None),
        (
            changed(down={"post_norm": wider(32)}),
            "down: takes a post_norm's weight in bfloat16, got float32",
        ),
        (in_groups(384), "out: groups of 384 and the 1024 numbers that warps take together"),
    ],
)
def test_why_not(arguments: dict[str, Any], phrase: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    reason = why_not(**arguments, device=H200)
    assert reason is None if phrase is None else phrase in str(reason), reason


def test_the_widest_ternary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    assert why_not(**shapes_of(partial(call, 128, 2**16, None, "ternary")), device=H200) is None
    reason = why_not(**shapes_of(partial(call, 128, 2**16 + 64, None, "ternary")), device=H200)
    assert reason == "down: takes 65536 inputs at most, got 65600"


@written
@pytest.mark.parametrize("form", ["int8", "ternary"])
def test_small_arrays_of_any_dtype(form: str):
    """Biases of 8 bits, angles of 16 and slots of 8: as if they had been others before."""
    found = []
    for bias, angle, slot in (
        (jnp.float8_e4m3fn, jnp.bfloat16, jnp.int8),
        (jnp.float32, jnp.float32, jnp.int32),
    ):
        arguments = SMALL(form, bias=True)
        link = arguments["link"]
        coarse = link.down.bias.astype(jnp.float8_e4m3fn).astype(bias)
        _, rotary, cache = link.following
        angles = {
            name: getattr(rotary, name).astype(jnp.bfloat16).astype(angle)
            for name in ("cos", "sin")
        }
        cache = cache._replace(slots=cache.slots.astype(slot))
        following = link.following._replace(rotary=rotary._replace(**angles), cache=cache)
        link = link._replace(down=link.down._replace(bias=coarse), following=following)
        found.append(interpret({**arguments, "link": link}))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_does_not_fit_on_chip(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    shapes = shapes_of(partial(call, 128, 2**17, None, PLAIN))
    assert "bytes on chip" in str(why_not(**shapes, device=H200))


def test_the_widest_sum_with_a_norm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    for d, said in ((8192, None), (8704, "gate_up: 8704 inputs, which are a sum with a norm, are")):
        shapes = shapes_of(partial(call, d, 128, None, PLAIN, post_norms="out"))
        reason = why_not(**shapes, device=H200)
        assert reason is None if said is None else said in str(reason), reason


def test_needs_hopper_and_a_jax_that_writes(monkeypatch: pytest.MonkeyPatch):
    arguments = changed()
    assert "needs an NVIDIA GPU" in str(why_not(**arguments, device=Device("cpu")))
    blackwell = Device("gpu", "NVIDIA B200", 10.0, 148)
    assert "needs a Hopper GPU" in str(why_not(**arguments, device=blackwell))
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", False)
    assert "needs jax 0.11" in str(why_not(**arguments, device=H200))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (changed(heads=jnp.ones((2, 128), jnp.bfloat16)), r"heads \[2, 128\] and x \[1, 128\]"),
        (changed(heads=jnp.ones((1, 96), jnp.bfloat16)), r", out: x \[1, 96\] is \[.., I\]"),
        (changed(x=jnp.ones((1, 96), jnp.bfloat16)), "the weight of out has 128 outputs, but x is"),
        (changed(gate="glu"), "no gate is named 'glu'; there are swiglu, geglu, relu2_glu"),
        (changed(down={"bias": jnp.ones(7, jnp.bfloat16)}), r", down: bias \[7\] is not \[O\]"),
        (
            changed(gate_up={"norm": changed()["link"].gate_up.norm._replace(eps=0.0)}),
            ", gate_up: the norm's eps must be positive and finite, got 0.0",
        ),
        (changed(gate_up={"post_norm": BEHIND}), ", gate_up: only out and down have a post"),
        (
            changed(out={"post_norm": BEHIND._replace(eps=-1.0)}),
            ", out: the post_norm's eps must be",
        ),
        (
            changed(down={"post_norm": BEHIND._replace(weight=jnp.ones(64))}),
            r", down: the post_norm's weight must be floating point, \[O\] = \[128\], got float32",
        ),
        (changed(following={"cache": None}), "'rope', rotary and a cache go together"),
        (changed(following={"rotary": None}), "'rope', rotary and a cache go together"),
        (
            changed(x=jnp.ones((1, 128), jnp.int32)),
            ", out: the residual is int32|residual is int32",
        ),
    ],
)
def test_wrong_calls(arguments: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=f"^between_attentions.*{sentence}"):
        between_attentions(**arguments, meeting=MEETING, interpret=True)


@pytest.mark.parametrize("meeting", [jnp.zeros(3, jnp.int32), jnp.zeros(2, jnp.uint32)])
def test_wrong_meetings(meeting: jax.Array):
    with pytest.raises(ValueError, match=r"meeting is .*, not int32\[2\]"):
        between_attentions(**changed(), meeting=meeting, interpret=True)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Config(12, 2, 1), "warps must be one of 4, 8, 16"),
        (Config(8, 0, 1), "stages must be 1 at least"),
        (Config(8, 3, 4), "window must be 1 to 3"),
        (Config(16, 40, 3), "bytes on chip"),
    ],
)
def test_wrong_configs(config: Config, sentence: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    for interpret in (False, True):
        with absent(), pytest.raises(ValueError, match=sentence):
            between_attentions(**changed(), meeting=MEETING, config=config, interpret=interpret)


def test_refuses_without_a_gpu():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        between_attentions(**changed(), meeting=MEETING)


@pytest.mark.parametrize("form", [PLAIN, "int8", "int4", "ternary"])
@pytest.mark.parametrize("model", [QWEN, LLAMA_1B, PHI, BITNET, GEMMA3_1B])
def test_every_output_is_some_blocks(model: Any, form: str):
    """Tiles are dealt without a gap, the default fits on chip, and folding evens blocks out."""
    arguments = shapes_of(partial(call, *model, form))
    plan = plan_of(arguments["x"], arguments["link"], device=H200)
    assert plan.problem() is None
    assert plan.config.window * plan.stage_bytes < 2**16 < SHARED_BYTES
    before = 0
    for product, tiles_before in zip(plan.products, plan.tiles_before, strict=True):
        assert tiles_before == before
        before += product.tiles
        outputs = product.config.tile_n // product.folds
        assert product.tiles * outputs == product.packed.shape[0]
    folded = {p.static.name for p in plan.products if p.folded}
    if form == PLAIN:  # what is packed must have whole parts and groups in either half
        assert folded == (set() if model in (LLAMA_1B, GEMMA3_1B) else {"out", "down"})
    assert form == PLAIN or "gate_up" not in folded


@pytest.mark.aot
@pytest.mark.parametrize(
    ("form", "more"),
    [*((form, "") for form in (PLAIN, "int4", "ternary")), (PLAIN, "out down"), ("int4", "down")],
)
def test_compiled(form: str, more: str):
    """One launch; codes are read by 16 bytes, and multiplied by tensor cores."""
    shapes = shapes_of(partial(call, 256, 512, (4, 2, 64), form, post_norms=more))
    run, arrays = jitted(shapes)
    program = aot.compile_for(run, *arrays)
    assert program.mosaic_launches() == ["between_attentions"]
    kernel = program.kernel("between_attentions")
    assert kernel.spill_store_bytes == 0
    assert kernel.count("LDGSTS", "128") >= 4
    assert kernel.count("IMMA" if form != PLAIN else "HMMA") > 0


def on_device(arguments: dict[str, Any], **how: Any) -> Any:
    run, arrays = jitted(arguments, **how)
    return jax.jit(run)(*arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [PLAIN, *FORMATS])
def test_forms_on_a_gpu(form: str):
    model = LLAMA_1B if form == "int4, groups of 512" else QWEN  # 896 are no whole groups
    arguments = call(*model, form, bias=form == PLAIN)
    *found, meeting = on_device(arguments)
    np.testing.assert_array_equal(meeting, 0)
    assert_right(arguments, found)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [PLAIN, "int8", "int4", "ternary"])
@pytest.mark.parametrize("model", [LLAMA_1B, PHI], ids=["Llama-3.2-1B", "Phi-3-mini"])
def test_models_on_a_gpu(model: Any, form: str):
    arguments = call(*model, form)
    *found, _ = on_device(arguments)
    assert_right(arguments, found)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [PLAIN, "int8", "int4", "ternary"])
def test_the_product_of_the_next_layer_alone_on_a_gpu(form: str):
    for model in (QWEN, QWEN3):
        arguments = call(*model, form, turned=False)
        *found, meeting = on_device(arguments)
        np.testing.assert_array_equal(meeting, 0)
        assert_right(arguments, found)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [PLAIN, "int8", "int4", "int4, zero points"])
@pytest.mark.parametrize("model", [GEMMA3_1B, GEMMA2_2B, GEMMA3_27B])
def test_norms_behind_products_on_a_gpu(model: Any, form: str):
    how: Any = {"centred": True, "gate": "geglu", "post_norms": "out down"}
    arguments = call(*model, form, turned=model == GEMMA2_2B, **how)
    *found, meeting = on_device(arguments)
    np.testing.assert_array_equal(meeting, 0)
    assert_right(arguments, found)
    for config in (Config(4, 6, 2), Config(16, 2, 1)) if model == GEMMA3_1B else ():
        *found, _ = on_device(arguments, config=config)
        assert_right(arguments, found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", POST_NORMS)
def test_either_norm_behind_a_product_on_a_gpu(name: str):
    arguments = POST_NORMS[name]()
    *found, meeting = on_device(arguments)
    np.testing.assert_array_equal(meeting, 0)
    assert_right(arguments, found)


@pytest.mark.gpu
def test_bitnet_on_a_gpu():
    arguments = call(*BITNET, "ternary", sub_norms=True, gate="relu2_glu")
    *found, _ = on_device(arguments)
    assert_right(arguments, found)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [Config(4, 6, 2), Config(8, 3, 3), Config(16, 2, 1)])
@pytest.mark.parametrize("form", [PLAIN, "int8", "int4", "ternary"])
def test_configs_on_a_gpu(form: str, config: Config):
    arguments = call(1024, 4096, (8, 2, 128), form)
    *found, _ = on_device(arguments, config=config)
    assert_right(arguments, found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "more"),
    [
        *((form, {}) for form in (PLAIN, "int4", "ternary")),
        *((form, {"post_norms": "out down", "turned": False}) for form in (PLAIN, "int4")),
        *((PLAIN, {"post_norms": name}) for name in ("out", "down")),
    ],
)
def test_a_hundred_times_on_a_gpu(form: str, more: Any):
    """The same bits each time, by one meeting and of two calls in turn: nobody reads what was not
    written yet, which would be the other's.
    """
    arguments = call(*LLAMA_1B, form, **more)
    run, (arrays, meeting) = jitted(arguments)
    rows = [i for i, a in enumerate(arrays) if a.shape[:-1] == (1,) and a.dtype == jnp.bfloat16]
    assert len(rows) == 2  # heads and x

    def of(sign: Any, meeting: Any) -> Any:
        given = [sign * a if i in rows else a for i, a in enumerate(arrays)]
        *found, meeting = run(given, meeting)
        return jax.tree.leaves(found), meeting

    def again(i: Any, carry: Any) -> Any:
        both, same, meeting = carry
        found, meeting = of(jnp.where(i % 2, -1, 1).astype(jnp.bfloat16), meeting)
        equal = [
            jnp.array_equal(jnp.where(i % 2, b, a), y) for a, b, y in zip(*both, found, strict=True)
        ]
        return both, same & jnp.all(jnp.stack(equal)), meeting

    first, meeting = jax.jit(of)(jnp.bfloat16(1), meeting)
    second, meeting = jax.jit(of)(jnp.bfloat16(-1), meeting)
    assert not np.array_equal(first[0], second[0])
    _, same, meeting = jax.jit(partial(jax.lax.fori_loop, 0, 100, again))(
        ((first, second), jnp.bool_(True), meeting)
    )
    assert same
    np.testing.assert_array_equal(meeting, 0)


@pytest.mark.gpu
def test_vmap_on_a_gpu():
    """Slice by slice: blocks of two would wait for each other for ever."""
    arguments = call(*QWEN, "int8")
    rows = jnp.stack([arguments["x"], 2 * arguments["x"], -arguments["x"]])
    run = partial(between_attentions, arguments["heads"], link=arguments["link"], meeting=MEETING)
    y, _, _ = jax.vmap(lambda x: run(x))(rows)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(y[i], run(row)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int8", "int4", "ternary", PLAIN])
def test_nan_on_a_gpu(form: str):
    arguments = call(1024, 4096, (8, 2, 128), form)
    arguments["heads"] = arguments["heads"].at[0, 5].set(jnp.nan)
    y, (q, _, _), _ = on_device(arguments)
    assert np.isnan(y).all()
    assert np.isnan(q).all()


@pytest.mark.gpu
def test_the_device_sees_another_weight():
    arguments = call(*QWEN, "int8")
    found, link = on_device(arguments)[:2], arguments["link"]
    scale = link.down.weight.row_scale.at[3].multiply(1.5)
    weight = dataclasses.replace(link.down.weight, row_scale=scale)
    other = link._replace(down=link.down._replace(weight=weight))
    with pytest.raises(AssertionError, match="error is"):
        assert_right({**arguments, "link": other}, found)
