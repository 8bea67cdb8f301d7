"""Token cross entropy against float64."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import absent
from kernels import interpreted
from numerics import assert_as_accurate

from jaxllm import ops
from jaxllm.ops import cross_entropy, linear_cross_entropy
from jaxllm.ops.loss import chunk_tokens
from pallas_kernels import _compat
from pallas_kernels.cross_entropy import Config
from pallas_kernels.cross_entropy import linear_cross_entropy as kernel_of
from pallas_kernels.quantize import dequantize, quantize

pytestmark = pytest.mark.usefixtures("strict_jax")


def case(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(4 * rng.standard_normal((2, 5, 13)), dtype)
    targets = rng.integers(0, 13, (2, 5))
    targets[0, 1] = targets[1, 3:] = -100
    return logits, jnp.asarray(targets, jnp.int32)


def truth(logits, targets, **kwargs) -> float:
    return oracles.cross_entropy(
        np.asarray(logits).reshape(-1, 13), np.asarray(targets).reshape(-1), **kwargs
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sum_and_count(dtype):
    logits, targets = case(dtype)
    total, count = jax.jit(cross_entropy)(logits, targets)
    assert (total.dtype, count.dtype, int(count)) == (jnp.float32, jnp.int32, 7)
    exact = np.array(truth(logits, targets))
    # Float32 inside whatever the logits are: only roundings of sums near 30
    assert_as_accurate(total, exact, exact)
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(1.00001 * total, exact, exact)


def test_gradient_is_softmax_minus_one_hot():
    logits, targets = case()
    gradient = jax.jit(jax.grad(lambda x: cross_entropy(x, targets)[0]))(logits)
    p = np.exp(oracles.log_softmax(np.asarray(logits)))
    expected = (p - np.eye(13)[np.maximum(targets, 0)]) * (np.asarray(targets) != -100)[..., None]
    assert_as_accurate(gradient, expected, expected)
    assert np.all(np.asarray(gradient)[1, 3:] == 0)
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(np.asarray(gradient) + 1e-5, expected, expected)


def test_large_logits_do_not_overflow():
    logits = jnp.asarray([[[1e4, 0.0, -1e4], [-3e4, 1.0, 3e4]]])
    total, _ = cross_entropy(logits, jnp.asarray([[1, 2]], jnp.int32))
    assert float(total) == 1e4


def test_nothing_to_count():
    logits, targets = case()
    total, count = cross_entropy(logits, jnp.full_like(targets, -100))
    assert (float(total), int(count)) == (0.0, 0)


def test_another_ignored_index():
    logits, targets = case()
    targets = jnp.where(targets == -100, jnp.int32(3), targets)
    total, count = cross_entropy(logits, targets, ignore_index=3)
    assert int(count) == int(np.sum(np.asarray(targets) != 3))
    assert float(total) == pytest.approx(truth(logits, targets, ignore_index=3), rel=1e-6)


DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
KINDS = [
    {},
    {"softcap": 3.0},
    {"z_loss": 0.1},
    {"softcap": 5.0, "z_loss": 1e-2, "ignore_index": 4},
]


def hidden_case(dtype=jnp.float32, head_dtype=None, *, tokens=(3, 7), vocab=29, width=12):
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.standard_normal((*tokens, width)), dtype)
    head = jnp.asarray(rng.standard_normal((vocab, width)), head_dtype or dtype)
    targets = rng.integers(0, vocab, tokens)
    targets[0, 1] = targets[1, 3:] = -100
    return hidden, head, jnp.asarray(targets, jnp.int32)


def with_gradients(*operands, **kwargs):
    """The sum, and its gradients by hidden states and head."""
    hidden, head, targets = operands
    f = lambda *x: linear_cross_entropy(*x, targets, **kwargs)[0]  # noqa: E731
    total, gradients = jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, head)
    return total, *gradients


def plain(hidden, head, targets, *, ignore_index=-100, softcap=None, z_loss=0.0):
    """The same with all logits, rounded where the op must: its gradient by logits, and results."""
    dtype = hidden.dtype
    rows = hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32)
    matrix, targets = head.astype(dtype).astype(jnp.float32), targets.reshape(-1)

    def sum_of(logits):
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        counted = targets != ignore_index
        lse = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, jnp.where(counted, targets, 0)[:, None], 1)[:, 0]
        losses = lse - chosen + z_loss * lse * lse
        return jnp.sum(jnp.where(counted, losses, jnp.float32(0)))

    total, d_logits = jax.value_and_grad(sum_of)(jnp.dot(rows, matrix.T, precision="highest"))
    d_logits = d_logits.astype(dtype).astype(jnp.float32)
    d_hidden = jnp.dot(d_logits, matrix, precision="highest").astype(dtype)
    d_head = jnp.dot(d_logits.T, rows, precision="highest").astype(head.dtype)
    return total, d_hidden.reshape(hidden.shape), d_head


def exact(hidden, head, targets, **kwargs):
    """float64, of the numbers as they are; the head's are rounded to hidden's dtype by contract."""
    head = np.asarray(head.astype(hidden.dtype).astype(jnp.float32))
    rows = np.asarray(hidden.astype(jnp.float32)).reshape(-1, hidden.shape[-1])
    total, d_hidden, d_head = oracles.linear_cross_entropy(
        rows, head, np.asarray(targets).reshape(-1), **kwargs
    )
    return np.array(total), d_hidden.reshape(hidden.shape), d_head


def as_float32(x):
    return np.asarray(x.astype(jnp.float32))


@pytest.mark.parametrize("kwargs", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_cross_entropy_and_its_gradients(dtype, kwargs):
    hidden, head, targets = hidden_case(dtype)
    ignored = kwargs.get("ignore_index", -100)
    operands = hidden, head, jnp.where(targets == -100, jnp.int32(ignored), targets)
    truth = exact(*operands, **kwargs)
    plainly = plain(*operands, **kwargs)
    for chunk in (None, 4):  # one chunk; the last one to be filled up
        found = with_gradients(*operands, chunk=chunk, **kwargs)
        assert [x.dtype for x in found] == [jnp.float32, dtype, dtype]
        for ours, other, true in zip(found, plainly, truth, strict=True):
            assert_as_accurate(as_float32(ours), as_float32(other), true)
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(1.02 * as_float32(found[2]), as_float32(plainly[2]), truth[2])
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(1.0001 * as_float32(found[0]), as_float32(plainly[0]), truth[0])


@pytest.mark.parametrize("head_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_states_and_head_may_differ_in_dtype(dtype, head_dtype):
    operands = hidden_case(dtype, head_dtype)
    found = with_gradients(*operands, chunk=5)
    assert [x.dtype for x in found] == [jnp.float32, dtype, head_dtype]
    for ours, other, true in zip(found, plain(*operands), exact(*operands), strict=True):
        assert_as_accurate(as_float32(ours), as_float32(other), true)


@pytest.mark.parametrize("chunk", [None, 1, 4, 21, 100])
def test_it_is_cross_entropy_of_the_logits(chunk):
    hidden, head, targets = hidden_case()
    logits = ops.linear(hidden, head)
    f = functools.partial(linear_cross_entropy, chunk=chunk)
    total, count = jax.jit(f)(hidden, head, targets)
    other, other_count = cross_entropy(logits, targets)
    assert (total.dtype, count.dtype, int(count)) == (jnp.float32, jnp.int32, int(other_count))
    np.testing.assert_allclose(total, other, rtol=1e-6)  # both sum 16 terms in float32


def test_the_gradient_is_scaled_by_what_stands_above():
    operands = hidden_case()
    _, d_hidden, d_head = with_gradients(*operands)
    f = lambda h, w: 8.0 * linear_cross_entropy(h, w, operands[2])[0]  # noqa: E731
    scaled = jax.jit(jax.grad(f, (0, 1)))(*operands[:2])
    np.testing.assert_array_equal(scaled[0], 8 * d_hidden)  # a power of two is exact
    np.testing.assert_array_equal(scaled[1], 8 * d_head)


def test_small_probabilities_have_gradients_in_float16():
    """One of 1e-9 is far below float16's least number; a loss scale of 2**15 brings it back."""
    head = jnp.asarray([[20.0, 0.0], [0.0, 1.0]])  # p of the second word is exp(-20)
    hidden, targets = jnp.asarray([[1, 0]], jnp.float16), jnp.zeros(1, jnp.int32)

    def scaled(hidden, head):
        return 2.0**15 * linear_cross_entropy(hidden, head, targets)[0]

    d_hidden, d_head = jax.jit(jax.grad(scaled, (0, 1)))(hidden, head)
    for gradient in (d_hidden[0, 1], d_head[1, 0]):  # 7 bits are left
        np.testing.assert_allclose(gradient, 2.0**15 * np.exp(-20), rtol=0.01)


