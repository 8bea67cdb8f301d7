"""Scores of the next token in, token out; and the log-probabilities of tokens.

For a row of scores l, in this order (Hugging Face's `generate`, and the penalties of OpenAI):

    repetition    ids of prompt and output, once an id:  l*r if l < 0 else l/r
    presence,     ids of the output, count = times generated:
    frequency     l - presence*(count > 0) - frequency*count
    temperature   l / t;  t = 0 is the arg-max of what the penalties left, and no filter runs
    top-k         keep l >= the k-th largest
    top-p         keep l if the mass strictly above l is below p
    min-p         keep l if its probability is at least min_p times the largest
    draw          arg-max of l + Gumbel noise, key = fold_in(key(seed), position)

Each filter sees the softmax of what the one before it left. Equal scores stay or go together: at
its border top-p keeps a whole group of equals, of which a sort keeps an arbitrary part.
NaN counts as -inf: it is never chosen while its row has a number, and the row's `log_probs` are
NaN, which shows the fault. +inf beats every number. A row with nothing above -inf gives id 0.

The vocabulary is never sorted. Scores are mapped to integers in the same order and the threshold is
found bit by bit: by XLA in 32 passes, each a compare and a sum. Milliseconds, best of 180, on
two shared CPU cores (EPYC, AVX-512), jax 0.10.2, float32:

    B, V         one sort   top-k   top-p   all filters and draw   draw alone   arg-max
    1, 151936        30.6     1.3     1.6                    3.6          0.9       0.1
    8, 32000         45.5     2.2     2.6                    5.9          1.5       0.2

With 2 bits a pass the search costs 1.5 times as much, with 4 bits 3 to 7 times; unrolled it is no
faster and compiles 6 times as long.

The two forms of the arg-max are chosen by platform here, not by `ops`: they give the same token and
log-probabilities that differ by rounding, so nobody has a reason to name one.

One long file, for settings, rules, search and noise answer one question: which token is next.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.integers import integer
from jaxllm.ops._select import name_for
from jaxllm.ops.sampling_threshold import sampling_threshold
from pallas_kernels.options import check_arrays, check_given

Values = jax.Array | np.ndarray
Setting = int | float | Sequence[int | float] | np.ndarray | jax.Array

_TINY = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)

# name -> dtype, what is allowed: as a test, as a phrase
_RULES: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "temperature": (np.float32, lambda x: 0 <= x <= _LARGEST, "0 (arg-max) or a positive number"),
    "top_k": (np.int32, lambda x: x >= 0, "an integer, 0 (off) or more"),
    "top_p": (np.float32, lambda x: 0 < x <= 1, "in (0, 1], where 1 is off"),
    "min_p": (np.float32, lambda x: 0 <= x <= 1, "in [0, 1], where 0 is off"),
    "repetition_penalty": (np.float32, lambda x: _TINY <= x <= _LARGEST, "positive, 1 is off"),
    "presence_penalty": (np.float32, lambda x: abs(x) <= _LARGEST, "a finite number, 0 is off"),
    "frequency_penalty": (np.float32, lambda x: abs(x) <= _LARGEST, "a finite number, 0 is off"),
    "seed": (np.uint32, lambda x: 0 <= x < 2**32, "an integer from 0 to 2**32 - 1"),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """How each row is sampled: one array a setting, one value a row.

    A pytree of traced values: other settings compile nothing. `Sampling.of` checks what it is
    given and returns NumPy arrays, which reach the device when a jitted function takes them.
    """

    temperature: Float[Values, " B"]
    top_k: Int[Values, " B"]
    top_p: Float[Values, " B"]
    min_p: Float[Values, " B"]
    repetition_penalty: Float[Values, " B"]
    presence_penalty: Float[Values, " B"]
    frequency_penalty: Float[Values, " B"]
    seed: UInt32[Values, " B"]

    @classmethod
    def of(
        cls,
        batch: int,
        *,
        temperature: Setting = 0.0,
        top_k: Setting = 0,
        top_p: Setting = 1.0,
        min_p: Setting = 0.0,
        repetition_penalty: Setting = 1.0,
        presence_penalty: Setting = 0.0,
        frequency_penalty: Setting = 0.0,
        seed: Setting = 0,
    ) -> "Sampling":
        """Check the settings, on the host; each is one number for all rows, or one a row.

        One seed for all rows is that seed in each, so a row's tokens do not depend on its place in
        the batch: two rows with one prompt and one seed say the same. With `seed=range(batch)`
        they differ. A temperature below the smallest normal float32 (1.2e-38) counts as 0.
        Raises: ValueError, with the setting, the value and what is allowed.
        """
        if isinstance(batch, bool) or not isinstance(batch, numbers.Integral) or batch < 1:
            raise ValueError(f"sampling: batch must be an integer of at least 1, got {batch!r}")
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
        }
        return cls(**{name: _rows(name, value, int(batch)) for name, value in given.items()})

    @property
    def has_penalties(self) -> bool:
        """Whether a row needs prompt_mask and counts. For the host: reads the values."""
        neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
        return any(np.any(np.asarray(getattr(self, name)) != off) for name, off in neutral.items())

    @property
    def is_greedy(self) -> bool:
        """Whether `greedy` is enough: temperature 0 in every row, no penalty. For the host."""
        return bool(np.all(np.asarray(self.temperature) < _TINY)) and not self.has_penalties


def sample(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    position: Int[Array, " B"],
    prompt_mask: Bool[Array, "B V"] | None = None,
    counts: Int[Array, "B V"] | None = None,
    *,
    vocab_size: int | None = None,
    implementation: str | Mapping[str, str] = "auto",
) -> Int[Array, " B"]:
    """One token a row by all the rules above; traceable, so it can stand in a `while_loop`.

    position is the place that the new token takes in its row, padding not counted: it makes each
    step's noise its own. prompt_mask (see `token_mask`) and counts (see `add_counts`) go together;
    without them no penalty is compiled, so leave them out unless `sampling.has_penalties`.
    Ids from vocab_size on are never chosen. Equal scores, settings and position give the same id in
    any batch. The random bits are threefry's, whatever JAX's default generator is, on a lattice of
    2**-31: fine enough that even 150,000 equal scores hardly ever tie.
    Dtypes: logits of any float, read as float32; so do all that take scores or logits here.
    Raises: ValueError if shapes or dtypes disagree; as `ops.sampling_threshold`.
    """
    _check("sample", logits, sampling)
    _check_rows("sample", logits, position=position)
    if (prompt_mask is None) != (counts is None):
        raise ValueError("sample: prompt_mask and counts go together, only one of them was given")
    scores = _clean(logits, vocab_size)
    if prompt_mask is not None and counts is not None:
        scores = penalise(scores, prompt_mask, counts, sampling)
    scores = filter_scores(scores, sampling, implementation=implementation)
    noise = _noise(sampling.seed, position, scores.shape[1])
    sampled = sampling.temperature >= _TINY
    return _arg_max(jnp.where(sampled[:, None], scores + noise, scores))


def greedy(logits: Float[Array, "B V"], *, vocab_size: int | None = None) -> Int[Array, " B"]:
    """The id below vocab_size with the largest score, of equal ones the lowest id.

    What `sample` gives at temperature 0 without penalties.
    Raises: ValueError if the logits are no floating-point [B, V], or vocab_size is no integer from
    1 to V.
    """
    _check_scores("greedy", logits)
    return _arg_max(_clean(logits, vocab_size))


def penalise(
    scores: Float[Array, "B V"],
    prompt_mask: Bool[Array, "B V"],
    counts: Int[Array, "B V"],
    sampling: Sampling,
) -> Float[Array, "B V"]:
    """Repetition penalty over prompt and output, then presence and frequency over the output.

    counts[b, v] is how often row b has generated id v. Neutral values change no bit.
    Raises: ValueError if shapes disagree, for what is no array, and if `sampling` is no `Sampling`.
    """
    _check("penalise", scores, sampling)
    check_given("penalise", prompt_mask=prompt_mask, counts=counts)
    for name, array in (("prompt_mask", prompt_mask), ("counts", counts)):
        if array.shape != scores.shape:
            raise ValueError(
                f"penalise: {name} must have the shape of the scores, {list(scores.shape)},"
                f" got {list(array.shape)}"
            )
    scores = scores.astype(jnp.float32)
    generated = counts > 0
    repetition = sampling.repetition_penalty[:, None]
    presence = sampling.presence_penalty[:, None]
    frequency = sampling.frequency_penalty[:, None]
    repeated = jnp.where(scores < 0, scores * repetition, scores / repetition)
    scores = jnp.where(prompt_mask | generated, repeated, scores)
    return scores - (jnp.where(generated, presence, 0) + frequency * counts.astype(jnp.float32))


def filter_scores(
    scores: Float[Array, "B V"],
    sampling: Sampling,
    *,
    implementation: str | Mapping[str, str] = "auto",
) -> Float[Array, "B V"]:
    """Scores over the temperature, -inf where top-k, top-p or min-p drop them.

    Rows with temperature 0 come back unfiltered. A search that no row needs is skipped at run time.
    `implementation` is that of `ops.sampling_threshold`, and it raises as that, and as `penalise`.
    The kept sets are exact for top-k and min-p. For top-p, masses are summed as integers in units
    of at most 2**-30 of the row's total, so the set does not depend on the batch or the order of
    summation; against float64 the border is off by at most 2e-7 of the mass (up to 262,144 tokens).
    """
    _check("filter_scores", scores, sampling)
    name = name_for("sampling_threshold", implementation)
    return _filter(_clean(scores, None), sampling, name)


def token_mask(
    tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None, size: int
) -> Bool[Array, "B {size}"]:
    """Which ids below size occur in each row; tokens that are not valid (padding) do not count.

    Raises: ValueError if tokens, or valid, are no arrays, tokens no integers, valid no booleans, or
    size no integer of at least 0.
    """
    check_given("token_mask", tokens=tokens)
    check_arrays("token_mask", valid=valid)
    if valid is not None and valid.dtype != bool:
        raise ValueError(f"token_mask: valid must be booleans, got {valid.dtype}")
    size = integer("size", size, 0, who="token_mask")
    rows = lax.broadcasted_iota(jnp.int32, tokens.shape, 0)
    ids = _as_ids("token_mask", tokens)
    counted = ids >= 0 if valid is None else valid & (ids >= 0)
    ids = jnp.where(counted, ids, size)
    return jnp.zeros((tokens.shape[0], size), bool).at[rows, ids].set(True, mode="drop")


def add_counts(
    counts: Int[Array, "B V"], tokens: Int[Array, " B"], live: Bool[Array, " B"] | None = None
) -> Int[Array, "B V"]:
    """Counts after each row's new token; rows that are not live (finished) stay as they are, and
    a token that is no id counts nowhere.

    Raises: ValueError for what is no array, and for tokens that are no integers.
    """
    check_given("add_counts", counts=counts, tokens=tokens)
    check_arrays("add_counts", live=live)
    counts = jnp.asarray(counts)
    one = jnp.ones(tokens.shape, counts.dtype) if live is None else live.astype(counts.dtype)
    rows = jnp.arange(tokens.shape[0])
    return counts.at[rows, _as_ids("add_counts", tokens)].add(
        one, mode="drop", wrap_negative_indices=False
    )


def log_probs(logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> Float[Array, " B"]:
    """Log-softmax of the raw logits, in float32, at each row's token; NaN if it is no id.

    Raises: ValueError if the logits are no floating-point [B, V], or tokens no integers [B].
    """
    _check_scores("log_probs", logits)
    _check_rows("log_probs", logits, tokens=tokens)
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(
        logits,
        _as_ids("log_probs", tokens)[:, None],
        axis=1,
        mode="fill",
        wrap_negative_indices=False,
    )
    return chosen[:, 0] - jax.nn.logsumexp(logits, axis=-1)


def greedy_and_log_probs(
    logits: Float[Array, "B V"], *, vocab_size: int | None = None
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """`greedy`, and the `log_probs` of what it takes; on all but a CPU in one pass.

    Raises: ValueError as those do.
    """
    _check_scores("greedy_and_log_probs", logits)

    def in_turn(logits):
        tokens = greedy(logits, vocab_size=vocab_size)
        return tokens, log_probs(logits, tokens)

    # On an H200 two launches, and not seven: some microseconds of a token
    in_one_pass = functools.partial(_greedy_in_one_pass, vocab_size=vocab_size)
    tokens, chosen = lax.platform_dependent(logits, cpu=in_turn, default=in_one_pass)
    return tokens, chosen


def top_log_probs(
    logits: Float[Array, "B V"], k: int
) -> tuple[Int[Array, "B {k}"], Float[Array, "B {k}"]]:
    """Ids of the k largest raw logits, largest first, and the log-softmax there.

    Raises: ValueError if k is no integer from 1 to V.
    """
    _check_scores("top_log_probs", logits)
    V = logits.shape[-1]
    k = integer("k", k, 1, V, who="top_log_probs")
    logits = logits.astype(jnp.float32)
    values, ids = lax.top_k(logits, k)
    return ids, values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def _rows(name: str, value: Any, batch: int) -> np.ndarray:
    dtype, allowed, phrase = _RULES[name]
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise ValueError(f"sampling: {name} must be {phrase}, got a key, {value.dtype}")
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = value.tolist()
    one_a_row = isinstance(value, Sequence) and not isinstance(value, str)
    values: list[Any] = list(value) if one_a_row else [value] * batch
    if len(values) != batch:
        raise ValueError(
            f"sampling: {name} has {len(values)} values for a batch of {batch};"
            " give one number, or one a row"
        )
    kind = numbers.Real if dtype is np.float32 else numbers.Integral
    for row, x in enumerate(values):
        if isinstance(x, bool | np.bool_) or not isinstance(x, kind) or not allowed(x):
            where = f" for row {row}" if one_a_row else ""
            raise ValueError(f"sampling: {name} must be {phrase}, got {x!r}{where}")
    if name == "top_k":  # larger than any vocabulary is legal, and off
        values = [min(x, 2**31 - 1) for x in values]
    return np.asarray(values, dtype)


def _as_ids(name: str, tokens: Any) -> jax.Array:
    """int32, in which a number of more bits is no id either: JAX would cut NumPy's.

    Raises: ValueError, in that name, for what are no integers.
    """
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"{name}: tokens must be integers, got {tokens.dtype}")
    if jnp.iinfo(tokens.dtype).max > (most := jnp.iinfo(jnp.int32).max):
        tokens = tokens.clip(-1 if jnp.issubdtype(tokens.dtype, jnp.signedinteger) else 0, most)
    return jnp.asarray(tokens, jnp.int32)


def _check_scores(name: str, scores: jax.Array) -> None:
    check_given(name, scores=scores)
    if scores.ndim != 2 or not scores.shape[-1] or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(
            f"{name}: scores must be floating-point [B, V], V at least 1, got "
            f"{scores.dtype}{list(scores.shape)}"
        )


def _check_rows(name: str, scores: jax.Array, **vectors: Any) -> None:
    check_given(name, **vectors)
    for what, vector in vectors.items():
        if vector.shape != scores.shape[:1] or not jnp.issubdtype(vector.dtype, jnp.integer):
            raise ValueError(
                f"{name}: {what} must be integers, one a row, [{scores.shape[0]}], got "
                f"{vector.dtype}{list(vector.shape)}"
            )


def _check(name: str, scores: jax.Array, sampling: Sampling) -> None:
    _check_scores(name, scores)
    if not isinstance(sampling, Sampling):
        raise ValueError(
            f"{name}: sampling must be a Sampling, as Sampling.of makes it, got {sampling!r:.60}"
        )
    if sampling.temperature.shape != scores.shape[:1]:
        raise ValueError(
            f"{name}: {scores.shape[0]} rows of scores, but settings of shape"
            f" {list(sampling.temperature.shape)}; make them with Sampling.of({scores.shape[0]})"
        )


def _clean(scores: jax.Array, vocab_size: int | None) -> jax.Array:
    """float32, with -inf for NaN and from vocab_size on."""
    V = scores.shape[-1]
    scores = scores.astype(jnp.float32)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    if vocab_size is None:
        return scores
    vocab_size = integer("vocab_size", vocab_size, 1, V, who="sampling")
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.where(ids < vocab_size, scores, -jnp.inf)


@jax.jit
def _arg_max(scores: jax.Array) -> jax.Array:
    def in_turn(scores):
        # lax.argmax is not vectorised on a CPU: at [1, 151936] 0.67 ms against 0.10, and 3.9
        # against 0.9 with the noise fused into it. There is no NaN here: some score is the largest
        largest = jnp.max(scores, axis=-1, keepdims=True)
        ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        return jnp.min(jnp.where(scores == largest, ids, scores.shape[1]), axis=-1)

    return lax.platform_dependent(scores, cpu=in_turn, default=_arg_max_in_one_pass)


def _arg_max_in_one_pass(scores: jax.Array) -> jax.Array:
    return lax.argmax(scores, 1, jnp.int32)


def _greedy_in_one_pass(
    logits: jax.Array, *, vocab_size: int | None
) -> tuple[jax.Array, jax.Array]:
    """Each row's token, and its log-probability among all ids.

    Of some ids there are: the largest score that may be taken, its id, the largest logit, and the
    sum of exp(logit - that one), as in the online softmax.
    Source: Milakov and Gimelshein 2018, arXiv:1805.02867.
    """

    def joined(a, b):
        (score, id_, most, total), (other, other_id, other_most, other_total) = a, b
        is_a = (score > other) | ((score == other) & (id_ < other_id))
        largest = jnp.maximum(most, other_most)  # NaN if one is

        def part(most, total):  # of two -inf there is no difference
            return jnp.where(most == largest, total, total * jnp.exp(most - largest))

        token = jnp.where(is_a, score, other), jnp.where(is_a, id_, other_id)
        return *token, largest, part(most, total) + part(other_most, other_total)

    logits = logits.astype(jnp.float32)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    columns = _clean(logits, vocab_size), ids, logits, jnp.ones_like(logits)
    nothing = -np.float32(np.inf), np.int32(logits.shape[1]), -np.float32(np.inf), np.float32(0)
    score, token, most, total = lax.reduce(columns, nothing, joined, (1,))
    return token, score - (most + jnp.log(total))


def _ordered(scores: jax.Array) -> jax.Array:
    """Integers in the order of the floats, equal where the floats are (0.0 and -0.0 too)."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(scores == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))


