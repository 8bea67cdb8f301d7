"""Linear cross entropy: -log softmax(softcap(hidden @ head.T))[target], without storing the logits.

hidden [T, D], head [V, D], targets [T]. With x the logit of a row, in bits, of which x* is the
target's, the first product leaves for each row only the float32 sum of 2^(x - r) over all words but
the target, and if gradients are wanted the numbers E = 2^(x - r) themselves, in bfloat16. The
reference r is known before: x* + 90. So the loss is log1p(sum / 2^(x* - r)), and p = E / (sum +
2^(x* - r)) needs no second look at the logits: what normalises a row is a factor of its hidden
state in one product of the backward pass and of the result in the other.

    forward    logits and E          2 T V D operations, writes E
    backward   d_hidden = p W - W*   2 T V D, reads E and the head
               d_head = p^T h        2 T V D, reads E, writes d_head

The targets' own terms are T numbers put into E before the backward products. That is three
products where recomputing the logits needs four, and 6 T V bytes to and from memory: at T = D =
4096 and V = 128256 12.9 instead of 17.2 * 10^12 operations (16.4 ms against 21.8 at 790 TFLOP/s)
and 3.2 GB, of which nothing waits (a pass of its own over E would take 0.5 ms). A reference that is
no maximum holds as long as a loss is below 130 nats: a row that passes that makes the kernel start
again, with the maxima of the rows, which costs two products more (and where none does, two empty
launches).

What E costs in memory: with T <= D and a bfloat16 head nothing but one slab, for E [V, T] then lies
in the memory of d_head [V, D], which replaces it slab by slab. Else 2 T V bytes, or 1 GiB: more
tokens are taken chunk by chunk, their gradients made in the forward pass and added in float32.
`cross_entropy_kernel` says what a block does.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int, Integer

from pallas_kernels import _compat, soft_cap
from pallas_kernels import cross_entropy_kernel as kernels
from pallas_kernels import device as device_lib
from pallas_kernels.cross_entropy_kernel import TILE_K, TILE_M, TILE_N
from pallas_kernels.device import LOG2E, Device
from pallas_kernels.matmul_finish import precision
from pallas_kernels.options import check_arrays, check_number, check_options
from pallas_kernels.packed import Packed
from pallas_kernels.quantize import dequantize
from pallas_kernels.whole_number import is_whole

REDUCTIONS = ("mean", "sum")
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
EXPS_BYTES = 2**30  # of the exponentials of a chunk, where they have memory of their own
# Bits between the reference and the target: a bfloat16 reaches from -126 to 127, so words of
# 2^-36 and more of a row are kept where the target is the likeliest, and losses up to 190 bits
HEADROOM, MOST = 90.0, 2.0**100
LEAST_WEIGHT = 2.0**-20  # of a row: z_loss may bring it to 0, by which nothing can be divided


@dataclasses.dataclass(frozen=True)
class Config:
    """chunk: tokens whose exponentials are in memory at a time. slab: rows of the head whose
    exponentials have memory of their own where the others lie in the gradient's.
    """

    chunk: int = 8192
    slab: int = 16896  # 2112 tiles of 4096 columns: 16 of each of 132 multiprocessors


def linear_cross_entropy(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"] | Packed,
    targets: Integer[Array, " T"],
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, ""]:
    """The mean ("sum": the sum) of lse - logit[target] + z_loss * lse**2 over the counted targets.

    Targets are already shifted; those that are `ignore_index` do not count, and have zeros for
    gradients; the mean of none is 0. lse is the log-sum-exp of a row's logits, float32, in nats;
    with `softcap` a logit x is softcap * tanh(x / softcap). A target outside the vocabulary makes
    the loss NaN. The same call gives the same bits.
    Dtypes: hidden bfloat16; head bfloat16, float16 or float32, cast to bfloat16 for the products,
    whose sums are float32; targets any integers. A gradient has the dtype of what it is of; a
    packed head has none, and its numbers are in memory once, in bfloat16.
    Raises: ValueError if shapes or dtypes disagree, or for a number that cannot be.
    NotImplementedError without a Hopper GPU (unless `interpret`), or for what `why_not` says.
    """
    check("linear_cross_entropy", hidden, head, targets, softcap, z_loss, ignore_index=ignore_index)
    check_options("linear_cross_entropy", config, Config, interpret=interpret)
    if hidden.ndim != 2:
        raise ValueError(f"linear_cross_entropy: hidden must be [T, D], got {list(hidden.shape)}")
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"linear_cross_entropy: no reduction is named {reduction!r}; there are "
            f"{', '.join(REDUCTIONS)}"
        )
    if isinstance(head, Packed):
        head = jax.lax.stop_gradient(dequantize(head, hidden.dtype))
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    if reason := why_not(hidden, head, targets, softcap=softcap, device=device):
        raise NotImplementedError(f"linear_cross_entropy: cannot run this call: {reason}")
    if config is not None and (problem := _config_problem(config)):
        raise ValueError(f"linear_cross_entropy: {config}: {problem}")
    config = config or default_config(hidden, head)
    cap = None if softcap is None else float(softcap)
    static = _Static(config, ignore_index, cap, float(z_loss), device.num_sms, interpret)
    targets = as_int32(targets)
    total = _loss(static, hidden, head, targets)
    if reduction == "sum":
        return total
    count = jnp.sum(targets != ignore_index, dtype=jnp.int32)
    return total / jnp.maximum(count, 1).astype(jnp.float32)


def linear_cross_entropy_reference(
    hidden, head, targets, *, ignore_index=-100, softcap=None, z_loss=0.0, reduction="mean"
):
    """The mathematics in plain JAX."""
    logits = jnp.dot(
        hidden,
        head.astype(hidden.dtype).T,
        precision=precision(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    targets = as_int32(targets)
    counted = targets != ignore_index
    ids = jnp.where(counted, targets, 0)[:, None]
    chosen = jnp.take_along_axis(logits, ids, axis=1, mode="fill", wrap_negative_indices=False)
    lse = jax.nn.logsumexp(logits, axis=1)
    losses = jnp.where(counted, lse - chosen[:, 0] + z_loss * lse * lse, jnp.float32(0))
    if reduction == "sum":
        return jnp.sum(losses)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1).astype(jnp.float32)


def why_not(hidden, head, targets, *, softcap=None, device: Device | None = None) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del targets
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    if hidden.dtype != jnp.bfloat16:
        return f"takes hidden states in bfloat16, got {hidden.dtype}"
    if hidden.shape[1] % TILE_K:
        return f"D = {hidden.shape[1]} is no multiple of {TILE_K}"
    if 0 in (*hidden.shape, *head.shape):
        return f"nothing to multiply: hidden is {list(hidden.shape)}, head is {list(head.shape)}"
    return soft_cap.why_not(softcap) or _compat.why_not_written()


def default_config(hidden, head) -> Config:
    """Chunks of equal size, the fewest that leave E within 1 GiB; one if that needs no memory.

    Tiles are one for all sizes: others measure the same (see `SNAKE`), so that no row is tuned.
    """
    config = Config()
    tokens, vocab = hidden.shape[0], head.shape[0]
    most = max(EXPS_BYTES // (2 * vocab) // TILE_M, 1) * TILE_M
    parts = 1 if _fits_gradient(hidden, head, config) else -(-tokens // most)
    return dataclasses.replace(config, chunk=-(-tokens // (parts * TILE_M)) * TILE_M)


def _fits_gradient(hidden, head, config: Config) -> bool:
    """Whether E, but for one slab, has room in the head's gradient."""
    (t, d), v = hidden.shape, head.shape[0]
    return head.dtype == jnp.bfloat16 and t <= d and v % 8 == 0 and v > 2 * config.slab


