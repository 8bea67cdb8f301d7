"""Rotary position embedding: frequencies of every scaling kind, exact angles, and the rotation.

Pairs are half-split, as in Hugging Face checkpoints: number i of a head turns with number i + R/2,
where R is how many numbers are rotated. Source: Su et al. 2021, arXiv:2104.09864; scalings as named
below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.ops._select import Implementation, Table, pallas, select, slower_for_few
from pallas_kernels.rope import check, rope_reference
from pallas_kernels.rope import rope as rope_kernel
from pallas_kernels.rope import why_not as why_not_kernel

# A frequency is kept as a fraction of a full turn a position, in FRACTION_BITS = 32 + LOW_BITS
# bits: the product with a position below 2**(32 - LOW_BITS) then needs only 32-bit integers, and
# whole turns fall off by overflow. An angle in float32 would lose 6e-3 at position 100,000; this
# one is off by less than 1e-6 at any position.
LOW_BITS = 12


def frequencies(
    dim: int,
    *,
    rope_theta: float,
    rope_type: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    original_max_position_embeddings: int | None = None,
    divisors: tuple[float, ...] | None = None,
) -> np.ndarray:
    """Radians a position, float64 [dim / 2]. `divisors` is the list of longrope (short or long).

    Raises: ValueError for another rope_type, an odd dim, or what the rope_type needs and lacks.
    Source: linear, arXiv:2306.15595; llama3, the Llama 3.1 release; yarn, arXiv:2309.00071;
    longrope, arXiv:2402.13753.
    """
    if dim % 2:
        raise ValueError(f"rope: numbers turn in pairs, but {dim} are to be turned")
    f = rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope_type == "default":
        return f
    if rope_type == "linear":
        return f / factor
    if rope_type == "longrope":
        if divisors is None or len(divisors) != len(f):
            count = None if divisors is None else len(divisors)
            raise ValueError(f"rope: longrope needs {len(f)} divisors, one a pair, got {count}")
        return f / np.asarray(divisors, np.float64)
    if rope_type in ("llama3", "yarn") and not original_max_position_embeddings:
        raise ValueError(
            f"rope: {rope_type} needs original_max_position_embeddings, got "
            f"{original_max_position_embeddings}"
        )
    original = float(original_max_position_embeddings or 0)  # only those two read it
    if rope_type == "llama3":
        wavelength = 2 * math.pi / f
        blend = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)  # 0 beyond original / low, 1 within original / high
        return (1 - blend) * f / factor + blend * f
    if rope_type == "yarn":

        def pair(rotations: float) -> float:
            """The (fractional) pair that makes this many rotations over the original context."""
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope_theta))

        low, high = pair(beta_fast), pair(beta_slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (np.arange(dim // 2) - low) / ((high - low) or 0.001)
        ramp = np.clip(ramp, 0.0, 1.0)
        return (1 - ramp) * f + ramp * f / factor
    raise ValueError(f"rope: rope_type {rope_type!r} is not supported")


def turns(radians: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies [R/2] in radians as (high 32 bits, next LOW_BITS bits) of a turn, both uint32."""
    scaled = np.mod(radians / (2 * math.pi), 1.0) * 2.0**32
    high = np.floor(scaled)
    return high.astype(np.uint32), np.floor((scaled - high) * 2.0**LOW_BITS).astype(np.uint32)


def cos_sin(
    positions: Int[Array, "B T"],
    high: UInt32[Array | np.ndarray, "#B #T R2"],
    low: UInt32[Array | np.ndarray, "#B #T R2"],
    *,
    scale: float = 1.0,
) -> tuple[Float[Array, "B T R2"], Float[Array, "B T R2"]]:
    """cos and sin of position * frequency in float32, times `scale`.

    `scale` is the attention factor of yarn and longrope. `high` and `low` come from `turns`;
    positions are from 1 - 2**20 to 2**20 - 1, at each of which both are within 1e-6 of float64.
    Raises: ValueError for positions that are no integers.
    """
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"cos_sin: positions must be integers, got {positions.dtype}")
    signed = positions.astype(jnp.int32)[..., None]
    position = jnp.abs(signed).astype(jnp.uint32)  # the product with `low` is cut: no sign in it
    turn = position * high + ((position * low) >> LOW_BITS)
    turn = jnp.where(signed < 0, -turn, turn)
    angle = jax.lax.bitcast_convert_type(turn, jnp.int32).astype(jnp.float32) * np.float32(
        2 * math.pi / 2**32
    )
    return jnp.cos(angle) * np.float32(scale), jnp.sin(angle) * np.float32(scale)


def rope(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "B T R2"],
    sin: Float[Array, "B T R2"],
    *,
    sliced: bool = False,
    implementation: str | Mapping[str, str] = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Rotates the first R numbers of every head of q and k; cos and sin have R2 = R / 2 columns.

    `sliced` says that q and k were cut out of one array: then "auto" leaves them to XLA.
    Dtypes: cos and sin are rounded to q's dtype before use, as Hugging Face does; products and sums
    are float32.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError if the named implementation
    cannot run the call.
    """
    check(q, k, cos, sin, None)
    run = select("rope", ROPE, implementation, q, k, cos, sin, sliced=sliced)
    return run(q, k, cos, sin, sliced=sliced)


def _pallas(q, k, cos, sin, *, sliced=False, interpret=False):
    del sliced
    return rope_kernel(q, k, cos, sin, interpret=interpret)


def _why_not_pallas(q, k, cos, sin, *, device, sliced=False) -> str | None:
    del sliced
    return why_not_kernel(q, k, cos, sin, device=device)


def _xla(q, k, cos, sin, *, sliced=False):
    del sliced
    return rope_reference(q, k, cos, sin)


def _not_auto(q, k, cos, sin, *, device, sliced=False) -> str | None:
    del k, cos, sin, device
    if sliced:
        return "it would need copies of the slices; XLA cuts and turns in one pass"
    if q.dtype == jnp.float32:  # H200, 8192 tokens of 32 + 8 heads of 128: 88.8 us, XLA 84.5 us
        return "in float32 XLA is as fast"
    return slower_for_few(q.shape[0] * q.shape[1])


ROPE: Table = {
    **pallas(_pallas, _why_not_pallas, _not_auto),
    "xla": Implementation(_xla),
}
