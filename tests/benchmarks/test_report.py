"""The report: figures of a row, the tables of all runs, the plot."""

import importlib.util
import json
import re
from typing import Any

import pytest

from benchmarks import lacking, repeats, report

CEILINGS = {"copy": 4e12, "read": 4.5e12, "matmul": 8e14}


def timing(us, **values):
    return {"us": us, "spread_us": 0.1, "wall_us": us, "clock": "cupti", "calls": 20, **values}


def row(**changes):
    return {
        **{"op": "rms_norm", "label": "8192 x 8192 bfloat16", "kind": "memory-reduce"},
        **{"bytes": 268_451_840, "operations": 0, "correct": {"status": "right"}},
        "times": {
            "ours": timing(70.0),
            "xla": timing(90.0),
            "liger": timing(84.0),
            "tokamax": {"failed": "RuntimeError: RuntimeError: NotImplementedError: no soft cap"},
        },
        **changes,
    }


def results(**changes):
    matmul = {"kind": "matmul", "operations": 2 * 4096**3, "bytes": 10**8, "op": "matmul"}
    fusion = {how: timing(9.0, kernels=["k"], bytes=1e6) for how in ("separate", "xla", "ours")}
    return {
        **{"gpu": {"name": "NVIDIA H200", "driver": "580.1"}, "date": "2026-11-20T15:00:00+00:00"},
        **{"versions": {"jax": "0.11.2"}, "libraries": {"torch": {"absent": "not installed"}}},
        "ceilings": CEILINGS,
        "rows": [
            row(),
            row(label="4096^3", **matmul, times={"ours": timing(200.0), "xla": timing(190.0)}),
            row(label="a|b", times={"ours": {"failed": "RuntimeError: x"}, "xla": timing(80.0)}),
            row(label="late", correct={"not_run": "late"}, times={"ours": {"not_run": "late"}}),
        ],
        "sections": {
            "softmax-fusion/32 x 512": {"model_bytes": 65536, **fusion},
            "softmax-fusion/64 x 131072": {"failed": "ValueError: y"},
            "unfused-attention/bfloat16": {
                "shape": [1, 2048, 32, 128],
                "times": {"ours": timing(7.0, kernels=["a", "b", "c"])},
            },
            "unfused-attention/float32": {"failed": "ValueError: w"},
            "layer/512 tokens": {
                "op by op, attention on the host": {"us": 9000.0},
                "jitted": {"us": 90.0},
            },
            "prefill/pallas": {
                **{"layers": 32, "tokens": 8192, "wall_us": 2e5, "attention_us": 3e4},
                **{"share": 0.15, "tokens_per_s": 40960.0},
            },
            "prefill/cudnn": {"failed": "ValueError: p"},
            "long-context/pallas": {
                "shape": [1, 65536, 32, 8, 128],
                **dict.fromkeys(
                    ("forward", "forward and backward"),
                    timing(
                        *(5e4,),
                        **{"operations": 35 * 10**12, "finite": True, "argument_bytes": 10**9},
                        **{"output_bytes": 2 * 10**9, "temporary_bytes": 3 * 10**9},
                    ),
                ),
            },
            "long-context/cudnn": {"failed": "ValueError: q"},
            "decode/xla": {"tokens_per_s": 2000.0, "bytes_a_token": 10**9},
            "decode/pallas": {"failed": "NotImplementedError: z"},
        },
        **changes,
    }


def test_figures():
    found = report.figures(row(), CEILINGS)
    assert found["percent"] == pytest.approx(100 * 268_451_840 / 70e-6 / 4e12)
    assert (found["best"], found["best_us"], found["xla_us"]) == ("liger", 84.0, 90.0)
    assert found["ratio"] == pytest.approx(1.2)
    matmul = report.figures(results()["rows"][1], CEILINGS)
    assert matmul["percent"] == pytest.approx(100 * 2 * 4096**3 / 200e-6 / 8e14)
    assert matmul["ratio"] == pytest.approx(0.95)
    tried = row()
    tried["times"]["ours, in another way"] = timing(60.0)
    assert report.figures(tried, CEILINGS)["best"] == "liger"
    decode = {**results()["rows"][1], "ceiling": "read"}
    assert report.figures(decode, CEILINGS)["percent"] == pytest.approx(100 * 5e11 / 4.5e12)


def test_no_figure_without_its_parts():
    found = report.figures(row(times={"ours": {"failed": "x"}, "xla": timing(9.0)}), CEILINGS)
    assert (found["us"], found["percent"], found["ratio"]) == (None, None, None)
    found = report.figures(row(times={"ours": timing(9.0)}), None)
    assert (found["us"], found["percent"], found["ratio"]) == (9.0, None, None)


