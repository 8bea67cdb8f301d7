"""Packed batches train like their documents; a loader loses nothing and goes on where it was."""

import dataclasses
import json
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ALL, LONGROPE, SLIDING, TINY, build

from jaxllm import data, ops
from jaxllm.data import Example, Loader, PreferenceExample, PreferenceLoader

IGNORE = data.IGNORE


def make_example(n, seed=0, *, prompt=0):
    ids = np.random.default_rng([seed, n]).integers(0, TINY.vocab_size, n + 1).astype(np.int32)
    targets = ids[1:].copy()
    targets[:prompt] = IGNORE
    return Example(ids[:-1], targets)


def make_examples(*lengths):
    return [make_example(n, i, prompt=i % 3) for i, n in enumerate(lengths)]


def numbered(count):
    """Examples that can be told apart: the i-th is one token, i."""
    return [Example(np.array([i], np.int32), np.array([i], np.int32)) for i in range(count)]


def seen(batch):
    """The numbers of the examples in a batch, in order."""
    return batch["tokens"][batch["segment_ids"] != 0].tolist()


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


# Packing


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=40))
def test_packing_keeps_every_example_once_and_overfills_no_row(lengths):
    examples = make_examples(*lengths)
    rows = data.pack(examples, 12)
    assert sorted(i for row in rows for i in row) == list(range(len(examples)))
    used = [sum(lengths[i] for i in row) for row in rows]
    assert max(used) <= 12
    assert all(a + b > 12 for i, a in enumerate(used) for b in used[:i])  # none could be joined


def test_packing_takes_the_best_fit():
    # First fit would put the 3 beside the 5, and need a third row for the 4
    examples = make_examples(5, 6, 3, 4)
    assert [sorted(row) for row in data.pack(examples, 9)] == [[1, 2], [0, 3]]


def test_packing_wastes_little():
    lengths = np.random.default_rng(0).integers(1, 200, 2000)
    rows = data.pack([make_example(int(n)) for n in lengths], 512)
    assert lengths.sum() / (len(rows) * 512) > 0.99


def test_rows_hold_documents_one_after_the_other():
    a, b = make_examples(2, 3)
    batch = data.row_batch([a, b], [[1, 0], [], [0]], 6)
    assert {key: array.dtype for key, array in batch.items()} == dict.fromkeys(
        ("tokens", "targets", "positions", "segment_ids"), np.dtype(np.int32)
    )
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0], [0] * 6, [1, 1, 0, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6, [0, 1, 0, 0, 0, 0]]
    assert batch["tokens"][0].tolist() == [*b.tokens, *a.tokens, 0]
    assert batch["targets"][0].tolist() == [*b.targets, *a.targets, IGNORE]
    assert (batch["targets"][1] == IGNORE).all()


def test_examples_must_fit():
    for lengths in ((4, 13), (4, 0)):
        with pytest.raises(ValueError, match=f"example 1 has {lengths[1]} tokens, but a row takes"):
            data.pack(make_examples(*lengths), 12)
    with pytest.raises(ValueError, match="example 0 has 13 tokens, but a row takes from 1 to 12"):
        Loader(make_examples(13), rows=1, length=12, seed=0, pack=False)
    with pytest.raises(ValueError, match="^data: 3 tokens do not fit into a row of 2$"):
        data.row_batch(numbered(3), [[0, 1, 2]], 2)


# A packed batch trains as its documents alone

CONFIGS = {
    "window and longrope": dataclasses.replace(SLIDING, rope=LONGROPE),
    "full": TINY,
    "all switches": ALL,
}
DOCUMENTS = make_examples(5, 13, 5, 13, 5)  # longrope turns by other angles from 10 tokens on


_first, *_others = CONFIGS
PARAMS = [_first, *(pytest.param(name, marks=pytest.mark.slow) for name in _others)]


@pytest.fixture(scope="module", params=PARAMS)
def sums(request):
    """A function of batches: the sum of their losses, and its gradient by each parameter."""
    graph, state = nnx.split(build(CONFIGS[request.param]))

    @jax.jit
    @jax.value_and_grad
    def one(state, batch):
        model = nnx.merge(graph, state)
        logits = model(batch["tokens"], batch.get("positions"), batch.get("segment_ids"))
        return ops.cross_entropy(logits, batch["targets"])[0]

    def total(batches):
        results = [one(state, batch) for batch in batches]
        return jax.tree.map(lambda *parts: np.sum(np.asarray(parts, np.float64), 0), *results)

    return total


