"""GEMV: a weight times one row of x, with what stands before and behind it in decoding.

    y = epilogue(norm(x) W^T + bias) + residual

x [*B, I], W [O, I]. A block owns some outputs (`gemv_kernel`), and norms x anew, which costs no
launch and next to no byte. Epilogues need two outputs at once: gate and up, or the two
numbers of a head that "rope" turns by one angle; so a block takes outputs of both halves. A
gradient is the reference's.
Source of norm and rotation: around_product.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _compat, tuned
from pallas_kernels import device as device_lib
from pallas_kernels.around_product import (
    Cache,
    Norm,
    Rotary,
    around_heads,
    check_head_norms,
    turn_and_write,
)
from pallas_kernels.device import ACCESS_BYTES, SHARED_BYTES, THREADS, Device
from pallas_kernels.gemv_kernel import ITEMSIZE, Config, Static, grain, lanes_across, products
from pallas_kernels.matmul_finish import GATES, finish
from pallas_kernels.options import (
    check_arrays,
    check_dtype,
    check_flags,
    check_number,
    check_options,
)
from pallas_kernels.rms_norm import rms_norm_reference

DTYPES = (jnp.bfloat16, jnp.float16)
OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
AT_ONCE = (1, 2, 3, 4, 6, 8, 12, 16)  # accesses to a row that `candidates` lets a thread ask for
# hidden and intermediate size, heads of queries, of keys, and their width
TUNED_MODELS = {
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128),
    "Phi-3-mini": (3072, 8192, 32, 32, 96),
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64),
    "Llama-3.2-3B": (3072, 8192, 24, 8, 128),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 64),
}
RESERVED_BYTES = 4096  # on chip beside x: Mosaic's own, 2048 of them for sums over a block


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
    """epilogue(norm(x) W^T + bias) + residual: [*B, F], *B one row; sums in float32.

    epilogue "swiglu" or "geglu": the O = 2F outputs are gate, then up, and the result is
    silu(gate) * up, or gelu(gate) * up with gelu's tanh.
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
    check_options("gemv", config, Config, interpret=interpret)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    if (reason := why_not(x, weight, **rest, device=device)) is not None:
        raise NotImplementedError(f"gemv: cannot run this call: {reason}")
    if config is not None and (reason := problem(config, x, weight, **rest)):
        raise ValueError(f"gemv: {config}: {reason}")
    if config is None:
        config = tuned.lookup("gemv", bucket(x, weight, **rest), device, Config)
    config = config or default_config(x, weight, **rest, device=device)
    static = Static(config, interpret, jnp.dtype(out_dtype or x.dtype).name, epilogue)
    angles = None
    if norm is not None:
        static = dataclasses.replace(static, eps=float(norm.eps), zero_centered=norm.zero_centered)
    if rotary is not None:
        static = dataclasses.replace(static, heads=(rotary.q_heads, rotary.kv_heads))
        angles = tuple(a.reshape(-1, a.shape[-1]) for a in (rotary.cos, rotary.sin))
    if cache is not None:
        cache = cache._replace(slots=cache.slots.astype(jnp.int32))
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
        normed: Any = rms_norm_reference(x, norm.weight, **norm.keywords)
        x = normed
    y = jnp.matmul(x, weight.T, preferred_element_type=jnp.float32)
    if rotary is None:
        return finish(y, bias, residual, epilogue=epilogue, out_dtype=out_dtype)
    heads = finish(y, bias, out_dtype=x.dtype).reshape(-1, y.shape[-1])
    q, *rest = turn_and_write(heads, rotary, cache)
    if cache is None:
        rest = [jnp.concatenate([part.reshape(len(heads), -1) for part in rest], axis=-1)]
        rest = [part.reshape(*x.shape[:-1], -1).astype(out_dtype) for part in rest]
    return q.reshape(*x.shape[:-1], -1).astype(out_dtype), *rest


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
    if cache is not None and (reason := _compat.why_not_written()):
        return reason
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return f"takes bfloat16 or float16, got x {x.dtype} and a weight {weight.dtype}"
    m, (o, i) = math.prod(x.shape[:-1]), weight.shape
    if m != 1:
        return f"takes one row of x, got {m}"
    if 0 in (o, i):
        return f"nothing to multiply: the weight is {[o, i]}"
    if i % THREADS:
        return f"takes inputs in multiples of {THREADS}, got {i}"
    if i * ITEMSIZE > SHARED_BYTES - RESERVED_BYTES:
        return f"{i} inputs do not fit on chip"
    if rotary is not None and (reason := rotary.why_apart(o)):
        return reason
    span = _span(o, epilogue, rotary)
    if span % grain(i):
        return f"takes outputs in multiples of {grain(i)}, got {span}"
    return None


