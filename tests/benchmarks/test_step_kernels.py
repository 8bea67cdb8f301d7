"""The kernels of a step: which launch each belongs to, and what it must move."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxllm
from benchmarks import step_kernels
from benchmarks.models import LLAMA_8B, PHI_3_MINI, QWEN
from benchmarks.step_kernels import Launch
from jaxllm import aot
from jaxllm.config import Runtime
from jaxllm.families import from_hf
from pallas_kernels import measure

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
HLO = """HloModule jit_step, is_scheduled=true

%fused (p: bf16[1]) -> bf16[1] {
  ROOT %p = bf16[1]{0} parameter(0)
}

ENTRY %main (a: bf16[97,64]) -> s32[1] {
  %cache = KEYS parameter(4)
  %ids = s32[1]{0} parameter(3)
  %norm = bf16[64]{0} parameter(2)
  %qkv = bf16[128,64]{1,0} parameter(1)
  %table = bf16[97,64]{1,0} parameter(0)
  %copy.1 = s32[1]{0} copy(%ids)
  %gather.2 = bf16[1,64]{1,0} fusion(%table, %copy.1), kind=kLoop, calls=%fused
  %barrier.0 = (bf16[128,64]{1,0}, bf16[64]{0}) tuple(%qkv, %norm), metadata={op_name="barrier"}
  %barrier.1 = bf16[128,64]{1,0} get-tuple-element(%barrier.0), index=0, metadata={op_name="b"}
  %barrier.2 = bf16[64]{0} get-tuple-element(%barrier.0), index=1, metadata={op_name="b"}
  %gemv.3 = (bf16[1,64]{1,0}, KEYS) custom-call(%gather.2, %barrier.1, %barrier.2, %cache), MOSAIC
  %get-tuple-element.4 = bf16[1,64]{1,0} get-tuple-element(%gemv.3), index=0
  %get-tuple-element.5 = KEYS get-tuple-element(%gemv.3), index=1
  %attend.6 = bf16[1,64]{1,0} custom-call(%get-tuple-element.4, %get-tuple-element.5), MOSAIC
  %bitcast.7 = bf16[64,97]{0,1} bitcast(%table)
  %gemm.8 = (f32[1,97]{1,0}, s8[4194304]{0}) custom-call(%attend.6, %bitcast.7), CUBLAS
  %get-tuple-element.9 = f32[1,97]{1,0} get-tuple-element(%gemm.8), index=0
  ROOT %argmax.10 = s32[1]{0} fusion(%get-tuple-element.9), kind=kInput, calls=%fused
}
"""
HLO = HLO.replace("KEYS", "bf16[1,128,1,32]{3,2,1,0}")
HLO = HLO.replace("MOSAIC", 'custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/g"}')
HLO = HLO.replace("CUBLAS", 'custom_call_target="__cublas$gemm"')
NAMES = ["embed_tokens.weight", "qkv_proj.weight", "norm.weight"]


def test_what_each_launch_must_move():
    gather, gemv, attend, gemm, argmax = step_kernels.launches_of(HLO, TINY, NAMES, 1, 64)
    row, keys = 2 * 64, 2 * 32
    assert gather == Launch("gather_2", "xla", ("embed_tokens.weight",), row + 4 + row, 0)
    weights = ("norm.weight", "qkv_proj.weight")
    moved = row + 2 * 128 * 64 + 2 * 64 + row + keys  # of the cache, the new token's alone
    assert gemv == Launch("gemv_3", "mosaic", weights, moved, 2 * 128 * 64)
    assert attend == Launch("attend_6", "mosaic", (), 2 * row + 65 * keys, 0)
    table = ("embed_tokens.weight",)
    assert gemm == Launch("gemm_8", "library", table, row + 2 * 97 * 64 + 4 * 97, 2 * 97 * 64)
    assert argmax == Launch("argmax_10", "xla", (), 4 * 97 + 4, 0)


def launch(name, kind, size=10):
    return Launch(name, kind, ("w",), size, 0)


CALLS = [
    launch("loop_add_fusion", "xla"),
    launch("mpmd_map_1", "mosaic"),
    launch("gemm_2", "library"),
    launch("gemm_3", "library"),
    launch("loop_add_fusion_1", "xla"),
]


def names(kernels):
    return [(name, found and found.name) for name, _, found in step_kernels.pair(CALLS, kernels)]


def test_kernels_are_paired_with_launches():
    gemv = "gemv_mosaic_gpu_kernel"
    # XLA gives one kernel to fusions that are alike, under the first's name
    kernels = ["loop_add_fusion", gemv, "nvjet_a", "nvjet_b", "loop_add_fusion"]
    assert names([(k, 1.0) for k in kernels]) == list(
        zip(kernels, [call.name for call in CALLS], strict=True)
    )
    copied = [*kernels[:2], "memcpy128", *kernels[2:], "Memset (Device)"]
    found = names([(k, 1.0) for k in copied])
    assert [k for k, _ in found] == copied
    assert [x for x in found if x[1]] == names([(k, 1.0) for k in kernels])
    split = ["loop_add_fusion", gemv, "nvjet", "reduce", "nvjet", "reduce", "loop_add_fusion"]
    found = step_kernels.pair(CALLS, [(k, 1.0) for k in split])
    assert [x.name for _, _, x in found if x] == [
        *("loop_add_fusion", "mpmd_map_1", "gemm_2", "gemm_2", "gemm_3", "gemm_3"),
        "loop_add_fusion_1",
    ]
    assert [x.bytes for _, _, x in found if x] == [10, 10, 10, 0, 10, 0, 10]


@pytest.mark.parametrize(
    "kernels",
    [
        ["loop_add_fusion", "gemv_mosaic_gpu_kernel", "nvjet", "nvjet"],  # one is missing
        ["gemv_mosaic_gpu_kernel", "loop_add_fusion", "nvjet", "nvjet", "loop_add_fusion_1"],
        ["loop_add_fusion", *["gemv_mosaic_gpu_kernel"] * 2, "a", "b", "loop_add_fusion_1"],
        ["loop_add_fusion", "gemv_mosaic_gpu_kernel", *"abc", "loop_add_fusion_1"],
    ],
)
def test_what_does_not_agree_has_no_floor(kernels):
    timed = [(name, 2.0) for name in kernels]
    assert [found for _, found in names(timed)] == [None] * len(kernels)
    table = step_kernels.rows(CALLS, timed)
    assert sum(row["us"] for row in table) == 2.0 * len(kernels)
    assert not any("bytes" in row for row in table)


def test_layers_share_a_row():
    kernels = [("gemv_norm_mosaic_gpu_kernel", 3.0), ("gemv_norm_mosaic_gpu_kernel", 5.0)]
    calls = [Launch("a_1", "mosaic", ("q",), 7, 9), Launch("a_2", "mosaic", ("q",), 7, 9)]
    [row] = step_kernels.rows(calls, kernels)
    assert row == {
        **{"kernel": "gemv_norm", "weights": ("q",), "launches": 2, "us": 8.0},
        **{"bytes": 14, "operations": 18},
    }
    calls[1] = dataclasses.replace(calls[1], weights=("down",))
    assert [row["us"] for row in step_kernels.rows(calls, kernels)] == [5.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_a_step_is_measured_here(step):
    """Without CUPTI: the launches of the CPU's program, and the wall clock."""
    found = step_kernels.measure(TINY, step, measure.Stopwatch("host"))
    assert "us" not in found
    assert found["clock"] == "host (asked for)"
    assert found["wall_us"] > 0
    assert found["tokens"] == (10 if step == "prefill" else 1)
    read = {name for row in found["rows"] for name in row["weights"]}
    assert {"mlp.gate_up_proj.weight", "self_attn.qkv_proj.weight", "embed_tokens.weight"} <= read
    layer = 64 * 128 + 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    held = 10 if step == "prefill" else 65
    assert found["bytes"] == 2 * (97 * 64 + 2 * layer + 64) + 2 * 2 * 2 * 32 * held
    json.dumps(found)


