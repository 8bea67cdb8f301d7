"""The threshold of top-k and top-p: kept sets equal those of a sort.

The interpreter cannot read what another block of a cluster has: there a row has one block, and the
tests at the end try eight on a GPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import H200
from kernels import interpreted

from pallas_kernels import device as device_lib
from pallas_kernels.sampling_threshold import (
    LOWEST,
    sampling_threshold,
    sampling_threshold_reference,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")


def case(scores: np.ndarray, top_k: Any, top_p: Any) -> tuple[jax.Array, ...]:
    """Keys in the order of float32 scores, and the rest of the arguments."""
    scores = scores.astype(np.float32)
    bits = np.where(scores == 0, np.float32(0), scores).view(np.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ratio = np.exp(scores - scores.max(-1, keepdims=True))
    rows = len(scores)
    return (
        jnp.asarray(keys),
        jnp.asarray(ratio),
        jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), (rows,)),
        jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), (rows,)),
    )


def kept(keys, ratio, top_k, top_p) -> np.ndarray:
    """Which stay, by a sort in float64: those no lower than the last that has to."""
    found = []
    for key, mass, k, p in zip(*map(np.asarray, (keys, ratio, top_k, top_p)), strict=True):
        order = np.argsort(-key.astype(np.int64), kind="stable")
        stays = np.ones(len(key), bool)
        if 0 < k < len(key):
            stays &= key >= key[order[k - 1]]
        if p < 1:
            total = np.cumsum(np.where(stays, mass, 0).astype(np.float64)[order])
            above = np.array([total[key[order] > x][-1:].sum() for x in key])
            stays &= (above < p * total[-1]) | (key == key.max())  # at least the largest
        found.append(stays)
    return np.stack(found)


RANDOM = np.random.default_rng(0)
CASES = {
    "top-k": case(3 * RANDOM.standard_normal((2, 700)), [5, 300], 1),
    "top-p": case(3 * RANDOM.standard_normal((3, 513)), 0, [0.9, 0.3, 0.999]),
    "both, one off in each row": case(2 * RANDOM.standard_normal((2, 1025)), [20, 0], [1, 0.8]),
    "both": case(4 * RANDOM.standard_normal((1, 1536)), 50, 0.7),
    "nothing": case(RANDOM.standard_normal((1, 64)), 0, 1),
    "k of the vocabulary": case(RANDOM.standard_normal((1, 64)), 64, 1),
    "one": case(RANDOM.standard_normal((2, 37)), 1, 0.5),
    "a vocabulary of one": case(RANDOM.standard_normal((1, 1)), 1, 0.5),
    "equal scores": case(np.full((1, 130), 1.5), 3, 0.1),
    "ties at the border": case(np.repeat(np.arange(10.0), 7)[None], 10, 1),
    "dropped before": case(np.where(np.arange(99) % 3, -np.inf, np.arange(99) / 9)[None], 0, 0.9),
    "p next to nothing": case(RANDOM.standard_normal((1, 90)), 0, 1e-9),
    "p of 0": case(RANDOM.standard_normal((1, 90)), 0, 0),
    "k beyond the vocabulary": case(RANDOM.standard_normal((1, 64)), 65, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_is_what_a_sort_keeps(name):
    arguments = CASES[name]
    ours = interpreted(lambda *a: sampling_threshold(*a, interpret=True), *arguments)
    assert ours.dtype == jnp.int32
    np.testing.assert_array_equal(ours, sampling_threshold_reference(*arguments))
    np.testing.assert_array_equal(arguments[0] >= ours[:, None], kept(*arguments))


def test_the_check_can_fail():
    keys, ratio, top_k, top_p = CASES["top-p"]
    lowest = sampling_threshold_reference(keys, ratio, top_k, top_p)
    one_less = keys >= (lowest + 1)[:, None]
    assert (np.asarray(one_less) != kept(keys, ratio, top_k, top_p)).any(axis=1).all()


def test_nothing_dropped_is_the_lowest():
    assert sampling_threshold_reference(*CASES["nothing"]) == LOWEST


def test_the_reference_without_compilation():
    with jax.disable_jit():
        lowest = sampling_threshold_reference(*CASES["both"])
    np.testing.assert_array_equal(lowest, sampling_threshold_reference(*CASES["both"]))


def test_why_not():
    def reason(b, v, device=H200):
        keys, ratio = (jax.ShapeDtypeStruct((b, v), dtype) for dtype in (jnp.int32, jnp.float32))
        settings = (jax.ShapeDtypeStruct((b,), dtype) for dtype in (jnp.int32, jnp.float32))
        return why_not(keys, ratio, *settings, device=device)

    for v in (1, 32000, 128256, 151936, 200064):
        assert reason(4, v) is None
    assert reason(0, 7) == "nothing to search: keys are [0, 7]"
    assert reason(1, 262144) == "262144 scores do not fit on 8 multiprocessors"
    assert reason(1, 7, device_lib.Device("cpu")) == "needs an NVIDIA GPU, found cpu"
    with pytest.raises(NotImplementedError, match="^sampling_threshold: cannot run this call"):
        sampling_threshold(*CASES["one"])


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("place", "array", "said"),
    [
        (0, [[1, 2]], r"keys must be an array, got \[\[1, 2\]\]"),
        (0, jnp.zeros(3, jnp.int32), r"keys must be \[B, V\], got \[3\]"),
        (0, jnp.zeros((2, 37)), r"keys must be int32\[2, 37\], got float32\[2, 37\]"),
        (1, jnp.zeros((2, 36)), r"ratio must be float32\[2, 37\], got float32\[2, 36\]"),
        (2, jnp.zeros(3, jnp.int32), r"top_k must be int32\[2\], got int32\[3\]"),
        (3, jnp.zeros(2, jnp.int32), r"top_p must be float32\[2\], got int32\[2\]"),
    ],
)
def test_bad_calls_are_refused(place, array, said):
    arguments: list[Any] = list(CASES["one"])
    arguments[place] = array
    with pytest.raises(ValueError, match=f"^sampling_threshold: {said}"):
        sampling_threshold(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    arguments = CASES[name]
    ours = sampling_threshold(*arguments)
    np.testing.assert_array_equal(ours, sampling_threshold_reference(*arguments))
    np.testing.assert_array_equal(arguments[0] >= ours[:, None], kept(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("v", [32000, 128256, 151936, 200064])
def test_large_vocabularies_on_a_gpu(v):
    """Rows whose parts on some of the multiprocessors hold nothing that stays."""
    scores = 3 * np.random.default_rng(1).standard_normal((5, v))
    arguments = case(np.sort(scores, axis=-1), [50, 0, 1000, 1, 0], [0.9, 0.9, 1, 1, 0.999])
    ours = sampling_threshold(*arguments)
    np.testing.assert_array_equal(ours, sampling_threshold_reference(*arguments))
    for other in (sampling_threshold(*arguments), sampling_threshold(*(a[2:] for a in arguments))):
        np.testing.assert_array_equal(other, ours[-len(other) :])


@pytest.mark.parametrize(
    "run", [functools.partial(sampling_threshold, interpret=True), sampling_threshold_reference]
)
def test_no_gradient_goes_through_it(run):
    def loss(ratio, top_p):
        found = run(jnp.array([[1, 2]], jnp.int32), ratio, jnp.array([1], jnp.int32), top_p)
        return jnp.sum(2 * ratio) + 0 * jnp.sum(found.astype(jnp.float32))

    d_ratio, d_p = jax.grad(loss, argnums=(0, 1))(jnp.array([[0.5, 1.0]]), jnp.array([0.5]))
    np.testing.assert_array_equal(d_ratio, [[2, 2]])
    np.testing.assert_array_equal(d_p, [0])
