"""Tiny models with weights large enough that attention is far from uniform; and their numbers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm import train
from jaxllm.config import ModelConfig, Rope, Runtime
from jaxllm.model import Transformer

TINY = ModelConfig(
    model_type="llama",
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=Rope(10_000.0),
)
LONGROPE = Rope(
    10_000.0,
    "longrope",
    original_max_position_embeddings=9,
    short_factor=(1.0, 1.1, 1.3, 1.5),
    long_factor=(1.5, 2.5, 3.5, 4.5),
    attention_factor=1.2,
)
SLIDING = dataclasses.replace(
    TINY, sliding_window=3, layer_types=("sliding_attention", "full_attention")
)
# Every switch at once, as no family has them
ALL = dataclasses.replace(
    SLIDING,
    model_type="gemma3_text",
    hidden_act="gelu_pytorch_tanh",
    rope=Rope(10_000.0, "linear", partial_rotary_factor=0.75, factor=2.0),
    sliding_rope=Rope(100.0),
    tie_word_embeddings=True,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
    zero_centered_norm=True,
    post_norms=True,
    scale_embedding=True,
    query_pre_attn_scalar=5.0,
    attn_logit_softcapping=4.0,
    final_logit_softcapping=6.0,
)


def fill(module: Any, *, seed: int = 0) -> Any:
    """The module itself, with parameters by chance; those of one path and shape are the same."""
    state = []
    for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        shape = param.shape
        noise = np.random.default_rng([seed, *repr(path).encode()]).standard_normal(shape)
        if len(shape) == 1:
            values = 0.3 * noise + (0.0 if path[-1] == "bias" else 0.7)
        else:
            size = {"embed_tokens": 0.7 * shape[-1] ** 0.5, "q_proj": 2.0, "k_proj": 2.0}
            values = noise * size.get(str(("", *path)[-2]), 1.0) / shape[-1] ** 0.5
        state.append((path, param.replace(jnp.asarray(values.astype(param.dtype)))))
    nnx.update(module, nnx.from_flat_state(state))
    return module


def build(config: ModelConfig, runtime: Runtime = Runtime(), *, seed: int = 0) -> Transformer:
    model = nnx.eval_shape(lambda: Transformer(config, runtime, rngs=nnx.Rngs(0)))
    return fill(model, seed=seed)


def weights(module: Any) -> dict[str, np.ndarray]:
    """Parameters by dotted name, as the oracle takes them."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): np.asarray(param[...]) for path, param in state}


def as_dict(config: ModelConfig | Rope) -> dict[str, Any]:
    """A config, or a rope, as the oracle takes it."""
    return dataclasses.asdict(config)


def tokens(*shape: int, seed: int = 0) -> jax.Array:
    numbers = np.random.default_rng(seed).integers(0, TINY.vocab_size, shape)
    return jnp.asarray(numbers, jnp.int32)


def logits(model: Transformer, *args: Any, **kwargs: Any) -> np.ndarray:
    """model(tokens, ...), compiled once a kind of model and shape."""
    graph, state = nnx.split(model)
    return np.asarray(_forward(graph, state, args, kwargs))


def poisoned(model: Transformer, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The loss of training, times the batch's first factor."""
    total, count = train.token_loss(model, batch)
    return total * batch["factor"][0], count


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph: Any, state: Any, args: Any, kwargs: Any) -> jax.Array:
    return nnx.merge(graph, state)(*args, **kwargs)


def shapes(config: ModelConfig) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """Of every parameter; nothing is allocated."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return {path: p.shape for path, p in nnx.to_flat_state(nnx.state(model, nnx.Param))}
