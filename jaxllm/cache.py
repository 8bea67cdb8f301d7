"""`KVCache`: the keys and values of the tokens so far; a pytree that pure functions write.

Every kind of entry has `append(k, v, lengths, counts)`: it takes the keys and values of T new
tokens a row, of which the first counts[b] are real, and returns the entry that holds them and the
key side of the `ops.attention` call that lets these T tokens see what they may. For a kernel that
writes one token a row itself, `slots` says where, and `holding` returns what `append` would.
Nothing outside this file knows the kind, nor whether it holds numbers or codes of 8 bits with a
scale a token and head.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Shaped

from jaxllm.config import ModelConfig

# What codes are stored in, by the name that `generate` has for it, and the largest of them.
KV_DTYPES = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}
_LARGEST = {KV_DTYPES["int8"]: 127.0, KV_DTYPES["fp8"]: 448.0}
_LINE = 64  # keys: the decode kernel reads scales by as many


class Entry(Protocol):
    """One layer's part of the cache."""

    @property
    def k(self) -> Array:
        """Keys, or codes of them."""
        ...

    @property
    def v(self) -> Array:
        """Values, likewise."""
        ...

    @property
    def k_scale(self) -> Array | None:
        """The scales of codes."""
        ...

    def slots(self, lengths: Int[Array, " B"], counts: Int[Array, " B"]) -> Int[Array, " B"]:
        """Where one token a row goes; S where there is none."""
        ...

    def seen(self, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        """How many keys one token a row sees, its own among them."""
        ...

    def holding(
        self, held: dict[str, Array], lengths: Int[Array, " B"]
    ) -> tuple[Entry, dict[str, Any]]:
        """What `append` returns once one token a row is in its slot of the arrays."""
        ...

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
    """Every token of a row, in order. k, v: [B, S, K, H]; of codes also their scales [B, S, K]."""

    k: Array
    v: Array
    k_scale: Float[Array, "B S K"] | None = None
    v_scale: Float[Array, "B S K"] | None = None

    def append(self, k, v, lengths, counts):
        """Writes at lengths[b]; tokens past counts[b] are not written, so they need no room."""
        slots = lengths[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
        held = _write(_arrays(self), _stored(k, v, self.k.dtype), slots, counts)
        return self.holding(held, lengths, k.shape[1])

    def slots(self, lengths, counts):
        """Where one token a row goes."""
        return jnp.where(counts > 0, lengths, self.k.shape[1])

    def holding(self, held, lengths, chunk=1):
        """What `append` returns once T = `chunk` tokens a row are in the arrays."""
        # Aligned to the end: query t sits at key lengths + t, padded on the right or not.
        return FullKV(**held), {**held, "kv_lengths": self.seen(lengths, chunk)}

    def seen(self, lengths, chunk=1):
        """How many keys the last of T = `chunk` tokens sees, its own among them."""
        return lengths + chunk


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingKV:
    """The last `window` tokens of a row, in slots position % window; else `FullKV`."""

    k: Array
    v: Array
    k_scale: Float[Array, "B S K"] | None = None
    v_scale: Float[Array, "B S K"] | None = None
    window: int = dataclasses.field(kw_only=True, metadata={"static": True})

    def append(self, k, v, lengths, counts):
        """A chunk sees the window in order of time, then itself; a token sees the ring as it is."""
        size, chunk, window = self.k.shape[1], k.shape[1], self.window
        mine, new = _arrays(self), _stored(k, v, self.k.dtype)
        if chunk == 1:
            held = _write(mine, new, (lengths % window)[:, None], counts)
            return self.holding(held, lengths)

        ends = (lengths + counts)[:, None]
        slot = jnp.arange(size, dtype=jnp.int32)[None, :]
        newest = ends - 1 - (ends - 1 - slot) % window  # the last position that lies in this slot
        fresh = newest >= lengths[:, None]
        source = jnp.where(fresh, size + newest - lengths[:, None], slot)

        held = jnp.minimum(lengths, window)[:, None]
        at = jnp.arange(window + chunk, dtype=jnp.int32)[None, :]
        in_time = jnp.where(at < held, (lengths[:, None] - held + at) % window, size + at - held)

        both = {name: jnp.concatenate([mine[name], new[name]], axis=1) for name in mine}
        entry = RingKV(**{name: _rows(x, source) for name, x in both.items()}, window=window)
        seen = {name: _rows(x, in_time) for name, x in both.items()}
        return entry, {**seen, "kv_lengths": held[:, 0] + chunk}

    def slots(self, lengths, counts):
        """Where one token a row goes."""
        return jnp.where(counts > 0, lengths % self.window, self.k.shape[1])

    def holding(self, held, lengths):
        """What `append` returns once one token a row is in the arrays."""
        return RingKV(**held, window=self.window), {**held, "kv_lengths": self.seen(lengths)}

    def seen(self, lengths):
        """How many keys one token a row sees, its own among them."""
        return jnp.minimum(lengths + 1, self.window)


def _stored_dtype(dtype: Any) -> Any:
    """The dtype, if keys and values can be stored in it."""
    try:
        stored = jnp.dtype(dtype)
        wide = jnp.issubdtype(stored, jnp.floating) and stored.itemsize > 1
        if dtype is not None and (wide or stored in _LARGEST):  # None would be float64
            return stored
    except TypeError:  # what is no dtype at all
        pass
    raise ValueError(
        f"cache: dtype must be a float of 16 bits or more, int8 or float8_e4m3fn, got {dtype!r:.60}"
    )


def _shapes(f: Callable[..., Any], *arguments: Any) -> Any:
    """`jax.eval_shape`, without the mesh that is around the call."""
    shapes = jax.eval_shape(f, *arguments)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)


def _arrays(entry: FullKV | RingKV) -> dict[str, Array]:
    """What an entry holds, by the names that `ops.attention` has for it."""
    found = {"k": entry.k, "v": entry.v, "k_scale": entry.k_scale, "v_scale": entry.v_scale}
    return {name: array for name, array in found.items() if array is not None}


def _stored(k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], dtype: Any) -> dict[str, Array]:
    """New keys and values as a cache of this dtype holds them."""
    if dtype not in _LARGEST:
        return {"k": k.astype(dtype), "v": v.astype(dtype)}
    (k, k_scale), (v, v_scale) = quantize(k, dtype), quantize(v, dtype)
    return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}


