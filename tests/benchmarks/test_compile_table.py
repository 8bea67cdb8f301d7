"""Each rule of the compile table finds a kernel that breaks it, and spares one that does not."""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from planted_kernels import ROWS, SQUARE, WIDE_ROWS, double, product, row_sum

from benchmarks import compile_table, programs
from benchmarks.case import Case
from jaxllm import aot

EIGHT = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)  # one access of 16 bytes a thread
GOOD = aot.Kernel(
    name="k",
    source="mosaic",
    registers=32,
    spill_store_bytes=0,
    spill_load_bytes=0,
    static_shared_bytes=1,
    dynamic_shared_bytes=1024,
    notes=("C7519 warpgroup.arrive is injected in around line 9",),
    instructions={
        "UTMALDG.2D": 1,
        "STG.E.128": 1,
        "SHFL.BFLY": 5,
        "SHFL.IDX": 1,
        "HGMMA.64x128x16.F32.BF16": 4,
        "LDG.E.64": 2,
    },
)


def without(*names, **instructions):
    kept = {k: v for k, v in GOOD.instructions.items() if k not in names}
    return dataclasses.replace(GOOD, instructions={**kept, **instructions})


@pytest.mark.parametrize("kind", ["memory", "memory-reduce", "memory-read", "matmul"])
def test_a_good_kernel_is_spared(kind):
    assert compile_table.faults(kind, [GOOD]) == []


def test_of_few_bytes_only_spills_are_faults():
    narrow = without("UTMALDG.2D", "STG.E.128", "SHFL.BFLY")
    assert compile_table.faults("launch", [narrow]) == []
    assert compile_table.faults("launch", [dataclasses.replace(narrow, spill_load_bytes=4)])


@pytest.mark.parametrize(
    ("kind", "kernel", "said"),
    [
        ("matmul", dataclasses.replace(GOOD, spill_store_bytes=8), "k spills (8 bytes"),
        ("memory", dataclasses.replace(GOOD, spill_load_bytes=4), "k spills (4 bytes"),
        ("memory", dataclasses.replace(GOOD, notes=("C7504 setmaxnreg",)), "k: C7504 setmaxnreg"),
        ("matmul", dataclasses.replace(GOOD, notes=("C7511 x",)), "k: C7511 x"),
        ("matmul", dataclasses.replace(GOOD, notes=("C7512 x",)), "k: C7512 x"),
        ("matmul", without("HGMMA.64x128x16.F32.BF16"), "no tensor cores"),
        ("memory", without("UTMALDG.2D"), "k reads nothing by 16 bytes"),
        ("memory-reduce", without("STG.E.128"), "k writes nothing by 16 bytes"),
        ("memory-reduce", without("SHFL.BFLY"), "rows are reduced without shuffles"),
        (
            "memory-read",
            without("SHFL.BFLY", "HGMMA.64x128x16.F32.BF16"),
            "sums are made without shuffles or tensor cores",
        ),
    ],
)
def test_every_rule_finds_its_fault(kind, kernel, said):
    [found] = compile_table.faults(kind, [kernel])
    assert found.startswith(said)


def test_spills_that_are_written_down_may_not_grow():
    spilling = dataclasses.replace(GOOD, spill_store_bytes=8, spill_load_bytes=8)
    assert compile_table.faults("matmul", [spilling], spilled_bytes=16) == []
    [found] = compile_table.faults("matmul", [spilling], spilled_bytes=15)
    assert found.startswith("k spills (16 bytes")


def test_an_access_by_a_generic_pointer_is_wide_too():
    generic = without("UTMALDG.2D", "STG.E.128", **{"LD.E.128": 1, "ST.E.128": 1})
    assert compile_table.faults("memory", [generic]) == []


def test_what_only_reads_may_write_little():
    assert compile_table.faults("memory-read", [without("STG.E.128")]) == []


def test_one_kernel_of_two_may_write_a_sum_alone():
    assert compile_table.faults("memory", [without("STG.E.128"), GOOD]) == []


