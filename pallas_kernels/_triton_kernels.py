"""Triton code of `triton_rms_norm` and `triton_softmax`; the only file that imports Triton.

Arguments come in the order that jax-triton wants: arrays in, numbers, arrays out, constants. A
tile is [ROWS, BLOCK]; everything between a load and a store is float32. A function with an
underscore is part of a kernel, the others are kernels.

Not `from __future__ import annotations`: Triton reads the annotations.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

# RMSNorm: h = x (+ residual); y = h / sqrt(mean(h^2) + eps) * weight. A program has whole rows.


@triton.jit
def _weight(weight, column, WIDTH: tl.constexpr, ZERO_CENTERED: tl.constexpr, dtype: tl.constexpr):
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    if ZERO_CENTERED:
        return 1.0 + w.to(tl.float32)
    return w.to(dtype).to(tl.float32)


@triton.jit
def _normalise(
    h, weight, y, at, inside, column,
    WIDTH: tl.constexpr, EPS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    dtype = y.dtype.element_ty
    rstd = tl.rsqrt(tl.sum(h * h, axis=1, keep_dims=True) / WIDTH + EPS)
    w = _weight(weight, column, WIDTH, ZERO_CENTERED, dtype)
    normal = h * rstd
    if not ZERO_CENTERED:
        normal = normal.to(dtype).to(tl.float32)
    tl.store(y + at, (normal * w).to(dtype), mask=inside)


@triton.jit
def rms_norm(
    x, weight, rows, y,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    EPS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    at = row.to(tl.int64) * WIDTH + column
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    _normalise(h, weight, y, at, inside, column, WIDTH, EPS, ZERO_CENTERED)


@triton.jit
def rms_norm_residual(
    x, residual, weight, rows, y, total,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    EPS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    at = row.to(tl.int64) * WIDTH + column
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    h = h.to(total.dtype.element_ty)  # what is normalised is the sum as it is stored
    tl.store(total + at, h, mask=inside)
    _normalise(h.to(tl.float32), weight, y, at, inside, column, WIDTH, EPS, ZERO_CENTERED)


@triton.jit
def _normalise_backward(
    h, weight, d_y, d_total, rows, d_h, d_weight,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr, EPS: tl.constexpr, ZERO_CENTERED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Each program takes every PROGRAMS-th tile of rows and has one row of d_weight.

    Of STAGES 2 or more, the copies of the next tiles are under way while one is computed.
    """
    dtype = h.dtype.element_ty
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    # Beside the sums, longer rows and weights do not fit the registers
    kept: tl.constexpr = BLOCK <= 8192
    if kept:
        w = _weight(weight, column, WIDTH, ZERO_CENTERED, dtype)
    for first in tl.range(program * ROWS, rows, PROGRAMS * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < WIDTH)
        at = row.to(tl.int64) * WIDTH + column
        first_time: tl.constexpr = "" if kept else "evict_last"
        value = tl.load(h + at, mask=inside, other=0.0, eviction_policy=first_time)
        d = tl.load(d_y + at, mask=inside, other=0.0, eviction_policy=first_time)
        value, d = value.to(tl.float32), d.to(tl.float32)
        if not kept:
            w = _weight(weight, column, WIDTH, ZERO_CENTERED, dtype)
        g = d * w
        rstd = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / WIDTH + EPS)
        mean = tl.sum(g * value, axis=1, keep_dims=True) * rstd / WIDTH
        if not kept:  # read once more, from the cache
            value = tl.load(h + at, mask=inside, other=0.0, eviction_policy="evict_first")
            d = tl.load(d_y + at, mask=inside, other=0.0, eviction_policy="evict_first")
            value, d = value.to(tl.float32), d.to(tl.float32)
            g = d * _weight(weight, column, WIDTH, ZERO_CENTERED, dtype)
        value = value * rstd
        sums += d * value
        out = rstd * (g - value * mean)
        if RESIDUAL:
            out += tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_h + at, out.to(dtype), mask=inside)
    at = program.to(tl.int64) * WIDTH + column
    tl.store(d_weight + at, tl.sum(sums, axis=0, keep_dims=True), mask=column < WIDTH)