def quantize(x: Float[Array, "B T K H"], dtype: Any) -> tuple[Array, Float[Array, "B T K"]]:
    """Codes of `dtype`, one of `KV_DTYPES`, and the float32 scale of each token and head.

    A code times its scale is no further from its number than half a scale (int8), or than 1/16 of
    the number (fp8; 2^-10 of a scale below 2^-6 of one): the scale is 1/127 (1/448) of the largest
    magnitude, 1 where all are zero.
    """
    largest = _LARGEST[jnp.dtype(dtype)]
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / jnp.float32(largest)
    # A subnormal one would be 0 on hardware that has none. (NaN stays, and makes NaN of the head.)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, jnp.float32(1), scale)
    codes = x / scale[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        codes = jnp.round(codes)
    return jnp.clip(codes, -largest, largest).astype(dtype), scale


def _rows(x: Shaped[Array, "B S *K"], index: Int[Array, "B J"]) -> Shaped[Array, "B J *K"]:
    """Row b of x at index[b]; an index past the end, which no query sees, reads the last one."""
    index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="clip")


def _write(
    buffers: Mapping[str, Array],
    values: Mapping[str, Array],
    slots: Int[Array, "B T"],
    counts: Int[Array, " B"],
) -> dict[str, Array]:
    """Each buffer with the values of the first counts[b] tokens at their slots, and no others."""
    size, chunk = buffers["k"].shape[1], slots.shape[1]
    t = jnp.arange(chunk, dtype=jnp.int32)[None, :]
    slots = jnp.where(t < counts[:, None], slots, size + t)
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    where = (rows, slots)
    if slots.size == 1:
        # XLA makes one kernel of many updates, and two of one: a head is an update of its own.
        # H200, decoding with Qwen2.5-0.5B's shape: 948 us a token, 970 with the token as one.
        heads = jnp.arange(buffers["k"].shape[2], dtype=jnp.int32)[None, None, :]
        where = (rows[:, :, None], slots[:, :, None], heads)
    return {
        name: buffer.at[where].set(
            values[name].astype(buffer.dtype), mode="drop", unique_indices=True
        )
        for name, buffer in buffers.items()
    }