@pytest.fixture(scope="module")
def alone(sums):
    return sums([{"tokens": e.tokens[None], "targets": e.targets[None]} for e in DOCUMENTS])


def far(a, b):
    """How far two sums are apart, and their gradients, each in units of the largest number of b."""
    return [
        float(np.max(np.abs(x - y)) / np.max(np.abs(y)))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    ]


def packed_batch():
    rows = data.pack(DOCUMENTS, 24)
    assert max(map(len, rows)) > 1
    return data.row_batch(DOCUMENTS, rows, 24)


# Sums of some 40 terms in float32, in another order: 1.1e-6 was measured; a wrong mask gives 0.9
ROUNDING = 3e-6


def test_a_packed_batch_trains_as_its_documents_alone(sums, alone):
    assert max(far(sums([packed_batch()]), alone)) < ROUNDING


def test_the_check_can_fail(sums, alone):
    joined = packed_batch()
    joined["segment_ids"] = np.minimum(joined["segment_ids"], 1)
    assert max(far(sums([joined]), alone)) > 1e5 * ROUNDING


# Loading


def epoch_of(loader):
    return [next(loader) for _ in range(loader.batches_per_epoch)]


@pytest.mark.parametrize("count", [1, 3, 4, 9, 23])
def test_every_example_is_in_every_epoch_once(count):
    with Loader(numbered(count), rows=4, length=1, seed=0) as loader:
        orders = [[i for batch in epoch_of(loader) for i in seen(batch)] for _ in range(3)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    if count > 4:
        assert orders[0] != orders[1] != orders[2]


def test_batches_have_one_shape_and_nearly_as_many_rows():
    with Loader(numbered(9), rows=4, length=3, seed=0, pack=False, epochs=1) as loader:
        batches = list(loader)
    assert {batch["tokens"].shape for batch in batches} == {(4, 3)}
    assert [len(seen(batch)) for batch in batches] == [3, 3, 3]


def test_the_order_is_that_of_the_seed():
    def order(seed):
        with Loader(numbered(30), rows=4, length=1, seed=seed, epochs=2) as loader:
            return [seen(batch) for batch in loader]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_the_order_is_the_same_for_ever():
    # A run that is resumed with other versions of NumPy and grain must find its place
    order = [[3, 6, 2, 4, 5, 7, 0, 1], [2, 0, 6, 1, 5, 7, 4, 3]]
    with Loader(numbered(8), rows=8, length=1, seed=5, epochs=2) as loader:
        assert [seen(batch) for batch in loader] == order


@pytest.mark.parametrize("count", [3, 8, 21])
def test_processes_share_what_one_would_load(count):
    examples = numbered(count)
    one = Loader(examples, rows=6, length=1, seed=3, epochs=2)
    three = [
        Loader(examples, rows=2, length=1, seed=3, epochs=2, process_index=i, process_count=3)
        for i in range(3)
    ]
    together = [
        sorted(i for batch in parts for i in seen(batch)) for parts in zip(*three, strict=True)
    ]
    assert together == [sorted(seen(batch)) for batch in one]


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 9])
def test_it_goes_on_where_it_was(stop):
    examples = make_examples(*range(1, 12), *range(1, 12))
    arguments = {"rows": 2, "length": 16, "seed": 7, "epochs": 2}
    first = Loader(examples, **arguments)
    for _ in range(stop):
        next(first)
    state = json.loads(json.dumps(first.state()))
    second = Loader(examples, **arguments)
    second.restore(state)
    assert second.state() == state
    assert second.position == stop
    rest, again = list(first), list(second)
    assert len(rest) == len(again) == 2 * first.batches_per_epoch - stop > 0
    for a, b in zip(rest, again, strict=True):
        assert_equal(a, b)


