"""Embedding: row ids[i] of a table, times a scale.

table [V, D], ids [*B] of any integers. Threads copy 16 bytes at a time (`embedding_lanes`). The
gradient is the sum of rows by id (`embedding_backward`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from pallas_kernels import device as device_lib
from pallas_kernels import embedding_backward, tuned
from pallas_kernels.device import ACCESS_BYTES, Device
from pallas_kernels.embedding_lanes import MOST, MOST_PIECES, rows_by_id
from pallas_kernels.options import check_arrays, check_dtype, check_number, check_options

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Config:
    """Pieces of 16 bytes that a thread asks for at once."""

    pieces: int


def embedding(
    table: Float[Array, "V D"],
    ids: Int[Array, "*B"],
    *,
    scale: float | None = None,
    dtype: Any = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B D"]:
    """Rows of the table in `dtype` (the table's if None), times `scale`, rounded to that dtype.

    Ids outside the table are clamped to its ends when traced; concrete ones raise.
    Dtypes: table and `dtype` bfloat16, float16 or float32; ids any integers. The gradient of the
    table has its dtype and is summed in float32, the same bits in every run.
    Raises: ValueError for bad shapes or dtypes, or ids outside. NotImplementedError without a
    Hopper GPU (unless `interpret`), or for what `why_not` says.
    """
    check(table, ids, scale, dtype)
    check_options("embedding", config, Config, interpret=interpret)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    if reason := why_not(table, ids, scale=scale, dtype=dtype, device=device):
        raise NotImplementedError(f"embedding: cannot run this call: {reason}")
    if config is not None and not 1 <= config.pieces <= MOST_PIECES:
        raise ValueError(f"embedding: {config}: a thread takes 1 to {MOST_PIECES} pieces")
    keywords = {"scale": scale, "dtype": dtype}
    config = (
        config
        or tuned.lookup("embedding", bucket(table, ids, **keywords), device, Config)
        or default_config(table, ids, **keywords, device=device)
    )
    names = (table.dtype.name, jnp.dtype(dtype or table.dtype).name)
    factor = None if scale is None else float(scale)
    static = _Static(config, table.shape[0], *names, factor, device.num_sms, interpret)
    flat = ids.reshape(-1)
    if flat.dtype != jnp.int32:  # a number that int32 cannot hold lies outside too
        flat = jnp.clip(flat, 0, min(table.shape[0] - 1, jnp.iinfo(flat.dtype).max))
    return _look_up(static, table, flat.astype(jnp.int32)).reshape(*ids.shape, table.shape[1])


def embedding_reference(table, ids, *, scale=None, dtype=None):
    """The mathematics in plain JAX."""
    rows = _take(jnp.dtype(dtype or table.dtype), table, ids)
    return rows if scale is None else rows * jnp.asarray(scale, rows.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _take(dtype, table, ids):
    return jnp.take(table, ids, axis=0, mode="clip").astype(dtype)


@_take.defjvp
def _take_jvp(dtype, arrays, tangents):
    """The gradient adds up rows in float32, of a table in 16 bits in an array beside it: in
    bfloat16 a token's 257th would be lost.
    """
    table, ids = arrays
    wide = jnp.float32 if table.dtype.itemsize < 4 else table.dtype
    d_rows = jnp.take(tangents[0].astype(wide), ids, axis=0, mode="clip")
    return _take(dtype, table, ids), d_rows.astype(dtype)


def _check_ids(table, ids) -> None:
    """Refuses concrete ids outside the table, which traced ones cannot be."""
    if isinstance(ids, Tracer) or not hasattr(ids, "__array__") or not ids.size:
        return
    with jax.ensure_compile_time_eval():
        least, most = int(ids.min()), int(ids.max())  # jnp would cut off 64 bits
    if least < 0 or most >= table.shape[0]:
        raise ValueError(
            f"embedding: ids go from {least} to {most}, but the table has rows 0 to "
            f"{table.shape[0] - 1}"
        )


def why_not(table, ids, *, scale=None, dtype=None, device: Device | None = None) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del scale
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    dtypes = (table.dtype, jnp.dtype(dtype or table.dtype))
    for name, kind in zip(("a table of", "a result of"), dtypes, strict=True):
        if kind not in DTYPES:
            return f"takes bfloat16, float16 or float32, got {name} {kind}"
    if table.ndim != 2:
        return f"takes a table [V, D], got {list(table.shape)}"
    if 0 in (*table.shape, *ids.shape):
        return f"nothing to look up: the table is {list(table.shape)}, ids are {list(ids.shape)}"
    row_bytes = table.shape[1] * min(kind.itemsize for kind in dtypes)
    if row_bytes % ACCESS_BYTES:
        return f"rows of {row_bytes} bytes are no multiple of {ACCESS_BYTES} bytes, one access"
    if (pieces := math.prod(ids.shape) * row_bytes // ACCESS_BYTES) >= MOST:
        return f"a result of {pieces} times {ACCESS_BYTES} bytes; fewer than {MOST} are taken"
    return None


def default_config(table, ids, *, scale=None, dtype=None, device: Device) -> Config:
    """Two pieces: H200, 8192 x 3072 and 8192 x 4096 of bfloat16, 25.3 and 34.3 us; with one 26.7
    and 35.9, with four 25.5 and 35.5. Of 1 to 64 ids one and two take as long.
    """
    del table, ids, scale, dtype, device
    return Config(2)


def bucket(table, ids, *, scale=None, dtype=None) -> str:
    """The key of a tuned row: ids up to a power of two, the width as it is; V does not matter."""
    count = tuned.power_of_two(math.prod(ids.shape))
    out = jnp.dtype(dtype or table.dtype).name
    return f"{table.dtype.name}-{out}-m{count}-d{table.shape[1]}" + "-scaled" * (scale is not None)


def candidates(table, ids, *, scale=None, dtype=None, device: Device) -> list[Config]:
    """What is worth a measurement beside the default."""
    del table, ids, scale, dtype, device
    return [Config(1), Config(4), Config(8)]


def tuning_calls() -> list[tuned.Call]:
    """The tables of Qwen2.5-0.5B, Phi-3-mini and Llama-3.1-8B, at prefill and decode sizes."""
    calls = []
    for v, d in ((151936, 896), (32064, 3072), (128256, 4096)):
        for count in (1, 64, 8192):

            def make(key, v=v, d=d, count=count):
                table = jax.random.normal(key, (v, d), jnp.float32).astype(jnp.bfloat16)
                return table, jax.random.randint(key, (count,), 0, v, jnp.int32)

            arguments = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
            calls.append(tuned.Call(arguments, embedding, make=make))
    return calls


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a kernel is compiled for: a table of `count` rows in `table`, a result in `out`."""

    config: Config
    count: int
    table: str
    out: str
    scale: float | None
    num_sms: int
    interpret: bool


def check(table, ids, scale, dtype) -> None:
    """Refuses what no implementation of the embedding can take."""
    check_arrays("embedding", table=table, ids=ids)
    check_dtype("embedding", "dtype", dtype)
    if table.ndim != 2:
        raise ValueError(f"embedding: the table {list(table.shape)} is not [V, D]")
    for name, kind in (("the table", table.dtype), ("dtype", jnp.dtype(dtype or table.dtype))):
        if not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(f"embedding: {name} is {kind}; it must be floating point")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"embedding: ids are {ids.dtype}; they must be integers")
    check_number("embedding", "scale", scale, optional=True)
    if table.shape[0] == 0 and ids.size:
        raise ValueError(
            f"embedding: ids are {list(ids.shape)}, but the table {list(table.shape)} has no rows"
        )
    _check_ids(table, ids)