def test_no_kernel_at_all_is_a_fault():
    assert compile_table.faults("memory", []) == ["no kernel of ours runs"]


@pytest.mark.aot
@pytest.mark.parametrize(
    ("kind", "function", "arguments", "said"),
    [
        ("memory", double, (ROWS,), None),
        ("memory-reduce", functools.partial(row_sum, vector=8), (EIGHT,), None),
        ("matmul", product, (SQUARE, SQUARE), None),
        ("memory-reduce", double, (ROWS,), "rows are reduced without shuffles"),
        ("matmul", double, (ROWS,), "no tensor cores"),
        ("memory-reduce", functools.partial(row_sum, vector=1), (ROWS,), "reads nothing by 16"),
        ("memory-reduce", functools.partial(row_sum, vector=4), (WIDE_ROWS,), "row_sum spills"),
        ("matmul", functools.partial(product, columns=256), (SQUARE, SQUARE), "product: C7511"),
        ("memory", jnp.sin, (ROWS,), "no kernel of ours runs"),
        ("memory", row_sum, (jax.ShapeDtypeStruct((4, 100), jnp.float32),), "Error: "),
    ],
)
def test_planted_kernels(monkeypatch, kind, function, arguments, said):
    case = Case("planted", "label", arguments, function, function, kind, bytes=1)
    monkeypatch.setattr(compile_table, "all_cases", lambda names: [case])
    row = compile_table.compile_case((), 0)
    assert row.name == "planted: label"
    if said is None:
        assert row.faults == ()
        assert len(row.kernels) == 1
    else:
        assert any(said in fault for fault in row.faults), row.faults


@pytest.mark.aot
def test_the_command_prints_a_table_and_fails_on_a_fault(monkeypatch, capsys):
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Threads)
    good = Case("double", "64 x 256", (ROWS,), double, double, "memory", bytes=1)
    monkeypatch.setattr(compile_table, "all_cases", lambda names: [good])
    assert compile_table.main(["double"]) == 0
    out = capsys.readouterr().out
    assert "double: 64 x 256" in out
    assert "1 of 1 cases and 0 programs compiled, 0 at fault" in out
    bad = dataclasses.replace(good, kind="matmul")
    monkeypatch.setattr(compile_table, "all_cases", lambda names: [good, bad])
    assert compile_table.main(["double"]) == 1
    out = capsys.readouterr().out
    assert "double: 64 x 256: no tensor cores: none of HGMMA, QGMMA, IGMMA\n" in out
    assert "2 of 2 cases and 0 programs compiled, 1 at fault" in out
    assert compile_table.main(["double", "--every", "2"]) == 0
    assert "1 of 2 cases and 0 programs compiled, 0 at fault" in capsys.readouterr().out


def test_of_each_op_some_cases():
    ops = ["a", "a", "b", "a", "b", "a", "c"]
    assert compile_table.every_nth(ops, 1) == list(range(7))
    assert compile_table.every_nth(ops, 3) == [0, 2, 5, 6]
    assert compile_table.every_nth(ops, 3, 10) == [1, 4, 6]
    found = [place for first in range(5, 8) for place in compile_table.every_nth(ops, 3, first)]
    assert set(found) == set(range(7))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--every", "0"], "--every must be at least 1, got 0"),
        (["--programs-every", "0"], "--programs-every must be at least 1, got 0"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["decode"], "of decode nothing is compiled; name ops or `programs`"),
        (["rope", "train", "decoding"], "of train, decoding nothing is compiled; name ops or"),
    ],
)
def test_what_compiles_nothing_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        compile_table.main(arguments)
    assert said in capsys.readouterr().err


def test_an_unknown_name_and_a_missing_plugin_are_said(monkeypatch, capsys):
    monkeypatch.setattr(aot, "why_not", lambda: None)
    assert compile_table.main(["no_such_op"]) == 2
    assert "benchmarks: no case is named no_such_op; there are" in capsys.readouterr().err
    monkeypatch.setattr(aot, "why_not", lambda: "JAX's CUDA plugin is not installed")
    assert compile_table.main([]) == 2
    assert capsys.readouterr().err == "compile_table: JAX's CUDA plugin is not installed\n"


