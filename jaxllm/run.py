"""One call of `generate`: rows on the host, state on the device, and the loop between them.

Batches, caches and prompt chunks are padded to a few sizes (`bucket`), so that few programs are
ever compiled. One long file, for what a call checks, sizes and runs is one idea.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from rich.filesize import decimal

from jaxllm import memory, ops
from jaxllm.cache import KV_DTYPES, KVCache
from jaxllm.integers import integer, is_list
from jaxllm.meshes import mesh_problem
from jaxllm.model import Transformer
from jaxllm.programs import (
    RUNNING,
    STOP,
    Decoded,
    DecodeState,
    Weights,
    decode,
    empty_state,
    flatten,
    prefill_without_graphs,
)
from jaxllm.prompts import encode_prompts
from jaxllm.results import GenerationResult, Row, Timings
from jaxllm.sampling import Sampling
from jaxllm.tokenizer import Tokenizer, check_tokenizer

SMALLEST_CHUNK, SMALLEST_CACHE, STOP_IDS_BUCKET = 16, 128, 8
SMALLEST_DISPATCH = 64  # one program for the 64 tokens of `generate` and the 16 of `stream`


def bucket(size: int, smallest: int = 1) -> int:
    """The padded size: the next power of two up to 2048, the next multiple of 2048 beyond."""
    if size > 2048:
        return -(-size // 2048) * 2048
    return max(smallest, 1 << (size - 1).bit_length())


class Run:
    """Checks a call, says what it needs, and runs it: `dispatches`, then `result`."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        prompts: Any,
        *,
        max_new_tokens: int | Sequence[int],
        settings: Mapping[str, Any],
        stop_ids: Sequence[int] | None,
        stop: str | Sequence[str],
        top_logprobs: int,
        steps_per_dispatch: int,
        prefill_chunk: int,
        kv_dtype: str | None,
    ):
        if not isinstance(model, Transformer):
            raise ValueError(f"generate: model must be a Transformer, not {type(model).__name__}")
        # In a compiled function a constant is traced, in one that has a gradient the model is
        weights = None if isinstance(jax.device_put(np.zeros(())), Tracer) else flatten(model)
        if weights is None or any(isinstance(x, Tracer) for x in weights.arrays):
            raise ValueError(
                "generate: it runs on the host and cannot be a part of a function that JAX "
                "transforms; jaxllm.prefill and jaxllm.decode_step can"
            )
        check_tokenizer("generate", tokenizer, optional=True)
        config = self.config = model.config
        limit = config.max_position_embeddings
        self.steps = min(integer("steps_per_dispatch", steps_per_dispatch, 1), limit)
        self.chunk = min(integer("prefill_chunk", prefill_chunk, 1), limit)
        self.top_logprobs = integer("top_logprobs", top_logprobs, 0, config.vocab_size)
        if kv_dtype is not None and not (isinstance(kv_dtype, str) and kv_dtype in KV_DTYPES):
            raise ValueError(
                f"generate: kv_dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}, None"
            )
        stop = _stop_strings(stop, tokenizer)
        encoded = encode_prompts(prompts, tokenizer, config.vocab_size)
        self.rows = []
        budgets = per_row("max_new_tokens", max_new_tokens, len(encoded))
        for i, (prompt, budget) in enumerate(zip(encoded, budgets, strict=True)):
            room = limit - len(prompt.ids)
            if room < 1:
                raise ValueError(
                    f"generate: prompt {i} has {len(prompt.ids)} tokens, but the model has {limit} "
                    "positions, of which a new token needs one; shorten the prompt"
                )
            self.rows.append(Row(prompt, min(budget, room), budget > room, stop))

        known = [field.name for field in dataclasses.fields(Sampling)]
        if unknown := sorted(settings.keys() - set(known)):
            raise TypeError(
                f"generate: there is no option {unknown[0]!r}; of sampling there are "
                f"{', '.join(known)}"
            )
        self.batch = bucket(len(self.rows))
        # Checked before the padding, so that errors speak of the caller's rows.
        checked = Sampling.of(len(self.rows), **settings)
        pad = self.batch - len(self.rows)
        self.settings = jax.tree.map(lambda x: np.concatenate([x, x[:1].repeat(pad)]), checked)
        self.greedy, self.penalties = checked.is_greedy, checked.has_penalties
        vocab_size = config.vocab_size if tokenizer is None else tokenizer.vocab_size
        self.vocab_size = vocab_size if vocab_size < config.vocab_size else None
        # Not checked: Phi3Config of transformers says 32000 with any vocabulary
        wanted = list(model.generation.stop_ids)
        if stop_ids is not None:
            wanted = _ids("stop_ids", stop_ids, config.vocab_size)
        if tokenizer is not None:  # which have no text to be found in
            wanted += tokenizer.special_ids(stop)
        slots = -(-max(len(wanted), 1) // STOP_IDS_BUCKET) * STOP_IDS_BUCKET
        self.stop_ids = np.full(slots, -1, np.int32)
        self.stop_ids[: len(wanted)] = wanted

        self.weights = weights
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in weights.arrays):
            raise ValueError(
                "generate: the model has shapes in the place of weights, as nnx.eval_shape makes it"
            )
        self.dtype, self.implementation = model.runtime.compute_dtype, model.runtime.implementation
        self.kv_dtype = self.dtype if kv_dtype is None else KV_DTYPES[kv_dtype].name
        self.sharding = _sharding(self.weights)
        capacity = max(len(row.prompt) + row.budget for row in self.rows)
        self.capacity = min(bucket(capacity, SMALLEST_CACHE), max(limit, SMALLEST_CACHE))
        ropes = [r for r in config.ropes.values() if r.rope_type == "longrope"]
        # A row that grows beyond this many tokens turns by longrope's other list; None: no row can.
        crossing = min((r.original_max_position_embeddings or 0 for r in ropes), default=capacity)
        self.crossing = crossing if crossing < capacity else None
        # Whether a dispatch begins before the tokens of the last one are taken. Not where these say
        # what it does (a stop string, longrope's boundary), nor where to begin it takes as long as
        # to make its tokens, as a GPU's loop then asks the host about each.
        asks_host = self._loop_asks_host()
        self.ahead = not (asks_host or stop or any(map(self._to_crossing, self.rows)))
        self.state: DecodeState | None = None
        self.constants: tuple[Sampling, jax.Array] | None = (
            None  # on the device: settings, stop ids
        )
        self.prefill_s = self.decode_s = 0.0
        self.prefill_tokens = self.dispatch_count = 0
        self._check_memory()

    def _loop_asks_host(self) -> bool:
        """On several devices, or if it samples by XLA, which skips a search by a conditional."""
        if self.sharding.num_devices > 1:
            return True
        if self.greedy:
            return False
        filtered = [
            jax.ShapeDtypeStruct(shape, dtype)
            for shape in ((self.batch, self.config.vocab_size), (self.batch,))
            for dtype in (jnp.int32, jnp.float32)
        ]
        how = self.implementation
        return ops.chosen("sampling_threshold", *filtered, implementation=how) == "xla"

    def _check_memory(self) -> None:
        wanted = self.size_bytes()
        free = memory.free_bytes(next(iter(self.sharding.device_set)))
        if free is not None and wanted > free:
            raise MemoryError(
                f"generate: {len(self.rows)} prompts with {self.capacity} tokens of cache each "
                f"need {decimal(wanted)}, but {decimal(free)} are free; use fewer "
                "or shorter prompts, or fewer new tokens"
            )

    def size_bytes(self) -> int:
        """What a device needs beside the model: the state, and the largest temporaries at once.

        Those are one layer's MLP in a prefill, its scores where attention has them in memory, its
        keys and values where the cache has codes of them, and the weights once more where they are
        not computed with as they are stored (a CPU computes in float32 whatever is asked): of
        packed ones, the largest.
        """
        config, batch = self.config, self.batch
        cache = KVCache.shapes(config, batch, self.capacity, self.kv_dtype)
        kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        chunk = max(size for _, size in self.chunks(max(len(row.prompt) for row in self.rows)))
        cpu = next(iter(self.sharding.device_set)).platform == "cpu"
        dtype = jnp.dtype(jnp.float32 if cpu else self.dtype)
        calls = KVCache.calls(
            config, batch, self.capacity, chunk, jnp.dtype(self.dtype), self.kv_dtype
        )
        held = [
            keywords["k"].shape[1]
            for q, keywords in calls.values()
            if self._attention(q, keywords) in ops.HOLDS_SCORES
        ]
        scores = 2 * 4 * batch * config.num_attention_heads * chunk * max(held, default=0)
        numbers = [
            sum(keywords[name].size for name in ("k", "v"))
            for _, keywords in calls.values()
            if "k_scale" in keywords
        ]
        numbers = dtype.itemsize * max(numbers, default=0)
        mlp = 3 * dtype.itemsize * batch * chunk * config.intermediate_size
        vocabulary = batch * config.vocab_size * (4 * 3 + (5 if self.penalties else 0))
        narrow = [x for x in self.weights.arrays if x.dtype.itemsize == 1]
        wide = (x for x in self.weights.arrays if x.dtype.itemsize > 1 and x.dtype != dtype)
        cast = sum(_numbers_a_device(x) * dtype.itemsize for x in wide)
        # Two numbers a byte in the dtype, or four in int8
        unpacked = max(
            (_numbers_a_device(x) * (1 + (x.dtype == jnp.uint8)) for x in narrow), default=0
        )
        return kept + scores + numbers + mlp + vocabulary + cast + unpacked * dtype.itemsize

    def _attention(self, q: Any, keywords: Mapping[str, Any]) -> str:
        return ops.chosen("attention", q, **keywords, implementation=self.implementation)

    def chunks(self, length: int) -> list[tuple[int, int]]:
        """Where the chunks of a text of this many tokens begin, and their padded sizes."""
        return [
            (at, min(bucket(length - at, SMALLEST_CHUNK), self.chunk))
            for at in range(0, length, self.chunk)
        ]

    def _put(self, x: Any) -> Any:
        return jax.device_put(x, self.sharding)

    def _start(self, histories: Sequence[Sequence[int]]) -> None:
        """An empty state on the device; what counts tokens for penalties is kept if it is there."""
        old, self.state = self.state, None  # the old cache is freed before the new one is made
        mask, counts = (None, None) if old is None else (old.prompt_mask, old.counts)
        del old
        if self.penalties and mask is None:
            seen = np.zeros((self.batch, self.config.vocab_size), bool)
            for row, history in zip(seen, histories, strict=False):
                row[history] = True
            mask, counts = self._put(seen), self._put(np.zeros(seen.shape, np.int32))
        pad = self.batch - len(self.rows)
        left = [row.budget - len(row.tokens) for row in self.rows] + [0] * pad
        ended = [RUNNING if row.reason is None else STOP for row in self.rows] + [STOP] * pad
        lengths = [len(history) for history in histories] + [1] * pad
        state, self.constants = empty_state(
            self.config,
            self.capacity,
            self.kv_dtype,
            lengths=np.array(lengths, np.int32),
            left=np.array(left, np.int32),
            ended=np.array(ended, np.int32),
            constants=(self.settings, self.stop_ids),
            sharding=self.sharding,
        )
        self.state = dataclasses.replace(state, prompt_mask=mask, counts=counts)

    def _append(self, tokens: np.ndarray, counts: np.ndarray) -> None:
        """One chunk of every row."""
        assert self.state is not None
        state, (tokens, counts) = self.state, self._put((tokens, counts))
        logits, cache = prefill_without_graphs(
            self.weights, tokens, counts, state.cache, state.logits
        )
        self.state = dataclasses.replace(state, logits=logits, cache=cache)

    def compile(self) -> None:
        """Run each program that the call needs, or one with shorter rows, on nothing."""
        longest = max(len(row.prompt) for row in self.rows)
        end = max(len(row.prompt) + row.budget for row in self.rows)
        lengths = {longest}
        if self.crossing is not None:
            # Where a row crosses, all are read again: one that is alone with one token over the
            # boundary; of several the longest may have any length, and sizes repeat every chunk.
            first = max(longest, self.crossing + 1)
            last = min(end, first + self.chunk) if len(self.rows) > 1 else first
            lengths.update(range(first, last + 1))
        chunks = [[size for _, size in self.chunks(length)] for length in lengths]
        if self.sharding.num_devices == 1:
            orders, times = {tuple(sorted(set().union(*chunks)))}, 1
        else:
            # XLA spreads the cache in a way of its own, and a program is compiled for what the one
            # before it has left: they run in the order of the call, each behind itself too. Chunks
            # between the second and the last are like the second.
            orders, times = {(*sizes[:2], *sizes[2:][-1:]) for sizes in chunks}, 2
        for sizes in sorted(orders):
            self._start([[0]] * len(self.rows))
            for size in sizes:
                self._append(np.zeros((self.batch, size), np.int32), np.zeros(self.batch, np.int32))
            for _ in range(times):
                jax.block_until_ready(self._begin(0))
        self.state = self.constants = None

    def read_rows(self) -> None:
        """Every row's tokens so far into a new cache, chunk by chunk."""
        start = time.perf_counter()
        histories = [row.prompt + row.tokens for row in self.rows]
        self._start(histories)
        self.prefill_tokens += sum(len(history) for history in histories)
        histories += [[0]] * (self.batch - len(histories))
        lengths = np.array([len(history) for history in histories], np.int32)
        for at, size in self.chunks(int(lengths.max())):
            tokens = np.zeros((self.batch, size), np.int32)
            counts = np.clip(lengths - at, 0, size).astype(np.int32)
            for row, history, count in zip(tokens, histories, counts, strict=True):
                row[:count] = history[at : at + count]
            self._append(tokens, counts)
        assert self.state is not None
        jax.block_until_ready(self.state.logits)
        self.prefill_s += time.perf_counter() - start

    def _begin(self, steps: int) -> Decoded:
        """Up to `steps` tokens for every row that runs, which the device makes from now on."""
        assert self.state is not None
        assert self.constants is not None
        halted = np.ones(self.batch, bool)  # the rows that only fill up the batch have ended too
        halted[: len(self.rows)] = [row.reason is not None for row in self.rows]
        settings, stop_ids = self.constants
        self.state, out = decode(
            self.weights,
            self.state,
            settings,
            stop_ids,
            *self._put((np.int32(steps), halted)),
            size=bucket(self.steps, SMALLEST_DISPATCH),
            greedy=self.greedy,
            top=self.top_logprobs,
            vocab_size=self.vocab_size,
        )
        return out

    def _take(self, out: Decoded) -> None:
        """The tokens of a dispatch, as soon as they are there."""
        out = jax.device_get(out)
        self.dispatch_count += 1
        for i, row in enumerate(self.rows):
            made = int(np.sum(out.tokens[i] >= 0))
            for j in range(made):
                if row.reason is not None:
                    break  # a stop string ended the row within this dispatch
                top = zip(out.top_ids[i, j].tolist(), out.top_logprobs[i, j].tolist(), strict=True)
                last = j == made - 1 and int(out.ended[i]) != RUNNING
                logprob = float(out.logprobs[i, j])
                if math.isnan(logprob):
                    raise ValueError(
                        f"generate: the logits of row {i} for position "
                        f"{len(row.prompt) + len(row.tokens)} are not finite; look at the weights, "
                        "or take a wider dtype"
                    )
                row.push(int(out.tokens[i, j]), logprob, list(top), last)
            row.finish(int(out.ended[i]))

    def dispatches(self) -> Iterator[None]:
        """Read the prompts, then decode until every row has ended; yields after each dispatch.

        With `ahead` the next one is under way by then: the device does not wait for the host.
        """
        following, since = None, 0.0
        try:
            self.read_rows()
            while running := [row for row in self.rows if row.reason is None]:
                # The token that takes a row over longrope's boundary turns all its keys: a
                # dispatch ends with it, and the cache is made again with the other list.
                to_cross = [row for row in running if self._to_crossing(row)]
                steps = min([self.steps, *map(self._to_crossing, to_cross)])
                if following is None:
                    since = time.perf_counter()
                    following = self._begin(steps)
                out, following = following, None
                if self.ahead and any(row.budget - len(row.tokens) > steps for row in running):
                    following = self._begin(self.steps)
                self._take(out)
                now = time.perf_counter()
                self.decode_s += now - since
                since = now
                yield
                if any(row.reason is None and not self._to_crossing(row) for row in to_cross):
                    self.read_rows()
        finally:
            # The caller may stop early: then, too, the cache is free for others behind this.
            self.state = self.constants = None
            jax.block_until_ready(following)

    def _to_crossing(self, row: Row) -> int:
        """How many tokens more take the row over longrope's boundary; 0 if none does."""
        held = len(row.prompt) + len(row.tokens)
        return 0 if self.crossing is None else max(0, self.crossing + 1 - held)

    def result(self) -> GenerationResult:
        """What there is so far; the whole once `dispatches` has ended."""
        rows = self.rows
        return GenerationResult(
            texts=None if rows[0].decoder is None else [row.text for row in rows],
            tokens=[list(row.tokens) for row in rows],
            logprobs=[list(row.logprobs) for row in rows],
            top_logprobs=[list(row.top) for row in rows] if self.top_logprobs else None,
            finish_reasons=[row.reason or "running" for row in rows],
            timings=Timings(
                prefill_s=self.prefill_s,
                decode_s=self.decode_s,
                prefill_tokens=self.prefill_tokens,
                decode_tokens=sum(len(row.tokens) for row in rows),
                dispatches=self.dispatch_count,
            ),
        )


