"""Numbers that blocks of a launch hand each other, and that tell that they are there.

Blocks count themselves when they have written numbers (`Meeting`), and whoever has seen the count
reads them. For that they must be in the L2 before the count is, and so the writer waits for word
that they are. Here the count may be first (`EarlyMeeting`), or there may be none: where a number
will be there is AWAITED, all ones, until it comes, and a reader who finds one looks again: each
half of a word for itself, in bfloat16, since their writers may be two, or whole words, in float32.
(PTX's model of memory says nothing of words that are written by halves; the hardware writes no half
in parts.) A conversion to bfloat16 gives no such number, and no sum or product in float32: of those
that are none (NaN) they give 0x7FFF and 0x7FFFFFFF.
As in lane_code.py, values are those of one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.device import ACCESS_BYTES
from pallas_kernels.lane_code import (
    MOST_POLLS,
    as_word,
    asm,
    further,
    less,
    load,
    load_late,
    only_where,
    store,
    times,
    word,
)

AWAITED = 0xFFFF
BOTH = 0xFFFFFFFF  # of a word
Place = tuple[Any, int, int]  # an address, an offset, and how many words lie there
Somewhere = tuple[Any, int, int, Any]  # as before, and where they are read: else they are zeros


def load_awaited(
    places: Sequence[Place | Somewhere], wait: Any = None, *, whole: bool = False
) -> list[list[Any]]:
    """Words of global memory, two or four at each place, when none has a half that is AWAITED;
    whole: when none is all ones.

    wait: a word; where it is 0, what is there is taken; None: nowhere.
    """
    ends = list(itertools.accumulate((place[2] for place in places), initial=0))
    count, zeros, loads = ends[-1], "", ""
    operands = [place[0] for place in places]
    for i, (_, offset, words, *where) in enumerate(places):
        to = [f"${ends[i] + j}" for j in range(words)]
        for here in where:
            zeros += "".join(f"mov.b32 {each}, 0; " for each in to)
            loads += f"setp.ne.u32 p, ${count + len(operands)}, 0; @p "
            operands.append(as_word(here))
        to = ", ".join(to)
        loads += f"ld.relaxed.gpu.global.v{words}.u32 {{{to}}}, [${count + i} + {offset}]; "
    kind, least = ("u32", BOTH) if whole else ("u16x2", AWAITED)
    largest = "".join(f" max.{kind} m, m, ${i};" for i in range(count))
    halves = f"shr.u32 n, m, 16; and.b32 m, m, {AWAITED}; max.u32 m, m, n;"
    waits = ""
    if wait is not None:
        waits = f"setp.ne.and.u32 p, ${count + len(operands)}, 0, p;"
        operands.append(wait)
    done = asm(
        f"""{{ .reg .pred p, q; .reg .b32 m, n, polls; mov.b32 polls, 0; {zeros}
            again: {loads}mov.b32 m, 0;{largest} {"" if whole else halves}
            setp.eq.u32 p, m, {least}; {waits}
            add.u32 polls, polls, 1; setp.gt.u32 q, polls, {MOST_POLLS}; @q trap;
            @p bra again; }}""",
        "r" * count,
        *operands,
        effects=True,
        again=True,
    )
    return [done[start:end] for start, end in itertools.pairwise(ends)]


def load_all(
    places: Sequence[Place], at: Mapping[str, Any], *, late: bool = False
) -> list[list[Any]]:
    """Words of global memory at each place. With a `wait` in at they are awaited, as of
    `load_awaited`; late: as of `load_late`; else no one writes them.
    """
    if "wait" in at:
        return load_awaited(places, at["wait"])
    read = load_late if late else load
    return [read(*place) for place in places]


def store_awaited(address: Any, value: Any, spent: Any) -> None:
    """Writes a float32 to global memory as bfloat16, for those who wait for it; spent: where one
    lies that no one reads any more, and the next will be awaited.
    """
    text = "{ .reg .b16 x; cvt.rn.bf16.f32 x, $1; st.relaxed.gpu.global.b16 [$0], x; }"
    asm(text, "", address, value)
    text = f"{{ .reg .b16 x; mov.b16 x, {AWAITED}; st.relaxed.gpu.global.b16 [$0], x; }}"
    asm(text, "", spent)


def clear(address: Any, size_bytes: int, thread: Any, threads: int) -> None:
    """Makes memory AWAITED, of which each of so many threads has a share. Before it is written, and
    read, all blocks must have met behind it (`EarlyMeeting.settle`).
    """
    count = size_bytes // ACCESS_BYTES
    steps = -(-count // threads)

    @mgpu_utils.fori(word(steps), [])
    def each_step(step: Any, carry: Any) -> Any:
        place = arith.addi(thread, times(step, threads))
        inside = None if count % threads == 0 else less(place, count)
        only_where(inside, store, further(address, times(place, ACCESS_BYTES)), 0, [word(BOTH)] * 4)
        return carry

    del each_step
