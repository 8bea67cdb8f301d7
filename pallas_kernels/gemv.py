"""GEMV: a weight times one to four rows of x, with what stands before and behind it in decoding.

    y = epilogue(norm(x) W^T + bias) + residual

x [*B, I], W [O, I]. A block owns some outputs; a warp has some rows of W at a time, 16 bytes a
thread, and adds up along them. W is asked for first; while it is on its way every block makes
norm(x) anew in its shared memory, which costs no launch and next to no byte. Epilogues need two
outputs at once: gate and up of "swiglu", or the two numbers of a head that "rope" turns by one
angle; so a block takes outputs of both halves. A gradient is the reference's.
Source of the norm: Zhang and Sennrich 2019, arXiv:1910.07467; of the rotation: rope.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat, tuned
from pallas_kernels import device as device_lib
from pallas_kernels.device import ACCESS_BYTES, LANES, SHARED_BYTES, THREADS, WARPS, Device
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.rope import rope_reference

DTYPES = (jnp.bfloat16, jnp.float16)
OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
ITEMSIZE = 2
MAX_ROWS = 4  # of x; more would compute longer than they read


class Norm(NamedTuple):
    """An RMSNorm of x, as in rms_norm.py: weight [I]."""

    weight: Float[Array, " I"]
    eps: float
    zero_centered: bool = False


class Rotary(NamedTuple):
    """cos and sin [*B, H / 2] of x's rows; the outputs are q's, k's and v's heads of H in turn."""

    cos: Float[Array, "*B H2"]
    sin: Float[Array, "*B H2"]
    q_heads: int
    kv_heads: int


class Cache(NamedTuple):
    """Keys and values [B, S, K, H], and the slot of each row, int32 [B], that its token goes to."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    slots: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Outputs of each half that a block owns, and inputs that it asks for at once."""

    outputs: int
    inputs: int


@dataclasses.dataclass(frozen=True)
class _Static:
    config: Config
    interpret: bool
    out_dtype: str
    epilogue: str | None
    eps: float = 0.0
    zero_centered: bool = False
    heads: tuple[int, int] = (0, 0)  # of q, of k