def _sharding(weights: Weights) -> jax.sharding.Sharding:
    """Where all the rest goes: to the device of the weights that were put on one, or to every
    device of their mesh, or of that of `jax.set_mesh`, where weights that were put nowhere go too.
    """
    around = jax.sharding.get_mesh()
    first = next((x for x in weights.arrays if x.committed), weights.arrays[0])
    if problem := mesh_problem(first.sharding):
        raise ValueError(f"generate: weights are spread as {first.sharding}: {problem}")
    if isinstance(first.sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(first.sharding.mesh, jax.sharding.PartitionSpec())
    if not first.committed and not around.empty:
        return jax.sharding.NamedSharding(around, jax.sharding.PartitionSpec())
    return jax.sharding.SingleDeviceSharding(next(iter(first.devices())))


def _numbers_a_device(x: jax.Array) -> int:
    """How many of an array's numbers the device has that has most of them."""
    return math.prod(x.sharding.shard_shape(x.shape))


def per_row(name: str, value: Any, rows: int, *, who: str = "generate") -> list[int]:
    """One positive integer a row, of one for all or one a row. Raises: ValueError by `who`."""
    if isinstance(value, np.ndarray | jax.Array):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [integer(name, value, 1, who=who)] * rows
    if len(value) != rows:
        raise ValueError(f"{who}: {name} has {len(value)} entries for {rows} prompts")
    return [integer(name, x, 1, who=who) for x in value]


def _ids(name: str, value: Any, vocab_size: int) -> list[int]:
    if not is_list(value):
        raise ValueError(f"generate: {name} must be a list of token ids or None, got {value!r}")
    return [integer(name, x, 0, vocab_size - 1) for x in value]


def _stop_strings(stop: Any, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    stop = () if stop is None else stop
    several: tuple[Any, ...] = tuple(stop) if is_list(stop) else (stop,)
    if several and tokenizer is None:
        raise ValueError("generate: stop strings need a tokenizer")
    if not all(isinstance(s, str) and s for s in several):
        raise ValueError(
            f"generate: stop strings must be texts of at least one character, got {stop!r}"
        )
    return several