FACTS = programs.Facts(
    kept_bytes=1024,
    alias_bytes=1024,
    temporary_bytes=0,
    peak_bytes=4 * 2**20,
    kernels_a_layer=12.0,
    graphs=1,
    weight_copies=("copy.1",),
    mosaic=("rms_norm",) * 9 + ("rms_norm_backward",),
    compiled=10,
)
LIMIT = programs.Limit(kernels_a_layer=12, peak_mib=4, weight_copies=1, compiled=10)


def test_a_program_within_its_limits_is_spared():
    assert programs.faults(FACTS, LIMIT) == []
    assert FACTS.limit() == LIMIT


def test_limits_are_written_and_read(monkeypatch, tmp_path):
    assert set(programs.limits()) == set(programs.KEYS)
    monkeypatch.setattr(programs, "_LIMITS_FILE", tmp_path / "limits.json")
    programs.write_limits({("a model", "decode", "auto"): LIMIT})
    assert programs.limits() == {("a model", "decode", "auto"): LIMIT}


class Threads(concurrent.futures.ThreadPoolExecutor):
    """In the place of processes, which would not see what a test has replaced."""

    def __init__(self, jobs, mp_context):
        super().__init__(jobs)


def test_limits_are_written_of_all_programs_or_not_at_all(monkeypatch, tmp_path, capsys):
    keys = [("a model", program, "auto") for program in ("prefill", "decode", "training")]
    old = dataclasses.replace(LIMIT, peak_mib=9)
    monkeypatch.setattr(programs, "KEYS", keys)
    monkeypatch.setattr(programs, "_LIMITS_FILE", tmp_path / "limits.json")
    programs.write_limits({keys[0]: old, keys[1]: old})
    monkeypatch.setattr(aot, "why_not", lambda: None)
    for wrong, count in ((["rms_norm"], 0), (["programs", "--programs-every", "2"], 2)):
        with pytest.raises(SystemExit, match="2"):
            compile_table.main([*wrong, "--write-limits"])
        assert f"--write-limits wants all 3 programs, got {count}: " in capsys.readouterr().err
    assert programs.limits() == {keys[0]: old, keys[1]: old}

    def compiled(model, program, implementation):
        if program == "prefill":
            raise ValueError("no room")
        return FACTS

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(programs, "compile_program", compiled)
    assert compile_table.main(["programs", "--write-limits"]) == 1
    assert programs.limits() == {keys[0]: old, keys[1]: LIMIT, keys[2]: LIMIT}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"alias_bytes": 1000}, "of 1024 donated bytes 1000 are aliased"),
        ({"kernels_a_layer": 12.5}, "12.5 kernels a layer, not 12"),
        ({"compiled": 11}, "11 kernels compiled, not 10"),
        ({"peak_bytes": 5 * 2**20}, "peak of 5 MiB, not 4"),
        ({"weight_copies": ("copy.1", "copy.2")}, "copies weights: copy.1, copy.2, not 1 of them"),
    ],
)
def test_every_limit_of_a_program_can_be_broken(changes, said):
    assert programs.faults(dataclasses.replace(FACTS, **changes), LIMIT) == [said]


def test_a_fused_model_decodes_in_two_launches_a_layer():
    """Attention, and what lies between two of them; with packed weights, too. Heads that are normed
    have one more.
    """
    found = {key: limit for key, limit in programs.limits().items() if key[2] == "one launch"}
    assert {program for _, program, _ in found} == {"fused decode", "int4 decode"}
    normed = {key for key in found if key[0].startswith(("Qwen3", "Gemma-3"))}
    assert len(normed) == 2
    for key, limit in found.items():
        assert limit.kernels_a_layer <= 2 + (key in normed)
        assert limit.weight_copies == 0


def test_a_small_model_decodes_in_one_launch_for_all_layers():
    limit = programs.limits()["Qwen2.5-0.5B bfloat16", "fused decode", "all layers"]
    assert limit.kernels_a_layer == 0
    assert limit.weight_copies == 0


