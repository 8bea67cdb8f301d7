"""No array of T x S, forward or backward: what programs allocate grows as their tokens do."""

import functools

import jax
import pytest

from jaxllm import aot
from pallas_kernels.attention_reference import attention_reference
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.flash_attention import flash_attention

LENGTHS = (4096, 16384, 65536)
HEADS = 4, 2, 128  # N, K, H: memory for each is alike
pytestmark = [pytest.mark.slow, pytest.mark.aot]


def both(attend, q, k, v, d_out, *rest):
    out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, *rest), q, k, v)
    return out, vjp(d_out)


def packed(attend, q, k, v, ids):
    return attend(q, k, v, q_segment_ids=ids, kv_segment_ids=ids)


def structs(t, backward=False, ids=False):
    n, k, h = HEADS
    q, kv = (jax.ShapeDtypeStruct((1, t, heads, h), "bfloat16") for heads in (n, k))
    rest = (jax.ShapeDtypeStruct((1, t), "int32"),) * ids
    return (q, kv, kv, *(q,) * backward, *rest)


def peaks(f, lengths=LENGTHS, **kinds):
    return [aot.compile_for(f, *structs(t, **kinds)).peak_bytes for t in lengths]


def assert_linear(found, lengths=LENGTHS):
    """Each number grows at most as its length does, up to a tenth."""
    for i in range(1, len(lengths)):
        allowed = 1.1 * found[i - 1] * lengths[i] / lengths[i - 1]
        assert found[i] <= allowed, dict(zip(lengths, found, strict=True))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("ids", [False, True], ids=["causal", "documents"])
def test_attention_takes_linear_memory(backward, ids):
    attend = functools.partial(packed, flash_attention) if ids else flash_attention
    f = functools.partial(both, attend) if backward else attend
    found = peaks(f, backward=backward, ids=ids)
    assert_linear(found)
    scores = LENGTHS[-1] ** 2
    assert found[-1] < scores / 4, f"{found[-1]} bytes; one head has {scores} scores"


def test_decoding_takes_linear_memory():
    def peak(s):
        n, k, h = HEADS
        q = jax.ShapeDtypeStruct((1, 1, n, h), "bfloat16")
        cache = jax.ShapeDtypeStruct((1, s, k, h), "bfloat16")
        lengths = jax.ShapeDtypeStruct((1,), "int32")
        program = aot.compile_for(decode_attention, q, cache, cache, lengths)
        assert program.temporary_bytes < 4 * 2**20, "more than what the splits leave"
        return program.peak_bytes

    assert_linear([peak(s) for s in LENGTHS])


def test_the_plain_path_does_not():
    lengths = (1024, 4096)
    with pytest.raises(AssertionError):
        assert_linear(peaks(attention_reference, lengths), lengths)
