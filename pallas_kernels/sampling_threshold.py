"""The lowest key that top-k and then top-p keep, without a sort: a search on the keys' bits.

keys int32 [B, V] order the scores of a row; ratio float32 [B, V] is a score's probability over the
row's largest, in the same order. For each row the largest T is found such that

    top-k    at least k keys are T or above
    top-p    of those, the ones of at least T have a mass of p or above

so that equal keys stay or go together. Bits are fixed from the top, two at a time. A cluster owns a
row and its blocks hold a part of it in shared memory; in each step a block counts its part for the
three candidates, and all blocks read all counts. Masses are integers in units of at most 2^-30 of
the row's total, so sums are exact and no result depends on their order.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels import device as device_lib
from pallas_kernels.cluster import meet_blocks
from pallas_kernels.device import ACCESS_BYTES, MAX_BOX, SHARED_BYTES, THREADS, Device
from pallas_kernels.options import check_arrays, check_flags
from pallas_kernels.varying import vary_alike

LOWEST = -(2**31)
CLUSTER = 8  # what every Hopper GPU grants
ITEMSIZE = 4
VECTOR = ACCESS_BYTES // ITEMSIZE * THREADS  # numbers that the threads of a block load at once
UNROLLED = 4  # such loads under way; one alone would be waited for
LINE = THREADS  # numbers in a row of shared memory
GOLDEN = 2654435769  # 2^32 over the golden ratio


def sampling_threshold(
    keys: Int[Array, "B V"],
    ratio: Float[Array, "B V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    *,
    interpret: bool = False,
) -> Int[Array, " B"]:
    """The lowest key that stays in each row; -2^31 where nothing is dropped.

    top_k of 0 or from V on, and top_p of 1 are off. A ratio is from 0 to 1, and the largest key's
    is 1. No gradient goes through it.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for what `why_not` says.
    """
    check(keys, ratio, top_k, top_p)
    check_flags("sampling_threshold", interpret=interpret)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    if (reason := why_not(keys, ratio, top_k, top_p, device=device)) is not None:
        raise NotImplementedError(f"sampling_threshold: cannot run this call: {reason}")
    ratio, top_p = lax.stop_gradient((ratio, top_p))
    return _search(_Static(1 if interpret else CLUSTER, interpret), keys, ratio, top_k, top_p)


def sampling_threshold_reference(keys, ratio, top_k, top_p):
    """The mathematics in plain JAX; a search that no row needs is skipped at run time."""
    keys, ratio, top_k, top_p = vary_alike(keys, ratio, top_k, top_p)
    counted = (top_k > 0) & (top_k < keys.shape[1])
    weighed = top_p < 1

    def by_count(lowest):
        found = _threshold(keys, jnp.uint32(1), top_k.astype(jnp.uint32))
        return jnp.where(counted, found, lowest)

    def by_mass(lowest):
        left = jnp.where(keys >= lowest[:, None], ratio, 0)
        return jnp.where(weighed, _mass_threshold(keys, left, top_p), lowest)

    lowest = _lowest(keys)
    lowest = lax.cond(jnp.any(counted), by_count, lambda lowest: lowest, lowest)
    return lax.cond(jnp.any(weighed), by_mass, lambda lowest: lowest, lowest)


def _threshold(keys, weights, wanted):
    """Each row's largest T with sum(weights[keys >= T]) >= wanted."""

    def fix_bit(i, lowest):
        bit = lax.shift_left(jnp.int32(1), 31 - jnp.asarray(i, jnp.int32))
        candidate = lowest + bit  # the first wraps: -2**31 to 0
        reached = jnp.where(keys >= candidate[:, None], weights, jnp.uint32(0))
        return jnp.where(_total(reached) >= wanted, candidate, lowest)

    return lax.fori_loop(0, 32, fix_bit, _lowest(keys))


def _lowest(keys):
    return vary_alike(jnp.full(keys.shape[:1], LOWEST, jnp.int32), keys)[0]


def _mass_threshold(keys, ratio, top_p):
    """The lowest key that top-p keeps; ratio is 0 where a key was dropped before.

    Masses are integers with a total between 2**30 and 2**31, so their sums are exact and a row
    gives one threshold in any batch, on any device. The float total sets only the power of two.
    Rounded to nearest, many small masses could all err one way: by more than 1e-6 of the total at
    V = 151,936. A dither, fixed for each id and evenly spread over the ids, cancels that.
    """
    scale = _scale(jnp.sum(ratio, axis=-1))
    ids = lax.broadcasted_iota(jnp.uint32, keys.shape, 1)
    mass = (ratio * scale[:, None] + _dither(ids)).astype(jnp.uint32)  # rounds down
    # Less than p lies strictly above a key just if the key is not below the largest T with p at or
    # above it. At least 1: p -> 0 keeps the largest. With p < 1 rounding never exceeds the total.
    return _threshold(keys, mass, _wanted(_total(mass), top_p))


