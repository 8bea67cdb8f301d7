"""The sampler against transformers' processors, a float64 oracle, and statistics.

What is compared is which scores are kept. Ours keeps or drops equal scores together; transformers'
top-p sorts, so at its border it keeps some of a group of equals: `assert_same_kept` allows that and
nothing else, and on rows without equal scores it asks for the same set.
"""

import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import sampling
from jaxllm.sampling import Sampling

pytestmark = pytest.mark.usefixtures("strict_jax")

V = 61
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

# Two float32 roundings (the setting's own and the quotient's) and torch's two.
ROUNDING = 4 * 2**-24

# The whole grid is one batch: settings are values, one a row.
GRID: list[dict[str, Any]] = [
    dict(zip(NEUTRAL, values, strict=True))
    for values in itertools.product(
        (0.3, 1.0, 1.7),
        (0, 1, 5, V - 1, V, 10 * V),
        (1e-9, 0.1, 0.5, 0.9, 0.999, 1.0),
        (0.0, 0.02, 0.3, 1.0),
    )
]


def some_rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    wide = rng.normal(size=V) * 3
    holes = np.where(rng.random(V) < 0.4, -np.inf, rng.normal(size=V))
    one = np.full(V, -np.inf)
    one[17] = -2.5
    rows = {
        "wide": wide,
        "narrow": rng.normal(size=V) * 0.1,
        "negative": wide - 100,
        "peaked": np.where(np.arange(V) == 40, 12.0, rng.normal(size=V)),
        "holes": holes,
        "one left": one,
        "all equal": np.full(V, 1.5),
        "all zero, both signs": np.where(np.arange(V) % 2, 0.0, -0.0),
        "few values": rng.integers(-3, 4, V) * 0.7,
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


ROWS = some_rows()


def of(rows: list[dict], **more) -> Sampling:
    names = rows[0]
    return Sampling.of(len(rows), **{name: [row[name] for row in rows] for name in names}, **more)


def filtered(row: np.ndarray, grid: list[dict]) -> np.ndarray:
    scores = jnp.asarray(np.tile(row, (len(grid), 1)))
    return np.asarray(sampling.filter_scores(scores, of(grid)))


def assert_same_kept(ours: np.ndarray, theirs: np.ndarray, row: np.ndarray) -> None:
    """Kept sets of one row are equal, or ours is theirs with all that equals their lowest."""
    kept, expected = ours > -np.inf, theirs > -np.inf
    assert expected.any()
    with_equals = (row >= row[expected].min()) & (row > -np.inf)
    np.testing.assert_array_equal(kept, with_equals)
    if len(np.unique(row[row > -np.inf])) == (row > -np.inf).sum():
        np.testing.assert_array_equal(kept, expected)


def by_transformers(
    transformers: ModuleType, row: np.ndarray, setting: dict, ids: list[int] | None = None
) -> np.ndarray:
    import torch

    processors = transformers.LogitsProcessorList()
    if ids is not None:
        penalty = transformers.RepetitionPenaltyLogitsProcessor(setting["repetition_penalty"])
        processors.append(penalty)
    processors.append(transformers.TemperatureLogitsWarper(setting["temperature"]))
    if setting["top_k"]:
        processors.append(transformers.TopKLogitsWarper(setting["top_k"]))
    processors.append(transformers.TopPLogitsWarper(setting["top_p"]))
    processors.append(transformers.MinPLogitsWarper(setting["min_p"]))
    tokens = torch.tensor([ids or []], dtype=torch.int64)
    return processors(tokens, torch.from_numpy(row)[None])[0].numpy()


# ------------------------------------------------------------------ filters


@pytest.mark.reference
@pytest.mark.parametrize("name", ROWS)
def test_transformers_keeps_the_same_scores(transformers, name):
    row = ROWS[name]
    for ours, setting in zip(filtered(row, GRID), GRID, strict=True):
        theirs = by_transformers(transformers, row, setting)
        assert_same_kept(ours, theirs, row)
        both = (ours > -np.inf) & (theirs > -np.inf)
        np.testing.assert_allclose(ours[both], theirs[both], rtol=ROUNDING)


@pytest.mark.reference
def test_transformers_keeps_the_same_scores_after_a_repetition_penalty(transformers):
    rng = np.random.default_rng(1)
    row = ROWS["wide"]
    for penalty in (0.5, 1.0, 1.3, 4.0):
        grid = [{**setting, "repetition_penalty": penalty} for setting in GRID[::7]]
        prompt, output = rng.integers(0, V, 12).tolist(), rng.integers(0, V, 9).tolist()
        mask, counts = seen(prompt, output, len(grid))
        scores = jnp.asarray(np.tile(row, (len(grid), 1)))
        settings = of(grid)
        scores = sampling.penalise(scores, mask, counts, settings)
        all_ours = np.asarray(sampling.filter_scores(scores, settings))
        for ours, setting in zip(all_ours, grid, strict=True):
            theirs = by_transformers(transformers, row, setting, prompt + output)
            np.testing.assert_array_equal(ours > -np.inf, theirs > -np.inf)
            np.testing.assert_allclose(ours, theirs, rtol=ROUNDING)


@pytest.mark.parametrize("name", ROWS)
def test_the_oracle_keeps_the_same_scores(name):
    row = ROWS[name]
    for ours, setting in zip(filtered(row, GRID), GRID, strict=True):
        truth = oracles.filter_scores(row, **setting)
        np.testing.assert_array_equal(ours > -np.inf, truth > -np.inf, err_msg=str(setting))
        kept = truth > -np.inf
        np.testing.assert_allclose(ours[kept], truth[kept], rtol=ROUNDING)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("wide", {"top_k": 5}, {"top_k": 6}),
        ("narrow", {"top_p": 0.5}, {"top_p": 0.53}),
        ("narrow", {"min_p": 0.8}, {"min_p": 0.85}),
        ("narrow", {"temperature": 0.1, "top_p": 0.5}, {"temperature": 0.12, "top_p": 0.5}),
    ],
)
def test_the_comparison_of_kept_sets_can_fail(name, right, wrong):
    row = ROWS[name]
    truth = oracles.filter_scores(row, **right)
    assert_same_kept(filtered(row, [NEUTRAL | right])[0], truth, row)
    other = filtered(row, [NEUTRAL | wrong])[0]
    with pytest.raises(AssertionError):
        assert_same_kept(other, truth, row)


