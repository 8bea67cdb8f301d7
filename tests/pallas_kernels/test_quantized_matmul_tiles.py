"""The product with packed weights for more than 16 rows of x, against float64.

The interpreter runs all of the kernel but what happens to a code in its register, and sees races,
where wgmma begins to read (that it is done when a stage is given back, or registers are written
anew, a GPU has to show); what the registers become is shown instruction by instruction
(`lane_machine`), and on a GPU.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_device import H200
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernels import interpreted
from lane_machine import Machine, Value, stand_in
from quantized_calls import (
    BF16,
    DTYPES,
    F16,
    F32,
    assert_right,
    call,
    interpret,
    numbers,
    on_chip,
    packed_shape,
    packed_weight,
)
from quantized_calls import TILED_FORMATS as FORMATS

from jaxllm import aot
from pallas_kernels import (
    _compat,
    lane_code,
    quantized_expand,
    quantized_matmul_tiles,
    quantized_unpack,
    ring,
)
from pallas_kernels.device import SHARED_BYTES
from pallas_kernels.packed import Packed
from pallas_kernels.quantize import dequantize, quantize
from pallas_kernels.quantized_matmul import (
    Config,
    bucket,
    candidates,
    default_config,
    quantized_matmul,
    quantized_matmul_reference,
    why_not,
)
from pallas_kernels.quantized_matmul_config import Static
from pallas_kernels.quantized_tiles_config import Tiles, shared_bytes

pytestmark = pytest.mark.usefixtures("strict_jax")


def whole_accesses(ref: Any) -> Any:
    """What begins at the last 16 bytes of a row of global memory before the reference does."""
    *before, last = ref.transforms
    *rows, columns = last.indices
    count = 16 // jnp.dtype(ref.dtype).itemsize
    columns = pl.ds(columns.start // count * count, columns.size)
    return type(ref)(ref.ref, (*before, dataclasses.replace(last, indices=(*rows, columns))))


class Watched:
    """`plgpu`, where a copy that begins where the copy engine traps begins before that."""

    def __getattr__(self, name: str) -> Any:
        return getattr(plgpu, name)

    def copy_gmem_to_smem(self, source: Any, target: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(whole_accesses(source), target, barrier)

    def copy_smem_to_gmem(self, source: Any, target: Any) -> None:
        plgpu.copy_smem_to_gmem(source, whole_accesses(target))


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(quantized_matmul_tiles, "plgpu", Watched())


# rows of x: tiles, rows of the weight, and the rest of the call
SHAPES: Any = {
    17: (Tiles(64, 64, 2), 80, "bias", {}),
    64: (Tiles(64, 128, 2, splits=2), 144, "residual", {}),
    65: (Tiles(128, 128, 2), 304, "bias residual", {"epilogue": "swiglu"}),
    300: (Tiles(256, 128, 2, snake=1), 144, "", {"out_dtype": F32}),
}


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(FORMATS)), ids=list(FORMATS))
def test_every_format(i: int):
    form, rows = list(FORMATS)[i], list(SHAPES)[i % len(SHAPES)]
    config, o, extra, keywords = SHAPES[rows]
    dtype = BF16 if form.startswith("mx") or i % 2 else F16
    k = 512 if "512" in form else 384 if rows < 100 else 256
    arrays, keywords = call(rows, o, k, form, dtype, extra, **keywords)
    assert_right(arrays, keywords, interpret(arrays, keywords, config))


CALLS: Any = {  # K of 896 and N of 80 are what is left of real models
    "17 rows, K of 896": (None, partial(call, 17, 80, 896, "int4, groups of 64, zero points")),
    "all, rows past a tile": (
        Tiles(64, 128, 3),
        partial(call, 67, 288, 256, "int8", F16, "bias residual", epilogue="swiglu"),
    ),
    "K in two, float32": (
        Tiles(64, 128, 2, splits=2),
        partial(call, 33, 272, 384, "nvfp4", BF16, "bias", epilogue="swiglu", out_dtype=F32),
    ),
    "GELU's gate": (
        Tiles(64, 128, 2),
        partial(call, 17, 272, 256, "int8", BF16, "bias residual", epilogue="geglu"),
    ),
    "a row": (Tiles(32, 64, 2), partial(call, 1, 64, 256, "mxfp8")),
    "K of 320, a chunk a stage": (Tiles(32, 64, 3), partial(call, 17, 80, 320, "int8")),
    "likewise, groups, K in three": (
        Tiles(32, 64, 2, splits=3),
        partial(call, 33, 80, 320, "mxfp8", BF16, "bias residual"),
    ),
    "four warpgroups, gate and up": (
        Tiles(96, 256, 2),
        partial(call, 70, 336, 256, "int4", BF16, "residual", epilogue="swiglu"),
    ),
    "three warpgroups": (Tiles(64, 192, 2), partial(call, 70, 304, 384, "int4", F16, "bias")),
    "float32 in one part": (
        Tiles(32, 64, 2),
        partial(call, 33, 80, 256, "int8", BF16, "bias residual", out_dtype=F32),
    ),
    "half a row of zero points": (
        Tiles(64, 128, 2),
        partial(call, 17, 176, 256, "int4, zero points", epilogue="swiglu"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_forward(name: str):
    config, make = CALLS[name]
    arrays, keywords = make()
    assert_right(arrays, keywords, interpret(arrays, keywords, config))


@pytest.mark.parametrize("part", ["row_scale", "zero"])
def test_the_check_sees_another_scale(part: str):
    name = {"row_scale": "K in two, float32", "zero": "17 rows, K of 896"}[part]
    config, make = CALLS[name]
    arrays, keywords = make()
    packed = arrays["packed"]
    if part == "zero":  # of one group and one row of the weight
        other = dataclasses.replace(packed, zero=packed.zero.at[3, 5].add(np.uint8(1)))
    else:
        other = dataclasses.replace(packed, row_scale=packed.row_scale * 1.02)
    y = interpret({**arrays, "packed": other}, keywords, config)
    with pytest.raises(AssertionError, match="error is"):
        assert_right(arrays, keywords, y)


def test_the_check_sees_a_start_that_traps(monkeypatch: pytest.MonkeyPatch):
    """The twin of all calls that are right: up's zero points begin at byte 88 of a row."""
    monkeypatch.setattr(quantized_matmul_tiles, "too_early", lambda *_: 0)
    # one that no other test has compiled
    arrays, keywords = call(18, 176, 256, "int4, zero points", epilogue="swiglu")
    config = Tiles(64, 128, 2)
    with pytest.raises(AssertionError, match="error is"):
        assert_right(arrays, keywords, interpret(arrays, keywords, config))


