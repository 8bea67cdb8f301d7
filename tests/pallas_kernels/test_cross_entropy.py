"""Linear cross entropy against float64: in the interpreter at small sizes, on a GPU at larger."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import rounded
from absent_device import H200
from kernels import interpreted
from numerics import ULPS, assert_as_accurate

from jaxllm import aot
from pallas_kernels import _compat, cross_entropy
from pallas_kernels import device as device_lib
from pallas_kernels.cross_entropy import (
    Config,
    default_config,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    why_not,
)
from pallas_kernels.quantize import dequantize, quantize

pytestmark = pytest.mark.usefixtures("strict_jax")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
needs_references = pytest.mark.skipif(
    not _compat.WRITES_REFERENCES, reason="no kernel of jax 0.10 writes into an array"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """T, V, D, the head's dtype, how large logits are, and what the call is told."""

    shape: tuple[int, int, int]
    config: Config | None = None
    head: Any = BF16
    size: float = 2.0
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Hidden states, head, targets; every fifth target is ignored."""
        t, v, d = self.shape
        rng = np.random.default_rng(0)
        hidden = jnp.asarray(rng.normal(size=(t, d)), F32).astype(BF16)
        head = jnp.asarray(rng.normal(size=(v, d)) * self.size * d**-0.5, F32).astype(self.head)
        targets = rng.integers(0, v, t)
        targets[::5] = self.keywords.get("ignore_index", -100)
        return hidden, head, jnp.asarray(targets, jnp.int32)


SMALL = "soft cap, z loss, words of no whole tiles"
CASES = {
    "a tile and two tokens, three tiles of words": Case((130, 520, 64)),
    SMALL: Case((5, 301, 64), keywords={"softcap": 3.0, "z_loss": 0.1, "ignore_index": 7}),
    "chunks, a float32 head": Case((300, 300, 128), Config(chunk=128), F32),
    "chunks, soft cap, a float16 head": Case(
        (129, 72, 64), Config(chunk=128), F16, keywords={"softcap": 5.0}
    ),
    "in the memory of the gradient": Case((128, 776, 192), Config(chunk=128, slab=256)),
    "in the memory of the gradient, tokens of no whole tile": Case(
        (70, 520, 128), Config(chunk=128, slab=256), keywords={"z_loss": 1e-3}
    ),
    "losses of more than 130 nats": Case((66, 264, 64), size=300.0),
    "losses of more than 130 nats, in the memory of the gradient": Case(
        (66, 520, 128), Config(chunk=128, slab=256), size=300.0
    ),
}


def with_gradients(case: Case, arrays: Any, *, scale: float = 1.0, **keywords: Any) -> Any:
    """The sum, times `scale`, and its gradients by hidden states and head."""
    hidden, head, targets = arrays
    call = functools.partial(
        linear_cross_entropy, config=case.config, reduction="sum", **case.keywords, **keywords
    )
    f = lambda h, w: scale * call(h, w, targets)  # noqa: E731
    total, gradients = jax.value_and_grad(f, (0, 1))(hidden, head)
    return total, *gradients


def as_float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(F32)).astype(np.float64)


def assert_right(case: Case, arrays: Any, found: Any, *, on_the_device: bool = False) -> None:
    """Tensor cores add 16 products of bfloat16 at a time and cut the sum so far off after 24 bits,
    toward zero, where the plain path rounds: a logit loses up to D / 16 units in its last place,
    and as all that are large lose some, so does the sum of losses. (arXiv:2511.10909. An H200 lost
    10 units of 64 at losses of 1100 nats, as many as NumPy does by this rule.)
    """
    hidden, head, targets = arrays
    assert [x.dtype for x in found] == [F32, BF16, case.head]
    exact = as_float64(hidden), as_float64(head.astype(BF16)), np.asarray(targets)
    truth = oracles.linear_cross_entropy(*exact, **case.keywords)
    other = rounded.linear_cross_entropy(*arrays, **case.keywords)
    steps = case.shape[2] / 16 if on_the_device else 0
    for i, (ours, plainly, true) in enumerate(zip(found, other, truth, strict=True)):
        assert ours.shape == np.shape(true)
        largest = float(np.abs(true).max(initial=0)) * (max(1, steps / ULPS) if i == 0 else 1)
        args = as_float64(ours), as_float64(plainly), np.asarray(true)
        assert_as_accurate(*args, largest_term=largest)
    uncounted = np.asarray(targets) == case.keywords.get("ignore_index", -100)
    assert not np.any(as_float64(found[1])[uncounted])


@needs_references
@pytest.mark.parametrize(
    "name", [x if x == SMALL else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_the_sum_and_its_gradients(name: str, monkeypatch: pytest.MonkeyPatch):
    """In memory that was never written there is what makes a result NaN if it is read."""
    nan = lambda shape: jax.new_ref(jnp.full(shape, jnp.nan, BF16))  # noqa: E731
    monkeypatch.setattr(cross_entropy, "_empty", nan)
    case = CASES[name]
    arrays = case.arrays()
    found = interpreted(lambda *x: with_gradients(case, x, interpret=True), *arrays)
    assert_right(case, arrays, found)
    with pytest.raises(AssertionError, match="error is"):
        assert_right(case, arrays, (*found[:2], found[2] * jnp.asarray(1.02, case.head)))


def test_the_check_of_the_device_can_fail():
    """Half of what its sums may lose is too much elsewhere, and twice that is so there too."""
    case = Case((20, 300, 1024), size=300.0)
    arrays = case.arrays()
    total, *gradients = rounded.linear_cross_entropy(*arrays)
    lost = 1024 / 16 * float(jnp.finfo(F32).eps)
    less, much_less = (total * (1 - x * lost) for x in (0.5, 2))
    assert_right(case, arrays, (less, *gradients), on_the_device=True)
    for found, on_the_device in ((less, False), (much_less, True)):
        with pytest.raises(AssertionError, match="error is"):
            assert_right(case, arrays, (found, *gradients), on_the_device=on_the_device)


@needs_references
@pytest.mark.parametrize("which", [(0,), (1,), ()])
def test_no_product_is_made_that_is_not_asked_for(which: tuple[int, ...]):
    case = CASES[SMALL]
    arrays = case.arrays()
    hidden, head, targets = arrays

    def f(hidden, head):
        return linear_cross_entropy(
            hidden, head, targets, reduction="sum", interpret=True, **case.keywords
        )

    run = jax.value_and_grad(f, which) if which else f
    text = str(jax.make_jaxpr(run)(hidden, head))
    kernels = [text.count(f"name=linear_cross_entropy_{x}") for x in ("d_hidden", "d_head")]
    assert kernels == [int(0 in which), int(1 in which)]
    truth = oracles.linear_cross_entropy(
        as_float64(hidden), as_float64(head), np.asarray(targets), **case.keywords
    )
    found = interpreted(run, hidden, head)
    total, gradients = found if which else (found, ())
    assert float(total) == pytest.approx(truth[0], rel=1e-6)
    other = rounded.linear_cross_entropy(*arrays, **case.keywords)
    for place, ours in zip(which, gradients, strict=True):
        exact = truth[1 + place], as_float64(other[1 + place])
        assert_as_accurate(as_float64(ours), exact[1], exact[0])


@needs_references
@pytest.mark.slow
def test_the_gradient_is_scaled_by_what_stands_above():
    """A power of two is exact; the mean is the sum over the targets that count."""
    case = Case((40, 72, 64))
    arrays = case.arrays()
    one, many = (
        interpreted(lambda *x, s=s: with_gradients(case, x, scale=s, interpret=True), *arrays)
        for s in (1.0, 8.0)
    )
    for x, y in zip(one, many, strict=True):
        np.testing.assert_array_equal(8 * as_float64(x), as_float64(y))
    mean = interpreted(lambda *x: linear_cross_entropy(*x, interpret=True), *arrays)
    assert float(mean) == pytest.approx(float(one[0]) / 32, rel=1e-6)
    reference = linear_cross_entropy_reference(*arrays)
    assert float(mean) == pytest.approx(float(reference), rel=1e-5)


@needs_references
def test_a_packed_head_is_its_numbers():
    hidden, head, targets = Case((3, 64, 64)).arrays()
    packed = quantize(head, "int8")
    other = dequantize(packed, BF16)
    run = lambda h, w: linear_cross_entropy(h, w, targets, interpret=True)  # noqa: E731
    ours, plainly = (interpreted(jax.value_and_grad(run), hidden, x) for x in (packed, other))
    for x, y in zip(ours, plainly, strict=True):
        np.testing.assert_array_equal(as_float64(x), as_float64(y))


@needs_references
@pytest.mark.slow
@pytest.mark.parametrize("targets", ["none", "one of 300", "one of -1"])
def test_targets_that_are_no_words(targets: str):
    case = Case((3, 300, 64))
    hidden, head, ids = case.arrays()
    ids = jnp.full_like(ids, -100) if targets == "none" else ids.at[1].set(int(targets[6:]))
    found = interpreted(lambda *x: with_gradients(case, x, interpret=True), hidden, head, ids)
    if targets == "none":
        assert not any(np.any(as_float64(x)) for x in found)
        assert (
            float(
                interpreted(lambda *x: linear_cross_entropy(*x, interpret=True), hidden, head, ids)
            )
            == 0
        )
    else:
        assert np.isnan(found[0])


@needs_references
@pytest.mark.slow
def test_a_row_that_is_no_numbers_shows():
    """Also where the greatest logits are looked for, which a NaN makes the kernel do."""
    hidden, head, targets = Case((3, 300, 64)).arrays()
    hidden = hidden.at[1, 0].set(np.nan)
    run = lambda *x: linear_cross_entropy(*x, interpret=True)  # noqa: E731
    assert np.isnan(interpreted(run, hidden, head, targets))
    uncounted = targets.at[1].set(-100)
    assert np.isfinite(interpreted(run, hidden, head, uncounted))


@needs_references
@pytest.mark.slow
def test_a_row_whose_weight_z_loss_makes_zero():
    """p's factor 1 + 2 z_loss lse is 0 where lse = -1 / (2 z_loss)."""
    hidden, targets = jnp.zeros((2, 64), BF16).at[:, 0].set(1), jnp.asarray([0, 3], jnp.int32)
    head = jnp.full((8, 64), -4.0, BF16)
    z_loss = float(-0.5 / (np.log(8.0) - 4.0))
    case = Case((2, 8, 64), keywords={"z_loss": z_loss})
    found = interpreted(lambda *x: with_gradients(case, x, interpret=True), hidden, head, targets)
    exact = as_float64(hidden), as_float64(head), np.asarray(targets)
    truth = oracles.linear_cross_entropy(*exact, z_loss=z_loss)
    for ours, true in zip(found, truth, strict=True):  # hidden states, head, sums of 2^-k: exact
        np.testing.assert_allclose(as_float64(ours), true, rtol=2**-8, atol=1e-4)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(as_float64(ours), 1.02 * true, rtol=2**-8, atol=1e-4)