def _total(masses):
    """Each row's sum, which 32 bits hold, with jax_enable_x64 too."""
    return jnp.sum(masses, axis=-1, dtype=jnp.uint32)


def _scale(total):
    """2**30 over the power of two at or below the total."""
    exponent = (lax.bitcast_convert_type(total, jnp.int32) >> 23) - 127
    return lax.bitcast_convert_type((127 + 30 - exponent) << 23, jnp.float32)


def _dither(ids):
    """ids * golden ratio, mod 1."""
    return ((ids * np.uint32(GOLDEN)) >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)


def _wanted(total, top_p):
    """The mass that is to be reached, of a uint32 total."""
    wanted = top_p * total.astype(jnp.float32)
    below = wanted.astype(jnp.uint32)  # rounds down
    wanted = jnp.where(below.astype(jnp.float32) < wanted, below + np.uint32(1), below)
    return jnp.maximum(wanted, np.uint32(1))


def why_not(keys, ratio, top_k, top_p, *, device: Device | None = None) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del ratio, top_k, top_p
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    if 0 in keys.shape:
        return f"nothing to search: keys are {list(keys.shape)}"
    lines = _part(keys.shape[1], CLUSTER) // LINE
    if lines > MAX_BOX or 2 * lines * LINE * ITEMSIZE > SHARED_BYTES - 16 * 1024:
        return f"{keys.shape[1]} scores do not fit on {CLUSTER} multiprocessors"
    return None


def check(keys, ratio, top_k, top_p) -> None:
    """Refuses what no implementation of the op can take."""
    check_arrays("sampling_threshold", keys=keys, ratio=ratio, top_k=top_k, top_p=top_p)
    rows = keys.shape[:1]
    wanted = {
        "keys": (keys, jnp.int32, keys.shape),
        "ratio": (ratio, jnp.float32, keys.shape),
        "top_k": (top_k, jnp.int32, rows),
        "top_p": (top_p, jnp.float32, rows),
    }
    if keys.ndim != 2:
        raise ValueError(f"sampling_threshold: keys must be [B, V], got {list(keys.shape)}")
    for name, (array, dtype, shape) in wanted.items():
        if (array.dtype, array.shape) != (dtype, shape):
            raise ValueError(
                f"sampling_threshold: {name} must be {jnp.dtype(dtype).name}{list(shape)}, got "
                f"{array.dtype}{list(array.shape)}"
            )


@dataclasses.dataclass(frozen=True)
class _Static:
    cluster: int
    interpret: bool