def _span(o: int, epilogue: str | None, rotary: Any) -> int:
    """Outputs side by side, each of which has its partner one span further."""
    if rotary is not None:
        return rotary.cos.shape[-1]
    return o // 2 if epilogue in GATES else o


def problem(config: Config, x, weight, *, epilogue=None, rotary=None, **rest: Any) -> str | None:
    """What speaks against the config."""
    del rest
    o, i = weight.shape
    line, span = lanes_across(i) * ACCESS_BYTES // ITEMSIZE, _span(o, epilogue, rotary)
    if config.outputs < 1 or config.outputs % grain(i) or span % config.outputs:
        return f"outputs must be a multiple of {grain(i)} that divides {span}"
    if config.inputs < line or config.inputs % line:
        return f"inputs must be a multiple of {line}"
    return None


def default_config(
    x, weight, *, epilogue=None, rotary=None, device: Device | None = None, **rest: Any
) -> Config:
    """Small blocks, so that many are on a multiprocessor; a thread of theirs has four accesses
    under way, eight where rows are long. bfloat16, H200: the products of a layer of
    Llama-3.1-8B take 107 to 110 us so, and 114 with as many under way as registers hold.
    """
    del device, rest
    i = weight.shape[1]
    line, halves = lanes_across(i) * ACCESS_BYTES // ITEMSIZE, 1 if epilogue is None else 2
    at_once = (4 if i <= 4096 else 8) // halves
    return Config(grain(i), line * min(i // line, at_once))


def candidates(x, weight, *, device: Device | None = None, **around: Any) -> list[Config]:
    """What is worth a measurement beside the default: more or fewer inputs asked for at once."""
    i, default = weight.shape[1], default_config(x, weight, device=device, **around)
    line = lanes_across(i) * ACCESS_BYTES // ITEMSIZE
    counts = {min(count, i // line) for count in AT_ONCE}
    found = [Config(grain(i), line * count) for count in sorted(counts)]
    return [config for config in found if config != default]


def tuning_calls() -> list[tuned.Call]:
    """The four products of a layer that decodes one row, of `TUNED_MODELS` in bfloat16."""
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    calls = []
    for d, f, heads, kv_heads, width in TUNED_MODELS.values():
        of_heads = around_heads(d, heads, kv_heads, width)
        norm = of_heads["norm"]
        residual = norm.weight[None]
        outputs = (heads + 2 * kv_heads) * width
        for o, i, around in (
            (outputs, d, of_heads),
            (d, heads * width, {"residual": residual}),
            (2 * f, d, {"norm": norm, "epilogue": "swiglu"}),
            (d, f, {"residual": residual}),
        ):
            calls.append(tuned.Call((bf16((1, i)), bf16((o, i))), gemv, around))
    return calls


def bucket(x, weight, *, norm=None, epilogue=None, **rest: Any) -> str:
    """The key of a tuned row: the weight as it is; m1 is x's one row."""
    del rest
    o, i = weight.shape
    kind = f"{'norm-' if norm is not None else ''}{epilogue or 'plain'}"
    return f"{x.dtype.name}-m1-n{o}-k{i}-{kind}"


def check(
    x,
    weight,
    *,
    norm,
    bias,
    epilogue,
    residual,
    rotary,
    cache,
    out_dtype,
    who: str = "gemv",
    gates: tuple[str, ...] = tuple(GATES),
) -> None:
    """Refuses what no implementation of the op `who` takes; `gates` are its epilogues with a gate.

    Raises: ValueError.
    """
    arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    arrays |= {"norm's weight": norm and norm.weight}
    check_arrays(who, **arrays)
    check_dtype(who, "out_dtype", out_dtype)
    for name, a in arrays.items():
        if a is not None and not jnp.issubdtype(a.dtype, jnp.floating):
            raise ValueError(f"{who}: {name} is {a.dtype}; it must be floating point")
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{who}: x {list(x.shape)} and the weight {list(weight.shape)} are not [*B, I] and "
            "[O, I]"
        )
    o, i = weight.shape
    if norm is not None:
        check_number(who, "the norm's eps", norm.eps, positive=True)
        check_flags(who, zero_centered=norm.zero_centered)
    if epilogue not in (None, *gates, "rope"):
        names = ", ".join(map(repr, gates))
        raise ValueError(f"{who}: epilogue {epilogue!r} is not None, {names} or 'rope'")
    if epilogue in gates and o % 2:
        raise ValueError(f"{who}: {epilogue!r} needs two halves of outputs, got {o}")
    if (epilogue == "rope") != (rotary is not None):
        raise ValueError(f"{who}: 'rope' and rotary go together, only one of them was given")
    lead, f = x.shape[:-1], o // 2 if epilogue in gates else o
    wanted = {"norm's weight": (i,), "bias": (o,), "residual": (*lead, f)}
    for name, shape in wanted.items():
        if arrays[name] is not None and arrays[name].shape != shape:
            raise ValueError(f"{who}: {name} must be {list(shape)}, got {list(arrays[name].shape)}")
    if rotary is not None:
        width, heads = rotary.width(o), rotary.q_heads + 2 * rotary.kv_heads
        turned = 2 * rotary.cos.shape[-1] if rotary.cos.ndim else 0
        if rotary.cos.shape != (*lead, turned // 2) or rotary.sin.shape != rotary.cos.shape:
            raise ValueError(
                f"{who}: cos {list(rotary.cos.shape)} and sin {list(rotary.sin.shape)} must be "
                f"{list(lead)} and half of what is turned of a head"
            )
        if heads * width != o or turned > width or residual is not None:
            raise ValueError(
                f"{who}: 'rope' takes no residual, and {o} outputs are not {heads} heads of "
                f"{max(width, turned)}"
            )
        check_head_norms(rotary, width, who=who)
    if cache is not None:
        if rotary is None:
            raise ValueError(f"{who}: a cache takes what 'rope' makes, and the epilogue is another")
        own = math.prod(lead), cache.k.shape[1], rotary.kv_heads, rotary.width(o)
        kinds = {(a.shape, a.dtype) for a in cache[:2]}
        if kinds != {(own, jnp.dtype(out_dtype or x.dtype))} or cache.slots.shape != own[:1]:
            raise ValueError(
                f"{who}: the cache's keys, values and slots must be {list(own)} twice, of the "
                f"result's dtype, and {[own[0]]}, got {cache.k.dtype}{list(cache.k.shape)}, "
                f"{cache.v.dtype}{list(cache.v.shape)} and {list(cache.slots.shape)}"
            )
        if not jnp.issubdtype(cache.slots.dtype, jnp.integer):
            raise ValueError(f"{who}: slots must be integers, got {cache.slots.dtype}")
    if jnp.dtype(out_dtype or x.dtype) not in OUT_DTYPES + (x.dtype,):
        raise ValueError(f"{who}: out_dtype {out_dtype} is not bfloat16, float16 or float32")


def _plain(static: Static, x, weight, norm, bias, residual, angles, cache):
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


def _forward(static: Static, *arrays: Any):
    return _gemv(static, *arrays), arrays


def _backward(static: Static, arrays: Any, d_y: Any):
    return jax.vjp(functools.partial(_plain, static), *arrays)[1](d_y)


_gemv = jax.custom_vjp(products, nondiff_argnums=(0,))
_gemv.defvjp(_forward, _backward)
_gemv = jax.jit(_gemv, static_argnums=0)  # calls alike share one compiled kernel