@pytest.mark.skipif(
    not _compat.INTERPRETS_CUT_COPIES, reason="not by the interpreter of jax 0.10: `interpreted`"
)
def test_the_interpreter_sees_a_missing_wait(monkeypatch: pytest.MonkeyPatch):
    """The twin of all tests that see no race: nobody waits for copies."""
    config = Tiles(32, 64, 2)

    class WithoutFull(Watched):  # the ring waits
        def barrier_wait(self, barrier: Any) -> None:
            whole = getattr(barrier, "ref", barrier)
            if (whole.shape, whole.dtype.num_arrivals) != ((config.stages,), 3):  # codes, two of x
                plgpu.barrier_wait(barrier)

    arrays, _ = call(17, 64, 128 * config.stages, "int8")
    run = partial(quantized_matmul, config=config, interpret=True)
    monkeypatch.setattr(ring, "plgpu", WithoutFull())
    jax.block_until_ready(jax.jit(lambda arrays: run(**arrays))(arrays))
    assert _compat.races_found()


def test_gradients():
    """Those of the reference."""
    arrays, _ = call(17, 64, 256, "int4")
    run = partial(quantized_matmul, packed=arrays["packed"], interpret=True)
    d_out = numbers(9, (17, 64), BF16)
    (ours,) = interpreted(lambda x, d: jax.vjp(run, x)[1](d), arrays["x"], d_out)
    plain = partial(quantized_matmul_reference, packed=arrays["packed"])
    np.testing.assert_array_equal(ours, jax.vjp(plain, arrays["x"])[1](d_out)[0])


def every_code(form: str, dtype: Any) -> Packed:
    """A weight [4, 512] that has all bytes of codes at each place of a word, without row scale."""
    packed = packed_weight(form, 4, 512, dtype)
    codes = np.stack([np.roll(np.arange(256, dtype=np.uint8), by) for by in range(4)])
    codes = np.concatenate([codes, codes], axis=1)[:, : packed.codes.shape[1]]
    if packed.codes.dtype == jnp.float8_e4m3fn:
        codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)  # NaN
    codes = jnp.asarray(codes.view(packed.codes.dtype))
    return dataclasses.replace(packed, codes=codes, row_scale=None)