@pytest.mark.parametrize("z_loss", [1e-2, 1.0, 300.0])
def test_a_large_z_loss_has_gradients_in_float16(z_loss):
    hidden, head, targets = hidden_case(jnp.float16)
    _, *ours = with_gradients(hidden, head, targets, z_loss=z_loss)
    wide = (hidden.astype(jnp.float32), head.astype(jnp.float32), targets)
    _, *exact = with_gradients(*wide, z_loss=z_loss)
    for mine, true in zip(ours, exact, strict=True):
        bound = 1e-3 * float(jnp.abs(true).max())  # measured: 4.2e-4, a digit of float16 is 4.9e-4
        np.testing.assert_allclose(mine, true, rtol=0, atol=bound)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(1.01 * mine, true, rtol=0, atol=bound)


def test_calls_alike_are_compiled_once(caplog):
    operands = hidden_case(width=13)
    f = lambda *x: linear_cross_entropy(*x, operands[2])[0]  # noqa: E731

    def compiled() -> int:
        caplog.clear()
        with jax.log_compiles():
            jax.block_until_ready(jax.value_and_grad(f, (0, 1))(*operands[:2]))
        return sum("Compiling" in record.getMessage() for record in caplog.records)

    assert compiled()
    assert not compiled()


def dots(f, *args) -> int:
    return str(jax.make_jaxpr(f)(*args)).count("dot_general")


