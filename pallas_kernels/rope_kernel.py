"""The kernel of `rope`: some tokens of some heads a block, by one of two ways.

Through the copy engine (TMA): it brings each head's numbers on chip, no matter whether they are q's
or k's; a thread loads both numbers of a pair by 16 bytes and turns them where they lie, and the
whole head goes back, the part that is not turned untouched.
By lanes (`Config.lanes`), for numbers of 16 bits: a block has all heads of a few tokens, so that
what it reads lies in one piece; it loads all of it into registers, turns it and writes it from
there. There is no copy engine to start and nothing on chip (`rope_lanes`).
Imported only by rope.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, rope_lanes
from pallas_kernels.device import ACCESS_BYTES, LANES, MAX_BOX, SHARED_BYTES, THREADS, WARPS
from pallas_kernels.rows import copy_inside

HELD = 40  # cosines that a thread keeps for all heads: 180 registers; more would spill


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut: heads a block, and its tokens in multiples of what a warpgroup holds.

    tokens: of which a block has all heads, whatever heads and repeat are, without the copy engine;
    lanes: threads that share each of these tokens. Both 0 is with the copy engine.
    """

    heads: int = 8
    repeat: int = 1
    tokens: int = 0
    lanes: int = 0


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for; `back` turns the other way."""

    config: Config
    back: bool
    interpret: bool


def problem(config: Config, q, k, cos, sin) -> str | None:
    """What keeps the hardware from a config."""
    if min(config.heads, config.repeat, config.tokens + 1, config.lanes + 1) < 1:
        return "heads and repeat must be 1 at least, tokens and lanes not negative"
    if config.tokens or config.lanes:
        return rope_lanes.problem(config.tokens, config.lanes, _heads(q, k, cos), q.dtype)
    tokens = config.repeat * tokens_of(cos.shape[-1], q.dtype.itemsize)
    if tokens > MAX_BOX:
        return f"{tokens} tokens a block are more than {MAX_BOX}, what one copy takes"
    size_bytes = shared_bytes(config, q, cos, sin)
    if size_bytes > SHARED_BYTES:
        return f"takes {size_bytes} of {SHARED_BYTES} bytes on chip"
    return None


def by_lanes(q, k, cos) -> Config | None:
    """The config of the way by lanes, if it takes such heads."""
    found = rope_lanes.default(_heads(q, k, cos), q.dtype)
    return found and Config(tokens=found[0], lanes=found[1])


def _heads(q, k, cos) -> rope_lanes.Heads:
    return rope_lanes.Heads(q.shape[-2], k.shape[-2], q.shape[-1], cos.shape[-1])


def shared_bytes(config: Config, q, cos, sin) -> int:
    """On chip: heads, cosines and sines, barriers."""
    tokens = config.repeat * tokens_of(cos.shape[-1], q.dtype.itemsize)
    angles = cos.shape[-1] * (cos.dtype.itemsize + sin.dtype.itemsize)
    heads = config.heads * q.shape[-1] * q.dtype.itemsize
    return tokens * (heads + angles) + 8 * (config.heads + 1) + 1024  # barriers, alignment


def _lanes_across(half: int, itemsize: int) -> int:
    """Lanes side by side in half a head: as many accesses as divide both it and a warp."""
    return math.gcd(half * itemsize // ACCESS_BYTES, LANES)


def tokens_of(half: int, itemsize: int) -> int:
    """Tokens that a warpgroup holds under each other."""
    return THREADS // _lanes_across(half, itemsize)


def turn(static: Static, q, k, cos, sin, *, plain: Callable[..., Any]):
    """q [M, N, H] and k [M, K, H] by cos and sin [M, R2].

    plain: (q, k, cos, sin) -> q, k, for what the interpreter does not know.
    """
    if static.config.lanes:
        return rope_lanes.turned(
            *(q, k, cos, sin),
            tokens=static.config.tokens,
            lanes=static.config.lanes,
            back=static.back,
            plain=plain,
            interpret=static.interpret,
        )
    return _by_copies(static, q, k, cos, sin)


def _load(static: Static, ref: Any, layout: Any) -> jax.Array:
    return ref[...] if static.interpret else _compat.load(ref, layout, optimized=False)


def _by_copies(static: Static, q, k, cos, sin):
    (count, q_heads, width), half, dtype = q.shape, cos.shape[-1], q.dtype
    total, heads = q_heads + k.shape[1], static.config.heads
    tokens = static.config.repeat * tokens_of(half, dtype.itemsize)
    across, vector = _lanes_across(half, dtype.itemsize), ACCESS_BYTES // dtype.itemsize
    # Columns at a time: all, or what the registers hold of them
    step = half if tokens * half <= HELD * THREADS else across * vector
    warp = (LANES // across, across * vector)
    layout = _compat.tiled_layout(
        ((WARPS * warp[0], warp[1]), warp, (vector,)), warp_dims=(-5, -4), lane_dims=(-3, -2)
    )

    def body(*refs):
        q_ref, k_ref, cos_ref, sin_ref, q_out, k_out, block, cos_block, sin_block, *barriers = refs
        arrived, angles_arrived = barriers
        first = jax.lax.axis_index("tokens") * tokens
        first_head = jax.lax.axis_index("heads") * heads

        def of_q_or_k(slot, copy):
            """Calls copy(0 for q or 1 for k, where its head is) if the block's slot has one."""
            head = first_head + slot
            here = (pl.ds(first, tokens), head)
            pl.when(head < q_heads)(lambda: copy(0, here))
            there = (pl.ds(first, tokens), head - q_heads)
            pl.when((head >= q_heads) & (head < total))(lambda: copy(1, there))

        def fetch(slot, which, at):
            source = (q_ref, k_ref)[which].at[at]
            plgpu.copy_gmem_to_smem(source, block.at[slot], arrived.at[slot])

        def write(slot, which, at):
            out = (q_out, k_out)[which]
            if out.shape[1] == 1 and count % tokens:  # tokens lie side by side
                copy_inside(block.at[slot], out.at[at], tokens, count - first)
            else:
                plgpu.copy_smem_to_gmem(block.at[slot], out.at[at], commit_group=False)

        for ref, angles in ((cos_ref, cos_block), (sin_ref, sin_block)):
            plgpu.copy_gmem_to_smem(ref.at[pl.ds(first, tokens)], angles, angles_arrived)
        for slot in range(heads):
            of_q_or_k(slot, functools.partial(fetch, slot))
        plgpu.barrier_wait(angles_arrived)

        def load_angles(column):
            here = (slice(None), pl.ds(column, step))
            c, s = (
                _load(static, ref.at[here], layout).astype(dtype) for ref in (cos_block, sin_block)
            )
            c, s = c.astype(jnp.float32), s.astype(jnp.float32)
            return c, -s if static.back else s

        kept = load_angles(0) if step == half else None

        def turn(slot):
            plgpu.barrier_wait(arrived.at[slot])
            for column in range(0, half, step):
                c, s = kept or load_angles(column)
                left, right = (
                    block.at[slot, :, pl.ds(start + column, step)] for start in (0, half)
                )
                x1, x2 = (_load(static, x, layout).astype(jnp.float32) for x in (left, right))
                turned = (x1 * c - x2 * s).astype(dtype), (x2 * c + x1 * s).astype(dtype)
                for to, x in zip((left, right), turned, strict=True):
                    _compat.store(to, x, interpret=static.interpret)
            plgpu.commit_smem()
            of_q_or_k(slot, functools.partial(write, slot))
            plgpu.commit_smem_to_gmem_group()

        for slot in range(heads):
            pl.when(first_head + slot < total)(functools.partial(turn, slot))
        plgpu.wait_smem_to_gmem(0)

    return _compat.kernel(
        body,
        name="rope_backward" if static.back else "rope",
        out_type=[jax.ShapeDtypeStruct(x.shape, dtype) for x in (q, k)],
        unsafe_no_auto_barriers=True,  # a thread writes where it alone has read
        interpret=static.interpret,
        grid=(-(-total // heads), -(-count // tokens)),
        grid_names=("heads", "tokens"),
        scratch_types=[
            plgpu.SMEM((heads, tokens, width), dtype),
            plgpu.SMEM((tokens, half), cos.dtype),
            plgpu.SMEM((tokens, half), sin.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=heads),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(q, k, cos, sin)