@pytest.mark.parametrize(
    ("dtype", "kernel", "said"),
    [
        ("bfloat16", "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n", " (TF32)"),
        ("float8_e4m3fn", "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n", " (float32)"),
        ("float32", "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n", ""),
        ("bfloat16", "nvjet_tst_128x256_64x4", ""),
    ],
)
def test_what_multiplies_in_wider_numbers_is_no_rival(dtype, kernel, said):
    times = {"ours": timing(50.0), "xla": timing(80.0, kernels=["wrapped_convert", kernel])}
    call = row(label=f"4096 x 4096 {dtype}, backward", times=times)
    found = report.figures(call, CEILINGS)
    assert (found["best"], found["ratio"]) == ((None, None) if said else ("xla", 1.6))
    text = "\n".join(report.lines(results(rows=[call])))
    assert (f"| 80.0{said} |  |  |" if said else "| 80.0 | xla 80.0 | 1.60 |") in text
    call["times"]["torch"] = timing(90.0)
    assert report.figures(call, CEILINGS)["best"] == ("torch" if said else "xla")


@pytest.mark.parametrize(("dtype", "best"), [("bfloat16", None), ("float32", "xla"), (None, "xla")])
def test_a_dtype_that_the_label_leaves_out_is_the_rows(dtype, best):
    kernels = ["sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n"]
    times = {"ours": timing(50.0), "xla": timing(80.0, kernels=kernels)}
    call = row(label="1 x 4096 x 4096 int4", times=times)
    if dtype is not None:  # older files have none
        call["dtype"] = dtype
    assert report.figures(call, CEILINGS)["best"] == best


@pytest.mark.parametrize(
    ("us", "wall_us", "clock", "expected"),
    [
        (2000.0, 2200.0, "cupti", 2000.0),
        (2000.0, 3000.0, "cupti", 3000.0),  # a copy that CUPTI does not see
        (200.0, 300.0, "cupti", 200.0),  # the host is slower than so small a kernel
        (2000.0, 3000.0, "cuda events (profiler: x)", 2000.0),
    ],
)
def test_what_counts_as_the_time(us, wall_us, clock, expected):
    assert report.time_us(timing(us, wall_us=wall_us, clock=clock)) == expected
    assert report.time_us({"failed": "x"}) is None


def test_the_tables():
    text = "\n".join(report.lines(results()))
    assert text.startswith("NVIDIA H200, 2026-11-20T15:00:00+00:00.\nDriver 580.1, jax 0.11.2.\n")
    assert "copy 4.00 TB/s, read 4.50 TB/s, bf16 matmul 800 TFLOP/s" in text
    first = "| rms_norm: 8192 x 8192 bfloat16 | right | 268 |  | 70.0 | 3835 |  |"
    assert f"{first} 96 % | 90.0 | liger 84.0 | 1.20 |" in text
    assert "| matmul: 4096^3 | right | 100 | 137.4 | 200.0 | 500 | 687 | 86 % | 190.0 |" in text
    assert "| rms_norm: a/b | right | 268 |  | failed: RuntimeError: x |  |  |  | 80.0 |" in text
    assert "| rms_norm: late | not run: late | 268 |  | not run: late |" in text
    assert "| 32 x 512 | separate | 1 | 1 | 9.0 | 0 % |" in text
    assert "| 64 x 131072 | failed: ValueError: y |" in text
    assert "the host 9000 us, jitted 90 us (100 times faster)" in text
    assert "| 1 x 2048 x 32 x 128 bfloat16 | ours | 3 | 7.0 |" in text
    assert "| float32 | failed: ValueError: w | | |" in text
    assert "| xla | 2000 | 50 % |" in text
    assert "| pallas | cannot: z | | |" in text
    assert "| pallas | 32 | 8192 | 200.0 | 30.00 ms, 15.0 % | 40960 |" in text
    assert "| cudnn | failed: ValueError: p | | | | |" in text
    long = "| pallas | 1 x 65536, 32 / 8 x 128 | forward | 50.00 | 700 | 1000, 2000, 3000 | yes |"
    assert long in text
    assert "| cudnn | failed: ValueError: q | | | | | |" in text
    assert "Rivals without a time:\n\n* tokamax, 1 case: cannot: no soft cap\n" in text
    assert "Absent: torch (not installed)." in text
    for line in text.splitlines():
        if line.startswith("| rms_norm") or line.startswith("| case"):
            assert line.count("|") == 12, line


