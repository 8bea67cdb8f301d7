"""What a single thread of a kernel does, told in PTX: for instructions that JAX has no name for.

Values are those of MLIR: addresses (64 bits in global memory, 32 on chip) and words (32 bits).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import ACCESS_BYTES

MOST_POLLS = 2**24  # of a thread that waits for other blocks, some ten seconds; then it gives up
MOST_EARLY = 2  # results of a thread whose operands it holds while their sums are made: registers
_PREDICATE = ".reg .pred p; setp.ne.u32 p, $2, 0;"  # p: whether the second operand is no zero
HALVES = {"bfloat16": "bf16", "float16": "f16"}
_LETTERS = {"i32": "r", "i64": "l", "f32": "f"}


def asm(text: str, results: str, *operands: Any, effects: bool = False, again: bool = False) -> Any:
    """PTX: `$0` and so on are the results, by letter (r: 32 bits, l: 64, f: float32), then the
    operands.

    One result comes alone, several as a list, none as None. What has no result has effects. again:
    operands are read when results have been written, so they share no register.
    """
    types = {"r": ir.IntegerType.get_signless(32), "f": ir.F32Type.get()}
    types["l"] = ir.IntegerType.get_signless(64)
    outs = [types[letter] for letter in results]
    kind = outs[0] if len(outs) == 1 else llvm.StructType.get_literal(outs) if outs else None
    kind = ir.Type.parse("!llvm.void") if kind is None else kind
    constraints = [f"={'&' * again}{letter}" for letter in results]
    constraints += [_LETTERS[str(x.type)] for x in operands]
    done: Any = llvm.inline_asm(
        kind, list(operands), text, ",".join(constraints), has_side_effects=effects or not outs
    )
    if not outs:
        return None
    if len(outs) == 1:
        return done
    return [llvm.extractvalue(each, done, [i]) for i, each in enumerate(outs)]


def words_of(register: Any) -> list[Any]:
    """The bits of numbers that a thread has side by side; of fewer than 32, zeros above them."""
    kind = ir.VectorType(register.type)
    bits = mgpu_utils.bitwidth(kind.element_type) * kind.shape[0]
    one = ir.IntegerType.get_signless(min(bits, 32))
    count = -(-bits // 32)
    bits_of = vector.bitcast(ir.VectorType.get((count,), one), register)
    words = [vector.extract(bits_of, [], [i]) for i in range(count)]
    i32 = ir.IntegerType.get_signless(32)
    return words if bits >= 32 else [arith.extui(i32, word) for word in words]


def register_of(words: Sequence[Any], number: Any) -> Any:
    """The other way: words as numbers of one MLIR type."""
    i32 = ir.IntegerType.get_signless(32)
    whole = vector.from_elements(ir.VectorType.get((len(words),), i32), words)
    count = 32 * len(words) // mgpu_utils.bitwidth(number)
    return vector.bitcast(ir.VectorType.get((count,), number), whole)


def array_of(registers: Sequence[Any], shape: tuple[int, ...], layout: Any) -> Any:
    """What a thread has of an array in a tiled layout, such as Layout.WGMMA, for `inline_mgpu`."""
    held = np.empty(len(registers), dtype=object)
    held[:] = registers
    return mgpu.FragmentedArray(
        _registers=held.reshape(layout.to_mgpu().registers_shape(shape)),
        _layout=layout.to_mgpu(),
        _is_signed=None,
    )


def by_thread(run: Callable[..., None], refs: Any, *numbers: Any) -> None:
    """In a kernel: run(addresses of a tree of references, *numbers as words) tells what each thread
    does.
    """
    types = jax.tree.map(lambda _: plgpu.RefType(), refs), *[plgpu.Layout.WG_SPLAT] * len(numbers)

    @plgpu.inline_mgpu(arg_types=types)
    def inline(_: Any, refs: Any, *numbers: Any) -> Any:
        run(jax.tree.map(address_of, refs), *(number.registers.item() for number in numbers))

    inline(refs, *numbers)  # pyright: ignore[reportCallIssue]


def address_of(ref: Any) -> Any:
    """Where a reference begins."""
    bits = 32 if mgpu_utils.is_smem_ref(ref) else 64
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), mgpu_utils.memref_ptr(ref))


def word(value: int) -> Any:
    """A constant; of the upper half of a word's numbers, the bits."""
    signed = value - (1 << 32) if value >> 31 == 1 else value
    return mgpu_utils.c(signed, ir.IntegerType.get_signless(32))


def further(address: Any, offset: Any) -> Any:
    """The address so many bytes on, a word."""
    if address.type == offset.type:
        return arith.addi(address, offset)
    return arith.addi(address, arith.extui(address.type, offset))


def long(value: int) -> Any:
    """A constant of 64 bits."""
    return mgpu_utils.c(value, ir.IntegerType.get_signless(64))


def times_long(value: Any, by: int) -> Any:
    """The product of a word and a number, of 64 bits."""
    return arith.muli(arith.extui(ir.IntegerType.get_signless(64), value), long(by))


