"""What differs between versions of JAX: the only file that knows them apart.

jax 0.10.2 (the newest for Python 3.11), 0.11.2 and 0.12 all run; each line names what ends it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import nvvm
from jax._src.state.types import AbstractRef
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _wgmma, varying

# The interpreter of Mosaic is public from 0.11 on, and its state still is not.
from jax._src.pallas.mosaic_gpu.interpret import (  # isort: skip
    interpret_pallas_call as _interpreter,
    params as _params,
)

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])

# What the interpreter of jax 0.10 cannot do; ends with Python 3.11, whose newest jax that is.
INTERPRETS_TRANSPOSED_WGMMA = VERSION >= (0, 11)
INTERPRETS_CUT_COPIES = VERSION >= (0, 11)
INTERPRETS_LAYOUTS = VERSION >= (0, 11)  # as attention and tiles of packed weights cast them
# A kernel that writes into `hold(x)` writes into x's own memory; ends with jax 0.10.
WRITES_REFERENCES = VERSION >= (0, 11)
# Mosaic of jax 0.10 lowers norms, say, but neither attention nor the loss; ends with jax 0.10.
LOWERS = VERSION >= (0, 11)

MOST_BLOCKS = 65535  # of CUDA, in the second and the third direction of a grid


def why_not_written() -> str | None:
    """What keeps a kernel from writing into an array that it is given; ends with jax 0.10."""
    if WRITES_REFERENCES:
        return None
    return "needs jax 0.11, where a kernel may write into an array that is there"


def why_not_lowered() -> str:
    """What keeps a kernel from a Hopper GPU without `LOWERS`; ends with jax 0.10."""
    return f"needs jax 0.11 or newer (Python 3.12) on a Hopper GPU, found {jax.__version__}"


@functools.cache
def _ask_for_the_assembler_once() -> None:
    """Mosaic of jax 0.10 to 0.12 asks which ptxas there is, by a process of 12 ms, wherever a
    kernel converts from or to 8 bits or a truth value: half the time of lowering. Here its function
    remembers the answer; ends with the jax that does so itself.
    """
    library: Any = fragmented_array.mgpu_lib  # pyright: ignore[reportPrivateImportUsage]
    if library is not None and VERSION < (0, 13):  # None: JAX's CUDA plugin is not installed
        plugin = library._mosaic_gpu_ext
        plugin._get_ptxas_isa_version = functools.cache(plugin._get_ptxas_isa_version)


def kernel(
    body: Callable[..., None],
    *,
    name: str,
    out_type: Any,
    grid: Sequence[int],
    grid_names: Sequence[str],
    interpret: bool,
    scratch_types: Any = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    cluster: Sequence[int] = (),
    cluster_names: Sequence[str] = (),
    approx_math: bool = False,
    unsafe_no_auto_barriers: bool = False,
) -> Callable[..., Any]:
    """A Mosaic GPU kernel under a name of its own: `plgpu.kernel` with every default spelled out.

    With `interpret` it runs in the interpreter, which looks for races. Whole numbers in a kernel
    have 32 bits, also where jax_enable_x64 is set.
    Raises: NotImplementedError for arrays that vary over an axis of a `jax.shard_map`.
    """
    if not interpret:
        _ask_for_the_assembler_once()
    run = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=unsafe_no_auto_barriers,
            reduction_scratch_bytes=2048,
        ),
        grid=tuple(grid),
        grid_names=tuple(grid_names),
        cluster=tuple(cluster),
        cluster_names=tuple(cluster_names),
        num_threads=num_threads,
        thread_name=thread_name,
        kernel_name=name,
        interpret=_params.InterpretGPUParams(detect_races=True) if interpret else None,
    )

    run = _in_launches(run, tuple(grid), name)

    def without_x64(*arguments):
        if (reason := varying.why_no_kernel(arguments)) is not None:
            raise NotImplementedError(f"{name}: cannot run this call: {reason}")
        with jax.enable_x64(False):
            if any(map(_is_reference, jax.tree.leaves(arguments))):
                return _by_itself(run(*_by_itself(arguments)))
            return run(*arguments)

    return without_x64


def hold(x: Any) -> Any:
    """A reference to x, into which kernels write; `let_go` of it is what they have made.

    Under vmap the slices of x lie in front, whatever its axis: a kernel takes no view of a
    reference, which is what JAX would make of it to bring them there.
    """
    return jax.new_ref(_by_itself(_slices_in_front(x)))


@jax.custom_batching.custom_vmap
def _slices_in_front(x: Any) -> Any:
    return x


@_slices_in_front.def_vmap
def _(count, batched, x):
    del count
    return _slices_in_front(x), batched[0]


def let_go(ref: Any) -> Any:
    """What a reference holds in the end."""
    return _by_itself(jax.freeze(ref))


def _by_itself(tree: Any) -> Any:
    """The arrays behind a barrier, references as they are.

    Where a loop takes slices of arrays or puts results in one's slices, XLA (of jax 0.11.2) fuses
    them with the kernel between them, and forgets which of its results are arrays that it was
    given: those of a kernel that writes into references would then be lost. Ends with the XLA
    whose fusions keep `output_to_operand_aliasing`.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = iter(lax.optimization_barrier([x for x in leaves if not _is_reference(x)]))
    return structure.unflatten(x if _is_reference(x) else next(arrays) for x in leaves)