def test_a_launch_a_product_is_five_launches_a_layer():
    """Heads, turned and written to the cache; attention; product and sum; gate; product and sum.

    The limits hold the compiled programs to it; this holds the limits.
    """
    found = {key: limit for key, limit in programs.limits().items() if key[2] == "gemv"}
    assert {model for model, *_ in found} == {"Qwen2.5-0.5B bfloat16", "Llama-3.1-8B bfloat16"}
    for limit in found.values():
        assert limit.kernels_a_layer <= 5
        assert limit.weight_copies == 0


def test_packed_weights_by_product_are_six_launches_a_layer():
    """One more than with weights of 16 bits: a kernel of its own turns the heads."""
    found = {key[2]: limit for key, limit in programs.limits().items() if key[1] == "int4 decode"}
    assert found["packed"].kernels_a_layer <= 6
    assert {limit.weight_copies for limit in found.values()} == {0}


def test_missing_kernels_are_named():
    assert programs.missing_kernels(FACTS.mosaic, ["rms_norm"], "training") == []
    assert programs.missing_kernels(FACTS.mosaic, ["rms_norm", "glu"], "prefill") == [
        "0 launches of swiglu, not 4"
    ]
    assert programs.missing_kernels(FACTS.mosaic[:8], ["rms_norm"], "training") == [
        "8 launches of rms_norm, not 9",
        "no backward kernel of rms_norm",
    ]


@pytest.mark.parametrize(
    ("program", "launched", "said"),
    [
        ("prefill", ["flash_attention"] * 4, []),
        ("prefill", ["flash_attention"] * 8, ["8 launches of flash_attention, not 4"]),
        ("decode", ["decode_attention"] * 4, []),
        ("decode", ["decode_attention", "decode_attention_combine"] * 4, []),
        ("decode", ["decode_attention"] * 3, ["3 launches of decode_attention, not 4 to 8"]),
        ("decode", ["flash_attention"] * 4, ["0 launches of decode_attention, not 4 to 8"]),
        ("training", ["flash_attention", "flash_attention_backward"] * 4, []),
        ("training", ["flash_attention"] * 4, ["no backward kernel of flash_attention"]),
    ],
)
def test_attention_is_launched_once_a_layer(program, launched, said):
    assert programs.missing_kernels(launched, ["attention"], program) == said


@pytest.mark.aot
def test_a_copy_of_a_weight_is_seen():
    weight = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    copies = aot.compile_for(lambda w: (w.T + 0, w * 2), weight)
    assert programs.weight_copies(copies, weight)
    assert not programs.weight_copies(aot.compile_for(lambda w: w * 2, weight), weight)


def test_a_program_is_held_to_its_limits(monkeypatch):
    key = ("a model", "decode", "auto")
    row = compile_table.Row("a model decode, auto", facts=FACTS)
    monkeypatch.setattr(programs, "limits", lambda: {key: LIMIT})
    assert compile_table.hold_to_limits(key, row) == row
    tight = dataclasses.replace(LIMIT, kernels_a_layer=11.5)
    monkeypatch.setattr(programs, "limits", lambda: {key: tight})
    assert compile_table.hold_to_limits(key, row).faults == ("12 kernels a layer, not 11.5",)
    monkeypatch.setattr(programs, "limits", dict)
    assert compile_table.hold_to_limits(key, row).faults == ("has no limits: --write-limits",)
    failed = compile_table.Row("a model decode, auto", faults=("ValueError: x",))
    assert compile_table.hold_to_limits(key, failed) == failed


@pytest.mark.aot
def test_a_decode_step_within_its_limits():
    key = ("Qwen2.5-0.5B bfloat16", "decode", "auto")
    row = compile_table.hold_to_limits(key, compile_table.compile_program(*key))
    assert row.faults == ()
    assert row.facts is not None
    assert row.facts.alias_bytes == row.facts.kept_bytes == 2 * 4 * 1024 * 2 * 64 * 2 + 8
    assert row.facts.graphs == 1
