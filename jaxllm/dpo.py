"""Preference tuning: DPO's losses over pairs of a chosen and a rejected answer.

    z = [log p(chosen) - log q(chosen)] - [log p(rejected) - log q(rejected)]

with p the model that is trained and q the reference. A batch holds 2P rows: P chosen answers, then
the P rejected ones in the same order, as `data.preference_batch` lays them out. log q comes with
the batch as `reference`, float32 [2P], or from the base below the model's adapters, which must then
be all that is trained (`trainable=lora.is_adapter`).
Source: Rafailov et al. 2023, arXiv:2305.18290; IPO: Azar et al. 2023, arXiv:2310.12036, on means
over tokens as TRL has it (no code taken).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm import lora, ops
from jaxllm.data import PreferenceExample, preference_batch
from jaxllm.integers import integer
from jaxllm.model import Transformer
from jaxllm.train import IGNORE, Batch, Loss, head_factors
from pallas_kernels.options import is_number

KINDS = ("sigmoid", "ipo")


def log_probs(model: Transformer, batch: Batch) -> Float[Array, " B"]:
    """The sum of the log-probabilities in nats of each row's targets, in float32.

    All logits are made only where the head is more than a matrix (an adapter beside it, products
    in fp8).
    Raises: ValueError if a concrete target is outside the vocabulary; a traced one makes its row's
    sum NaN.
    """
    tokens = batch["tokens"], batch.get("positions"), batch.get("segment_ids")
    hidden, _ = model.hidden(*tokens)
    targets = jnp.asarray(batch["targets"])
    with jax.named_scope("log_probs"):
        if (factors := head_factors(model, hidden)) is None:
            each = ops.log_probs(model.head(hidden), targets, ignore_index=IGNORE)
        else:
            each = ops.linear_log_probs(
                *factors,
                targets,
                ignore_index=IGNORE,
                softcap=model.config.final_logit_softcapping,
                implementation=model.runtime.implementation,
            )
        return jnp.sum(each, axis=-1)


def make_loss(*, beta: float = 0.1, kind: str = "sigmoid", label_smoothing: float = 0.0) -> Loss:
    """The loss of preference batches for `make_train_step` and `make_evaluate`: its sum over the
    pairs, and their count. Pairs without a target are not counted.

    sigmoid: -log sigmoid(beta z), with label_smoothing e (the share of pairs that are thought to be
        the wrong way round) -(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z).
    ipo: (z - 1 / (2 beta))^2, where log p and log q are means over the answer's tokens.
    Raises: ValueError for a kind, beta or label_smoothing that does not exist; and, when it is
    called, for a batch without tokens or targets, or without `reference` if the model has no
    adapters, or with one that is not a number a row.
    """
    _check(beta, kind, label_smoothing)

    def loss(model: Transformer, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
        z, real = _margins(model, batch, means=kind == "ipo")
        if kind == "ipo":
            losses = jnp.square(z - 1 / (2 * beta))
        else:
            losses = -(1 - label_smoothing) * jax.nn.log_sigmoid(beta * z)
            losses = losses - label_smoothing * jax.nn.log_sigmoid(-beta * z)
        return _sum(losses, real)

    return loss


def make_accuracy(*, kind: str = "sigmoid") -> Loss:
    """How many pairs have the chosen answer's reward above the rejected one's, and of how many: for
    `make_evaluate`, as a loss.
    """
    _check(1.0, kind, 0.0)

    def accuracy(model: Transformer, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
        z, real = _margins(model, batch, means=kind == "ipo")
        return _sum((z > 0).astype(jnp.float32), real)

    return accuracy


def make_margin(*, beta: float = 0.1, kind: str = "sigmoid") -> Loss:
    """The sum of beta z, the rewards' difference, over the pairs, and their count: for
    `make_evaluate`, as a loss.
    """
    _check(beta, kind, 0.0)

    def margin(model: Transformer, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
        z, real = _margins(model, batch, means=kind == "ipo")
        return _sum(beta * z, real)

    return margin


def cache_reference(
    model: Transformer,
    examples: Sequence[PreferenceExample],
    *,
    pairs: int,
    length: int,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """The model's log-probabilities of all answers, float32 [N, 2] (chosen, rejected), for
    `PreferenceLoader(reference=)`.

    The model as it stands, adapters included: call it before the first step. `pairs` are worked on
    at a time, in rows of `length` tokens. `progress` is called with pairs done and all there are.
    Raises: ValueError if an answer is longer than a row, or pairs is no integer of at least 1.
    """
    pairs = integer("pairs", pairs, 1, who="dpo")
    graph, state = nnx.split(model)
    call = jax.jit(lambda state, batch: log_probs(nnx.merge(graph, state), batch))
    found = np.zeros((len(examples), 2), np.float32)
    for start in range(0, len(examples), pairs):
        some = list(examples[start : start + pairs])
        batch = preference_batch([*some, *[None] * (pairs - len(some))], length)
        sums = np.asarray(call(state, batch)).reshape(2, pairs)
        found[start : start + len(some)] = sums[:, : len(some)].T
        if progress is not None:
            progress(start + len(some), len(examples))
    return found


def _check(beta: float, kind: str, label_smoothing: float) -> None:
    if kind not in KINDS:
        raise ValueError(f"dpo: kind {kind!r} is not one of {', '.join(KINDS)}")
    if not is_number(beta) or not 0 < beta < math.inf:
        raise ValueError(f"dpo: beta must be positive and finite, got {beta!r}")
    if not is_number(label_smoothing) or not 0 <= label_smoothing < 0.5:
        raise ValueError(f"dpo: label_smoothing must be in [0, 0.5), got {label_smoothing!r}")
    if kind == "ipo" and label_smoothing:
        raise ValueError("dpo: label_smoothing is for kind 'sigmoid'")


def _margins(model: Transformer, batch: Batch, *, means: bool) -> tuple[Array, Array]:
    """z of each pair, float32 [P], and which pairs there are, bool [P]."""
    if missing := [key for key in ("tokens", "targets") if key not in batch]:
        raise ValueError(f"dpo: the batch has no {' and no '.join(missing)}")
    rows = len(batch["tokens"])
    if rows % 2:
        raise ValueError(f"dpo: {rows} rows are no pairs: chosen answers, then as many rejected")
    reference = batch.get("reference")
    if reference is None:
        if not lora.adapters(model):
            raise ValueError(
                "dpo: the batch has no 'reference', and the model no adapters whose base could be "
                "it; see cache_reference"
            )
        with lora.disabled(model), jax.named_scope("reference"):
            reference = jax.lax.stop_gradient(log_probs(model, batch))
    elif np.shape(reference) != (rows,):
        raise ValueError(
            f"dpo: the batch's reference must have shape {(rows,)}, a number a row, got "
            f"{np.shape(reference)}"
        )
    ratios = log_probs(model, batch) - reference
    counts = jnp.sum(jnp.asarray(batch["targets"]) != IGNORE, axis=-1)
    if means:
        ratios = ratios / jnp.maximum(counts, 1).astype(jnp.float32)
    chosen, rejected = jnp.split(ratios, 2)
    return chosen - rejected, jnp.sum(counts.reshape(2, -1), axis=0) > 0


def _sum(values: Array, real: Array) -> tuple[Float[Array, ""], Int[Array, ""]]:
    zero = jnp.float32(0)
    return jnp.sum(jnp.where(real, values, zero)), jnp.sum(real, dtype=jnp.int32)
