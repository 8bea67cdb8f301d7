"""Calls of attention that other projects test theirs with, said in our words.

From the tests of JAX (nn, cuDNN's attention, and the Pallas kernels for GPUs: flash, splash, decode
and paged attention) and of tokamax: sizes and arguments, no code. Where theirs has a mask that ours
has no word for, it is said by segment ids: a causal mask that starts at the first key while rows
are padded, keys that are dropped, a row of which nothing is seen. float32 stays so where an
implementation takes it, and is bfloat16 elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """q is [B, T, N, H], k and v [B, S, K, H]; lengths, segment ids and sinks are arrays."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    dtype: str = "float32"
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradient: bool = True
    normed: bool = False  # q and k have rows of length 1
    positive: bool = False  # all numbers are between 1 and 2

    @property
    def scores(self) -> int:
        return self.B * self.N * self.T * self.S

    def inputs(self) -> list[np.ndarray]:
        """q, k, v and a cotangent, float32."""
        rng = np.random.default_rng(self.B + self.T + self.S + self.N + self.H)
        q = (self.B, self.T, self.N, self.H)
        kv = (self.B, self.S, self.K, self.H)
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in (q, kv, kv, q)]
        if self.positive:
            arrays[:3] = [1 + rng.random(x.shape, np.float32) for x in arrays[:3]]
        if self.normed:
            arrays[:2] = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in arrays[:2]]
        return arrays


def _ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def _ids(q: list[list[int]], kv: list[list[int]] | None = None) -> dict[str, np.ndarray]:
    """Segment ids by run lengths: the first run is segment 0."""
    sides = [
        np.stack([np.repeat(np.arange(len(row)), row) for row in rows]).astype(np.int32)
        for rows in (q, q if kv is None else kv)
    ]
    return dict(zip(("q_segment_ids", "kv_segment_ids"), sides, strict=True))


def _some_keys(size: int, *seen: tuple[int, int]) -> dict[str, np.ndarray]:
    """Row b sees the keys from seen[b][0] to seen[b][1], and no others."""
    key = np.arange(size)
    kv = np.stack([((key >= start) & (key < end)).astype(np.int32) for start, end in seen])
    return {"q_segment_ids": np.ones((len(seen), size), np.int32), "kv_segment_ids": kv}


def _documents_with_gaps(rows: int, size: int) -> dict[str, np.ndarray]:
    """Documents of uneven lengths, of which about the last fifth is padding that no query sees."""
    rng = np.random.default_rng(rows)
    q, kv = np.zeros((rows, size), np.int32), np.zeros((rows, size), np.int32)
    for row in range(rows):
        count = 2 * (row + 2)
        sizes = rng.multinomial(size, rng.dirichlet(np.full(count, 10.0)))
        end = 0
        for i, length in enumerate(sizes):
            start, end = end, end + length
            q[row, start:end] = kv[row, start:end] = i
            kv[row, start + rng.binomial(length, 0.8) : end] = -1
    return {"q_segment_ids": q, "kv_segment_ids": kv}