def test_the_comparison_asks_for_all_equals_and_only_them():
    row = np.array([0, 1, 1, 1, 2], np.float32)
    theirs = np.array(
        [-np.inf, -np.inf, 1, 1, 2], np.float32
    )  # as a sort may break the group of ones
    assert_same_kept(np.array([-np.inf, 1, 1, 1, 2], np.float32), theirs, row)
    for wrong in (
        [-np.inf, -np.inf, 1, 1, 2],
        [0, 1, 1, 1, 2],
        [-np.inf, -np.inf, -np.inf, -np.inf, 2],
    ):
        with pytest.raises(AssertionError):
            assert_same_kept(np.array(wrong, np.float32), theirs, row)


def test_each_filter_sees_what_the_one_before_it_left():
    """The three probabilities left by top-k are 0.5, 0.3, 0.2; among all five 0.4, 0.24, 0.16."""
    row = np.log(np.array([0.16, 0.4, 0.1, 0.24, 0.1], np.float32) * 7)
    kept = filtered(row, [NEUTRAL | {"top_k": 3, "top_p": 0.7}])[0] > -np.inf
    np.testing.assert_array_equal(kept, [False, True, False, True, False])
    alone = filtered(row, [NEUTRAL | {"top_p": 0.7}])[0] > -np.inf
    np.testing.assert_array_equal(alone, [True, True, False, True, False])


