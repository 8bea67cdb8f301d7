"""Embedding: row ids[i] of a table, scaled; and the sum of rows by id, which is its gradient.

table [V, D], ids [*B] of any integers. Forward: one block owns some ids and a part of the width;
the copy engine (TMA) brings each id's part on chip and the whole block goes out in one copy, by way
of registers only where it is scaled or cast. Backward: ids are sorted (stably, by XLA), and a block
owns every blocks-th tile of the table's rows: it writes zeros where no id falls, and elsewhere adds
up the rows of each id in the order in which they came, in float32. So each number of the gradient
is written once, nothing is added atomically, and two runs give the same bits. An id that occurs n
times is a chain of n sums in one block.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat, tuned
from pallas_kernels import device as device_lib
from pallas_kernels.device import Device

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
ACCESS_BYTES = 16  # the widest access of a thread, and the grain of the copy engine
THREADS = 128
MAX_BOX = 256  # numbers a dimension that one copy takes
ALIGNED = 128  # bytes, of what a copy writes on chip
SHARED_BYTES = 227 * 1024  # of one block, on Hopper
MAX_PART = 8192  # numbers of a row that a block adds up: 64 a thread
STAGES = 8  # rows on their way to a block that adds them up


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
    _check(table, ids, scale, dtype)
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


def check_ids(table, ids) -> None:
    """Refuses concrete ids outside the table, which traced ones cannot be."""
    if isinstance(ids, Tracer) or not hasattr(ids, "__array__") or not ids.size:
        return
    with jax.ensure_compile_time_eval():
        least, most = int(jnp.min(ids)), int(jnp.max(ids))
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
    if 0 in (*table.shape, *ids.shape):
        return f"nothing to look up: the table is {list(table.shape)}, ids are {list(ids.shape)}"
    row_bytes = table.shape[1] * min(kind.itemsize for kind in dtypes)
    if row_bytes % ACCESS_BYTES:
        return (
            f"rows of {row_bytes} bytes are no multiple of {ACCESS_BYTES} bytes, which the copy "
            "engine needs"
        )
    if _parts(table, dtype) is None:
        return f"rows of {table.shape[1]} numbers cannot be cut into parts that one copy takes"
    return None


def default_config(table, ids, *, scale=None, dtype=None, device: Device) -> Config:
    """About 16 KB a block, so that many blocks fit on a multiprocessor and wait at once; fewer
    where that leaves multiprocessors without work, and for the few ids of a decoding step parts
    of a row of 1 KB at least.
    """
    del scale
    count, parts = math.prod(ids.shape), _parts(table, dtype) or 1
    row_bytes = table.shape[1] * table.dtype.itemsize
    while (count * parts < device.num_sms and row_bytes // parts > 1024) and not _problem(
        Config(1, 2 * parts), table, dtype
    ):
        parts *= 2
    rows = max(1, min(32, 1 << (16 * 1024 * parts // row_bytes).bit_length() >> 1))
    while rows > 1 and -(-count // rows) * parts < 4 * device.num_sms:
        rows //= 2
    while rows > 1 and _problem(Config(rows, parts), table, dtype):
        rows //= 2
    return Config(rows, parts)


def bucket(table, ids, *, scale=None, dtype=None) -> str:
    """The key of a tuned row: ids up to a power of two, the width as it is; V does not matter."""
    count = 1 << (math.prod(ids.shape) - 1).bit_length()
    out = jnp.dtype(dtype or table.dtype).name
    return f"{table.dtype.name}-{out}-m{count}-d{table.shape[1]}" + "-scaled" * (scale is not None)


def candidates(table, ids, *, scale=None, dtype=None, device: Device) -> list[Config]:
    """What is worth a measurement: the default's neighbours."""
    default = default_config(table, ids, scale=scale, dtype=dtype, device=device)
    found = [Config(rows, parts) for rows in (1, 2, 4, 8, 16, 32) for parts in (1, 2, 4, 8)]
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


@dataclasses.dataclass(frozen=True)
class _Part:
    """How a part of a row lies on chip: [chunks, inner], zeros added behind its `width` numbers."""

    parts: int
    width: int
    inner: int
    chunks: int
    vector: int

    @property
    def padded(self) -> int:
        return self.chunks * self.inner

    def view(self, x):
        """[M, D] as the kernel takes it: [M, parts, n, inner]."""
        return x.reshape(x.shape[0], self.parts, self.width // self.inner, self.inner)

    def at(self, ref, rows, part):
        """The part of some rows of such an array, with what lies outside cut off."""
        return ref.at[rows, part, pl.ds(_zero(), self.chunks)]

    def write(self, buffer, ref, first, rows, part, count) -> None:
        """Copies rows on chip to where they belong among the `count` rows of such an array.

        JAX copies what looks contiguous in one piece, zeros behind the width included, which would
        fall on the next row: such rows go one by one without them.
        """
        n = self.width // self.inner
        if n == self.chunks or (rows > 1 and n * self.parts != self.chunks):
            target = self.at(ref, pl.ds(first, rows), part)
            plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)
        else:

            def copy(r):
                source = buffer.at[r, pl.ds(0, n)]
                plgpu.copy_smem_to_gmem(source, ref.at[first + r, part], commit_group=False)

            for r in range(rows):
                pl.when(first + r < count)(functools.partial(copy, r))
        plgpu.commit_smem_to_gmem_group()


