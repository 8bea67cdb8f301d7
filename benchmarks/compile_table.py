"""Every case and some whole programs, compiled for an H200 that need not be here.

    python -m benchmarks.compile_table [NAME ...] [--write-limits]

(`make gpu-compile` brings along what it needs.) It prints what each kernel became (registers,
shared memory, instructions) and fails on what is wrong without a doubt: spilled registers, wgmma
that the assembler serialised, a product without tensor cores, a kernel that lives by its memory
accesses and does not make them 16 bytes wide, a reduction of rows through shared memory alone.
NAMEs choose cases by op (`attention` all of its ops), and `programs` the whole ones; all if none. A
program may cost no more than program_limits.json says: a change that makes one dearer on purpose
writes it anew, of all programs; one that does not compile keeps its limits.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks import programs
from benchmarks.cases import all_cases
from benchmarks.sections import SECTIONS, expand
from jaxllm import aot

# C7504: setmaxnreg is ignored; C7511 and C7512: wgmma is serialised, for want of registers or for
# what stands between its parts
BAD_NOTES = ("C7504", "C7511", "C7512")
TENSOR_CORES = ("HGMMA", "QGMMA", "IGMMA")
WARP_PRODUCTS = ("HMMA", "IMMA")  # theirs too, of a warp alone: enough where reading is the time
# 16 bytes a thread, or the copy engine, which moves whole tiles
# (LD and ST are those of a pointer that does not say which memory it points into)
WIDE_READS = (("LDG", "128"), ("LD", "128"), ("LDGSTS", "128"), ("UTMALDG",), ("UBLKCP",))
WIDE_WRITES = (("STG", "128"), ("ST", "128"), ("UTMASTG",), ("UTMAREDG",), ("UBLKCP",))
# SHFL.IDX only hands a value on, such as the number of the warp
SHUFFLES = (("SHFL", "BFLY"), ("SHFL", "DOWN"), ("SHFL", "UP"), ("REDUX",))


def faults(kind: str, kernels: Sequence[aot.Kernel], spilled_bytes: int = 0) -> list[str]:
    """What is wrong with the kernels of one case, a phrase each; the rest as in `Case`."""
    if not kernels:
        return ["no kernel of ours runs"]
    found = []
    for kernel in kernels:
        spilled = kernel.spill_store_bytes + kernel.spill_load_bytes
        if spilled > spilled_bytes:
            found.append(f"{kernel.name} spills ({spilled} bytes stored and loaded)")
        found += [f"{kernel.name}: {n}" for n in kernel.notes if n.startswith(BAD_NOTES)]
        if kind.startswith("memory") and not _count(kernel, WIDE_READS):
            found.append(f"{kernel.name} reads nothing by 16 bytes or by the copy engine")
    # One kernel of several may have no more to write than a sum for the next
    writes = kind in ("memory", "memory-reduce")
    if writes and not any(_count(k, WIDE_WRITES) for k in kernels):
        names = ", ".join(k.name for k in kernels)
        found.append(f"{names} writes nothing by 16 bytes or by the copy engine")
    if kind == "memory-reduce" and not any(_count(k, SHUFFLES) for k in kernels):
        found.append("rows are reduced without shuffles")
    tensor_cores = any(k.count(name) for k in kernels for name in TENSOR_CORES)
    if kind == "matmul" and not tensor_cores:
        found.append("no tensor cores: none of HGMMA, QGMMA, IGMMA")
    tensor_cores |= any(k.count(name) for k in kernels for name in WARP_PRODUCTS)
    if kind == "memory-read" and not (tensor_cores or any(_count(k, SHUFFLES) for k in kernels)):
        found.append("sums are made without shuffles or tensor cores")
    return found


def _count(kernel: aot.Kernel, instructions: Iterable[tuple[str, ...]]) -> int:
    return sum(kernel.count(*instruction) for instruction in instructions)


@dataclasses.dataclass(frozen=True)
class Row:
    """One case or whole program, compiled: what came of it, and what is wrong with it."""

    name: str
    kernels: tuple[aot.Kernel, ...] = ()
    facts: programs.Facts | None = None
    faults: tuple[str, ...] = ()


def every_nth(ops: Sequence[str], n: int, first: int = 0) -> list[int]:
    """Places of each n-th case of every op, of one at least; `first` says which, modulo n."""
    sizes = collections.Counter(ops)
    counts: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    return [
        place
        for place, op in enumerate(ops)
        if next(counts[op]) % n == first % n % min(n, sizes[op])
    ]


def compile_case(names: tuple[str, ...], index: int) -> Row:
    """The case with this place in `all_cases(names)`: a case itself goes to no other process."""
    case = all_cases(names)[index]
    try:
        program = aot.compile_for(case.run, *case.arguments)
    except Exception as error:  # becomes a row, and the command fails
        return Row(case.name, faults=(_sentence(error),))
    kernels = []
    for kernel in program.kernels:
        if kernel not in kernels:  # one that is launched from two places is there twice
            kernels.append(kernel)
    return Row(
        case.name, tuple(kernels), faults=tuple(faults(case.kind, kernels, case.spilled_bytes))
    )


def compile_program(model: str, program: str, implementation: str) -> Row:
    """One of `programs.KEYS`."""
    name = f"{model} {program}, {implementation}"
    try:
        facts = programs.compile_program(model, program, implementation)
    except Exception as error:
        return Row(name, faults=(_sentence(error),))
    found = []
    ours = programs.CHOSEN.get(implementation, ())
    found += programs.missing_kernels(facts.mosaic, ours, program)
    return Row(name, facts=facts, faults=tuple(found))


def hold_to_limits(key: tuple[str, str, str], row: Row) -> Row:
    """The row, with what has got dearer than its limits among the faults."""
    if row.facts is None:
        return row
    limit = programs.limits().get(key)
    found = programs.faults(row.facts, limit) if limit else ["has no limits: --write-limits"]
    return dataclasses.replace(row, faults=(*row.faults, *found))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def case_table(rows: Iterable[Row]) -> Table:
    """Registers, shared memory and instruction counts of each kernel of each case."""
    table = Table(title="Kernels, compiled for an H200")
    for column in ("case", "kernel"):
        table.add_column(column, overflow="fold")
    for column in (
        "registers,spilled bytes,shared KiB,tensor core,TMA in/out,16 B in/out,"
        "other in/out,shuffles,verdict"
    ).split(","):
        table.add_column(column, justify="right" if column != "verdict" else "left")
    for row in rows:
        verdict = "[red]" + "; ".join(row.faults) + "[/red]" if row.faults else "ok"
        if not row.kernels:
            table.add_row(row.name, *[""] * 9, verdict)
        for i, k in enumerate(row.kernels):
            reads, writes = (
                [k.count(name, *width) + k.count(f"{name}G", *width) for width in ((), ("128",))]
                for name in ("LD", "ST")
            )
            copied = k.count("LDGSTS", "128")
            table.add_row(
                row.name if i == 0 else "",
                k.name,
                str(k.registers),
                str(k.spill_store_bytes + k.spill_load_bytes),
                f"{(k.static_shared_bytes + (k.dynamic_shared_bytes or 0)) / 1024:.1f}",
                str(sum(k.count(op) for op in TENSOR_CORES + WARP_PRODUCTS)),
                f"{k.count('UTMALDG')}/{k.count('UTMASTG') + k.count('UTMAREDG')}",
                f"{reads[1] + copied}/{writes[1]}",
                f"{reads[0] - reads[1]}/{writes[0] - writes[1]}",
                str(_count(k, SHUFFLES)),
                verdict if i == 0 else "",
            )
    return table


def program_table(rows: Iterable[Row]) -> Table:
    """Bytes and launches of each whole program."""
    table = Table(title="Whole programs of four layers, compiled for an H200")
    table.add_column("program", overflow="fold")
    for column in (
        "donated MiB,aliased MiB,temporary MiB,peak MiB,kernels a layer,graphs,weight copies"
    ).split(","):
        table.add_column(column, justify="right")
    table.add_column("our kernels", overflow="fold")
    table.add_column("verdict")
    for row in rows:
        cells = [""] * 8
        if (facts := row.facts) is not None:
            bytes_ = facts.kept_bytes, facts.alias_bytes, facts.temporary_bytes, facts.peak_bytes
            ours = {name: facts.mosaic.count(name) for name in facts.mosaic}
            cells = [
                *(f"{n / 2**20:.1f}" for n in bytes_),
                f"{facts.kernels_a_layer:g}",
                str(facts.graphs),
                str(len(facts.weight_copies)),
                ", ".join(f"{number} {name}" for name, number in ours.items())
                + (f" ({facts.compiled} compiled)" if ours else ""),
            ]
        verdict = "[red]" + "; ".join(row.faults) + "[/red]" if row.faults else "ok"
        table.add_row(row.name, *cells, verdict)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if anything is wrong, 2 if it cannot compile what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_table")
    parser.add_argument("names", nargs="*", metavar="NAME", help="ops, or `programs`; all if none")
    parser.add_argument(
        "--write-limits", action="store_true", help="make what the programs cost their limits"
    )
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes")
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="of each op's cases one in N",
    )
    parser.add_argument(
        "--programs-every", type=int, default=1, metavar="N", help="of the programs one in N"
    )
    parser.add_argument("--first", type=int, default=0, metavar="K", help="which of these N")
    options = parser.parse_args(arguments)
    for name in ("every", "programs_every", "jobs"):
        if (count := getattr(options, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {count}")
    if parts := [name for name in options.names if set(expand([name])) <= set(SECTIONS)]:
        parser.error(f"of {', '.join(parts)} nothing is compiled; name ops or `programs`")
    names = expand(options.names)
    names = tuple(name for name in names if name not in ("programs", *SECTIONS))
    keys = programs.KEYS if not options.names or "programs" in options.names else ()
    of_programs = every_nth(["programs"] * len(keys), options.programs_every, options.first)
    keys = [keys[place] for place in of_programs]
    if options.write_limits and len(keys) < len(programs.KEYS):
        parser.error(
            f"--write-limits wants all {len(programs.KEYS)} programs, got {len(keys)}: name "
            "`programs` or nothing, without --programs-every"
        )
    if (reason := aot.why_not()) is not None:
        print(f"compile_table: {reason}", file=sys.stderr)
        return 2
    try:
        chosen = all_cases(names) if names or not options.names else []
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # Mosaic's lowering is Python and holds its lock: threads would not help
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        whole = [pool.submit(compile_program, *key) for key in keys]
        places = every_nth([case.op for case in chosen], options.every, options.first)
        single = [pool.submit(compile_case, names, place) for place in places]
        for number, future in enumerate(concurrent.futures.as_completed([*whole, *single]), 1):
            row = future.result()
            verdict = "; ".join(row.faults) or "ok"
            print(f"{number}/{len(whole) + len(single)} {row.name}: {verdict}", file=sys.stderr)
        case_rows, program_rows = ([future.result() for future in part] for part in (single, whole))
    if options.write_limits:
        found = programs.limits()  # what a program that failed keeps
        for key, row in zip(keys, program_rows, strict=True):
            if row.facts is not None:
                found[key] = row.facts.limit()
        programs.write_limits({key: found[key] for key in keys if key in found})
    program_rows = [hold_to_limits(key, row) for key, row in zip(keys, program_rows, strict=True)]
    console = Console(width=None if sys.stdout.isatty() else 200)
    if case_rows:
        console.print(case_table(case_rows))
    if program_rows:
        console.print(program_table(program_rows))
    wrong = [row for row in (*case_rows, *program_rows) if row.faults]
    for row in wrong:
        console.print(f"{row.name}: {'; '.join(row.faults)}", markup=False, soft_wrap=True)
    console.print(
        f"{len(case_rows)} of {len(chosen)} cases and {len(program_rows)} programs compiled, "
        f"{len(wrong)} at fault"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