def times(value: Any, by: int) -> Any:
    """The product of a word and a number, as a word."""
    return arith.muli(value, word(by))


def less(value: Any, than: Any) -> Any:
    """Whether a word is below a number or another word, neither of them negative."""
    than = word(than) if isinstance(than, int) else than
    return arith.cmpi(arith.CmpIPredicate.ult, value, than)


def equal(a: Any, b: Any) -> Any:
    """Whether two words are the same."""
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def unlike(a: Any, b: Any) -> Any:
    """Whether they are not."""
    return arith.cmpi(arith.CmpIPredicate.ne, a, b)


def without(a: Any, b: Any) -> Any:
    """Whether a is true and b is not."""
    return arith.andi(a, arith.xori(b, mgpu_utils.c(1, ir.IntegerType.get_signless(1))))


def load_word(address: Any, where: Any = None) -> Any:
    """A word of global memory that no one writes, or 0 where not; None: everywhere."""
    if where is None:
        return load(address, 0)
    text = f"{{ {_PREDICATE} mov.u32 $0, 0; @p ld.global.nc.u32 $0, [$1]; }}"
    return asm(text, "r", address, as_word(where), effects=True)


def as_word(where: Any) -> Any:
    """1 where it is so, else 0."""
    return arith.extui(ir.IntegerType.get_signless(32), where)


def load(address: Any, offset: int, words: int = 1, *, once: bool = False) -> Any:
    """A word of global memory that no one writes, or four; once: no other thread reads it."""
    cached = ".L1::no_allocate" if once else ""
    if words == 1:
        return asm(f"ld.global.nc{cached}.u32 $0, [$1 + {offset}];", "r", address, effects=True)
    text = f"ld.global.nc{cached}.v4.u32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    return asm(text, "rrrr", address, effects=True)


def load_four(address: Any, offset: int) -> list[Any]:
    """Four words of global memory that no one writes."""
    return load(address, offset, words=4)


def load_late(address: Any, offset: int, words: int = 4, where: Any = None) -> list[Any]:
    """Two or four words of global memory, or zeros where not (None: everywhere), not before a
    barrier or a store that stands before it here.

    What `load` reads, the compiler may ask for much earlier, and hold in registers until then. What
    other blocks of this launch have written can be read so, behind a load that has acquired it in
    some thread of the block and a barrier of the block: of an L1 nothing is left by then.
    """
    to = [f"${i}" for i in range(words)]
    text = f"ld.global.v{words}.u32 {{{', '.join(to)}}}, [${words} + {offset}];"
    if where is None:
        return asm(text, "r" * words, address, effects=True)
    zeros = " ".join(f"mov.u32 {each}, 0;" for each in to)
    text = f"{{ .reg .pred p; setp.ne.u32 p, ${words + 1}, 0; {zeros} @p {text} }}"
    return asm(text, "r" * words, address, as_word(where), effects=True)


def store(address: Any, offset: int, words: Sequence[Any]) -> None:
    """Four words to global memory."""
    text = f"st.global.v4.u32 [$0 + {offset}], {{$1, $2, $3, $4}};"
    asm(text, "", address, *words)


def store_once(address: Any, words: Sequence[Any]) -> None:
    """Four words to global memory, the first to leave the L2."""
    asm("st.global.cs.v4.u32 [$0], {$1, $2, $3, $4};", "", address, *words)


def all_or_nothing(wanted: Any) -> Any:
    """Bytes of an access that `copy_ahead` brings."""
    return arith.select(wanted, word(ACCESS_BYTES), word(0))


def copy_ahead(target: Any, source: Any, to: int, start: int, size: Any) -> None:
    """Asks for 16 bytes in shared memory, of which `size`, all or none, come from global memory;
    the others are zeros.
    """
    text = f"cp.async.cg.shared.global [$0 + {to}], [$1 + {start}], 16, $2;"
    asm(text, "", target, source, size, effects=True)


def load_shared(address: Any, offset: int, words: int = 1) -> Any:
    """A word of shared memory, or four."""
    if words == 1:
        return asm(f"ld.shared.u32 $0, [$1 + {offset}];", "r", address, effects=True)
    text = f"ld.shared.v4.u32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    return asm(text, "rrrr", address, effects=True)


def store_shared(address: Any, offset: int, words: Sequence[Any]) -> None:
    """Four words to shared memory."""
    text = f"st.shared.v4.u32 [$0 + {offset}], {{$1, $2, $3, $4}};"
    asm(text, "", address, *words)


def load_shared_part(address: Any, offset: int, size_bytes: int) -> Any:
    """A byte, or two, of shared memory as a word."""
    kind = {1: "u8", 2: "u16"}[size_bytes]
    text = f"{{ .reg .b16 x; ld.shared.{kind} x, [$1 + {offset}]; cvt.u32.u16 $0, x; }}"
    return asm(text, "r", address, effects=True)


