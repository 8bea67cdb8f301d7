"""Cases of attention: plain paths, truths and samples agree, and what is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention_rivals, rivals, torch_rivals
from benchmarks.cases import decode_attention, flash_attention
from benchmarks.correct import check

SHAPE = 2, 160, (4, 2, 16)
CALLS = [
    {},
    {"causal": False},
    {"window": 37},
    {"softcap": 3.0},
    {"documents": 5},
    {"documents": 3, "window": 20, "softcap": 5.0},
    {"documents": 3, "causal": False},
]
IDS = [", ".join(f"{k} {v}" for k, v in call.items()) or "causal" for call in CALLS]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_plain_path_by_blocks_and_truth_agree(monkeypatch, call, backward):
    """At once, by blocks of queries, and the sampled part of it, beside float64."""
    monkeypatch.setattr(flash_attention, "BLOCK", 32)
    b, t, heads = SHAPE
    case = flash_attention._case(b, t, heads, **call, backward=backward)
    arguments = case.inputs(jax.random.key(0))
    at_once = case.plain(*arguments)
    monkeypatch.setattr(flash_attention, "DIRECT_BYTES", 0)
    by_blocks = jax.jit(case.plain)(*arguments)
    result = check(case, *jax.device_get((arguments, by_blocks, at_once)))
    assert result["status"] == "right", result
    assert result["plain_error"] < 1e-2, result

    monkeypatch.setattr(flash_attention, "SAMPLED_ROWS", 7)
    assert case.sample is not None
    part, some = case.sample(arguments, by_blocks)
    assert check(case, *jax.device_get((part, some, some)))["status"] == "right"
    row, head = (3, -1) if backward else (flash_attention._sampled_rows(t)[3], 0)
    worse = jax.tree.map(lambda x: x.at[1, row, head, 0].add(0.25), by_blocks)
    bad = case.sample(arguments, worse)[1]
    assert check(case, *jax.device_get((part, bad, some)))["status"] == "wrong"


def test_the_case_of_float8_is_near_the_truth(monkeypatch):
    b, t, heads = SHAPE
    case = flash_attention._case(b, t, heads, dtype="float8_e4m3fn")
    assert case.op == "flash_attention_fp8"
    assert set(attention_rivals.of(case)) >= {"cudnn, bfloat16", "cudnn, float8"}
    assert case.bytes == b * t * 16 * (3 * 4 + 2 * 2)  # the result has two bytes
    arguments = case.inputs(jax.random.key(0))
    at_once = case.plain(*arguments)
    monkeypatch.setattr(flash_attention, "DIRECT_BYTES", 0)
    monkeypatch.setattr(flash_attention, "BLOCK", 32)
    by_blocks = jax.jit(case.plain)(*arguments)
    result = check(case, *jax.device_get((arguments, by_blocks, at_once)))
    assert result["status"] == "right", result
    assert 5e-3 < result["plain_error"] < case.differs / 2, result
    worse = by_blocks.at[1, 3, 0, 0].add(0.5)
    assert check(case, *jax.device_get((arguments, worse, at_once)))["status"] == "wrong"


def test_the_gradient_is_that_of_the_plain_path():
    b, t, heads = SHAPE
    case = flash_attention._case(b, t, heads, dtype="float32", window=50, backward=True)
    q, k, v, out, lse, d_out = case.inputs(jax.random.key(1))
    call = flash_attention._case(b, t, heads, dtype="float32", window=50)
    wanted = jax.vjp(call.plain, q, k, v)[1](d_out)
    for ours, true in zip(case.plain(q, k, v, out, lse, d_out), wanted, strict=True):
        np.testing.assert_allclose(ours, true, atol=2e-5)  # float32 sums of 160 terms


@pytest.mark.parametrize(
    ("call", "pairs"),
    [({}, 160 * 80), ({"causal": False}, 160 * 160), ({"window": 37}, 160 * 37 - 37 * 37 // 2)],
)
def test_operations_by_model(call, pairs):
    b, t, (n, k, h) = SHAPE
    forward, backward = (
        flash_attention._case(b, t, (n, k, h), **call, backward=way) for way in (False, True)
    )
    assert forward.operations == 4 * b * n * h * pairs
    assert backward.operations == 10 * b * n * h * pairs
    assert forward.bytes == 2 * (2 * b * t * n * h + 2 * b * t * k * h)
    assert forward.measured_by == "matmul"


def test_packed_documents_do_less():
    ids = flash_attention.document_ids(2, 1000, 16)
    assert (ids[0] == ids[1]).all()
    assert sorted(set(ids[0])) == list(range(16))
    assert (np.diff(ids[0]) >= 0).all()
    packed = flash_attention._case(1, 1000, (4, 2, 16), documents=16)
    whole = flash_attention._case(1, 1000, (4, 2, 16))
    assert packed.operations < whole.operations / 4
    assert packed.inputs(jax.random.key(0))[3].tolist() == ids[:1].tolist()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("documents", [0, 3])
def test_a_rival_is_given_what_the_call_means(backward, documents):
    """A plain function in a rival's place gives the case's result, with what it is told."""
    b, t, heads = SHAPE
    case = flash_attention._case(b, t, heads, documents=documents, backward=backward)

    def forward(q, k, v, mask=None):
        assert (mask is None) == (not documents)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=mask is None)

    rival = attention_rivals._flash(case, forward, "mask")
    arguments = case.inputs(jax.random.key(0))
    used = arguments if rival.prepare is None else rival.prepare(*arguments)
    ours, plain = jax.tree.leaves(rival.run(*used)), jax.tree.leaves(case.plain(*arguments))
    assert len(ours) == len(plain)
    for x, y in zip(ours, plain, strict=True):
        apart = jnp.linalg.norm((x - y).astype(jnp.float32)) / jnp.linalg.norm(
            y.astype(jnp.float32)
        )
        assert float(apart) < 2e-2


def test_a_rival_that_refuses_says_why():
    case = flash_attention._case(1, 64, (4, 2, 16), softcap=5.0)
    rival = attention_rivals.of(case)["cudnn"]
    with pytest.raises(RuntimeError, match="NotImplementedError: has no soft cap"):
        rival.run(*case.inputs(jax.random.key(0)))


CACHES = [
    {},
    {"uneven": True},
    {"softcap": 3.0},
    {"pages": True, "uneven": True},
    {"cache": "int8"},
    {"cache": "int8", "uneven": True, "softcap": 5.0},
    {"cache": "float8_e4m3fn", "pages": True},
]


@pytest.mark.parametrize("cache", CACHES, ids=[str(c)[1:-1] or "bfloat16" for c in CACHES])
def test_the_plain_path_and_the_truth_of_decoding_agree(cache):
    case = decode_attention._case(3, 256, (6, 3, 16), **cache)
    arguments = case.inputs(jax.random.key(0))
    out = case.plain(*arguments)
    assert out.shape == (3, 1, 6, 16)
    result = check(case, *jax.device_get((arguments, out, out)))
    assert result["status"] == "right", result
    assert result["plain_error"] < 1e-2, result
    if case.sample is not None:
        part, some = case.sample(arguments, out)
        assert some.shape == (1, 1, 4, 16)
        assert check(case, *jax.device_get((part, some, some)))["status"] == "right"
        bad = case.sample(arguments, out.at[2, 0, 5, 0].add(0.25))[1]
        assert check(case, *jax.device_get((part, bad, some)))["status"] == "wrong"


def test_bytes_of_a_cache_by_model():
    case = decode_attention._case(8, 1024, (32, 8, 128))
    assert case.bytes == 8 * (1024 * 2 * 8 * 128 * 2 + 2 * 32 * 128 * 2 + 4)
    assert case.operations == 8 * 4 * 32 * 128 * 1024
    assert case.measured_by == "read"
    small = decode_attention._case(8, 1024, (32, 8, 128), cache="int8")
    assert small.bytes == 8 * (1024 * 2 * 8 * (128 + 4) + 2 * 32 * 128 * 2 + 4)
    uneven = decode_attention._case(8, 1024, (32, 8, 128), uneven=True)
    assert uneven.bytes < case.bytes
    paged = decode_attention._case(8, 1024, (32, 8, 128), pages=True)
    assert paged.bytes == case.bytes + 8 * 16 * 4


@pytest.mark.reference
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("call", [call for call in CALLS if "softcap" not in call], ids=str)
def test_torch_computes_the_op(call, backward):
    case = flash_attention._case(*SHAPE, dtype="float32", backward=backward, **call)
    compare_with_torch(case)


@pytest.mark.reference
def test_torch_decodes():
    compare_with_torch(decode_attention._case(3, 256, (6, 3, 16)))


def compare_with_torch(case):
    import torch

    arguments = case.inputs(jax.random.key(0))
    tensors = [torch.from_numpy(np.array(x.astype(jnp.float32))) for x in arguments]
    tensors[: len(case.arguments)] = [
        torch.from_numpy(case.constants[i]) if i in case.constants else x.to(torch.float32)
        for i, x in enumerate(tensors)
    ]
    torch.manual_seed(0)
    forward = torch_rivals.of(case)["torch sdpa"]
    ours = torch_rivals.call(case, forward, tensors)()
    if rivals.is_backward(case):
        torch.manual_seed(0)
        d_out = jnp.asarray(torch.randn_like(tensors[0]).numpy())
        arguments = (*arguments[:-1], d_out)
    plain = jax.tree.leaves(case.plain(*arguments))
    for x, y in zip(ours if isinstance(ours, tuple) else (ours,), plain, strict=True):
        np.testing.assert_allclose(x.numpy(), y.astype(jnp.float32), atol=2e-2)
