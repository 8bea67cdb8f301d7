"""Log-probabilities of given tokens: of logits, and from hidden states without an array of all
logits.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxllm.ops.linear import linear
from jaxllm.ops.loss import check_linear, chunk_tokens, target_log_probs
from pallas_kernels.cross_entropy import as_int32
from pallas_kernels.packed import Packed


def log_probs(
    logits: Float[Array, "*B V"], targets: Integer[Array, "*B"], *, ignore_index: int = -100
) -> Float[Array, "*B"]:
    """log softmax(logits)[target] in nats, and 0 where the target is `ignore_index`.

    Dtypes: logits of any float; all is float32 inside, and so is the result. Targets are any
    integers.
    Raises: ValueError if shapes or dtypes disagree, or a concrete target is outside the vocabulary;
    a traced one makes its result NaN.
    """
    return target_log_probs("log_probs", logits, targets, ignore_index)[0]


def linear_log_probs(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "V D"] | Packed,
    targets: Integer[Array, "*B"],
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    chunk: int | None = None,
    implementation: str | Mapping[str, str] = "auto",
) -> Float[Array, "*B"]:
    """`log_probs` of the logits hidden @ head.T, of which only a chunk is ever in memory.

    What `linear_cross_entropy` sums, token by token, for losses that are no sum over tokens. The
    backward pass makes each chunk again. With `softcap`, a logit x is softcap * tanh(x / softcap).
    `chunk`: tokens at a time (None: chosen by V). `implementation`: as in `linear`, which makes the
    logits.
    Dtypes: hidden and head in bfloat16, float16 or float32; products in hidden's dtype with sums in
    float32, as is the result; targets any integers; a gradient has the dtype of what it is of, and
    the head's is summed over the chunks in that. A packed head is multiplied as `linear` does it,
    and has no gradient.
    Raises: ValueError if shapes or dtypes disagree, or a concrete target is outside the vocabulary;
    a traced one makes its result NaN.
    """
    check_linear("linear_log_probs", hidden, head, targets, ignore_index, softcap, chunk)
    rows, ids = hidden.reshape(-1, hidden.shape[-1]), as_int32(targets).reshape(-1)
    size = chunk or chunk_tokens(len(ids), head.shape[0])
    parts = -(-len(ids) // size)
    rows = jnp.pad(rows, ((0, parts * size - len(ids)), (0, 0)))
    padded = jnp.pad(ids, (0, parts * size - len(ids)), constant_values=ignore_index)

    @jax.checkpoint
    def one(chunk):
        x, wanted = chunk
        logits = linear(x, head, out_dtype=jnp.dtype(jnp.float32), implementation=implementation)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        return log_probs(logits, wanted, ignore_index=ignore_index)

    chunks = rows.reshape(parts, size, rows.shape[-1]), padded.reshape(parts, size)
    return jax.lax.map(one, chunks).reshape(-1)[: len(ids)].reshape(targets.shape)