def check(
    op: str, hidden, head, targets, softcap, z_loss: float = 0.0, *, ignore_index: int
) -> None:
    """Refuses what no implementation can take, in the name of `op`; tokens of any axes."""
    check_arrays(op, hidden=hidden, **({} if isinstance(head, Packed) else {"head": head}))
    if len(head.shape) != 2 or hidden.ndim < 1 or hidden.shape[-1] != head.shape[1]:
        raise ValueError(
            f"{op}: hidden {list(hidden.shape)} and head {list(head.shape)} must be [.., D] and "
            "[V, D]"
        )
    if 0 in head.shape:
        raise ValueError(f"{op}: head {list(head.shape)} is empty; V and D must be 1 at least")
    check_targets(op, targets, hidden.shape[:-1], ignore_index)
    for name, x in (("hidden", hidden), ("head", head)):
        if not isinstance(x, Packed) and x.dtype not in DTYPES:
            raise ValueError(f"{op}: {name} is {x.dtype}; bfloat16, float16 or float32 are allowed")
    check_number(op, "softcap", softcap, positive=True, optional=True)
    check_number(op, "z_loss", z_loss)


def check_targets(op: str, targets, shape: tuple[int, ...], ignore_index: int) -> None:
    """Refuses targets that are not one integer for each token, and an `ignore_index` that none can
    be, in the name of `op`.
    """
    check_arrays(op, targets=targets)
    kept = jnp.iinfo(jnp.int32)
    if not is_whole(ignore_index) or not kept.min <= ignore_index <= kept.max:
        raise ValueError(f"{op}: ignore_index must be an integer of 32 bits, got {ignore_index!r}")
    if not jnp.issubdtype(targets.dtype, jnp.integer) or targets.shape != shape:
        raise ValueError(
            f"{op}: targets must be integers {list(shape)}, one a token, got "
            f"{targets.dtype}{list(targets.shape)}"
        )