def _part(width: int, parts: int, itemsize: int, *, rows: int = 0) -> _Part:
    """`itemsize`: of the narrowest dtype; `rows` is how many the registers hold, if any."""
    width, vector = width // parts, ACCESS_BYTES // itemsize
    inner = next(
        (n for n in (256, 128, 64, 32, 16, 8, 4) if width % n == 0 and n >= vector), vector
    )
    chunks = -(-width // inner)
    while chunks * inner % (ALIGNED // itemsize) or chunks * inner * rows % (THREADS * vector):
        chunks += 1
    return _Part(parts, width, inner, chunks, vector)


def _zero() -> jax.Array:
    """0 as an offset that only the run knows: JAX refuses one that passes the end by itself."""
    return jax.lax.axis_index("block") * 0


def _parts(table, dtype) -> int | None:
    """The fewest parts that a block can add up."""
    for parts in (1, 2, 4, 8, 16, 32):
        if table.shape[1] // parts <= MAX_PART and not _problem(Config(1, parts), table, dtype):
            return parts
    return None


def _problem(config: Config, table, dtype) -> str | None:
    """What keeps the hardware from a config."""
    if config.rows < 1 or config.parts < 1:
        return "rows and parts must be 1 at least"
    sizes = [jnp.dtype(kind).itemsize for kind in (table.dtype, dtype or table.dtype)]
    narrowest, width = min(sizes), table.shape[1]
    if width % config.parts or width // config.parts * narrowest % ACCESS_BYTES:
        return f"{width} numbers cannot be cut into {config.parts} parts of 16-byte accesses"
    part = _part(width, config.parts, narrowest, rows=config.rows)
    if config.rows > MAX_BOX or part.chunks > MAX_BOX:
        return f"a copy of {config.rows} rows of {part.chunks} pieces is longer than {MAX_BOX}"
    size_bytes = config.rows * part.padded * sum(sizes) + 1024
    if size_bytes > SHARED_BYTES:
        return f"takes {size_bytes} of {SHARED_BYTES} bytes on chip"
    return None


def _check(table, ids, scale, dtype) -> None:
    if table.ndim != 2:
        raise ValueError(f"embedding: the table {list(table.shape)} is not [V, D]")
    for name, kind in (("the table", table.dtype), ("dtype", jnp.dtype(dtype or table.dtype))):
        if not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(f"embedding: {name} is {kind}; it must be floating point")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"embedding: ids are {ids.dtype}; they must be integers")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"embedding: scale must be a finite number, got {scale}")
    check_ids(table, ids)


def _load(ref, part: _Part, rows: int, static: _Static) -> jax.Array:
    """Rows on chip as one vector in registers, 16 bytes a thread and access."""
    if static.interpret:
        return ref[...].reshape(rows * part.padded)
    layout = plgpu.Layout.WG_STRIDED((rows * part.padded,), vec_size=part.vector)
    return _compat.load(ref.reshape(rows * part.padded), layout)


def _store(ref, value: jax.Array, static: _Static) -> None:
    if static.interpret:
        ref[...] = value.reshape(ref.shape)
    else:
        ref.reshape(value.size)[...] = value


def _gather(static: _Static, table, ids):
    """Rows of the table [V, D] for ids [M]."""
    rows, parts = static.config.rows, static.config.parts
    (v, d), (count,), out = table.shape, ids.shape, jnp.dtype(static.out)
    through = static.scale is not None or out != table.dtype
    part = _part(d, parts, min(table.dtype.itemsize, out.itemsize), rows=rows * through)
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
                x = _load(blocks[0].at[here], part, step, static).astype(out)
                if static.scale is not None:
                    x = x * jnp.asarray(static.scale, out)
                _store(blocks[1].at[here], x, static)
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
            plgpu.SMEM((rows, part.chunks, part.inner), table.dtype),
            *[plgpu.SMEM((rows, part.chunks, part.inner), out)] * through,
            plgpu.Barrier(num_arrivals=rows),
        ],
        unsafe_no_auto_barriers=True,  # a thread stores only where nobody else looks
        interpret=static.interpret,
    )(ids, part.view(table))
    return result.reshape(count, d)


