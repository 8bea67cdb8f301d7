"""The step of training.py by jax-linear-attention: its model, kernels, loss and compiled step.

The same Llama in bfloat16 over float32 weights, clipping, optax's AdamW. Of its options: Mosaic
attention, the loss's gradient formed in the forward pass, an update that is chosen number by
number, no remat, and norms and SwiGLU that keep their inputs alone for the backward pass (without
that it plans 315 GB). Layers in a loop, as it has them by default: unrolled they compile for more
than 160 s. Its modules are imported when asked for.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import optax

from benchmarks.models import LLAMA_1B
from benchmarks.training import (
    LENGTH,
    ROWS,
    STEPS,
    WARM_UP,
    figures,
    in_a_row,
    in_fewest_parts,
    planned,
)
from jaxllm.config import ModelConfig

PARTS = (1, 2, 4)  # micro-batches: as few as fit
NAME = "jax-linear-attention"


def tasks(section: str) -> Iterator[tuple[str, Any]]:
    """(key, work); none without the library."""
    if importlib.util.find_spec("jla") is not None:
        yield f"{section}/{NAME}", measure


def measure(
    watch: Any = None,
    *,
    config: ModelConfig = LLAMA_1B,
    rows: int = ROWS,
    length: int = LENGTH,
    steps: int = STEPS,
    try_parts: Sequence[int] = PARTS,
    kernels: str = "mosaic_gpu",
) -> dict[str, Any]:
    """As `training.measure`, with as few micro-batches as there is memory for.

    kernels: "xla" where there is no Hopper GPU.
    """
    del watch
    run = functools.partial(_measure, config, rows, length, steps, kernels)
    return in_fewest_parts(NAME, rows, try_parts, run, _is_out_of_memory)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _measure(
    config: ModelConfig, rows: int, length: int, steps: int, kernels: str, parts: int
) -> dict[str, Any]:
    import equinox as eqx  # type: ignore
    from jla.models.lm import build_model  # type: ignore
    from jla.training.step import LossConfig, build_train_step, lm_loss  # type: ignore

    model = eqx.filter_jit(build_model)(_model(config, kernels), key=jax.random.key(0))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.1))
    opt_state = jax.jit(optimizer.init)(eqx.filter(model, eqx.is_inexact_array))
    in_forward = kernels != "xla"  # which XLA's loss does not know
    loss = lm_loss(LossConfig(impl=kernels, grad_in_forward=in_forward))
    step = build_train_step(optimizer, loss, update_guard="select")
    key = jax.random.key(1)
    text = jax.random.randint(key, (parts, rows // parts, length + 1), 0, config.vocab_size)
    batch = {"input_ids": text[..., :-1], "labels": text[..., 1:]}
    start = time.perf_counter()
    compiled = step.lower(model, opt_state, batch, key).compile()
    compile_s = time.perf_counter() - start
    step.use_compiled(compiled)
    state = model, opt_state, key
    del model, opt_state, key

    def train() -> Any:
        nonlocal state
        model, opt_state, key = state
        model, opt_state, metrics, key = step(model, opt_state, batch, key)
        state = model, opt_state, key
        return metrics["loss"]

    losses, seconds = in_a_row(train, WARM_UP + steps)
    return {
        **figures(config, rows, length, seconds[WARM_UP:]),
        "losses": losses,
        "compile_s": compile_s,
        "parts": parts,
        **planned(compiled.compiled),
    }


def _model(config: ModelConfig, kernels: str) -> Any:
    from jla.models.config import AttentionConfig  # type: ignore
    from jla.models.config import ModelConfig as Model  # type: ignore

    return Model(
        vocab_size=config.vocab_size,
        d_model=config.hidden_size,
        n_layers=config.num_hidden_layers,
        d_ff=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        tie_embeddings=config.tie_word_embeddings,
        remat="none",
        lean_vjp=True,
        attention=AttentionConfig(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope.rope_theta,
            qk_norm=False,
            implementation=kernels,
        ),
    )