def as_int32(targets: Integer[Array, "*B"]) -> Int[Array, "*B"]:
    """Targets as they are compared with ignore_index, which integers without a sign cannot hold."""
    given, kept = jnp.iinfo(targets.dtype), jnp.iinfo(jnp.int32)
    least, most = max(given.min, kept.min), min(given.max, kept.max)  # numbers that both have
    return jnp.clip(targets, least, most).astype(jnp.int32)


def _config_problem(config: Config) -> str | None:
    c = config
    problems = {
        f"chunk must be a multiple of {TILE_M}": c.chunk < 1 or c.chunk % TILE_M,
        f"slab must be a multiple of {TILE_N}": c.slab < 1 or c.slab % TILE_N,
    }
    return next((problem for problem, found in problems.items() if found), None)


@dataclasses.dataclass(frozen=True)
class _Static:
    """The numbers of a call."""

    config: Config
    ignore_index: int
    softcap: float | None
    z_loss: float
    num_sms: int
    interpret: bool

    def kernel(self, hidden, vocab: int, shift: int) -> kernels.Static:
        shape = (hidden.shape[0], vocab, hidden.shape[1])
        return kernels.Static(shape, self.softcap, self.num_sms, self.interpret, shift)

    def shift(self, hidden, head) -> int:
        """Rows of E with memory of their own where d_head's holds the others; 0: it cannot."""
        return self.config.slab if _fits_gradient(hidden, head, self.config) else 0


class _Rows(NamedTuple):
    """What is known of each token after the first product, float32 [T] but for `ids` and `counted`.

    others: the sum of E without the target's; target: the target's own. slope: of its soft cap.
    ids: of the targets, V for those that are none.
    """

    others: Array
    target: Array
    lse: Array
    slope: Array
    ids: Array
    counted: Array


def _tiles(static: _Static, hidden, targets, size: int = TILE_M):
    """Tokens in whole tiles; those that fill up the last do not count."""
    missing = -hidden.shape[0] % size
    hidden = jnp.pad(hidden, ((0, missing), (0, 0)))
    return hidden, jnp.pad(targets, (0, missing), constant_values=static.ignore_index)


def _cast(head):
    """For the products: bfloat16, and rows in whole tiles of the copy engine."""
    missing = -head.shape[0] % 8
    head = head.astype(jnp.bfloat16)
    return jnp.pad(head, ((0, missing), (0, 0))) if missing else head