class LayerCache(NamedTuple):
    """What a layer is handed: its entry, the tokens each row holds, how many new ones are real."""

    entry: Entry
    lengths: Int[Array, " B"]
    counts: Int[Array, " B"]

    def append(self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]):
        """The entry with the tokens added, and the key side of the attention call."""
        entry, keys = self.entry.append(k, v, self.lengths, self.counts)
        return entry, self._with_padding(keys, k.shape[1])

    def place(self, dtype: Any) -> tuple[Array, Array, Int[Array, " B"]] | None:
        """Keys, values and the slot of each row's one new token, for what writes there itself, in
        the numbers that it has; None if they are held otherwise.
        """
        if self.entry.k.dtype != dtype or self.entry.k_scale is not None:
            return None
        return self.entry.k, self.entry.v, self.entry.slots(self.lengths, self.counts)

    def written(self, k: Float[Array, "B S K H"], v: Float[Array, "B S K H"]):
        """As `append`, where k and v are those of `place` with the tokens in them."""
        entry, keys = self.entry.holding({"k": k, "v": v}, self.lengths)
        return entry, self._with_padding(keys, 1)

    def _with_padding(self, keys: dict[str, Any], chunk: int) -> dict[str, Any]:
        """The keys, so that padding past the end of the cache may be among T = `chunk` tokens also
        where `ops.attention` knows the lengths, of which it refuses those beyond the keys.
        """
        size, shown = keys["k"].shape[1], keys["kv_lengths"]
        traced = isinstance(shown, Tracer) or isinstance(self.counts, Tracer)
        if traced or not jnp.any(shown > size):
            return keys
        if jnp.any(self.lengths + self.counts > size):
            return keys  # real tokens too are past the end: to be refused
        if chunk == 1:
            return {**keys, "kv_lengths": jnp.minimum(shown, size)}
        more = int(jnp.max(shown)) - size  # keys, that only padding sees
        wider = {
            name: jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))
            for name, x in keys.items()
            if name != "kv_lengths"
        }
        return {**wider, "kv_lengths": shown}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """An entry for each layer, and two int32 [B]; `lengths` is how many tokens each row holds.

    Smaller `lengths` take a row back only where no layer keeps a ring (`create`): what a ring has
    written over is gone, and the numbers after it would be wrong.
    A longrope model chooses its list of frequencies by a row's length; where a row is prefilled in
    chunks, or will be longer than it is, `rope_lengths` says the length that the choice is to be
    made for (0: the length so far; negative: `jaxllm.prefill` or `jaxllm.decode_step` has seen that
    the row's keys are turned by the other list).
    """

    layers: tuple[Entry, ...]
    lengths: Int[Array, " B"]
    rope_lengths: Int[Array, " B"]

    @classmethod
    def create(cls, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
        """An empty cache for `capacity` tokens a row; layers with a shorter window keep rings.

        dtype: what keys and values are stored in; int8 and float8_e4m3fn are codes with a float32
            scale for each token and head (`quantize`), in buffers of a multiple of 64 tokens.

        Only the device knows how full a row is, so nothing stops a caller who appends more: the
        tokens beyond `capacity` are lost, and the logits after them are wrong (`jaxllm.prefill` and
        `jaxllm.decode_step` make them NaN).
        Raises: ValueError if batch or capacity is no positive integer, or for another dtype than
        those codes and floats of 16 bits or more.
        """
        for name, value in (("batch", batch), ("capacity", capacity)):
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"cache: {name} must be a positive integer, got {value!r}")
        if not isinstance(config, ModelConfig):
            raise ValueError(f"cache: config must be a ModelConfig, got a {type(config).__name__}")
        stored = _stored_dtype(dtype)
        coded = stored in _LARGEST

        def entry(layer: int) -> Entry:
            window = config.window(layer)
            size = capacity if window is None else min(window, capacity)
            if coded:
                size = -(-size // _LINE) * _LINE
            shape = (batch, size, config.num_key_value_heads, config.head_dim)
            arrays = {name: jnp.zeros(shape, stored) for name in ("k", "v")}
            if coded:
                arrays |= {f"{name}_scale": jnp.ones(shape[:3], jnp.float32) for name in arrays}
            if window is not None and window < capacity:
                return RingKV(**arrays, window=window)
            return FullKV(**arrays)

        empty = jnp.zeros((batch,), jnp.int32)  # copied, for one buffer cannot be donated twice
        return cls(tuple(entry(i) for i in range(config.num_hidden_layers)), empty, jnp.copy(empty))

    @classmethod
    @functools.lru_cache(maxsize=64, typed=True)
    def shapes(cls, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
        """What `create` makes, as shapes."""
        return _shapes(lambda: cls.create(config, batch, capacity, dtype))

    @classmethod
    @functools.lru_cache(maxsize=64, typed=True)
    def calls(
        cls,
        config: ModelConfig,
        batch: int,
        capacity: int,
        queries: int,
        dtype: Any,
        kv_dtype: Any = None,
    ) -> Mapping[str, tuple[Any, Mapping[str, Any]]]:
        """For each kind of layer, q and the keywords of its attention call over such a cache: of
        `queries` new tokens in `dtype`, which is also the cache's if `kv_dtype` is None; as shapes.
        """
        cache = cls.shapes(config, batch, capacity, dtype if kv_dtype is None else kv_dtype)
        shape = (batch, queries, config.num_attention_heads, config.head_dim)
        q = jax.ShapeDtypeStruct(shape, dtype)
        new = jax.ShapeDtypeStruct((*shape[:2], config.num_key_value_heads, shape[3]), dtype)
        found = {}
        for kind in sorted(set(config.layer_types)):
            i = config.layer_types.index(kind)
            # The cache itself says which keys the layer sees: its ring, or all
            keys = _shapes(
                lambda cache, k, v, i=i: cache.layer(i, cache.lengths).append(k, v)[1],
                cache,
                new,
                new,
            )
            window, softcap = config.window(i), config.attn_logit_softcapping
            found[kind] = q, {**keys, "window": window, "softcap": softcap}
        return found

    def check(self, config: ModelConfig, batch: int) -> None:
        """Raises: ValueError if it is not one of such a model and of so many rows."""
        rows, layers = self.lengths.shape[0], len(self.layers)
        if rows != batch:
            raise ValueError(f"cache: it has {rows} rows, but there are tokens of {batch}")
        if layers != config.num_hidden_layers:
            raise ValueError(
                f"cache: it has {layers} layers, but the model {config.num_hidden_layers}"
            )
        wanted = (config.num_key_value_heads, config.head_dim)
        for i, entry in enumerate(self.layers):
            if not isinstance(entry, FullKV | RingKV):  # of an attention of one's own
                continue
            if (heads := entry.k.shape[2:]) != wanted:
                raise ValueError(
                    f"cache: layer {i} has {heads[0]} heads of {heads[1]}, but the model "
                    f"{wanted[0]} of {wanted[1]}"
                )
            ring, window = getattr(entry, "window", None), config.window(i)
            if ring not in (None, window):
                raise ValueError(
                    f"cache: layer {i} keeps the last {ring} tokens, but the model's sees "
                    f"{'all' if window is None else f'the last {window}'}"
                )

    def layer(self, index: int, counts: Int[Array, " B"]) -> LayerCache:
        """What layer `index` is handed."""
        return LayerCache(self.layers[index], self.lengths, counts)
