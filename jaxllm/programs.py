"""The compiled pieces below `generate`, for people who write their own loop.

`prefill` reads tokens into a cache and gives the logits of each row's last one; `decode_step` does
one token more; `decode` does up to N a dispatch on the device, sampling and stop ids included. All
take `Weights`, a model as a flat tuple of arrays: `flatten` once, then call as often as you like.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm import sampling
from jaxllm.cache import KVCache
from jaxllm.config import GenerationDefaults, ModelConfig
from jaxllm.model import Transformer
from jaxllm.sampling import Sampling

RUNNING, STOP, LENGTH = 0, 1, 2  # why a row has ended, as the device says it


class _Structure:
    """What a model is apart from its arrays. Hashed once: every call of a program looks it up."""

    def __init__(self, tree: Any):
        self.tree, self._hash = tree, hash(tree)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Structure) and self.tree == other.tree)


@functools.lru_cache(maxsize=16)
def _interned(structure: _Structure) -> _Structure:
    """One object for equal structures, so that a call compares pointers, not trees."""
    return structure


@jax.tree_util.register_pytree_node_class
class Weights:
    """A model as a flat tuple of arrays: 0.06 ms a call of a compiled program, against 1.4 ms for
    the module.
    """

    def __init__(self, arrays: tuple[jax.Array, ...], structure: _Structure):
        self.arrays, self.structure = arrays, structure

    def tree_flatten(self):
        """For JAX."""
        return self.arrays, self.structure

    @classmethod
    def tree_unflatten(cls, structure, arrays):
        """For JAX."""
        return cls(tuple(arrays), structure)

    def model(self) -> Transformer:
        """The module again."""
        return jax.tree.unflatten(self.structure.tree, self.arrays)


def flatten(model: Transformer) -> Weights:
    """The arrays of a model, for `prefill`, `decode_step` and `decode`: once, not at every call."""
    if not isinstance(model, Transformer):
        raise ValueError(f"flatten: model must be a Transformer, not {type(model).__name__}")
    # No program reads `generation`: models that differ in nothing else share their programs. Of a
    # copy, for another thread may be reading the model's own.
    model = copy.copy(model)
    model.generation = GenerationDefaults()
    arrays, tree = jax.tree.flatten(model)  # `nnx.split` takes ten times as long
    # What somebody read back as NumPy arrays goes to the device once, not at every call
    arrays = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays]
    return Weights(tuple(arrays), _interned(_Structure(tree)))


def _forward(weights: Weights, tokens, counts, cache: KVCache):
    """Logits [B, V] at each row's last real token, NaN where the cache has no room for it or its
    keys are turned by longrope's other list; and the cache with the real tokens.
    """
    model = weights.model()
    t = tokens.shape[1]
    real = jnp.arange(t, dtype=jnp.int32)[None, :] < counts[:, None]
    hidden, after = model.hidden(tokens, segment_ids=real.astype(jnp.int32), cache=cache)
    assert after is not None
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    if t != 1:
        hidden = jnp.take_along_axis(hidden, last, axis=1, mode="clip")
    hidden = hidden[:, 0]
    # Here it is a part of the norm's kernel, of the logits it would be one of its own
    lost = _lost(cache, counts)
    if (turned := _turned(model.config, cache, counts)) is not None:
        lost |= turned
        rope_lengths = jnp.maximum(after.rope_lengths, 0)
        after = dataclasses.replace(after, rope_lengths=jnp.where(turned, -1, rope_lengths))
    hidden = jnp.where(lost[:, None], jnp.nan, hidden)
    return model.head(hidden), after


def _lost(cache: KVCache, counts) -> Bool[Array, " B"]:
    """Whether the last of counts[b] more tokens has no slot in the cache."""
    last = cache.lengths + counts - 1
    full = [entry.slots(last, counts) >= entry.k.shape[1] for entry in cache.layers]
    return functools.reduce(jnp.logical_or, full) & (counts > 0)


def _turned(config: ModelConfig, cache: KVCache, counts) -> Bool[Array, " B"] | None:
    """Whether counts[b] more tokens take a row over longrope's boundary, or some did before, for
    which `rope_lengths` is then negative; None of a model without longrope.
    """
    ropes = [rope for rope in config.ropes.values() if rope.rope_type == "longrope"]
    if not ropes:
        return None
    now = cache.lengths
    before, after = (jnp.maximum(cache.rope_lengths, n) for n in (now, now + counts))
    crossed = [
        (before <= border) & (after > border)
        for border in {rope.original_max_position_embeddings or 0 for rope in ropes}
    ]
    held = (now > 0) & functools.reduce(jnp.logical_or, crossed)
    return held | ((now > 0) & (cache.rope_lengths < 0))


def _check(who: str, weights: Weights, cache: KVCache, **arrays: tuple[Any, str]) -> None:
    """Raises: ValueError for what is no such object, no integers of the shape that their letters
    say, or no token.
    """
    for given, kind, maker in (
        (weights, Weights, "jaxllm.flatten(model)"),
        (cache, KVCache, "KVCache.create"),
    ):
        if not isinstance(given, kind):
            raise ValueError(f"{who}: it takes what {maker} returns, got {type(given).__name__}")
    rows = cache.lengths.shape[0]
    for name, (array, letters) in arrays.items():
        if not isinstance(array, jax.Array | np.ndarray):
            raise ValueError(f"{who}: {name} must be an array, got {type(array).__name__}")
        fits = array.ndim == len(letters.split()) and array.shape[0] == rows and array.size
        if not fits or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"{who}: {name} must be integers [{letters}] of the cache's {rows} rows, one or "
                f"more in each, got {array.dtype}{list(array.shape)}"
            )


@functools.partial(jax.jit, donate_argnames=("cache", "logits"))
def prefill(
    weights: Weights,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    cache: KVCache,
    logits: Float[Array, "B V"] | None = None,
) -> tuple[Float[Array, "B V"], KVCache]:
    """Append counts[b] tokens of each row (the rest of the T is padding) to the cache.

    Returns the float32 logits of each row's last token, and the cache. Long prompts go in by
    chunks: rows that have no tokens in a chunk keep their `logits` of the chunk before. The cache
    and `logits` are donated. Ids outside the vocabulary are clamped to it, counts to 0 and T.

    How full a row is only the device knows, for which each call would have to wait. So a row
    without room for its tokens has logits of NaN, and so has one of a longrope model whose keys are
    turned by the short list when it grows beyond that: read it again into a new cache, or say
    before its first token how long it will be (`KVCache.rope_lengths`).
    Raises: ValueError if shapes or dtypes disagree, or the cache is one of another model.
    """
    _check("prefill", weights, cache, tokens=(tokens, "B, T"), counts=(counts, "B"))
    new, cache = _forward(weights, tokens, jnp.clip(counts, 0, tokens.shape[1]), cache)
    if logits is not None and (shape := jnp.shape(logits)) != new.shape:
        raise ValueError(
            f"prefill: logits must be {list(new.shape)}, as it returns them, got {list(shape)}"
        )
    return new if logits is None else jnp.where((counts > 0)[:, None], new, logits), cache


# `prefill` as `generate` calls it (options are for the outermost jit alone): a call has a cache of
# its own, and XLA makes a CUDA graph anew for arrays that have moved. H100, ms until 64 tokens are
# read, with graphs and without: Qwen2.5-0.5B 6.5 and 5.1, Llama-3.1-8B 14.4 and 11.0, in int4 10.7
# and 7.7; where nothing has moved, Qwen2.5-0.5B 3.8 and 6.2, and the others the same.
prefill_without_graphs = jax.jit(
    prefill.__wrapped__,  # pyright: ignore[reportAttributeAccessIssue]
    donate_argnames=("cache", "logits"),
    compiler_options={"xla_gpu_enable_command_buffer": ""},
)


@functools.partial(jax.jit, donate_argnames=("cache",))
def decode_step(
    weights: Weights, tokens: Int[Array, " B"], cache: KVCache
) -> tuple[Float[Array, "B V"], KVCache]:
    """One token a row: float32 logits, NaN as those of `prefill`, and the cache (donated).

    Raises: ValueError as `prefill`.
    """
    _check("decode_step", weights, cache, tokens=(tokens, "B"))
    return _forward(weights, tokens[:, None], jnp.ones_like(cache.lengths), cache)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """What `decode` carries.

    logits: float32, of the next token; left: tokens that each row may still get; ended: RUNNING,
    STOP or LENGTH; prompt_mask and counts: what penalties look at (`sampling.token_mask` makes the
    first, the other begins with zeros), None where there are none.
    """

    cache: KVCache
    logits: Float[Array, "B V"]
    left: Int[Array, " B"]
    ended: Int[Array, " B"]
    prompt_mask: Bool[Array, "B V"] | None = None
    counts: Int[Array, "B V"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """The tokens of one dispatch, -1 behind a row's end. [B, N], and [B, N, k] for the k likeliest
    alternatives.
    """

    tokens: Int[Array, "B N"]
    logprobs: Float[Array, "B N"]
    top_ids: Int[Array, "B N k"]
    top_logprobs: Float[Array, "B N k"]
    ended: Int[Array, " B"]


# XLA makes a CUDA graph of the loop's body; so it makes one of the whole loop, and asks the host
# for nothing between two tokens. H200, one row, Qwen2.5-0.5B, us a token: with XLA's products 824,
# without it 862; with `gemv` 613 and 616; Llama-3.1-8B as fast either way.
LOOP_AS_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}


@functools.partial(
    jax.jit,
    static_argnames=("size", "greedy", "top", "vocab_size"),
    donate_argnames=("state",),
    compiler_options=LOOP_AS_GRAPH,
)
def decode(
    weights: Weights,
    state: DecodeState,
    settings: Sampling,
    stop_ids: Int[Array, " M"],
    steps: Int[Array, ""],
    halted: Bool[Array, " B"],
    *,
    size: int,
    greedy: bool = False,
    top: int = 0,
    vocab_size: int | None = None,
) -> tuple[DecodeState, Decoded]:
    """Up to `steps` (at most `size`) tokens a row, on the device: sample, test for the end, run the
    model.

    Rows end at a stop id or when none are left to give; `halted` rows were ended by the host (a
    stop string). `greedy` compiles the arg-max and its log-probability alone and ignores
    `settings`; `top` is how many alternatives get log-probabilities; ids from `vocab_size` on are
    not sampled. The state is donated. It is a program of its own: within `jax.jit` or
    `jax.shard_map` call `decode_step`.
    """
    batch = state.logits.shape[0]
    # A token and the bits of its log-probability, which are written in one launch
    both = jnp.broadcast_to(jnp.asarray([-1, 0], jnp.int32), (batch, size, 2))
    tops = jnp.zeros((batch, size, top), jnp.int32), jnp.zeros((batch, size, top), jnp.float32)
    steps = jnp.minimum(steps, size)
    ended = jnp.where(halted & (state.ended == RUNNING), jnp.int32(STOP), state.ended)
    state = dataclasses.replace(state, ended=ended)

    implementation = weights.model().runtime.implementation

    def more(carry):
        i, state, *_ = carry
        return (i < steps) & jnp.any(state.ended == RUNNING)

    def step(carry):
        i, state, both, tops = carry
        live = state.ended == RUNNING
        with jax.named_scope("sample"):
            if greedy:
                tokens, logprobs = sampling.greedy_and_log_probs(
                    state.logits, vocab_size=vocab_size
                )
            else:
                tokens = sampling.sample(
                    state.logits,
                    settings,
                    state.cache.lengths,
                    state.prompt_mask,
                    state.counts,
                    vocab_size=vocab_size,
                    implementation=implementation,
                )
                logprobs = sampling.log_probs(state.logits, tokens)
            bits = jax.lax.bitcast_convert_type(logprobs, jnp.int32)
            both = _put(both, i, jnp.stack([jnp.where(live, tokens, -1), bits], axis=-1))
            if top:
                found = sampling.top_log_probs(state.logits, top)
                tops = tuple(_put(column, i, new) for column, new in zip(tops, found, strict=True))
            left = state.left - live.astype(jnp.int32)
            stopped = _is_one_of(tokens, stop_ids)
            reason = jnp.where(stopped, STOP, jnp.where(left <= 0, LENGTH, RUNNING))
            ended = jnp.where(live, reason.astype(jnp.int32), state.ended)
            counts = state.counts
            if counts is not None:
                counts = sampling.add_counts(counts, tokens, live)
        # This also runs behind the last token of all rows, once a call: to leave it out takes a
        # conditional, for which a GPU asks the host, at every token.
        running = (ended == RUNNING).astype(jnp.int32)
        logits, cache = _forward(weights, tokens[:, None], running, state.cache)
        state = DecodeState(cache, logits, left, ended, state.prompt_mask, counts)
        return i + 1, state, both, tops

    _, state, both, tops = jax.lax.while_loop(more, step, (jnp.int32(0), state, both, tops))
    logprobs = jax.lax.bitcast_convert_type(both[..., 1], jnp.float32)
    return state, Decoded(both[..., 0], logprobs, tops[0], tops[1], state.ended)


def _put(column: jax.Array, i: jax.Array, values: jax.Array) -> jax.Array:
    """[B, N, ..] with the values at i, which is one of N: a check would be a launch a token."""
    return jax.lax.dynamic_update_index_in_dim(column, values, i, axis=1)


MOST_COMPARED = 8  # stop ids, one after the other


def _is_one_of(tokens: Int[Array, " B"], ids: Int[Array, " M"]) -> Bool[Array, " B"]:
    if len(ids) > MOST_COMPARED:
        return jnp.any(tokens[:, None] == ids[None, :], axis=-1)
    found = jnp.zeros(tokens.shape, bool)
    for id_ in ids:  # a reduction would be a launch a token
        found |= tokens == id_
    return found


@functools.lru_cache(maxsize=16)
def _empty_program(sharding: jax.sharding.Sharding):
    def empty(config, capacity, dtype, lengths, left, ended, constants):
        cache = KVCache.create(config, lengths.shape[0], capacity, dtype)
        cache = dataclasses.replace(cache, rope_lengths=lengths)
        logits = jnp.zeros((lengths.shape[0], config.vocab_size), jnp.float32)
        return DecodeState(cache, logits, left, ended), constants

    return jax.jit(empty, static_argnums=(0, 1, 2), out_shardings=sharding)


def empty_state(
    config: ModelConfig,
    capacity: int,
    dtype: str,
    *,
    lengths: Int[np.ndarray, " B"],
    left: Int[np.ndarray, " B"],
    ended: Int[np.ndarray, " B"],
    constants: Any,
    sharding: jax.sharding.Sharding,
) -> tuple[DecodeState, Any]:
    """What `prefill` and `decode` begin with, and the constants, made by one program where they are
    to lie: arrays put there one by one cost more than filling the cache does.

    lengths: how long rows are that are read next (`KVCache.rope_lengths`).
    """
    program = _empty_program(sharding)
    with jax.transfer_guard_host_to_device("allow"):  # those of the arguments are meant
        return program(config, capacity, dtype, lengths, left, ended, constants)


_PROGRAMS = (prefill, prefill_without_graphs, decode_step, decode)


def compile_count() -> int:
    """For how many kinds of arguments `prefill` (one's own, and `generate`'s), `decode_step` and
    `decode` hold a program.

    A call after which it is the same compiled nothing; arrays of NumPy and of JAX are two kinds,
    which share a program.
    """
    return sum(
        program._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
        for program in _PROGRAMS
    )