def test_no_gradient_is_made_that_is_not_asked_for():
    hidden, head, targets = hidden_case()
    f = lambda h, w: linear_cross_entropy(h, w, targets)[0]  # noqa: E731
    assert dots(f, hidden, head) == 1
    assert dots(jax.grad(f, 0), hidden, head) == 2
    assert dots(jax.grad(f, 1), hidden, head) == 2
    assert dots(jax.grad(f, (0, 1)), hidden, head) == 3


def temporary_bytes(f, *args) -> int:
    program = jax.jit(jax.value_and_grad(f, (0, 1))).lower(*args).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_no_array_of_all_logits_is_made():
    tokens, vocab, width = 8192, 4096, 16
    hidden, head = jnp.zeros((tokens, width)), jnp.zeros((vocab, width))
    targets = jnp.zeros(tokens, jnp.int32)
    all_logits = 4 * tokens * vocab
    chunked = lambda h, w: linear_cross_entropy(h, w, targets, chunk=512)[0]  # noqa: E731
    whole = lambda h, w: cross_entropy(ops.linear(h, w)[None], targets[None])[0]  # noqa: E731
    assert temporary_bytes(chunked, hidden, head) < all_logits / 4  # a sixteenth, three times
    assert temporary_bytes(whole, hidden, head) >= all_logits


def test_chunks_are_few_and_equal():
    assert chunk_tokens(65536, 32_000) == 4096  # 500 MiB of logits
    assert chunk_tokens(65536, 128_256) == 1024
    assert chunk_tokens(65536, 1_000) == 8192
    assert chunk_tokens(100, 128_256) == 100
    assert chunk_tokens(1025, 128_256) == 513
    assert chunk_tokens(0, 10) == 1