@pytest.mark.parametrize(
    ("config", "tokens", "at_once"),
    [(QWEN, 1, True), (PHI_3_MINI, 1, True), (LLAMA_8B, 1, False), (QWEN, 16, False)],
)
@pytest.mark.aot
@pytest.mark.slow
def test_the_order_is_that_of_the_gpus_program(config, tokens, at_once):
    """Compiled for an H200: as many launches as XLA's own list has, of the same kinds. at_once: the
    layers are one launch, which names what it reads of several layers once.
    """
    if (reason := aot.why_not()) is not None:
        pytest.skip(reason)
    config = dataclasses.replace(config, num_hidden_layers=2, layer_types=config.layer_types[:2])

    def build():
        runtime = Runtime(dtype="bfloat16", param_dtype="bfloat16")
        model = jaxllm.Transformer(config, runtime, rngs=nnx.Rngs(0))
        jaxllm.fuse(model)
        return model

    model = nnx.eval_shape(build)
    cache = jax.eval_shape(
        lambda: jaxllm.KVCache.create(
            config, batch=1, capacity=step_kernels.CAPACITY, dtype=jnp.bfloat16
        )
    )
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    counts = jax.ShapeDtypeStruct((1,), jnp.int32)
    program = aot.compile_for(
        step_kernels.step_program(tokens),
        *(jaxllm.flatten(model), ids, counts, cache),
        compiler_options=step_kernels.WITHOUT_GRAPHS,
    )
    assert program.graphs == 0
    names = step_kernels.names_of(model)
    found = step_kernels.launches_of(program.hlo, config, names, tokens, 0)
    wanted = [x for x in program.launches if x.kind != "kCopy"]
    assert [x.kind == "mosaic" for x in found] == ["mosaic" in x.opcode for x in wanted]
    own = {x.name for x in found if x.kind == "xla"}
    assert {x.name for x in wanted if "mosaic" not in x.opcode} <= own
    read = [name for x in found for name in x.weights if len(name.split(".")) > 1]
    matrices = [name for name in names if name.endswith("_proj.weight")]
    once = set(matrices) if at_once else matrices
    assert sorted(name for name in read if name in matrices) == sorted(once)
    layers = sum(
        math.prod(leaf.shape)
        for name, leaf in zip(names, jax.tree.leaves(nnx.state(model)), strict=True)
        if name in matrices
    )
    head = config.vocab_size * config.hidden_size  # of one token
    assert sum(x.operations for x in found) == 2 * (tokens * layers + head)
    assert sum(x.bytes for x in found) > 0.9 * sum(
        2 * leaf.size for leaf in jax.tree.leaves(nnx.state(model))
    ) - 2 * config.vocab_size * config.hidden_size * (not config.tie_word_embeddings)