ALL = {"causal": False}
CASES: dict[str, Case] = {
    # JAX, tests/nn_test.py
    "nn, one head a key head": Case(2, 128, 128, 4, 4, 32, "bfloat16", ALL),
    "nn, two": Case(2, 128, 128, 4, 2, 32, "float16", ALL),
    "nn, four": Case(2, 128, 128, 4, 1, 32, "bfloat16", ALL),
    "nn, causal": Case(2, 128, 128, 4, 4, 32, "bfloat16"),
    "nn, padding": Case(2, 128, 128, 4, 4, 32, "bfloat16", {**ALL, "kv_lengths": _ints(32, 64)}),
    "nn, causal and padding": Case(
        2, 128, 128, 4, 4, 32, "bfloat16", _some_keys(128, (0, 32), (0, 64))
    ),
    "nn, causal and window": Case(2, 128, 128, 4, 4, 32, "bfloat16", {"window": 4}),
    # JAX, tests/fused_attention_stablehlo_test.py
    "cudnn, scale": Case(4, 1024, 1024, 8, 8, 64, "float16", {**ALL, "scale": 0.5}),
    "cudnn, causal": Case(4, 1024, 1024, 8, 8, 128, "bfloat16", {"scale": 0.5}),
    "cudnn, half the keys": Case(
        4, 1024, 1024, 4, 4, 64, "bfloat16", {**ALL, "scale": 1.0, "kv_lengths": _ints(*[512] * 4)}
    ),
    "cudnn, window": Case(4, 1024, 1024, 4, 4, 64, "bfloat16", {"scale": 1.0, "window": 64}),
    "cudnn, wide heads": Case(2, 64, 64, 2, 2, 256, "bfloat16", {"scale": 1.0}),
    "cudnn, packed": Case(
        *(4, 512, 512, 4, 4, 64, "bfloat16"),
        {
            **ALL,
            **_ids([[170, 170, 172], [150, 187, 3, 172], [190, 190, 132], [400, 112]]),
            "scale": 0.1,
        },
    ),
    # JAX, tests/pallas/mgpu_attention_test.py
    "flash, one key head": Case(1, 4096, 4096, 4, 1, 64, "float16", gradient=False),
    "flash, two heads a key head": Case(1, 4096, 4096, 6, 3, 128, "float16", ALL, gradient=False),
    "flash, wide": Case(1, 4096, 4096, 4, 4, 256, "float16", gradient=False),
    "flash, backward": Case(3, 512, 512, 6, 3, 128, "float16", ALL),
    "flash, backward, one key head": Case(3, 512, 512, 4, 1, 64, "float16", ALL),
    "flash, backward, wide": Case(3, 512, 512, 4, 4, 256, "float16", ALL),
    "flash, backward, fewer keys": Case(1, 4096, 3584, 4, 1, 64, "float16", ALL),
    "splash, all": Case(2, 2048, 2048, 2, 1, 128, "bfloat16", ALL, normed=True),
    "splash, nothing": Case(
        2, 2048, 2048, 1, 1, 128, "bfloat16", _some_keys(2048, (0, 0), (0, 0)), normed=True
    ),
    "splash, causal": Case(1, 2048, 2048, 2, 1, 128, "bfloat16", normed=True),
    "splash, documents": Case(
        *(2, 2048, 2048, 2, 1, 128, "bfloat16"), _ids([[1024] * 2, [512] * 4]), normed=True
    ),
    "splash, window": Case(2, 2048, 2048, 2, 1, 128, "bfloat16", {"window": 64}, normed=True),
    "splash, documents with gaps": Case(
        2, 2048, 2048, 1, 1, 128, "bfloat16", _documents_with_gaps(2, 2048), normed=True
    ),
    # JAX, tests/pallas/gpu_attention_test.py and gpu_paged_attention_test.py
    "decode, one head": Case(1, 1, 1024, 1, 1, 64, "float16", gradient=False),
    "decode, two rows": Case(2, 1, 1024, 2, 1, 64, "float16", gradient=False),
    "decode, one key head": Case(1, 1, 1024, 8, 1, 64, "float16", gradient=False),
    "decode, groups": Case(1, 1, 1024, 16, 4, 64, "float16", gradient=False),
    "decode, no groups": Case(1, 1, 1024, 32, 32, 64, "float16", gradient=False),
    **{
        f"paged, {ratio} heads a key head of {width}": Case(
            *(5, 1, 2048, heads * ratio, heads, width, "float16"),
            {"kv_lengths": _ints(3, 256, 513, 1023, 2048)},
            gradient=False,
            normed=True,
        )
        for heads, ratio, width in ((1, 2, 32), (2, 16, 64), (2, 20, 32))
    },
    # tokamax, tokamax/_src/ops/attention/test_base.py
    "tokamax, self": Case(2, 1024, 1024, 4, 4, 64, "float32", ALL),
    "tokamax, self, bfloat16": Case(2, 1024, 1024, 4, 4, 64, "bfloat16", ALL),
    "tokamax, self, float16": Case(2, 1024, 1024, 4, 4, 64, "float16", ALL),
    "tokamax, cross": Case(2, 1024, 1536, 4, 4, 64, "float32", ALL),
    **{
        f"tokamax, {t} queries, {s} keys": Case(2, t, s, 4, 4, 64, "float32", ALL, positive=True)
        for t, s in ((8, 256), (256, 8), (7, 8), (15, 16), (15, 15))
    },
    "tokamax, one key head": Case(2, 1024, 1024, 4, 1, 64, "float32", ALL),
    "tokamax, groups": Case(2, 1024, 1024, 16, 4, 64, "float32", ALL),
    "tokamax, an odd number of queries": Case(2, 112, 1024, 4, 4, 64, "float32", ALL),
    "tokamax, heads of 48": Case(2, 1024, 1024, 4, 4, 48, "float32", ALL),
    "tokamax, heads of 24": Case(2, 1024, 1024, 4, 4, 24, "float32", ALL),
    "tokamax, causal": Case(2, 1024, 1024, 4, 4, 64),
    # Their causal mask starts at the first key: query t sits at key t, as if there were T keys
    "tokamax, causal, 512 keys": Case(
        2, 1024, 512, 4, 4, 64, "float32", {"kv_lengths": _ints(1024, 1024)}
    ),
    "tokamax, causal, 539 keys": Case(
        2, 1024, 539, 4, 4, 64, "float32", {"kv_lengths": _ints(1024, 1024)}
    ),
    "tokamax, padding": Case(
        2, 1024, 1024, 4, 4, 64, "float32", {**ALL, "kv_lengths": _ints(123, 999)}
    ),
    "tokamax, window": Case(2, 1024, 1024, 4, 4, 64, "float32", {"window": 128}),
    "tokamax, causal from key 512 on": Case(
        2, 1024, 1024, 4, 4, 64, "float32", _some_keys(1024, (512, 1024), (512, 1024))
    ),
    "tokamax, causal to key 512": Case(
        2, 1024, 1024, 4, 4, 64, "float32", _some_keys(1024, (0, 513), (0, 513))
    ),
    "tokamax, causal in the middle": Case(
        2, 1024, 1024, 4, 4, 64, "float32", _some_keys(1024, (256, 769), (256, 769))
    ),
    "tokamax, soft cap": Case(2, 1024, 1024, 4, 4, 64, "float32", {**ALL, "softcap": 10.0}),
}