@pytest.mark.parametrize("name", ROWS)
def test_top_p_near_its_ends(name):
    """p = 0 in float32 keeps the largest; p just below 1 brings back nothing dropped before."""
    row = ROWS[name]
    least, most = filtered(
        row, [NEUTRAL | {"top_p": 1e-50}, NEUTRAL | {"top_p": 1 - 2**-24, "top_k": 7}]
    )
    np.testing.assert_array_equal(least > -np.inf, row == row.max())
    seventh = oracles.filter_scores(row, top_k=7)
    assert (most > -np.inf).any()
    assert (seventh[most > -np.inf] > -np.inf).all()


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(-20, 20) | st.just(-(10**6)), min_size=7, max_size=7),
    st.floats(1 / 16, 5, width=32),
    st.integers(0, 9),
    st.floats(2**-10, 1, width=32),
)
def test_any_row_of_few_values(values, temperature, top_k, top_p):
    """Many equal scores; p may fall on a border, so it is asked a hair to both sides of it."""
    row = np.where(np.array(values) == -(10**6), -np.inf, np.array(values) / 4).astype(np.float32)
    setting = NEUTRAL | {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if np.isneginf(row).all():
        assert np.isneginf(filtered(row, [setting])).all()
        return
    ours = filtered(row, [setting])[0] > -np.inf
    low, high = (
        oracles.filter_scores(row, **{**setting, "top_p": p}) > -np.inf
        for p in (top_p - 1e-6, top_p + 1e-6 if top_p < 1 else 1.0)
    )
    assert (low <= ours).all()
    assert (ours <= high).all()


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_top_p_of_a_large_vocabulary_is_within_a_millionth_of_the_mass(spread):
    rng = np.random.default_rng(2)
    row = (rng.normal(size=151_936) * spread).astype(np.float32)
    ps = [0.01, 0.5, 0.95, 0.999, 0.9999]
    for p, ours in zip(ps, filtered(row, [NEUTRAL | {"top_p": p} for p in ps]), strict=True):
        low, high, lower = (
            oracles.filter_scores(row, top_p=p + e) > -np.inf for e in (-1e-6, 1e-6, -1e-4)
        )
        kept = ours > -np.inf
        assert (low <= kept).all()
        assert (kept <= high).all()
        if p > 0.9:  # where a token's mass is small enough for bounds 1e-4 away to differ
            assert not (kept <= lower).all()


def test_neutral_settings_change_no_bit():
    scores = jnp.asarray(np.stack(list(ROWS.values())))
    neutral = Sampling.of(len(ROWS), **NEUTRAL)
    mask, counts = jnp.ones(scores.shape, bool), jnp.full(scores.shape, 7, jnp.int32)
    for out in (
        sampling.filter_scores(scores, neutral),
        sampling.penalise(scores, mask, counts, neutral),
        sampling.filter_scores(scores, Sampling.of(len(ROWS), top_k=1, top_p=0.1, min_p=1.0)),
    ):
        np.testing.assert_array_equal(
            np.asarray(out).view(np.int32), np.asarray(scores).view(np.int32)
        )


@pytest.mark.parametrize("temperature", [1.3e-38, 1e-30, 1e-6])
@pytest.mark.parametrize("offset", [-1e6, 0.0, 1e6])
def test_a_tiny_temperature_is_the_arg_max(temperature, offset):
    row = np.array([1, 3, 2, -np.inf, 2.5], np.float32) + np.float32(offset)
    settings = Sampling.of(1, temperature=temperature, top_p=0.9, min_p=0.1)
    out = np.asarray(sampling.filter_scores(jnp.asarray(row[None]), settings))[0]
    np.testing.assert_array_equal(out > -np.inf, [False, True, False, False, False])
    assert np.isfinite(out[1])
    assert sampling.sample(jnp.asarray(row[None]), settings, jnp.int32([0]))[0] == 1


def test_a_huge_temperature_keeps_all():
    out = sampling.filter_scores(
        jnp.asarray(ROWS["wide"][None]), Sampling.of(1, temperature=3e38, min_p=0.9)
    )
    assert np.isfinite(out).all()


# ------------------------------------------------------------------ penalties


def seen(prompt: list[int], output: list[int], rows: int = 1) -> tuple[jax.Array, jax.Array]:
    """The two arrays as a loop would build them: padding before the prompt, a token at a time."""
    padded = jnp.int32([[0, 0, 0, *prompt]] * rows)
    valid = jnp.asarray([[False] * 3 + [True] * len(prompt)] * rows)
    mask = sampling.token_mask(padded, valid, V)
    counts = jnp.zeros((rows, V), jnp.int32)
    for token in output:
        counts = sampling.add_counts(counts, jnp.full(rows, token, jnp.int32))
    return mask, counts


@pytest.mark.parametrize("repetition", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("presence", [-0.5, 0.0, 0.8])
@pytest.mark.parametrize("frequency", [-0.2, 0.0, 0.3])
def test_penalties(repetition, presence, frequency):
    row = ROWS["holes"]
    prompt, output = [5, 5, 9, 30], [9, 9, 9, 44, 60, 44]
    settings = Sampling.of(
        1,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    ours = sampling.penalise(jnp.asarray(row[None]), *seen(prompt, output), settings)
    names = {"repetition": repetition, "presence": presence, "frequency": frequency}
    truth = oracles.penalise(row, prompt, output, **names)
    np.testing.assert_allclose(ours[0], truth, rtol=1e-6, atol=1e-6)  # three roundings of O(1)
    for wrong in (
        oracles.penalise(row, prompt + output, output, **names | {"repetition": repetition + 0.01}),
        oracles.penalise(row, prompt, output, **names | {"presence": presence + 0.01}),
        oracles.penalise(row, prompt, output, **names | {"frequency": frequency + 0.01}),
        oracles.penalise(row, prompt, [*output, 44, 3], **names | {"frequency": 0.3}),
    ):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(ours[0], wrong, rtol=1e-6, atol=1e-6)


def test_penalties_differ_by_row_and_reach_the_token():
    logits = jnp.asarray(np.array([[0, 2, 1.5], [0, 2, 1.5], [0, 2, 1.5], [0, 2, 1.5]], np.float32))
    settings = Sampling.of(
        4,
        repetition_penalty=[1, 2, 1, 1],
        presence_penalty=[0, 0, 1, 0],
        frequency_penalty=[0, 0, 0, 0.1],
    )
    mask = jnp.asarray([[False, True, False]] * 4)
    position = jnp.zeros(4, jnp.int32)
    for counts, tokens in ((0, [1, 2, 1, 1]), (1, [1, 2, 2, 1]), (6, [1, 2, 2, 2])):
        counts = jnp.asarray([[0, counts, 0]] * 4, jnp.int32)
        np.testing.assert_array_equal(
            sampling.sample(logits, settings, position, mask, counts), tokens
        )


def test_token_mask_leaves_out_padding_and_ids_outside():
    tokens = jnp.int32([[3, 1, 1], [0, 9, -1]])
    valid = jnp.asarray([[True, True, False], [False, True, True]])
    np.testing.assert_array_equal(
        sampling.token_mask(tokens, valid, 4), [[False, True, False, True], [False] * 4]
    )
    np.testing.assert_array_equal(
        sampling.token_mask(tokens, None, 4), [[False, True, False, True], [True] + [False] * 3]
    )


def test_counts_of_finished_rows_stay():
    counts = sampling.add_counts(jnp.zeros((2, 3), jnp.int32), jnp.int32([2, 1]))
    counts = sampling.add_counts(counts, jnp.int32([2, 2]), jnp.asarray([True, False]))
    np.testing.assert_array_equal(counts, [[0, 0, 2], [0, 1, 0]])
    outside = sampling.add_counts(counts, jnp.int32([-1, 3]))  # no ids: not those from the end
    np.testing.assert_array_equal(outside, counts)


# ------------------------------------------------------------------ draws

# One in a million for a right sampler (chi-square, by degrees of freedom).
CRITICAL = {9: 44.82, 19: 63.68, 24: 72.23}
DRAWS = 1_000_000
TWENTY = np.random.default_rng(3).normal(size=20).astype(np.float32)


def chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    expected = probability * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def softmax(scores: np.ndarray) -> np.ndarray:
    return np.exp(oracles.log_softmax(scores))


def draw(scores: jax.Array, seed: jax.Array, position: jax.Array) -> np.ndarray:
    """One id a row with probability softmax(scores)."""
    settings = dataclasses.replace(Sampling.of(len(scores), temperature=1.0), seed=seed)
    return np.asarray(sampling.sample(scores, settings, position))


SEEDS_AND_POSITIONS: dict[str, Callable[[], tuple[jax.Array, jax.Array]]] = {
    "one seed": lambda: (jnp.full(DRAWS, 7, jnp.uint32), jnp.arange(DRAWS, dtype=jnp.int32)),
    "one position": lambda: (jnp.arange(DRAWS, dtype=jnp.uint32), jnp.full(DRAWS, 7, jnp.int32)),
    "both": lambda: (
        jnp.arange(DRAWS, dtype=jnp.uint32) % jnp.uint32(1000),
        jnp.arange(DRAWS, dtype=jnp.int32) // jnp.int32(1000),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SEEDS_AND_POSITIONS)
def test_a_million_draws_have_the_right_distribution(kind):
    seed, position = SEEDS_AND_POSITIONS[kind]()
    scores = jnp.broadcast_to(jnp.asarray(TWENTY), (DRAWS, 20))
    tokens = draw(scores, seed, position)
    counts = np.bincount(tokens, minlength=20)
    assert chi_square(counts, softmax(TWENTY)) < CRITICAL[19]

    # and the statistic sees a score that is wrong by 3 %, so it can fail
    wrong = TWENTY.copy()
    wrong[np.argmax(wrong)] += 0.03
    assert chi_square(counts, softmax(wrong)) > CRITICAL[19]


@pytest.mark.slow
def test_neighbouring_positions_and_seeds_are_independent():
    scores = jnp.zeros((DRAWS, 5))
    for kind in ("one seed", "one position"):
        tokens = draw(scores, *SEEDS_AND_POSITIONS[kind]())
        pairs = np.bincount(tokens[0::2] * 5 + tokens[1::2], minlength=25)
        assert chi_square(pairs, np.full(25, 1 / 25)) < CRITICAL[24]
        same = np.bincount(tokens[0::2] * 6, minlength=25)  # twin: the second is the first
        assert chi_square(same, np.full(25, 1 / 25)) > CRITICAL[24]


@pytest.mark.slow
def test_samples_through_the_filters_have_the_right_distribution():
    setting = NEUTRAL | {"temperature": 1.3, "top_k": 12, "top_p": 0.93, "min_p": 0.02}
    left = oracles.filter_scores(TWENTY, **setting)
    kept = left > -np.inf
    assert kept.sum() == 10
    rows = 200_000  # of the million above none is filtered
    seed, position = (x[:rows] for x in SEEDS_AND_POSITIONS["both"]())
    settings = dataclasses.replace(Sampling.of(rows, **setting), seed=seed)
    scores = jnp.broadcast_to(jnp.asarray(TWENTY), (rows, 20))
    counts = np.bincount(np.asarray(sampling.sample(scores, settings, position)), minlength=20)
    assert counts[~kept].sum() == 0
    assert chi_square(counts[kept], softmax(left[kept])) < CRITICAL[9]
    assert chi_square(counts[kept], softmax(TWENTY[kept])) > CRITICAL[9]  # without temperature


def test_draws_are_the_same_on_every_version():
    """A change here changes what every seed says: it belongs into the changelog."""
    scores = jnp.broadcast_to(jnp.asarray(TWENTY), (12, 20))
    seed = jnp.uint32([0, 0, 0, 0, 1, 2, 3, 4, 2**31, 2**32 - 1, 5, 5])
    position = jnp.int32([0, 1, 2, 3, 0, 0, 0, 0, 9, 9, 100_000, 100_001])
    tokens = draw(scores, seed, position)
    np.testing.assert_array_equal(tokens, DRAWN)


DRAWN = [9, 0, 9, 4, 9, 9, 0, 18, 9, 0, 0, 15]


@pytest.mark.slow
def test_a_row_draws_the_same_alone_and_in_any_batch():
    rng = np.random.default_rng(4)
    rows = (rng.normal(size=(9, 1009)) * 3).astype(np.float32)
    kinds = [
        {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.3, "top_k": 40, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 100, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.0},
    ]
    grid = [
        {**kinds[r % 5], "repetition_penalty": 1.0 + r % 3 / 4, "seed": 1000 + r % 4}
        for r in range(9)
    ]
    mask = rng.random(rows.shape) < 0.1
    counts = rng.integers(0, 2, rows.shape).astype(np.int32)

    @jax.jit
    def both(scores, settings, *rest):
        filtered = sampling.filter_scores(scores, settings)
        return filtered, sampling.sample(scores, settings, *rest)

    def run(chosen: list[int], step: int) -> tuple[np.ndarray, np.ndarray]:
        position = jnp.asarray(chosen, jnp.int32) + jnp.int32(step)
        rest = (jnp.asarray(mask[chosen]), jnp.asarray(counts[chosen]))
        out = both(jnp.asarray(rows[chosen]), of([grid[r] for r in chosen]), position, *rest)
        return np.asarray(out[0]), np.asarray(out[1])

    for step in range(20):
        together, tokens = run(list(range(9)), step)
        assert len(set(tokens.tolist())) > 2
        for batch in ([3], [0], [4], [8, 2, 2], [5, 1, 7]):
            part, part_tokens = run(batch, step)
            np.testing.assert_array_equal(part.view(np.int32), together[batch].view(np.int32))
            np.testing.assert_array_equal(part_tokens, tokens[batch])


def test_another_seed_or_position_is_another_draw():
    scores = jnp.zeros((64, 1000))
    base = draw(scores, jnp.full(64, 3, jnp.uint32), jnp.full(64, 5))
    assert len(set(base.tolist())) == 1  # equal rows, seeds and positions
    for seed, position in ((jnp.arange(64, dtype=jnp.uint32), jnp.full(64, 5)),) + (
        (jnp.full(64, 3, jnp.uint32), jnp.arange(64)),
    ):
        tokens = draw(scores, seed, position)
        assert len(set(tokens.tolist())) > 55


def test_noise_is_finite_for_every_pattern_of_bits():
    bits = jnp.uint32([0, 1, 2, 2**31, 2**32 - 2**9, 2**32 - 2, 2**32 - 1])
    noise = np.asarray(sampling._gumbel(bits))
    assert np.isfinite(noise).all()
    assert noise.max() < 22.2
    assert noise.min() > -2.9
    naive = -jnp.log(-jnp.log1p(-(bits.astype(jnp.float32) * 2.0**-32)))
    assert not np.isfinite(naive).all()


def test_noise_hardly_ties_at_the_top_of_a_large_vocabulary():
    position = jnp.arange(40, dtype=jnp.int32)
    noise = np.asarray(sampling._noise(jnp.zeros(40, jnp.uint32), position, 151_936))
    coarse = np.floor(np.exp(-np.exp(-noise.astype(np.float64))) * 2**15)  # 2**15 levels
    assert ((noise == noise.max(axis=1, keepdims=True)).sum(axis=1) == 1).all()
    assert ((coarse == coarse.max(axis=1, keepdims=True)).sum(axis=1) > 1).any()


# ------------------------------------------------------------------ whole calls


def test_greedy_rows_take_the_arg_max_beside_sampled_rows():
    logits = jnp.asarray(np.tile(ROWS["wide"], (3, 1)))
    settings = Sampling.of(3, temperature=[0, 1e-39, 1.5], top_k=[0, 4, 0], seed=[1, 2, 3])
    best = int(np.argmax(ROWS["wide"]))
    others = set()
    for step in range(20):
        tokens = np.asarray(sampling.sample(logits, settings, jnp.full(3, step)))
        np.testing.assert_array_equal(tokens[:2], best)
        others.add(int(tokens[2]))
    assert len(others) > 3
    np.testing.assert_array_equal(sampling.greedy(logits), best)


def test_of_equal_scores_greedy_takes_the_lowest_id():
    assert sampling.greedy(jnp.asarray([[0.0, 4.0, 4.0]]))[0] == 1


def test_surplus_vocabulary_is_never_chosen():
    logits = np.zeros((50, 8), np.float32)
    logits[:, 6:] = 100
    logits = jnp.asarray(logits)
    position = jnp.arange(50)
    for temperature in (0.0, 2.0):
        settings = Sampling.of(50, temperature=temperature, top_p=0.99)
        assert (sampling.sample(logits, settings, position) >= 6).all()
        tokens = np.asarray(sampling.sample(logits, settings, position, vocab_size=6))
        assert tokens.max() < 6
        assert (len(set(tokens.tolist())) > 3) == (temperature > 0)
    assert (sampling.greedy(logits, vocab_size=6) == 0).all()
    assert (sampling.greedy(logits, vocab_size=8) == 6).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("row", "allowed"),
    [
        ([np.nan, 1, np.nan, 0.5], {1, 3}),
        ([-np.inf, -3, -np.inf, -np.inf], {1}),
        ([0, np.inf, 5, np.nan], {1}),
        ([-np.inf] * 4, {0}),
        ([np.nan] * 4, {0}),
    ],
    ids=["nan", "one left", "inf", "none left", "all nan"],
)
def test_rows_that_are_not_numbers(temperature, row, allowed):
    logits = jnp.asarray([row] * 30, jnp.float32)
    zeros = jnp.zeros(logits.shape, jnp.int32)
    for more in ({}, {"top_k": 2, "top_p": 0.95, "min_p": 0.01}):
        settings = Sampling.of(30, temperature=temperature, seed=range(30), **more)
        for extra in ((), (zeros > 0, zeros)):
            tokens = sampling.sample(logits, settings, jnp.arange(30), *extra)
            assert set(np.asarray(tokens).tolist()) <= allowed
    if np.isnan(row).any():
        assert np.isnan(sampling.log_probs(logits, jnp.zeros(30, jnp.int32))).all()


def test_half_precision_logits_are_read_as_float32():
    row = jnp.asarray(ROWS["wide"][None], jnp.bfloat16)
    settings = Sampling.of(1, temperature=0.7, top_p=0.9)
    out = sampling.filter_scores(row, settings)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, sampling.filter_scores(row.astype(jnp.float32), settings))


@pytest.mark.slow
def test_a_loop_on_the_device_samples_what_single_steps_sample():
    logits = jnp.asarray(np.stack([ROWS["wide"], ROWS["narrow"]]))
    settings = Sampling.of(
        2, temperature=[0.8, 1.2], top_k=[20, 0], top_p=0.9, frequency_penalty=0.4, seed=[3, 4]
    )
    mask = jnp.zeros(logits.shape, bool)

    def step(carry):
        position, counts, out = carry
        tokens = sampling.sample(logits, settings, position, mask, counts)
        counts = sampling.add_counts(counts, tokens)
        return position + 1, counts, out.at[jnp.arange(2), position].set(tokens)

    start = (
        jnp.zeros(2, jnp.int32),
        jnp.zeros(logits.shape, jnp.int32),
        jnp.zeros((2, 12), jnp.int32),
    )
    looped = jax.jit(lambda: jax.lax.while_loop(lambda c: c[0][0] < 12, step, start))()
    carry = start
    for _ in range(12):
        carry = step(carry)
    for one, other in zip(looped, carry, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_settings_are_traced_and_nothing_is_sorted():
    traced = []

    @jax.jit
    def step(logits, settings, position):
        traced.append(logits.shape)
        return sampling.sample(logits, settings, position)

    def text_and_temporaries(f, *args) -> tuple[str, int]:
        compiled = f.lower(*args).compile()
        return compiled.as_text().lower(), compiled.memory_analysis().temp_size_in_bytes

    logits, position = jnp.zeros((2, 4096)), jnp.zeros(2, jnp.int32)
    step(logits, Sampling.of(2), position)
    step(logits, Sampling.of(2, temperature=1.0), position)
    step(logits, Sampling.of(2, temperature=[0, 0.3], top_k=5, top_p=0.4, seed=9), position)
    assert len(traced) == 1
    step(logits[:1], Sampling.of(1), position[:1])
    assert len(traced) == 2

    text, temporaries = text_and_temporaries(step, logits, Sampling.of(2), position)
    assert " sort(" not in text
    assert "topk" not in text
    # the search is fused: there is no array of passes times scores
    assert temporaries < 8 * logits.nbytes
    assert " sort(" in text_and_temporaries(jax.jit(jnp.sort), logits)[0]
    assert "topk" in text_and_temporaries(jax.jit(lambda x: jax.lax.top_k(x, 50)), logits)[0]


def test_log_probs():
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(4, 1000)) * 5).astype(np.float32)
    logits[1] += 1000
    tokens = rng.integers(0, 1000, 4)
    truth = oracles.log_softmax(logits)
    ours = sampling.log_probs(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32))
    # a few units in the last place of the largest term, which is about 1000
    bound = {"rtol": 0, "atol": 4 * 2**-24 * 1024}
    np.testing.assert_allclose(ours, truth[np.arange(4), tokens], **bound)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(ours, truth[np.arange(4), tokens] + 1e-3, **bound)
    ids, values = sampling.top_log_probs(jnp.asarray(logits), 3)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1)[:, :3])
    np.testing.assert_allclose(values, -np.sort(-truth, axis=1)[:, :3], **bound)
    outside = sampling.log_probs(jnp.asarray(logits), jnp.int32([-1, 1000, -1000, 0]))
    np.testing.assert_array_equal(np.isnan(outside), [True, True, True, False])


