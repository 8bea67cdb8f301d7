"""The plain path of attention: the log-sum-exp and its gradient, sinks, rows that see nothing.

What it shares with every implementation is tested where they are, in tests/jaxllm/ops.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from numerics import assert_as_accurate

from pallas_kernels.attention_reference import attention_reference, check, visible

pytestmark = pytest.mark.usefixtures("strict_jax")

B, T, S, N, K, H = 2, 5, 9, 4, 2, 8
SINKS = np.asarray([0.5, -1.0, 2.0, -np.inf], np.float32)
ALL = {"causal": False}
CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": ALL,
    "a blind row": {"kv_lengths": np.asarray([0, 3], np.int32), "window": 2},
    "past the end": {"kv_lengths": np.asarray([11, 10], np.int32), "window": 4},
    "sinks": {"sinks": SINKS, "softcap": 2.0},
    "sinks alone": {"sinks": SINKS, "kv_lengths": np.asarray([0, 3], np.int32)},
    "segments": {
        **ALL,
        "q_segment_ids": np.asarray([[1, 1, 2, 2, 3], [0, 0, 0, 9, 9]], np.int32),
        "kv_segment_ids": np.asarray([[1, 1, 1, 2, 2, 2, 3, 3, 4], [0] * 9], np.int32),
    },
}


def numbers(dtype: Any) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """q, k and v; the cotangents of the result and of the log-sum-exp."""
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    *qkv, d_out = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return qkv, d_out, jnp.asarray(rng.standard_normal((B, T, N)), jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CALLS)
def test_log_sum_exp_and_gradients(name, dtype):
    kwargs = CALLS[name]
    qkv, d_out, d_lse = numbers(dtype)
    sinks = [jnp.asarray(kwargs["sinks"])] if "sinks" in kwargs else []
    rest = {n: x for n, x in kwargs.items() if n != "sinks"}
    rest = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, rest)

    def call(q, k, v, *sinks):
        more = {"sinks": sinks[0]} if sinks else {}
        return attention_reference(q, k, v, **rest, **more, return_lse=True)

    (out, lse), pull = jax.vjp(call, *qkv, *sinks)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    ours = (out, *pull((d_out, d_lse)))
    args, cotangent = [np.asarray(x) for x in qkv], np.asarray(d_out)
    expected = []
    for kind in (dtype, np.float64):
        result = oracles.attention(*args, **kwargs, return_lse=True, dtype=kind)
        back = {"d_out": cotangent, "d_lse": np.asarray(d_lse), "dtype": kind}
        expected.append((*result, oracles.attention(*args, **kwargs, **back)))
    (plain, plain_lse, plain_back), (truth, true_lse, true_back) = expected
    for mine, near, exact in zip(ours, (plain, *plain_back), (truth, *true_back), strict=True):
        assert_as_accurate(mine, near, exact)
    blind = np.isneginf(true_lse)
    np.testing.assert_array_equal(np.isneginf(np.asarray(lse)), blind)
    assert blind.any() == (name in ("a blind row", "sinks alone", "segments"))
    kept = [np.where(blind, 0, np.asarray(x)) for x in (lse, plain_lse, true_lse)]
    assert_as_accurate(*kept)
    for result in ours[:2]:
        assert np.all(np.asarray(result)[blind] == 0)
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(kept[0] + 0.05, kept[1], kept[2])


def test_what_no_query_sees_may_hold_anything():
    (q, k, v), *_ = numbers(jnp.float32)
    held = jnp.asarray([4, 9], jnp.int32)
    unseen = (jnp.arange(S)[None, :] >= held[:, None])[:, :, None, None]
    most = jnp.finfo(jnp.float32).max
    junk = jnp.where(unseen, jnp.nan, k), jnp.where(unseen, most, v)
    for causal in (False, True):
        kwargs = {"causal": causal, "kv_lengths": held}
        np.testing.assert_array_equal(
            attention_reference(q, *junk, **kwargs), attention_reference(q, k, v, **kwargs)
        )


def test_no_keys_and_no_queries():
    (q, k, v), *_ = numbers(jnp.float32)
    out, lse = attention_reference(q, k[:, :0], v[:, :0], return_lse=True)
    assert np.all(np.asarray(out) == 0)
    assert np.all(np.isneginf(lse))
    assert attention_reference(q[:, :0], k, v).shape == (B, 0, N, H)


def test_a_mask_is_made_where_one_is_needed():
    assert visible(5, 9, causal=False, window=None) is None
    assert visible(1, 9, causal=True, window=None) is None
    assert visible(1, 9, causal=True, window=9) is None
    mask = np.asarray(visible(3, 5, causal=True, window=None))
    np.testing.assert_array_equal(mask, np.tri(3, 5, 2, bool)[None])
    lengths = jnp.asarray([5, 1], jnp.int32)
    for window in (2**31 - 1, 10**12):  # all keys, though their sum with a key is beyond 32 bits
        mask: Any = visible(3, 5, causal=False, window=window, kv_lengths=lengths)
        np.testing.assert_array_equal(mask[:, 0].sum(axis=1), [5, 1])


def test_shapes_suffice_for_the_check():
    q, k = (jax.ShapeDtypeStruct((B, n, N, H), jnp.bfloat16) for n in (T, S))
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32)
    nothing: dict[str, Any] = dict.fromkeys(
        ("window", "softcap", "q_segment_ids", "kv_segment_ids", "sinks")
    )
    nothing |= {"causal": True, "scale": None}
    check("attention", q, k, k, **nothing, kv_lengths=lengths)
    lengths = jax.ShapeDtypeStruct((3,), jnp.int32)
    with pytest.raises(ValueError, match=r"^mine: kv_lengths has shape \(3,\), not \(2,\)$"):
        check("mine", q, k, k, **nothing, kv_lengths=lengths)
