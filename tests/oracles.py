"""The mathematics in float64 NumPy, without a thought for speed. Imports nothing of ours."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def penalise(
    scores: np.ndarray,
    prompt: list[int],
    output: list[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> np.ndarray:
    """One row [V]: repetition over prompt and output, presence and frequency over the output."""
    scores = scores.astype(np.float64)
    for v in set(prompt) | set(output):
        scores[v] = scores[v] * repetition if scores[v] < 0 else scores[v] / repetition
    for v in set(output):
        scores[v] -= presence + frequency * output.count(v)
    return scores


def filter_scores(
    scores: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """One row [V] over the temperature, -inf where dropped; by sorting, equal scores together."""
    scores = scores.astype(np.float64) / temperature
    if 0 < top_k < len(scores):
        scores = np.where(scores >= np.sort(scores)[-top_k], scores, -np.inf)
    if top_p < 1:
        falling, group = np.unique(-scores, return_inverse=True)
        mass = np.bincount(group, weights=np.exp(log_softmax(scores)))
        above = np.cumsum(mass) - mass
        keep = (above < top_p) | (falling == falling[0])
        scores = np.where(keep[group], scores, -np.inf)
    if min_p > 0:
        probability = np.exp(log_softmax(scores))
        scores = np.where(probability >= min_p * probability.max(), scores, -np.inf)
    return scores


# The ops and the decoder. `dtype` says in what numbers are stored, at the points where any
# implementation must store them (the operands of a product, the result of an op): float64 gives the
# truth, the dtype of a model the plain path, with sums in float32.


def _load(dtype: DTypeLike, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    exact = np.float64 if dtype == np.float64 else np.float32
    return tuple(np.asarray(array, dtype).astype(exact) for array in arrays)


def _store(x: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """`x` rounded to the dtype, in the type that sums are taken in."""
    return _load(dtype, x)[0]


def rms_norm(
    x: np.ndarray,
    weight: np.ndarray,
    *,
    eps: float,
    zero_centered: bool = False,
    d_out: np.ndarray | None = None,
    dtype: DTypeLike = np.float64,
) -> Any:
    """The result; if its cotangent `d_out` is given, those of x and weight instead."""
    x, weight = _load(dtype, x, weight)
    root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    y = x / root
    if d_out is not None:
        g = d_out * (1 + weight if zero_centered else weight)
        d_x = (g - y * np.mean(g * y, axis=-1, keepdims=True)) / root
        return d_x, np.sum((d_out * y).reshape(-1, y.shape[-1]), axis=0)
    if zero_centered:
        return _store(y * (1 + weight), dtype)
    return _store(_store(y, dtype) * weight, dtype)


def layer_norm(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    *,
    eps: float,
    d_out: np.ndarray | None = None,
) -> Any:
    """The result; if its cotangent `d_out` is given, those of x, weight and bias instead."""
    x, weight = _load(np.float64, x, weight)
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps)
    h = centred / deviation
    if d_out is None:
        return h * weight + (0 if bias is None else bias.astype(np.float64))
    (d_out,) = _load(np.float64, d_out)
    g = d_out * weight
    along = h * np.mean(g * h, axis=-1, keepdims=True)
    d_x = (g - g.mean(axis=-1, keepdims=True) - along) / deviation
    rows = tuple(range(x.ndim - 1))
    d_bias = None if bias is None else d_out.sum(axis=rows)
    return d_x, (d_out * h).sum(axis=rows), d_bias


def activate(x: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "relu2":
        return np.maximum(x, 0) ** 2
    if activation == "gelu":
        erf = np.vectorize(math.erf, otypes=[x.dtype])
        return x * (1 + erf(x / math.sqrt(2))) / 2
    assert activation == "gelu_pytorch_tanh"
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def slope(x: np.ndarray, activation: str) -> np.ndarray:
    """The derivative of `activate`."""
    if activation == "silu":
        s = 1 / (1 + np.exp(-x))
        return s * (1 + x * (1 - s))
    if activation == "relu2":
        return 2 * np.maximum(x, 0)
    if activation == "gelu":
        erf = np.vectorize(math.erf, otypes=[x.dtype])
        below = (1 + erf(x / math.sqrt(2))) / 2
        return below + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    assert activation == "gelu_pytorch_tanh"
    t = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return (1 + t) / 2 + x * (1 - t**2) * inner / 2


def glu_gradient(
    gate: np.ndarray, up: np.ndarray, d_out: np.ndarray, *, activation: str
) -> tuple[np.ndarray, np.ndarray]:
    gate, up, d_out = _load(np.float64, gate, up, d_out)
    return d_out * up * slope(gate, activation), d_out * activate(gate, activation)


def glu(
    gate: np.ndarray, up: np.ndarray, *, activation: str, dtype: DTypeLike = np.float64
) -> np.ndarray:
    gate, up = _load(dtype, gate, up)
    return _store(_store(activate(gate, activation), dtype) * up, dtype)


def linear(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    dtype: DTypeLike = np.float64,
) -> np.ndarray:
    x, weight = _load(dtype, x, weight)
    y = _store(x @ weight.T, dtype)
    return y if bias is None else _store(y + _load(dtype, bias)[0], dtype)


GATES = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}  # epilogues: the gate's activation


def matmul(
    a: np.ndarray,
    b: np.ndarray,
    *,
    transpose_b: bool = False,
    epilogue: str | None = None,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    a_scale: np.ndarray | None = None,
    b_scale: np.ndarray | None = None,
    out_scale: np.ndarray | None = None,
    d_out: np.ndarray | None = None,
    dtype: DTypeLike = np.float64,
) -> Any:
    """The result [.., M, F]; if its cotangent `d_out` is given, those of the arrays by name.

    The sums are exact where a and b are integers. Scales of blocks of 128, a_scale [M, K / 128] and
    b_scale [N / 128, K / 128], are told by their shape. With out_scale the result is not rounded
    yet: `saturated` does that.
    """
    if b_scale is not None and np.ndim(b_scale) == 2:
        return _matmul_of_blocks(
            a,
            b,
            a_scale,
            b_scale,
            d_out,
            epilogue=epilogue,
            bias=bias,
            residual=residual,
            out_scale=out_scale,
        )
    a, b = _load(dtype, a, b)
    b = np.swapaxes(b, -1, -2) if transpose_b else b
    product = a @ b
    rows, columns = (np.asarray(1 if x is None else x, a.dtype) for x in (a_scale, b_scale))
    rows = rows[..., None] if rows.ndim else rows
    total = product * rows * columns
    total = total if bias is None else total + np.asarray(bias, a.dtype)
    gate, up = np.split(total, 2, axis=-1) if epilogue in GATES else (total, None)
    activation = GATES.get(epilogue, epilogue)
    if d_out is None:
        out = gate if activation is None else activate(gate, activation)
        out = out if up is None else out * up
        out = out if residual is None else out + np.asarray(residual, a.dtype)
        return _store(out if out_scale is None else out * out_scale, dtype)
    d_out = d_total = np.asarray(d_out, a.dtype)
    if activation is not None:
        d_total = d_out * (1 if up is None else up) * slope(gate, activation)
    if up is not None:
        d_total = np.concatenate([d_total, d_out * activate(gate, activation)], axis=-1)
    d_product = _store(d_total * rows * columns, dtype)
    d_b = np.swapaxes(a, -1, -2) @ d_product
    result = {
        "a": _store(d_product @ np.swapaxes(b, -1, -2), dtype),
        "b": _store(np.swapaxes(d_b, -1, -2) if transpose_b else d_b, dtype),
    }
    if bias is not None:
        result["bias"] = _store(d_total.sum(axis=0), dtype)
    if residual is not None:
        result["residual"] = _store(d_out, dtype)
    for name, scale, other, axis in (
        ("a_scale", a_scale, columns, 1),
        ("b_scale", b_scale, rows, 0),
    ):
        if scale is not None:
            result[name] = (d_total * product * other).sum(axis=axis if np.ndim(scale) else None)
    return result


def _matmul_of_blocks(a, b, a_scale, b_scale, d_out, **rest: Any) -> Any:
    """b is [N, K]: both are numbers times scales, and an ordinary product."""
    a, b, a_scale, b_scale = _load(np.float64, a, b, a_scale, b_scale)
    (n, k), block = b.shape, 128
    wide_a = np.repeat(a_scale, block, axis=-1)[..., :k]
    wide_b = np.repeat(np.repeat(b_scale, block, axis=0), block, axis=1)[:n, :k]
    found = matmul(a * wide_a, b * wide_b, transpose_b=True, d_out=d_out, **rest)
    if d_out is None:
        return found
    starts = np.arange(0, k, block)
    found["a_scale"] = np.add.reduceat(found["a"] * a, starts, axis=-1)
    along = np.add.reduceat(found["b"] * b, starts, axis=-1)
    found["b_scale"] = np.add.reduceat(along, np.arange(0, n, block), axis=0)
    return found | {"a": found["a"] * wide_a, "b": found["b"] * wide_b}


def saturated(x: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers of int8 (without -128) or float8_e4m3fn, as float64; ties go to even."""
    if dtype == "int8":
        return np.clip(np.rint(x), -127, 127)
    assert dtype == "float8_e4m3fn"
    _, exponent = np.frexp(x)  # x = m 2^e with m below 1; three bits follow the leading one
    step = np.exp2(np.maximum(exponent - 1, -6) - 3.0)
    return np.clip(np.rint(x / step) * step, -448, 448)


