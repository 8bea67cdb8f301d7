"""Models of real widths, and where our kernels can run in them."""

from __future__ import annotations

import dataclasses

from jaxllm import ops
from jaxllm.config import ModelConfig, Rope

# Qwen/Qwen2.5-0.5B's config.json
QWEN = ModelConfig(
    model_type="qwen2",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    rope=Rope(rope_theta=1e6),
    tie_word_embeddings=True,
    qkv_bias=True,
)
# meta-llama/Llama-3.2-1B's config.json, but for its RoPE, which here scales nothing
LLAMA = ModelConfig(
    model_type="llama",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=Rope(5e5),
    tie_word_embeddings=True,
)

# meta-llama/Llama-3.1-8B's config.json, but for its RoPE, which here scales nothing
LLAMA_8B = ModelConfig(
    model_type="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=Rope(5e5),
    tie_word_embeddings=False,
)

# Qwen/Qwen3-0.6B's config.json
QWEN3 = ModelConfig(
    model_type="qwen3",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    rope=Rope(1e6),
    tie_word_embeddings=True,
    qk_norm=True,
)
# Qwen/Qwen3-8B's
QWEN3_8B = dataclasses.replace(
    QWEN3,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    tie_word_embeddings=False,
    layer_types=(),
)

# microsoft/Phi-3-mini-4k-instruct's config.json
PHI_3_MINI = ModelConfig(
    model_type="phi3",
    vocab_size=32_064,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=96,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=Rope(1e4),
    tie_word_embeddings=False,
    sliding_window=2047,
    layer_types=("sliding_attention",) * 32,
)

# microsoft/Phi-4-mini-instruct's config.json, but for its RoPE, which here scales nothing
PHI_4_MINI = ModelConfig(
    model_type="phi3",
    vocab_size=200_064,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=32,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=Rope(1e4, partial_rotary_factor=0.75),
    tie_word_embeddings=True,
)

# google/gemma-3-1b-it's config.json
GEMMA3_1B = ModelConfig(
    model_type="gemma3_text",
    vocab_size=262_144,
    hidden_size=1152,
    intermediate_size=6912,
    num_hidden_layers=26,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    max_position_embeddings=32_768,
    rms_norm_eps=1e-6,
    hidden_act="gelu_pytorch_tanh",
    rope=Rope(1e6),
    sliding_rope=Rope(1e4),
    tie_word_embeddings=True,
    qk_norm=True,
    zero_centered_norm=True,
    post_norms=True,
    scale_embedding=True,
    query_pre_attn_scalar=256,
    sliding_window=512,
    layer_types=("sliding_attention",) * 5
    + (("full_attention",) + ("sliding_attention",) * 5) * 3
    + ("full_attention",)
    + ("sliding_attention",) * 2,
)
# google/gemma-3-4b-it's of text, but for its RoPE, which here scales nothing
GEMMA3_4B = dataclasses.replace(
    GEMMA3_1B,
    vocab_size=262_208,
    hidden_size=2560,
    intermediate_size=10_240,
    num_hidden_layers=34,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=131_072,
    sliding_window=1024,
    layer_types=(("sliding_attention",) * 5 + ("full_attention",)) * 5 + ("sliding_attention",) * 4,
)
# google/gemma-2-2b's config.json
GEMMA2_2B = dataclasses.replace(
    GEMMA3_1B,
    model_type="gemma2",
    vocab_size=256_000,
    hidden_size=2304,
    intermediate_size=9216,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=8192,
    rope=Rope(1e4),
    sliding_rope=None,
    qk_norm=False,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    sliding_window=4096,
    layer_types=("sliding_attention", "full_attention") * 13,
)

# A Llama of 1.3B parameters, for training steps
LLAMA_1B = ModelConfig(
    model_type="llama",
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=5504,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=Rope(1e4),
    tie_word_embeddings=False,
)


def kernels() -> dict[str, str]:
    """What `Runtime(implementation=)` takes to run our kernel for each op that has one."""
    return {op: "pallas" for op, (_, table) in ops.OPS.items() if "pallas" in table}
