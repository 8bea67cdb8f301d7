"""`Transformer`: embedding, blocks, norm and head; one forward pass for all that uses a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Integer

from jaxllm import chain, ops
from jaxllm.cache import KVCache
from jaxllm.config import GenerationDefaults, ModelConfig, Runtime
from jaxllm.layers import Block, Embedding, Linear, RMSNorm, Tables, rotary_tables

_named_by_attention = jax.checkpoint_policies.save_only_these_names(
    "attention_output", "attention_lse"
)


def _save_attention(primitive: Any, *arrays: Any, **params: Any) -> Any:
    """What attention's kernels keep for their backward pass: ours name it, cuDNN's is all that its
    forward call returns.
    """
    if primitive.name == "dot_product_attention_fwd_wrapper":
        return True
    return _named_by_attention(primitive, *arrays, **params)


REMAT_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "save_attention": _save_attention,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["block_input"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class Transformer(nnx.Module):
    """A decoder of the Llama family. Weights are drawn with standard deviation 0.02.

    Norms start at identity. `config` says what it computes and `runtime` how; `generation` is what
    its checkpoint says of sampling.
    A module of yours in the place of a block, or of its attention, is called as (x, rotary, *,
    segment_ids=None, cache=None) and returns (x, its cache entry or None), one in the place of an
    MLP as (x), and returns x. `hidden` hands entries of any kind back to their layers; `prefill`
    and `generate` know only those of `KVCache.create`.
    Raises: ValueError for an implementation that the runtime names and an op does not have.
    """

    def __init__(self, config: ModelConfig, runtime: Runtime = Runtime(), *, rngs: nnx.Rngs):
        if not isinstance(config, ModelConfig):
            raise ValueError(f"model: config must be a ModelConfig, got {config!r:.60}")
        ops.check_names(runtime.implementation)  # a Runtime knows no op
        both = {"runtime": runtime, "rngs": rngs}
        scale = config.hidden_size**0.5 if config.scale_embedding else None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, scale=scale, **both)
        self.layers = nnx.List(Block(config, i, **both) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(
            config.hidden_size,
            eps=config.rms_norm_eps,
            zero_centered=config.zero_centered_norm,
            **both,
        )
        tied = config.tie_word_embeddings
        head = None if tied else Linear(config.hidden_size, config.vocab_size, **both)
        self.lm_head = nnx.data(head)  # so that one can be put there later
        self.config = config
        self.runtime = runtime
        self.generation = GenerationDefaults()

    def __call__(
        self,
        tokens: Integer[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits in float32 for every position. Arguments as in `hidden`."""
        return self.head(self.hidden(tokens, positions, segment_ids)[0])

    def hidden(
        self,
        tokens: Integer[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """What the head reads, in the compute dtype; and the cache with these tokens.

        The head reads what the last norm returns. Without a cache, a token sees the tokens before
        it in its row that have its segment id. With one, the T tokens follow what the cache holds;
        segment id 0 marks padding, which stands to the right and is not kept. Positions count from
        0, or from what the cache holds, if None; they turn q and k and mask nothing.
        Raises: ValueError if tokens are not integers [B, T], the other arrays have another shape or
        are no integers, concrete ones do not fit int32, the tokens are more than the model has
        positions, or the cache is one of another model or number of rows.
        """
        given = tokens if isinstance(tokens, np.ndarray) else jnp.asarray(tokens)
        if given.ndim != 2 or not jnp.issubdtype(given.dtype, jnp.integer):
            raise ValueError(
                f"model: tokens must be integers of shape [B, T], got {given.dtype}{given.shape}"
            )
        tokens = _int32("tokens", given, given.shape)
        if positions is not None:
            positions = _int32("positions", positions, tokens.shape)
        if segment_ids is not None:
            segment_ids = _int32("segment_ids", segment_ids, tokens.shape)
        b, t = tokens.shape
        if cache is not None:
            cache.check(self.config, b)
        limit = self.config.max_position_embeddings
        if positions is None and t > limit:
            raise ValueError(f"model: {t} tokens are more than the model's {limit} positions")
        if positions is None:
            start = jnp.zeros((b,), jnp.int32) if cache is None else cache.lengths
            positions = start[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :]
        counts = jnp.full((b,), t, jnp.int32)
        if segment_ids is not None and cache is not None:
            counts = jnp.sum(segment_ids != 0, axis=-1, dtype=jnp.int32)

        with jax.named_scope("embed"):
            x = self.embed_tokens(tokens)
        rotary = self._rotary(positions, segment_ids, cache, counts)
        tables = [rotary[kind] for kind in self.config.layer_types]
        caches = [] if cache is None else [cache.layer(i, counts) for i in range(len(self.layers))]
        together = chain.decode(self.layers, x, tables, caches) if caches else None
        entries = []
        if together is not None:
            x, entries = together
        else:
            for i, block in enumerate(self.layers):
                with jax.named_scope(f"layer_{i}"):
                    if cache is None:
                        x = self._run(block, x, tables[i], segment_ids)
                    else:
                        x, entry = block(x, tables[i], cache=caches[i])
                        entries.append(entry)
        with jax.named_scope("norm"):
            x = self.norm(x)
        if cache is not None:
            cache = KVCache(tuple(entries), cache.lengths + counts, cache.rope_lengths)
        return x, cache

    def head(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits in float32, soft-capped where the model is."""
        with jax.named_scope("head"):
            project = self.embed_tokens.attend if self.lm_head is None else self.lm_head
            logits = project(hidden, out_dtype=jnp.dtype(jnp.float32))
            cap = self.config.final_logit_softcapping
            return logits if cap is None else jnp.tanh(logits / cap) * cap

    def _rotary(self, positions, segment_ids, cache, counts) -> dict[str, Tables]:
        """cos and sin for each kind of layer: made once a forward pass."""
        lengths = None
        if any(rope.rope_type == "longrope" for rope in self.config.ropes.values()):
            lengths = _text_lengths(positions, segment_ids, cache, counts)
        return {
            kind: rotary_tables(rope, self.config.rotary_dim(kind), positions, lengths)
            for kind, rope in self.config.ropes.items()
        }

    def _run(self, block: Block, x, tables: Tables, segment_ids) -> Float[Array, "B T D"]:
        """One block without a cache; under remat, its backward pass computes it again."""
        if self.runtime.remat == "none":
            return block(x, tables, segment_ids=segment_ids)[0]
        graph, *state = nnx.split(block, nnx.Param, ...)

        def forward(state, x, tables, segment_ids):
            x, block = checkpoint_name(x, "block_input"), nnx.merge(graph, *state)
            before = {path: variable.get_value() for path, variable in _others(block)}
            x = block(x, tables, segment_ids=segment_ids)[0]
            written = [
                (path, variable)
                for path, variable in _others(block)
                if path not in before or variable.get_value() is not before[path]
            ]
            return x, nnx.from_flat_state(written)

        again = jax.checkpoint(forward, policy=REMAT_POLICIES[self.runtime.remat])
        x, written = again(state, x, tables, segment_ids)
        if jax.tree.leaves(written):  # by a block of one's own, which counts, say
            nnx.update(block, written)
        return x


def _others(block: nnx.Module) -> Iterable[tuple[tuple[Any, ...], Any]]:
    """A block's variables that are no parameters, with their paths."""
    return nnx.to_flat_state(nnx.state(block, nnx.Not(nnx.Param)))


def _int32(name: str, x: Any, shape: tuple[int, ...]) -> Int[Array, "B T"]:
    """The integers as int32. Raises: ValueError for another shape, for what is no integers, and if
    concrete ones, which jnp cuts, do not fit.
    """
    x = x if isinstance(x, np.ndarray) else jnp.asarray(x)
    if x.shape != shape:
        raise ValueError(f"model: {name} has shape {x.shape}, but tokens have {shape}")
    if jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(f"model: {name} must be integers, got {x.dtype}")
    held = jnp.iinfo(jnp.int32)
    wider = x.dtype in (np.int64, np.uint32, np.uint64)
    if wider and x.size and not isinstance(x, Tracer):
        with jax.ensure_compile_time_eval():
            least, most = int(x.min()), int(x.max())
        if least < held.min or most > held.max:
            raise ValueError(f"model: {name} must fit int32, but go from {least} to {most}")
    return jnp.asarray(x, jnp.int32)


def _text_lengths(positions, segment_ids, cache, counts) -> Int[Array, " B #T"]:
    """The length of the text that each token belongs to."""
    if cache is not None:
        return jnp.maximum(cache.rope_lengths, cache.lengths + counts)[:, None]
    if segment_ids is None:
        return jnp.max(positions, axis=-1, keepdims=True) + 1
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return jnp.max(jnp.where(same, positions[:, None, :], 0), axis=-1) + 1