def _gather(static: _Static, table, ids):
    """Rows of the table [V, D] for ids [M]."""
    return rows_by_id(
        table,
        ids,
        scale=static.scale,
        dtype=jnp.dtype(static.out),
        pieces=static.config.pieces,
        interpret=static.interpret,
    )


def _scatter(static: _Static, dy, ids):
    """For each row of the table the sum of those rows of dy [M, D] that have its id."""
    return embedding_backward.sum_by_id(
        dy,
        ids,
        count=static.count,
        dtype=static.table,
        scale=static.scale,
        num_sms=static.num_sms,
        interpret=static.interpret,
    )


# Each is the transpose of the other.
_look_up = jax.custom_vjp(_gather, nondiff_argnums=(0,))
_add_up = jax.custom_vjp(_scatter, nondiff_argnums=(0,))
_look_up.defvjp(
    lambda static, table, ids: (_look_up(static, table, ids), ids),
    lambda static, ids, dy: (_add_up(static, dy, ids), None),
)
_look_up = jax.jit(_look_up, static_argnums=0)  # calls alike share one compiled kernel
_add_up.defvjp(
    lambda static, dy, ids: (_add_up(static, dy, ids), ids),
    lambda static, ids, d_table: (_look_up(static, d_table, ids), None),
)
_add_up = jax.jit(_add_up, static_argnums=0)  # calls alike share one compiled kernel
