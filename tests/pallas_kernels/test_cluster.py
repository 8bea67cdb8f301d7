"""What blocks of a cluster wait for before they read each other's memory, and what they find."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from numerics import assert_as_accurate

from jaxllm import aot
from pallas_kernels import decode_attention, sampling_threshold, softmax
from pallas_kernels.decode_attention import Config as Splits

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
struct = jax.ShapeDtypeStruct


def softmaxes(*, stages: int):
    config = softmax.Config(stages=stages, blocks_per_sm=1, cluster=8)
    return functools.partial(softmax.scale_softmax, config=config), [struct((2, 131072), BF16)]


def decoding(cache: Any):
    query, keys = struct((1, 1, 16, 64), BF16), struct((1, 512, 2, 64), cache)
    arrays = [query, keys, keys, struct((1,), I32)]
    names = () if cache == BF16 else ("k_scale", "v_scale")
    arrays += [struct((1, 512, 2), F32)] * len(names)
    config = Splits(64, 2, 4, 2)  # two parts, so that the results go straight to memory

    def run(*arrays):
        scales = dict(zip(names, arrays[4:], strict=True))
        return decode_attention(*arrays[:4], **scales, config=config)

    return run, arrays


def sampling():
    rows = [struct((1,), I32), struct((1,), F32)]
    scores = [struct((1, 151936), dtype) for dtype in (I32, F32)]
    return sampling_threshold, [*scores, *rows]


CALLS = {
    "softmax": lambda: softmaxes(stages=0),
    "softmax, streamed": lambda: softmaxes(stages=1),
    "decoding": lambda: decoding(BF16),
    "decoding, int8": lambda: decoding(jnp.int8),
    "decoding, float8": lambda: decoding(jnp.float8_e4m3fn),
    "sampling": sampling,
}


@pytest.mark.aot
@pytest.mark.parametrize("name", CALLS)
def test_all_warps_meet_before_one_tells_the_cluster(name, monkeypatch):
    """That what they have written is there, and that they are done with reading."""
    texts, read = [], aot._mosaic_kernel

    def kept(ptx):
        texts.append(ptx.read_text())
        return read(ptx)

    monkeypatch.setattr(aot, "_mosaic_kernel", kept)
    run, arrays = CALLS[name]()
    aot.compile_for(run, *arrays)
    [text] = [text for text in texts if "ld.shared::cluster" in text]
    pieces = re.split(r"mbarrier\.arrive[.\w]*\.shared::cluster", text)
    assert len(pieces) > 2  # before the first loads, and behind the last
    for before in pieces[:-1]:
        memory = [m.end() for m in re.finditer(r"(ld|st)[.\w]*\.shared", before)]
        # no label ($L) in between: nothing jumps past the barrier
        assert re.search(r"fence\.proxy\.async[^$]*\bbar\.sync", before[memory[-1] :])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_every_block_sees_what_the_others_found(dtype):
    """Of 6144 such rows 17 lacked a block's share before warps met first."""
    x = 3 * jax.random.normal(jax.random.key(0), (256, 131072), dtype)
    exact = jax.jit(softmax.scale_softmax_reference)(x).astype(F32)

    @jax.jit
    def apart(x):
        y = softmax.scale_softmax(x, config=softmax.Config(stages=0, blocks_per_sm=1, cluster=8))
        return jnp.max(jnp.abs(y.astype(F32) - exact) / jnp.maximum(exact, 1e-20))

    # a unit in the last place of bfloat16; a share of eight that is not there is a seventh
    assert max(float(apart(x)) for _ in range(24)) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("width", "config"),
    [
        (8248, None),  # five blocks
        (40008, None),  # a share is more than one copy
        (40008, softmax.Config(stages=1, blocks_per_sm=1, cluster=2)),
        (128256, None),  # the last share is the rest
        (131072, None),  # all threads have some
    ],
)
def test_shares_of_rows(width, config, dtype, masked, causal):
    x, d_y = (jax.random.normal(jax.random.key(i), (2, 5, width), dtype) for i in range(2))
    mask = jax.random.bernoulli(jax.random.key(2), 0.5, (width,)) if masked else None
    keywords = {"mask": mask, "causal": causal, "scale": 3.0}
    y, pull = jax.vjp(lambda x: softmax.scale_softmax(x, config=config, **keywords), x)
    ours = y, *pull(d_y)
    known = {**keywords, "mask": None if mask is None else np.asarray(mask)}
    plain, truth = (
        (
            oracles.scale_softmax(np.asarray(x), **known, dtype=kind),
            oracles.scale_softmax(np.asarray(x), d_y=np.asarray(d_y), **known, dtype=kind)[0],
        )
        for kind in (x.dtype, np.float64)
    )
    for one, near, exact in zip(ours, plain, truth, strict=True):
        assert_as_accurate(one, near, np.asarray(exact))
