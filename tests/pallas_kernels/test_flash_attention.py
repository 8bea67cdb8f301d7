"""Flash attention against float64: in the interpreter at small tiles, on a GPU at full sizes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absent_device import H200
from attention_cases import CASES
from kernels import interpreted
from numerics import assert_as_accurate

import pallas_kernels
from benchmarks.cases.flash_attention import SPILLED_WIDE
from jaxllm import aot
from pallas_kernels import device as device_lib
from pallas_kernels.flash_attention import (
    Config,
    _config_problem,
    bucket,
    candidates,
    default_config,
    flash_attention,
    flash_attention_reference,
    tuning_calls,
    why_not,
)
from pallas_kernels.flash_attention_blocks import block_ranges

pytestmark = pytest.mark.usefixtures("strict_jax")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
SMALL = Config(kv_block=64)
ALONE = Config(kv_block=64, consumers=1, q_stages=1)
THREE = Config(kv_block=64, consumers=3, stages=3)
NO_TURNS = Config(kv_block=32, q_stages=1, turns=False)


@dataclasses.dataclass(frozen=True)
class Case:
    """q [B, T, N, H], k and v [B, S, K, H]; masks: segments, mixed, sinks, and what is in keywords.

    lengths are those of the rows.
    """

    shape: tuple[int, int, int, int, int, int]
    masks: str = ""
    dtype: Any = BF16
    config: Config | None = SMALL
    lengths: tuple[int, ...] | None = None
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)

    def arrays(self) -> dict[str, Any]:
        b, t, s, n, kv_heads, h = self.shape
        rng = np.random.default_rng(sum(self.shape))
        shapes = {"q": (b, t, n, h), "k": (b, s, kv_heads, h), "v": (b, s, kv_heads, h)}
        found: dict[str, Any] = {
            name: jnp.asarray(rng.standard_normal(shape), F32).astype(self.dtype)
            for name, shape in shapes.items()
        }
        if "segments" in self.masks:  # sorted, as packed documents are
            ids = np.sort(rng.integers(0, 5, (b, max(t, s))), axis=1).astype(np.int32)
            found |= {"q_segment_ids": ids[:, -t:], "kv_segment_ids": ids[:, -s:]}
        if "mixed" in self.masks:  # in no order, and one segment only on one side
            found["q_segment_ids"] = rng.integers(-1, 3, (b, t)).astype(np.int32)
            found["kv_segment_ids"] = rng.integers(0, 4, (b, s)).astype(np.int32)
        if "sinks" in self.masks:
            found["sinks"] = jnp.asarray(rng.standard_normal(n), F32)
        if "no sinks" in self.masks:
            found["sinks"] = jnp.full(n, -jnp.inf, F32)
        if self.lengths is not None:
            found["kv_lengths"] = np.asarray(self.lengths, np.int32)
        return found


FULL = {"causal": False}
# On two multiprocessors: of more than two tiles, one has several
INTERPRETED = {
    "one query": Case((1, 1, 1, 1, 1, 8)),
    "one query, many keys": Case((2, 1, 257, 5, 1, 64)),
    "17 queries": Case((1, 17, 17, 4, 1, 64), config=ALONE),
    "all keys": Case((1, 17, 128, 4, 4, 64), keywords=FULL),
    "a tile": Case((1, 128, 128, 2, 2, 128), config=None),
    "257": Case((1, 257, 257, 3, 1, 128), config=None),
    "float16, heads of 80": Case((1, 130, 257, 2, 1, 80), dtype=F16, config=None),
    "heads of 96": Case((1, 128, 257, 1, 1, 96), keywords=FULL),
    "heads of 256": Case((1, 17, 257, 2, 2, 256), dtype=F16, config=None),
    "heads of 160, one key": Case((1, 17, 1, 1, 1, 160), config=None),
    "more queries than keys": Case((1, 257, 100, 3, 1, 64)),
    "three consumers": Case((1, 257, 257, 1, 1, 64), config=THREE),
    "no turns": Case((1, 128, 257, 2, 1, 64), config=NO_TURNS, keywords={"scale": 0.5}),
    "negative scale": Case((1, 128, 128, 1, 1, 64), keywords={"scale": -0.1}),
    "window": Case((1, 257, 257, 2, 1, 64), keywords={"window": 70}),
    "window of one": Case((1, 128, 128, 1, 1, 64), keywords={"window": 1}),
    "window on both sides": Case(
        (2, 128, 257, 1, 1, 96), lengths=(100, 257), keywords={**FULL, "window": 33}
    ),
    "soft cap": Case((1, 128, 257, 3, 1, 64), "sinks", keywords={"softcap": 2.0}),
    "scores past the soft cap": Case(
        (1, 17, 130, 2, 1, 256), config=None, keywords={"softcap": 3.0, "scale": 4.0}
    ),
    "soft cap, negative scale, no sink": Case(
        (1, 17, 70, 2, 1, 64), "no sinks", keywords={"softcap": 2.0, "scale": -0.3}
    ),
    "lengths": Case((3, 128, 257, 1, 1, 64), "sinks", lengths=(0, 130, 257)),
    "lengths, all keys": Case((3, 17, 257, 1, 1, 64), lengths=(0, 1, 200), keywords=FULL),
    "documents": Case((2, 257, 257, 1, 1, 64), "segments"),
    "documents, all keys": Case((1, 128, 257, 3, 1, 128), "segments", keywords=FULL),
    "documents in no order": Case((1, 128, 128, 3, 1, 64), "mixed sinks", F16, keywords=FULL),
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


def assert_right(case: Case, arrays: dict[str, Any], results: Any) -> None:
    out, lse = results
    assert out.dtype == case.dtype
    assert lse.dtype == F32
    plain, plain_lse = flash_attention_reference(**arrays, **case.keywords, return_lse=True)
    exact = {
        name: np.asarray(x).astype(np.float64) if name in ("q", "k", "v", "sinks") else x
        for name, x in arrays.items()
    }
    truth, true_lse = oracles.attention(**exact, **case.keywords, return_lse=True)
    assert_as_accurate(out, plain, truth)
    seen = np.isfinite(true_lse)
    np.testing.assert_array_equal(np.asarray(lse)[~seen], -np.inf)
    np.testing.assert_array_equal(np.asarray(out)[~seen], 0) if "sinks" not in arrays else None
    # a score is a sum of H products in float32, and its logarithm adds one rounding
    largest = float(np.abs(true_lse[seen]).max(initial=1)) * 8
    assert_as_accurate(
        np.where(seen, lse, 0),
        np.where(seen, plain_lse, 0),
        np.where(seen, true_lse, 0),
        largest_term=largest,
    )


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str):
    case = INTERPRETED[name]
    assert_right(case, *run(case, interpret=True))


def test_the_check_can_fail():
    case = INTERPRETED["17 queries"]
    arrays = case.arrays()
    out, lse = flash_attention_reference(**arrays, return_lse=True)
    assert_right(case, arrays, (out, lse))
    with pytest.raises(AssertionError):
        assert_right(case, arrays, (out.at[0, 3, 1].multiply(1.05), lse))
    with pytest.raises(AssertionError):
        assert_right(case, arrays, (out, lse.at[0, 3, 1].add(1e-3)))


def test_a_query_that_sees_nothing_has_no_sink_either():
    arrays = Case((1, 17, 64, 2, 1, 64), "sinks").arrays()
    arrays |= {"sinks": jnp.array([-jnp.inf, 0.5], F32), "kv_lengths": jnp.zeros(1, jnp.int32)}
    kernel = functools.partial(flash_attention, interpret=True, config=SMALL, return_lse=True)
    out, lse = interpreted(lambda arrays: kernel(**arrays), arrays)
    assert not jnp.any(out)
    assert jnp.all(lse[..., 0] == -jnp.inf)
    assert jnp.all(lse[..., 1] == 0.5)


DIFFERENTIATED = {
    "sinks": Case((1, 65, 65, 2, 1, 64), "sinks"),
    "everything": Case(
        (1, 65, 65, 2, 1, 64),
        "segments sinks",
        lengths=(50,),
        keywords={**FULL, "window": 8, "softcap": 2.0, "scale": 0.3},
    ),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients(name: str):
    """Of what users call, whose arguments go on to the backward pass."""
    case = DIFFERENTIATED[name]
    arrays = case.arrays()
    # A sink's gradient adds up what rounding leaves of each row's result: two sums may have much
    of = ("q", "k", "v", "sinks") if name == "sinks" else ("q", "k", "v")
    floats = {each: arrays[each] for each in of}
    sides = {each: x for each, x in arrays.items() if each not in floats} | case.keywords
    d_out = jnp.broadcast_to(jnp.linspace(-1, 1, 64, dtype=BF16), arrays["q"].shape)

    def gradients(floats):
        def loss(floats):
            out, lse = kernel(**floats, return_lse=True)
            return jnp.sum(out.astype(F32) * d_out.astype(F32)) + jnp.sum(lse)

        return jax.grad(loss)(floats)

    kernel = functools.partial(flash_attention, **sides, interpret=True, config=case.config)
    ours = interpreted(gradients, floats)
    given: Any = floats | {"d_out": d_out, "d_lse": jnp.ones(d_out.shape[:3], F32)}
    given = {name: np.asarray(x) for name, x in given.items()}
    exact: Any = {name: x.astype(np.float64) for name, x in given.items()}
    plain, truth = (
        oracles.attention(**given, **sides, dtype=BF16),
        oracles.attention(**exact, **sides),
    )
    for (each, x), other, true in zip(floats.items(), plain, truth, strict=False):
        assert ours[each].dtype == x.dtype
        assert_as_accurate(ours[each], other, true)


def test_ranges_of_blocks():
    ids = np.repeat(np.arange(4, dtype=np.int32), [100, 28, 128, 200])[None]
    found = block_ranges(jnp.asarray(ids), jnp.asarray(ids), q_block=128, kv_block=64)
    # queries 0-127 hold two documents, 128-255 one, 256-383 and 384-455 another
    assert found.tolist() == [[[0, 2, 8, 8], [2, 4, 2, 4], [4, 8, 4, 8], [4, 8, 4, 8]]]
    other = jnp.full((1, 64), 9, jnp.int32)
    assert block_ranges(other, jnp.asarray(ids), q_block=64, kv_block=64)[0, 0, 1] == 0


def shapes(*shape: int, dtype: Any = BF16) -> tuple[jax.ShapeDtypeStruct, ...]:
    b, t, s, n, kv_heads, h = shape
    kv = jax.ShapeDtypeStruct((b, s, kv_heads, h), dtype)
    return jax.ShapeDtypeStruct((b, t, n, h), dtype), kv, kv


WANTED = shapes(2, 64, 64, 4, 2, 64)


@pytest.mark.parametrize(
    ("arrays", "device", "phrase"),
    [
        (WANTED, H200, None),
        (WANTED, device_lib.Device("cpu"), "needs an NVIDIA GPU"),
        (WANTED, device_lib.Device("gpu", "NVIDIA A100", 8.0, 108), "needs a Hopper GPU"),
        (WANTED, device_lib.Device("gpu", "NVIDIA B200", 10.0, 148), "needs a Hopper GPU"),
        (shapes(1, 64, 64, 1, 1, 64, dtype=F32), H200, "would round float32"),
        (shapes(1, 64, 64, 1, 1, 64, dtype=jnp.float8_e5m2), H200, "or float8_e4m3fn, got"),
        ((*WANTED[:2], shapes(2, 64, 64, 4, 2, 64, dtype=F16)[2]), H200, "takes one dtype"),
        (shapes(1, 64, 64, 1, 1, 60), H200, "head width 60 is not a multiple of 8 up to 256"),
        (shapes(1, 64, 64, 1, 1, 264), H200, "head width 264 is not a multiple of 8 up to 256"),
        (shapes(1, 64, 0, 1, 1, 64), H200, "nothing to attend to"),
        (shapes(0, 64, 64, 1, 1, 64), H200, "nothing to attend to"),
    ],
)
def test_why_not(arrays, device, phrase):
    reason = why_not(*arrays, device=device)
    assert reason is None if phrase is None else reason is not None and phrase in reason


def test_a_traced_scale_is_refused():
    q, k, v = (jnp.zeros(x.shape, x.dtype) for x in WANTED)
    with pytest.raises(NotImplementedError, match="flash_attention: .*here it is traced"):
        jax.jit(lambda scale: flash_attention(q, k, v, scale=scale, interpret=True))(0.5)


@pytest.mark.parametrize(
    ("keywords", "phrase"),
    [
        ({"window": 0}, "window must be a whole number, 1 at least"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"kv_lengths": np.asarray([1, 65], np.int32)}, r"kv_lengths\[1\] is 65"),
        ({"q_segment_ids": np.zeros((2, 64), np.int32)}, "both sides or neither"),
        ({"sinks": jnp.zeros(3, F32)}, "one number a query head"),
        ({"config": Config(kv_block=8)}, "kv_block must be a multiple of 32"),
        ({"config": Config(consumers=4)}, "consumers must be one of"),
        ({"config": Config(stages=1)}, "stages must be 2 at least"),
        ({"config": Config(kv_block=256, consumers=3)}, "registers"),
        ({"config": Config(stages=16)}, "bytes on chip"),
    ],
)
def test_bad_calls_are_refused(keywords, phrase):
    q, k, v = (jnp.zeros(x.shape, x.dtype) for x in WANTED)
    with pytest.raises(ValueError, match=f"flash_attention: .*{phrase}"):
        flash_attention(q, k, v, **keywords, interpret=True)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_the_call_says_so():
    q, k, v = (jnp.zeros(x.shape, x.dtype) for x in WANTED)
    with pytest.raises(NotImplementedError, match="flash_attention: cannot run .* NVIDIA GPU"):
        flash_attention(q, k, v)


def test_candidates_fit():
    for call in tuning_calls():
        found = candidates(*call.arguments, device=H200)
        default = default_config(*call.arguments, device=H200)
        assert found
        assert default not in found
        assert bucket(*call.arguments).endswith("-causal")
        assert {_config_problem(config, call.arguments[0]) for config in found} == {None}


def test_consumers_take_turns_where_it_was_faster():
    def turns(b, t, width, n=32, **keywords):
        q = jax.ShapeDtypeStruct((b, t, n, width), BF16)
        return default_config(q, q, q, device=H200, **keywords).turns

    assert turns(1, 2048, 128)
    assert turns(1, 1024, 96)
    assert turns(16, 1024, 64)
    assert turns(1, 16384, 128, window=1024)
    assert not turns(16, 1024, 128)
    assert not turns(4, 4096, 96)
    assert not turns(1, 2048, 128, softcap=50.0)
    assert not turns(1, 2048, 256)


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize(
    ("masks", "width"),
    [
        *(("everything", width) for width in (64, 80, 96, 128, 192, 256)),
        *(("documents", width) for width in (64, 128, 256)),
        ("all keys", 192),
        ("documents", 192),
        ("soft cap", 192),
        ("", 80),
        ("", 256),  # the tile that has most registers
    ],
)
def test_compiled(masks: str, width: int):
    """No spills, but for documents and heads of 256 (benchmarks/cases/flash_attention.py), and no
    product that the assembler makes wait for another.

    Fewer masks at the widths of models: the table of `make gpu-compile`, where it has all cases.
    """
    q, k, v = shapes(2, 1000, 1003, 8, 2, width)
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v}
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
    assert program.mosaic_launches() == ["flash_attention"]
    kernel = program.kernel("flash_attention")
    spilled = SPILLED_WIDE if width == 256 and "q_segment_ids" in arrays else 0
    assert kernel.spill_store_bytes + kernel.spill_load_bytes <= spilled
    assert not [note for note in kernel.notes if note.startswith("C75")]
    assert kernel.count("HGMMA")


@pytest.mark.aot
def test_memory_is_linear():
    temporary = []
    for tokens in (4096, 16384, 65536):
        program = aot.compile_for(flash_attention, *shapes(1, tokens, tokens, 4, 1, 128))
        temporary.append(program.temporary_bytes)
    assert max(temporary) < 2**20, "only what is put out is written"


ON_DEVICE = {
    **{name: case for name, case in INTERPRETED.items() if case.config is None},
    "513": Case((2, 513, 513, 8, 2, 128), config=None),
    "513, heads of 64": Case((2, 513, 513, 7, 1, 64), config=None, dtype=F16),
    "513, heads of 72": Case((2, 513, 513, 4, 4, 72), config=None, keywords=FULL),
    "2048, heads of 256": Case((1, 2048, 2048, 2, 1, 256), config=None),
    "2048, heads of 256, window": Case(
        (1, 2048, 2048, 4, 2, 256), config=None, keywords={"window": 700, "softcap": 50.0}
    ),
    "2048, heads of 256, documents": Case((1, 2048, 2048, 4, 2, 256), "segments", config=None),
    "2048, heads of 192": Case(
        (1, 2048, 2048, 4, 2, 192), "segments sinks", config=None, keywords={"softcap": 50.0}
    ),
    "2048, all": Case(
        (2, 2048, 2048, 4, 1, 128),
        "segments sinks",
        config=None,
        lengths=(1500, 2048),
        keywords={"window": 700, "softcap": 20.0},
    ),
    "chunk at the end": Case((2, 513, 2048, 4, 1, 64), config=None, lengths=(513, 2000)),
    "8192": Case((1, 8192, 8192, 2, 1, 128), config=None),
    "8192, documents": Case((1, 8192, 8192, 2, 1, 64), "segments", config=None),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_on_the_device(name: str):
    case = ON_DEVICE[name]
    assert_right(case, *run(case))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [SMALL, ALONE, THREE, NO_TURNS, Config(96, stages=3, q_stages=1)]
)
def test_each_config_on_the_device(config: Config):
    for case in (Case((2, 513, 777, 4, 2, 64)), Case((1, 300, 777, 2, 1, 128), keywords=FULL)):
        case = dataclasses.replace(case, config=config)
        if case.shape[-1] == 128 and config.consumers == 3:
            continue
        assert_right(case, *run(case))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_calls_on_the_device(seed):
    rng = np.random.default_rng(seed)
    t, s = rng.integers(1, 700, 2)
    group, kv_heads = rng.choice([1, 4, 7, 8]), rng.integers(1, 3)
    width = 8 * int(rng.integers(1, 33))
    masks = rng.choice(["", "segments", "mixed", "sinks", "segments sinks"])
    keywords: dict[str, Any] = {"causal": bool(rng.integers(2))}
    if rng.integers(2):
        keywords["window"] = int(rng.integers(1, 400))
    if rng.integers(4) == 0:
        keywords["softcap"] = 7.0
    lengths = tuple(rng.integers(0, s + 1, 2).tolist()) if rng.integers(2) else None
    shape = (2, int(t), int(s), int(group * kv_heads), int(kv_heads), width)
    dtype = (BF16, F16)[rng.integers(2)]
    case = Case(shape, str(masks), dtype, None, lengths, keywords)
    assert_right(case, *run(case))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.H % 8 == 0])
def test_what_others_test_on_the_device(name: str):
    case = CASES[name]
    dtype = BF16 if case.dtype == "float32" else jnp.dtype(case.dtype)
    q, k, v, _ = (jnp.asarray(x).astype(dtype) for x in case.inputs())
    kwargs = {
        name: jax.device_put(x) if isinstance(x, np.ndarray) else x
        for name, x in case.kwargs.items()
    }
    traced = {name: x for name, x in kwargs.items() if isinstance(x, jax.Array)}
    rest = {name: x for name, x in kwargs.items() if name not in traced}
    ours = jax.jit(lambda q, k, v, traced: flash_attention(q, k, v, **traced, **rest))(
        q, k, v, traced
    )
    plain = flash_attention_reference(q, k, v, **kwargs)
    exact = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    truth = oracles.attention(*exact, **case.kwargs)
    assert_as_accurate(ours, plain, truth)


@pytest.mark.gpu
def test_under_a_soft_cap_what_is_masked_may_be_nan():
    """Keys behind a row's length, beside others that are seen; one that is seen shows."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 384, 2, 64), BF16) for key in keys)
    lengths = jnp.asarray([293], jnp.int32)
    behind = jnp.arange(384)[None, :, None, None] >= lengths[0]
    attend = functools.partial(flash_attention, causal=False, softcap=30.0, kv_lengths=lengths)
    v = jnp.where(behind, 0, v)
    right = attend(q, k, v)
    assert np.array_equal(attend(q, jnp.where(behind, jnp.nan, k), v), right)
    assert np.isnan(attend(q, k.at[:, 5].set(jnp.nan), v)).all()


@pytest.mark.skipif(
    device_lib.why_not_interpreted() is None, reason="this jax interprets attention"
)
def test_an_interpreter_that_knows_no_attention_says_so():
    x, lengths = jnp.ones((1, 64, 2, 64), jnp.bfloat16), jnp.ones(1, jnp.int32)
    for run in (
        lambda: pallas_kernels.flash_attention(x, x, x, interpret=True),
        lambda: pallas_kernels.decode_attention(x[:, :1], x, x, lengths, interpret=True),
    ):
        with pytest.raises(NotImplementedError, match=r"needs jax 0.11 \(Python 3.12\), whose int"):
            run()