def test_nothing_to_count_has_no_gradient():
    hidden, head, targets = hidden_case()
    total, *gradients = with_gradients(hidden, head, jnp.full_like(targets, -100))
    assert float(total) == 0.0
    assert not any(np.any(np.asarray(g)) for g in gradients)
    total, *_ = with_gradients(hidden[:0], head, targets[:0])
    assert float(total) == 0.0


@pytest.mark.slow
@pytest.mark.skipif(not _compat.WRITES_REFERENCES, reason="the kernel needs jax 0.11")
@pytest.mark.parametrize("chunk", [None, 4])
def test_the_kernel_is_told_what_the_op_is(chunk):
    """chunk: of tokens, which the kernel takes by 128."""
    hidden, head, targets = hidden_case(jnp.bfloat16, jnp.float32, tokens=(3, 47), width=64)
    targets = jnp.where(targets == -100, jnp.int32(5), targets)
    keywords = {"softcap": 20.0, "z_loss": 1e-3, "ignore_index": 5}

    def ours(hidden, head):
        call = functools.partial(linear_cross_entropy, implementation="pallas-interpret")
        return call(hidden, head, targets, chunk=chunk, **keywords)

    def kernel(hidden, head):
        config = None if chunk is None else Config(chunk=128)
        rows, ids, rest = (
            hidden.reshape(-1, 64),
            targets.reshape(-1),
            {**keywords, "config": config},
        )
        return kernel_of(rows, head, ids, reduction="sum", interpret=True, **rest)

    (total, count), gradients = interpreted(
        jax.value_and_grad(ours, (0, 1), has_aux=True), hidden, head
    )
    other, others = interpreted(jax.value_and_grad(kernel, (0, 1)), hidden, head)
    assert (float(total), int(count)) == (float(other), int(np.sum(np.asarray(targets) != 5)))
    for ours, theirs in zip(gradients, others, strict=True):
        np.testing.assert_array_equal(as_float32(ours), as_float32(theirs))


def test_auto_takes_the_kernel_where_it_can_run():
    call = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((2, 2048, 1024), (32000, 1024))]
    call.append(jax.ShapeDtypeStruct((2, 2048), jnp.int32))
    narrow = [jax.ShapeDtypeStruct((*x.shape[:-1], 1000), x.dtype) for x in call[:2]]
    with absent("NVIDIA H200"):
        found = ops.explain("linear_cross_entropy", *call)
        refused = ops.explain("linear_cross_entropy", *narrow, call[2])["pallas"]
    assert found["xla"] is None
    if _compat.WRITES_REFERENCES:
        assert found["pallas"] is None
    assert refused == "D = 1000 is no multiple of 64"


@pytest.mark.own_errors
def test_what_cannot_be_is_refused():
    hidden, head, targets = hidden_case()
    with pytest.raises(ValueError, match=r"hidden \[3, 7, 12\] and head \[29, 11\] must be"):
        linear_cross_entropy(hidden, head[:, 1:], targets)
    with pytest.raises(
        ValueError, match=r"targets must be integers \[3, 7\], one a token, got int"
    ):
        linear_cross_entropy(hidden, head, targets[1:])
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: head \[0, 12\] is empty"):
        linear_cross_entropy(hidden[:0], head[:0], targets[:0])
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: head \[29, 0\] is empty"):
        linear_cross_entropy(hidden[..., :0], head[:, :0], targets)
    with pytest.raises(ValueError, match="hidden is int32"):
        linear_cross_entropy(hidden.astype(jnp.int32), head, targets)
    with pytest.raises(ValueError, match=r"one a token, got float32\[3, 7\]"):
        linear_cross_entropy(hidden, head, targets.astype(jnp.float32))
    for softcap in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"softcap must be positive and .* got {softcap}"):
            linear_cross_entropy(hidden, head, targets, softcap=softcap)
    for z_loss in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"z_loss must be a finite number, got {z_loss}"):
            linear_cross_entropy(hidden, head, targets, z_loss=z_loss)
    for chunk in (0, 2.0, True):
        with pytest.raises(ValueError, match=f"^linear_cross_entropy: chunk must .*, got {chunk}$"):
            linear_cross_entropy(hidden, head, targets, chunk=chunk)
    with pytest.raises(ValueError, match="no implementation is named 'cudnn'"):
        linear_cross_entropy(hidden, head, targets, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="takes hidden states in bfloat16, got float32"):
        linear_cross_entropy(hidden, head, targets, implementation="pallas-interpret")


