"""Decoding end to end, with tiny models on the CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxllm
from benchmarks import decoding
from benchmarks.models import LLAMA_8B, QWEN
from jaxllm.config import Runtime
from jaxllm.layers import Linear
from jaxllm.quantize import PackedLinear
from jaxllm.quantize import quantize as pack_model
from pallas_kernels import measure
from pallas_kernels.measure import size_bytes

TINY = dataclasses.replace(
    QWEN,
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    layer_types=(),
)
UNTIED = dataclasses.replace(TINY, tie_word_embeddings=False)
LINEARS = (Linear, PackedLinear)
BFLOAT16 = Runtime(dtype="bfloat16", param_dtype="bfloat16")
FEW = {"prompt": 4, "new_tokens": 8}
LAYER = 64 * (64 + 2 * 32) + (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
CACHED = 2 * 2 * 2 * 32 * (4 + 4)  # two bytes, k and v, two layers, heads of 32, in the mean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("xla", 1),
        (decoding.FUSED, 1),
        *((decoding.FUSED + how, 1) for how in (decoding.BY_PRODUCT, decoding.BY_LAYER)),
        (decoding.FUSED, 2),
    ],
)
def test_a_model_decodes_by_an_implementation(name, rows):
    found = decoding.by_implementation(TINY, name, measure.Stopwatch("host"), rows=rows, **FEW)
    assert found["tokens_per_s"] > 0
    assert found["bytes_a_token"] == 2 * (97 * 64 + 2 * LAYER + 64) // rows + CACHED
    assert len(found["tokens"]) == 8


def test_what_a_step_reads_is_without_an_embedding_that_is_no_head():
    def build(config):
        return nnx.eval_shape(lambda: jaxllm.Transformer(config, BFLOAT16, rngs=nnx.Rngs(0)))

    tied, untied = build(TINY), build(UNTIED)
    more = size_bytes(nnx.state(untied, nnx.Param)) - size_bytes(nnx.state(tied, nnx.Param))
    assert more == 2 * 97 * 64
    assert decoding.step_bytes(tied) == 2 * (97 * 64 + 2 * LAYER + 64)
    assert decoding.step_bytes(untied) == decoding.step_bytes(tied)


def test_a_launch_a_product_is_told_to_whatever_multiplies():
    by_products = decoding.HOWS[decoding.BY_PRODUCT]
    for model in (
        decoding.random_model(UNTIED, by_products),
        decoding.packed_model(UNTIED, by_products, scheme="int4"),
    ):
        found = [m.implementation for _, m in nnx.iter_modules(model) if isinstance(m, LINEARS)]
        assert len(found) == 4 * UNTIED.num_hidden_layers + 1
        assert all(each == by_products for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4", "ternary"])
def test_a_model_is_made_packed_and_decodes(scheme):
    """As large as a model that was packed whole, and with the same weights in it."""
    model = decoding.packed_model(UNTIED, scheme=scheme)
    kinds = {
        name[-1]: module.scheme
        for name, module in nnx.iter_modules(model)
        if isinstance(module, PackedLinear)
    }
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    assert kinds == {**dict.fromkeys(names, scheme), "lm_head": "int8"}
    whole = decoding.random_model(UNTIED, fused=False)
    pack_model(whole, scheme, head="int8")
    jaxllm.fuse(whole)
    assert jax.tree.map(jnp.shape, nnx.state(model)) == jax.tree.map(jnp.shape, nnx.state(whole))
    found = decoding.packed(UNTIED, scheme, 2, measure.Stopwatch("host"), **FEW)
    assert found["rows"] == 2
    assert found["weight_bytes"] == size_bytes(nnx.state(model, nnx.Param))
    table = 2 * 97 * 64
    assert found["bytes_a_token"] == (found["weight_bytes"] - table) // 2 + CACHED


@pytest.mark.slow
def test_no_more_than_one_weight_is_there_before_it_is_packed(monkeypatch):
    alive = []
    quantize = decoding.quantize

    def watched(weight, scheme):
        large = [
            x for x in jax.live_arrays() if x.shape == weight.shape and x.dtype == jnp.bfloat16
        ]
        alive.append(len(large))
        return quantize(weight, scheme)

    before = {x.shape for x in jax.live_arrays()}
    odd = dataclasses.replace(UNTIED, intermediate_size=192)
    assert not {(192, 64), (64, 192)} & before
    monkeypatch.setattr(decoding, "quantize", watched)
    decoding.packed_model(odd, scheme="int8")
    assert len(alive) == 2 * 7 + 1
    gate_up_down = [n for i, n in enumerate(alive[:-1]) if i % 7 >= 4]
    assert gate_up_down
    assert set(gate_up_down) == {1}


@pytest.mark.slow
def test_graphs_change_no_number():
    """On a CPU there are none; the options must be what XLA takes, and the loop the same."""
    watch = measure.Stopwatch("host")
    found = [decoding.graphs(TINY, how, watch, **FEW) for how in decoding.GRAPHS]
    for row in found:
        assert row["us_a_token"] > 0
        assert len(row["logprobs"]) == 8
        np.testing.assert_array_equal(row["logprobs"], found[0]["logprobs"])


def test_the_sections_are_those_that_are_asked_for():
    keys = {name: [key for key, _ in decoding.tasks(name)] for name in decoding.SECTIONS}
    assert "decode/auto, fused" in keys["decode"]
    assert keys["decode"][-4:] == [
        *(f"decode/{name}, {rows} rows" for rows in (4, 16) for name in ("auto, fused", "xla")),
    ]
    assert keys["packed-decode"] == [
        *(
            f"packed-decode/{name}{how}"
            for name in ("bfloat16", "int8", "int4", "ternary")
            for how in ("", ", a launch a product")
        ),
        *(f"packed-decode/{name}, two launches a layer" for name in ("int8", "int4", "ternary")),
        *(f"packed-decode/{name}, 16 rows" for name in ("bfloat16", "int4")),
        *(f"packed-decode/{name}, 64 rows" for name in ("bfloat16", "int8", "int4")),
    ]
    assert len(keys["cuda-graphs"]) == 6
    assert keys["decode-heads"][:4] == [
        *(f"decode-heads/Qwen3-0.6B, {name}" for name in ("auto, fused", "auto", "xla")),
        "decode-heads/Qwen3-0.6B, auto, fused, 16 rows",
    ]
    assert len(keys["decode-heads"]) == len(keys["decode-gemma"]) == 18
    assert keys["decode-gemma"][0] == "decode-gemma/Gemma-3-1B, auto, fused"
    assert LLAMA_8B.num_hidden_layers == 32


def test_the_tables():
    def row(speed, **changes):
        sizes = {"bytes_a_token": 10**10, "weight_bytes": 10**10}
        return {"tokens_per_s": speed, "prefill_s": 0.02, **sizes, **changes}

    sections = {
        "decode": {"auto": row(200.0), "xla": {"failed": "z"}},
        "decode-heads": {"Qwen3-8B, auto, fused": row(210.0)},
        "decode-gemma": {"Gemma-3-4B, auto, fused": row(310.0)},
        "packed-decode": {
            "bfloat16": row(300.0),
            "int4": row(930.0, bytes_a_token=3 * 10**9),
            "ternary": {"not_run": "late"},
            "int4, 16 rows": row(5000.0, bytes_a_token=3 * 10**8),
            "int4, as it once was": row(600.0, bytes_a_token=3 * 10**9),
        },
        "cuda-graphs": {
            "Qwen2.5-0.5B, the loop one graph": {"us_a_token": 500.0, "logprobs": [-1.0, -2.0]},
            "Qwen2.5-0.5B, no graphs": {"us_a_token": 900.0, "logprobs": [-1.0, -2.5]},
            "Llama-3.1-8B, no graphs": {"us_a_token": 4000.0, "logprobs": [-1.0, -2.5]},
            "Llama-3.1-8B, a graph a token": {"failed": "y"},
        },
    }
    ceilings = {"copy": 4e12, "read": 5e12}

    def why(result):
        return str(result)

    text = "\n".join(decoding.lines(lambda name: sections[name], ceilings, why))
    assert "| auto | 200 | 50 % | 40 % |" in text
    assert "| xla | {'failed': 'z'} | | |" in text
    assert "| Qwen3-8B, auto, fused | 210 | 52 % | 42 % |" in text
    assert "| bfloat16 | 1 | 10.00 | 20.0 | 300 | 60 % |  |" in text
    assert "| int4 | 1 | 10.00 | 20.0 | 930 | 56 % | 3.10 |" in text
    assert "| ternary | 1 | | | {'not_run': 'late'} | | |" in text
    assert "| int4, as it once was | 1 | 10.00 | 20.0 | 600 | 36 % | 2.00 |" in text
    assert (
        "| int4 | 16 | 10.00 | 20.0 | 5000 | 30 % |  |" in text
    )  # nothing to compare with in this run
    assert "| Qwen2.5-0.5B, the loop one graph | 500 | 0 |" in text
    assert "| Qwen2.5-0.5B, no graphs | 900 | 0.5 |" in text
    assert "| Llama-3.1-8B, no graphs | 4000 |  |" in text
    assert "| Llama-3.1-8B, a graph a token | {'failed': 'y'} | |" in text
    assert list(decoding.lines(lambda name: {}, ceilings, why)) == []
