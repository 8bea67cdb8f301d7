"""What the heads of one token see, by the warps of the blocks of `decode_layers` that multiply.

A block has one key head, and of its keys every so many-th turn; a warp has eight of a turn, or
some times eight. Their scores are products of q, whose heads are rows, and keys as they lie in the
cache: four lanes have a key, 16 bytes each at a time, and q alike. As they come, scores are the
right side of a product with the values, of which a lane pairs those of two keys.
A block makes q and the token's key of what the product before gives (decode_layers_turn.py). That
key and its value are the first warp's of a head's first block, as they are: in the cache they are
for later tokens.
Sums that warps have meet on chip, those of several blocks in memory, where a head's first block
awaits the others'.
As in lane_code.py, values are those of one thread. Imported only by decode_layers_lanes.py.
Source of the split and of what is carried: FlashAttention 2, Dao 2023, arXiv:2307.08691.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.attention_reference import UNSEEN
from pallas_kernels.awaited import BOTH, load_awaited
from pallas_kernels.decode_layers_config import KEYS, SPAN, Attend
from pallas_kernels.decode_layers_turn import Turn, Words
from pallas_kernels.device import ACCESS_BYTES, LANES, LOG2E
from pallas_kernels.lane_arithmetic import (
    all_floats,
    floats,
    larger,
    number,
    shuffled,
    words_of_floats,
)
from pallas_kernels.lane_code import (
    accesses_of_thread,
    asm,
    equal,
    further,
    less,
    load_late,
    load_shared,
    load_word,
    mma,
    only_where,
    times,
    times_long,
    unlike,
    without,
    word,
)
from pallas_kernels.quantized_matmul_config import ACROSS, MMA_COLUMNS

AT_ONCE = 8  # blocks' parts that a thread asks for at a time
LINE_BYTES = 128  # of the L2
_OF_KEYS = "m16n8k16.row.col.f32.bf16.bf16.f32"
_OF_VALUES = "m16n8k8.row.col.f32.bf16.bf16.f32"

Part = tuple[Any, Any, list[Any]]  # the largest score, the sum of powers, and four sums of values


class Seen:
    """Which keys the token sees, and which of them are a block's."""

    def __init__(self, attend: Attend, lengths: Any, block: Any):
        """lengths: the address of how many keys there are, the token's own among them."""
        self.attend = attend
        length = arith.maxsi(load_word(lengths), word(1))
        self.end = arith.minsi(length, word(attend.slots))
        self.start = word(0)
        if attend.window is not None:
            most = arith.minui(self.end, word(min(attend.window, attend.slots)))
            self.start = arith.subi(self.end, most)
        count = arith.subi(self.end, self.start)
        turns = arith.divui(arith.addi(count, word(attend.turn_keys - 1)), word(attend.turn_keys))
        blocks = arith.divui(arith.addi(turns, word(attend.turns - 1)), word(attend.turns))
        self.blocks = arith.minui(blocks, word(attend.splits))  # of a key head
        self.head, self.split = (f(block, word(attend.splits)) for f in (arith.divui, arith.remui))
        self.mine = arith.andi(less(self.head, attend.kv_heads), less(self.split, self.blocks))
        left = arith.subi(arith.addi(turns, self.blocks), arith.addi(self.split, word(1)))
        self.turns = arith.divui(left, self.blocks)

    def first(self, turn: Any) -> Any:
        """The first key of one of the block's turns."""
        turn = arith.addi(self.split, arith.muli(turn, self.blocks))
        return arith.addi(self.start, times(turn, self.attend.turn_keys))

    def within(self, key: Any) -> Any:
        """The key, or the last that is seen."""
        return arith.minui(key, arith.subi(self.end, word(1)))


class Asked(NamedTuple):
    """What a lane has before q, k and v are there: where the token's key and value go, its part of
    their heads, and keys and values of the block's first turn.
    """

    slot: Any
    turns: list[Turn]
    loaded: list[Any]