def expanded(
    monkeypatch: Any, packed: Packed, dtype: Any, change: Callable[[str], str] = str
) -> np.ndarray:
    """What threads make of the codes, one a row; `change` rewrites the instructions that put two
    codes where they are expanded.
    """
    o, i = packed.shape
    machine = Machine({}, {}, o)
    stand_in(monkeypatch, machine, (lane_code, quantized_expand, quantized_unpack))
    asm = machine.asm
    monkeypatch.setattr(quantized_unpack, "asm", lambda text, *rest: asm(change(text), *rest))
    group = packed.group_size or i
    found = np.zeros((o, i), dtype)
    pair = np.dtype(f"u{8 // quantized_unpack.per_word(packed.scheme)}")  # of two codes
    for at, column in enumerate(np.asarray(packed.codes).view(pair).T):
        of: dict[str, Any] = {"scale": None, "zero": None}
        for name in of:
            if (array := getattr(packed, name)) is not None:
                row = np.asarray(array[2 * at // group])
                of[name] = Value(row.view(f"u{row.dtype.itemsize}"), "i32")
        codes = Value(column, "i32")
        both = quantized_expand._pair(codes, of["zero"], of["scale"], packed, dtype)
        found[:, 2 * at : 2 * at + 2] = both.bits.astype(np.uint32)[:, None].view(dtype)
    return found.astype(np.float64) * quantized_unpack.rest(packed.scheme, dtype)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_becomes_its_number(form: str, dtype: str, monkeypatch: Any):
    if dtype == "float16" and form.startswith("mx"):
        pytest.skip("not taken")
    packed = every_code(form, jnp.dtype(dtype))
    want = np.asarray(dequantize(packed, jnp.dtype(dtype))).astype(np.float64)
    with monkeypatch.context() as patched:
        ours = expanded(patched, packed, jnp.dtype(dtype))
    np.testing.assert_array_equal(ours, want)


@pytest.mark.parametrize(
    ("form", "before", "after"), [("int4", "0x1001", "0x10001"), ("int8", "0x4140", "0x4041")]
)
def test_numbers_in_another_order_are_seen(form: str, before: str, after: str, monkeypatch: Any):
    packed = every_code(form, BF16)
    want = np.asarray(dequantize(packed, BF16)).astype(np.float64)
    with monkeypatch.context() as patched:
        change = lambda text: text.replace(before, after)  # noqa: E731
        ours = expanded(patched, packed, jnp.dtype(BF16), change)
    with pytest.raises(AssertionError, match="not equal"):
        np.testing.assert_array_equal(ours, want)


def weight_shape(o: int, i: int, form: str = "int4") -> Packed:
    return packed_shape(form, o, i, BF16)


def shape(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Tiles(48), "tile_m must be a multiple of 32 to 256 beside 128 tile_n"),
        (Tiles(128, 256), "tile_m must be a multiple of 32 to 96 beside 256 tile_n"),
        (Tiles(0), "tile_m must be a multiple of 32"),
        (Tiles(64, 96), "tile_n must be a multiple of 64 to 256"),
        (Tiles(64, 320), "tile_n must be a multiple of 64 to 256"),
        (Tiles(stages=1), "stages must be 2 at least, snake 1"),
        (Tiles(snake=0), "stages must be 2 at least, snake 1"),
        (Tiles(splits=3), "splits must be 1 to 8, and to the 2 steps of K"),
        (Tiles(splits=0), "splits must be 1 to 8"),
        (Tiles(stages=9), "takes [0-9]+ of 232448 bytes on chip"),
    ],
)
def test_wrong_tiles(config: Tiles, sentence: str):
    run = partial(quantized_matmul, config=config, interpret=True)
    with pytest.raises(ValueError, match=f"^quantized_matmul: .*{sentence}"):
        jax.eval_shape(run, shape(17, 256), weight_shape(64, 256))


@pytest.mark.parametrize(
    ("x", "weight", "phrase"),
    [
        (shape(17, 256), weight_shape(64, 256), None),
        (shape(4096, 4096), weight_shape(14336, 4096), None),
        (shape(17, 160), weight_shape(64, 160, "int4, scales of float32"), "multiples of 128"),
        (shape(17, 256), weight_shape(24, 256), "takes outputs in multiples of 16, got 24"),
        (
            shape(17, 384),
            jax.eval_shape(lambda w: quantize(w, "int4", 96), shape(64, 384)),
            "groups of 96 straddle the 64 inputs that are expanded at a time",
        ),
    ],
)
def test_why_not(x: Any, weight: Any, phrase: str | None):
    reason = why_not(x, weight, device=H200)
    assert reason is None if phrase is None else phrase in str(reason)


