"""What differs between versions of JAX: the only file that knows them apart.

jax 0.10.2 (the newest for Python 3.11), 0.11.2 and 0.12 all run; each line names what ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

# The interpreter of Mosaic is public from 0.11 on, and its state still is not.
from jax._src.pallas.mosaic_gpu.interpret import (  # isort: skip
    interpret_pallas_call as _interpreter,
    params as _params,
)

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])

# What the interpreter of jax 0.10 cannot do; ends with Python 3.11, whose newest jax that is.
INTERPRETS_TRANSPOSED_WGMMA = VERSION >= (0, 11)
INTERPRETS_CUT_COPIES = VERSION >= (0, 11)


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
    reduction_scratch_bytes: int = 2048,
) -> Callable[..., Any]:
    """A Mosaic GPU kernel under a name of its own: `plgpu.kernel` with every default spelled out.

    With `interpret` it runs in the interpreter, which looks for races.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=unsafe_no_auto_barriers,
            reduction_scratch_bytes=reduction_scratch_bytes,
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


def tiled_layout(
    tiles: Sequence[Sequence[int]],
    *,
    warp_dims: Sequence[int],
    lane_dims: Sequence[int],
) -> Any:
    """Who holds what of an array in registers, dimensions of length one left out.

    `tiles` cut the array, each the one before; the dimensions that result, counted from the end,
    belong to warps or lanes; the last is the vector that one thread loads at once.
    """
    layout = fragmented_array.TiledLayout(
        fragmented_array.Tiling(tuple(map(tuple, tiles))),
        tuple(warp_dims),
        tuple(lane_dims),
        -1,
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


def races_found() -> bool:
    """Whether the interpreter has seen a race since `reset_interpreter`."""
    return _interpreter.get_races().races_found


def reset_interpreter() -> None:
    """Forgets races, and what a kernel that failed has left behind."""
    _interpreter.reset_gpu_interpret_mode_state()