def test_an_implementation_by_name_of_the_op():
    scores, one = jnp.zeros((1, 5)), Sampling.of(1, temperature=1.0)
    sampling.filter_scores(scores, one, implementation={"sampling_threshold": "xla", "glu": "xla"})
    with pytest.raises(ValueError, match="^sampling_threshold: no implementation is named 'cudnn'"):
        sampling.filter_scores(scores, one, implementation={"sampling_threshold": "cudnn"})


# ------------------------------------------------------------------ what the host says


@pytest.mark.parametrize("vocab_size", [None, 900])
def test_greedy_in_one_pass(vocab_size: int | None):
    """What a GPU does: the token of `greedy`, its log-probability, and the same NaN.

    float32 sums of 1000 terms, their log, and a difference of numbers up to 1e30.
    """
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(9, 1000)).astype(np.float32) * 4
    logits[0] = np.round(logits[0])  # of several largest the first
    logits[1, 950] = 100  # no id
    logits[2, 10:990] = -np.inf
    logits[3], logits[4, 7], logits[5, 3], logits[6] = -np.inf, np.nan, np.inf, np.nan
    logits[7, :999] = -1e30
    tokens = sampling.greedy(jnp.asarray(logits), vocab_size=vocab_size)
    with np.errstate(invalid="ignore"):
        exact = oracles.log_softmax(logits)[np.arange(9), np.asarray(tokens)]
    one_pass = partial(sampling._greedy_in_one_pass, vocab_size=vocab_size)
    here = partial(sampling.greedy_and_log_probs, vocab_size=vocab_size)
    for run in (one_pass, jax.jit(one_pass), here, jax.jit(here)):
        ours, values = run(jnp.asarray(logits))
        assert (ours.dtype, values.dtype) == (jnp.int32, jnp.float32)
        np.testing.assert_array_equal(ours, tokens)
        np.testing.assert_allclose(values, exact, rtol=1e-6, atol=1e-5)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(values + 1e-4, exact, rtol=1e-6, atol=1e-5)
        assert np.isnan(values).tolist() == [i in (3, 4, 5, 6) for i in range(9)]


