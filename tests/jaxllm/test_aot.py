"""Compiled for an H200 that this machine need not have. None of it runs on a GPU."""

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import fragmented_array
from planted_kernels import ROWS, SQUARE, WIDE_ROWS, double, product, row_sum

import pallas_kernels
from jaxllm import aot

F32 = jax.ShapeDtypeStruct((128, 256), jnp.float32)


def kernel(**changes):
    fields = dict(
        name="k",
        source="mosaic",
        registers=32,
        spill_store_bytes=0,
        spill_load_bytes=0,
        static_shared_bytes=0,
        dynamic_shared_bytes=0,
        notes=(),
        instructions={"LDG.E.128.CONSTANT": 3, "LDG.E.64": 2, "LDGSTS.E.128": 5, "SHFL.BFLY": 1},
    )
    return aot.Kernel(**{**fields, **changes})


def test_instructions_are_counted_by_opcode_and_modifiers():
    k = kernel()
    assert k.count("LDG") == 5
    assert k.count("LDG", "128") == 3
    assert k.count("LDGSTS", "128") == 5
    assert k.count("SHFL", "IDX") == 0
    assert k.count("STG") == 0


def test_a_target_is_data_that_ships():
    target = aot.Target.named("h200")
    assert target.device_kind == "NVIDIA H200"
    assert target.num_sms == 132
    with pytest.raises(ValueError, match="^aot: no target is named 'h2000'; there are h200$"):
        aot.Target.named("h2000")


def test_what_is_missing_is_said_in_one_sentence(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "jax_plugins" in name else found(name)
    )
    said = (
        r"JAX's CUDA plugin is not installed: pip install 'jax\[cuda13\]<0.12' \(no GPU is needed\)"
    )
    assert (aot.why_not() or "").startswith("JAX's CUDA plugin is not installed: pip install")
    with pytest.raises(RuntimeError, match=f"^aot: cannot compile for a GPU: {said}$"):
        aot.compile_for(jnp.sin, F32)


@pytest.mark.aot
def test_a_missing_tool_is_named(monkeypatch):
    found = aot._tool
    monkeypatch.setattr(aot, "_tool", lambda name: None if name == "nvdisasm" else found(name))
    assert aot.why_not() == "NVIDIA's nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"


@pytest.mark.aot
def test_peak_bytes_are_those_of_the_program_and_nothing_is_written_for_them(monkeypatch, capfd):
    def f(x):
        return double(jnp.sin(x @ x.T) @ x)

    peak = aot.compile_for(f, ROWS).peak_bytes
    found = aot._tool
    monkeypatch.setattr(aot, "_tool", lambda name: None if name == "nvdisasm" else found(name))
    monkeypatch.setattr(aot, "_mosaic_writes_to", None)
    assert aot.peak_bytes(f, ROWS) == peak >= 2 * 2 * ROWS.size
    assert capfd.readouterr().err == ""  # Mosaic says there what it cannot disassemble
    monkeypatch.setattr(aot, "_tool", lambda name: None)
    with pytest.raises(RuntimeError, match="^aot: cannot compile for a GPU: NVIDIA's ptxas is not"):
        aot.peak_bytes(f, ROWS)


@pytest.mark.aot
def test_a_kernel_on_the_tensor_cores():
    program = aot.compile_for(product, SQUARE, SQUARE)
    k = program.kernel("product")
    assert k.source == "mosaic"
    assert 128 < k.registers < 255  # 128 of them accumulate
    assert k.spill_store_bytes == k.spill_load_bytes == 0
    assert k.count("HGMMA") > 0
    assert k.count("UTMALDG") > 0
    assert k.count("UTMASTG") == 1
    assert k.count("LDL") == k.count("STL") == 0
    assert k.dynamic_shared_bytes is not None
    assert k.dynamic_shared_bytes >= 2 * (128 * 64 + 64 * 128 + 128 * 128)
    assert program.mosaic_launches() == ["product"]
    assert program.argument_bytes == 2 * 2 * 1024 * 1024
    assert program.output_bytes == 2 * 1024 * 1024
    assert program.peak_bytes == program.argument_bytes + program.output_bytes
    with pytest.raises(KeyError, match="no kernel 'matmul'; there are .'product'."):
        program.kernel("matmul")


@pytest.mark.aot
def test_too_few_registers_show_as_spills_and_notes():
    k = aot.compile_for(functools.partial(product, columns=256), SQUARE, SQUARE).kernels[0]
    assert k.spill_store_bytes > 0
    assert k.count("STL") > 0
    assert any(note.startswith("C7511 ") for note in k.notes)


@pytest.mark.aot
@pytest.mark.parametrize(("vector", "width"), [(2, None), (1, "U16")])
def test_the_width_of_an_access_shows(vector, width):
    k = aot.compile_for(functools.partial(row_sum, vector=vector), ROWS).kernels[0]
    assert k.count("LDG") == k.count("STG") > 0
    assert width is None or k.count("LDG", width) == k.count("LDG")
    assert k.count("LDG", "128") == 0
    assert k.count("SHFL", "BFLY") > 0


