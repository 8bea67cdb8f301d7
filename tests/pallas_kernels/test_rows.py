"""The engine of the kernels over rows: how rows lie, and that the interpreter sees a race."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernels import interpreted

from jaxllm import aot
from pallas_kernels import _compat, device, over_rows, rows
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rope
from pallas_kernels.rows import Config
from pallas_kernels.softmax import scale_softmax
from pallas_kernels.swiglu import swiglu

BF16, F32 = jnp.bfloat16, jnp.float32


def copy_tiles(x, *, wait):
    """Tiles of eight rows through shared memory; without `wait` they are read before they came."""

    def body(source, target, buffer, barrier):
        at = pl.ds(jax.lax.axis_index("block") * 8, 8)
        plgpu.copy_gmem_to_smem(source.at[at], buffer, barrier)
        if wait:
            plgpu.barrier_wait(barrier)
        buffer[...] = buffer[...] * 2.0
        if not wait:
            plgpu.barrier_wait(barrier)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, target.at[at])
        plgpu.wait_smem_to_gmem(0)

    return _compat.kernel(
        body,
        name="copy_tiles",
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 8,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((8, x.shape[1]), x.dtype), plgpu.Barrier()],
        interpret=True,
    )(x)


def test_a_race_is_seen():
    x = jnp.arange(16.0 * 128).reshape(16, 128)
    np.testing.assert_array_equal(interpreted(lambda x: copy_tiles(x, wait=True), x), 2 * x)
    # Up to jax 0.11 a race is printed, and `interpreted` asks; 0.12 raises
    seen = (AssertionError, jax.errors.JaxRuntimeError)
    with pytest.raises(seen, match="the interpreter saw a race|RACE DETECTED"):
        interpreted(lambda x: copy_tiles(x, wait=False), x)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [8, 40, 64, 96, 128, 896, 1000, 1024, 1536, 4864, 8192, 16384])
def test_how_rows_lie(width, itemsize):
    if rows.why_not_rows(width, itemsize):
        pytest.skip(rows.why_not_rows(width, itemsize))
    for warpgroups in (1, 2):
        tile = rows.row_tile(width, itemsize, repeat=2, warpgroups=warpgroups)
        threads = tile.warps[0] * tile.lanes[0] * tile.warps[1] * tile.lanes[1]
        assert threads == device.THREADS
        assert tile.padded >= width
        assert tile.padded - width < tile.warps[1] * tile.lanes[1] * tile.vector
        assert tile.inner * itemsize >= device.ACCESS_BYTES
        assert tile.inner <= device.MAX_BOX >= tile.chunks
        lines = rows.row_tile(width, itemsize, warpgroups=warpgroups, in_lines=True)
        assert lines.lines == tile.warps[1]  # a warp each
        for part in (part for group in lines.groups(rows.NUMBERS) for part in group):
            assert part.shape[0] == (part.rows if lines.lines == 1 else 4)
            assert part.shape[0] * part.shape[1] == part.rows * part.chunks * lines.inner
        # All of a row is in exactly one part
        parts = [part for group in tile.groups(rows.NUMBERS) for part in group]
        held = np.zeros((tile.rows, tile.chunks), int)
        for part in parts:
            held[part.row : part.row + part.rows, part.chunk : part.chunk + part.chunks] += 1
        assert (held == 1).all()


@pytest.mark.parametrize("count", [1, 7, 64, 8192, 10**6])
@pytest.mark.parametrize("width", [8, 16, 128, 896, 4096, 8192])
def test_the_default_fits(width, count):
    for sums in (0, 2):
        config = rows.default_config(
            width, 2, count, array_bytes=4, held_bytes=2, num_sms=132, sums=sums
        )
        tile = rows.row_tile(width, 2, repeat=config.repeat, warpgroups=config.warpgroups)
        assert rows.fits(config, width, 2, count)
        assert config.stages > 0 or not sums
        assert config.stages == 0 or tile.rows <= device.MAX_BOX  # a copy takes no more
        held = tile.padded * 2 + config.stages * tile.rows * tile.padded * 4
        assert config.blocks_per_sm * held <= device.SHARED_BYTES


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"repeat": 0}, "the other numbers must be 1"),
        ({"stages": -1}, "stages may be 0"),
        ({"warpgroups": 3}, "at most 2 warpgroups share a row"),
    ],
)
def test_configs_that_make_no_sense(config, words):
    with pytest.raises(ValueError, match=words):
        Config(**config)


def test_a_config_too_large_for_the_chip_is_refused():
    x = jax.ShapeDtypeStruct((8, 8192), jnp.float32)
    run = functools.partial(
        over_rows.over_rows,
        None,
        name="toy",
        outputs=[jnp.float32],
        row_sums=1,
        num_sms=2,
        interpret=True,
    )
    for stages, words in ((8, "takes 262144 bytes on chip for rows of 8192"), (6, None)):
        config = Config(1, stages, 1)
        if words is None:
            with pytest.raises(TypeError):  # the step that is None: it was let through
                jax.eval_shape(lambda x, c=config: run(inputs=[x], config=c), x)
        else:
            with pytest.raises(NotImplementedError, match=f"toy: cannot run this call: .*{words}"):
                jax.eval_shape(lambda x, c=config: run(inputs=[x], config=c), x)


@pytest.mark.parametrize(("width", "sums", "unsafe"), [(256, 2, False), (8192, 2, True)])
def test_sums_of_narrow_rows_keep_the_barriers_of_jax(monkeypatch, width, sums, unsafe):
    """Sums of columns follow each other in one place on chip: without JAX's barriers between them
    a warp overwrote what another still read, on a GPU alone (LayerNorm's backward pass)."""
    asked = []

    def kernel(body, *, unsafe_no_auto_barriers, **rest):
        asked.append(unsafe_no_auto_barriers)
        return lambda *arrays: [jnp.zeros(out.shape, out.dtype) for out in rest["out_type"]]

    monkeypatch.setattr(_compat, "kernel", kernel)
    x = jax.ShapeDtypeStruct((64, width), jnp.bfloat16)
    run = functools.partial(
        over_rows.over_rows,
        lambda group, inputs, weights, outputs, sums: sums,
        name="toy",
        outputs=[jnp.bfloat16],
        sums=sums,
        row_sums=2,
        config=None,
        num_sms=2,
        interpret=False,
    )
    jax.eval_shape(lambda x: run(inputs=[x]), x)
    assert asked == [unsafe]


def _norm(norm, x, *weights):
    return norm(x, *weights, eps=1e-5)


def _pull(f, x, *rest):
    *others, dy = rest
    return jax.vjp(lambda x: f(x, *others), x)[1](dy)[0]


def _turned(x, angles):
    return rope(x, x, angles, angles)


# Whose last tile of rows passes the end of a slice, or of a group of rows: in_axes and arrays
PASSING = {
    "rms_norm": (
        functools.partial(_norm, rms_norm),
        (0, 0),
        [((9, 101, 128), BF16), ((9, 128), BF16)],
    ),
    "rms_norm of a row": (
        functools.partial(_norm, rms_norm),
        (0, None),
        [((99, 128), BF16), ((128,), BF16)],
    ),
    "rms_norm of float32": (
        functools.partial(_norm, rms_norm),
        (0, None),
        [((9, 101, 512), F32), ((512,), F32)],
    ),
    "rms_norm, gradient": (
        functools.partial(_pull, functools.partial(_norm, rms_norm)),
        (None, None, 0),
        [((101, 128), BF16), ((128,), BF16), ((9, 101, 128), BF16)],
    ),
    "layer_norm": (
        functools.partial(_norm, layer_norm),
        (0, None, None),
        [((9, 101, 128), BF16), ((128,), BF16), ((128,), BF16)],
    ),
    "scale_softmax": (scale_softmax, (0,), [((9, 101, 128), BF16)]),
    "scale_softmax, gradient": (
        functools.partial(_pull, scale_softmax),
        (0, 0),
        [((9, 101, 128), BF16)] * 2,
    ),
    "scale_softmax, causal": (
        functools.partial(scale_softmax, causal=True),
        None,
        [((9, 101, 128), BF16)],
    ),
    "scale_softmax, a mask a row": (
        lambda x, mask: scale_softmax(x, mask=mask),
        None,
        [((9, 101, 128), BF16), ((9, 1, 128), jnp.bool_)],
    ),
    "swiglu": (swiglu, (0,), [((9, 101, 256), BF16)]),
    "rope": (_turned, (0, 0), [((9, 1, 101, 1, 64), F32), ((9, 1, 101, 32), F32)]),
}


@pytest.mark.aot
@pytest.mark.parametrize("name", [name for name in PASSING if name != "rms_norm of a row"])
def test_rows_that_pass_an_end_are_not_copied_with_the_others(name):
    """JAX copies whole rows side by side as one piece, UBLKCP, cut off at the array's end alone:
    where a tile's last rows are no more of it, others are copied one by one.
    """
    f, axes, arrays = PASSING[name]
    run = f if axes is None else jax.vmap(f, axes)
    program = aot.compile_for(run, *(jax.ShapeDtypeStruct(*array) for array in arrays))
    outs = 2 if name == "rope" else 1
    assert program.kernel(program.mosaic_launches()[-1]).count("UBLKCP") >= 2 * outs


@pytest.mark.gpu
@pytest.mark.parametrize("name", PASSING)
def test_rows_that_pass_an_end_on_the_gpu(name):
    """They belong to the next slice, or to the next group of rows.

    What was written over them was off by 0.85 of a row's norm and more (H200); sums in the order of
    another tile differ by the rounding of bfloat16.
    """
    f, axes, arrays = PASSING[name]
    rng = np.random.default_rng(0)
    given = [
        jnp.asarray(
            rng.random(shape) < 0.5 if dtype == jnp.bool_ else rng.normal(size=shape), dtype
        )
        for shape, dtype in arrays
    ]
    run, one = (jax.jit(g) for g in (f if axes is None else jax.vmap(f, axes), f))
    axes = axes or (0,) * len(given)
    slices = [
        one(*(x if axis is None else x[i] for x, axis in zip(given, axes, strict=True)))
        for i in range(len(given[-1] if axes[0] is None else given[0]))
    ]
    wanted = jax.tree.map(lambda *x: np.stack(x).astype(np.float32), *slices)
    for _ in range(5):
        for found, exact in zip(*map(jax.tree.leaves, (run(*given), wanted)), strict=True):
            error = np.linalg.norm(np.asarray(found, np.float32) - exact, axis=-1)
            assert np.all(error <= 0.02 * np.linalg.norm(exact, axis=-1))


@pytest.mark.parametrize("lead", [(10,), (3, 6), (3, 2, 3)])
def test_more_slices_than_a_grid_takes_are_several_launches(monkeypatch, lead):
    """Of CUDA, 65535 in the direction that vmap adds; a launch of more fails."""
    monkeypatch.setattr(_compat, "MOST_BLOCKS", 4)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(*lead, 5, 136)), BF16)
    norm = functools.partial(rms_norm, weight=jnp.ones(136, BF16), eps=1e-5, interpret=True)
    many = norm
    for _ in lead:
        many = jax.vmap(many)
    grids = re.findall(r"grid=\(([\d, ]+)\)", str(jax.make_jaxpr(many)(x)))
    assert len(grids) > 1
    for grid in grids:
        *before, _, _ = map(int, grid.split(","))
        assert np.prod(before) <= 4
    np.testing.assert_array_equal(interpreted(many, x), norm(x))


def test_slices_that_are_written_in_place_are_one_launch(monkeypatch):
    monkeypatch.setattr(_compat, "MOST_BLOCKS", 4)

    def doubled(x):
        target = _compat.hold(x)

        def body(source, held):
            held[...] = source[...] * 2

        how = {"name": "doubled", "out_type": (), "grid": (1,), "grid_names": ("block",)}
        _compat.kernel(body, **how, interpret=True)(x, target)
        return _compat.let_go(target)

    if not _compat.WRITES_REFERENCES:
        pytest.skip("needs jax 0.11")
    x = jnp.arange(5 * 128.0).reshape(5, 128)
    np.testing.assert_array_equal(interpreted(jax.vmap(doubled), x[:4]), 2 * x[:4])
    with pytest.raises(NotImplementedError, match="it writes into 4 slices at most, got 5"):
        jax.make_jaxpr(jax.vmap(doubled))(x)