@pytest.mark.parametrize("ceilings", [None, lacking.SPENT, {"failed": "RuntimeError: full"}])
def test_tables_without_ceilings(ceilings):
    text = "\n".join(report.lines(results(ceilings=ceilings)))
    assert "| 32 x 512 | separate | 1 | 1 | 9.0 |  |" in text
    assert "| xla | 2000 |  |" in text


def test_what_is_drawn():
    """Of each op and direction the call of most work; of a call that two runs have, the newer."""

    def run(date: str, gpu: str, *calls: tuple[str, str, int, bool]) -> dict[str, Any]:
        rows = []
        for op, label, size, timed in calls:
            times = {"ours": timing(1.0) if timed else {"failed": "x"}}
            size_bytes = size * report.LEAST_DRAWN_BYTES
            work = {"bytes": size_bytes, "operations": 10 * size if op == "matmul" else 0}
            rows.append({"op": op, "label": label, "times": times, **work})
        return {"date": date, "gpu": {"name": gpu}, "rows": rows}

    old = run(
        "2026-01-01",
        "one",
        *[("a", "small", 1, True), ("a", "large", 9, True), ("a", "large, backward", 5, True)],
    )
    new = run("2026-01-02", "one", ("a", "large", 9, True), ("a", "largest", 10, False))
    other = run("2026-01-03", "two", ("matmul", "small", 1, True), ("matmul", "large", 2, True))
    other["rows"] += run("", "", ("b", "of a launch's time", 0, True))["rows"]
    drawn = [
        (row["op"], row["label"], at["date"]) for row, at in report._largest([new, other, old])
    ]
    assert drawn == [
        ("a", "large", "2026-01-02"),
        ("a", "large, backward", "2026-01-01"),
        ("matmul", "large", "2026-01-03"),
    ]


def test_the_command_writes_tables_and_plot(tmp_path, capsys):
    tables, plot, file = (tmp_path / name for name in ("README.md", "x.png", "h200.json"))
    file.write_text(json.dumps(results()))
    tables.write_text("obsolete")
    arguments = [str(file), "--tables", str(tables), "--plot", str(plot)]
    assert report.main(arguments) == 0
    once = tables.read_text()
    assert once.startswith(report.HEAD)
    assert "obsolete" not in once
    assert "* [h200.json](#h200json): rms_norm, matmul, softmax-fusion, " in once
    assert "\n## h200.json\n\nNVIDIA H200, 2026-11-20T15:00:00+00:00.\n" in once
    assert "| rms_norm: 8192 x 8192" in once
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert report.main(arguments) == 0
    assert tables.read_text() == once
    assert "1 runs" in capsys.readouterr().out


