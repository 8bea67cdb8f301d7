"""How many floating-point operations a training step needs, and how many a GPU can do."""

from __future__ import annotations

from jaxllm.config import ModelConfig

# Dense peak in floating-point operations a second, 16 bits in and float32 accumulated, by what
# `device_kind` contains, the first row that does; of NVIDIA's data sheets.
PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops(device_kind: str) -> float | None:
    """The row of `PEAK_FLOPS` for a device; None if there is none."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_kind), None)


def matrix_weights(config: ModelConfig) -> int:
    """How many weights a token is multiplied with: those of all products, the head among them. The
    input embedding is only looked up.
    """
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = 2 * config.hidden_size * config.head_dim * heads
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size
    return config.num_hidden_layers * (attention + mlp) + head


def flops_a_token(config: ModelConfig, seen: float, *, trains_all: bool = True) -> float:
    """What forward and backward pass need for a token that attends to `seen` tokens in the mean,
    itself among them: T / 2 in causal rows of T, to half a token.

    2 a weight forward, 2 for the gradient of the activations, and 2 for that of the weights, where
    they are trained (`trains_all`; adapters are small beside them, and not counted). Attention: two
    products of 2 N H a pair and layer forward, and twice that backward. Sliding windows are not
    taken off, and what remat computes again is not counted.
    """
    passes = 3 if trains_all else 2
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 2 * passes * matrix_weights(config) + attention * seen
