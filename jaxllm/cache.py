"""`KVCache`: the keys and values of the tokens so far; a pytree that pure functions write.

Every kind of entry has one method, `append(k, v, lengths, counts)`: it takes the keys and values of
T new tokens a row, of which the first counts[b] are real, and returns the entry that holds them and
the key side of the `ops.attention` call that lets these T tokens see what they may. Nothing outside
this file knows the kind.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.config import ModelConfig


class Entry(Protocol):
    """One layer's part of the cache."""

    def append(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        counts: Int[Array, " B"],
    ) -> tuple[Entry, dict[str, Any]]:
        """The entry with the tokens added, and the key side of the attention call."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FullKV:
    """Every token of a row, in order. k, v: [B, S, K, H]."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]

    def append(self, k, v, lengths, counts):
        """Writes at lengths[b]; tokens past counts[b] are not written, so they need no room."""
        slots = lengths[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
        entry = FullKV(*_write((self.k, self.v), (k, v), slots, counts))
        # Aligned to the end: query t sits at key lengths + t, padded on the right or not.
        return entry, {"k": entry.k, "v": entry.v, "kv_lengths": lengths + k.shape[1]}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingKV:
    """The last S tokens of a row, S its window, in slots position % S. k, v: [B, S, K, H]."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]

    def append(self, k, v, lengths, counts):
        """A chunk sees the window in order of time, then itself; a token sees the ring as it is."""
        window, chunk = self.k.shape[1], k.shape[1]
        if chunk == 1:
            entry = RingKV(*_write((self.k, self.v), (k, v), (lengths % window)[:, None], counts))
            seen = jnp.minimum(lengths + 1, window)
            return entry, {"k": entry.k, "v": entry.v, "kv_lengths": seen}

        ends = (lengths + counts)[:, None]
        slot = jnp.arange(window, dtype=jnp.int32)[None, :]
        newest = ends - 1 - (ends - 1 - slot) % window  # the last position that lies in this slot
        fresh = newest >= lengths[:, None]
        source = jnp.where(fresh, window + newest - lengths[:, None], slot)

        held = jnp.minimum(lengths, window)[:, None]
        at = jnp.arange(window + chunk, dtype=jnp.int32)[None, :]
        in_time = jnp.where(at < held, (lengths[:, None] - held + at) % window, window + at - held)

        both = [jnp.concatenate(pair, axis=1) for pair in ((self.k, k), (self.v, v))]
        entry = RingKV(*(_rows(x, source) for x in both))
        k_seen, v_seen = (_rows(x, in_time) for x in both)
        return entry, {"k": k_seen, "v": v_seen, "kv_lengths": held[:, 0] + chunk}


def _rows(x: Float[Array, "B S K H"], index: Int[Array, "B J"]) -> Float[Array, "B J K H"]:
    """Row b of x at index[b]; an index past the end, which no query sees, reads the last one."""
    return jnp.take_along_axis(x, index[:, :, None, None], axis=1, mode="clip")


def _write(buffers, values, slots: Int[Array, "B T"], counts: Int[Array, " B"]):
    """Each buffer with the values of the first counts[b] tokens at their slots, and no others."""
    size, chunk = buffers[0].shape[1], slots.shape[1]
    t = jnp.arange(chunk, dtype=jnp.int32)[None, :]
    slots = jnp.where(t < counts[:, None], slots, size + t)
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    where = (rows, slots)
    if slots.size == 1:
        # XLA makes one kernel of many updates, and two of one: a head is an update of its own.
        # H200, decoding with Qwen2.5-0.5B's shape: 948 us a token, 970 with the token as one.
        heads = jnp.arange(buffers[0].shape[2], dtype=jnp.int32)[None, None, :]
        where = (rows[:, :, None], slots[:, :, None], heads)
    return [
        buffer.at[where].set(value.astype(buffer.dtype), mode="drop", unique_indices=True)
        for buffer, value in zip(buffers, values, strict=True)
    ]


class LayerCache(NamedTuple):
    """What a layer is handed: its entry, the tokens each row holds, how many new ones are real."""

    entry: Entry
    lengths: Int[Array, " B"]
    counts: Int[Array, " B"]

    def append(self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]):
        """The entry with the tokens added, and the key side of the attention call."""
        return self.entry.append(k, v, self.lengths, self.counts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """An entry for each layer, and two int32 [B]; `lengths` is how many tokens each row holds.

    A longrope model chooses its list of frequencies by a row's length; where a row is prefilled in
    chunks, or will be longer than it is, `rope_lengths` says the length that the choice is to be
    made for (0: the length so far).
    """

    layers: tuple[Entry, ...]
    lengths: Int[Array, " B"]
    rope_lengths: Int[Array, " B"]

    @classmethod
    def create(cls, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
        """An empty cache for `capacity` tokens a row; layers with a shorter window keep rings.

        Only the device knows how full a row is, so nothing stops a caller who appends more: the
        tokens beyond `capacity` are lost, and the logits after them are wrong.
        """

        def entry(layer: int) -> Entry:
            window = config.window(layer)
            ring = window is not None and window < capacity
            size = window if ring else capacity
            shape = (batch, size, config.num_key_value_heads, config.head_dim)
            return (RingKV if ring else FullKV)(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

        empty = jnp.zeros((batch,), jnp.int32)  # copied, for one buffer cannot be donated twice
        return cls(tuple(entry(i) for i in range(config.num_hidden_layers)), empty, jnp.copy(empty))

    @classmethod
    def calls(
        cls, config: ModelConfig, batch: int, capacity: int, queries: int, dtype: Any
    ) -> dict[str, tuple[Any, dict[str, Any]]]:
        """For each kind of layer, q and the keywords of its attention call over such a cache: of
        `queries` new tokens, all as shapes.
        """
        cache = jax.eval_shape(lambda: cls.create(config, batch, capacity, dtype))
        shape = (batch, queries, config.num_attention_heads, config.head_dim)
        q = jax.ShapeDtypeStruct(shape, dtype)
        new = jax.ShapeDtypeStruct((*shape[:2], config.num_key_value_heads, shape[3]), dtype)
        found = {}
        for kind in sorted(set(config.layer_types)):
            i = config.layer_types.index(kind)
            # The cache itself says which keys the layer sees: its ring, or all
            keys = jax.eval_shape(
                lambda cache, k, v, i=i: cache.layer(i, cache.lengths).append(k, v)[1],
                cache,
                new,
                new,
            )
            window, softcap = config.window(i), config.attn_logit_softcapping
            found[kind] = q, {**keys, "window": window, "softcap": softcap}
        return found

    def layer(self, index: int, counts: Int[Array, " B"]) -> LayerCache:
        """What layer `index` is handed."""
        return LayerCache(self.layers[index], self.lengths, counts)
