"""Embedding: row ids[i] of a table, times a scale.

table [V, D], ids [*B] of any integers. One block owns some ids and a part of the width; the copy
engine (TMA) brings each id's part on chip and the whole block goes out in one copy, by way of
registers only where it is scaled or cast. The gradient is the sum of rows by id
(`embedding_backward`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat, embedding_backward, row_parts, tuned
from pallas_kernels import device as device_lib
from pallas_kernels.device import THREADS, Device

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut: `rows` a block (of the result), and the width in `parts`."""

    rows: int = 8
    parts: int = 1


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
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    if reason := why_not(table, ids, scale=scale, dtype=dtype, device=device):
        raise NotImplementedError(f"embedding: cannot run this call: {reason}")
    if config is not None and (problem := _problem(config, table, dtype)):
        raise ValueError(f"embedding: {config}: {problem}")
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
    rows = jnp.take(table, ids, axis=0, mode="clip").astype(dtype or table.dtype)
    return rows if scale is None else rows * jnp.asarray(scale, rows.dtype)


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
    if reason := device_lib.why_not_copied("rows", row_bytes):
        return reason
    if row_parts.fewest_parts(table.shape[1], _sizes(table, dtype)) is None:
        return f"rows of {table.shape[1]} numbers cannot be cut into parts that one copy takes"
    return None


def default_config(table, ids, *, scale=None, dtype=None, device: Device) -> Config:
    """About 8 KB a block, in copies of 2 KB at most, so that many blocks fit on a multiprocessor
    and wait at once (8192 x 4096 bfloat16: 34.6 us against 36.0 with 16 KB in copies of 8);
    fewer where that leaves multiprocessors without work, and for the few ids of a decoding step
    parts of a row of 1 KB at least.
    """
    del scale
    count = math.prod(ids.shape)
    parts = row_parts.fewest_parts(table.shape[1], _sizes(table, dtype)) or 1
    row_bytes = table.shape[1] * table.dtype.itemsize
    while not _problem(Config(1, 2 * parts), table, dtype) and (
        row_bytes // parts > 2048 or (count * parts < device.num_sms and row_bytes // parts > 1024)
    ):
        parts *= 2
    rows = max(1, min(32, 1 << (8 * 1024 * parts // row_bytes).bit_length() >> 1))
    while rows > 1 and -(-count // rows) * parts < 4 * device.num_sms:
        rows //= 2
    while rows > 1 and _problem(Config(rows, parts), table, dtype):
        rows //= 2
    return Config(rows, parts)


def bucket(table, ids, *, scale=None, dtype=None) -> str:
    """The key of a tuned row: ids up to a power of two, the width as it is; V does not matter."""
    count = tuned.power_of_two(math.prod(ids.shape))
    out = jnp.dtype(dtype or table.dtype).name
    return f"{table.dtype.name}-{out}-m{count}-d{table.shape[1]}" + "-scaled" * (scale is not None)


def candidates(table, ids, *, scale=None, dtype=None, device: Device) -> list[Config]:
    """What is worth a measurement: the default's neighbours."""
    default = default_config(table, ids, scale=scale, dtype=dtype, device=device)
    found = [Config(rows, parts) for rows in (1, 2, 4, 8, 16) for parts in (1, 2, 4)]
    return [c for c in found if c != default and not _problem(c, table, dtype)]


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


def _sizes(table, dtype) -> tuple[int, int]:
    """Bytes of a number of the table, and of the result."""
    return table.dtype.itemsize, jnp.dtype(dtype or table.dtype).itemsize


def _problem(config: Config, table, dtype) -> str | None:
    """What keeps the hardware from a config."""
    return row_parts.problem(table.shape[1], _sizes(table, dtype), config.rows, config.parts)


def check(table, ids, scale, dtype) -> None:
    """Refuses what no implementation of the embedding can take."""
    if table.ndim != 2:
        raise ValueError(f"embedding: the table {list(table.shape)} is not [V, D]")
    for name, kind in (("the table", table.dtype), ("dtype", jnp.dtype(dtype or table.dtype))):
        if not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(f"embedding: {name} is {kind}; it must be floating point")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"embedding: ids are {ids.dtype}; they must be integers")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"embedding: scale must be a finite number, got {scale}")
    _check_ids(table, ids)


def _gather(static: _Static, table, ids):
    """Rows of the table [V, D] for ids [M]."""
    rows, parts = static.config.rows, static.config.parts
    (v, d), (count,), out = table.shape, ids.shape, jnp.dtype(static.out)
    through = static.scale is not None or out != table.dtype
    part = row_parts.part_of(
        d,
        parts,
        min(table.dtype.itemsize, out.itemsize),
        rows=rows * through,
        interpret=static.interpret,
    )
    # rows in registers at once: as few as fill the threads
    step = THREADS * part.vector // math.gcd(THREADS * part.vector, part.padded)

    def body(ids_ref, table_ref, out_ref, *refs):
        *blocks, arrived = refs
        first, column = jax.lax.axis_index("block") * rows, jax.lax.axis_index("part")
        found = [ids_ref[jnp.minimum(first + r, count - 1)] for r in range(rows)]
        for r, row in enumerate(found):
            source = part.at(table_ref, jnp.clip(row, 0, v - 1), column)
            plgpu.copy_gmem_to_smem(source, blocks[0].at[r], arrived)
        plgpu.barrier_wait(arrived)
        if through:
            for r in range(0, rows, step):
                here = pl.ds(r, step)
                x = part.load(blocks[0].at[here], step).astype(out)
                if static.scale is not None:
                    x = x * jnp.asarray(static.scale, out)
                part.store(blocks[1].at[here], x)
        plgpu.commit_smem()
        part.write(blocks[-1], out_ref, first, rows, column, count)
        plgpu.wait_smem_to_gmem(0)

    [result] = _compat.kernel(
        body,
        name="embedding",
        out_type=[jax.ShapeDtypeStruct((count, *part.view(table).shape[1:]), out)],
        grid=(-(-count // rows), parts),
        grid_names=("block", "part"),
        scratch_types=[
            part.buffer(rows, table.dtype),
            *[part.buffer(rows, out)] * through,
            plgpu.Barrier(num_arrivals=rows),
        ],
        unsafe_no_auto_barriers=True,  # a thread stores only where nobody else looks
        interpret=static.interpret,
    )(ids, part.view(table))
    return result.reshape(count, d)


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
