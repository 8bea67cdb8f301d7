"""RoPE of heads of 16-bit numbers: what a thread does, told in PTX.

A block has all heads of a few tokens, and some threads share a token. A thread has 8 pairs side by
side of every so many heads, always the same columns, and holds their cosines and sines for all of
them; of the part that is not turned it has 8 numbers likewise. It loads 16 bytes at a time, all of
them before it stores the first. A token's threads thus read whole halves of heads, whatever their
width. The interpreter, which knows no lanes, checks only what surrounds a block.
Imported only by rope_kernel.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels import _compat
from pallas_kernels.device import ACCESS_BYTES, REGISTERS, THREADS
from pallas_kernels.lane_arithmetic import DTYPES, EACH, all_floats, fused, words_of_floats
from pallas_kernels.lane_code import (
    asm,
    by_thread,
    further,
    less,
    load,
    long,
    only_where,
    store_once,
    times,
    times_long,
    word,
)

ITEMSIZE = ACCESS_BYTES // EACH
MOST_THREADS = 1024  # of a block
OTHER_REGISTERS = 58  # of a thread, beside the words of heads that it holds; as compiled, 25 to 52
MANY_WORDS = 48  # that a thread holds by default; as compiled, 96 registers at most with 44


class Heads(NamedTuple):
    """What there is to turn: so many heads of q and of k, their width, and half of what turns."""

    q: int
    k: int
    width: int
    half: int

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First column and accesses of what a thread has of a head: pairs, then what is left."""
        turned, rest = self.half // EACH, (self.width - 2 * self.half) // EACH
        return [(0, turned), (2 * self.half, rest)] if rest else [(0, turned)]

    @property
    def grain(self) -> int:
        """What threads of a token must be a multiple of, so that each has the same columns."""
        return math.lcm(*(accesses for _, accesses in self.spans))

    @property
    def most_lanes(self) -> int:
        """Threads of a token that have something of it at once."""
        most = (self.q + self.k) * max(accesses for _, accesses in self.spans)
        return -(-most // self.grain) * self.grain

    def words(self, lanes: int) -> int:
        """That each of the token's threads holds."""
        total = self.q + self.k
        heads = [-(-total // (lanes // accesses)) for _, accesses in self.spans]
        return sum(words * count for words, count in zip((8, 4), heads, strict=False))


def problem(tokens: int, lanes: int, heads: Heads, dtype: Any) -> str | None:
    """What keeps blocks of so many tokens, each of which so many threads share, from the heads."""
    if dtype not in DTYPES:
        return f"lanes turn numbers of 16 bits, not {jnp.dtype(dtype).name}"
    if heads.half % EACH or heads.width % EACH:
        return f"halves of {heads.half} of {heads.width} numbers are no multiple of {EACH}"
    threads = tokens * lanes
    if not threads:
        return f"tokens and lanes are {tokens} and {lanes}; both must be 1 at least, or both 0"
    if lanes % heads.grain:
        return f"{lanes} threads for {tokens} tokens are no multiple of {heads.grain} for one"
    if threads % THREADS or threads > MOST_THREADS:
        return f"{threads} threads a block are no multiple of {THREADS} up to {MOST_THREADS}"
    if (words := heads.words(lanes)) + OTHER_REGISTERS > min(256, REGISTERS // threads):
        return f"{words} words of heads do not lie in the registers of one of {threads} threads"
    return None


def default(heads: Heads, dtype: Any) -> tuple[int, int] | None:
    """Tokens a block, and threads of each; None: such heads are not turned here.

    As few tokens as whole warpgroups have work for: H200, 8192 tokens, 32 + 32 heads of 96, 1, 2
    and 4 tokens 50.6, 51.9 and 53.3 us; 32 + 8 of 128, 1 and 2 tokens 42.5 and 43.3.
    """
    if dtype not in DTYPES or heads.half % EACH or heads.width % EACH:
        return None
    for tokens in (2**i for i in range(6)):
        grain = math.lcm(heads.grain, THREADS // math.gcd(THREADS, tokens))
        for lanes in range(grain, min(heads.most_lanes, MOST_THREADS // tokens) + 1, grain):
            if heads.words(lanes) <= MANY_WORDS and not problem(tokens, lanes, heads, dtype):
                return tokens, lanes
    return None


def turned(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    tokens: int,
    lanes: int,
    back: bool,
    plain: Callable[..., tuple[jax.Array, jax.Array]],
    interpret: bool,
) -> list[jax.Array]:
    """q [M, N, H] and k [M, K, H] by cos and sin [M, R2]; back: the other way.

    plain: (q, k, cos, sin) of a token -> q, k, for the interpreter, which knows no lanes.
    """
    heads = Heads(q.shape[1], k.shape[1], q.shape[2], cos.shape[1])
    dtypes = {"q": q.dtype.name, "cos": cos.dtype.name, "sin": sin.dtype.name}
    names = ("q", "k", "cos", "sin", "q_out", "k_out")

    def body(*refs):
        every: dict[str, Any] = dict(zip(names, refs, strict=True))
        if interpret:
            token = {name: ref.at[lax.axis_index("block")] for name, ref in every.items()}
            *both, c, s = (token[name][...] for name in names[:4])
            token["q_out"][...], token["k_out"][...] = plain(*both, c, -s if back else s)
            return

        def turn(at: Any, block: Any) -> None:
            Block(at, block, dtypes, heads, len(q), tokens, lanes, back).run()

        by_thread(turn, every, lax.axis_index("block"))

    how: dict[str, Any] = {"grid": (len(q) if interpret else -(-len(q) // tokens),)}
    if not interpret and (warpgroups := tokens * lanes // THREADS) > 1:
        how |= {"num_threads": warpgroups, "thread_name": "warpgroup"}
    return _compat.kernel(
        body,
        name="rope_backward" if back else "rope",
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)],
        grid_names=("block",),
        interpret=interpret,
        **how,
    )(q, k, cos, sin)


class Block:
    """What a thread of a block does.

    at: addresses of q and q_out [M, N, H], k and k_out [M, K, H], cos and sin [M, R2]. block: which
    one, of these arrays'. count: M. lanes: threads that share a token.
    """

    def __init__(
        self,
        at: Mapping[str, Any],
        block: Any,
        dtypes: Mapping[str, str],
        heads: Heads,
        count: int,
        tokens: int,
        lanes: int,
        back: bool,
    ):
        self.at, self.dtypes, self.heads = at, dtypes, heads
        self.lanes, self.back = lanes, back
        thread, token, self.there = mgpu_utils.thread_idx(), block, None
        self.lane = arith.remui(thread, word(lanes))
        if tokens > 1:
            token = arith.addi(times(block, tokens), arith.divui(thread, word(lanes)))
        if count % tokens:
            self.there = less(token, count)
            token = arith.minui(token, word(count - 1))
        self.token = token
        self.row = {
            name: further(at[name], times_long(token, ITEMSIZE * number * heads.width))
            for name, number in (
                *(("q", heads.q), ("q_out", heads.q)),
                *(("k", heads.k), ("k_out", heads.k)),
            )
        }

    def run(self) -> None:
        c, s = (self._angles(name) for name in ("cos", "sin"))
        s = list(map(_minus, s)) if self.back else s
        dtype, second = self.dtypes["q"], long(ITEMSIZE * self.heads.half)
        loaded = []
        for which, span in enumerate(self.heads.spans):
            for source, target, inside in self._places(*span):
                words = [load(source, 0, 4)]
                if which == 0:
                    words.append(load(further(source, second), 0, 4))
                loaded.append((target, inside, words))
        for target, inside, words in loaded:
            if len(words) == 2:
                x1, x2 = (all_floats(four, dtype) for four in words)
                y1 = map(fused, x1, c, map(arith.mulf, x2, map(_minus, s)))
                y2 = map(fused, x2, c, map(arith.mulf, x1, s))
                words = [words_of_floats(list(y), dtype) for y in (y1, y2)]
            only_where(inside, _store, target, second, words)

    def _angles(self, name: str) -> list[Any]:
        """Of the thread's columns, eight, rounded to the heads' dtype: float32."""
        dtype, held = self.dtypes["q"], self.dtypes[name]
        size = ACCESS_BYTES * (1 + (held == "float32"))
        chunk = arith.remui(self.lane, word(self.heads.half // EACH))
        row = further(self.at[name], times_long(self.token, size * self.heads.half // EACH))
        address = further(row, times(chunk, size))
        words = [x for start in range(0, size, ACCESS_BYTES) for x in load(address, start, 4)]
        if held != dtype:
            words = words_of_floats(all_floats(words, held), dtype)
        return all_floats(words, dtype)

    def _places(self, column: int, accesses: int) -> list[tuple[Any, Any, Any]]:
        """Of a span of every head, where the thread reads, where it writes, and whether there is
        anything (None: there is).
        """
        heads, found = self.heads, []
        head, chunk = (f(self.lane, word(accesses)) for f in (arith.divui, arith.remui))
        start = arith.addi(times(head, ITEMSIZE * heads.width), times(chunk, ACCESS_BYTES))
        start = arith.addi(start, word(ITEMSIZE * column))
        first = {name: further(row, start) for name, row in self.row.items()}
        step = self.lanes // accesses  # heads that are turned side by side

        def address(suffix: str, low: int, inside: Any) -> Any:
            of_q = further(first[f"q{suffix}"], long(ITEMSIZE * low * heads.width))
            if low + step <= heads.q:
                return of_q
            of_k = further(first[f"k{suffix}"], long(ITEMSIZE * (low - heads.q) * heads.width))
            if low < heads.q:
                of_k = arith.select(less(head, heads.q - low), of_q, of_k)
            return of_k if inside is None else arith.select(inside, of_k, self.row[f"k{suffix}"])

        for low in range(0, heads.q + heads.k, step):
            inside = None
            if low + step > heads.q + heads.k:
                inside = less(head, heads.q + heads.k - low)
            source, target = (address(suffix, low, inside) for suffix in ("", "_out"))
            both = inside if self.there is None else self.there
            if inside is not None and self.there is not None:
                both = arith.andi(inside, self.there)
            found.append((source, target, both))
        return found


def _minus(x: Any) -> Any:
    return asm("neg.f32 $0, $1;", "f", x)


def _store(target: Any, second: Any, words: list[list[Any]]) -> None:
    store_once(target, words[0])
    if len(words) == 2:
        store_once(further(target, second), words[1])