def load_float(address: Any, dtype: str, where: Any = None, *, late: bool = False) -> Any:
    """A number of global memory, as float32, or 0 where not; None: everywhere.

    late: other blocks of this launch may have written it, and it is read where all see it; else no
    one writes it.
    """
    given = [address] if where is None else [address, as_word(where)]
    first, on = ("", "") if where is None else (_PREDICATE, "@p ")
    load = "ld.relaxed.gpu.global" if late else "ld.global.nc"
    if dtype == "float32":
        clear = "mov.f32 $0, 0f00000000; " * bool(on)
        return asm(f"{{ {first} {clear}{on}{load}.f32 $0, [$1]; }}", "f", *given, effects=True)
    read = f".reg .b16 x, y; {first} mov.b16 x, 0; mov.b16 y, 0; {on}{load}.b16 x, [$1];"
    wide = {"bfloat16": "mov.b32 $0, {y, x};", "float16": "cvt.f32.f16 $0, x;"}[dtype]
    return asm(f"{{ {read} {wide} }}", "f", *given, effects=True)


def store_float(address: Any, value: Any, dtype: str) -> None:
    """Writes a float32 to global memory, rounded to the dtype."""
    if dtype == "float32":
        asm("st.global.f32 [$0], $1;", "", address, value)
        return
    text = f"{{ .reg .b16 x; cvt.rn.{HALVES[dtype]}.f32 x, $1; st.global.b16 [$0], x; }}"
    asm(text, "", address, value)


def rounded(value: Any, dtype: str) -> Any:
    """A float32 as the dtype, of 16 bits, has it."""
    back = "mov.b32 $0, {y, x};" if dtype == "bfloat16" else "cvt.f32.f16 $0, x;"
    text = f"{{ .reg .b16 x, y; cvt.rn.{HALVES[dtype]}.f32 x, $1; mov.b16 y, 0; {back} }}"
    return asm(text, "f", value)


def accesses_of_thread(count: int, threads: int, thread: Any = None) -> list[tuple[Any, Any]]:
    """Of `count` accesses those of one of `threads`: which (the last where there is none), and
    whether there is one (None: there is). thread: which it is; None: of the block's.
    """
    thread = mgpu_utils.thread_idx() if thread is None else thread
    found = []
    for start in range(0, count, threads):
        place = arith.addi(thread, word(start))
        inside = less(place, count) if start + threads > count else None
        found.append((place if inside is None else arith.minui(place, word(count - 1)), inside))
    return found


def only_where(inside: Any, do: Callable[..., None], *arguments: Any) -> None:
    """do(*arguments), or nothing where not; None: everywhere."""
    if inside is None:
        do(*arguments)
        return
    with mgpu_utils.when(inside):
        do(*arguments)


def results(m: int, rows: int, threads: int) -> list[tuple[Any, Any, Any]]:
    """Of m times `rows` results those of a thread: which of m, which of `rows`, and whether there
    is one (None: there is).
    """
    return [
        (arith.divui(place, word(rows)), arith.remui(place, word(rows)), inside)
        for place, inside in accesses_of_thread(m * rows, threads)
    ]


def mma(shape_and_types: str, a: list[Any], b: list[Any], sums: list[Any]) -> list[Any]:
    """sums + a @ b of a warp: four numbers of a thread, by `mma.sync`; a is four words and b two,
    or half as many.
    """
    ends = itertools.accumulate((4, len(a), len(b), 4), initial=0)
    operands = [
        "{" + ", ".join(f"${i}" for i in range(*each)) + "}" for each in itertools.pairwise(ends)
    ]
    letter = _LETTERS[str(sums[0].type)]
    text = f"mma.sync.aligned.{shape_and_types} {', '.join(operands)};"
    return asm(text, letter * 4, *a, *b, *sums)


def gated(epilogue: str, gate: Any, up: Any) -> Any:
    """silu(gate) up of "swiglu", gelu(gate) up of "geglu" as in matmul_finish.py, max(gate, 0)^2 up
    of "relu2_glu"; float32.
    """
    text = {
        "swiglu": """{ .reg .f32 x; mul.f32 x, $1, 0fBFB8AA3B; ex2.approx.f32 x, x;
            add.f32 x, x, 0f3F800000; div.approx.f32 x, $1, x; mul.f32 $0, x, $2; }""",
        # gate / (1 + 2^(gate (c + d gate^2)))
        "geglu": """{ .reg .f32 x; mul.f32 x, $1, $1; fma.rn.f32 x, x, 0fBDD2D3E8, 0fC0135761;
            mul.f32 x, x, $1; ex2.approx.f32 x, x; add.f32 x, x, 0f3F800000;
            div.approx.f32 x, $1, x; mul.f32 $0, x, $2; }""",
        "relu2_glu": """{ .reg .f32 x; max.f32 x, $1, 0f00000000; mul.f32 x, x, x;
            mul.f32 $0, x, $2; }""",
    }[epilogue]
    return asm(text, "f", gate, up)
