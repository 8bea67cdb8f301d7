"""How the work of `decode_attention` is dealt out: tiles, blocks of a row, and blocks that add up.

Imported only by decode_attention.py.
"""

from __future__ import annotations

import math

from pallas_kernels import device as device_lib
from pallas_kernels import tuned
from pallas_kernels.decode_attention_kernel import LINE, Config, shared_bytes
from pallas_kernels.decode_attention_parts import padded_heads
from pallas_kernels.device import Device

TILES = (64, 128, 256)
MOST_IN_CLUSTER = 16  # blocks, on Hopper
MOST_PARTS = 32  # that the second kernel adds: it holds them all
MOST_SPLITS = MOST_IN_CLUSTER * MOST_PARTS
MOST_BYTES = 6 * 2**20  # that a block reads, unless there is one row
MOST_SCALES = device_lib.MAX_BOX * LINE  # that one copy brings
LONG_BYTES = 2**28  # that a call reads; adding parts in a second launch costs 2 us


def default_config(
    q,
    k_cache,
    v_cache,
    kv_lengths,
    *,
    window: int | None = None,
    page_table=None,
    k_scale=None,
    v_scale=None,
    splits: int | None = None,
    device: Device,
) -> Config:
    """One launch, if a cluster of blocks for each row and key head can keep the memory busy."""
    del v_cache, kv_lengths, v_scale
    width, group, pairs = _sizes(q, k_cache)
    size = _most_seen(k_cache, page_table, window)
    packed, num_sms = k_scale is not None, device.num_sms
    if splits is not None:
        splits, cluster = _clusters(splits)
    else:
        row_bytes = 2 * size * width * k_cache.dtype.itemsize
        long = pairs * row_bytes > LONG_BYTES or (packed and size > 4096)
        # keys of float8 are widened too: a tile's products hide another's conversions
        wanted = num_sms * (3 if packed and k_cache.dtype != "int8" else 1)
        splits, cluster = _shared_out(pairs, size, num_sms, wanted if long else None)
        if q.shape[0] > 1:  # where other rows are short, a long one is not left to few blocks
            parts = max(splits // cluster, -(-row_bytes // (MOST_BYTES * cluster)))
            splits = min(parts, MOST_PARTS) * cluster
            if long and pairs * splits > wanted and splits <= MOST_PARTS:
                slots = num_sms * (3 if packed else 2)
                most = min(MOST_PARTS, max(splits, size // 128))
                splits, cluster = _whole_waves(pairs, splits, slots, most), 1
    few = pairs * splits <= num_sms  # a block has a multiprocessor for itself
    keys = -(-size // splits)
    if width > 128 or group > 32 or (width > LINE and not few):
        tile = 64  # scores of 64 heads take the registers of wider tiles
    elif width <= LINE and few and keys >= 2048 and (group <= 16 or not packed):
        tile = 256
    else:
        tile = 128
    if packed:
        tile = math.gcd(tile, k_cache.shape[1])
    scales = k_cache.shape[2] if packed else 0
    while tile > TILES[0] and tile * scales > MOST_SCALES:
        tile //= 2
    tiles = -(-keys // tile)
    heads = padded_heads(group, k_cache.dtype)
    for blocks in range(1 if few else 3 if packed else 2, 0, -1):  # of a multiprocessor
        for stages in range(min(3, tiles), min(2, tiles) - 1, -1):
            config = Config(tile, stages, splits, cluster)
            if blocks * shared_bytes(config, width, heads, scales) <= device_lib.SHARED_BYTES:
                return config
    return Config(64, 1, splits, cluster)


def _shared_out(pairs: int, size: int, num_sms: int, wanted: int | None) -> tuple[int, int]:
    """How many blocks share a row and key head, and how many of them a cluster has.

    64 blocks with deep rings read as fast as 128 (H200: 8 heads of 128, 8k keys: 11.5 and 11.7 us).
    Of clusters of 4 or more, not all multiprocessors can be filled: twice 8 x 8 blocks took 1.5
    times as long as once. A block with less than 128 keys only waits. Long calls, and caches of
    bytes, which keep a block busy, want as many blocks as there are multiprocessors: clusters of 2
    fill them (H200, us: 8 rows of 2 heads of 64, 128k keys, 8 blocks in clusters of 8 / 2: 152 /
    120; int8, 8 rows of 8 heads of 128, 32k keys, 4 blocks in one cluster / 2 in one: 163 / 127).
    """
    if wanted is not None:
        cluster = 2 if 2 * pairs <= wanted else 1
        parts = min(wanted // (cluster * pairs), MOST_PARTS, size // (128 * cluster))
        return cluster * max(1, parts), cluster
    for cluster, share in ((16, 0.5), (8, 0.85), (4, 0.85), (2, 1.0)):
        if pairs * cluster <= share * num_sms and cluster * 128 <= size:
            break
    else:
        return 1, 1
    if size <= 1024 * cluster:
        return cluster, cluster
    cluster = min(cluster, 8)
    parts = max(1, int(0.85 * num_sms) // (pairs * cluster))
    return parts * cluster, cluster


def _whole_waves(pairs: int, splits: int, slots: int, most: int) -> int:
    """So many splits, or a few more, that the last blocks come in a wave that is nearly full.

    H200, int8, 64 rows of 8 heads of 128, 32k keys: 2 / 4 splits, 2.6 / 5.2 waves, 1179 / 1127 us.
    """

    def full(number: int) -> float:
        waves = pairs * number / slots
        return waves / -(-waves // 1)

    found = range(splits, min(2 * splits + 1, most) + 1)
    return next((number for number in found if full(number) >= 0.9), splits)


def _clusters(splits: int) -> tuple[int, int]:
    """So many blocks, or a few less, and how many of them add up what they have: all that can."""
    cluster = min(splits, MOST_IN_CLUSTER)
    return min(splits // cluster, MOST_PARTS) * cluster, cluster


def bucket(
    q,
    k_cache,
    v_cache,
    kv_lengths,
    *,
    window: int | None = None,
    page_table=None,
    k_scale=None,
    v_scale=None,
) -> str:
    """The key of a tuned row: rows and keys that they may see up to powers of two, heads as are."""
    del v_cache, kv_lengths, v_scale
    size = _most_seen(k_cache, page_table, window)
    names = [k_cache.dtype.name, f"b{tuned.power_of_two(q.shape[0])}"]
    names += [f"s{tuned.power_of_two(size)}"]
    names += [f"n{q.shape[2]}", f"k{k_cache.shape[2]}", f"h{q.shape[3]}"]
    if page_table is not None:
        names.append(f"page{k_cache.shape[1]}")
    if k_scale is not None:
        names.append(q.dtype.name)
    return "-".join(names)


def _most_seen(k_cache, page_table, window: int | None) -> int:
    """How many keys a row may see at most."""
    size = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    return size if window is None else min(size, window)


def _sizes(q, k_cache) -> tuple[int, int, int]:
    """Head width, query heads a key head, pairs of row and key head."""
    return q.shape[3], q.shape[2] // k_cache.shape[2], q.shape[0] * k_cache.shape[2]


def candidates(q, k_cache, v_cache, kv_lengths, *, device: Device, **keywords) -> list[Config]:
    """What is worth a measurement: other tiles, and other numbers of blocks."""
    default = default_config(q, k_cache, v_cache, kv_lengths, device=device, **keywords)
    found = []
    for tile in TILES:
        for stages in (2, 3, 4):
            for splits in {default.splits // 2, default.splits, 2 * default.splits} - {0}:
                for cluster in {1, _clusters(splits)[1]}:
                    config = Config(tile, stages, splits, cluster)
                    if config_problem(config, q, k_cache) is None:
                        found.append(config)
    return [config for config in dict.fromkeys(found) if config != default]


def config_problem(config: Config, q, k_cache) -> str | None:
    """What the hardware has against a tile."""
    c = config
    width, group, _ = _sizes(q, k_cache)
    packed = k_cache.dtype.itemsize == 1
    heads = padded_heads(group, k_cache.dtype)
    size_bytes = shared_bytes(config, width, heads, k_cache.shape[2] if packed else 0)
    problems = {
        f"tile must be one of {TILES}": c.tile not in TILES,
        f"tile must divide the {k_cache.shape[1]} keys that lie together, which have scales": (
            packed and c.tile in TILES and k_cache.shape[1] % c.tile != 0
        ),
        "so many heads with scales want a smaller tile": (
            packed and c.tile * k_cache.shape[2] > MOST_SCALES
        ),
        "stages must be at least 1": c.stages < 1,
        "splits must be a multiple of cluster, and both at least 1": (
            c.cluster < 1 or c.splits < 1 or c.splits % c.cluster != 0
        ),
        f"a cluster has {MOST_IN_CLUSTER} blocks at most": c.cluster > MOST_IN_CLUSTER,
        f"more than {MOST_PARTS} parts to add": c.splits > c.cluster * MOST_PARTS,
        f"{size_bytes} bytes of shared memory, but a block has {device_lib.SHARED_BYTES}": (
            size_bytes > device_lib.SHARED_BYTES
        ),
    }
    return next((text for text, wrong in problems.items() if wrong), None)