def _in_launches(run: Callable[..., Any], grid: tuple[int, ...], name: str) -> Callable[..., Any]:
    """The kernel, under vmap in as many launches as it takes: JAX puts the slices in front of its
    grid, where CUDA takes MOST_BLOCKS in either direction but the last.

    Raises: NotImplementedError for more of them that are written in place.
    """
    call = jax.custom_batching.custom_vmap(run)

    @call.def_vmap
    def _(count, batched, *arguments):
        most = max(1, MOST_BLOCKS // math.prod(grid[:-2]))
        axes = jax.tree.map(lambda each: 0 if each else None, batched)
        if count > most and any(map(_is_reference, jax.tree.leaves(arguments))):
            raise NotImplementedError(
                f"{name}: cannot run this call: under vmap it writes into {most} slices at most, "
                f"got {count}"
            )
        found = []
        for start in range(0, count, most):
            some, many = arguments, min(most, count - start)
            if count > most:
                end = start + many
                some = jax.tree.map(
                    lambda x, each, part=slice(start, end): x[part] if each else x,
                    arguments,
                    tuple(batched),
                )
            launches = _in_launches(jax.vmap(run, axes), (many, *grid), name)
            with jax.enable_x64(False):  # where what was traced is batched, `kernel`'s is behind us
                found.append(launches(*some))
        slices = found[0]
        if len(found) > 1:
            slices = jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)
        return slices, jax.tree.map(lambda _: True, slices)

    return call


def _is_reference(x: Any) -> bool:
    return isinstance(jax.typeof(x), AbstractRef)


def tiled_layout(
    tiles: Sequence[Sequence[int]],
    *,
    warp_dims: Sequence[int],
    lane_dims: Sequence[int],
    vector_dim: int = -1,
) -> Any:
    """Who holds what of an array in registers, dimensions of length one left out.

    `tiles` cut the array, each the one before; the dimensions that result, counted from the end,
    belong to warps or lanes; `vector_dim` is the vector that one thread loads at once.
    """
    layout = fragmented_array.TiledLayout(
        fragmented_array.Tiling(tuple(map(tuple, tiles))),
        tuple(warp_dims),
        tuple(lane_dims),
        vector_dim,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def load(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """What a reference in shared memory holds, in registers.

    Without `optimized`, JAX need not prove that no two threads wait for one memory bank.
    """
    if VERSION < (0, 11):  # ends with jax 0.10
        return plgpu.load(ref, (), layout=layout, optimized=optimized)
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]


def store(ref: Any, value: Any, *, interpret: bool) -> None:
    """ref[...] = value, of registers whose accesses are narrow, or in one bank on chip.

    There jax 0.12 refuses the plain assignment, which loads the old value too.
    """
    if interpret or VERSION < (0, 12):  # ends with jax 0.11, which proves nothing of stores
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]