def test_a_plot_without_matplotlib(tmp_path, monkeypatch, capsys):
    tables, plot, file = (tmp_path / name for name in ("README.md", "x.png", "h200.json"))
    file.write_text(json.dumps(results()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report.main([str(file), "--tables", str(tables), "--plot", str(plot)]) == 2
    assert capsys.readouterr().err == (
        "report: matplotlib, which draws the plot, is not installed: pip install matplotlib, or "
        "name --tables alone\n"
    )
    assert not tables.exists()
    assert report.main([str(file), "--tables", str(tables)]) == 0


def test_the_plot_has_a_part_a_gpu():
    runs = [results(), results(gpu={"name": "NVIDIA H100"})]
    figure = report.plot(runs)
    assert figure is not None
    [axis] = figure.axes
    calls = [f"{row['op']}: {row['label']}" for row, _ in report._largest(runs[:1])]
    labels = axis.get_yticklabels()
    assert [x.get_text() for x in labels] == ["NVIDIA H100", *calls, "NVIDIA H200", *calls]
    bold = [x.get_text() for x in labels if x.get_fontweight() == "bold"]
    assert bold == ["NVIDIA H100", "NVIDIA H200"]
    last, first = axis.get_ylim()  # all of them between
    assert first < axis.get_yticks()[0] < axis.get_yticks()[-1] < last
    bars = [bar.get_y() + bar.get_height() / 2 for bar in axis.patches]
    places = {round(at) for at in bars}
    assert places == {i for i, x in enumerate(labels) if x.get_text() in calls}


def test_what_cannot_be_reported(tmp_path, capsys):
    tables, plot, file = (tmp_path / name for name in ("README.md", "x.png", "cpu.json"))
    arguments = [str(file), "--tables", str(tables), "--plot", str(plot)]
    no_row = json.dumps(results(rows=[{}]))
    for text, sentence in (
        *((None, "No such file"), ("{", "Expecting"), ("[]", "is no file that")),
        *(
            ('{"date": "x", "rows": [{}], "sections": {}}', "no file that"),
            (no_row, "no file that"),
            (json.dumps(results(rows=None)), "no file that"),
            (json.dumps(results(rows=[1])), "no file that"),
            (json.dumps(results(gpu=None)), "no file that"),
            (json.dumps(results(sections={"decode/xla": None})), "no file that"),
        ),
    ):
        if text is not None:
            file.write_text(text)
        assert report.main(arguments) == 2
        assert sentence in capsys.readouterr().err
    assert not tables.exists()
    file.write_text(json.dumps(results()))
    nowhere = tmp_path / "none" / "x"
    for name in ("--tables", "--plot"):
        assert report.main([str(file), name, f"{nowhere}.png"]) == 2
        said = f"report: {nowhere}.png cannot be written: No such file or directory\n"
        assert capsys.readouterr().err == said


def test_what_has_nothing_to_plot_has_tables(tmp_path, capsys):
    tables, plot, file = (tmp_path / name for name in ("README.md", "x.png", "cpu.json"))
    file.write_text(json.dumps(results(rows=[])))
    assert report.main([str(file), "--tables", str(tables), "--plot", str(plot)]) == 0
    said = capsys.readouterr()
    assert said.err == "report: no file has rows and ceilings to plot\n"
    assert said.out == f"{tables}: 1 runs\n"
    assert "| 32 x 512 | separate | 1 | 1 | 9.0 | 0 % |" in tables.read_text()
    assert not plot.exists()


def test_the_tables_of_the_project_are_of_all_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps(results()))
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path / "one.json")])
    assert "name --tables or --plot for those of other files" in capsys.readouterr().err
    assert report.main([str(tmp_path / f"{name}.json") for name in ("one", "two")]) == 0
    assert {"README.md", "results.png"} < {path.name for path in tmp_path.iterdir()}


def test_the_tables_of_the_project_are_of_the_committed_results():
    runs = [report.read(path) for path in sorted(report.RESULTS.glob("*.json"))]
    assert (report.RESULTS / "README.md").read_text() == report.document(runs)


def timed(file, *names, gpu="one", label="a", **changes):
    """A run of the day that its file is named by, with one row."""
    times = {name: timing(9.0) for name in names} or {"ours": {"failed": "x"}}
    found = results(file=f"{file}.json", date=f"2026-01-{file}", gpu={"name": gpu}, sections={})
    return {**found, "rows": [row(label=label, times=times)], **changes}


@pytest.mark.parametrize(
    ("older", "newer", "stand"),
    [
        (timed("01", "ours", "xla"), timed("02", "ours", "xla", "torch"), ["02"]),
        (timed("01"), timed("02", "ours"), ["02"]),
        (timed("01", "ours", "xla"), timed("02", "ours", "torch"), ["02", "01"]),
        (timed("01", "ours"), timed("02", "xla"), ["02", "01"]),
        (timed("01", "ours"), timed("02"), ["02", "01"]),
        (timed("01", "xla"), timed("02", "xla"), ["02", "01"]),
        (timed("01", "ours"), timed("02", "ours", gpu="two"), ["02", "01"]),
        (timed("01", "ours"), timed("02", "ours", label="b"), ["02", "01"]),
    ],
)
def test_a_case_stands_in_the_newest_run_that_has_all_of_it(older, newer, stand):
    for runs in ([older, newer], [newer, older]):
        kept = repeats.newest_first(runs)
        assert [run["file"] for run in kept] == ["02.json", "01.json"]
        assert [run["date"][-2:] for run in kept if run["rows"]] == stand
        assert [run["newer"] for run in kept] == [0, 2 - len(stand)]


def test_a_run_says_what_stands_in_a_newer_one():
    more = row(label="more", times={"ours": timing(1.0)})
    part = timed("02", "ours", rows=[*timed("02", "ours")["rows"], more])
    only_sections = timed("03", "ours", sections={"layer/x": {}, "decode/xla": lacking.SPENT})
    decode = {"decode/xla": {"tokens_per_s": 2000.0, "bytes_a_token": 10**9}}
    newest = timed("04", "ours", "xla", sections=decode)
    text = report.document([timed("01", "ours"), part, only_sections, newest])
    found = re.findall(r"^(?:##|\* superseded:|Rows that).*", text, re.M)
    assert found == [
        "## 04.json",
        *("## 03.json", "Rows that stand in a newer run: 1 of 1."),
        *("## 02.json", "Rows that stand in a newer run: 1 of 2."),
        "* superseded: 01.json",
    ]
    assert "* [04.json](#04json): rms_norm, decode\n* [03.json](#03json): layer\n" in text
    assert "[01.json]" not in text
    assert text.count("| rms_norm: a |") == text.count("| rms_norm: more |") == 1