def test_the_arg_max_in_one_pass():
    """What a GPU does: of equal scores the lowest id, and 0 where there is nothing above -inf."""
    scores = np.round(np.random.default_rng(9).normal(size=(20, 200)) * 2).astype(np.float32)
    scores[3], scores[4, 7], scores[5, 150:] = -np.inf, np.inf, np.inf
    best = np.argmax(scores, axis=1)
    for run in (sampling._arg_max_in_one_pass, sampling._arg_max):
        np.testing.assert_array_equal(run(jnp.asarray(scores)), best)


def test_is_greedy_and_has_penalties():
    assert Sampling.of(2).is_greedy
    assert Sampling.of(2, top_k=5, top_p=0.5, min_p=0.5, seed=3).is_greedy
    assert not Sampling.of(2).has_penalties
    assert not Sampling.of(2, temperature=[0, 0.1]).is_greedy
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        penalised = Sampling.of(2, **{name: [0.5, 0.5]})
        assert penalised.has_penalties
        assert not penalised.is_greedy
    assert not Sampling.of(2, temperature=1.0).has_penalties


def test_one_number_or_one_a_row():
    rows = Sampling.of(
        3, temperature=0.5, top_k=[1, 2, 2**40], seed=range(3), top_p=np.array([0.1, 0.5, 1])
    )
    np.testing.assert_array_equal(rows.temperature, [0.5, 0.5, 0.5])
    np.testing.assert_array_equal(rows.top_k, [1, 2, 2**31 - 1])
    np.testing.assert_array_equal(rows.seed, [0, 1, 2])
    np.testing.assert_array_equal(rows.top_p, np.array([0.1, 0.5, 1], np.float32))
    assert Sampling.of(1, seed=2**32 - 1).seed.dtype == np.uint32
    with warnings.catch_warnings(action="error"):
        np.testing.assert_array_equal(Sampling.of(1, temperature=np.float16(0.5)).temperature, 0.5)
    again = jax.jit(lambda s: s)(rows)
    for before, after in zip(jax.tree.leaves(rows), jax.tree.leaves(again), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"temperature": -0.1}, r"temperature must be 0 .* got -0.1$"),
        ({"temperature": float("nan")}, r"temperature must be 0 .* got nan$"),
        ({"temperature": float("inf")}, r"temperature must be 0 .* got inf$"),
        ({"temperature": 1e39}, r"temperature must be 0 .* got 1e\+39$"),
        ({"temperature": "hot"}, r"temperature must be 0 .* got 'hot'$"),
        ({"temperature": None}, r"temperature must be 0 .* got None$"),
        ({"temperature": True}, r"temperature must be 0 .* got True$"),
        ({"top_k": -1}, r"top_k must be an integer, 0 \(off\) or more, got -1$"),
        ({"top_k": 2.5}, r"top_k must be an integer.* got 2.5$"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], where 1 is off, got 0$"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\].* got 1.01$"),
        ({"top_p": float("nan")}, r"top_p must be in \(0, 1\].* got nan$"),
        ({"top_p": [0.5, -1]}, r"top_p must be in \(0, 1\].* got -1 for row 1$"),
        ({"min_p": -0.01}, r"min_p must be in \[0, 1\].* got -0.01$"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\].* got 1.5$"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be positive, 1 is off, got 0$"),
        ({"repetition_penalty": -2.0}, r"repetition_penalty must be positive.* got -2.0$"),
        ({"repetition_penalty": 1e-50}, r"repetition_penalty must be positive.* got 1e-50$"),
        ({"presence_penalty": float("inf")}, r"presence_penalty must be a finite .* got inf$"),
        ({"frequency_penalty": float("nan")}, r"frequency_penalty must be a finite .* got nan$"),
        ({"seed": -1}, r"seed must be an integer from 0 to 2\*\*32 - 1, got -1$"),
        ({"seed": 2**32}, r"seed must be an integer from 0 .* got 4294967296$"),
        ({"seed": 1.0}, r"seed must be an integer from 0 .* got 1.0$"),
        (
            {"seed": [1, 2, 3]},
            r"seed has 3 values for a batch of 2; give one number, or one a row",
        ),
        ({"top_p": [[0.5], [0.5]]}, r"top_p must be in \(0, 1\].* got \[0.5\] for row 0$"),
    ],
    ids=str,
)
def test_bad_settings_get_one_sentence(given, sentence):
    with pytest.raises(ValueError, match=f"^sampling: {sentence}"):
        Sampling.of(2, **given)