def shape(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


HIDDEN, HEAD, IDS = shape(3, 64), shape(32, 64), shape(3, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("arrays", "keywords", "sentence"),
    [
        (
            (shape(3, 128), HEAD, IDS),
            {},
            r"hidden \[3, 128\] and head \[32, 64\] must be \[.., D\]",
        ),
        (
            (shape(3, 1, 64), HEAD, shape(3, 1, dtype=jnp.int32)),
            {},
            r"hidden must be \[T, D\], got \[3, 1, 64\]",
        ),
        ((HIDDEN, shape(0, 64), IDS), {}, r"head \[0, 64\] is empty"),
        ((HIDDEN, HEAD, shape(4, dtype=jnp.int32)), {}, r"integers \[3\], .* got int32\[4\]"),
        ((shape(3, 64, dtype=jnp.int8), HEAD, IDS), {}, "hidden is int8; bfloat16, float16 or"),
        ((HIDDEN, shape(32, 64, dtype=jnp.int32), IDS), {}, "head is int32"),
        (
            (HIDDEN, HEAD, IDS),
            {"ignore_index": None},
            "ignore_index must be an integer of 32 bits, got None",
        ),
        (
            (HIDDEN, HEAD, IDS),
            {"ignore_index": 2**40},
            "ignore_index must be an integer of 32 bits, got 10995",
        ),
        ((HIDDEN, HEAD, shape(3, dtype=F32)), {}, r"targets must be integers .* got float32\[3\]"),
        (
            (HIDDEN, HEAD, IDS),
            {"softcap": 0.0},
            "softcap must be positive and finite or None, got",
        ),
        ((HIDDEN, HEAD, IDS), {"z_loss": np.nan}, "z_loss must be a finite number, got nan"),
        (
            (HIDDEN, HEAD, IDS),
            {"reduction": "none"},
            "no reduction is named 'none'; there are mean",
        ),
    ],
)
def test_wrong_calls(arrays: Any, keywords: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=f"^linear_cross_entropy: .*{sentence}"):
        jax.eval_shape(lambda *x: linear_cross_entropy(*x, **keywords), *arrays)


@needs_references
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Config(chunk=100), "chunk must be a multiple of 128"),
        (Config(slab=128), "slab must be a multiple of 256"),
    ],
)
def test_wrong_configs(config: Config, sentence: str):
    run = lambda *x: linear_cross_entropy(*x, config=config, interpret=True)  # noqa: E731
    with pytest.raises(ValueError, match=f"^linear_cross_entropy: .*{sentence}"):
        jax.eval_shape(run, HIDDEN, HEAD, IDS)