def test_a_section_stands_in_the_newest_run_that_has_all_of_it():
    def run(day, gpu="one", **sections):
        found = {key.replace("_", "/"): x for key, x in sections.items()}
        return timed(day, gpu=gpu, rows=[], sections=found)

    def standing(*runs):
        kept = repeats.newest_first(runs)
        assert all(set(r["newer_sections"]) & set(lacking.names_of(r)) == set() for r in kept)
        return [(r["file"][:2], list(r["sections"])) for r in kept if r["sections"]]

    old = run("01", decode_xla={"us": 1.0}, decode_auto={"us": 1.0}, layer_x={"us": 2.0})
    new = run("02", decode_xla={"us": 1.0}, decode_auto={"us": 1.0}, decode_more={"us": 3.0})
    assert standing(old, new) == [("02", list(new["sections"])), ("01", ["layer/x"])]
    for part in (
        run("02", decode_xla={"us": 1.0}),  # lacks one
        run("02", decode_xla={"us": 1.0}, decode_auto={"failed": "x"}),
        run("02", "two", decode_xla={"us": 1.0}, decode_auto={"us": 1.0}),
    ):
        assert len(dict(standing(old, part))["01"]) == 3
    failed = run("01", decode_xla={"failed": "x"})
    assert standing(failed, new) == [("02", list(new["sections"]))]
    assert len(standing(failed, run("02", decode_xla={"failed": "y"}))) == 2
    eight, whole = run("01", prefill_p={"layers": 8}), run("02", prefill_p={"layers": 32})
    assert len(standing(eight, whole)) == 2
    text = report.document([old, new])
    assert "\nSections that stand in a newer run: decode.\n" in text


def test_what_one_run_had_no_time_for_is_in_the_tables_of_another():
    late = row(label="late", times={"ours": timing(9.0), "torch": lacking.SPENT})
    first = results(rows=[row(), late], sections={"decode/xla": lacking.SPENT, "layer/x": {}})
    second = results(rows=[row(label="late")], sections={"decode/xla": {"tokens_per_s": 1.0}})
    one, two = repeats.without_repeats([first, second])
    assert [r["label"] for r in one["rows"]] == [row()["label"]]
    assert one["sections"] == {"layer/x": {}}
    assert two == second
    alone = repeats.without_repeats([first])
    assert alone == [first]  # nobody has it
    older = {**second, "date": "2000-01-01T00:00:00+00:00"}
    assert repeats.without_repeats([first, older]) == [first, older]  # of other code, perhaps
    elsewhere = {**second, "gpu": {"name": "two"}}
    assert repeats.without_repeats([first, elsewhere]) == [first, elsewhere]
    spent = row(label="spent", correct=lacking.SPENT, times={"ours": lacking.NO_RESULT})
    text = "\n".join(report.lines(results(rows=[row(), spent])))
    assert "1 more had no time in this run." in text
    assert "spent |" not in text
    nothing = "\n".join(report.lines(results(rows=[spent], sections={})))
    assert "1 of its cases had no time in this run." in nothing
    assert "| case |" not in nothing


def test_a_run_that_was_ended_says_so():
    ended = results(rows=[], spent_s={"jax": 9.0})
    ended.pop("seconds", None)
    assert "The run was ended before its end." in report.lines(ended)
    assert "The run was ended before its end." not in report.lines({**ended, "seconds": 10.0})


def test_an_int8_cache_stands_beside_the_bfloat16_one():
    label = "1 x 32768 keys, 32 / 8 heads of 128"
    rows = [
        row(op="decode_attention", label=f"{label}, {kind} cache", times={"ours": timing(us)})
        for kind, us in (("bfloat16", 36.0), ("int8", 20.0))
    ]
    text = "\n".join(report.lines(results(rows=rows, spent_s={"jax": 9.0}, seconds=10.0)))
    assert f"Times as fast over an int8 cache as over a bfloat16 one: 1.80 at {label}." in text
    assert "Of 10 s, those of each process and of JAX's phases: jax 9." in text