class Attention:
    """Of a layer, a block's part."""

    def __init__(self, attend: Attend, seen: Seen, at: Mapping[str, Any]):
        """at: addresses of qkv [1, (N + 2K) H], heads [1, N H] and parts, float32
        [K, splits - 1, N / K, H] and [K, splits - 1, N / K, 2] behind it, all awaited; of "heads
        spent" and "parts spent", where these will be awaited in a later layer; of what `Turn`
        takes, of slots, where the token's key goes, and of the layer's k and v; on chip of kept.
        """
        self.attend, self.seen, self.at = attend, seen, at
        thread = mgpu_utils.thread_idx()
        self.thread, self.threads = thread, attend.warps * LANES
        self.warp, lane = (f(thread, word(LANES)) for f in (arith.divui, arith.remui))
        self.row, self.across = (f(lane, word(ACROSS)) for f in (arith.divui, arith.remui))
        self.first_head = times(seen.head, attend.group)

    def prefetch(self) -> None:
        """Asks for what the block's first turn takes, which then comes to the L2: keys and values,
        and the weights of norms.
        """
        a = self.attend
        lines = -(-2 * a.width // LINE_BYTES)
        with mgpu_utils.when(self.seen.mine):
            for name in a.norms:
                at = further(self.at[name], times(self.thread, LINE_BYTES))
                only_where(less(self.thread, lines), asm, "prefetch.global.L2 [$0];", "", at)
            for place, inside in accesses_of_thread(a.turn_keys * lines, self.threads):
                down, line = (f(place, word(lines)) for f in (arith.divui, arith.remui))
                key = self.seen.within(arith.addi(self.seen.first(word(0)), down))
                offset = arith.addi(times(self.seen.head, 2 * a.width), times(line, LINE_BYTES))
                for name in "kv":
                    at = further(arith.addi(self.at[name], times_long(key, a.row_bytes)), offset)
                    only_where(inside, asm, "prefetch.global.L2 [$0];", "", at)

    def _ask(self) -> Asked:
        """For what does not wait for q, k and v."""
        a, seen, slot = self.attend, self.seen, load_word(self.at["slots"])
        accesses = accesses_of_thread(a.turn_accesses, self.threads)
        turns = [Turn(a, seen.head, *each, self.at) for each in accesses]
        return Asked(slot, turns, self._loaded(slot, word(0)))

    def run(self, barrier: Callable[[], None]) -> None:
        """All of it. barrier: where the threads meet, all of which must come."""
        with mgpu_utils.when(self.seen.mine):
            asked = self._ask()
            barrier()  # the product before is done with what is kept on chip
            q, own = self._token(asked, barrier)
            each = functools.partial(self._turn, q, asked.slot)
            turns = mgpu_utils.fori(self.seen.turns, [*own, *asked.loaded])(each)
            self._show(list(turns.results)[: len(own)])
            barrier()
            self._join()

    # a warp

    def _token(self, asked: Asked, barrier: Callable[[], None]) -> tuple[list[Words], list[Any]]:
        """What the lane has of q, and what the token's own key and value are: as `_turn` has what
        the first warp has of the keys before its turns. Both go to the cache.
        """
        a, seen = self.attend, self.seen
        at = arith.addi(times(seen.head, 2 * a.width), times(self.row, 2 * a.columns))
        at = further(self.at["qkv"], arith.addi(at, word(2 * a.width * (a.q_heads + a.kv_heads))))
        count = sum(len(turn.heads) for turn in asked.turns)
        places = [(each, 0, 4) for turn in asked.turns for each in turn.heads]
        loaded = load_awaited([*places, *self._places_of_value(at)])
        value = [word for access in loaded[count:] for word in access]
        loaded, first = iter(loaded), less(seen.split, 1)
        for turn in asked.turns:
            both = [next(loaded) for _ in turn.heads]
            turn.put(both, further(self.at["kept"], word(a.heads_at)), asked.slot, first)
        barrier()
        q, k = map(self._head, (arith.minui(self.row, word(a.group - 1)), word(a.group)))
        shown = without(less(asked.slot, seen.end), less(asked.slot, seen.start))
        here = arith.andi(arith.andi(first, shown), less(self.thread, LANES))
        top = arith.select(here, self._products(q, k)[0], number(UNSEEN))
        one = arith.andi(here, less(self.across, 1))
        own = [top, arith.select(one, number(1), number(0))]
        for each in value:
            lower, upper = floats(arith.select(here, each, word(0)), "bfloat16")
            own += [lower, lower, upper, upper]  # of two heads
        return q, own

    def _head(self, row: Any) -> list[Words]:
        """Of a head on chip what the lane has. Rows past the last are like it."""
        a = self.attend
        place = arith.addi(times(row, 2 * a.width), times(self.across, ACCESS_BYTES))
        at = further(self.at["kept"], place)
        return [load_shared(at, a.heads_at + 2 * SPAN * i, 4) for i in range(a.accesses)]

    def _turn(self, q: list[Words], slot: Any, turn: Any, carry: list[Any]) -> list[Any]:
        """What a warp's keys of a turn add. Those of the next one are asked for before."""
        firsts = self._firsts(turn)
        top, total, *rest = carry
        count = self.attend.width * 2 // MMA_COLUMNS
        sums, loaded = rest[:count], iter(rest[count:])
        ahead = self._loaded(slot, arith.addi(turn, word(1)))
        keys, values = zip(
            *((self._keys(loaded), self._values(loaded)) for _ in firsts), strict=True
        )
        scores = [self._scores(q, slot, *each) for each in zip(firsts, keys, strict=True)]
        new_top = top
        for s, _ in (score for pair in scores for score in pair):
            new_top = larger(new_top, s)
        for mask in (1, 2):
            new_top = larger(new_top, shuffled(new_top, mask))
        fewer = _power(arith.subf(top, new_top))
        total, by = arith.mulf(total, fewer), self._of_columns(fewer)
        sums = [arith.mulf(y, by[i % 2]) for i, y in enumerate(sums)]
        weights = []
        for pair in scores:
            powers = []
            for s, there in pair:
                p = arith.select(there, _power(arith.subf(s, new_top)), number(0))
                total = arith.addf(total, p)
                powers.append(p)
            weights += words_of_floats(powers, "bfloat16")
        for weight, pair in zip(weights, values, strict=True):
            sums = self._added(weight, pair, sums)
        return [new_top, total, *sums, *ahead]

    def _firsts(self, turn: Any) -> list[Any]:
        """The first of each eight keys that the warp has in a turn."""
        start = times(self.warp, self.attend.pieces * KEYS)
        first = arith.addi(self.seen.first(turn), start)
        return [arith.addi(first, word(KEYS * i)) for i in range(self.attend.pieces)]

    def _loaded(self, slot: Any, turn: Any) -> list[Any]:
        """The words of a turn's keys and values that a lane has, of each piece: of a key what
        meets q's, and of two the columns of their values; behind the last key that one's. The
        token's may be on their way: its value is zeros, and what its key is spoils but the score of
        that, which does not count.
        """
        a, found = self.attend, []
        start = times(self.seen.head, 2 * a.width)
        for first in self._firsts(turn):
            key = self.seen.within(arith.addi(first, self.row))
            at = arith.addi(self.at["k"], times_long(key, a.row_bytes))
            at = further(at, arith.addi(start, times(self.across, ACCESS_BYTES)))
            for i in range(a.accesses):
                found += load_late(at, 2 * SPAN * i)
            for e in range(2):
                key = arith.addi(arith.addi(first, times(self.across, 2)), word(e))
                key = self.seen.within(key)
                at = further(arith.addi(self.at["v"], times_long(key, a.row_bytes)), start)
                at = further(at, times(self.row, 2 * a.columns))
                words = self._of_value(at, unlike(key, slot))
                found += [word for access in words for word in access]
        return found

    def _of_value(self, at: Any, where: Any) -> list[Words]:
        """What a lane has of a value, whose first number for it lies there; zeros where not."""
        return [load_late(*place, where) for place in self._places_of_value(at)]

    def _places_of_value(self, at: Any) -> list[tuple[Any, int, int]]:
        """An address, an offset and how many words, of each access."""
        words, step = self.attend.columns // 2, 2 * MMA_COLUMNS * self.attend.columns
        return [(at, i, words) for i in range(0, 2 * self.attend.width, step)]

    def _keys(self, loaded: Iterator[Any]) -> list[Words]:
        """Of the words that follow, a key's accesses."""
        return [[next(loaded) for _ in range(4)] for _ in range(self.attend.accesses)]

    def _values(self, loaded: Iterator[Any]) -> list[list[Words]]:
        """Of the words that follow, two values' accesses."""
        words, width = self.attend.columns // 2, self.attend.width
        accesses = width // (MMA_COLUMNS * self.attend.columns)
        return [[[next(loaded) for _ in range(words)] for _ in range(accesses)] for _ in range(2)]

    def _products(self, q: list[Words], keys: list[Words]) -> list[Any]:
        """Of the lane's row and two of eight keys: the score, as an exponent of 2."""
        none = word(0)  # of rows that are not there
        halves = {i: [number(0)] * 4 for i in (0, 2)}
        for left, right in zip(q, keys, strict=True):
            for i, sums in halves.items():
                rows = [left[i], none, left[i + 1], none]
                halves[i] = mma(_OF_KEYS, rows, right[i : i + 2], sums)
        by = number(self.attend.scale * LOG2E)
        return [arith.mulf(arith.addf(halves[0][e], halves[2][e]), by) for e in range(2)]

    def _scores(self, q: list[Words], slot: Any, first: Any, keys: list[Words]) -> list[Any]:
        """Of the lane's row and two of eight keys: the score (UNSEEN: of one that is not seen, or
        is the token's), and whether it counts.
        """
        found = []
        for e, s in enumerate(self._products(q, keys)):
            key = arith.addi(arith.addi(first, times(self.across, 2)), word(e))
            there = without(less(key, self.seen.end), equal(key, slot))
            found.append((arith.select(there, s, number(UNSEEN)), there))
        return found

    def _of_columns(self, value: Any) -> list[Any]:
        """Of a number for the lane's row those of its two columns."""
        text = """{ .reg .b32 x; mov.b32 x, $1; shfl.sync.idx.b32 x, x, $2, 31, 0xffffffff;
            mov.b32 $0, x; }"""
        first = times(self.across, 2 * ACROSS)
        lanes = first, arith.addi(first, word(ACROSS))
        return [asm(text, "f", value, lane, effects=True) for lane in lanes]

    def _added(self, weights: Any, values: list[list[Words]], sums: list[Any]) -> list[Any]:
        """The sums of values of eight keys, times their weights, and what there was: of each word
        of the lane's values, whose two numbers are rows here, those of two heads, columns.
        """
        done = []
        for of_keys in zip(*values, strict=True):
            for both in zip(*of_keys, strict=True):
                left = [  # the lower numbers of two words, the upper ones
                    asm(f"prmt.b32 $0, $1, $2, {order};", "r", *both)
                    for order in ("0x5410", "0x7632")
                ]
                done += mma(_OF_VALUES, left, [weights], sums[len(done) :][:4])
        return done

    def _show(self, carry: list[Any]) -> None:
        """Writes what the warp has of each head on chip."""
        a = self.attend
        top, total, *sums = carry
        for mask in (1, 2):
            total = arith.addf(total, shuffled(total, mask))
        first = times(self.warp, a.group)
        at = further(self.at["kept"], times(arith.addi(first, self.row), 8))
        with mgpu_utils.when(arith.andi(less(self.row, a.group), less(self.across, 1))):
            asm(f"st.shared.v2.f32 [$0 + {a.stats_at}], {{$1, $2}};", "", at, top, total)
        for column in range(2):
            head = arith.addi(times(self.across, 2), word(column))
            at = further(self.at["kept"], times(arith.addi(first, head), 4 * a.width))
            at = further(at, times(self.row, 4 * a.columns))
            only_where(less(head, a.group), self._show_head, at, sums[column::2])

    def _show_head(self, at: Any, sums: list[Any]) -> None:
        """Writes a head's sums, of columns that lie side by side in each access to a value."""
        columns = self.attend.columns
        for i in range(0, len(sums), 4):
            access, inner = divmod(i, columns)
            offset = 4 * (access * MMA_COLUMNS * columns + inner)
            text = f"st.shared.v4.f32 [$0 + {offset}], {{$1, $2, $3, $4}};"
            asm(text, "", at, *sums[i : i + 4])

    # the block, and others

    def _join(self) -> None:
        """Adds up what the warps have, and a head's first block what its others have."""
        first, other = less(self.seen.split, 1), less(word(0), self.seen.split)
        for place, inside in self._places():
            part = joined([self._of_warp(i, place) for i in range(self.attend.warps)])
            only_where(_both(first, inside), self._write_all, place, part)
            only_where(_both(other, inside), self._leave, place, part)

    def _places(self) -> list[tuple[Any, Any]]:
        """A thread's: of which four columns of which head."""
        return accesses_of_thread(self.attend.group * self.attend.width // 4, self.threads)

    def _of_head(self, place: Any) -> Any:
        """Which of the heads that share the key head a place is of."""
        return arith.divui(place, word(self.attend.width // 4))

    def _of_warp(self, warp: int, place: Any) -> Part:
        a = self.attend
        stats_at = further(self.at["kept"], times(self._of_head(place), 8))
        text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {a.stats_at + 8 * warp * a.group}];"
        top, total = asm(text, "ff", stats_at, effects=True)
        at = further(self.at["kept"], times(place, 16))
        text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {4 * warp * a.group * a.width}];"
        return top, total, asm(text, "ffff", at, effects=True)

    def _write(self, place: Any, part: Part) -> None:
        """The result of four columns."""
        _, total, sums = part
        share = asm("rcp.approx.ftz.f32 $0, $1;", "f", total)
        words = words_of_floats([arith.mulf(y, share) for y in sums], "bfloat16")
        at = further(self.at["heads"], times(self.first_head, 2 * self.attend.width))
        text = "st.relaxed.gpu.global.v2.u32 [$0], {$1, $2};"  # others wait for it
        asm(text, "", further(at, times(place, 8)), *words)
        at = further(self.at["heads spent"], times(self.first_head, 2 * self.attend.width))
        asm(text, "", further(at, times(place, 8)), *[word(BOTH)] * 2)

    def _part_at(self, name: str, split: Any, place: Any) -> tuple[Any, Any]:
        """Where the part of a place lies that a block has, not a head's first, and its largest
        score and sum.
        """
        a = self.attend
        block = arith.addi(times(self.seen.head, a.splits - 1), arith.subi(split, word(1)))
        at = further(self.at[name], times(block, 4 * a.group * a.width))
        head = arith.addi(times(block, a.group), self._of_head(place))
        stats_at = further(self.at[name], word(a.parts_stats_at))
        return further(at, times(place, ACCESS_BYTES)), further(stats_at, times(head, 8))

    def _leave(self, place: Any, part: Part) -> None:
        """Writes the block's part of four columns."""
        top, total, sums = part
        of_head = less(arith.remui(place, word(self.attend.width // 4)), 1)
        four = "st.relaxed.gpu.global.v4.b32 [$0], {$1, $2, $3, $4};"
        two = "st.relaxed.gpu.global.v2.b32 [$0], {$1, $2};"
        ones = [word(BOTH)] * 4
        written = {"parts spent": (ones, ones[:2]), "parts": (sums, [top, total])}
        for name, (numbers, stats) in written.items():
            at, stats_at = self._part_at(name, self.seen.split, place)
            asm(four, "", at, *numbers)
            only_where(of_head, asm, two, "", stats_at, *stats)

    def _write_all(self, place: Any, part: Part) -> None:
        """The result of four columns of all blocks' parts, the first one's given."""

        def some(step: Any, carry: list[Any]) -> list[Any]:
            parts: list[Part] = [(carry[0], carry[1], carry[2:])]
            splits = [arith.addi(times(step, AT_ONCE), word(i + 1)) for i in range(AT_ONCE)]
            there = [less(split, self.seen.blocks) for split in splits]
            places = []
            for split, here in zip(splits, there, strict=True):
                at, stats_at = self._part_at("parts", split, place)
                places += [(at, 0, 4, here), (stats_at, 0, 2, here)]
            loaded = load_awaited(places, whole=True)
            for here, sums, stats in zip(there, loaded[::2], loaded[1::2], strict=True):
                top, total = all_floats(stats, "float32")
                top = arith.select(here, top, number(UNSEEN))
                parts.append((top, total, all_floats(sums, "float32")))
            top, total, sums = joined(parts)
            return [top, total, *sums]

        steps = arith.divui(arith.addi(self.seen.blocks, word(AT_ONCE - 2)), word(AT_ONCE))
        top, total, sums = part
        top, total, *sums = mgpu_utils.fori(steps, [top, total, *sums])(some).results
        self._write(place, (top, total, list(sums)))


def joined(parts: Sequence[Part]) -> Part:
    """Several parts as one. Of those whose largest score is UNSEEN nothing is left."""
    top = functools.reduce(larger, (part[0] for part in parts))
    totals, columns = [], []
    for each, total, sums in parts:
        by = _power(arith.subf(each, top))
        totals.append(arith.mulf(total, by))
        columns.append([arith.mulf(y, by) for y in sums])
    added = [functools.reduce(arith.addf, column) for column in zip(*columns, strict=True)]
    return top, functools.reduce(arith.addf, totals), added


def _power(x: Any) -> Any:
    """Of 2."""
    return asm("ex2.approx.ftz.f32 $0, $1;", "f", x)


def _both(a: Any, b: Any) -> Any:
    return a if b is None else arith.andi(a, b)