E2M1 = np.asarray([sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def packed_numbers(packed: Any) -> np.ndarray:
    """[O, I] of a `Packed`, as its docstring says."""
    codes = np.asarray(packed.codes)
    if packed.scheme in ("int4", "nvfp4", "mxfp4"):
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    if packed.scheme == "ternary":
        codes = np.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], -1)
        codes = codes.reshape(len(codes), -1)
    e2m1 = packed.scheme in ("nvfp4", "mxfp4")
    values = E2M1[codes] if e2m1 else codes.astype(np.float64)
    group = packed.group_size or values.shape[1]

    def wide(of_groups: Any) -> np.ndarray:
        return np.repeat(np.asarray(of_groups).T.astype(np.float64), group, axis=1)

    if packed.scheme == "int4":
        values = values - (8 if packed.zero is None else wide(packed.zero))
    if packed.scheme == "ternary":
        values = values - 1
    if packed.scale is not None:
        mx = packed.scheme in ("mxfp4", "mxfp8")
        values = values * (2.0 ** (wide(packed.scale) - 127) if mx else wide(packed.scale))
    if packed.row_scale is not None:
        values = values * np.asarray(packed.row_scale, np.float64)[:, None]
    return values


def frequencies(dim: int, rope: Mapping[str, Any], length: int = 0) -> np.ndarray:
    """Radians a position of each pair; `rope` as in `rope_parameters`, `length` for longrope."""
    result = []
    for i in range(dim // 2):
        f = rope["rope_theta"] ** (-2 * i / dim)
        kind = rope["rope_type"]
        if kind == "linear":
            f /= rope["factor"]
        elif kind == "longrope":
            long = length > rope["original_max_position_embeddings"]
            f /= rope["long_factor" if long else "short_factor"][i]
        elif kind == "llama3":
            wavelength, original = 2 * math.pi / f, rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > original / low:
                f /= rope["factor"]
            elif wavelength > original / high:
                s = (original / wavelength - low) / (high - low)
                f = (1 - s) * f / rope["factor"] + s * f
        elif kind == "yarn":

            def pair_that_turns(times: float) -> float:
                positions = rope["original_max_position_embeddings"] / times
                return dim / 2 * math.log(positions / (2 * math.pi), rope["rope_theta"])

            low, high = pair_that_turns(rope["beta_fast"]), pair_that_turns(rope["beta_slow"])
            if rope["truncate"]:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            s = min(max((i - low) / (high - low or 1e-3), 0), 1)
            f = s * f / rope["factor"] + (1 - s) * f
        else:
            assert kind == "default"
        result.append(f)
    return np.array(result)


def rotate(
    x: np.ndarray, angles: np.ndarray, *, scale: float = 1.0, dtype: DTypeLike = np.float64
) -> np.ndarray:
    """Pairs (i, i + R/2) of x [B, T, N, H] as complex numbers, turned by angles [B, T, R/2]."""
    return turn(x, scale * np.cos(angles), scale * np.sin(angles), dtype=dtype)


def turn(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, dtype: DTypeLike = np.float64
) -> np.ndarray:
    """The same, given cosines and sines [B, T, R/2]."""
    half = cos.shape[-1]
    (x,) = _load(dtype, x)
    cos, sin = (_store(table, dtype)[:, :, None, :] for table in (cos, sin))
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * (cos + 1j * sin)
    return _store(np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1), dtype)