@pytest.mark.parametrize(
    ("hidden", "head", "device", "phrase"),
    [
        pytest.param(HIDDEN, HEAD, H200, None, marks=needs_references),
        pytest.param(HIDDEN, HEAD, device_lib.INTERPRETED, None, marks=needs_references),
        (HIDDEN, HEAD, device_lib.Device("cpu", "cpu"), "needs an NVIDIA GPU, found cpu"),
        (HIDDEN, HEAD, device_lib.Device("gpu", "NVIDIA A100", 8.0), "needs a Hopper GPU"),
        (shape(3, 64, dtype=F16), HEAD, H200, "takes hidden states in bfloat16, got float16"),
        (shape(3, 72), shape(32, 72), H200, "D = 72 is no multiple of 64"),
        (shape(0, 64), HEAD, H200, "nothing to multiply"),
    ],
)
def test_why_not(hidden: Any, head: Any, device: Any, phrase: str | None):
    reason = why_not(hidden, head, shape(hidden.shape[0], dtype=jnp.int32), device=device)
    assert (reason is None) if phrase is None else phrase in str(reason)


def test_without_references_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "WRITES_REFERENCES", False)
    assert "needs jax 0.11" in str(why_not(HIDDEN, HEAD, IDS, device=H200))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_the_call_says_so():
    with pytest.raises(NotImplementedError, match="^linear_cross_entropy: cannot run this call"):
        linear_cross_entropy(*Case((3, 32, 64)).arrays())


