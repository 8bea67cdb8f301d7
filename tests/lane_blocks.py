"""A `lane_machine` of several blocks, whose warps wait for copies, for each other and for blocks.

Each part of a block that has a way of its own (`Part`) runs in a thread of Python, one at a time,
until it has to wait for what is not there yet; then the next one goes on. What is copied comes when
somebody waits for it, and until then its place holds nothing (NaN). So that is seen here which
`lane_machine` cannot: numbers read before they have come, a stage filled anew before it was read,
who waits for ever, what is told to others before they see it (`late`), and what is asked into the
L2 and not brought on chip behind it, or of a stage not all of an array, if any.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from lane_machine import LANES, Machine, Value


@dataclasses.dataclass
class Barrier:
    """Of shared memory: how many arrivals it waits for, and how often it had all."""

    count: int
    left: int
    phase: int = 0

    def settle(self) -> None:
        assert self.left >= 0, "more arrive than a barrier waits for"
        if self.left == 0:
            self.left, self.phase = self.count, self.phase + 1


@dataclasses.dataclass(frozen=True)
class Part:
    """Threads of a block, first to last, and what they do."""

    block: int
    first: int
    last: int
    code: Callable[[], None]


class _Stopped(BaseException):
    """Of a thread whose machine has failed in another."""


class Blocks(Machine):
    """Blocks that share the arrays of global memory, each with a chip of its own."""

    def __init__(
        self,
        arrays: Any,
        shared: Any,
        threads: int,
        blocks: int,
        *,
        late: Collection[int] = (),
    ):
        """late: of these blocks others see what they write to global memory when a thread of theirs
        comes to a fence, or when nobody could go on otherwise; counts they see at once. If there is
        any, whoever comes to a fence, or might have to wait, lets others go on, the last part
        first, so that the first block does what others could read too early as late as can be.
        """
        super().__init__(arrays, shared, threads)
        self.late = late
        self.pending: list[list[Any]] = [[] for _ in range(blocks)]  # which bytes, of which array
        fresh = self.memory["shared"]
        self.chips = [
            {name: (start, content.copy()) for name, (start, content) in fresh.items()}
            for _ in range(blocks)
        ]
        self.barriers: dict[tuple[int, int], Barrier] = {}
        self.coming: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.into_l2: set[tuple[int, int]] = set()  # block, address: not on chip yet
        self.ahead: dict[int, set[bool]] = {}  # of a stage, by array: whether that was in the L2
        self.asked: list[tuple[np.ndarray, np.ndarray]] = []
        self.block, self.at_once = 0, False
        self.turn = threading.Condition()
        self.running: int | None = None
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.failed: BaseException | None = None

    def at_block(self, block: int) -> Value:
        """Makes a block the one whose threads go on, all of them; its number."""
        self.block, self.memory["shared"] = block, self.chips[block]
        self.mask = np.ones(self.threads, bool)
        return self.constant(block, "i32")

    def together(self, parts: Sequence[Part]) -> None:
        """Runs the parts until all have ended."""
        threads = [
            threading.Thread(target=self._run, args=(i, part), daemon=True)
            for i, part in enumerate(parts)
        ]
        self.parts = parts
        self.waiting = {i: lambda: True for i in range(len(parts))}
        for thread in threads:
            thread.start()
        with self.turn:
            self._hand_on()
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed
        for block in range(len(self.pending)):
            self._settle(block)
        assert not self.into_l2, "what was asked into the L2 is not brought on chip"

    def _run(self, number: int, part: Part) -> None:
        try:
            with self.turn:
                self._wait_for_turn(number)
            with np.errstate(all="ignore"):  # threads that are elsewhere compute, too
                part.code()
            with self.turn:
                self._hand_on()
        except _Stopped:
            pass
        except BaseException as error:  # every other thread must end, too
            with self.turn:
                self.failed = error
                self.turn.notify_all()

    def _hand_on(self) -> None:
        """Lets the next part go on that need not wait."""
        last = -1 if self.running is None else self.running
        order = sorted(self.waiting, key=lambda i: (i <= last, i))
        order = sorted(order, reverse=True) if self.late else order
        late = [block for block, stores in enumerate(self.pending) if stores]
        for block in [None, *late]:  # no store is late for ever
            if block is not None:
                self._settle(block)
            for number in order:
                self.memory["shared"] = self.chips[self.parts[number].block]
                self.block = self.parts[number].block
                if self.waiting[number]():
                    self.running = number
                    self.turn.notify_all()
                    return
        if self.waiting:
            self.failed = AssertionError(f"parts {sorted(self.waiting)} wait for ever")
        self.turn.notify_all()

    def _wait_for_turn(self, number: int) -> None:
        while self.running != number or number not in self.waiting:
            if self.failed is not None:
                raise _Stopped
            self.turn.wait()
        del self.waiting[number]
        part = self.parts[number]
        self.at_block(part.block)
        places = np.arange(self.threads)
        self.mask = (places >= part.first) & (places < part.last)

    def until(self, there: Callable[[], bool]) -> None:
        """Goes on when it is there; until then others do."""
        if there() and not self.late:
            return
        assert self.running is not None, "there is somebody to wait for"
        number, mask = self.running, self.mask
        with self.turn:
            self.waiting[number] = there
            self._hand_on()
            self._wait_for_turn(number)
        self.mask = mask

    # instructions

    def meet(self) -> None:
        warps = self.mask.reshape(-1, LANES)
        assert (warps.all(1) | ~warps.any(1)).all(), "a warp's lanes are apart"

    def asm(self, text: str, results: str, *operands: Value, **how: bool) -> Any:
        if found := re.match(r"bar\.sync \d+, (\d+)", text):
            count = int(self.mask.sum())
            assert count in (0, int(found[1])), f"{count} threads come to a barrier of {found[1]}"
            return None
        if " bra " in text and results:
            return self._awaited(text, results, operands, how.get("again", False))
        if " bra " in text:
            return self._loop(text, operands)
        if self.late and text.startswith("fence.acq_rel.gpu") and self.mask.any():
            self.until(lambda: True)  # others go on before it
            self._settle(self.block)
            return None
        if "mbarrier.test_wait" in text:
            registers = self._given(results, operands)
            self._execute_all(text, registers)
            return self._done(results, registers)
        if "mbarrier" in text:
            return self._mbarrier(text, operands)
        return super().asm(text, results, *operands, **how)

    def _execute(self, op: list[str], arguments: list[str], registers: dict[str, Any]) -> None:
        given = [registers.get(name.partition("+")[0].strip("[] ")) for name in arguments]
        if op[:2] == ["mbarrier", "test_wait"]:
            _, addresses, parities = given
            done = np.zeros(self.threads, np.uint64)
            for thread in np.flatnonzero(self.mask):
                barrier = self.barriers[self.block, int(addresses[thread])]
                done[thread] = barrier.phase % 2 != parities[thread]
            registers[arguments[0]] = done
        elif op[:4] == ["cp", "async", "bulk", "prefetch"]:
            starts, sizes = given
            starts = starts + np.uint64(arguments[0].partition("+")[2].strip("] "))
            for thread in np.flatnonzero(self.mask):
                size = int(sizes[thread])
                assert size > 0, "a copy is of something"
                assert size % 16 == 0, "a copy is of whole 16 bytes"
                start = int(starts[thread])
                self._slice("global", start, size)
                self.into_l2 |= {(self.block, at) for at in range(start, start + size, 16)}
        else:
            super()._execute(op, arguments, registers)

    def _loop(self, text: str, operands: tuple[Value, ...]) -> None:
        """Of a thread that looks again and again."""
        if not self.mask.any():
            return
        if "mbarrier.try_wait.parity" in text:
            [address], [parity] = (set(x.bits[self.mask].tolist()) for x in operands)
            key = self.block, address
            for bring in self.coming.pop(key, []):
                bring()
            self.until(lambda: self._passed(key, parity))
            return
        place = re.search(r"ld\.\w+\.gpu\.global\.u32 \w+, \[\$(\d+)\]", text)
        least = re.search(r"setp\.lt\.u32 \w+, \w+, \$(\d+); @p bra", text)
        assert place, "no other loop is known"
        assert least, "no other loop is known"
        address, one = operands[int(place[1])].bits, self.mask.copy()

        def enough() -> bool:
            self.mask, before = one, self.mask
            [words] = self.load("global", address, 4, 1)
            self.mask = before
            return bool((words[one] >= operands[int(least[1])].bits[one]).all())

        self.until(enough)

    def _awaited(self, text: str, results: str, operands: tuple[Value, ...], again: bool) -> Any:
        """Loads, again and again, until they are there, as the text itself decides."""
        assert again, "operands are read again when results have been written"
        [by] = re.findall(r"@(\w+) bra again", text)
        leaps = r"again:|@\w+ (trap|bra again);"
        once, one, found = re.sub(leaps, "", text), self.mask.copy(), []

        def there() -> bool:
            registers = self._given(results, operands)
            self.mask, before = one, self.mask
            self._execute_all(once, registers)
            self.mask = before
            found[:] = self._done(results, registers)
            return not registers[by][one].any()

        if not one.any():
            there()
        elif not (there() and not self.late):
            self.until(there)
        return found

    def load(self, space: str, addresses: np.ndarray, size: int, count: int) -> list[np.ndarray]:
        mine = self.pending[self.block] if space == "global" else []
        before = [(content, places, content[places]) for content, places, _ in mine]
        for content, places, written in mine:
            content[places] = written
        found = super().load(space, addresses, size, count)
        for content, places, there in reversed(before):
            content[places] = there
        return found

    def store(self, space: str, addresses: np.ndarray, size: int, values: list[Any]) -> None:
        if space != "global" or self.block not in self.late or self.at_once:
            super().store(space, addresses, size, values)
            return
        words = np.stack([v.astype(f"u{size}") for v in values], axis=1)
        for content, here, places in self._where(space, addresses, size * len(values)):
            written = np.ascontiguousarray(words[here]).view(np.uint8)
            self.pending[self.block].append((content, places, written))

    def _add(self, *given: Any) -> np.ndarray:
        self.at_once = True
        found = super()._add(*given)
        self.at_once = False
        return found

    def _settle(self, block: int) -> None:
        """What a block has written is there for all."""
        for content, places, written in self.pending[block]:
            content[places] = written
        self.pending[block] = []

    def _passed(self, key: tuple[int, int], parity: int) -> bool:
        for bring in self.coming.pop(key, []):
            bring()
        barrier = self.barriers[key]
        return barrier.phase % 2 != parity

    def _mbarrier(self, text: str, operands: tuple[Value, ...]) -> None:
        for thread in np.flatnonzero(self.mask):
            values = [int(x.bits[thread]) for x in operands]
            if "mbarrier.init" in text:
                count = int(re.search(r"\], (\d+);", text)[1])  # pyright: ignore
                self.barriers[self.block, values[0]] = Barrier(count, count)
            elif text.startswith("cp.async.mbarrier.arrive.noinc"):
                self._arrive_later(self.block, values[0])
            else:
                barrier = self.barriers[self.block, values[0]]
                barrier.left -= 1
                barrier.settle()

    def _arrive_later(self, block: int, address: int) -> None:
        """A thread's copies come, and are counted, when somebody waits for the barrier."""
        copies, self.asked = self.asked, []
        assert all(len(found) == 1 for found in self.ahead.values()), "half a stage was in the L2"
        self.ahead = {}

        def bring() -> None:
            for here, there in copies:
                here[:] = there
            barrier = self.barriers[block, address]
            barrier.left -= 1
            barrier.settle()

        self.coming.setdefault((block, address), []).append(bring)

    def _copy(self, to: np.ndarray, source: np.ndarray, size: np.ndarray) -> None:
        """What is asked for; until it comes, nothing lies there."""
        for thread in np.flatnonzero(self.mask):
            here = self._slice("shared", int(to[thread]))
            there = self._slice("global", int(source[thread]))
            here[:] = 0xFF
            if size[thread]:
                piece, array = (self.block, int(source[thread])), id(there.base)
                self.ahead.setdefault(array, set()).add(piece in self.into_l2)
                self.into_l2.discard(piece)
            self.asked.append((here, there if size[thread] else np.zeros_like(there)))

    def _slice(self, space: str, address: int, size: int = 16) -> np.ndarray:
        assert address % 16 == 0, "a copy is of whole 16 bytes"
        for start, content in self.memory[space].values():
            if start <= address < start + len(content):
                assert address + size <= start + len(content), "a copy leaves its array"
                return content[address - start :][:size]
        raise AssertionError(f"nothing lies at {address}")