# Outside a jitted function, cond and fori_loop would compile at every call
@functools.partial(jax.jit, static_argnames="implementation")
def _filter(scores: jax.Array, sampling: Sampling, implementation: str) -> jax.Array:
    sampled = sampling.temperature >= _TINY

    divisor = jnp.where(sampled, sampling.temperature, 1)[:, None]
    largest = jnp.max(scores, axis=-1, keepdims=True)
    # A tiny temperature would send several scores to +inf, all alike: move the largest to 0 first.
    overflows = jnp.isfinite(largest) & ~jnp.isfinite(largest / divisor)
    scaled = (scores - jnp.where(overflows, largest, 0)) / divisor
    largest = jnp.max(scaled, axis=-1, keepdims=True)
    # Probability over the row's largest; the comparison keeps inf - inf out.
    ratio = jnp.where(scaled == largest, 1, jnp.exp(scaled - largest))
    keys = _ordered(scaled)
    lowest = sampling_threshold(
        keys,
        ratio,
        jnp.where(sampled, sampling.top_k, 0),
        jnp.where(sampled, sampling.top_p, 1),
        implementation=implementation,
    )
    keep = (keys >= lowest[:, None]) & (ratio >= sampling.min_p[:, None])
    return jnp.where(sampled[:, None], jnp.where(keep, scaled, -jnp.inf), scores)


@functools.partial(jax.jit, static_argnames="size")
def _noise(seed: Values, position: jax.Array, size: int) -> jax.Array:
    """Gumbel noise [B, size], each row from its own key."""

    def bits(seed, position):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.bits(key, (size,), jnp.uint32)

    return _gumbel(jax.vmap(bits)(seed, position))


def _gumbel(bits: jax.Array) -> jax.Array:
    """-log(E), E exponential, of 32 random bits: between -2.9 and 22.2.

    Large noise comes from u near 0, where float32 is fine. u near 1 stays below 1: infinite noise
    could cost a row the only score that it has left.
    """
    u = (bits >> 1).astype(jnp.float32) * 2.0**-31 + 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24)))