def test_a_position_of_another_process_count():
    examples = numbered(20)
    one = Loader(examples, rows=4, length=1, seed=3)
    next(one)
    parts = [
        Loader(examples, rows=2, length=1, seed=3, process_index=i, process_count=2)
        for i in range(2)
    ]
    for part in parts:
        part.restore(one.state())
    assert sorted(i for part in parts for i in seen(next(part))) == sorted(seen(next(one)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rows": 3}, "had rows=4, not 3"),
        ({"length": 9}, "had length=8, not 9"),
        ({"seed": 1}, "had seed=0, not 1"),
        ({"pack": False}, "had pack=True, not False"),
        ({"examples": numbered(19)}, "had examples=20, not 19"),
        ({"examples": numbered(21)[1:]}, "had other data"),
    ],
)
def test_another_run_is_refused(changes, sentence):
    arguments = {"examples": numbered(20), "rows": 4, "length": 8, "seed": 0}
    state = Loader(**arguments).state()
    other = Loader(**arguments | changes)
    with pytest.raises(ValueError, match=f"^data: the run to resume {sentence}; it can only go on"):
        other.restore(state)
    assert other.position == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"examples": []}, "there are no examples to load"),
        ({"rows": 0}, "rows must be an integer of at least 1, got 0"),
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"rows": 4.0}, "rows must be an integer of at least 1, got 4.0"),
        ({"epochs": 1.5}, "epochs must be an integer of at least 1, got 1.5"),
        ({"prefetch": None}, "prefetch must be an integer of at least 1, got None"),
        ({"prefetch": 0}, "prefetch must be an integer of at least 1, got 0"),  # it was 1 then
        ({"process_index": 2, "process_count": 2}, r"process_index must be in \[0, 2\), got 2"),
    ],
)
def test_arguments_out_of_range(changes, sentence):
    with pytest.raises(ValueError, match=f"^data: {sentence}"):
        Loader(**{"examples": numbered(3), "rows": 4, "length": 8, "seed": 0} | changes)


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: data.pack(numbered(3), "a"), "length must be an integer of at least 1, got 'a'"),
        (lambda: Loader([1], rows=1, length=8, seed=0), "example 0 is no Example, but 1"),
        (
            lambda: data.PreferenceLoader(numbered(1), pairs=1, length=8, seed=0),
            "example 0 is no PreferenceExample, but Example",
        ),
        (lambda: data.hold_out(range(3), fraction="a"), "the fraction to hold out must .* got 'a'"),
        (lambda: data.hold_out(range(3), fraction=0.5, seed=-1), "seed must be an integer of at "),
        (lambda: data.read_records(None), "a file of records is a path, got None"),
    ],
)
def test_arguments_of_another_kind(call, sentence):
    with pytest.raises(ValueError, match=f"^data: {sentence}"):
        call()


def test_all_at_once_for_evaluation():
    examples = make_examples(*range(1, 12))
    found = data.batches(examples, rows=2, length=16)
    assert sum((batch["targets"] != IGNORE).sum() for batch in found) == sum(
        example.learnt for example in examples
    )


def test_holding_out():
    train, held = data.hold_out(range(50), fraction=0.1, seed=1)
    assert sorted([*train, *held]) == list(range(50))
    assert len(held) == 5
    assert train == sorted(train)
    assert (train, held) == data.hold_out(range(50), fraction=0.1, seed=1)
    assert held != data.hold_out(range(50), fraction=0.1, seed=2)[1]
    assert len(data.hold_out(range(3), fraction=0.01)[1]) == 1
    assert len(data.hold_out(range(19), fraction=0.1)[1]) == 2  # 1.9, rounded
    with pytest.raises(ValueError, match="must be above 0 and below 1, got 1.5"):
        data.hold_out(range(3), fraction=1.5)
    with pytest.raises(ValueError, match="^data: too few records .*: 1; .* another file$"):
        data.hold_out(range(1), fraction=0.5)


# Preference pairs


def make_pairs(count):
    return [PreferenceExample(*make_examples(3 + i % 4, 2 + i % 5)) for i in range(count)]


def test_a_digest_tells_examples_apart():
    a, b = make_examples(5, 4)
    unlearnt = Example(a.tokens, np.full(5, IGNORE, np.int32))
    cut = Example(a.tokens[:4], a.targets[:4]), Example(a.tokens[4:], a.targets[4:])
    lists = [[], [a], [a, b], [b, a], [unlearnt], [*cut]]
    assert len({data.digest(examples) for examples in lists}) == len(lists)
    pairs = [PreferenceExample(a, b)], [PreferenceExample(b, a)], [PreferenceExample(a, a)]
    assert len({data.digest(pair) for pair in pairs}) == len(pairs)
    assert data.digest(iter(numbered(3))) == "98fc53f7b3872464"  # a run from before must resume


