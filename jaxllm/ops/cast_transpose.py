"""A matrix in 8-bit floating point, and its transpose: what a layer in fp8 is trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.ops._select import Implementation, Table, pallas, select
from pallas_kernels.cast_transpose import cast_transpose as cast_transpose_kernel
from pallas_kernels.cast_transpose import cast_transpose_reference, check, why_not


def cast_transpose(
    x: Float[Array, "M N"],
    scale: Float[Array, ""],
    dtype: Any = jnp.float8_e4m3fn,
    *,
    implementation: str | Mapping[str, str] = "auto",
) -> tuple[Float[Array, "M N"], Float[Array, "N M"]]:
    """(y, y^T): y = x * (1 / scale), rounded to `dtype`, float8_e4m3fn or float8_e5m2.

    What is beyond the largest number of the dtype becomes that number, and NaN stays NaN. scale is
    float32. No gradient passes through.
    Raises: ValueError if shapes or dtypes are others. NotImplementedError if the named
    implementation cannot run the call.
    """
    check(x, scale, dtype)
    run = select("cast_transpose", CAST_TRANSPOSE, implementation, x, scale, dtype)
    return run(x, scale, dtype)


CAST_TRANSPOSE: Table = {
    # H200, us, [32768, 2048] and [32768, 5504] of bfloat16: 72 and 187, by XLA 138 and 352
    **pallas(cast_transpose_kernel, why_not),
    "xla": Implementation(cast_transpose_reference),
}