@pytest.mark.parametrize("batch", [0, -1, 1.5, True, "2"])
def test_bad_batch(batch):
    with pytest.raises(
        ValueError, match=r"^sampling: batch must be an integer of at least 1, got "
    ):
        Sampling.of(batch)


@pytest.mark.own_errors
def test_bad_arrays_get_one_sentence():
    scores, position = jnp.zeros((2, 5)), jnp.zeros(2, jnp.int32)
    two, mask, counts = Sampling.of(2), jnp.zeros((2, 5), bool), jnp.zeros((2, 5), jnp.int32)
    wrong = r"scores must be floating-point \[B, V\], V at least 1, got float32"
    with pytest.raises(ValueError, match=rf"^sample: {wrong}\[2, 1, 5\]$"):
        sampling.sample(jnp.zeros((2, 1, 5)), two, position)
    with pytest.raises(ValueError, match=rf"^sample: {wrong}\[2, 0\]$"):
        sampling.sample(scores[:, :0], two, position)
    with pytest.raises(ValueError, match=rf"^greedy: {wrong}\[5\]$"):
        sampling.greedy(scores[0])
    with pytest.raises(ValueError, match=rf"^log_probs: {wrong}\[5\]$"):
        sampling.log_probs(scores[0], position)
    with pytest.raises(ValueError, match=rf"^top_log_probs: {wrong}\[5\]$"):
        sampling.top_log_probs(scores[0], 1)
    with pytest.raises(ValueError, match=r"^filter_scores: scores must be .* got int32\[2, 5\]$"):
        sampling.filter_scores(counts, two)
    with pytest.raises(
        ValueError, match=r"^sample: position must be integers, one a row, \[2\], got int32\[1\]$"
    ):
        sampling.sample(scores, two, position[:1])
    with pytest.raises(
        ValueError, match=r"^log_probs: tokens must be integers, one a row, \[2\], got int32\[1\]$"
    ):
        sampling.log_probs(scores, position[:1])
    with pytest.raises(ValueError, match=r"^log_probs: tokens must be integers, .* got float32"):
        sampling.log_probs(scores, position.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"the mapping names no op: sampling_treshold; there are "):
        sampling.filter_scores(scores, two, implementation={"sampling_treshold": "xla"})
    with pytest.raises(
        ValueError, match=r"^penalise: 2 rows of scores, but settings of shape \[3\]"
    ):
        sampling.penalise(scores, mask, counts, Sampling.of(3))
    with pytest.raises(ValueError, match=r"^sample: prompt_mask and counts go together"):
        sampling.sample(scores, two, position, mask)
    with pytest.raises(ValueError, match=r"^penalise: counts must have the shape of the scores"):
        sampling.penalise(scores, mask, counts[:, :4], two)
    for size in (0, 6, 2.5, "5"):
        with pytest.raises(ValueError, match=rf"^sampling: vocab_size must be .* got {size!r}$"):
            sampling.greedy(scores, vocab_size=size)
    for k in (0, 6, 2.5, "5"):
        with pytest.raises(ValueError, match=rf"^top_log_probs: k must be an .* got {k!r}$"):
            sampling.top_log_probs(scores, k)


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: sampling.greedy([[1.0]]), "greedy: scores must be an array, got [[1.0]]"),
        (
            lambda: sampling.greedy_and_log_probs(1.0),
            "greedy_and_log_probs: scores must be an array, got 1.0",
        ),
        (
            lambda: sampling.top_log_probs([[1.0]], 1),
            "top_log_probs: scores must be an array, got [[1.0]]",
        ),
        (
            lambda: sampling.log_probs(np.ones((1, 2), np.float32), [1]),
            "log_probs: tokens must be an array, got [1]",
        ),
        (
            lambda: sampling.sample(np.ones((1, 2), np.float32), Sampling.of(1), [0]),
            "sample: position must be an array, got [0]",
        ),
        (
            lambda: sampling.filter_scores(np.ones((1, 2), np.float32), {"top_k": 1}),
            "filter_scores: sampling must be a Sampling, as Sampling.of makes it, got {'top_k': 1}",
        ),
        (
            lambda: sampling.penalise(
                np.ones((1, 2), np.float32), [[True, False]], np.ones((1, 2), int), Sampling.of(1)
            ),
            "penalise: prompt_mask must be an array, got [[True, False]]",
        ),
        (
            lambda: sampling.token_mask([[1]], None, 3),
            "token_mask: tokens must be an array, got [[1]]",
        ),
        (
            lambda: sampling.token_mask(np.ones((1, 1)), None, 3),
            "token_mask: tokens must be integers, got float64",
        ),
        (
            lambda: sampling.add_counts(np.zeros((1, 2), int), np.ones(1)),
            "add_counts: tokens must be integers, got float64",
        ),
        (
            lambda: sampling.add_counts([[0]], np.ones(1, int)),
            "add_counts: counts must be an array, got [[0]]",
        ),
        (lambda: sampling.greedy(None), "greedy: scores must be an array, got None"),
        (
            lambda: sampling.log_probs(np.ones((1, 2), np.float32), None),
            "log_probs: tokens must be an array, got None",
        ),
        (
            lambda: sampling.token_mask(None, None, 3),
            "token_mask: tokens must be an array, got None",
        ),
        (
            lambda: sampling.add_counts(np.zeros((1, 2), int), None),
            "add_counts: tokens must be an array, got None",
        ),
        (
            lambda: sampling.token_mask(np.ones((1, 1), int), np.ones((1, 1), np.float32), 3),
            "token_mask: valid must be booleans, got float32",
        ),
        (
            lambda: sampling.token_mask(np.ones((1, 1), int), None, 2.5),
            "token_mask: size must be an integer of at least 0, got 2.5",
        ),
    ],
)
def test_what_is_no_array_gets_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        call()