def test_a_preference_batch_has_the_chosen_half_first():
    one, two = make_pairs(2)
    reference = np.array([[1, 2], [3, 4], [0, 0]], np.float32)
    batch = data.preference_batch([one, two, None], 9, reference)
    assert batch["tokens"].shape == (6, 9)
    for row, side in zip(
        (0, 1, 3, 4), (one.chosen, two.chosen, one.rejected, two.rejected), strict=True
    ):
        n = len(side)
        assert batch["tokens"][row].tolist() == [*side.tokens, *[0] * (9 - n)]
        assert batch["targets"][row].tolist() == [*side.targets, *[IGNORE] * (9 - n)]
        assert batch["segment_ids"][row].tolist() == [1] * n + [0] * (9 - n)
    assert (batch["segment_ids"][[2, 5]] == 0).all()
    assert batch["reference"].dtype == np.float32
    assert batch["reference"].tolist() == [1, 3, 0, 2, 4, 0]
    assert "reference" not in data.preference_batch([one], 9)


def test_preference_loading():
    pairs = make_pairs(7)
    reference = np.arange(14, dtype=np.float32).reshape(7, 2)
    arguments = {"pairs": 3, "length": 8, "seed": 0, "epochs": 2, "reference": reference}
    first, second = (PreferenceLoader(pairs, **arguments) for _ in range(2))
    next(first)
    second.restore(json.loads(json.dumps(first.state())))
    for a, b in zip(first, second, strict=True):
        assert_equal(a, b)
    epoch = list(PreferenceLoader(pairs, **arguments | {"epochs": 1}))
    learnt = np.concatenate([batch["segment_ids"].max(1) for batch in epoch])
    references = np.concatenate([batch["reference"] for batch in epoch])
    assert sorted(references[learnt > 0].tolist()) == list(range(14))
    with pytest.raises(ValueError, match=r"reference must have shape \(7, 2\), got \(2, 7\)"):
        PreferenceLoader(pairs, **arguments | {"reference": reference.T})
    lists = next(PreferenceLoader(pairs, **arguments | {"reference": reference.tolist()}))
    assert_equal(lists, next(PreferenceLoader(pairs, **arguments)))
    with pytest.raises(ValueError, match="the run to resume had reference=True, not False"):
        PreferenceLoader(pairs, **arguments | {"reference": None}).restore(first.state())
    with pytest.raises(ValueError, match=r"reference must have shape \(7, 2\), got \(2, 7\)"):
        data.preference_batch(pairs, 8, reference.T)
    with pytest.raises(ValueError, match="has 6 tokens, but a row takes from 1 to 5"):
        PreferenceLoader(pairs, **arguments | {"length": 5})
    with pytest.raises(ValueError, match="data: pairs must be an integer of at least 1, got 0"):
        PreferenceLoader(pairs, **arguments | {"pairs": 0})


def test_processes_share_the_pairs_that_one_would_load():
    pairs, arguments = make_pairs(7), {"length": 8, "seed": 0, "epochs": 1}
    arguments["reference"] = np.arange(1, 15, dtype=np.float32).reshape(7, 2)
    one = PreferenceLoader(pairs, pairs=4, **arguments)
    two = [
        PreferenceLoader(pairs, pairs=2, process_index=i, process_count=2, **arguments)
        for i in range(2)
    ]

    def told(*batches):
        """The references, which tell pairs apart, of those that are no padding."""
        numbers = np.concatenate([batch["reference"] for batch in batches])
        return sorted(numbers[numbers > 0].tolist())

    together = [told(*parts) for parts in zip(*two, strict=True)]
    assert together == [told(batch) for batch in one]
    assert all(together)


def test_loading_costs_little():
    # 0.4 ms a batch was measured; a step of the smallest shipped model takes 200 ms on two cores
    examples = [make_example(n) for n in range(20, 220)]
    with Loader(examples, rows=8, length=512, seed=0) as loader:
        next(loader)
        start = time.perf_counter()
        for _ in range(50):
            next(loader)
        assert (time.perf_counter() - start) / 50 < 0.05


def test_nothing_is_printed_and_no_flags_are_needed():
    code = (
        "import numpy as np; from jaxllm import data; x = np.array([1], np.int32)\n"
        "loader = data.Loader([data.Example(x, x)], rows=1, length=1, seed=0); next(loader)"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, "--some-flag"],
        capture_output=True,
        text=True,
        check=True,
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    )
    assert run.stdout == run.stderr == ""