def _empty(shape):
    return _compat.hold(jax.lax.empty(shape, jnp.bfloat16))


def _losses(static: _Static, hidden, head, vocab: int, targets, *, stores: bool, shift: int = 0):
    """(sum of the losses, _Rows, references to E) of whole tiles of tokens; `stores` E or not.

    head is cast; vocab of its rows are words.
    """
    (t, d), v = hidden.shape, vocab
    kernel = static.kernel(hidden, v, shift)
    counted = targets != static.ignore_index
    known = counted & (targets >= 0) & (targets < v)
    ids = jnp.where(known, targets, v)
    rows = head[jnp.where(known, targets, 0)].astype(jnp.float32)
    logit = jnp.sum(hidden.astype(jnp.float32) * rows, axis=1)
    slope = jnp.ones_like(logit)
    if static.softcap is not None:
        bent = jnp.tanh(logit / static.softcap)
        logit, slope = static.softcap * bent, 1.0 - bent * bent
    bits = logit * LOG2E

    marks = jnp.zeros((t // TILE_M, -(-v // TILE_N)), jnp.int32)
    if v % TILE_N:
        marks = marks.at[:, -1].set(1)
    token = jnp.arange(t, dtype=jnp.int32)
    marks = marks.at[token // TILE_M, ids // TILE_N].set(1, mode="drop")
    into = ()
    if shift:
        into = (_empty((v, d)), _empty((shift, d)))
    elif stores:
        into = (_empty((len(head), t)),)

    run = functools.partial(kernels.exponentials, kernel, hidden, head)
    reference = jnp.where(counted, bits + HEADROOM, jnp.inf)
    others = jnp.sum(run(reference, ids, marks, into=into), axis=0)
    # A loss of more than 130 nats: once more, by the maxima of the rows
    again = jnp.any(counted & ~(others < MOST))
    go = again.astype(jnp.int32)[None]
    tops = jnp.max(run(reference, ids, marks, into=None, go=go), axis=0)
    reference = jnp.where(again & counted, jnp.maximum(tops, bits), reference)
    more = jnp.sum(run(reference, ids, marks, into=into, go=go), axis=0)
    others = jnp.where(again, more, others)

    target = jnp.exp2(bits - reference)
    ratio = others / target
    loss = jnp.where(
        ratio < MOST,
        jnp.log1p(ratio),
        (jnp.log2(others + target) + reference - bits) / LOG2E,
    )
    lse = logit + loss
    if static.z_loss:
        loss = loss + static.z_loss * lse * lse
    loss = jnp.where(known, loss, jnp.float32(np.nan))
    total = jnp.sum(jnp.where(counted, loss, jnp.float32(0)))
    return total, _Rows(others, target, lse, slope, ids, counted), into


def _gradients(static: _Static, hidden, head, vocab, rows: _Rows, exps, d_total, wants, shift=0):
    """d_hidden [T, D]; and the arrays of E with the targets' terms in it, factor * hidden."""
    kernel = static.kernel(hidden, vocab, shift)
    total = rows.others + rows.target
    if static.z_loss:
        over = 2.0 * static.z_loss * rows.lse  # weight - 1
        small = jnp.abs(1.0 + over) < LEAST_WEIGHT
        over = jnp.where(small, LEAST_WEIGHT - 1.0, over)
        weight = 1.0 + over
        at_target = (over * rows.target - rows.others) / weight
        factor = weight * d_total / total
    else:
        at_target, factor = -rows.others, d_total / total
    factor = jnp.where(rows.counted, factor, jnp.float32(0))
    at_target = (at_target * rows.slope).astype(jnp.bfloat16)

    token = jnp.arange(len(hidden), dtype=jnp.int32)
    none = jnp.int32(np.iinfo(np.int32).max)

    def put(array, ids):
        return array.at[ids, token].set(at_target, mode="drop", unique_indices=True)

    known = rows.ids < vocab
    main, *first = exps
    main = put(main, jnp.where(known & (rows.ids >= shift), rows.ids - shift, none))
    first = [put(x, jnp.where(known, rows.ids, none)) for x in first]
    d_hidden = None
    if wants[0]:
        more = first[0] if first else None
        d_hidden = kernels.d_hidden(kernel, main, more, head, factor, hidden.dtype)
        # What is written over E below waits for what has been read of it
        main, d_hidden = jax.lax.optimization_barrier((main, d_hidden))
    scaled = (hidden.astype(jnp.float32) * factor[:, None]).astype(hidden.dtype)
    return kernel, d_hidden, (main, *first), scaled


def _primal(static: _Static, hidden, head, targets):
    vocab, cast = head.shape[0], _cast(head)
    hidden, targets = _tiles(static, hidden, targets)
    return _losses(static, hidden, cast, vocab, targets, stores=False)[0]


def _forward(static: _Static, hidden, head, targets):
    wants = hidden.perturbed, head.perturbed
    hidden, head, targets = hidden.value, head.value, targets.value
    wanted = tuple(
        jnp.zeros((), x.dtype) if w else None for w, x in zip(wants, (hidden, head), strict=True)
    )
    vocab, cast = head.shape[0], _cast(head)
    if hidden.shape[0] <= static.config.chunk:
        padded, ids = _tiles(static, hidden, targets)
        shift = static.shift(hidden, head) if wants[1] else 0
        total, rows, exps = _losses(static, padded, cast, vocab, ids, stores=True, shift=shift)
        return total, (wanted, None, (hidden, head, rows, tuple(map(_compat.let_go, exps))))

    sums = _compat.hold(jnp.zeros(head.shape, jnp.float32)) if wants[1] else None

    def add(total, chunk):
        hidden, targets = chunk
        loss, rows, exps = _losses(static, hidden, cast, vocab, targets, stores=True)
        kernel, d_hidden, exps, scaled = _gradients(
            static,
            hidden,
            cast,
            vocab,
            rows,
            tuple(map(_compat.let_go, exps)),
            jnp.float32(1),
            wants,
        )
        if sums is not None:
            kernels.add_d_head(kernel, exps[0], scaled, sums)
        return total + loss, d_hidden

    size = static.config.chunk
    padded, ids = _tiles(static, hidden, targets, size)
    chunks = padded.reshape(-1, size, hidden.shape[1]), ids.reshape(-1, size)
    total, d_hidden = jax.lax.scan(add, jnp.zeros((), jnp.float32), chunks)
    if d_hidden is not None:
        d_hidden = d_hidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    return total, (wanted, (d_hidden, None if sums is None else _compat.let_go(sums)), None)


def _backward(static: _Static, saved, d_total):
    wanted, made, rest = saved
    if isinstance(d_total, SymbolicZero):
        d_total = jnp.zeros((), jnp.float32)
    if made is not None:
        return *(
            None if like is None else (x.astype(jnp.float32) * d_total).astype(like.dtype)
            for like, x in zip(wanted, made, strict=True)
        ), None
    hidden, head, rows, exps = rest
    wants = tuple(like is not None for like in wanted)
    tokens = hidden.shape[0]
    shift = static.shift(hidden, head) if wants[1] else 0
    vocab, cast = head.shape[0], _cast(head)
    hidden = jnp.pad(hidden, ((0, -tokens % TILE_M), (0, 0)))
    kernel, d_hidden, exps, scaled = _gradients(
        static, hidden, cast, vocab, rows, exps, d_total, wants, shift
    )
    d_head = None
    if shift:
        place = _compat.hold(exps[0])
        kernels.d_head_in_place(kernel, place, exps[1], scaled)
        d_head = _compat.let_go(place)
    elif wants[1]:
        d_head = kernels.d_head(kernel, exps[0], scaled, dtype=head.dtype)
    return None if d_hidden is None else d_hidden[:tokens], d_head, None


_loss = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_loss.defvjp(_forward, _backward, symbolic_zeros=True)
_loss = jax.jit(_loss, static_argnums=0)  # calls alike share one compiled kernel