@pytest.mark.own_errors
def test_what_cannot_be_is_refused_of_logits():
    logits, targets = case()
    wrong = r"^cross_entropy: targets must be integers \[2, 5\], one a token, got "
    with pytest.raises(ValueError, match=wrong + r"int32\[1, 5\]"):  # would be broadcast
        cross_entropy(logits, targets[:1])
    with pytest.raises(ValueError, match=wrong + r"float32\[2, 5\]"):
        cross_entropy(logits, targets.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"logits must be floats \[.., V\], got int32\[2, 5, 13\]"):
        cross_entropy(logits.astype(jnp.int32), targets)
    with pytest.raises(ValueError, match="^cross_entropy: ignore_index must be an integer of 32 b"):
        cross_entropy(logits, targets, ignore_index=True)


@pytest.mark.parametrize("bad", [13, 1000, -1])
def test_a_target_outside_the_logits_is_refused_or_shows(bad):
    logits, targets = case()
    targets = targets.at[1, 2].set(bad)
    with pytest.raises(
        ValueError, match=f"^cross_entropy: target {bad} is outside the voc.* of 13"
    ):
        cross_entropy(logits, targets)
    assert np.isnan(jax.jit(cross_entropy)(logits, targets)[0])


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int16, jnp.uint32])
def test_targets_of_any_integers(dtype):
    """Of those without a sign none is -100, of 8 bits 156 neither."""
    hidden, head, targets = hidden_case(vocab=300)
    targets = (jnp.maximum(targets, 0) % 100).at[0, 0].set(min(jnp.iinfo(dtype).max, 156))
    logits = ops.linear(hidden, head)
    for f, operands in ((linear_cross_entropy, (hidden, head)), (cross_entropy, (logits,))):
        total, count = f(*operands, targets.astype(dtype))
        assert int(count) == targets.size
        assert float(total) == float(f(*operands, targets)[0])


@pytest.mark.slow
@pytest.mark.skipif(not _compat.WRITES_REFERENCES, reason="the kernel needs jax 0.11")
def test_the_kernel_counts_targets_without_a_sign():
    """156 is -100 in 8 bits; and a cap may be an array."""
    hidden, head, _ = hidden_case(jnp.bfloat16, jnp.bfloat16, tokens=(2, 4), width=64, vocab=200)
    targets = jnp.asarray([156, 156, 5, 3], jnp.uint8)
    call = functools.partial(linear_cross_entropy, hidden[0], head, softcap=jnp.float32(20))
    total, count = call(targets, implementation="pallas-interpret")
    wanted, all_four = call(targets.astype(jnp.int32), implementation="xla")
    assert int(count) == int(all_four) == 4
    np.testing.assert_allclose(total, wanted, rtol=1e-3)


@pytest.mark.parametrize("wanted", [0, 1, (0, 1)])
def test_within_shard_map_gradients_are_those_of_all_rows(wanted):
    """Of a head that each device has whole; JAX checks what differs between them."""
    hidden, head, targets = hidden_case()
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def mean(hidden, head, targets):
        sums = linear_cross_entropy(hidden, head, targets, chunk=4, implementation="xla")
        total, count = (jax.lax.psum(x.astype(jnp.float32), "data") for x in sums)
        return total / count

    rows, whole = jax.P("data"), jax.P()
    spread = jax.shard_map(mean, mesh=mesh, in_specs=(rows, whole, rows), out_specs=whole)
    found = jax.jit(jax.value_and_grad(spread, wanted))(hidden, head, targets)

    def alone(hidden, head):
        total, count = linear_cross_entropy(hidden, head, targets, implementation="xla")
        return total / count.astype(jnp.float32)

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-6),
        found,
        jax.value_and_grad(alone, wanted)(hidden, head),
    )