def gemv(
    x: Float[Array, "*B I"],
    weight: Float[Array, "O I"],
    *,
    norm: Norm | None = None,
    bias: Float[Array, " O"] | None = None,
    epilogue: str | None = None,
    residual: Float[Array, "*B F"] | None = None,
    rotary: Rotary | None = None,
    cache: Cache | None = None,
    out_dtype: Any = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Any:
    """epilogue(norm(x) W^T + bias) + residual: [*B, F]; sums in float32.

    epilogue "swiglu": the O = 2F outputs are gate, then up, and the result is silu(gate) * up.
    "rope": heads of q and k are turned by `rotary` as rope.py does, and the result is
    (q [*B, N H], k and v side by side [*B, 2 K H]); it has no residual. With a `cache`, whose rows
    are x's, it is (q, cache.k, cache.v) with the tokens in their slots: in the cache's own memory
    if nothing else needs that, and nowhere if a slot is past S. Otherwise F is O.
    Dtypes: x and W both bfloat16 or float16; other arrays any float; norm(x) is rounded to x's
    dtype and "rope" to it before turning, all else once, to `out_dtype`: bfloat16, float16 or
    float32, x's if None.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for what `why_not` says.
    """
    rest = {
        "norm": norm,
        "bias": bias,
        "epilogue": epilogue,
        "residual": residual,
        "rotary": rotary,
        "cache": cache,
        "out_dtype": out_dtype,
    }
    check(x, weight, **rest)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    if (reason := why_not(x, weight, **rest, device=device)) is not None:
        raise NotImplementedError(f"gemv: cannot run this call: {reason}")
    if config is not None and (reason := problem(config, x, weight, **rest)):
        raise ValueError(f"gemv: {config}: {reason}")
    if config is None:
        config = tuned.lookup("gemv", bucket(x, weight, **rest), device, Config)
    config = config or default_config(x, weight, **rest, device=device)
    static = _Static(config, interpret, jnp.dtype(out_dtype or x.dtype).name, epilogue)
    angles = None
    if norm is not None:
        static = dataclasses.replace(static, eps=norm.eps, zero_centered=norm.zero_centered)
    if rotary is not None:
        static = dataclasses.replace(static, heads=(rotary.q_heads, rotary.kv_heads))
        angles = tuple(a.reshape(-1, a.shape[-1]) for a in (rotary.cos, rotary.sin))
    rows, residual = (None if a is None else a.reshape(-1, a.shape[-1]) for a in (x, residual))
    scale = None if norm is None else norm.weight
    y: Any = _gemv(static, rows, weight, scale, bias, residual, angles, cache)
    if cache is not None:
        return y[0].reshape(*x.shape[:-1], -1), *y[1:]
    return jax.tree.map(lambda part: part.reshape(*x.shape[:-1], part.shape[-1]), y)


def gemv_reference(
    x,
    weight,
    *,
    norm=None,
    bias=None,
    epilogue=None,
    residual=None,
    rotary=None,
    cache=None,
    out_dtype=None,
) -> Any:
    """The mathematics in plain JAX."""
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if norm is not None:
        normed: Any = rms_norm_reference(
            x, norm.weight, eps=norm.eps, zero_centered=norm.zero_centered
        )
        x = normed
    wide = lambda a: a.astype(jnp.float32).reshape((1,) * (x.ndim - a.ndim) + a.shape)  # noqa: E731
    y = jnp.matmul(x, weight.T, preferred_element_type=jnp.float32)
    y = y if bias is None else y + wide(bias)
    if epilogue == "swiglu":
        gate, up = jnp.split(y, 2, axis=-1)
        y = jax.nn.silu(gate) * up
    if rotary is None:
        return (y if residual is None else y + wide(residual)).astype(out_dtype)
    heads = y.astype(x.dtype).reshape(-1, y.shape[-1])
    q, *rest = turn_and_write(heads, rotary, cache)
    if cache is None:
        rest = [jnp.concatenate([part.reshape(len(heads), -1) for part in rest], axis=-1)]
        rest = [part.reshape(*x.shape[:-1], -1).astype(out_dtype) for part in rest]
    return q.reshape(*x.shape[:-1], -1).astype(out_dtype), *rest


def turn_and_write(heads, rotary, cache=None):
    """q [B, N H] of heads of q, k and v side by side, turned, and k and v: [B, K, H], or those of
    the cache with these in their slots.
    """
    width = 2 * rotary.cos.shape[-1]
    places = (rotary.q_heads, rotary.q_heads + rotary.kv_heads)
    q, k, v = jnp.split(heads.reshape(1, len(heads), -1, width), places, axis=2)
    q, k = rope_reference(q, k, *(a.reshape(1, -1, width // 2) for a in rotary[:2]))
    k, v = (k[0], v[0]) if cache is None else write(cache, k[0], v[0])
    return q.reshape(len(heads), -1), k, v


def write(cache: Cache, k: Float[Array, "B K H"], v: Float[Array, "B K H"]) -> tuple[Array, Array]:
    """The cache's keys and values with one token more a row."""
    # XLA makes one kernel of many updates, and two of one: a head is an update of its own
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in k.shape[:2])
    at = (rows[:, None], cache.slots[:, None], heads[None, :])
    held = ((cache.k, k), (cache.v, v))
    k, v = (a.at[at].set(new.astype(a.dtype), mode="drop", unique_indices=True) for a, new in held)
    return k, v


def why_not(
    x,
    weight,
    *,
    norm=None,
    bias=None,
    epilogue=None,
    residual=None,
    rotary=None,
    cache=None,
    out_dtype=None,
    device: Device | None = None,
) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del norm, bias, residual, out_dtype
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    if cache is not None and not _compat.WRITES_REFERENCES:
        return "jax 0.10 has no kernels that write into what they are given"
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return f"takes bfloat16 or float16, got x {x.dtype} and a weight {weight.dtype}"
    m, (o, i) = math.prod(x.shape[:-1]), weight.shape
    if 0 in (m, o, i):
        return f"nothing to multiply: x is {list(x.shape)}, the weight {[o, i]}"
    if m > MAX_ROWS:
        return f"takes {MAX_ROWS} rows of x at most, got {m}"
    if i % THREADS:
        return f"takes inputs in multiples of {THREADS}, got {i}"
    if m * i * ITEMSIZE > SHARED_BYTES - 4096:
        return f"{m} x {i} inputs do not fit on chip"
    span = _span(o, epilogue, rotary)
    if span % grain(i):
        return f"takes outputs in multiples of {grain(i)}, got {span}"
    return None


def _span(o: int, epilogue: str | None, rotary: Any) -> int:
    """Outputs side by side, each of which has its partner one span further."""
    if rotary is not None:
        return rotary.cos.shape[-1]
    return o // 2 if epilogue == "swiglu" else o


def _lanes_across(i: int) -> int:
    """Lanes that share a row of the weight, so that whole accesses fill it."""
    return next(n for n in (32, 16) if i % (n * ACCESS_BYTES // ITEMSIZE) == 0)


def grain(i: int) -> int:
    """Outputs that the warps of a block have at a time, for i inputs."""
    return WARPS * LANES // _lanes_across(i)


def problem(config: Config, x, weight, *, epilogue=None, rotary=None, **rest: Any) -> str | None:
    """What speaks against the config."""
    del rest
    o, i = weight.shape
    line, span = _lanes_across(i) * ACCESS_BYTES // ITEMSIZE, _span(o, epilogue, rotary)
    if config.outputs < 1 or config.outputs % grain(i) or span % config.outputs:
        return f"outputs must be a multiple of {grain(i)} that divides {span}"
    if config.inputs < line or config.inputs % line:
        return f"inputs must be a multiple of {line}"
    return None


def default_config(
    x, weight, *, epilogue=None, rotary=None, device: Device | None = None, **rest: Any
) -> Config:
    """Small blocks, so that many are on a multiprocessor; a thread of theirs has four accesses
    under way, eight where rows are long. One row of x, bfloat16, H200: the products of a layer of
    Llama-3.1-8B take 107 us so, and 114 with as many under way as registers hold.
    """
    del device, rest
    i = weight.shape[1]
    line, halves = _lanes_across(i) * ACCESS_BYTES // ITEMSIZE, 1 if epilogue is None else 2
    at_once = (4 if i <= 4096 else 8) // halves
    return Config(grain(i), line * min(i // line, at_once))


def bucket(x, weight, *, norm=None, epilogue=None, **rest: Any) -> str:
    """The key of a tuned row: all sizes as they are."""
    del rest
    o, i = weight.shape
    kind = f"{'norm-' if norm is not None else ''}{epilogue or 'plain'}"
    return f"{x.dtype.name}-m{math.prod(x.shape[:-1])}-n{o}-k{i}-{kind}"


def check(x, weight, *, norm, bias, epilogue, residual, rotary, cache, out_dtype) -> None:
    """Refuses what no implementation of the op can take."""
    arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    arrays |= {"norm's weight": norm and norm.weight}
    for name, a in arrays.items():
        if a is not None and not jnp.issubdtype(a.dtype, jnp.floating):
            raise ValueError(f"gemv: {name} is {a.dtype}; it must be floating point")
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"gemv: x {list(x.shape)} and the weight {list(weight.shape)} are not [*B, I] and "
            "[O, I]"
        )
    o, i = weight.shape
    if epilogue not in (None, "swiglu", "rope"):
        raise ValueError(f"gemv: epilogue {epilogue!r} is not None, 'swiglu' or 'rope'")
    if epilogue == "swiglu" and o % 2:
        raise ValueError(f"gemv: 'swiglu' needs two halves of outputs, got {o}")
    if (epilogue == "rope") != (rotary is not None):
        raise ValueError("gemv: 'rope' and rotary go together, only one of them was given")
    lead, f = x.shape[:-1], o // 2 if epilogue == "swiglu" else o
    wanted = {"norm's weight": (i,), "bias": (o,), "residual": (*lead, f)}
    for name, shape in wanted.items():
        if arrays[name] is not None and arrays[name].shape != shape:
            raise ValueError(f"gemv: {name} must be {list(shape)}, got {list(arrays[name].shape)}")
    if rotary is not None:
        width = 2 * rotary.cos.shape[-1]
        heads = rotary.q_heads + 2 * rotary.kv_heads
        if rotary.cos.shape != (*lead, width // 2) or rotary.sin.shape != rotary.cos.shape:
            raise ValueError(
                f"gemv: cos {list(rotary.cos.shape)} and sin {list(rotary.sin.shape)} must be "
                f"{list(lead)} and half a head"
            )
        if heads * width != o or residual is not None:
            raise ValueError(
                f"gemv: 'rope' takes no residual, and {o} outputs are not {heads} heads of {width}"
            )
    if cache is not None:
        if rotary is None:
            raise ValueError("gemv: a cache takes what 'rope' makes, and the epilogue is another")
        own = math.prod(lead), cache.k.shape[1], rotary.kv_heads, 2 * rotary.cos.shape[-1]
        kinds = {(a.shape, a.dtype) for a in cache[:2]}
        if kinds != {(own, jnp.dtype(out_dtype or x.dtype))} or cache.slots.shape != own[:1]:
            raise ValueError(
                f"gemv: the cache's keys, values and slots must be {list(own)} twice, of the "
                f"result's dtype, and {[own[0]]}, got {cache.k.dtype}{list(cache.k.shape)}, "
                f"{cache.v.dtype}{list(cache.v.shape)} and {list(cache.slots.shape)}"
            )
    if jnp.dtype(out_dtype or x.dtype) not in OUT_DTYPES + (x.dtype,):
        raise ValueError(f"gemv: out_dtype {out_dtype} is not bfloat16, float16 or float32")


def _products(static: _Static, x, weight, norm, bias, residual, angles, cache):
    config, interpret = static.config, static.interpret
    dtype, out_dtype = x.dtype, jnp.dtype(static.out_dtype)
    (m, i), o = x.shape, weight.shape[0]
    half = angles[0].shape[1] if angles else o // 2 if static.epilogue else o
    starts_of = _starts(static, half)
    across, vector = _lanes_across(i), ACCESS_BYTES // ITEMSIZE
    down, line = LANES // across, across * vector
    lines, step = i // line, config.inputs // line
    layout = _compat.tiled_layout(
        ((WARPS * down, line), (down, line), (vector,)), warp_dims=(-5, -4), lane_dims=(-3, -2)
    )
    each = math.gcd(i // THREADS, vector)  # numbers of a row of x side by side in a thread
    along = plgpu.Layout.WG_STRIDED((i,), vec_size=each)

    def load(ref, of):
        return ref[...] if interpret else _compat.load(ref, of, optimized=False)

    def wide(ref, of):
        return load(ref, of).astype(jnp.float32)

    def lay_out(value):
        return value if interpret else plgpu.layout_cast(value, layout)

    def prepared(x_ref, norm_ref, one):
        """norm(x)'s row `one`, rounded."""
        row = wide(x_ref.at[one], along)
        if norm_ref is None:
            return row.astype(dtype)
        scale = lax.rsqrt(jnp.sum(row * row) / i + static.eps)
        weights = wide(norm_ref, along)
        if static.zero_centered:
            return (row * scale * (1.0 + weights)).astype(dtype)
        weights = weights.astype(dtype).astype(jnp.float32)
        return ((row * scale).astype(dtype).astype(jnp.float32) * weights).astype(dtype)

    def body(x_ref, weight_ref, norm_ref, bias_ref, residual_ref, angle_refs, held, *rest):
        *out_refs, x_s = rest
        block = lax.axis_index("block")
        starts, out_at = starts_of(block)

        def fetch(first, count):
            return [
                [
                    load(
                        weight_ref.at[
                            pl.ds(start, config.outputs), pl.ds((first + n) * line, line)
                        ],
                        layout,
                    )
                    for n in range(count)
                ]
                for start in starts
            ]

        def multiply(weights, first, sums):
            for n in range(len(weights[0])):
                for one in range(m):
                    left = wide(x_s.at[one, pl.ds((first + n) * line, line)], layout.reduce(0))
                    left = lay_out(lax.broadcast_in_dim(left, (config.outputs, line), (1,)))
                    for part, row in zip(weights, sums, strict=True):
                        row[one] = row[one] + left * part[n].astype(jnp.float32)
            return sums

        ahead = fetch(0, min(step, lines))
        for one in range(m):
            x_s.at[one][...] = prepared(x_ref, norm_ref, one)
        plgpu.commit_smem()  # all threads have written
        zeros = lay_out(jnp.zeros((config.outputs, line), jnp.float32))
        sums = multiply(ahead, 0, [[zeros] * m for _ in starts])
        if lines > step:
            whole = lines // step
            sums = lax.fori_loop(
                1, whole, lambda n, s: multiply(fetch(n * step, step), n * step, s), sums
            )
            sums = multiply(fetch(whole * step, lines % step), whole * step, sums)
        for one in range(m):
            ys = [jnp.sum(row[one], axis=1) for row in sums]
            column = layout.reduce(1)
            if bias_ref is not None:
                ys = [
                    y + wide(bias_ref.at[pl.ds(start, config.outputs)], column)
                    for y, start in zip(ys, starts, strict=True)
                ]
            if static.epilogue == "swiglu":
                ys = [jax.nn.silu(ys[0]) * ys[1]]
            if static.epilogue == "rope":
                ys = turned(ys, angle_refs, one, block, column)
            if residual_ref is not None:
                place = pl.ds(starts[0], config.outputs)
                ys = [ys[0] + wide(residual_ref.at[one, place], column)]
            for wanted, *targets in out_at(out_refs, held, one):

                @pl.when(wanted)
                def _(ys=ys, targets=targets):
                    for y, target in zip(ys, targets, strict=True):
                        target[...] = y.astype(out_dtype)

    def turned(ys, angle_refs, one, block, column):
        first = lax.rem(block, half // config.outputs) * config.outputs
        head = lax.div(block, half // config.outputs)
        here = (head < sum(static.heads)).astype(jnp.float32)  # v's heads stay
        cos, sin = (
            wide(ref.at[one, pl.ds(first, config.outputs)], column).astype(dtype)
            for ref in angle_refs
        )
        cos = cos.astype(jnp.float32) * here + (1 - here)
        sin = sin.astype(jnp.float32) * here
        left, right = (y.astype(dtype).astype(jnp.float32) for y in ys)
        return [left * cos - right * sin, right * cos + left * sin]

    widths = [o // 2 if static.epilogue == "swiglu" else o]
    if angles:
        widths = [2 * half * static.heads[0], 4 * half * static.heads[1]]
    held = None
    if cache is not None:
        widths.pop()
        held = jax.new_ref(cache.k), jax.new_ref(cache.v), cache.slots
    results = _compat.kernel(
        body,
        name="gemv_" + "norm_" * (norm is not None) + (static.epilogue or "plain"),
        out_type=[jax.ShapeDtypeStruct((m, width), out_dtype) for width in widths],
        scratch_types=[plgpu.SMEM((m, i), dtype)],
        grid=(o // (config.outputs * (1 if static.epilogue is None else 2)),),
        grid_names=("block",),
        interpret=interpret,
        approx_math=True,
    )(x, weight, norm, bias, residual, angles, held)
    if held is not None:
        return results[0], jax.freeze(held[0]), jax.freeze(held[1])
    return tuple(results) if angles else results[0]


def _starts(static: _Static, half: int):
    """Of a block: where its outputs begin; and of a row, what they are written to: (whether, for
    each of them a reference), of which one holds.
    """
    size, (q_heads, kv_heads) = static.config.outputs, static.heads

    def plain(block):
        start = block * size
        starts = [start] if static.epilogue is None else [start, start + half]
        place = pl.ds(start, size)
        return starts, lambda refs, held, one: [(block >= 0, refs[0].at[one, place])]

    def of_heads(block):
        head = lax.div(block, half // size)
        start = 2 * half * head + lax.rem(block, half // size) * size
        starts = [start, start + half]

        def out_at(refs, held, one):
            own = (head < q_heads, *(refs[0].at[one, pl.ds(place, size)] for place in starts))
            if held is None:
                before = 2 * half * q_heads
                places = (pl.ds(place - before, size) for place in starts)
                return [own, (head >= q_heads, *(refs[1].at[one, place] for place in places))]
            slot = held[2][one]
            fits = (slot >= 0) & (slot < held[0].shape[1])
            found = [own]
            for which, ref in enumerate(held[:2]):
                mine = head - q_heads - which * kv_heads
                places = (pl.ds(place - 2 * half * head, size) for place in starts)
                whether = (mine >= 0) & (mine < kv_heads) & fits
                found.append((whether, *(ref.at[one, slot, mine, place] for place in places)))
            return found

        return starts, out_at

    return of_heads if static.epilogue == "rope" else plain


def _plain(static: _Static, x, weight, norm, bias, residual, angles, cache):
    return gemv_reference(
        x,
        weight,
        norm=None if norm is None else Norm(norm, static.eps, static.zero_centered),
        bias=bias,
        epilogue=static.epilogue,
        residual=residual,
        rotary=None if angles is None else Rotary(angles[0], angles[1], *static.heads),
        cache=cache,
        out_dtype=static.out_dtype,
    )


def _forward(static: _Static, *arrays: Any):
    return _gemv(static, *arrays), arrays


def _backward(static: _Static, arrays: Any, d_y: Any):
    return jax.vjp(functools.partial(_plain, static), *arrays)[1](d_y)


_gemv = jax.custom_vjp(_products, nondiff_argnums=(0,))
_gemv.defvjp(_forward, _backward)
_gemv = jax.jit(_gemv, static_argnums=0)  # calls alike share one compiled kernel
