"""Token cross entropy: of logits, and from hidden states without an array of all logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxllm.integers import integer
from jaxllm.ops._select import Implementation, Table, pallas, select
from pallas_kernels.cross_entropy import Config, as_int32, check, check_targets, default_config
from pallas_kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy_kernel
from pallas_kernels.cross_entropy import why_not as why_not_kernel
from pallas_kernels.cross_entropy_kernel import TILE_M
from pallas_kernels.matmul_finish import precision
from pallas_kernels.options import check_arrays
from pallas_kernels.packed import Packed
from pallas_kernels.quantize import dequantize
from pallas_kernels.varying import vary_alike

# Logits that are in memory at one time: 512 MiB in float32. Fewer would make the head's gradient,
# float32 [V, D], be read and written too often: at 1024 tokens a chunk that takes as long as the
# products themselves where 4.8 TB/s stand beside 989 TFLOP/s.
CHUNK_LOGITS = 2**27
CHUNK_TOKENS = (1024, 8192)  # least and most

# What the gradients by logits are multiplied by before they are rounded to float16: of 2**-36 a bit
# is left, and the largest are between -1 and 1; less where 1 + 2 z_loss lse lifts them beyond
FLOAT16_SCALE = 2.0**12


def cross_entropy(
    logits: Float[Array, "B T V"], targets: Integer[Array, "B T"], *, ignore_index: int = -100
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum of -log softmax(logits)[target] in nats, and how many targets it is over.

    Targets are already shifted; those that are `ignore_index` do not count. The sum and the count
    come apart so that micro-batches can be weighted by tokens.
    Dtypes: logits of any float; all is float32 inside, and so is the sum. Targets are any integers.
    Raises: ValueError if shapes or dtypes disagree, or a concrete target is outside the vocabulary;
    a traced one makes the loss NaN.
    """
    found, counted = target_log_probs("cross_entropy", logits, targets, ignore_index)
    return jnp.sum(-found), jnp.sum(counted, dtype=jnp.int32)


def linear_cross_entropy(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "V D"] | Packed,
    targets: Integer[Array, "*B"],
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    implementation: str | Mapping[str, str] = "auto",
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """`cross_entropy` of the logits hidden @ head.T, of which only a chunk is ever in memory.

    With `softcap`, a logit x is softcap * tanh(x / softcap). `z_loss` adds z_loss * lse**2 for each
    counted target, where lse is the log-sum-exp of its logits. `chunk` is how many tokens are
    worked on at a time (None: chosen by V). Under differentiation the gradients are made beside the
    loss, chunk by chunk, and the head's only if it is asked for. By "xla" they are kept from there
    to the backward pass: the head's in float32, 4 V D bytes, hidden's in its dtype (of float16 in
    float32), beside a chunk's logits, in float32 512 MiB up to V = 131072 if V chooses the chunk.
    What the kernel keeps is said in pallas_kernels/cross_entropy.py.
    Dtypes: hidden and head in bfloat16, float16 or float32; the head is cast to hidden's dtype for
    the products, whose sums are float32, as is all between them. A gradient has the dtype of what
    it is of: that of a float32 head is never rounded to less. A packed head has no gradient; its
    numbers are in memory once, in hidden's dtype.
    A hidden state that is not finite makes gradients so, also where its target does not count.
    Raises: ValueError if shapes or dtypes disagree, or a concrete target is outside the vocabulary;
    a traced one makes the loss NaN.
    """
    op = "linear_cross_entropy"
    check_linear(op, hidden, head, targets, ignore_index, softcap, chunk, z_loss)
    if isinstance(head, Packed):
        head = jax.lax.stop_gradient(dequantize(head, hidden.dtype))
    kwargs = {"ignore_index": ignore_index, "softcap": softcap, "z_loss": z_loss, "chunk": chunk}
    run = select(op, LINEAR_CROSS_ENTROPY, implementation, hidden, head, targets, **kwargs)
    return run(hidden, head, targets, **kwargs)


def target_log_probs(
    op: str, logits: Float[Array, "*B V"], targets: Integer[Array, "*B"], ignore_index: int
) -> tuple[Float[Array, "*B"], Bool[Array, "*B"]]:
    """`ops.log_probs`, and which targets count; what it refuses, in the name of `op`."""
    check_arrays(op, logits=logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating) or logits.ndim < 1:
        raise ValueError(
            f"{op}: logits must be floats [.., V], got {logits.dtype}{list(logits.shape)}"
        )
    check_targets(op, targets, logits.shape[:-1], ignore_index)
    _check_concrete(op, targets, logits.shape[-1], ignore_index)
    logits, targets = logits.astype(jnp.float32), as_int32(targets)
    counted = targets != ignore_index
    logits = jnp.where(counted[..., None], logits, jnp.float32(0))  # its gradient: 0, never NaN
    found = logits_at(logits, targets, counted) - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(counted, found, jnp.float32(0)), counted


