import itertools

import pytest

from pallas_kernels import flash_attention_schedule
from pallas_kernels.flash_attention_schedule import TILE_STEPS, schedule, section, steps


def lists(blocks, *rest):
    counts, tiles = (order := schedule(blocks, *rest))[:blocks], order[blocks:]
    most = len(tiles) // blocks
    assert most * blocks == len(tiles)
    assert max(counts) < most  # the next tile's number is read ahead of the last
    return [list(tiles[i * most :][:count]) for i, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("blocks", "rows", "together", "lengths"),
    [
        (3, 4, 2, (1, 2, 3)),
        (132, 32, 8, tuple(range(1, 17))),
        (5, 5, 5, (1,)),
        (2, 1, 1, (4, 1, 7)),
    ],
)
def test_every_tile_is_taken_once(blocks, rows, together, lengths):
    found = lists(blocks, rows, together, lengths)
    assert sorted(itertools.chain(*found)) == list(range(rows * len(lengths)))
    # Nobody is given a tile while another is free
    loads = [sum(TILE_STEPS + lengths[tile % len(lengths)] for tile in own) for own in found]
    assert max(loads) - min(loads) <= TILE_STEPS + max(lengths)


def test_sections_come_in_turn_and_their_longest_tiles_first():
    assert lists(1, 4, 2, (1, 3, 2)) == [[1, 4, 2, 5, 0, 3, 7, 10, 8, 11, 6, 9]]


@pytest.mark.parametrize("window", [None, 1, 40, 100])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("t", "s"), [(256, 256), (130, 300), (1, 77), (300, 130)])
def test_a_tile_meets_the_blocks_that_some_query_sees(causal, window, t, s):
    for down in range(-(-t // 64)):
        seen = set()
        for query in range(down * 64, min(down * 64 + 64, t)):
            at = s - t + query
            for key in range(s):
                near = window is None or (at - key if causal else abs(at - key)) < window
                if near and (key <= at or not causal):
                    seen.add(key // 32)
        found = steps(down, t, s, tile_rows=64, kv_block=32, causal=causal, window=window)
        assert found == max(len(seen), 1)


def test_a_section_is_whole_groups_that_fit_the_l2(monkeypatch):
    monkeypatch.setattr(flash_attention_schedule, "L2_BYTES", 100)
    assert section(24, 4, 50) == 8
    assert section(24, 4, 10) == 24
    assert section(24, 4, 1000) == 4  # one group at least