@pytest.mark.own_errors  # NumPy's arrays are not what the signatures say
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_a_number_that_int32_does_not_hold_is_no_id(dtype):
    tokens, scores = np.asarray([1, 2**32 + 1], dtype), np.zeros((2, 3), np.float32)
    assert np.isnan(sampling.log_probs(scores, tokens)).tolist() == [False, True]
    assert sampling.token_mask(tokens[:, None], None, 3).sum(axis=1).tolist() == [1, 0]
    counts = sampling.add_counts(jnp.zeros((2, 3), jnp.int32), tokens)
    assert counts.tolist() == [[0, 1, 0], [0, 0, 0]]


@pytest.mark.own_errors
def test_counts_may_be_numpys():
    counts, tokens = np.zeros((2, 3), np.int32), np.asarray([0, 2])
    assert sampling.add_counts(counts, tokens).tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.own_errors
def test_a_number_of_64_bits_below_0_is_no_id():
    tokens, scores = np.asarray([-1, -(2**32)]), np.zeros((2, 3), np.float32)
    assert np.isnan(sampling.log_probs(scores, tokens)).all()
    assert not sampling.token_mask(tokens[:, None], None, 3).any()
    assert not sampling.add_counts(jnp.zeros((2, 3), jnp.int32), tokens).any()


def test_draws_are_the_same_whatever_jaxs_default_generator_is():
    scores = jnp.broadcast_to(jnp.asarray(TWENTY), (12, 20))
    seed, position = jnp.arange(12, dtype=jnp.uint32), jnp.arange(12, dtype=jnp.int32)
    expected = draw(scores, seed, position)
    sampling._noise.clear_cache()  # or it would not be traced again
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(draw(scores, seed, position), expected)
    sampling._noise.clear_cache()