def test_within_shard_map_targets_may_be_mapped_one_by_one():
    hidden, head, targets = hidden_case(tokens=(2, 4))
    hidden, targets = hidden[0], targets[0]
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    call = functools.partial(linear_cross_entropy, implementation="xla")
    each = jax.vmap(lambda h, w, t: call(h, w, t)[0], (0, None, 0))
    specs = (jax.P("data"), jax.P(), jax.P("data"))
    spread = jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=jax.P("data"))
    found = jax.jit(spread)(hidden, head, targets)
    np.testing.assert_allclose(found, each(hidden, head, targets), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_nothing_is_float64_where_that_is_on(dtype):
    with jax.enable_x64(True):
        hidden, head, targets = hidden_case(dtype)

        def total(hidden, head):
            return linear_cross_entropy(hidden, head, targets, implementation="xla")[0]

        for run in (total, jax.value_and_grad(total, (0, 1))):
            assert "f64[" not in str(jax.make_jaxpr(run)(hidden, head))


FOUR = """
import jax, jax.numpy as jnp, numpy as np
from jaxllm.ops import linear_cross_entropy

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
random = np.random.default_rng(0)
hidden, head = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in ((8, 16), (50, 16)))
targets = jnp.asarray(random.integers(0, 50, 8)).at[2].set(-100)

def mean(hidden, head, targets, all_rows=lambda x: x):
    total, count = linear_cross_entropy(hidden, head, targets, implementation="xla")
    return all_rows(total) / all_rows(count)

spread = jax.shard_map(
    lambda *x: mean(*x, lambda y: jax.lax.psum(y, "data")),
    mesh=mesh, in_specs=(jax.P("data"), jax.P(), jax.P("data")), out_specs=jax.P(),
)
with_gradients = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, head, targets)
found, wanted = with_gradients(spread), with_gradients(mean)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)
"""


@pytest.mark.slow
def test_the_gradient_of_a_head_is_summed_over_four_devices():
    four = "--xla_force_host_platform_device_count=4"
    subprocess.run([sys.executable, "-c", FOUR], env={**os.environ, "XLA_FLAGS": four}, check=True)


def test_logits_that_do_not_count_may_be_anything():
    logits = jnp.asarray([[[1.0, 2.0], [np.nan, np.inf]]])
    targets = jnp.asarray([[1, -100]])
    losses = (
        lambda logits: cross_entropy(logits, targets)[0],
        lambda logits: jnp.sum(ops.log_probs(logits, targets)),
    )
    for loss in losses:
        value, gradient = jax.value_and_grad(loss)(logits)
        assert np.isfinite(value)
        assert np.all(np.isfinite(gradient))
        assert not np.any(gradient[0, 1])


def test_a_packed_head_is_its_numbers():
    hidden, head, targets = hidden_case(vocab=32, width=32)
    packed = quantize(head, "int8")
    f = lambda h, w: linear_cross_entropy(h, w, targets, chunk=8)[0]  # noqa: E731
    ours, plainly = (
        jax.jit(jax.value_and_grad(f))(hidden, x) for x in (packed, dequantize(packed, jnp.float32))
    )
    for x, y in zip(ours, plainly, strict=True):
        np.testing.assert_array_equal(x, y)
    assert float(ours[0]) != float(f(hidden, head))
    with pytest.raises(ValueError, match=r"hidden \[3, 7, 31\] and head \[32, 32\] must be"):
        linear_cross_entropy(hidden[..., 1:], packed, targets)


@pytest.mark.parametrize("bad", [29, 1000, -1])
def test_a_target_outside_the_vocabulary_is_refused_or_shows(bad):
    hidden, head, targets = hidden_case()
    targets = targets.at[2, 2].set(bad)
    with pytest.raises(ValueError, match=f"target {bad} is outside the vocabulary of 29"):
        linear_cross_entropy(hidden, head, targets)
    assert np.isnan(jax.jit(linear_cross_entropy)(hidden, head, targets)[0])