@pytest.mark.parametrize("form", FORMATS)
def test_what_lies_on_chip_is_known(form: str, monkeypatch: pytest.MonkeyPatch):
    """A launch of more than there is fails; one byte of it is Mosaic's own."""
    for m, gated in itertools.product((17, 300), (False, True)):
        x, weight, bias = shape(m, 3584), weight_shape(304, 3584, form), shape(304, dtype=F32)
        residual = shape(m, 304 // (1 + gated))
        default = default_config(x, weight, epilogue="swiglu" if gated else None, device=H200)
        assert isinstance(default, Tiles)
        for c in (default, Tiles(64, 192, 3), Tiles(96, 256, 2), Tiles(256, 128, 2)):
            c = dataclasses.replace(c, splits=1)
            static = Static("name", c, False, "bfloat16", 132, "swiglu" if gated else None)
            run = partial(quantized_matmul_tiles.tile_products, static)
            taken = on_chip(monkeypatch, run, x, weight, bias, residual)
            assert taken < shared_bytes(c, weight, gated=gated) < taken + 4096
            if not gated:
                static = dataclasses.replace(static, out_dtype="float32")
                sums_of = dataclasses.replace(weight, row_scale=None)
                taken = on_chip(monkeypatch, partial(run.func, static), x, sums_of)
                assert taken < shared_bytes(c, weight, gated=False) < taken + 8192


@pytest.mark.parametrize("form", ["nvfp4", "int4, groups of 32", "int4, scales of float32"])
@pytest.mark.parametrize("m", [96, 160, 4096])
def test_a_gate_behind_float32_sums_fits(form: str, m: int):
    """Whose slices take what those of gate and up do not."""
    x, weight = shape(m, 4096), weight_shape(28672, 4096, form)
    config = default_config(x, weight, epilogue="swiglu", out_dtype=F32, device=H200)
    assert isinstance(config, Tiles)
    assert shared_bytes(config, weight, gated=False) <= SHARED_BYTES


@pytest.mark.parametrize("m", [17, 64, 65, 300, 512, 4096])
@pytest.mark.parametrize(
    ("o", "i"), [(1152, 896), (896, 4864), (151936, 896), (6144, 4096), (4096, 14336)]
)
@pytest.mark.parametrize("form", ["int4", "int8", "nvfp4"])
def test_some_tiles_fit(m: int, o: int, i: int, form: str):
    x, weight = shape(m, i), weight_shape(o, i, form)
    for epilogue in (None, "swiglu"):
        config = default_config(x, weight, epilogue=epilogue, device=H200)
        assert isinstance(config, Tiles)


MEASURED = [
    ("int4", 32, 4096, 4096, Tiles(32, 128, 6, 4)),
    ("int4", 32, 28672, 4096, Tiles(32, 256, 4)),
    ("int4", 64, 28672, 4096, Tiles(64, 256, 4)),
    ("int4", 64, 4096, 14336, Tiles(64, 128, 6, 4)),
    ("int4", 64, 6144, 4096, Tiles(64, 192, 4, 4)),
    ("int4", 128, 28672, 4096, Tiles(128, 128, 4)),
    ("int4", 512, 6144, 4096, Tiles(128, 192, 3)),
    ("int4", 512, 4096, 14336, Tiles(128, 128, 4)),
    ("int8", 64, 28672, 4096, Tiles(64, 256, 3)),
    ("int8", 512, 4096, 4096, Tiles(128, 128, 3)),
    ("nvfp4", 512, 4096, 14336, Tiles(256, 64, 3)),
    ("fp8", 2048, 6144, 4096, Tiles(256, 128, 2)),
    ("mxfp8", 8192, 28672, 4096, Tiles(192, 128, 3)),
    ("int4", 4096, 6144, 4096, Tiles(192, 128, 3)),
]


@pytest.mark.parametrize(("form", "m", "o", "i", "config"), MEASURED)
def test_the_default_is_what_was_fastest(form: str, m: int, o: int, i: int, config: Tiles):
    """Or within 4 % of it, of several tiles each on an H100 (benchmarks/notes.md)."""
    epilogue = "swiglu" if o == 28672 else None
    found = default_config(shape(m, i), weight_shape(o, i, form), epilogue=epilogue, device=H200)
    assert found == config


def test_candidates_are_legal(monkeypatch):
    monkeypatch.setattr("pallas_kernels._compat.INTERPRETS_LAYOUTS", True)  # for shapes it has all
    x, weight = shape(64, 4096), weight_shape(4096, 4096)
    found = candidates(x, weight, device=H200)
    assert len(found) > 10
    assert all(isinstance(config, Tiles) for config in found)
    for config in found[::20]:
        jax.eval_shape(partial(quantized_matmul, config=config, interpret=True), x, weight)


def test_an_interpreter_that_casts_no_layouts_says_so(monkeypatch):
    monkeypatch.setattr("pallas_kernels._compat.INTERPRETS_LAYOUTS", False)
    x, weight = shape(64, 256), weight_shape(64, 256)
    with pytest.raises(NotImplementedError, match=r"quantized_matmul: .* needs jax 0.11 \(Python"):
        jax.eval_shape(partial(quantized_matmul, interpret=True), x, weight)


def test_a_form_that_is_asked_for_is_looked_at():
    """Warps take no groups of 192, so that few rows are of tiles too."""
    weight = jax.eval_shape(lambda w: quantize(w, "int8", 192), shape(64, 768))
    x, warps = shape(16, 768), Config(16, 4, 1, 1)
    assert isinstance(default_config(x, weight, device=H200), Tiles)
    assert "straddle the inputs of a lane" in str(why_not(x, weight, config=warps, device=H200))
    assert why_not(x, weight, device=H200) is None
    assert bucket(x, weight) != bucket(x, weight_shape(64, 256))


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("form", ["int4, groups of 64, zero points", "int8", "mxfp4"])
@pytest.mark.parametrize(
    ("rows", "config"),
    [(64, None), (512, None), (512, Tiles(128, 192, 2)), (512, Tiles(96, 256, 2))],
)
def test_compiled(form: str, rows: int, config: Tiles | None):
    """No spills, no product that the assembler makes wait for another; wgmma, and copies by TMA."""
    for epilogue, name in (("swiglu", "quantized_matmul_swiglu"), (None, "quantized_matmul")):
        arrays = {"x": shape(rows, 1024), "packed": weight_shape(1024, 1024, form)}
        arrays["bias"] = shape(1024)
        run = partial(quantized_matmul, epilogue=epilogue, config=config)
        kernel = aot.compile_for(lambda arrays, run=run: run(**arrays), arrays).kernel(name)
        assert kernel.spill_store_bytes == kernel.spill_load_bytes == 0
        assert not [n for n in kernel.notes if n.startswith(("C7504", "C7511", "C7512"))]
        assert kernel.count("HGMMA")


@pytest.mark.aot
@pytest.mark.parametrize("epilogue", [None, "swiglu"])
def test_what_follows_sums_of_several_blocks_is_one_launch(epilogue: str | None):
    arrays = {"x": shape(64, 1024), "packed": weight_shape(1024, 1024, "int8")}
    arrays["residual"] = shape(64, 1024 if epilogue is None else 512)
    run = partial(quantized_matmul, epilogue=epilogue, config=Tiles(64, 128, 2, splits=4))
    launches = aot.compile_for(lambda arrays: run(**arrays), arrays).launches
    assert len(launches) == 2
    assert launches[0].name.startswith("quantized_matmul")


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_number_on_a_gpu(form: str, dtype: str):
    """Rows of x with a single 1 read the weight out, whose numbers are those of `dequantize`."""
    if dtype == "float16" and form.startswith("mx"):
        pytest.skip("not taken")
    o, i = 128, 512
    packed = packed_weight(form, o, i, jnp.dtype(dtype))
    y = quantized_matmul(jnp.eye(i, dtype=dtype), packed, out_dtype=F32)
    numbers = dequantize(dataclasses.replace(packed, row_scale=None), jnp.dtype(dtype))
    want = np.asarray(numbers).astype(np.float32)
    if packed.row_scale is not None:
        want = want * np.asarray(packed.row_scale)[:, None]
    np.testing.assert_array_equal(y, want.T)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(form: str, dtype: str):
    if dtype == "float16" and form.startswith("mx"):
        pytest.skip("not taken")
    turn = list(FORMATS).index(form) + list(DTYPES).index(dtype)
    rows = (17, 64, 300, 4096)[turn % 4]
    short, long = (1024, 3584) if "512" in form else (896, 4864)
    odd = 832 if form in ("int8", "fp8", "fp8, groups", "mxfp8") else short  # a chunk a stage
    calls: Any = [
        (long, None, "", None),
        (short, Tiles(128, 128, 2), "bias residual", "swiglu"),
        (long, Tiles(64, 128, 3, splits=3), "residual", None),
        (short, Tiles(128, 192, 2), "residual", None),
        (short, Tiles(96, 256, 2), "bias residual", "swiglu"),
        (odd, Tiles(256, 128, 2), "bias", None),
        (short, Tiles(128, 128, 2), "bias", "geglu"),
    ]
    for k, config, extra, epilogue in calls:
        arrays, keywords = call(rows, 304, k, form, DTYPES[dtype], extra, epilogue=epilogue)
        y = quantized_matmul(**arrays, **keywords, config=config)
        assert_right(arrays, keywords, y)
        again = quantized_matmul(**arrays, **keywords, config=config)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(again))