def wgmma(
    acc: jax.Array | None,
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    depth: int | None = None,
    columns: int | None = None,
    interpret: bool,
) -> jax.Array:
    """acc + a @ b, not done yet: nothing may touch the result before `wgmma_wait` has handed it on.

    acc: float32 [M, N] in Layout.WGMMA, None for zeros. a: registers [M, K] in Layout.WGMMA (of 8
    bits WGMMA_8BIT), or shared memory as b is. b: shared memory [K, N], tiled and swizzled for
    wgmma; in several parts one beside the other, it is [parts, K, N / parts]. Transposed: [N, K],
    or [parts, N, K / parts]; of 8 bits b always is, and a never.
    Of K only `depth` are summed, a multiple of 16, and of N only `columns` computed, one of 8.
    One call is one group for `wgmma_wait`. acc and a in registers have come through `wgmma_ready`
    since anything else wrote them.
    The interpreter has neither an `a` in registers nor a sum to begin with, and multiplies at once.
    """

    def width(x):
        return x.shape[-1] * (x.shape[0] if len(x.shape) == 3 else 1)

    in_registers = isinstance(a, jax.Array)
    m = width(a) if transpose_a else a.shape[-2]
    n = columns or (b.shape[-2] if transpose_b else width(b))
    summed = depth or (width(b) if transpose_b else b.shape[-2])
    if interpret:

        def whole(x, transpose):
            x = x if isinstance(x, jax.Array) else x[...]
            if x.ndim == 3:
                x = jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1)
            x = x.astype(jnp.bfloat16) if x.dtype == jnp.float8_e4m3fn else x
            return x.T if transpose else x

        left, right = whole(a, transpose_a), whole(b, transpose_b)
        plgpu.commit_smem()  # tensor cores read as copies write: there is nothing to tell them
        left, right = left[:, :summed], right[:summed, :n]
        product = jnp.dot(left, right, preferred_element_type=jnp.float32)
        return product if acc is None else acc + product

    def swizzle_of(x):
        return next(s for s in (128, 64, 32) if x.shape[-1] * jnp.dtype(x.dtype).itemsize % s == 0)

    def type_of(x):
        swizzle = swizzle_of(x)
        tile = (8, swizzle // jnp.dtype(x.dtype).itemsize)
        assert len(x.shape) == 2 or x.shape[-1] == tile[1], x.shape
        return plgpu.RefType((plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)))

    def tiles(x, transpose):
        """[rows / 8, columns / line, 8, line], or the other way round."""
        if len(ir.MemRefType(x.type).shape) == 5:  # [parts, rows / 8, 1, 8, line]
            x = mgpu_utils.memref_slice(x, (slice(None), slice(None), 0))
            x = mgpu.memref_transpose(x, (1, 0, 2, 3))
        return mgpu.memref_transpose(x, (1, 0, 3, 2)) if transpose else x

    layout, swizzle = plgpu.Layout.WGMMA, swizzle_of(b)
    types = [layout] if acc is not None else []
    left = plgpu.Layout.WGMMA_8BIT if jnp.dtype(a.dtype).itemsize == 1 else layout
    types += [left if in_registers else type_of(a), type_of(b)]

    @plgpu.inline_mgpu(
        arg_types=tuple(types),
        return_type=plgpu.ShapeDtypeStruct((m, n), jnp.float32, layout=layout),
    )
    def issue(_: Any, *operands: Any) -> Any:
        *first, a, b = operands
        a = a if in_registers else tiles(a, transpose_a)
        acc = first[0] if first else None
        return _wgmma.issue(acc, a, tiles(b, transpose_b), swizzle, summed, n)

    return issue(*([] if acc is None else [acc]), a, b)


def wgmma_ready(*values: jax.Array, interpret: bool) -> tuple[jax.Array, ...]:
    """`values`, of which `wgmma` may read the registers from here on."""
    if interpret:
        return values
    done = lax.optimization_barrier(values) if values else ()

    @plgpu.inline_mgpu()
    def fence(*_: Any) -> Any:
        nvvm.wgmma_fence_aligned()

    fence()
    return tuple(done)


def wgmma_wait(count: int, *values: Any) -> Any:
    """Waits until all but `count` of the groups of `wgmma` are done; then `values` may be read.

    They come back as they were, tied to this place in the program.
    """
    plgpu.wgmma_wait(count)
    done = lax.optimization_barrier(values)
    return done[0] if len(values) == 1 else done


def races_found() -> bool:
    """Whether the interpreter has seen a race since `reset_interpreter`."""
    return _interpreter.get_races().races_found


def reset_interpreter() -> None:
    """Forgets races, and what a kernel that failed has left behind."""
    _interpreter.reset_gpu_interpret_mode_state()
