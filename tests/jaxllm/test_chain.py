"""Decoding through `chain` gives what blocks give one by one, and not every call is a chain."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import absent
from flax import nnx
from kernels import interpreted
from numerics import assert_as_accurate
from tiny_models import ALL, TINY, build

import jaxllm
from jaxllm import chain, fusion
from jaxllm.config import ModelConfig, Rope, Runtime
from jaxllm.lora import Adapted
from jaxllm.quantize import PackedLinear
from pallas_kernels import _compat

# Wide enough for the kernel
WIDE = dataclasses.replace(
    TINY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    head_dim=32,
    qkv_bias=True,
    layer_types=(),
)
BITNET = dataclasses.replace(
    WIDE,
    model_type="bitnet",
    hidden_act="relu2",
    qkv_bias=False,
    bit_linear=True,
    sub_norms=True,
)


# Of heads a part is turned, and heads of q and k are normed before that
PARTIAL = dataclasses.replace(WIDE, head_dim=64, rope=Rope(10_000.0, partial_rotary_factor=0.5))
NORMED = dataclasses.replace(WIDE, model_type="qwen3", qkv_bias=False, qk_norm=True)
GEMMA = dataclasses.replace(
    NORMED,
    model_type="gemma3_text",
    hidden_act="gelu_pytorch_tanh",
    zero_centered_norm=True,
    post_norms=True,
    scale_embedding=True,
)
GEMMA_2 = dataclasses.replace(
    GEMMA, model_type="gemma2", qk_norm=False, attn_logit_softcapping=2.0, query_pre_attn_scalar=48
)


def made(config: ModelConfig, scheme: str | None = None, how: Any = "auto") -> Any:
    model = build(config, Runtime("bfloat16", "bfloat16", implementation=how))
    if scheme is not None:
        jaxllm.quantize(model, scheme)
    fusion.fuse(model)
    return model


def decoded(model: Any, run: Any = lambda f, *a: jax.jit(f)(*a), kv: Any = jnp.bfloat16) -> Any:
    """Logits of three tokens behind a prompt, one after the other."""
    config = model.config

    def steps(weights: Any, cache: Any) -> jax.Array:
        prompt = jnp.arange(5)[None] % config.vocab_size
        logits, cache = jaxllm.prefill(weights, prompt, jnp.asarray([5]), cache)
        found = []
        for token in (7, 3, 11):
            logits, cache = jaxllm.decode_step(weights, jnp.asarray([token]), cache)
            found.append(logits)
        return jnp.stack(found)

    cache = jaxllm.KVCache.create(config, 1, 64, kv)
    return run(steps, jaxllm.flatten(model), cache)


def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers go through the chain, each time that a program is made."""
    found, decode = [], chain.decode

    def counted(blocks: Any, *rest: Any) -> Any:
        if (result := decode(blocks, *rest)) is not None:
            found.append(len(blocks))
        return result

    monkeypatch.setattr(chain, "decode", counted)
    jax.clear_caches()
    return found


@pytest.mark.parametrize("kv", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        *((WIDE, None), (WIDE, "int8"), (NORMED, None), (NORMED, "int4"), (PARTIAL, None)),
        *((GEMMA, None), (GEMMA, "int4"), (GEMMA_2, None)),
    ],
)
def test_the_chain_computes_what_blocks_do(
    config: ModelConfig, scheme: Any, kv: Any, monkeypatch: pytest.MonkeyPatch
):
    model, found = made(config, scheme), count(monkeypatch)
    ours = decoded(model, kv=kv)
    assert found == [3]  # the prompt is none, and three steps are one program
    monkeypatch.setattr(chain, "decode", lambda *_: None)
    jax.clear_caches()
    np.testing.assert_array_equal(ours, decoded(model, kv=kv))
    assert found == [3]
    jax.clear_caches()


@pytest.mark.parametrize("config", [NORMED, PARTIAL, GEMMA, GEMMA_2, ALL])
def test_it_is_what_a_model_gives_that_is_not_fused(config: ModelConfig):
    """In float32: each norm in its place, and of heads the part that is turned."""
    models = [build(config, Runtime("float32", "float32")) for _ in range(2)]
    fusion.fuse(models[0])
    ours, plain = (decoded(model, kv=jnp.float32) for model in models)
    np.testing.assert_allclose(ours, plain, atol=2e-5 * np.abs(plain).max())


def test_of_bitnet(monkeypatch: pytest.MonkeyPatch):
    model, found = made(BITNET, "ternary"), count(monkeypatch)
    ours = decoded(model)
    assert found == [3]
    monkeypatch.setattr(chain, "decode", lambda *_: None)
    jax.clear_caches()
    np.testing.assert_array_equal(ours, decoded(model))
    jax.clear_caches()


