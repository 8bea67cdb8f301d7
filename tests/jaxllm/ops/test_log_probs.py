"""Against float64, with the gradient, in every chunking."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_as_accurate

from jaxllm.ops import linear_log_probs, log_probs
from pallas_kernels.quantize import dequantize, quantize

V, D = 37, 12


def make(dtype="float32", rows=(3, 5)):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((*rows, D)), dtype)
    head = jnp.asarray(rng.standard_normal((V, D)), dtype)
    targets = rng.integers(0, V, rows).astype(np.int32)
    targets[0, :2] = -100
    return hidden, head, jnp.asarray(targets)


def plain(hidden, head, targets, softcap=None, xp=jnp):
    logits = hidden @ head.T
    if softcap is not None:
        logits = softcap * xp.tanh(logits / softcap)
    logits = logits - xp.max(logits, axis=-1, keepdims=True)
    logits = logits - xp.log(xp.sum(xp.exp(logits), axis=-1, keepdims=True))
    found = xp.take_along_axis(logits, xp.where(targets == -100, 0, targets)[..., None], axis=-1)
    return xp.where(targets == -100, 0, found[..., 0])


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [None, 1, 4, 15, 100])
def test_each_token(chunk, softcap):
    hidden, head, targets = make()
    wide = [np.asarray(x, np.float64) for x in (hidden, head)]
    truth = plain(*wide, np.asarray(targets), softcap, np)
    ours = linear_log_probs(hidden, head, targets, softcap=softcap, chunk=chunk)
    other = plain(hidden, head, targets, softcap)
    assert_as_accurate(ours, other, truth)
    assert ours.dtype == jnp.float32
    with pytest.raises(AssertionError):
        assert_as_accurate(ours.at[1, 1].multiply(1.001), other, truth)


@pytest.mark.parametrize("chunk", [None, 4])
def test_no_tokens_have_no_log_probs(chunk):
    hidden, head, targets = (x[:0] if i != 1 else x for i, x in enumerate(make()))
    of = lambda h, w: linear_log_probs(h, w, targets, chunk=chunk)  # noqa: E731
    assert of(hidden, head).shape == (0, 5)
    assert not jax.grad(lambda w: jnp.sum(of(hidden, w)))(head).any()


@pytest.mark.parametrize("chunk", [None, 4])
def test_gradients_of_a_weighted_sum(chunk):
    hidden, head, targets = make()
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((3, 5)), jnp.float32)

    def total(function, **kwargs):
        return jax.grad(
            lambda h, w: jnp.sum(weights * function(h, w, targets, softcap=3.0, **kwargs)), (0, 1)
        )(hidden, head)

    for ours, other in zip(total(linear_log_probs, chunk=chunk), total(plain), strict=True):
        # float32 sums of 15 terms of order 1
        np.testing.assert_allclose(ours, other, atol=5e-6)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(1.001 * ours, other, atol=5e-6)


def test_a_packed_head_is_its_numbers():
    hidden, head, targets = make()
    hidden = jnp.tile(hidden, 8)[..., :64]
    packed = quantize(jnp.tile(head, (1, 8))[:, :64], "int8")
    numbers = dequantize(packed, jnp.float32)

    def total(h, w):
        return jnp.sum(linear_log_probs(h, w, targets, chunk=4) ** 2)

    ours, plainly = (jax.jit(jax.value_and_grad(total))(hidden, w) for w in (packed, numbers))
    for x, y in zip(ours, plainly, strict=True):
        # a scale multiplies sums there, and codes here; sums of up to 64 terms
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(ours[0], total(hidden, 1.01 * numbers), rtol=1e-4)


@pytest.mark.usefixtures("strict_jax")
def test_bfloat16_sums_in_float32():
    hidden, head, targets = make("bfloat16")
    ours = linear_log_probs(hidden, head, targets)
    wide = linear_log_probs(hidden.astype("float32"), head.astype("float32"), targets)
    np.testing.assert_allclose(ours, wide, atol=1e-5)  # products of bfloat16 are exact in float32


def test_no_array_of_all_logits():
    hidden, head, targets = make(rows=(8, 64))
    text = str(
        jax.make_jaxpr(
            jax.grad(lambda h: jnp.sum(linear_log_probs(h, head, targets, chunk=32) ** 2))
        )(hidden)
    )
    sizes = [int(a) * int(b) for a, b in re.findall(r"f32\[(\d+),(\d+)\]", text)]
    assert 32 * V in sizes
    assert 512 * V not in sizes
    assert not re.search(rf"f32\[16,32,{V}\]", text)  # nor kept for the backward pass


@pytest.mark.own_errors
def test_what_does_not_fit_is_one_sentence():
    hidden, head, targets = make()
    with pytest.raises(ValueError, match=r"hidden \[3, 5, 12\] and head \[12, 37\] must be"):
        linear_log_probs(hidden, head.T, targets)
    with pytest.raises(ValueError, match=r"targets must be integers \[3, 5\], .* int32\[3\]"):
        linear_log_probs(hidden, head, targets[:, 0])
    with pytest.raises(ValueError, match="linear_log_probs: hidden is int32; bfloat16, float16"):
        linear_log_probs(hidden.astype(jnp.int32), head, targets)
    with pytest.raises(ValueError, match="linear_log_probs: head is int8"):
        linear_log_probs(hidden, head.astype(jnp.int8), targets)
    with pytest.raises(ValueError, match=r"^linear_log_probs: targets must be .* float32\[3, 5\]"):
        linear_log_probs(hidden, head, targets.astype(jnp.float32))
    with pytest.raises(ValueError, match="linear_log_probs: softcap must be positive and"):
        linear_log_probs(hidden, head, targets, softcap=0.0)
    for chunk in (0, -1, 2.0):  # zero does not mean that it is chosen
        with pytest.raises(ValueError, match=f"chunk must be an integer .*, got {chunk}$"):
            linear_log_probs(hidden, head, targets, chunk=chunk)
    with pytest.raises(ValueError, match=r"^log_probs: logits must be floats \[.., V\], got int32"):
        log_probs(targets, targets[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_logits(dtype):
    hidden, head, targets = make(dtype)
    logits = hidden @ head.T
    truth = plain(np.asarray(logits, np.float64), np.eye(V), np.asarray(targets), xp=np)
    ours = log_probs(logits, targets)
    assert_as_accurate(ours, plain(logits.astype("float32"), jnp.eye(V), targets), truth)
    assert ours.dtype == jnp.float32
    with pytest.raises(AssertionError):
        assert_as_accurate(ours.at[1, 1].multiply(1.001), ours, truth)


@pytest.mark.parametrize("outside", [V, -1])
@pytest.mark.parametrize("op", [linear_log_probs, log_probs])
def test_a_target_outside_the_vocabulary(op, outside):
    """An error where it can be seen, and NaN for that token alone where it is traced."""
    *arrays, targets = make()
    if op is log_probs:
        arrays = [arrays[0] @ arrays[1].T]
    wrong = targets.at[1, 1].set(outside)
    with pytest.raises(ValueError, match=f"^{op.__name__}: target {outside} is outside the voc"):
        op(*arrays, wrong)
    uncounted = jnp.where(wrong == -100, jnp.int32(outside), wrong)
    assert np.all(np.isfinite(op(*arrays, uncounted, ignore_index=outside)))
    found = np.isnan(jax.jit(op)(*arrays, wrong))
    assert found[1, 1]
    assert found.sum() == 1
