"""How a call of `matmul` is cut into tiles: what can run, and what is taken unless told otherwise.

Arrays may be `jax.ShapeDtypeStruct`s. Imported only by matmul*.py.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels import matmul_few_rows as few_rows
from pallas_kernels.device import SHARED_BYTES
from pallas_kernels.matmul_finish import BLOCK
from pallas_kernels.matmul_kernel import FORMS, Config, shared_bytes
from pallas_kernels.wgmma_tiles import LINE_BYTES, WGMMA_ROWS


def sizes(a, b, transpose_b) -> tuple[int, int, int]:
    """M (of one product), N, K."""
    m = a.shape[-2] if b.ndim > 2 else math.prod(a.shape[:-1])
    return m, b.shape[-2] if transpose_b else b.shape[-1], a.shape[-1]


def result_dtype(a, out_dtype) -> jnp.dtype:
    """`out_dtype`, or what stands for None."""
    default = a.dtype
    if default.itemsize == 1:
        default = jnp.int32 if default == jnp.int8 else jnp.bfloat16
    return jnp.dtype(out_dtype or default)


def has_blocks(b_scale) -> bool:
    """Whether the scales are of blocks; b_scale tells."""
    return b_scale is not None and b_scale.ndim == 2


def num_vectors(bias, a_scale, b_scale, out_scale) -> int:
    """How many of them have a number for each row or column, which take room on chip."""
    scales = (out_scale,) if has_blocks(b_scale) else (a_scale, b_scale, out_scale)
    return sum(x is not None and x.size > 1 for x in (bias, *scales))


def reads_weight(a, b, transpose_b, epilogue, *scales) -> bool:
    """Whether the forms for few rows could take the call, if its rows are few."""
    plain = epilogue in (None, "swiglu") and all(scale is None for scale in scales)
    return bool(transpose_b) and b.ndim == 2 and a.dtype.itemsize == 2 and plain


def tile_config(
    m, n, dtype, *, b_rows, gated, num_sms, vectors, blocks=False, out_bytes=2
) -> Config:
    """The tile with the least work in the last wave; as many stages as the shared memory holds."""
    tile_k = LINE_BYTES // dtype.itemsize
    if m <= WGMMA_ROWS:
        # Few rows: the weight's bytes are the time. The widest tile that still gives three in four
        # multiprocessors some of it to load; two times 128 bytes of K are worth a round.
        least = 128 if gated else 64 if b_rows else 32 if out_bytes == 1 else 16
        widths = [w for w in (128, 64, 32, 16) if w >= least]
        width = next((w for w in widths if 4 * n >= 3 * w * num_sms), least)
        choice = Config(WGMMA_ROWS, width, tile_k if blocks else 2 * tile_k, consumers=1)
    else:
        # A tile of 128 x 256 reads least from shared memory a product (two of 64 x 256; with block
        # scales four of 64 x 128), and least from the L2; smaller ones waste less of the last wave
        # but feed the tensor cores worse by about this much.
        tiles = [(128, 256, 2, 1.0)]
        tiles += [] if blocks else [(256, 128, 2, 1.0)]
        tiles += [(128, 128, 2, 1.2), (64, 128, 1, 1.6)]
        tiles += [] if gated else [(128, 64, 2, 1.6), (64, 64, 1, 2.2)]

        def cost(tile):
            tile_m, tile_n, _, slower = tile
            waves = -(-(-(-m // tile_m) * -(-n // tile_n)) // num_sms)
            return waves * tile_m * tile_n * slower

        tile_m, tile_n, consumers, _ = min(tiles, key=cost)
        choice = Config(tile_m, tile_n, tile_k, consumers)
    for stages in range(12, 1, -1):  # more than about 100 KB in flight gain nothing
        config = dataclasses.replace(choice, stages=stages)
        if shared_bytes(config, dtype, vectors) <= SHARED_BYTES:
            return config
    raise AssertionError(f"matmul: no two stages of {choice} fit the shared memory")


def config_problem(
    config: Config,
    a,
    b,
    *,
    transpose_b=False,
    out_dtype=None,
    epilogue=None,
    bias=None,
    a_scale=None,
    b_scale=None,
    out_scale=None,
    **_,
) -> str | None:
    """What the hardware has against a tile, or a form against the call."""
    c, step = config, LINE_BYTES // a.dtype.itemsize
    if c.form not in FORMS:
        return f"form must be one of {', '.join(FORMS)}"
    wide = result_dtype(a, out_dtype)
    if c.form != "tiles":
        if not reads_weight(a, b, transpose_b, epilogue, a_scale, b_scale, out_scale):
            return (
                f"{c.form!r} takes one weight [N, K] of 16 bits, with transpose_b, no scales and "
                "no GELU"
            )
        m, n, k = sizes(a, b, transpose_b)
        return few_rows.problem(c, m, n, k, wide, gated=epilogue == "swiglu")
    least = 128 if epilogue == "swiglu" else 64
    small = transpose_b and epilogue != "swiglu" and c.tile_n in (16, 32)
    blocks = has_blocks(b_scale)
    vectors = num_vectors(bias, a_scale, b_scale, out_scale)
    size_bytes = shared_bytes(config, a.dtype, vectors)
    problems = {
        "consumers must be 1 or 2": c.consumers not in (1, 2),
        "tile_m must be 64, 128 or 256": c.tile_m not in (64, 128, 256),
        "a consumer takes 64 rows at least": c.tile_m < WGMMA_ROWS * c.consumers,
        f"tile_n must be a multiple of {least}, 256 at most (or 16 or 32 where b is [N, K])": (
            not small and (not 0 < c.tile_n <= 256 or c.tile_n % least)
        ),
        "tile_n must be 32 at least, for a result of 8 bits": wide.itemsize == 1 and c.tile_n < 32,
        f"tile_k must be a multiple of {step}": c.tile_k < 1 or c.tile_k % step,
        "a consumer can hold 64 x 256 sums": c.tile_m * c.tile_n > c.consumers * 64 * 256,
        "a consumer takes 64 rows, and a tile 128 of K and 256 columns or no more than 128, for "
        "scales of blocks": (
            blocks
            and (
                c.tile_m != WGMMA_ROWS * c.consumers
                or c.tile_k != BLOCK
                or c.tile_n not in (16, 32, 64, BLOCK, 2 * BLOCK)
            )
        ),
        "stages must be 2 at least, snake 1": c.stages < 2 or c.snake < 1,
        "cluster must be 1: it is for 'split'": c.cluster != 1,
        f"takes {size_bytes} of {SHARED_BYTES} bytes on chip": size_bytes > SHARED_BYTES,
    }
    return next((problem for problem, found in problems.items() if found), None)