def chunk_tokens(tokens: int, vocab_size: int) -> int:
    """How many of the tokens to work on at a time: equal parts, as few as memory allows."""
    least, most = CHUNK_TOKENS
    limit = min(max(2 ** int(math.log2(max(CHUNK_LOGITS // vocab_size, 1))), least), most)
    parts = -(-tokens // limit)
    return max(-(-tokens // max(parts, 1)), 1)


def check_linear(
    op: str, hidden, head, targets, ignore_index, softcap, chunk, z_loss: float = 0.0
) -> None:
    """What `linear_cross_entropy` and `linear_log_probs` refuse, in the name of `op`."""
    check(op, hidden, head, targets, softcap, z_loss, ignore_index=ignore_index)
    if chunk is not None:
        integer("chunk", chunk, 1, who=op)
    _check_concrete(op, targets, head.shape[0], ignore_index)


def _check_concrete(op: str, targets, vocab: int, ignore_index: int) -> None:
    """Refuses targets outside the vocabulary, where their values are known."""
    if isinstance(targets, Tracer) or not hasattr(targets, "__array__"):
        return
    values = np.asarray(targets)
    outside = values[(values != ignore_index) & ((values < 0) | (values >= vocab))]
    if outside.size:
        raise ValueError(
            f"{op}: target {outside[0]} is outside the vocabulary of {vocab}, and not "
            f"{ignore_index}, which is not counted"
        )


def logits_at(
    logits: Float[Array, "*B V"], targets: Integer[Array, "*B"], counted: Bool[Array, "*B"]
) -> Float[Array, "*B"]:
    """Each target's logit: of word 0 if it is not counted, NaN if it is outside the vocabulary."""
    ids = jnp.where(counted, targets, 0)[..., None]
    found = jnp.take_along_axis(logits, ids, axis=-1, mode="fill", wrap_negative_indices=False)
    return found[..., 0]


@dataclasses.dataclass(frozen=True)
class _Static:
    """The numbers of a call."""

    ignore_index: int
    softcap: float | None
    z_loss: float
    chunk: int | None


def _xla(hidden, head, targets, *, ignore_index, softcap, z_loss, chunk):
    cap = None if softcap is None else float(softcap)
    whole = None if chunk is None else int(chunk)
    static = _Static(ignore_index, cap, float(z_loss), whole)
    return _loss(static, *vary_alike(hidden, head, as_int32(targets)))


def _chunks(static: _Static, hidden, head, targets):
    """The head in the products' dtype, and tokens in chunks [P, C, D] and [P, C], filled up."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    targets = targets.reshape(-1).astype(jnp.int32)
    tokens = len(targets)
    size = static.chunk or chunk_tokens(tokens, head.shape[0])
    parts = -(-tokens // size)
    if missing := parts * size - tokens:
        hidden = jnp.pad(hidden, ((0, missing), (0, 0)))
        targets = jnp.pad(targets, (0, missing), constant_values=static.ignore_index)
    chunked = (hidden.reshape(parts, size, hidden.shape[1]), targets.reshape(parts, size))
    return head.astype(hidden.dtype), chunked


def _dot(a, b, contract: tuple[int, int]):
    """Products of one dtype, with sums in float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def _losses(static: _Static, hidden, head, targets):
    """Of one chunk: the sum, and what its gradient is made of."""
    logits = _dot(hidden, head, (1, 1))
    slope = None
    if static.softcap is not None:
        bent = jnp.tanh(logits / static.softcap)
        logits, slope = bent * static.softcap, 1.0 - bent * bent
    counted = targets != static.ignore_index
    lse = jax.nn.logsumexp(logits, axis=1)
    losses = lse - logits_at(logits, targets, counted)
    if static.z_loss:
        losses = losses + static.z_loss * lse * lse
    total = jnp.sum(jnp.where(counted, losses, jnp.float32(0)))
    return total, (logits, slope, lse, counted)


def _gradients(static: _Static, hidden, head, targets, saved, want_hidden, want_head):
    """Of one chunk's sum: by hidden states, float32 [C, D], and by the head, float32 [V, D]."""
    logits, slope, lse, counted = saved
    weight = jnp.where(counted, 1.0 + 2.0 * static.z_loss * lse, jnp.float32(0))
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    hit = (ids == targets[:, None]) & counted[:, None]
    d_logits = jnp.exp(logits - lse[:, None]) * weight[:, None] - hit.astype(jnp.float32)
    if slope is not None:
        d_logits = d_logits * slope
    scale: Any = 1.0
    if hidden.dtype == jnp.float16:
        scale = FLOAT16_SCALE
        if static.z_loss:
            scale = scale / jnp.maximum(1.0, jnp.max(jnp.abs(weight)))
    d_logits = (d_logits * scale).astype(hidden.dtype)
    d_hidden = _dot(d_logits, head, (1, 0)) / scale if want_hidden else None
    d_head = _dot(d_logits, hidden, (0, 0)) / scale if want_head else None
    return d_hidden, d_head


def _zero(head):
    return vary_alike(jnp.zeros((), jnp.float32), head)[0]


def _count(static: _Static, targets):
    return jnp.sum(targets != static.ignore_index, dtype=jnp.int32)


def _primal(static: _Static, hidden, head, targets):
    cast, chunked = _chunks(static, hidden, head, targets)

    def add(total, chunk):
        return total + _losses(static, chunk[0], cast, chunk[1])[0], None

    total, _ = jax.lax.scan(add, _zero(head), chunked)
    return total, _count(static, targets)


def _forward(static: _Static, hidden, head, targets):
    wants: Any = (hidden.perturbed, head.perturbed)
    hidden, head, targets = hidden.value, head.value, targets.value
    cast, chunked = _chunks(static, hidden, head, targets)
    # What the loss's own scale may lift out of float16's reach is kept in float32
    kept = jnp.float32 if hidden.dtype == jnp.float16 else hidden.dtype

    def add(sums, chunk):
        total, d_head = sums
        loss, saved = _losses(static, chunk[0], cast, chunk[1])
        d_hidden, more = _gradients(static, chunk[0], cast, chunk[1], saved, *wants)
        d_head = None if d_head is None else d_head + more
        return (total + loss, d_head), None if d_hidden is None else d_hidden.astype(kept)

    start = jnp.broadcast_to(_zero(head), head.shape) if wants[1] else None
    (total, d_head), d_hidden = jax.lax.scan(add, (_zero(head), start), chunked)
    if d_hidden is not None:
        tokens = math.prod(hidden.shape[:-1])
        d_hidden = d_hidden.reshape(-1, hidden.shape[-1])[:tokens].reshape(hidden.shape)
    like = (jnp.zeros((), hidden.dtype), jnp.zeros((), head.dtype))
    return (total, _count(static, targets)), (d_hidden, d_head, like)


def _backward(static: _Static, saved, cotangents):
    del static
    d_hidden, d_head, (like_hidden, like_head) = saved
    d_total = cotangents[0]
    if isinstance(d_total, SymbolicZero):
        d_total = jnp.zeros((), jnp.float32)

    def finish(gradient, like):
        if gradient is None:
            return None
        return (gradient.astype(jnp.float32) * d_total).astype(like.dtype)

    return finish(d_hidden, like_hidden), finish(d_head, like_head), None


_loss = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_loss.defvjp(_forward, _backward, symbolic_zeros=True)
_loss = jax.jit(_loss, static_argnums=0)  # calls alike share one compiled program


def _rows(hidden, targets) -> tuple[Any, Any]:
    """Shapes as the kernel takes them: [T, D] and [T]."""
    tokens = math.prod(hidden.shape[:-1])
    rows = jax.ShapeDtypeStruct((tokens, hidden.shape[-1]), hidden.dtype)
    return rows, jax.ShapeDtypeStruct((tokens,), targets.dtype)


def _pallas(
    hidden, head, targets, *, ignore_index, softcap, z_loss, chunk, interpret=False
) -> tuple[Array, Array]:
    rows, ids = hidden.reshape(-1, hidden.shape[-1]), as_int32(targets).reshape(-1)
    config: Config | None = None
    if chunk is not None:
        whole = -(-chunk // TILE_M) * TILE_M
        config = dataclasses.replace(default_config(rows, head), chunk=whole)
    total = linear_cross_entropy_kernel(
        rows,
        head,
        ids,
        ignore_index=ignore_index,
        softcap=softcap,
        z_loss=z_loss,
        reduction="sum",
        config=config,
        interpret=interpret,
    )
    return total, jnp.sum(ids != ignore_index, dtype=jnp.int32)


def _pallas_why_not(hidden, head, targets, *, softcap, device, **kwargs) -> str | None:
    del kwargs
    rows, ids = _rows(hidden, targets)
    return why_not_kernel(rows, head, ids, softcap=softcap, device=device)


LINEAR_CROSS_ENTROPY: Table = {
    **pallas(_pallas, _pallas_why_not),
    "xla": Implementation(_xla),
}