@pytest.mark.aot
def test_sixteen_bytes_at_once_show():
    eight = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)
    k = aot.compile_for(functools.partial(row_sum, vector=8), eight).kernels[0]
    assert k.count("LDG", "128") == k.count("STG", "128") == 1
    spills = aot.compile_for(functools.partial(row_sum, vector=4), WIDE_ROWS).kernels[0]
    assert spills.registers == 255
    assert spills.spill_load_bytes > 0


@pytest.mark.aot
def test_launches_have_their_names_in_their_order():
    def f(x):
        return double(row_sum(jnp.sin(double(x))))

    program = aot.compile_for(f, ROWS, xla_kernels=True)
    assert program.mosaic_launches() == ["double", "row_sum", "double"]
    assert [launch.is_mosaic for launch in program.launches] == [True, False, True, True]
    assert [launch.results for launch in program.launches] == [(("bf16", (64, 256)),)] * 4
    kinds = [launch.kind for launch in program.launches]
    assert kinds == ["kCustomCall", "kCustomKernel", "kCustomCall", "kCustomCall"]
    own = program.kernel(program.launches[1].name)
    assert own.source == "xla"
    assert own.count("LDG") > 0
    assert own.dynamic_shared_bytes == 0
    assert len(program.hlo) < 20_000  # the kernels' own code is not in it


@pytest.mark.aot
def test_a_program_can_be_compiled_again():
    jitted = jax.jit(double)
    first, second, third = (aot.compile_for(f, ROWS) for f in (jitted, jitted, double))
    assert first.kernels == second.kernels == third.kernels
    assert first.launches == second.launches == third.launches


@pytest.mark.aot
def test_the_body_of_a_loop_is_there_once():
    def f(x, n):
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, double(c[1])), (0, x))

    program = aot.compile_for(f, ROWS, jax.ShapeDtypeStruct((), jnp.int32))
    assert program.mosaic_launches() == ["double"]


@pytest.mark.aot
def test_donated_bytes_and_static_arguments():
    @functools.partial(jax.jit, donate_argnames="x", static_argnames="n")
    def f(x, *, n):
        return x + n

    assert aot.compile_for(f, F32, n=2).alias_bytes == 4 * 128 * 256
    assert aot.compile_for(lambda x: x + 2, F32).alias_bytes == 0


@pytest.mark.aot
def test_ops_see_the_target_and_arrays_stand_for_their_shapes():
    from pallas_kernels import device

    seen = []

    def f(x):
        seen.append(device.current())
        return x * 2

    aot.compile_for(f, jnp.ones((4, 4)))
    assert seen == [device.Device("gpu", "NVIDIA H200", 9.0, 132)]
    assert device.current().platform == jax.default_backend()


@pytest.mark.aot
def test_who_says_what_to_compile_for():
    """Arguments and the target; what a function closes over would be compiled for the CPU."""
    big = jnp.ones((64, 64), jnp.bfloat16)
    for compile_ in (aot.compile_for, aot.peak_bytes):
        for call in (
            (lambda factor: factor * big @ big, 2.0),
            (jax.jit(lambda x: big @ big), big),  # which drops what it does not use
        ):
            with pytest.raises(ValueError, match="^aot: the program takes no argument that is an"):
                compile_(*call)
        compile_(lambda x: big @ big, big)
        with pytest.raises(ValueError, match="^aot: no target is named None; there are h200$"):
            compile_(jnp.sum, big, target=None)


@pytest.mark.aot
def test_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for before in (None, str(tmp_path / "own")):
        if before is not None:
            monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", before)
        aot.compile_for(double, ROWS)
        assert os.environ.get("MOSAIC_GPU_DUMP_TO") == before
        assert not list(tmp_path.iterdir())


@pytest.mark.aot
def test_a_kernel_that_leaves_no_code_is_an_error(monkeypatch):
    monkeypatch.setattr(aot, "_DUMP_VARIABLE", "NOT_THE_ONE_THAT_MOSAIC_READS")
    said = (
        r"^aot: 0 Mosaic kernels, not one, have left code for a call in the program \(written: none"
    )
    with pytest.raises(RuntimeError, match=said):
        aot.compile_for(double, ROWS)
    assert "NOT_THE_ONE_THAT_MOSAIC_READS" not in os.environ


@pytest.mark.aot
def test_kernels_ask_once_which_assembler_there_is():
    """Each question is a process: half the time of lowering, were it asked at each conversion."""
    queries = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    aot.compile_for(pallas_kernels.flash_attention, queries, queries, queries)
    asked = fragmented_array.mgpu_lib._mosaic_gpu_ext._get_ptxas_isa_version.cache_info()
    assert asked.misses == 1
    assert asked.hits > 10
