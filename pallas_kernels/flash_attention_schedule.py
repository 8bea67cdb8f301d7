"""Which tiles of queries each block of `flash_attention` takes, and when: plain Python, no JAX.

Tiles of one head read the same keys and values, so heads are taken by sections whose keys and
values stay in the L2; within a section the tiles with most keys come first, and each tile goes to
the block that is free first.
"""

from __future__ import annotations

import functools
import heapq

TILE_STEPS = 2  # what a tile takes beside its blocks of keys, in blocks
L2_BYTES = 24 * 2**20  # of keys and values that the tiles of one section share


def section(rows: int, group: int, kv_bytes: int) -> int:
    """How many heads share the L2 at a time: whole groups of them, a divisor of all.

    rows: heads of all batch rows. group: query heads a key head. kv_bytes: keys and values of one.
    """
    for count in range(rows, group, -1):
        if rows % count == 0 and count % group == 0 and count // group * kv_bytes <= L2_BYTES:
            return count
    return group


def steps(
    down: int, t: int, s: int, *, tile_rows: int, kv_block: int, causal: bool, window: int | None
) -> int:
    """Blocks of keys that the tile of queries number `down` meets, as far as the shapes tell."""
    at, last = s - t + down * tile_rows, s - t + min(down * tile_rows + tile_rows, t) - 1
    low = 0 if window is None else at - window + 1
    high = s - 1 if window is None else last + window - 1
    high = min(last if causal else high, s - 1)
    return max(high // kv_block + 1 - max(low, 0) // kv_block, 1)


@functools.lru_cache(maxsize=64)
def schedule(blocks: int, rows: int, section: int, steps: tuple[int, ...]) -> tuple[int, ...]:
    """How many tiles each block has, then which, as many for each as the most has, and one more.

    Tile `row * len(steps) + down` is that of head `row`; it takes steps[down]. What fills a
    block's list up is 0. Heads of one tile stand side by side.
    """
    lists: list[list[int]] = [[] for _ in range(blocks)]
    free = [(0, block) for block in range(blocks)]  # a heap as it stands
    longest = sorted(range(len(steps)), key=lambda down: (-steps[down], -down))
    for start in range(0, rows, section):
        for down in longest:
            for row in range(start, min(start + section, rows)):
                time, block = free[0]
                lists[block].append(row * len(steps) + down)
                heapq.heapreplace(free, (time + steps[down] + TILE_STEPS, block))
    most = max(map(len, lists)) + 1  # one more: the index of the next tile is read ahead
    counts = [len(tiles) for tiles in lists]
    padded = [tiles + [0] * (most - len(tiles)) for tiles in lists]
    return (*counts, *(tile for tiles in padded for tile in tiles))