def turn_backward(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, d_out: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The cotangents of x, cos and sin."""
    x, cos, sin, d_out = _load(np.float64, x, cos, sin, d_out)
    half = cos.shape[-1]
    pairs = [z[..., :half] + 1j * z[..., half : 2 * half] for z in (x, d_out)]
    d_angles = np.sum(np.conj(pairs[0]) * pairs[1], axis=2)
    return turn(d_out, cos, -sin), d_angles.real, d_angles.imag


def turn_and_write(
    heads: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    q_heads: int,
    cache: Any,
    norms: Sequence[Any] = (None, None),
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [B, N H], turned, of heads [B, (N + 2 K) H], and the cache's keys and values, k turned.

    cos and sin: [B, H / 2]. A slot that the cache has not is nowhere. norms: of q's heads and of
    k's, before they are turned; None where there is none.
    """
    keys, values = (np.asarray(a).astype(np.float64) for a in (cache.k, cache.v))
    b, s, kv_heads, width = keys.shape
    q, k, v = np.split(heads.reshape(1, b, -1, width), (q_heads, q_heads + kv_heads), axis=2)
    q, k = (
        part if norm is None else rms_norm(part, norm.weight, **norm.keywords)
        for part, norm in zip((q, k), norms, strict=True)
    )
    q, k = (turn(part, cos[None], sin[None]) for part in (q, k))
    for row, slot in enumerate(np.asarray(cache.slots)):
        if 0 <= slot < s:
            keys[row, slot], values[row, slot] = k[0, row], v[0, row]
    return q.reshape(b, -1), keys, values


def rows_by_id(rows: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """For each of `count` ids the sum of its rows [.., D], in float64."""
    total = np.zeros((count, rows.shape[-1]))
    np.add.at(total, ids.reshape(-1), rows.reshape(-1, rows.shape[-1]).astype(np.float64))
    return total


def sees(
    shape: tuple[int, int, int],
    *,
    causal: bool,
    window: int | None = None,
    q_segment_ids: np.ndarray | None = None,
    kv_segment_ids: np.ndarray | None = None,
    kv_lengths: np.ndarray | None = None,
) -> np.ndarray:
    """Which key each query of a call [B, T, S] sees."""
    b, t, s = shape
    lengths = np.full(b, s) if kv_lengths is None else np.asarray(kv_lengths, int)
    key, lengths = np.arange(s), lengths[:, None, None]
    # How far the key lies behind the query, which stands at key length - T + t
    behind = lengths - t + np.arange(t)[:, None] - key
    mask = key < lengths
    if causal:
        mask = mask & (behind >= 0)
    if window is not None:
        mask = mask & (abs(behind) < window)
    if q_segment_ids is not None and kv_segment_ids is not None:
        mask = mask & (q_segment_ids[:, :, None] == kv_segment_ids[:, None, :])
    return np.broadcast_to(mask, shape)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    d_out: np.ndarray | None = None,
    d_lse: np.ndarray | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    return_both: bool = False,
    one_by_one: bool = False,
    dtype: DTypeLike = np.float64,
    **sides: Any,
) -> Any:
    """The result [B, T, N, H]; if its cotangent `d_out` is given, the gradients instead: of q, k
    and v, and with sinks of those; with `return_both` behind the result.

    With `return_weights` the result and what the softmax gave, [B, N, T, S]; with `return_lse` the
    result and the logarithm of the denominator, [B, T, N], whose cotangent is `d_lse`. Neither is
    rounded, nor are the gradients of sinks. As a kernel must, the gradients have the weights and
    the scores' gradients rounded for the products, and the result as it is stored. `one_by_one`:
    products add up in that order, as some CPUs' do in XLA; NumPy's own go by blocks.
    """

    def product(x, y):
        if not one_by_one:
            return x @ y
        total = np.zeros((x.shape[0], y.shape[1]), x.dtype)
        for column, row in zip(x.T, y, strict=True):  # einsum adds by blocks where y is turned
            total += column[:, None] * row
        return total

    (b, t, n, h), (_, s, kv_heads, _) = q.shape, k.shape
    scale = h**-0.5 if scale is None else scale
    mask = sees((b, t, s), causal=causal, **sides)
    q, k, v = _load(dtype, q, k, v)
    number = q.dtype.type
    out, d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    lse, d_sinks = np.zeros((b, t, n), q.dtype), np.zeros(n, q.dtype)
    weights = np.zeros((b, n, t, s), q.dtype) if return_weights else None
    for i, head in np.ndindex(b, n):
        group = head // (n // kv_heads)
        keys, values = k[i, :, group], v[i, :, group]
        scores = product(q[i, :, head], keys.T) * number(scale)
        slope = number(1)
        if softcap is not None:
            bent = np.tanh(scores / number(softcap))
            scores, slope = number(softcap) * bent, 1 - bent**2
        sink = number(-np.inf if sinks is None else sinks[head])
        top = np.maximum(scores.max(axis=-1, initial=-np.inf, where=mask[i]), sink)[:, None]
        top = np.where(top == -np.inf, number(0), top)
        e = np.exp(scores - top, where=mask[i], out=np.zeros_like(scores))
        total = e.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        some = total > 0
        p = np.divide(e, total, out=e, where=some)
        lse[i, :, head] = (top + np.log(total, where=some, out=np.full_like(total, -np.inf)))[:, 0]
        out[i, :, head] = _store(product(_store(p, dtype), values), dtype)
        if weights is not None:
            weights[i, head] = p
        if d_out is not None:
            (d_o,) = _load(dtype, d_out[i, :, head])
            d_v[i, :, group] += product(_store(p, dtype).T, d_o)
            less = (out[i, :, head] * d_o).sum(axis=-1, keepdims=True)
            if d_lse is not None:
                less = less - d_lse[i, :, head, None].astype(q.dtype)
            d_s = _store(p * (product(d_o, values.T) - less) * slope * number(scale), dtype)
            d_q[i, :, head] = product(d_s, keys)
            d_k[i, :, group] += product(d_s.T, q[i, :, head])
            part = np.exp(sink - top, where=some, out=np.zeros_like(top))
            part = np.divide(part, total, out=part, where=some)  # the weight of the sink
            d_sinks[head] -= (part * less).sum()
    if d_out is not None:
        gradients = tuple(_store(x, dtype) for x in (d_q, d_k, d_v))
        gradients = gradients if sinks is None else (*gradients, d_sinks)
        return (out, *gradients) if return_both else gradients
    results = [out, *([] if weights is None else [weights]), *([lse] if return_lse else [])]
    return tuple(results) if len(results) > 1 else out


def scale_softmax(
    x: np.ndarray,
    *,
    scale: float = 1.0,
    mask: np.ndarray | None = None,
    causal: bool = False,
    axis: int = -1,
    d_y: np.ndarray | None = None,
    dtype: DTypeLike = np.float64,
) -> Any:
    """The result; if its cotangent `d_y` is given, those of x and the scale instead, taken from the
    result as it is stored. An entry of -inf is a masked one.
    """
    (x,) = _load(dtype, x)
    keep = np.broadcast_to(True if mask is None else mask, x.shape) & (x != -np.inf)
    if causal:
        t, s = x.shape[-2:]
        keep = keep & (np.arange(s) <= s - t + np.arange(t)[:, None])
    x = np.where(keep, x, 0)
    scale = x.dtype.type(scale)
    top = np.max(np.where(keep, x * scale, -np.inf), axis=axis, keepdims=True)
    e = np.exp(np.where(keep, x * scale - np.where(top == -np.inf, 0, top), -np.inf))
    total = e.sum(axis=axis, keepdims=True)
    y = _store(np.divide(e, total, out=np.zeros_like(e), where=total > 0), dtype)
    if d_y is None:
        return y
    d_y = np.where(keep, _load(dtype, d_y)[0], 0)
    d_scores = y * (d_y - (y * d_y).sum(axis=axis, keepdims=True))
    return _store(d_scores * scale, dtype), (d_scores * x).sum()


def cross_entropy(logits: np.ndarray, targets: np.ndarray, ignore_index: int = -100) -> float:
    """The sum over the targets that count."""
    rows = [(row, target) for row, target in zip(logits, targets, strict=True)]
    return sum(-float(log_softmax(row)[t]) for row, t in rows if t != ignore_index)


def linear_cross_entropy(
    hidden: np.ndarray,
    head: np.ndarray,
    targets: np.ndarray,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[float, np.ndarray, np.ndarray]:
    """Of hidden states [S, D] and a head [V, D]: the sum, and its gradients by both."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    logits, slope = hidden @ head.T, np.ones(())
    if softcap is not None:
        bent = np.tanh(logits / softcap)
        logits, slope = softcap * bent, 1 - bent**2
    counted = targets != ignore_index
    log_p = log_softmax(logits)
    lse = (logits - log_p)[:, 0]
    hit = np.arange(len(targets)), np.where(counted, targets, 0)
    losses = -log_p[hit] + z_loss * lse**2
    d_logits = np.exp(log_p) * (1 + 2 * z_loss * lse)[:, None]
    d_logits[hit] -= 1
    d_logits = d_logits * counted[:, None] * slope
    return float(losses[counted].sum()), d_logits @ head, d_logits.T @ hidden


def decoder(
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    *,
    dtype: DTypeLike = np.float64,
) -> np.ndarray:
    """Logits [T, V] of one row of tokens; `config` has Hugging Face's names and a `rope` a layer
    type, `weights` the names of the Llama family.
    """
    eps, zero_centered = config["rms_norm_eps"], config["zero_centered_norm"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    length, width = len(tokens), config["head_dim"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        weight = weights[f"{name}.weight"]
        return rms_norm(x, weight, eps=eps, zero_centered=zero_centered, dtype=dtype)

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), dtype=dtype)

    (table,) = _load(dtype, weights["embed_tokens.weight"])
    x = table[tokens]
    if config["scale_embedding"]:
        x = _store(x * _store(np.sqrt(x.shape[-1]), dtype), dtype)
    for i, kind in enumerate(config["layer_types"]):
        at, sliding = f"layers.{i}", kind == "sliding_attention"
        rope = (config["sliding_rope"] if sliding else None) or config["rope"]
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (
            project(y, f"{at}.self_attn.{name}_proj").reshape(1, length, n, width)
            for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if config["qk_norm"]:
            q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
        turning = int(width * rope["partial_rotary_factor"])
        angles = np.arange(length)[None, :, None] * frequencies(turning, rope, length)
        q, k = (rotate(z, angles, scale=rope["attention_factor"], dtype=dtype) for z in (q, k))
        y = attention(
            q,
            k,
            v,
            scale=(config["query_pre_attn_scalar"] or width) ** -0.5,
            softcap=config["attn_logit_softcapping"],
            window=config["sliding_window"] if sliding else None,
            dtype=dtype,
        )
        y = y.reshape(length, heads * width)
        y = norm(y, f"{at}.self_attn.attn_sub_norm") if config["sub_norms"] else y
        y = project(y, f"{at}.self_attn.o_proj")
        if config["post_norms"]:
            y = norm(y, f"{at}.post_attention_layernorm")
        x = _store(x + y, dtype)
        before = "pre_feedforward" if config["post_norms"] else "post_attention"
        y = norm(x, f"{at}.{before}_layernorm")
        gate, up = project(y, f"{at}.mlp.gate_proj"), project(y, f"{at}.mlp.up_proj")
        y = glu(gate, up, activation=config["hidden_act"], dtype=dtype)
        y = norm(y, f"{at}.mlp.ffn_sub_norm") if config["sub_norms"] else y
        y = project(y, f"{at}.mlp.down_proj")
        if config["post_norms"]:
            y = norm(y, f"{at}.post_feedforward_layernorm")
        x = _store(x + y, dtype)
    x, head = norm(x, "norm"), weights.get("lm_head.weight", weights["embed_tokens.weight"])
    logits = x @ _load(dtype, head)[0].T  # not rounded: logits are float32
    cap = config["final_logit_softcapping"]
    return logits if cap is None else cap * np.tanh(logits / cap)