def assert_right(ours: Any, plain: Any, config: ModelConfig, scheme: str | None) -> None:
    """As near as the plain path to such a model in float32."""
    model = build(config, Runtime("float32", "bfloat16"))
    if scheme is not None:
        jaxllm.quantize(model, scheme)
    fusion.fuse(model)
    truth = np.asarray(decoded(model, kv=jnp.float32), np.float64)
    assert_as_accurate(ours, plain, truth)
    with pytest.raises(AssertionError):  # the twin
        assert_as_accurate(np.float64(ours) * 1.05, plain, truth)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        *((WIDE, None), (WIDE, "int4"), (NORMED, None), (NORMED, "int4"), (PARTIAL, "int4")),
        *((GEMMA, None), (GEMMA, "int8"), (GEMMA_2, "int4")),
    ],
)
def test_with_the_kernel(config: ModelConfig, scheme: Any, monkeypatch: pytest.MonkeyPatch):
    """Interpreted, product by product."""
    if not _compat.WRITES_REFERENCES:
        pytest.skip("jax 0.10 writes into no array that is there")
    config = dataclasses.replace(config, num_hidden_layers=2, layer_types=())
    how = {"between_attentions": "pallas-interpret"}
    found = count(monkeypatch)
    ours = decoded(made(config, scheme, how), interpreted)
    assert found == [2]
    plain = decoded(made(config, scheme, {"between_attentions": "xla"}))
    assert_right(ours, plain, config, scheme)
    jax.clear_caches()


# Rings of fewer keys than there are tokens, and another scale of scores
RINGS = {"sliding_window": 4, "layer_types": ("sliding_attention",) * 2}


@pytest.mark.parametrize(
    ("config", "scheme", "more"),
    [
        (WIDE, None, RINGS),
        (WIDE, "int4", {}),
        (WIDE, None, {"query_pre_attn_scalar": 7}),
        (NORMED, None, {}),
        (NORMED, "int8", RINGS),
        (PARTIAL, None, {}),
    ],
)
def test_all_layers_in_one_launch(
    config: ModelConfig, scheme: Any, more: Any, monkeypatch: pytest.MonkeyPatch
):
    """Interpreted, op by op."""
    if not _compat.WRITES_REFERENCES:
        pytest.skip("jax 0.10 writes into no array that is there")
    config = dataclasses.replace(config, num_hidden_layers=2, **{"layer_types": (), **more})
    launches, run = [], jaxllm.ops.decode_layers
    monkeypatch.setattr(
        jaxllm.ops, "decode_layers", lambda *a, **k: (launches.append(len(a[1])), run(*a, **k))[1]
    )
    jax.clear_caches()
    ours = decoded(made(config, scheme, {"decode_layers": "pallas-interpret"}), interpreted)
    assert launches == [2]
    plain = decoded(made(config, scheme, {"decode_layers": "xla"}))
    assert launches == [2]  # layer by layer, as without a name for it
    assert_right(ours, plain, config, scheme)
    jax.clear_caches()


def handed(model: Any, rows: int, tokens: int, dtype: Any, kv: Any) -> tuple[Any, ...]:
    """What `chain` is handed of a call."""
    config = model.config
    cache = jaxllm.KVCache.create(config, rows, 64, kv)
    x = jnp.zeros((rows, tokens, config.hidden_size), dtype)
    tables = model._rotary(jnp.zeros((rows, tokens), jnp.int32), None, cache, jnp.ones(rows))
    caches = [cache.layer(i, jnp.ones(rows, jnp.int32)) for i in range(len(model.layers))]
    return model.layers, x, [tables[kind] for kind in config.layer_types], caches


def asked(
    model: Any, rows: int = 1, tokens: int = 1, dtype: Any = jnp.bfloat16, kv: Any = jnp.bfloat16
) -> tuple[str | None, tuple[Any, ...]]:
    """What keeps the model's blocks from being a chain, and what `chain` is handed."""
    given = handed(model, rows, tokens, dtype, kv)
    return chain.why_not(*given[:2]), given


def test_what_is_a_chain():
    reason, given = asked(made(WIDE))
    assert reason is None
    found = chain.links(*given)
    assert [link.following is None for link in found] == [False, False, True]


def with_adapters() -> Any:
    model = made(WIDE)
    attention = model.layers[1].self_attn
    attention.o_proj = Adapted(attention.o_proj, rank=4, alpha=8.0, rngs=nnx.Rngs(0))
    return model


def with_an_order() -> Any:
    """As GPTQ's desc_act has it."""
    model = made(WIDE, "int8")
    mlp = model.layers[1].mlp
    order = jnp.arange(WIDE.intermediate_size, dtype=jnp.int32)[::-1]
    mlp.down_proj = PackedLinear(mlp.down_proj.packed, order=order)
    return model


