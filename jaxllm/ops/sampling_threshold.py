"""Which scores of a row top-k and top-p keep: those from a threshold on, found without a sort."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jaxtyping import Array, Float, Int

from jaxllm.ops._select import Implementation, Table, pallas, select
from pallas_kernels.sampling_threshold import check, sampling_threshold_reference, why_not
from pallas_kernels.sampling_threshold import sampling_threshold as sampling_threshold_kernel


def sampling_threshold(
    keys: Int[Array, "B V"],
    ratio: Float[Array, "B V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    *,
    implementation: str | Mapping[str, str] = "auto",
) -> Int[Array, " B"]:
    """The lowest key that stays in each row; -2^31 where nothing is dropped.

    keys int32 order the scores; ratio float32 is their probability over the row's largest. top_k
    keeps at least k keys, and top_p of those the fewest that have p of their mass; equal keys stay
    or go together. top_k of 0 or from V on, and top_p of 1 are off.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError if the named implementation
    cannot run the call.
    """
    check(keys, ratio, top_k, top_p)
    run = select(
        "sampling_threshold", SAMPLING_THRESHOLD, implementation, keys, ratio, top_k, top_p
    )
    return run(keys, ratio, top_k, top_p)


SAMPLING_THRESHOLD: Table = {
    # H200, [1, 151936], us with what is between kernels, top-k, top-p, both: 67, 63, 107 and by XLA
    # 592, 638, 1072, for a GPU's loop asks the host
    **pallas(sampling_threshold_kernel, why_not),
    "xla": Implementation(jax.jit(sampling_threshold_reference)),
}