def test_phi_3_mini_is_the_published_one(shared):
    path = shared / "data" / "configs" / "Phi-3-mini-4k-instruct.json"
    assert from_hf(json.loads(path.read_text())) == PHI_3_MINI


def test_the_table():
    row = {"kernel": "gemv", "weights": ("mlp.down_proj.weight",), "launches": 24}
    found = {
        "Qwen2.5-0.5B, decode": {
            **{"tokens": 1, "us": 300.0, "wall_us": 450.0, "bytes": 10**9, "clock": "cupti"},
            "rows": [
                {**row, "us": 200.0, "bytes": 5 * 10**8, "operations": 10**9},
                {**row, "us": 50.0, "bytes": 5, "operations": 8 * 10**9},
                {"kernel": "memset", "weights": None, "launches": 1, "us": 50.0},
            ],
        },
        "Phi-3-mini, prefill": {"failed": "x"},
    }
    ceilings = {"read": 5e12, "matmul": 8e14}

    def why(result):
        return str(result)

    text = "\n".join(step_kernels.lines(found, ceilings, why))
    assert "| gemv | mlp.down_proj.weight | 24 | 200.00 | 100.00 | 50 % |" in text
    assert "| gemv | mlp.down_proj.weight | 24 | 50.00 | 10.00 | 20 % |" in text  # by operations
    assert "| memset | ? | 1 | 50.00 |  |  |" in text
    assert "| all | every weight once, and the cache | 49 | 300.00 | 200.00 | 67 % |" in text
    assert "a step after the other: 0.450 ms (aim: 0.5 ms)." in text
    assert "Kernels of one step, Phi-3-mini, prefill: {'failed': 'x'}" in text
