"""RoPE: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) in every head of q and k, in one launch.

q [B, T, N, H], k [B, T, K, H], cos and sin [B, T, R / 2]. Pairs are half-split: number i of a head
turns with number i + R / 2, and what lies behind the first R numbers passes through.
One block owns some tokens of some heads (`rope_kernel`); a thread holds the cosines and sines of
its columns in registers for all of them. Each byte is read once and written once. The backward pass
turns the cotangents the other way, by the same kernel.
Source: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import device as device_lib
from pallas_kernels import tuned
from pallas_kernels.device import MAX_BOX, SHARED_BYTES, Device
from pallas_kernels.options import check_arrays, check_options
from pallas_kernels.rope_kernel import (
    Config,
    Static,
    by_lanes,
    problem,
    shared_bytes,
    tokens_of,
    turn,
)

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def rope(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "B T R2"],
    sin: Float[Array, "B T R2"],
    *,
    rotary_dim: int | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """q and k with the first R = `rotary_dim` numbers of every head turned; R = 2 R2 if None.

    Dtypes: q and k bfloat16, float16 or float32; cos and sin any of them, rounded to q's dtype
    before use. Products and sums are float32, rounded once.
    Gradients: of q and k by the kernel; of cos and sin, where they are asked for, by XLA.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for what `why_not` says.
    """
    check(q, k, cos, sin, rotary_dim)
    check_options("rope", config, Config, interpret=interpret)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    reason = why_not(q, k, cos, sin, rotary_dim=rotary_dim, device=device)
    if reason is not None:
        raise NotImplementedError(f"rope: cannot run this call: {reason}")
    if config is not None and (reason := problem(config, q, k, cos, sin)):
        raise ValueError(f"rope: {config}: {reason}")
    if config is None:
        config = tuned.lookup("rope", bucket(q, k, cos, sin), device, Config)
        if config is None or problem(config, q, k, cos, sin):
            config = default_config(q, k, cos, sin, device=device)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, cos, sin)]
    turned = _rope(Static(config, False, interpret), *flat)
    return turned[0].reshape(q.shape), turned[1].reshape(k.shape)


def rope_reference(q, k, cos, sin, *, rotary_dim=None):
    """The mathematics in plain JAX."""
    del rotary_dim  # it is twice the columns of cos
    half = cos.shape[-1]
    cos, sin = (t.astype(q.dtype).astype(jnp.float32)[..., None, :] for t in (cos, sin))

    def turn(x):
        x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        x1, x2 = x1.astype(jnp.float32), x2.astype(jnp.float32)
        turned = [(x1 * cos - x2 * sin).astype(x.dtype), (x2 * cos + x1 * sin).astype(x.dtype)]
        return jnp.concatenate([*turned, rest], axis=-1)

    return turn(q), turn(k)


def why_not(q, k, cos, sin, *, rotary_dim=None, device: Device | None = None) -> str | None:
    """What keeps the kernel from this call; shapes suffice."""
    del rotary_dim
    if reason := device_lib.why_not_hopper(device or device_lib.current()):
        return reason
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if x.dtype not in DTYPES:
            return f"takes bfloat16, float16 or float32, got {name} {x.dtype}"
        if 0 in x.shape:
            return f"nothing to turn: {name} is {list(x.shape)}"
    if k.dtype != q.dtype:
        return f"q is {q.dtype} and k is {k.dtype}; one kernel turns both in one dtype"
    width, half = q.shape[-1], cos.shape[-1]
    narrowest = min(x.dtype.itemsize for x in (q, cos, sin))
    for what, numbers, size in (("heads", width, q.dtype.itemsize), ("halves", half, narrowest)):
        if reason := device_lib.why_not_copied(what, numbers * size):
            return reason
    if width > MAX_BOX:
        return f"heads of {width} numbers are longer than {MAX_BOX}, what one copy takes"
    if (size_bytes := shared_bytes(Config(1), q, cos, sin)) > SHARED_BYTES:
        return f"halves of {half} numbers take {size_bytes} of {SHARED_BYTES} bytes on chip"
    return None


def default_config(q, k, cos, sin, *, rotary_dim=None, device: Device) -> Config:
    """By lanes, where they take such heads (`rope_lanes`).
    Else about 40 KB of heads a block, so that four or five blocks fit on a multiprocessor and some
    load while others turn; fewer heads where that leaves multiprocessors without a block.
    """
    if lanes := by_lanes(q, k, cos):
        return lanes
    tokens, total = math.prod(q.shape[:2]), q.shape[2] + k.shape[2]
    del rotary_dim, sin
    rows = tokens_of(cos.shape[-1], q.dtype.itemsize)
    heads = max(1, min(total, 40 * 1024 // (rows * q.shape[-1] * q.dtype.itemsize)))
    heads = -(-total // -(-total // heads))  # the same for all blocks
    while heads > 1 and -(-tokens // rows) * -(-total // heads) < 2 * device.num_sms:
        heads = -(-heads // 2)
    return Config(heads)


def bucket(q, k, cos, sin, *, rotary_dim=None) -> str:
    """The key of a tuned row: tokens up to a power of two, heads and widths as they are."""
    del sin, rotary_dim
    tokens = tuned.power_of_two(math.prod(q.shape[:2]))
    heads = f"n{q.shape[2]}-k{k.shape[2]}-h{q.shape[3]}"
    return f"{q.dtype.name}-m{tokens}-{heads}-r{2 * cos.shape[-1]}-{cos.dtype.name}"


def candidates(q, k, cos, sin, *, rotary_dim=None, device: Device) -> list[Config]:
    """What is worth a measurement: the default's neighbours."""
    default = default_config(q, k, cos, sin, rotary_dim=rotary_dim, device=device)
    total = q.shape[2] + k.shape[2]
    heads = sorted({min(total, n) for n in (1, 2, 3, 5, 8, 16)})
    found = [*map(Config, heads), *(Config(n, 2) for n in heads[1:3])]
    if lanes := by_lanes(q, k, cos):
        found += [Config(tokens=n * lanes.tokens, lanes=lanes.lanes // n) for n in (2, 4)]
        found.append(dataclasses.replace(lanes, lanes=2 * lanes.lanes))
    return [c for c in found if c != default and problem(c, q, k, cos, sin) is None]


def tuning_calls() -> list[tuned.Call]:
    """The heads of Qwen2.5-0.5B, Llama-3.1-8B and Phi-3-mini, at prefill and decode sizes."""
    return [
        tuned.Call(
            (
                jax.ShapeDtypeStruct((batch, tokens, n, width), jnp.bfloat16),
                jax.ShapeDtypeStruct((batch, tokens, k, width), jnp.bfloat16),
                *[jax.ShapeDtypeStruct((batch, tokens, width // 2), jnp.float32)] * 2,
            ),
            rope,
        )
        for n, k, width in ((14, 2, 64), (32, 8, 128), (32, 32, 96))
        for batch, tokens in ((1, 8192), (1, 1), (64, 1))
    ]


def check(q, k, cos, sin, rotary_dim) -> None:
    """Refuses what no implementation of RoPE can take."""
    check_arrays("rope", q=q, k=k, cos=cos, sin=sin)
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"rope: {name} is {x.dtype}; it must be floating point")
    if q.ndim != 4 or k.ndim != 4 or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        raise ValueError(
            f"rope: q {list(q.shape)} is [B, T, N, H], which k {list(k.shape)} as [B, T, K, H] "
            "does not fit"
        )
    if cos.shape != sin.shape or cos.ndim != 3 or cos.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"rope: cos {list(cos.shape)} and sin {list(sin.shape)} must both be [B, T, R / 2], "
            f"with B, T = {list(q.shape[:2])}"
        )
    if rotary_dim is not None and rotary_dim != 2 * cos.shape[-1]:
        raise ValueError(
            f"rope: rotary_dim is {rotary_dim}, but cos and sin have {cos.shape[-1]} columns, half "
            f"of {2 * cos.shape[-1]}"
        )
    if 2 * cos.shape[-1] > q.shape[-1]:
        raise ValueError(
            f"rope: {2 * cos.shape[-1]} numbers are to be turned, but a head has {q.shape[-1]}"
        )


def _rope_fwd(static: Static, q, k, cos, sin):
    """q and k are kept only where cos or sin want a gradient."""
    wanted = cos.perturbed or sin.perturbed
    values = [x.value for x in (q, k, cos, sin)]
    return _rope(static, *values), (*(values[:2] if wanted else (None, None)), *values[2:])


def _rope_bwd(static: Static, saved: Any, cotangents: Any):
    q, k, cos, sin = saved
    d_out = [jnp.zeros(d.aval.shape, d.aval.dtype) if _is_zero(d) else d for d in cotangents]
    back = dataclasses.replace(static, back=not static.back)
    d_cos = d_sin = None
    if q is not None:
        s = -sin if static.back else sin
        _, vjp = jax.vjp(functools.partial(rope_reference, q, k), cos, s)
        d_cos, d_sin = vjp(tuple(d_out))
        d_sin = -d_sin if static.back else d_sin
    return (*_rope(back, *d_out, cos, sin), d_cos, d_sin)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


_rope = jax.custom_vjp(
    lambda static, q, k, cos, sin: tuple(turn(static, q, k, cos, sin, plain=rope_reference)),
    nondiff_argnums=(0,),
)
_rope.defvjp(_rope_fwd, _rope_bwd, symbolic_zeros=True)
_rope = jax.jit(_rope, static_argnums=0)  # calls alike share one compiled kernel
