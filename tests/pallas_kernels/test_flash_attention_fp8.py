"""Flash attention of float8 against float64: in the interpreter, compiled, and on a GPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200
from kernels import interpreted
from numerics import assert_as_accurate
from tensor_cores import float8_sums

from jaxllm import aot
from pallas_kernels import attention_reference
from pallas_kernels.attention_fp8 import LIFT, score_scale
from pallas_kernels.flash_attention import (
    Config,
    _config_problem,
    candidates,
    default_config,
    flash_attention,
    flash_attention_reference,
    why_not,
)

pytestmark = pytest.mark.usefixtures("strict_jax")

FP8, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
SMALL = Config(kv_block=64, stages=3)
ALONE = Config(kv_block=64, consumers=1, q_stages=1)
NO_TURNS = Config(kv_block=64, turns=False)
THREE = Config(kv_block=64, consumers=3, q_stages=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """q [B, T, N, H], k and v [B, S, K, H]; masks: segments, mixed, sinks, and what is in keywords.

    scales: "" none, "one" a number each, "head" one a head.
    """

    shape: tuple[int, int, int, int, int, int]
    masks: str = ""
    scales: str = "head"
    config: Config | None = SMALL
    lengths: tuple[int, ...] | None = None
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)

    def arrays(self) -> dict[str, Any]:
        b, t, s, n, kv_heads, h = self.shape
        rng = np.random.default_rng(sum(self.shape))
        shapes = {"q": (b, t, n, h), "k": (b, s, kv_heads, h), "v": (b, s, kv_heads, h)}
        found: dict[str, Any] = {}
        for name, shape in shapes.items():
            x = rng.standard_normal(shape)
            if self.scales:  # as a model's would be: the largest number is 448
                axes = (0, 1, 3) if self.scales == "head" else None
                scale = (np.abs(x).max(axes) / 448).astype(np.float32)
                found[f"{name}_scale"] = jnp.asarray(scale)
                x = x / scale[..., None] if self.scales == "head" else x / scale
            found[name] = jnp.asarray(x, F32).astype(FP8)
        if "segments" in self.masks:  # sorted, as packed documents are
            ids = np.sort(rng.integers(0, 5, (b, max(t, s))), axis=1).astype(np.int32)
            found |= {"q_segment_ids": ids[:, -t:], "kv_segment_ids": ids[:, -s:]}
        if "mixed" in self.masks:  # in no order, and one segment only on one side
            found["q_segment_ids"] = rng.integers(-1, 3, (b, t)).astype(np.int32)
            found["kv_segment_ids"] = rng.integers(0, 4, (b, s)).astype(np.int32)
        if "sinks" in self.masks:
            found["sinks"] = jnp.asarray(rng.standard_normal(n), F32)
        if self.lengths is not None:
            found["kv_lengths"] = np.asarray(self.lengths, np.int32)
        return found


FULL = {"causal": False}
INTERPRETED = {
    "one query": Case((1, 1, 1, 1, 1, 16), scales=""),
    "one query, many keys": Case((2, 1, 257, 5, 1, 64), scales="one"),
    "17 queries": Case((1, 17, 17, 4, 2, 64), config=ALONE),
    "all keys": Case((1, 17, 128, 4, 4, 64), keywords=FULL),
    "a tile": Case((1, 128, 128, 2, 2, 128), config=None),
    "257": Case((1, 257, 257, 3, 1, 128), scales="one", config=Config(128, stages=3)),
    "heads of 80": Case((1, 130, 257, 2, 1, 80), config=NO_TURNS),
    "heads of 256": Case((1, 17, 257, 2, 2, 256), config=None),
    "heads of 160, one key": Case((1, 17, 1, 1, 1, 160), config=None),
    "more queries than keys": Case((1, 257, 100, 3, 1, 64), scales=""),
    "three consumers": Case((1, 257, 257, 1, 1, 64), config=THREE, scales="one"),
    "negative scale": Case((1, 128, 128, 2, 1, 64), keywords={"scale": -0.1}),
    "window": Case((1, 257, 257, 2, 1, 64), keywords={"window": 70}),
    "window on both sides": Case(
        (2, 128, 257, 1, 1, 96), lengths=(100, 257), keywords={**FULL, "window": 33}
    ),
    "soft cap": Case((1, 128, 257, 3, 1, 64), "sinks", keywords={"softcap": 2.0}),
    "lengths": Case((3, 128, 257, 1, 1, 64), "sinks", lengths=(0, 130, 257), scales="one"),
    "lengths, all keys": Case((3, 17, 257, 1, 1, 64), lengths=(0, 1, 200), keywords=FULL),
    "documents": Case((2, 257, 257, 1, 1, 64), "segments"),
    "documents in no order": Case((1, 128, 128, 3, 1, 64), "mixed sinks", keywords=FULL),
    "everything": Case(
        (2, 128, 257, 2, 1, 64),
        "segments sinks",
        lengths=(97, 257),
        keywords={"window": 100, "softcap": 5.0, "scale": 0.3},
    ),
}


def run(case: Case, *, interpret: bool = False) -> tuple[dict[str, Any], Any]:
    arrays = case.arrays()
    config = {"config": case.config} if case.config else {}

    def call(arrays):
        kwargs = {**case.keywords, **config}
        return flash_attention(**arrays, **kwargs, return_lse=True, interpret=interpret)

    return arrays, interpreted(call, arrays) if interpret else jax.jit(call)(arrays)


def exact(arrays: dict[str, Any]) -> dict[str, Any]:
    """The numbers themselves, in float64, and what else the oracle takes."""
    found: dict[str, Any] = {}
    for name, x in arrays.items():
        if name in ("q", "k", "v"):
            scale = np.asarray(arrays.get(f"{name}_scale", 1.0), np.float64)
            found[name] = np.asarray(x).astype(np.float64) * np.reshape(scale, (-1, 1))
        elif not name.endswith("_scale"):
            found[name] = np.asarray(x, np.float64) if name == "sinks" else x
    return found


def bound(numbers: dict[str, Any], keywords: dict[str, Any], truth: np.ndarray) -> np.ndarray:
    """How far from the truth each number may be: what attention_fp8 states."""
    sizes = np.abs(numbers["v"])
    call = {**numbers, **keywords, "v": sizes}
    weighted, weights = oracles.attention(**call, return_weights=True)
    n = weights.shape[1]
    each = np.repeat(sizes, n // sizes.shape[2], axis=2)  # [B, S, N, H]
    seen = (weights > 0).astype(np.float64)
    smallest = (
        np.einsum("bnts,bsnh->btnh", seen, each)
        * np.moveaxis(weights.max(-1, initial=0), 1, 2)[..., None]
    )
    in_float32 = 1e-5 * weighted  # scores of a few units, and the sums
    return weighted / 16 + smallest / 2 ** (10 + LIFT) + np.abs(truth) / 256 + in_float32 + 1e-30


@functools.partial(jax.jit, static_argnames=("causal", "window", "scale", "softcap"))
def lse_on_the_device(
    arrays: dict[str, Any], *, causal=True, window=None, scale=None, softcap=None
) -> jax.Array:
    """That of the plain path, of scores as short as the tensor cores' sums: float32 [B, T, N]."""
    q, k = arrays["q"], arrays["k"]
    (_, t, n, h), (s, kv_heads) = q.shape, k.shape[1:3]
    heads = (jnp.swapaxes(x, 1, 2) for x in (q, jnp.repeat(k, n // kv_heads, axis=2)))
    scores = jax.vmap(jax.vmap(float8_sums))(*heads)
    of_head = score_scale(arrays.get("q_scale"), arrays.get("k_scale"), n, kv_heads)
    of_head = of_head * jnp.float32(h**-0.5 if scale is None else scale)
    scores = scores * of_head[None, :, None, None]
    if softcap is not None:
        scores = jnp.tanh(scores / jnp.float32(softcap)) * jnp.float32(softcap)
    sides = ("q_segment_ids", "kv_segment_ids", "kv_lengths")
    sides = {name: arrays[name] for name in sides if name in arrays}
    mask = attention_reference.visible(t, s, causal=causal, window=window, **sides)
    return attention_reference.softmax(scores, mask, arrays.get("sinks"))[1]


def assert_right(
    case: Case, arrays: dict[str, Any], results: Any, *, on_the_device: bool = False
) -> None:
    """On the device the logarithm is that of the tensor cores' short sums, and as far from the
    truth; in the result, next to weights of 4 bits, they do not show.
    """
    out, lse = results
    assert (out.dtype, lse.dtype) == (BF16, F32)
    plain, plain_lse = flash_attention_reference(**arrays, **case.keywords, return_lse=True)
    if on_the_device:
        plain_lse = lse_on_the_device(arrays, **case.keywords)
    numbers = exact(arrays)
    truth, true_lse = oracles.attention(**numbers, **case.keywords, return_lse=True)
    assert_as_accurate(out, plain, truth)
    allowed = bound(numbers, case.keywords, truth)
    for name, x in (("ours", out), ("the plain path", plain)):
        error = np.abs(np.asarray(x, np.float64) - truth)
        assert np.all(error <= allowed), f"{name}: {np.max(error / allowed):.3f} of the bound"
    seen = np.isfinite(true_lse)
    np.testing.assert_array_equal(np.asarray(lse)[~seen], -np.inf)
    np.testing.assert_array_equal(np.asarray(out)[~seen], 0)
    # what float32 rounds: a sum of H products, and its logarithm
    largest_term = float(np.abs(true_lse[seen]).max(initial=1)) * 8
    ours, plain, truth = (np.where(seen, x, 0) for x in (lse, plain_lse, true_lse))
    if on_the_device:  # as near to what tensor cores sum up as float32 is to the truth
        truth = plain.astype(np.float64)
    assert_as_accurate(ours, plain, truth, largest_term=largest_term)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str):
    case = INTERPRETED[name]
    assert_right(case, *run(case, interpret=True))


def test_the_check_can_fail():
    case = INTERPRETED["17 queries"]
    arrays = case.arrays()
    out, lse = flash_attention_reference(**arrays, return_lse=True)
    assert_right(case, arrays, (out, lse))
    swapped = {**arrays, "v": arrays["v"][:, jnp.arange(17).at[2:4].set(jnp.array([3, 2]))]}
    turned = {**arrays, "k_scale": arrays["k_scale"][::-1]}
    for wrong in (
        (flash_attention_reference(**swapped), lse),  # keys in another order
        (out.astype(F32) * 1.2).astype(BF16),
        (out.at[0, 3, 1].multiply(1.5), lse),
        (out, lse.at[0, 3, 1].add(1e-3)),
        flash_attention_reference(**turned, return_lse=True),  # another head's scale
        flash_attention_reference(
            **{**arrays, "v_scale": 1.2 * arrays["v_scale"]}, return_lse=True
        ),
    ):
        with pytest.raises(AssertionError):
            assert_right(case, arrays, wrong if isinstance(wrong, tuple) else (wrong, lse))


def test_the_check_of_the_device_can_fail():
    """Its sums are short: not as short as a scale that is a hundredth too large, or a key lost."""
    case = Case((1, 257, 257, 2, 2, 128), config=None)
    arrays = case.arrays()
    out = flash_attention_reference(**arrays)
    lse = lse_on_the_device(arrays)
    assert_right(case, arrays, (out, lse), on_the_device=True)
    block = {name: np.zeros((1, 257), np.int32) for name in ("q_segment_ids", "kv_segment_ids")}
    block["kv_segment_ids"][:, 64:128] = 1
    for wrong in (
        lse_on_the_device({**arrays, "k_scale": arrays["k_scale"] * 1.01}),
        lse_on_the_device({**arrays, **block}),  # a block of keys
        lse_on_the_device(arrays, window=256),  # one key of one query
        lse_on_the_device({**arrays, "k": jnp.roll(arrays["k"], -1, axis=1)}),
        lse.at[0, 100, 1].add(1e-4),
        lse + 1e-4,
    ):
        with pytest.raises(AssertionError, match="error is"):
            assert_right(case, arrays, (out, wrong), on_the_device=True)
    with pytest.raises(AssertionError, match="error is"):  # nor are they float32's
        assert_right(case, arrays, (out, lse))


def test_weights_are_lifted():
    """A key of a thousandth of the largest weight still counts: as float8 alone it would be 0."""
    q, k = (jnp.ones((1, 1, 1, 16), FP8), jnp.ones((1, 513, 1, 16), FP8).at[:, 0].set(2))
    v = jnp.ones((1, 513, 1, 16), FP8).at[:, 0].set(0)
    out = flash_attention_reference(q, k, v, scale=7.6 / 16)
    truth = 512 * np.exp(-7.6) / (1 + 512 * np.exp(-7.6))
    np.testing.assert_allclose(np.asarray(out, np.float64), truth, rtol=0.07)


def shapes(*shape: int, dtype: Any = FP8) -> tuple[jax.ShapeDtypeStruct, ...]:
    b, t, s, n, kv_heads, h = shape
    kv = jax.ShapeDtypeStruct((b, s, kv_heads, h), dtype)
    return jax.ShapeDtypeStruct((b, t, n, h), dtype), kv, kv


@pytest.mark.parametrize(
    ("arrays", "phrase"),
    [
        (shapes(2, 64, 64, 4, 2, 64), None),
        (shapes(2, 64, 64, 4, 2, 72), "head width 72 is not a multiple of 16 up to 256"),
        (shapes(2, 64, 64, 4, 2, 272), "head width 272 is not a multiple of 16 up to 256"),
        (shapes(2, 64, 64, 4, 2, 64, dtype=jnp.float8_e5m2), "or float8_e4m3fn, got float8_e5m2"),
    ],
)
def test_why_not(arrays, phrase):
    reason = why_not(*arrays, device=H200)
    assert reason is None if phrase is None else reason is not None and phrase in reason


@pytest.mark.own_errors
@pytest.mark.parametrize(
    ("keywords", "phrase"),
    [
        ({"q_scale": jnp.float32(jnp.nan)}, "q_scale is nan; a scale must be positive and finite"),
        ({"k_scale": jnp.array([1.0, 0.0], F32)}, r"k_scale\[1\] is 0.0; a scale must be positive"),
        ({"v_scale": jnp.array([-1.0, 1.0], F32)}, r"v_scale\[0\] is -1.0; a scale must be"),
        ({"v_scale": jnp.float32(jnp.inf)}, "v_scale is inf; a scale must be"),
        ({"q_scale": jnp.ones(3, F32)}, r"q_scale is float32\[3\]; .* a head: \[\] or \[4\]"),
        ({"k_scale": jnp.ones(2, BF16)}, r"k_scale is bfloat16\[2\]; it must be float32"),
        ({"config": Config(96)}, "kv_block must be a multiple of 64 for float8"),
        ({"config": Config(128, consumers=3)}, "of 136 registers"),
        ({"config": Config(128, stages=16)}, "bytes on chip"),
    ],
)
def test_bad_calls_are_refused(keywords, phrase):
    q, k, v = (jnp.zeros(x.shape, FP8) for x in shapes(2, 64, 64, 4, 2, 128))
    with pytest.raises(ValueError, match=f"^flash_attention: [^\n]*{phrase}"):
        flash_attention(q, k, v, **keywords, interpret=True)


@pytest.mark.own_errors
def test_dtypes_that_disagree():
    q, k, v = (jnp.zeros(x.shape, FP8) for x in shapes(2, 64, 64, 4, 2, 64))
    with pytest.raises(ValueError, match="q is float8_e4m3fn and v is bfloat16; all three or none"):
        flash_attention(q, k, v.astype(BF16), interpret=True)
    wide = [x.astype(BF16) for x in (q, k, v)]
    with pytest.raises(ValueError, match="k_scale is given and q is bfloat16; only float8_e4m3fn"):
        flash_attention(*wide, k_scale=jnp.float32(1), interpret=True)


def test_a_gradient_is_refused(monkeypatch):
    monkeypatch.setattr("pallas_kernels._compat.INTERPRETS_LAYOUTS", True)  # nothing runs
    arrays = Case((1, 17, 17, 2, 1, 64), "sinks").arrays()
    for name in ("sinks", "v_scale"):

        def loss(x, name=name):
            return jnp.sum(flash_attention(**{**arrays, name: x}, interpret=True).astype(F32))

        with pytest.raises(NotImplementedError, match="flash_attention: float8_e4m3fn has no grad"):
            jax.grad(loss)(arrays[name])


def test_candidates_fit():
    call = shapes(4, 4096, 4096, 32, 8, 128)
    found = candidates(*call, device=H200)
    assert found
    assert default_config(*call, device=H200) not in found
    assert {_config_problem(config, call[0]) for config in found} == {None}


@pytest.mark.parametrize("width", [8, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("tokens", [1, 128, 1000])
@pytest.mark.parametrize("extra", [{}, {"softcap": 30.0}])
def test_the_default_config_fits(width: int, tokens: int, extra: dict[str, Any]):
    call = shapes(1, tokens, tokens, 8, 2, width)
    config = default_config(*call, device=H200, **extra)
    assert _config_problem(config, call[0]) is None


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize(
    ("masks", "width"),
    [
        *(("everything", width) for width in (64, 80, 128, 192, 256)),
        *(("documents", width) for width in (64, 128)),
        ("all keys", 256),
        ("", 192),
        ("soft cap", 128),  # tiles of 128 keys
        ("", 128),
    ],
)
def test_compiled(masks: str, width: int):
    """No spills, no product that the assembler makes wait for another, no weight that moves."""
    q, k, v = shapes(2, 1000, 1003, 8, 2, width)
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v}
    arrays |= {"q_scale": jax.ShapeDtypeStruct((), F32), "v_scale": jax.ShapeDtypeStruct((2,), F32)}
    keywords: dict[str, Any] = {"causal": masks != "all keys", "return_lse": True}
    if masks in ("documents", "everything"):
        for name, size in (("q_segment_ids", 1000), ("kv_segment_ids", 1003)):
            arrays[name] = jax.ShapeDtypeStruct((2, size), jnp.int32)
    if masks == "everything":
        arrays["kv_lengths"] = jax.ShapeDtypeStruct((2,), jnp.int32)
        arrays["sinks"] = jax.ShapeDtypeStruct((8,), F32)
        keywords |= {"window": 300, "softcap": 30.0}
    if masks == "soft cap":
        keywords["softcap"] = 30.0
    program = aot.compile_for(lambda x: flash_attention(**x, **keywords), arrays)
    kernel = program.kernel("flash_attention")
    assert kernel.spill_store_bytes == kernel.spill_load_bytes == 0
    assert not [note for note in kernel.notes if note.startswith("C75")]
    assert kernel.count("QGMMA")
    assert not kernel.count("HGMMA")


@pytest.mark.aot
def test_memory_is_linear():
    """Values once more, the other way round, and nothing else that grows."""
    for tokens in (4096, 65536):
        call = shapes(1, tokens, tokens, 4, 1, 128)
        program = aot.compile_for(flash_attention, *call)
        assert program.temporary_bytes < call[2].size + 2**20


ON_DEVICE = {
    **{name: case for name, case in INTERPRETED.items() if case.config is None},
    "513": Case((2, 513, 513, 8, 2, 128), config=None),
    "513, heads of 64": Case((2, 513, 513, 7, 1, 64), config=None, scales="one"),
    "2048, heads of 256": Case((1, 2048, 2048, 2, 1, 256), config=None),
    "2048, all": Case(
        (2, 2048, 2048, 4, 1, 128),
        "segments sinks",
        config=None,
        lengths=(1500, 2048),
        keywords={"window": 700, "softcap": 20.0},
    ),
    "chunk at the end": Case((2, 513, 2048, 4, 1, 64), config=None, lengths=(513, 2000)),
    "4096": Case((1, 4096, 4096, 2, 1, 128), config=None, keywords=FULL),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_on_the_device(name: str):
    case = ON_DEVICE[name]
    assert_right(case, *run(case), on_the_device=True)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [SMALL, ALONE, THREE, NO_TURNS, Config(128, stages=3)])
def test_each_config_on_the_device(config: Config):
    case = Case((2, 513, 777, 4, 2, 64), config=config)
    assert_right(case, *run(case), on_the_device=True)


@pytest.mark.gpu
def test_keys_keep_their_places_on_the_device():
    """Each query sees one key more than the one before it, and each value is its own number."""
    q, k, _ = (jnp.zeros(x.shape, FP8) for x in shapes(1, 128, 128, 1, 1, 64))
    v = jnp.eye(128, 64, dtype=F32).astype(FP8)[None, :, None]
    out = jax.jit(lambda q, k, v: flash_attention(q, k, v))(q, k, v)
    truth = np.tril(np.ones((128, 64))) / np.arange(1, 129)[:, None]
    np.testing.assert_allclose(np.asarray(out, np.float64)[0, :, 0], truth, rtol=2**-8)