@triton.jit
def rms_norm_backward(
    x, weight, d_y, rows, d_x, d_weight,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr, EPS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    _normalise_backward(
        x, weight, d_y, d_y, rows, d_x, d_weight,
        WIDTH, BLOCK, ROWS, PROGRAMS, STAGES, EPS, ZERO_CENTERED, False,
    )  # fmt: skip


@triton.jit
def rms_norm_residual_backward(
    total, weight, d_y, d_total, rows, d_x, d_weight,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr, EPS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    _normalise_backward(
        total, weight, d_y, d_total, rows, d_x, d_weight,
        WIDTH, BLOCK, ROWS, PROGRAMS, STAGES, EPS, ZERO_CENTERED, True,
    )  # fmt: skip


# Softmax of scale * x. QUERIES is 0, or the T of a causal [.., T, S]: row r sees the first
# S - T + r % T + 1 columns. A row of the mask lies OUTER, MIDDLE and INNER bytes apart from the
# next along three groups of x's leading axes, of which the last two have N_MIDDLE and N_INNER
# rows; 0 where the mask is one for all. MASKED is False where there is none.


@triton.jit
def _seen(row, WIDTH: tl.constexpr, QUERIES: tl.constexpr):
    """How many columns a row sees before the mask."""
    if QUERIES > 0:
        return tl.maximum(WIDTH - QUERIES + row % QUERIES + 1, 0)
    return row * 0 + WIDTH


@triton.jit
def _to_load(row, rows, column, seen, WIDTH: tl.constexpr, QUERIES: tl.constexpr):
    """Which entries to load: those that are seen, up to the end of the last 16."""
    inside = (row < rows) & (column < WIDTH)
    if QUERIES > 0:
        inside = inside & (column < (seen + 15) // 16 * 16)
    return inside


@triton.jit
def _scores(
    x, scale, mask, row, rows, column, seen,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, MASKED: tl.constexpr,
    OUTER: tl.constexpr, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    N_MIDDLE: tl.constexpr, N_INNER: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """scale * x, and -inf where it is not seen."""
    inside = _to_load(row, rows, column, seen, WIDTH, QUERIES)
    z = tl.load(x + (row.to(tl.int64) * WIDTH + column), mask=inside, other=0.0)
    z = z.to(tl.float32) * scale
    visible = (row < rows) & (column < seen)
    if MASKED:
        at = (row // (N_MIDDLE * N_INNER)).to(tl.int64) * OUTER
        at += ((row // N_INNER) % N_MIDDLE).to(tl.int64) * MIDDLE
        at += (row % N_INNER).to(tl.int64) * INNER
        visible = visible & (tl.load(mask + (at + column * COLUMN), mask=inside, other=0) != 0)
    return tl.where(visible, z, float("-inf"))


@triton.jit
def _finite(highest):
    """What to subtract: the row's maximum, or 0 where no entry is seen."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _share(total):
    """One over the total, or 1 where no entry is seen and all shares are 0."""
    return 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _scan(
    x, scale, mask, row, rows, seen, start, stop,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, MASKED: tl.constexpr,
    OUTER: tl.constexpr, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    N_MIDDLE: tl.constexpr, N_INNER: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exp(score - maximum) over a row's columns from start to stop."""
    highest = tl.full([1, 1], float("-inf"), tl.float32)
    total = tl.zeros([1, 1], tl.float32)
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        z = _scores(
            x, scale, mask, row, rows, column, seen, WIDTH, QUERIES, MASKED,
            OUTER, MIDDLE, INNER, N_MIDDLE, N_INNER, COLUMN,
        )  # fmt: skip
        before = highest
        highest = tl.maximum(highest, tl.max(z, axis=1, keep_dims=True))
        here = tl.sum(tl.exp(z - _finite(highest)), axis=1, keep_dims=True)
        total = total * tl.exp(before - _finite(highest)) + here
    return highest, total


@triton.jit
def _write(
    x, scale, mask, y, row, rows, seen, highest, share, start, stop,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, MASKED: tl.constexpr,
    OUTER: tl.constexpr, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    N_MIDDLE: tl.constexpr, N_INNER: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        z = _scores(
            x, scale, mask, row, rows, column, seen, WIDTH, QUERIES, MASKED,
            OUTER, MIDDLE, INNER, N_MIDDLE, N_INNER, COLUMN,
        )  # fmt: skip
        out = tl.exp(z - _finite(highest)) * share
        at = row.to(tl.int64) * WIDTH + column
        tl.store(y + at, out.to(y.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def scale_softmax(
    x, scale, mask, rows, y,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    QUERIES: tl.constexpr, MASKED: tl.constexpr,
    OUTER: tl.constexpr, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    N_MIDDLE: tl.constexpr, N_INNER: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """A program has ROWS whole rows, or one row that it reads twice, BLOCK at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    seen = _seen(row, WIDTH, QUERIES)
    scale = tl.load(scale)
    if BLOCK >= WIDTH:
        column = tl.arange(0, BLOCK)[None, :]
        z = _scores(
            x, scale, mask, row, rows, column, seen, WIDTH, QUERIES, MASKED,
            OUTER, MIDDLE, INNER, N_MIDDLE, N_INNER, COLUMN,
        )  # fmt: skip
        e = tl.exp(z - _finite(tl.max(z, axis=1, keep_dims=True)))
        out = e * _share(tl.sum(e, axis=1, keep_dims=True))
        at = row.to(tl.int64) * WIDTH + column
        inside = (row < rows) & (column < WIDTH)
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
    else:
        highest, total = _scan(
            x, scale, mask, row, rows, seen, 0, _seen(tl.program_id(0), WIDTH, QUERIES),
            WIDTH, BLOCK, QUERIES, MASKED, OUTER, MIDDLE, INNER, N_MIDDLE, N_INNER, COLUMN,
        )  # fmt: skip
        _write(
            x, scale, mask, y, row, rows, seen, highest, _share(total), 0, WIDTH,
            WIDTH, BLOCK, QUERIES, MASKED, OUTER, MIDDLE, INNER, N_MIDDLE, N_INNER, COLUMN,
        )  # fmt: skip


@triton.jit
def scale_softmax_statistics(
    x, scale, mask, rows, highest, total,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    QUERIES: tl.constexpr, MASKED: tl.constexpr,
    OUTER: tl.constexpr, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    N_MIDDLE: tl.constexpr, N_INNER: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """A program has PART columns of one of few long rows; PARTS of them make a row."""
    one = tl.program_id(0) // PARTS
    row = one + tl.zeros([1, 1], tl.int32)
    start = (tl.program_id(0) % PARTS) * PART
    part_highest, part_total = _scan(
        x, tl.load(scale), mask, row, rows, _seen(row, WIDTH, QUERIES),
        start, tl.minimum(start + PART, _seen(one, WIDTH, QUERIES)),
        WIDTH, BLOCK, QUERIES, MASKED, OUTER, MIDDLE, INNER, N_MIDDLE, N_INNER, COLUMN,
    )  # fmt: skip
    here = tl.program_id(0) + tl.zeros([1, 1], tl.int32)
    tl.store(highest + here, part_highest)
    tl.store(total + here, part_total)


@triton.jit
def scale_softmax_write(
    x, scale, mask, highest, total, rows, y,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    ALL_PARTS: tl.constexpr, QUERIES: tl.constexpr, MASKED: tl.constexpr,
    OUTER: tl.constexpr, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    N_MIDDLE: tl.constexpr, N_INNER: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """The second half of `scale_softmax_statistics`; ALL_PARTS is PARTS up to a power of two."""
    one = tl.program_id(0) // PARTS
    row = one + tl.zeros([1, 1], tl.int32)
    part = tl.arange(0, ALL_PARTS)[None, :]
    at = one * PARTS + part
    highests = tl.load(highest + at, mask=part < PARTS, other=float("-inf"))
    totals = tl.load(total + at, mask=part < PARTS, other=0.0)
    row_highest = tl.max(highests, axis=1, keep_dims=True)
    totals = totals * tl.exp(highests - _finite(row_highest))
    start = (tl.program_id(0) % PARTS) * PART
    _write(
        x, tl.load(scale), mask, y, row, rows, _seen(row, WIDTH, QUERIES),
        row_highest, _share(tl.sum(totals, axis=1, keep_dims=True)),
        start, tl.minimum(start + PART, WIDTH),
        WIDTH, BLOCK, QUERIES, MASKED, OUTER, MIDDLE, INNER, N_MIDDLE, N_INNER, COLUMN,
    )  # fmt: skip


# Its gradient, from the result: d_x = scale * y * (d_y - sum(y * d_y)). Where y is 0, and so
# wherever a row does not see, d_x is 0 whatever d_y is.


@triton.jit
def _slopes(
    y, d_y, row, rows, column, seen, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    inside = _to_load(row, rows, column, seen, WIDTH, QUERIES)
    at = row.to(tl.int64) * WIDTH + column
    p = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(d_y + at, mask=inside, other=0.0).to(tl.float32)
    return p, tl.where(p == 0.0, 0.0, slope)


@triton.jit
def _scan_backward(
    y, d_y, row, rows, seen, start, stop,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """The sum of y * d_y over a row's columns from start to stop."""
    sums = tl.zeros([1, BLOCK], tl.float32)
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        p, slope = _slopes(y, d_y, row, rows, column, seen, WIDTH, QUERIES)
        sums += p * slope
    return tl.sum(sums, axis=1, keep_dims=True)


@triton.jit
def _write_backward(
    y, d_y, d_x, scale, row, rows, seen, inner, start, stop,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        p, slope = _slopes(y, d_y, row, rows, column, seen, WIDTH, QUERIES)
        out = scale * p * (slope - inner)
        at = row.to(tl.int64) * WIDTH + column
        tl.store(d_x + at, out.to(d_x.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def scale_softmax_backward(
    y, d_y, scale, rows, d_x,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    seen = _seen(row, WIDTH, QUERIES)
    scale = tl.load(scale)
    if BLOCK >= WIDTH:
        column = tl.arange(0, BLOCK)[None, :]
        p, slope = _slopes(y, d_y, row, rows, column, seen, WIDTH, QUERIES)
        out = scale * p * (slope - tl.sum(p * slope, axis=1, keep_dims=True))
        at = row.to(tl.int64) * WIDTH + column
        inside = (row < rows) & (column < WIDTH)
        tl.store(d_x + at, out.to(d_x.dtype.element_ty), mask=inside)
    else:
        stop = _seen(tl.program_id(0), WIDTH, QUERIES)
        inner = _scan_backward(y, d_y, row, rows, seen, 0, stop, WIDTH, BLOCK, QUERIES)
        _write_backward(y, d_y, d_x, scale, row, rows, seen, inner, 0, WIDTH, WIDTH, BLOCK, QUERIES)


@triton.jit
def scale_softmax_backward_statistics(
    y, d_y, rows, inner,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    one = tl.program_id(0) // PARTS
    row = one + tl.zeros([1, 1], tl.int32)
    start = (tl.program_id(0) % PARTS) * PART
    stop = tl.minimum(start + PART, _seen(one, WIDTH, QUERIES))
    seen = _seen(row, WIDTH, QUERIES)
    part = _scan_backward(y, d_y, row, rows, seen, start, stop, WIDTH, BLOCK, QUERIES)
    tl.store(inner + (tl.program_id(0) + tl.zeros([1, 1], tl.int32)), part)


@triton.jit
def scale_softmax_backward_write(
    y, d_y, scale, inner, rows, d_x,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    ALL_PARTS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    one = tl.program_id(0) // PARTS
    row = one + tl.zeros([1, 1], tl.int32)
    part = tl.arange(0, ALL_PARTS)[None, :]
    inners = tl.load(inner + (one * PARTS + part), mask=part < PARTS, other=0.0)
    start = (tl.program_id(0) % PARTS) * PART
    _write_backward(
        y, d_y, d_x, tl.load(scale), row, rows, _seen(row, WIDTH, QUERIES),
        tl.sum(inners, axis=1, keep_dims=True), start, tl.minimum(start + PART, WIDTH),
        WIDTH, BLOCK, QUERIES,
    )  # fmt: skip