def _scatter(static: _Static, dy, ids):
    """For each row of the table the sum of those rows of dy [M, D] that have its id."""
    d, v, out = dy.shape[1], static.count, jnp.dtype(static.table)
    narrowest = min(dy.dtype.itemsize, out.itemsize)
    parts = _parts(dy, out) or 1
    while d // parts > 2048 and not _problem(Config(1, 2 * parts), dy, out):
        parts *= 2  # 16 sums a thread, and 4 KB a row on its way
    part = _part(d, parts, narrowest, rows=1)
    rows = max(1, min(MAX_BOX, 16 * 1024 // (part.padded * out.itemsize)))  # 16 KB a copy
    tiles = -(-v // rows) * parts
    shared = part.padded * (2 * rows * out.itemsize + STAGES * dy.dtype.itemsize) + 2048
    blocks = min(tiles, min(4, SHARED_BYTES // shared) * static.num_sms)  # all run at once
    ids = jnp.clip(ids, 0, v - 1)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    # starts[i]: how many ids are below i
    every = jnp.arange(v + 1, dtype=jnp.int32)
    starts = jnp.searchsorted(ids[order], every, method="scan_unrolled").astype(jnp.int32)

    def body(dy_ref, order_ref, starts_ref, out_ref, zeros, sums, ring, arrived):
        block = jax.lax.axis_index("block")
        nothing = jnp.zeros((part.padded,), out)
        for r in range(rows):
            _store(zeros.at[r], nothing, static)
        plgpu.commit_smem()

        def start_of(row):
            return starts_ref[jnp.minimum(row, v)]

        def tile(i, _):
            index = block + i * blocks
            first, column = index // parts * rows, jax.lax.rem(index, parts)
            start, end = start_of(first), start_of(first + rows)

            def fetch(j):
                slot = jax.lax.rem(j - start, STAGES)
                source = part.at(dy_ref, order_ref[j], column)
                plgpu.copy_gmem_to_smem(source, ring.at[slot], arrived.at[slot])

            def add(j, total):
                slot = jax.lax.rem(j - start, STAGES)
                plgpu.barrier_wait(arrived.at[slot])
                total = total + _load(ring.at[slot], part, 1, static).astype(jnp.float32)
                plgpu.commit_smem()  # all threads have read the slot
                pl.when(j + STAGES < end)(lambda: fetch(j + STAGES))
                return total

            def one_row(r, _):
                none = jnp.zeros((part.padded,), jnp.float32)
                if not static.interpret:
                    layout = plgpu.Layout.WG_STRIDED(none.shape, vec_size=part.vector)
                    none = plgpu.layout_cast(none, layout)
                bounds = start_of(first + r), start_of(first + r + 1)
                total = jax.lax.fori_loop(*bounds, add, none)
                if static.scale is not None:
                    total = total * jnp.asarray(static.scale, static.out).astype(jnp.float32)
                _store(sums.at[r], total.astype(out), static)
                return 0

            @pl.when(start == end)
            def _():
                part.write(zeros, out_ref, first, rows, column, v)

            @pl.when(start < end)
            def _():
                for j in range(STAGES):
                    pl.when(start + j < end)(functools.partial(fetch, start + j))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                jax.lax.fori_loop(0, rows, one_row, 0)
                plgpu.commit_smem()
                part.write(sums, out_ref, first, rows, column, v)

            return 0

        jax.lax.fori_loop(0, (tiles - block + blocks - 1) // blocks, tile, 0)
        plgpu.wait_smem_to_gmem(0)

    [result] = _compat.kernel(
        body,
        name="embedding_backward",
        out_type=[jax.ShapeDtypeStruct((v, *part.view(dy).shape[1:]), out)],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            *[plgpu.SMEM((rows, part.chunks, part.inner), out)] * 2,
            plgpu.SMEM((STAGES, part.chunks, part.inner), dy.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        ],
        unsafe_no_auto_barriers=True,  # a slot that all have read is passed on by `commit_smem`
        interpret=static.interpret,
    )(part.view(dy), order, starts)
    return result.reshape(v, d)


# Each is the transpose of the other.
_look_up = jax.custom_vjp(_gather, nondiff_argnums=(0,))
_add_up = jax.custom_vjp(_scatter, nondiff_argnums=(0,))
_look_up.defvjp(
    lambda static, table, ids: (_look_up(static, table, ids), ids),
    lambda static, ids, dy: (_add_up(static, dy, ids), None),
)
_add_up.defvjp(
    lambda static, dy, ids: (_add_up(static, dy, ids), ids),
    lambda static, ids, d_table: (_look_up(static, d_table, ids), None),
)