def test_default_chunks():
    """Equal ones, of 1 GiB at most; one where the exponentials need no memory of their own."""

    def chunk(t: int, v: int, d: int, head: Any = BF16) -> int:
        return default_config(shape(t, d), shape(v, d, dtype=head)).chunk

    assert chunk(4096, 128_256, 4096) == 4096
    assert chunk(4096, 151_936, 4096) == 4096  # in the memory of the gradient
    assert chunk(4096, 151_936, 4096, F32) == 2048
    assert chunk(32_768, 32_000, 2048, F32) == 16_384
    assert chunk(65_536, 128_256, 4096) == 4096
    assert chunk(5, 300, 64) == 128
    assert chunk(1000, 2**24, 64, F32) == 128


def program(t: int, v: int, d: int, head: Any = BF16) -> aot.Program:
    f = jax.value_and_grad(linear_cross_entropy, (0, 1))
    return aot.compile_for(f, shape(t, d), shape(v, d, dtype=head), shape(t, dtype=jnp.int32))


@pytest.mark.aot
@pytest.mark.slow
def test_memory_beyond_inputs_and_gradients_is_a_slab():
    """4096 x 128256 x 4096: all exponentials are 1002 MiB, and so is the gradient they lie in."""
    t, v, d = 4096, 128_256, 4096
    found = program(t, v, d)
    inputs_and_gradients = 2 * 2 * (t + v) * d
    assert found.peak_bytes < 1.1 * inputs_and_gradients
    assert not [launch for launch in found.launches if launch.kind == "kCopy"]


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("head", [BF16, F32])
def test_it_compiles_to_what_it_should(head: Any):
    found = program(1000, 1003, 896, head)
    names = ("linear_cross_entropy", "linear_cross_entropy_tops")
    names += ("linear_cross_entropy_d_hidden", "linear_cross_entropy_d_head")
    assert set(found.mosaic_launches()) == set(names)
    for name in names:
        kernel = found.kernel(name)
        assert kernel.spill_store_bytes == kernel.spill_load_bytes == 0, name
        assert not [x for x in kernel.notes if x.startswith(("C7504", "C7511", "C7512"))], name
        assert kernel.count("HGMMA"), name
    assert found.kernel("linear_cross_entropy").count("STSM"), "stored as it lies, not transposed"


ON_DEVICE = {
    "1024": Case((1024, 8000, 1024)),
    "in the memory of the gradient": Case((1000, 7992, 1024), Config(chunk=1024, slab=2304)),
    "chunks, a float32 head": Case((1000, 8001, 896), Config(chunk=384), F32),
    "soft cap, z loss": Case((513, 5003, 576), keywords={"softcap": 5.0, "z_loss": 0.01}),
    "losses of more than 130 nats": Case(
        (700, 7992, 1024), Config(chunk=1024, slab=2304), size=300.0
    ),
    "one token": Case((1, 1000, 64), keywords={"ignore_index": -1}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_on_the_device(name: str):
    """And the same call gives the same bits."""
    case = ON_DEVICE[name]
    arrays = case.arrays()
    run = jax.jit(lambda *x: with_gradients(case, x))
    found, again = run(*arrays), run(*arrays)
    assert_right(case, arrays, found, on_the_device=True)
    for x, y in zip(found, again, strict=True):
        np.testing.assert_array_equal(as_float64(x), as_float64(y))
