"""A machine that runs what lanes are told in PTX, all threads of a block in step, on the CPU.

Pallas's interpreter knows no lanes: there a kernel whose blocks are told in PTX is plain JAX. Here
the code of a block itself runs, on NumPy arrays of one number a thread, so that its addresses,
masks, shuffles and products of warps are seen. What it does not see: races, and what a barrier or a
copy's arrival is needed for, since every thread waits after each instruction. Memory that nothing
was written to is NaN; an access outside of an array is an error, and so is a barrier or a shuffle
that some threads come to and others do not.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

LANES = 32
REMOTE = 2**24  # bytes from an address on chip to the same of the cluster's next block
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
BITS = {"i1": 1, "i16": 16, "i32": 32, "i64": 64, "f32": 32}
PAIRS = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}
HALVES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


class Value:
    """What every thread has under one name: bits, as unsigned numbers, and MLIR's type."""

    def __init__(self, bits: np.ndarray, type_: str):
        self.bits = bits.astype(np.uint64) & np.uint64(2 ** BITS[type_] - 1)
        self.type = type_


def f32(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def of_f32(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32).view(np.uint32).astype(np.uint64)


def pair(bits: np.ndarray, dtype: Any) -> np.ndarray:
    """The two numbers of a word, lower first, [threads, 2] in float64."""
    return bits.astype(np.uint32).view(np.uint16).view(dtype).reshape(-1, 2).astype(np.float64)


def of_pair(numbers: np.ndarray, dtype: Any) -> np.ndarray:
    rounded = np.ascontiguousarray(numbers.astype(np.float32).astype(dtype))
    return rounded.view(np.uint16).view(np.uint32).reshape(-1).astype(np.uint64)


class Machine:
    """Memory, and the threads of one block after another."""

    def __init__(self, arrays: Mapping[str, np.ndarray], shared: Mapping[str, int], threads: int):
        """arrays: of global memory, by name. shared: bytes on chip, by name."""
        self.threads, self.mask = threads, np.ones(threads, bool)
        self.memory: dict[str, Any] = {"global": {}, "shared": {}}
        self.at: dict[str, Value] = {}
        self.sent: list[tuple[int, int, np.ndarray]] = []  # to which block, to where, and what
        start = 2**33  # an address of 32 bits is a mistake
        for name, array in arrays.items():
            content = np.frombuffer(array.tobytes(), np.uint8).copy()
            self._place("global", name, start, content, "i64")
            start += -(-len(content) // 1024) * 1024 + 4096
        start = 1024
        for name, size_bytes in shared.items():
            self._place("shared", name, start, np.full(size_bytes, 0xFF, np.uint8), "i32")
            start += -(-size_bytes // 1024) * 1024 + 1024

    def _place(self, space: str, name: str, start: int, content: np.ndarray, kind: str) -> None:
        self.memory[space][name] = (start, content)
        self.at[name] = self.constant(start, kind)

    def constant(self, value: Any, kind: str) -> Value:
        if kind == "f32":
            return Value(of_f32(np.full(self.threads, value, np.float32)), kind)
        return Value(np.full(self.threads, int(value) % 2**64, np.uint64), kind)

    def content(self, name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        return self.memory["global"][name][1].view(dtype).reshape(shape)

    def run(self, block: int, code: Callable[[Value], None]) -> None:
        """The code of one block, given its number; nothing of another's is left on chip."""
        for _, content in self.memory["shared"].values():
            content[:] = 0xFF
        code(self.constant(block, "i32"))

    def run_cluster(self, block: int, size: int, code: Callable[[Value, Value], None]) -> None:
        """The code of each block of a cluster, given the cluster's number and its own, twice: what
        it sends does not depend on what it receives, which it finds on chip the second time.
        """
        for _ in range(2):
            received, self.sent = self.sent, []
            for rank in range(size):
                mine = [(address, words) for to, address, words in received if to == rank]
                self.run(
                    block, functools.partial(self._with, mine, self.constant(rank, "i32"), code)
                )
        self.sent = []

    def _with(
        self, received: list[Any], rank: Value, code: Callable[..., None], block: Value
    ) -> None:
        for address, words in received:
            for start, content in self.memory["shared"].values():
                if start <= address < start + len(content):
                    content[address - start :][: 4 * len(words)] = words.view(np.uint8)
        code(block, rank)

    # memory

    def _where(self, space: str, addresses: np.ndarray, size: int) -> Iterator[Any]:
        """Each array that is meant, which threads mean it, and their bytes in it."""
        left = self.mask.copy()
        some = addresses[left].astype(np.int64)
        assert (some % size == 0).all(), f"an access of {size} bytes is not aligned"
        for start, content in self.memory[space].values():
            places = addresses.astype(np.int64) - start
            here = left & (places >= 0) & (places < len(content))
            outside = places[here & (places + size > len(content))]
            assert not len(outside), f"an access leaves its array: {outside[:4]}"
            left &= ~here
            if here.any():
                yield content, here, places[here][:, None] + np.arange(size)
        assert not left.any(), f"nothing lies at {addresses[left][:4]}"

    def load(self, space: str, addresses: np.ndarray, size: int, count: int) -> list[np.ndarray]:
        found = np.full((self.threads, size * count), 0xFF, np.uint8)
        for content, here, places in self._where(space, addresses, size * count):
            found[here] = content[places]
        words = np.ascontiguousarray(found).view(f"u{size}").reshape(self.threads, count)
        return [words[:, i].astype(np.uint64) for i in range(count)]

    def store(self, space: str, addresses: np.ndarray, size: int, values: list[Any]) -> None:
        words = np.stack([v.astype(f"u{size}") for v in values], axis=1)
        for content, here, places in self._where(space, addresses, size * len(values)):
            content[places] = np.ascontiguousarray(words[here]).view(np.uint8)

    # instructions

    def meet(self) -> None:
        """What all threads must come to, or none: a barrier, a shuffle."""
        assert self.mask.all() or not self.mask.any(), "some threads come to a barrier, others not"

    def asm(self, text: str, results: str, *operands: Value, **how: bool) -> Any:
        del how
        if "mbarrier" in text and "st.async" not in text:
            return None  # what is waited for is there
        registers = self._given(results, operands)
        self._execute_all(text, registers)
        return self._done(results, registers)

    def _given(self, results: str, operands: tuple[Value, ...]) -> dict[str, Any]:
        return {f"${len(results) + i}": v.bits for i, v in enumerate(operands)}

    def _execute_all(self, text: str, registers: dict[str, Any]) -> None:
        for instruction in text.split(";"):
            name, _, rest = instruction.lstrip("{} \n").partition(" ")
            before = self.mask
            if name.startswith("@"):
                self.mask = before & (registers[name[1:]] != 0)
                name, _, rest = rest.partition(" ")
            if name and name != ".reg":
                arguments = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest)
                self._execute(name.split("."), arguments, registers)
            self.mask = before

    def _done(self, results: str, registers: dict[str, Any]) -> Any:
        kinds = {"r": "i32", "l": "i64", "f": "f32"}
        outs = [Value(registers[f"${i}"], kinds[letter]) for i, letter in enumerate(results)]
        return None if not outs else outs[0] if len(outs) == 1 else outs

    def _execute(self, op: list[str], arguments: list[str], registers: dict[str, Any]) -> None:
        def get(name: str) -> np.ndarray:
            if name.startswith("0f"):
                return np.full(self.threads, int(name[2:], 16), np.uint64)
            if name[0].isdigit():
                return np.full(self.threads, int(name, 0), np.uint64)
            return registers[name]

        def address(text: str) -> np.ndarray:
            base, _, offset = text.strip("[] ").partition("+")
            return registers[base.strip()] + np.uint64(int(offset or 0))

        def several(text: str) -> list[str]:
            return [name.strip() for name in text.strip("{}").split(",")]

        space = next((name for name in op if name in self.memory), "")
        kind, size = op[-1], _SIZES.get(re.sub(r"\D", "", op[-1]), 0)
        if op[0] == "ld":
            names = several(arguments[0])
            found = self.load(space, address(arguments[1]), size, len(names))
            for name, words in zip(names, found, strict=True):
                kept = registers.get(name, words)  # where nothing is loaded
                registers[name] = np.where(self.mask, words, kept)
        elif op[:2] == ["st", "async"]:
            to = address(arguments[0])
            words = np.stack([get(name) for name in several(arguments[1])], axis=1)
            for thread in np.flatnonzero(self.mask):
                rank, place = divmod(int(to[thread]), REMOTE)
                self.sent.append((rank, place, words[thread].astype(np.uint32)))
        elif op[0] == "st":
            values = [get(name) for name in several(arguments[1])]
            self.store(space, address(arguments[0]), size, values)
        elif op[:2] == ["cp", "async"]:
            if op[2] == "cg":
                self._copy(address(arguments[0]), address(arguments[1]), get(arguments[3]))
        elif op[0] == "mapa":
            registers[arguments[0]] = get(arguments[1]) + get(arguments[2]) * np.uint64(REMOTE)
        elif op[0] in ("bar", "barrier"):
            self.meet()
        elif op[0] == "fence":
            pass
        elif op[0] == "prefetch":
            self.load(space, address(arguments[0]), 1, 1)  # what lies nowhere must not be asked for
        elif op[0] == "atom":
            most = None if "add" in op else get(arguments[2])
            assert most is None or "inc" in op, "no other is known"
            more = get(arguments[2]) if most is None else np.ones_like(most)
            found = self._add(address(arguments[1]), more, most)
            kept = registers.get(arguments[0], found)
            registers[arguments[0]] = np.where(self.mask, found, kept)
        elif op[0] == "red":
            assert "add" in op, "no other is known"
            self._add(address(arguments[0]), get(arguments[1]))
        elif op[0] == "mma":
            given = [[get(name) for name in several(text)] for text in arguments[1:]]
            if "m16n8k32" in op:
                found = self._whole_mma(op[-3] == "s8", *given)
            else:
                found = self._mma(HALVES[op[-2]], *given)
            registers.update(zip(several(arguments[0]), found, strict=True))
        elif op[0] == "mov" and "{" in arguments[1]:
            low, high = (get(name) for name in several(arguments[1]))
            registers[arguments[0]] = low | high << np.uint64(16)
        elif op[0] == "mov" and "{" in arguments[0]:
            low, high = several(arguments[0])
            whole = get(arguments[1])
            registers[low], registers[high] = whole & np.uint64(0xFFFF), whole >> np.uint64(16)
        else:
            done = self._compute(op, kind, [get(name) for name in arguments[1:]])
            registers[arguments[0]] = done & np.uint64(0xFFFFFFFF)

    def _compute(self, op: list[str], kind: str, x: list[np.ndarray]) -> np.ndarray:
        name = op[0]
        if name == "shfl":
            self.meet()
            lanes = x[1].astype(np.int64).reshape(-1, LANES)
            lanes = lanes if "idx" in op else np.arange(LANES) ^ lanes
            return np.take_along_axis(x[0].reshape(-1, LANES), lanes, axis=1).reshape(-1)
        if name == "cvt":
            if "x2" in op[-2]:
                return of_pair(np.stack([f32(x[1]), f32(x[0])], axis=1), PAIRS[op[-2]])
            if kind == "f32" and op[-2] in HALVES:
                rounded = f32(x[0]).astype(HALVES[op[-2]])
                return rounded.view(np.uint16).astype(np.uint64)
            if op[-2:] == ["f32", "s32"]:
                return of_f32(x[0].astype(np.uint32).view(np.int32))
            if op[-2:] == ["f32", "u32"]:
                return of_f32(x[0])
            if kind in HALVES:
                return of_f32(x[0].astype(np.uint16).view(HALVES[kind]))
            return x[0]  # of whole numbers
        if kind == "u16x2":
            assert name == "max", "no other is known"
            halves = [each.astype(np.uint32).view(np.uint16) for each in x]
            return np.maximum(*halves).view(np.uint32).astype(np.uint64)
        if kind in PAIRS:
            y = [pair(each, PAIRS[kind]) for each in x]
            functions: Any = {"mul": lambda a, b: a * b, "sub": lambda a, b: a - b}
            functions |= {"add": lambda a, b: a + b, "fma": lambda a, b, c: a * b + c}
            functions["max"] = np.maximum if "NaN" in op else np.fmax
            functions["abs"] = np.abs
            return of_pair(functions[name](*y), PAIRS[kind])
        if kind == "f32" and name != "mov":
            y = [f32(each).astype(np.float64) for each in x]
            functions: Any = {"mul": lambda a, b: a * b, "add": lambda a, b: a + b}
            functions |= {"fma": lambda a, b, c: a * b + c, "ex2": np.exp2, "rcp": lambda a: 1 / a}
            functions |= {"div": lambda a, b: a / b, "rsqrt": lambda a: a**-0.5}
            functions |= {"sub": lambda a, b: a - b, "lg2": np.log2, "neg": lambda a: -a}
            functions["max"] = np.maximum if "NaN" in op else np.fmax
            return of_f32(functions[name](*y))
        if name == "dp4a":
            products = _bytes(x[0], op[1] == "s32") * _bytes(x[1], op[2] == "s32")
            return x[2] + products.sum(1).astype(np.uint64)
        functions: Any = {"mov": lambda a: a, "and": np.bitwise_and, "or": np.bitwise_or}
        functions |= {"xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift}
        functions |= {"mul": lambda a, b: a * b, "add": lambda a, b: a + b, "min": np.minimum}
        functions |= {"max": np.maximum, "setp": functools.partial(_compared, op)}
        functions["selp"] = lambda a, b, there: np.where(there != 0, a, b)
        functions |= {"mad": lambda a, b, c: a * b + c, "lop3": _lop3, "prmt": _prmt}
        return functions[name](*x)

    def _whole_mma(self, signed: bool, a: Any, b: Any, sums: Any) -> list[np.ndarray]:
        """m16n8k32 of 8-bit numbers, likewise; signed: whether a's are, as b's always are."""
        self.meet()
        down, across = np.arange(LANES) // 4, np.arange(LANES) % 4
        left = np.zeros((self.threads // LANES, 16, 32), np.int64)
        right = np.zeros((self.threads // LANES, 32, 8), np.int64)
        for e in range(4):
            for i, words in enumerate(a):
                numbers = _bytes(words, signed)[:, e].reshape(-1, LANES)
                left[:, down + 8 * (i % 2), 4 * across + e + 16 * (i // 2)] = numbers
            for i, words in enumerate(b):
                numbers = _bytes(words, True)[:, e].reshape(-1, LANES)
                right[:, 4 * across + e + 16 * i, down] = numbers
        product = left @ right
        return [
            (
                before.astype(np.int64)
                + product[:, down + 8 * (i // 2), 2 * across + i % 2].reshape(-1)
            )
            .astype(np.uint32)
            .astype(np.uint64)
            for i, before in enumerate(sums)
        ]

    def _add(
        self, addresses: np.ndarray, more: np.ndarray, most: np.ndarray | None = None
    ) -> np.ndarray:
        """Adds to words of global memory, a thread after the other; what each found there. A word
        that was `most` becomes 0.
        """
        found, before = np.zeros(self.threads, np.uint64), self.mask
        for thread in np.flatnonzero(before):
            self.mask = np.arange(self.threads) == thread
            [words] = self.load("global", addresses, 4, 1)
            after = words + more if most is None else np.where(words == most, 0, words + more)
            self.store("global", addresses, 4, [after])
            found[thread] = words[thread]
        self.mask = before
        return found

    def _copy(self, to: np.ndarray, source: np.ndarray, size: np.ndarray) -> None:
        """16 bytes, or as many zeros; the address is a good one in either case."""
        found = self.load("global", source, 4, 4)
        self.store("shared", to, 4, [np.where(size == 16, words, 0) for words in found])

    def _mma(self, dtype: Any, a: Any, b: Any, sums: Any) -> list[np.ndarray]:
        """m16n8k16 of every warp, by PTX's table of who has what."""
        self.meet()
        down, across = np.arange(LANES) // 4, np.arange(LANES) % 4
        left = np.zeros((self.threads // LANES, 16, 16))
        right = np.zeros((self.threads // LANES, 16, 8))
        for i, words in enumerate(a):
            for e in range(2):
                numbers = pair(words, dtype)[:, e].reshape(-1, LANES)
                left[:, down + 8 * (i % 2), 2 * across + e + 8 * (i // 2)] = numbers
        for i, words in enumerate(b):
            for e in range(2):
                numbers = pair(words, dtype)[:, e].reshape(-1, LANES)
                right[:, 2 * across + e + 8 * i, down] = numbers
        product = left @ right
        return [
            of_f32(f32(before) + product[:, down + 8 * (i // 2), 2 * across + i % 2].reshape(-1))
            for i, before in enumerate(sums)
        ]


def _bytes(words: np.ndarray, signed: bool) -> np.ndarray:
    """The four of a word, lowest first, [threads, 4]."""
    kind = np.int8 if signed else np.uint8
    return words.astype(np.uint32).view(kind).reshape(-1, 4).astype(np.int64)


def _compared(op: list[str], a: np.ndarray, b: np.ndarray, also: Any = None) -> np.ndarray:
    found = {"eq": np.equal, "ne": np.not_equal, "gt": np.greater}[op[1]](a, b)
    assert (op[2] == "and") == (also is not None), "no other is known"
    return (found if also is None else found & (also != 0)).astype(np.uint64)


def _lop3(a: Any, b: Any, c: Any, table: Any) -> np.ndarray:
    assert table[0] == 0xEA, "only (a & b) | c is known"
    return (a & b) | c


def _prmt(a: Any, b: Any, order: Any) -> np.ndarray:
    whole = a | b << np.uint64(32)
    found = np.zeros_like(a)
    for i in range(4):
        assert not (order[0] >> np.uint64(4 * i)) & np.uint64(8), "no sign is spread"
        which = (order >> np.uint64(4 * i)) & np.uint64(7)
        found |= (whole >> which * np.uint64(8) & np.uint64(255)) << np.uint64(8 * i)
    return found


def dialects(machine: Machine) -> dict[str, Any]:
    """What stands for MLIR in modules of lane code, by the name that they have for it."""

    def whole(function: Callable[..., np.ndarray]) -> Callable[..., Value]:
        return lambda a, b: Value(function(a.bits, b.bits), a.type)

    def signed(function: Callable[..., np.ndarray]) -> Callable[..., Value]:
        def apart(a: Value, b: Value) -> Value:
            found = function(*(x.bits.astype(np.uint32).view(np.int32) for x in (a, b)))
            return Value(found.view(np.uint32).astype(a.bits.dtype), a.type)

        return apart

    def floats(function: Callable[..., np.ndarray]) -> Callable[..., Value]:
        return lambda a, b: Value(of_f32(function(f32(a.bits), f32(b.bits))), "f32")

    def select(where: Value, a: Value, b: Value) -> Value:
        return Value(np.where(where.bits != 0, a.bits, b.bits), a.type)

    @contextlib.contextmanager
    def when(where: Value) -> Iterator[None]:
        before = machine.mask
        machine.mask = before & (where.bits != 0)
        yield
        machine.mask = before

    def fori(count: Value, carry: Any) -> Callable[..., Any]:
        def loop(body: Callable[..., Any]) -> Any:
            results = list(carry)
            for i in range(int(count.bits[machine.mask].max(initial=0))):
                there = Value(count.bits > i, "i1")
                with when(there):
                    after = body(machine.constant(i, "i32"), results)
                results = [select(there, *both) for both in zip(after, results, strict=True)]
            return types.SimpleNamespace(results=results)

        return loop

    arith = types.SimpleNamespace(
        addi=whole(np.add),
        subi=whole(np.subtract),
        muli=whole(np.multiply),
        divui=whole(np.floor_divide),
        remui=whole(np.remainder),
        minui=whole(np.minimum),
        maxui=whole(np.maximum),
        shrsi=signed(np.right_shift),
        minsi=signed(np.minimum),
        maxsi=signed(np.maximum),
        andi=whole(np.bitwise_and),
        xori=whole(np.bitwise_xor),
        ori=whole(np.bitwise_or),
        shli=whole(np.left_shift),
        shrui=whole(np.right_shift),
        addf=floats(np.add),
        subf=floats(np.subtract),
        mulf=floats(np.multiply),
        select=select,
        extui=lambda kind, x: Value(x.bits, kind),
        constant=lambda kind, x: machine.constant(x, kind),
        CmpIPredicate=types.SimpleNamespace(ult=np.less, eq=np.equal, ne=np.not_equal),
        cmpi=lambda how, a, b: Value(how(a.bits, b.bits), "i1"),
    )
    ir = types.SimpleNamespace(
        F32Type=types.SimpleNamespace(get=lambda: "f32"),
        IntegerType=types.SimpleNamespace(get_signless="i{}".format),
        FloatAttr=types.SimpleNamespace(get=lambda kind, x: machine.constant(x, kind)),
    )
    utils = types.SimpleNamespace(
        thread_idx=lambda: Value(np.arange(machine.threads), "i32"),
        c=machine.constant,
        when=when,
        fori=fori,
    )
    return {
        "asm": machine.asm,
        "arith": arith,
        "gpu": types.SimpleNamespace(barrier=machine.meet),
        "ir": ir,
        "llvm": types.SimpleNamespace(ConstantOp=lambda _, x: types.SimpleNamespace(result=x)),
        "mgpu_utils": utils,
    }


def stand_in(monkeypatch: Any, machine: Machine, modules: Iterable[Any]) -> None:
    """The machine's, in place of what the modules have of MLIR."""
    for name, function in dialects(machine).items():
        for module in modules:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)