def with_another(**changes: Any) -> Any:
    """Of which a projection of the second layer is otherwise."""
    model = made(WIDE)
    for name, value in changes.items():
        setattr(model.layers[1].mlp.down_proj, name, value)
    return model


def with_another_attention() -> Any:
    model = made(WIDE)
    model.layers[2].self_attn.implementation = {"attention": "xla"}
    return model


PLAINLY = "it is not fused (jaxllm.fuse), or has projections of another kind"


def plain(how: Any) -> Any:
    return made(WIDE, how=how)


def not_fused(how: Any) -> Any:
    return build(WIDE, Runtime("bfloat16", "bfloat16", how))


# By what stands in the way: the model, given what it is told, how it is called, and the phrase
NONE: Any = {
    "two rows": (plain, {"rows": 2}, "takes one token of one row, got x [2, 1, 128]"),
    "two tokens": (plain, {"tokens": 2}, "takes one token of one row"),
    "float16": (plain, {"dtype": jnp.float16}, "does not compute in float16"),
    "not fused": (not_fused, {}, f"layer 0: {PLAINLY}"),
    "another gate": (
        lambda how: made(dataclasses.replace(WIDE, hidden_act="gelu"), how=how),
        {},
        "layer 0: a gate of 'gelu' is in no product with its weights",
    ),
    "a gate that ternary weights have not": (
        lambda how: made(GEMMA, "ternary", how),
        {},
        "layer 0: a gate of 'gelu_pytorch_tanh' is in no product with its weights",
    ),
    "a gate of ternary weights": (
        lambda how: made(dataclasses.replace(BITNET, bit_linear=False), how=how),
        {},
        "layer 0: a gate of 'relu2' is in no product with its weights",
    ),
    "adapters": (lambda how: with_adapters(), {}, f"layer 1: {PLAINLY}"),
    "inputs in another order": (
        lambda how: with_an_order(),
        {},
        "layer 1 takes inputs in an order of their own",
    ),
    "two implementations": (
        lambda how: with_another(implementation="xla"),
        {},
        "layer 1 has ops by 'xla', layer 0 by 'auto'",
    ),
    "two dtypes": (
        lambda how: with_another(dtype=jnp.dtype("float16")),
        {},
        "layer 1 does not compute in bfloat16, which x has",
    ),
    "an attention of its own": (
        lambda how: with_another_attention(),
        {},
        "layer 2 has ops by {'attention': 'xla'}, layer 0 by 'auto'",
    ),
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_none(name: str):
    model, call, phrase = NONE[name]
    reason, given = asked(model("auto"), **call)
    assert phrase in str(reason)
    assert chain.decode(*given) is None


@pytest.mark.parametrize("op", ["between_attentions", "decode_layers"])
@pytest.mark.parametrize("name", ["two rows", "not fused", "another gate"])
def test_who_names_an_op_is_told_what_keeps_it(op: str, name: str):
    """Of one token; a prompt it is never asked about."""
    make, call, phrase = NONE[name]
    model = make({op: "pallas"})
    _, given = asked(model, **call)
    with pytest.raises(NotImplementedError, match=f"^{op}: 'pallas' cannot.*{re.escape(phrase)}"):
        chain.decode(*given)
    assert chain.decode(*handed(model, 1, 4, jnp.bfloat16, jnp.bfloat16)) is None


ODD = dataclasses.replace(WIDE, intermediate_size=72)


def test_a_name_for_all_ops_is_that_of_the_products(monkeypatch: pytest.MonkeyPatch):
    """Where they cannot be had in one launch; whoever names the launch itself is told why."""
    assert chain.decode(*asked(made(ODD))[1]) is not None  # "auto" has them by XLA
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", True)
    with absent():  # a GPU that has a launch for other sizes
        for how in ("pallas", "pallas-interpret"):
            assert chain.decode(*asked(made(ODD, how=how))[1]) is None
    monkeypatch.undo()
    model = made(ODD, how={"between_attentions": "pallas-interpret"})
    with pytest.raises(NotImplementedError, match="takes inputs in multiples of 32, got 72|0.11"):
        decoded(model)


def test_a_name_for_all_ops_is_that_of_a_launch_that_can_be_had():
    if not _compat.WRITES_REFERENCES:
        pytest.skip("jax 0.10 writes into no array that is there")
    with absent():
        given = asked(made(WIDE, how="pallas"))[1]
        assert jax.eval_shape(lambda: chain.decode(*given)) is not None


# A ring of keys, keys in 8 bits, soft-capped scores
OTHERS = {
    "ring": (
        dataclasses.replace(
            WIDE,
            sliding_window=4,
            layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        ),
        jnp.bfloat16,
    ),
    "fp8": (WIDE, jnp.float8_e4m3fn),
    "soft cap": (dataclasses.replace(WIDE, attn_logit_softcapping=4.0), jnp.bfloat16),
    "normed heads": (NORMED, jnp.bfloat16),
    "part of a head": (PARTIAL, jnp.bfloat16),
}


@pytest.mark.parametrize("name", OTHERS)
def test_with_caches_and_scores_of_other_kinds(name: str, monkeypatch: pytest.MonkeyPatch):
    config, kv = OTHERS[name]
    model, found = made(config), count(monkeypatch)
    ours = decoded(model, kv=kv)
    assert found == [3]
    monkeypatch.setattr(chain, "decode", lambda *_: None)
    jax.clear_caches()
    np.testing.assert_array_equal(ours, decoded(model, kv=kv))
    jax.clear_caches()


def with_another_activation() -> Any:
    model = made(BITNET, "ternary")
    model.layers[1].mlp.activation = "silu"
    return model


APART: Any = {
    "ring": "layer 1 has another window than layer 0",
    "fp8": "layer 0 has keys and values in float8_e4m3fn, not bfloat16",
    "soft cap": "scores have a soft cap, 4",
}


@pytest.mark.parametrize("name", APART)
def test_what_all_layers_in_one_launch_leave_out(name: str):
    """Caches that differ, keys in 8 bits, scores with a cap: the kernel has none of them."""
    config, kv = OTHERS[name]
    assert chain.why_not_together(*asked(made(WIDE))[1]) is None
    assert APART[name] in str(chain.why_not_together(*asked(made(config), kv=kv)[1]))
    model = made(config, how={"decode_layers": "pallas"})
    with pytest.raises(NotImplementedError, match=f"^decode_layers: 'pallas' .*{APART[name]}"):
        chain.decode(*asked(model, kv=kv)[1])


def test_layers_of_two_activations_are_not_alike():
    given = asked(with_another_activation())[1]
    assert "activation" in str(chain.why_not_together(*given))


# What is named, and the kernels that are left. Two a layer, layers alike share a kernel, and the
# last layer's makes no q; and the first layer's q, k and v, which have no layer before
TWO = ["between_attentions", "between_attentions", "decode_attention", "gemv_norm_rope"]
# And with a launch for each product
BY_PRODUCT = ["decode_attention", "gemv_norm_rope", "gemv_norm_swiglu", "gemv_plain", "gemv_plain"]
KERNELS: Any = [
    ("auto", ["decode_layers"]),
    ({"rope": "xla"}, ["decode_layers"]),
    ({"decode_layers": "xla"}, TWO),
    ({"attention": "pallas"}, TWO),
    ({"attention": "auto"}, ["decode_layers"]),
    ({"decode_layers": "auto", "attention": "pallas"}, TWO),
    ({"decode_layers": "pallas", "attention": "pallas"}, ["decode_layers"]),
    ({"between_attentions": "xla"}, BY_PRODUCT),
    ({"decode_layers": "auto", "between_attentions": "xla"}, BY_PRODUCT),
    ({"fused_linear": "pallas"}, BY_PRODUCT),
]


def kernels_of(config: ModelConfig, how: Any, rows: int = 1) -> list[str]:
    """Those of a step on a GPU, each as often as it is compiled."""
    if not _compat.WRITES_REFERENCES:
        pytest.skip("jax 0.10 writes into no array that is there")
    with absent():
        model = made(config, how=how)
        cache = jaxllm.KVCache.create(config, rows, 64, jnp.bfloat16)
        weights, token = jaxllm.flatten(model), jnp.zeros(rows, jnp.int32)
        text = str(jax.make_jaxpr(jaxllm.decode_step)(weights, token, cache))
    names = (
        "decode_layers|gemv\\w*|decode_attention|between_attentions|\\w*matmul\\w*|rope_into_cache"
    )
    return sorted(re.findall(rf"\bname=({names})", text))


@pytest.mark.parametrize(("how", "kernels"), KERNELS)
def test_on_a_gpu_few_kernels_are_left(how: Any, kernels: list[str]):
    assert kernels_of(WIDE, how) == kernels


def test_heads_with_norms_or_turned_in_part():
    """Where layers are not one launch, one more is for these."""
    two = ["between_attentions", "between_attentions", "decode_attention"]
    for config in (NORMED, PARTIAL):
        assert kernels_of(config, "auto") == ["decode_layers"]
        by_layer = kernels_of(config, {"decode_layers": "xla"})
        assert by_layer == [*two, "gemv_norm_plain", "rope_into_cache"]
    of_three = {"decode_attention", "quantized_matmul_norm", "rope_into_cache"}
    of_three |= {"quantized_matmul", "quantized_matmul_norm_swiglu"}
    assert of_three <= set(kernels_of(NORMED, "auto", 3))