def _part(v: int, cluster: int) -> int:
    """Numbers of a row that a block has, with what fills the last one up."""
    return -(-v // (cluster * UNROLLED * VECTOR)) * UNROLLED * VECTOR


@functools.partial(jax.jit, static_argnums=0)  # calls alike share one compiled kernel
def _search(static: _Static, keys, ratio, top_k, top_p):
    (rows, v), cluster, interpret = keys.shape, static.cluster, static.interpret
    part = _part(v, cluster)
    shape = (part // LINE, LINE)

    def cut(x, fill):
        x = jnp.pad(x, ((0, 0), (0, cluster * part - v)), constant_values=fill)
        return x.reshape(rows, cluster, *shape)

    across = VECTOR // LINE  # rows of shared memory in a vector
    along = plgpu.Layout.WG_STRIDED((VECTOR,), vec_size=ACCESS_BYTES // ITEMSIZE)

    def load(ref):
        if interpret:
            return ref[...].reshape(VECTOR)
        return _compat.load(ref.reshape(VECTOR), along, optimized=False)

    def store(ref, value):
        if interpret:
            ref[...] = value.reshape(ref.shape)
        else:
            ref.reshape(VECTOR)[...] = value

    def zeros(dtype):
        empty = jnp.zeros((VECTOR,), dtype)
        return empty if interpret else plgpu.layout_cast(empty, along)

    def body(keys_ref, ratio_ref, k_ref, p_ref, out_ref, keys_s, weights_s, shown, came, meeting):
        row = lax.axis_index("row")
        rank = lax.axis_index("rank") if cluster > 1 else jnp.int32(0)
        for source, target in ((keys_ref, keys_s), (ratio_ref, weights_s)):
            plgpu.copy_gmem_to_smem(source.at[row, rank], target, came)
        top_k, top_p = k_ref[row], p_ref[row]
        plgpu.barrier_wait(came)

        def over(step: Callable[[Any, Any], Any], start: Any) -> Any:
            """step(carry, where) for each vector of the block's part."""

            def several(n, carry):
                for i in range(UNROLLED):
                    carry = step(carry, pl.ds((n * UNROLLED + i) * across, across))
                return carry

            return lax.fori_loop(0, part // (UNROLLED * VECTOR), several, start)

        def of_cluster(vectors, slot):
            """The sums of vectors over all threads of all blocks."""
            sums = [jnp.sum(vector) for vector in vectors]
            if cluster == 1:
                return sums
            for i, total in enumerate(sums):
                shown[slot, i] = lax.bitcast_convert_type(total, jnp.int32)
            meet_blocks(meeting)

            def of_peer(peer, i, dtype):
                bits = plgpu.cluster_ref(shown, {"rank": jnp.int32(peer)})[slot, i]
                return lax.bitcast_convert_type(bits, dtype)

            return [
                functools.reduce(operator.add, [of_peer(p, i, x.dtype) for p in range(cluster)])
                for i, x in enumerate(sums)
            ]

        def search(weights: Callable[[Any], Any], wanted, needed, lowest):
            """The largest T with sum(weights[keys >= T]) >= wanted; `lowest` if not needed."""

            def fix_bits(i, found):
                digits = (np.int32(d) for d in (1, 2, 3))
                candidates = [found + lax.shift_left(d, 30 - 2 * i) for d in digits]

                def count(sums, where):
                    held, numbers = load(keys_s.at[where]), weights(where)
                    return tuple(
                        total + jnp.where(held >= candidate, numbers, jnp.zeros_like(numbers))
                        for total, candidate in zip(sums, candidates, strict=True)
                    )

                sums = of_cluster(over(count, (zeros(jnp.int32),) * 3), lax.rem(i, 2))
                for candidate, reached in zip(candidates, sums, strict=True):
                    found = jnp.where(_as_uint(reached) >= wanted, candidate, found)
                return found

            found = lax.fori_loop(0, jnp.where(needed, 16, 0), fix_bits, jnp.int32(LOWEST))
            return jnp.where(needed, found, lowest)

        def ones(where):
            del where
            return zeros(jnp.int32) + 1

        counted = (top_k > 0) & (top_k < v)
        lowest = search(ones, _as_uint(top_k), counted, jnp.int32(LOWEST))

        def left(where):
            numbers = load(weights_s.at[where])
            return jnp.where(load(keys_s.at[where]) >= lowest, numbers, jnp.zeros_like(numbers))

        [total] = of_cluster([over(lambda c, where: c + left(where), zeros(jnp.float32))], 0)
        scale = _scale(total)
        place = jnp.arange(VECTOR, dtype=jnp.int32)
        place = place if interpret else plgpu.layout_cast(place, along)

        def weigh(total, where):
            ids = (place + (rank * part + where.start * LINE)).astype(jnp.uint32)
            mass = (left(where) * scale + _dither(ids)).astype(jnp.int32)  # rounds down
            store(weights_s.at[where], lax.bitcast_convert_type(mass, jnp.float32))
            return total + mass

        [total] = of_cluster([over(weigh, zeros(jnp.int32))], 1)

        def masses(where):
            return lax.bitcast_convert_type(load(weights_s.at[where]), jnp.int32)

        found = search(masses, _wanted(_as_uint(total), top_p), top_p < 1, lowest)

        @pl.when(rank == 0)
        def _():
            out_ref[row] = found

        if cluster > 1:  # no block may go while others read what it has
            meet_blocks(meeting)

    scratch: list[Any] = [
        plgpu.SMEM(shape, jnp.int32),
        plgpu.SMEM(shape, jnp.float32),
        plgpu.SMEM((2, 3), jnp.int32),
        plgpu.Barrier(num_arrivals=2),
    ]
    together: dict[str, Any] = {}
    if cluster > 1:
        scratch.append(plgpu.ClusterBarrier(collective_axes=("rank",)))
        together = {"cluster": (cluster,), "cluster_names": ("rank",)}
    else:
        scratch.append(plgpu.Barrier())
    return _compat.kernel(
        body,
        name="sampling_threshold",
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        scratch_types=scratch,
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
        **together,
    )(cut(keys, LOWEST), cut(ratio, 0), top_k, top_p)


def _as_uint(x):
    return x.astype(jnp.uint32)
