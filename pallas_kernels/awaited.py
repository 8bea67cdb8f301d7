"""Numbers in bfloat16 that blocks of a launch hand each other, and that tell that they are there.

What no number is stands in their place until then: AWAITED, all ones. So whoever takes them looks
until there is none left, and who writes them need not tell anybody: a number is one way to memory
and one way back, where a meeting of all blocks waits for what was written to be there, then for
the count, and then for the numbers. A conversion to bfloat16 gives no such number: of those that
are none (NaN) it gives 0x7FFF.
As in lane_code.py, values are those of one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.device import ACCESS_BYTES
from pallas_kernels.lane_code import (
    as_word,
    asm,
    further,
    less,
    only_where,
    store,
    times,
    word,
)

AWAITED = 0xFFFF
MOST_POLLS = 2**24  # of a thread that waits for other blocks, some ten seconds; then it gives up
# Accesses that a thread asks for again and again, while they are not there. Of more, it looks at
# the first, and asks for the others when that is there: all blocks together would else take what
# the L2 gives. Not measured: those of Qwen2.5-0.5B are four at most
MOST_AT_ONCE = 4


def load_awaited(places: Sequence[tuple[Any, int]], wait: Any) -> list[list[Any]]:
    """Four words at each address and offset in global memory, when none has a half that is AWAITED.
    wait: a word; where it is 0, what is there is taken.
    """
    if len(places) > MOST_AT_ONCE:
        return load_awaited(places[:1], wait) + _load(places[1:], wait)
    return _load(places, wait)


def _load(places: Sequence[tuple[Any, int]], wait: Any) -> list[list[Any]]:
    count = 4 * len(places)
    loads, largest = "", "mov.b32 m, 0;"
    for i, (_, offset) in enumerate(places):
        to = ", ".join(f"${4 * i + j}" for j in range(4))
        address = f"[${count + i} + {offset}]"
        loads += f"ld.relaxed.gpu.global.v4.u32 {{{to}}}, {address}; "
        largest += "".join(f" max.u16x2 m, m, ${4 * i + j};" for j in range(4))
    done = asm(
        f"""{{ .reg .pred p, q; .reg .b32 m, n, polls; mov.b32 polls, 0;
            again: {loads}{largest} shr.u32 n, m, 16; and.b32 m, m, {AWAITED}; max.u32 m, m, n;
            setp.eq.u32 p, m, {AWAITED}; setp.ne.and.u32 p, ${count + len(places)}, 0, p;
            {_again("p")} }}""",
        "r" * count,
        *(address for address, _ in places),
        wait,
        effects=True,
        again=True,
    )
    return [done[i : i + 4] for i in range(0, count, 4)]


def load_float_awaited(address: Any, where: Any, wait: Any) -> Any:
    """A number of global memory as float32, when it is not AWAITED, or 0 where not. wait: as of
    `load_awaited`.
    """
    where = word(1) if where is None else as_word(where)
    text = f"""{{ .reg .pred p, q; .reg .b16 x, y; .reg .b32 polls;
        mov.b16 x, 0; mov.b16 y, 0; mov.b32 polls, 0;
        again: setp.ne.u32 p, $2, 0; @p ld.relaxed.gpu.global.b16 x, [$1];
        setp.eq.u16 p, x, {AWAITED}; setp.ne.and.u32 p, $3, 0, p;
        {_again("p")} mov.b32 $0, {{y, x}}; }}"""
    return asm(text, "f", address, where, wait, effects=True, again=True)


def _again(awaited: str) -> str:
    """Back to the beginning while the predicate is true, but not for ever."""
    count = f"add.u32 polls, polls, 1; setp.gt.u32 q, polls, {MOST_POLLS}; @q trap;"
    return f"{count} @{awaited} bra again;"


def store_awaited(address: Any, value: Any) -> None:
    """Writes a float32 to global memory as bfloat16, for those who wait for it."""
    text = "{ .reg .b16 x; cvt.rn.bf16.f32 x, $1; st.relaxed.gpu.global.b16 [$0], x; }"
    asm(text, "", address, value)


def clear(address: Any, size_bytes: int, thread: Any, threads: int) -> None:
    """Makes memory AWAITED, of which each of so many threads has a share. Before they are written,
    and read, all blocks must have met.
    """
    count = size_bytes // ACCESS_BYTES
    steps = -(-count // threads)

    @mgpu_utils.fori(word(steps), [])
    def each_step(step: Any, carry: Any) -> Any:
        place = arith.addi(thread, times(step, threads))
        inside = None if count % threads == 0 else less(place, count)
        only_where(inside, store, further(address, times(place, ACCESS_BYTES)), 0, [word(-1)] * 4)
        return carry

    del each_step
