"""Low-rank adapters beside any `Linear`: LoRA, rsLoRA and DoRA, and PEFT folders in and out.

    y = x W^T + s (x A^T) B^T          LoRA: s = alpha / r; rsLoRA: s = alpha / sqrt(r)
    y = m / |W + s B A| * (the same)   DoRA: rows scaled to the length m; the norm gets no gradient

`add_adapters` replaces modules of a model in place. What it adds is trained with
`trainable=is_adapter`; the rest of the model is frozen. One model holds one set of adapters at a
time, in slots that keep their shapes: `set_adapters` puts another set there (`no_adapters` is the
base's), and no program is compiled again. `merge` puts the set into the weights, and
`remove_adapters` leaves the base.
Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732; Liu et al. 2024,
arXiv:2402.09353, section 4.3.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxllm import ops
from jaxllm.checkpoint.peft import LowRank, read_folder, write_folder
from jaxllm.checkpoint.tensor_names import FUSED
from jaxllm.config import Runtime
from jaxllm.families import FAMILIES
from jaxllm.integers import integer
from jaxllm.layers import BitLinear, Linear
from jaxllm.model import Transformer
from jaxllm.quantize import PackedLinear
from pallas_kernels.options import is_number

KINDS = ("lora", "rslora", "dora")
PARAMETERS = ("lora_a", "lora_b", "magnitude")
RANK = 16  # where nobody gives one


class Adapted(nnx.Module):
    """A linear module and its adapter: float32 `lora_a` [r I], `lora_b` [O r], `magnitude` [O].

    `base` is a `Linear` or anything that is called like one and has its weight [O I] as `weight`,
    or makes it with `dequantize()`. The products are in the base's compute dtype. At first b is
    zero and the magnitude the base's own, so that nothing changes; a is uniform in
    ±1 / sqrt(I), as PEFT draws it.
    Raises: NotImplementedError for DoRA beside a `BitLinear`.
    """

    def __init__(self, base: Any, *, rank: int, alpha: float, kind: str = "lora", rngs: nnx.Rngs):
        if kind == "dora" and isinstance(base, BitLinear):
            raise NotImplementedError(
                "lora: kind 'dora' beside a ternary layer in training is not supported, for it "
                "scales the weight's rows, and the layer makes others of them; take 'lora'"
            )
        self.base = base
        self.dtype = base.dtype
        self.implementation = base.implementation
        self.alpha = float(alpha)
        self.kind = kind
        self.enabled = True
        out_features, in_features = _base_weight(base).shape
        bound = 1 / math.sqrt(in_features)
        draw = jax.random.uniform(
            rngs.params(), (rank, in_features), jnp.float32, minval=-bound, maxval=bound
        )
        self.lora_a = nnx.Param(draw)
        self.lora_b = nnx.Param(jnp.zeros((out_features, rank), jnp.float32))
        dora = kind == "dora"
        self.magnitude = nnx.Param(self.norms(draw, self.lora_b[...])) if dora else None

    def __call__(self, x: Float[Array, "*B I"], *, out_dtype=None) -> Float[Array, "*B O"]:
        y = self.base(x, out_dtype=out_dtype)
        if not self.enabled:
            return y
        low = self._product(x.astype(self.dtype), self.lora_a[...])
        low = self._product(low, self.lora_b[...], out_dtype=out_dtype)
        low = low.astype(jnp.float32) * np.float32(self.scale)
        wide = y.astype(jnp.float32)
        if self.magnitude is None:
            return (wide + low).astype(y.dtype)
        turn = self._turn().reshape((1,) * (y.ndim - 1) + (-1,))
        plain = wide
        if self.bias is not None:
            plain = wide - self.bias[...].astype(jnp.float32).reshape(turn.shape)
        return (wide + (turn - np.float32(1)) * plain + turn * low).astype(y.dtype)

    @property
    def scale(self) -> float:
        """What b @ a is multiplied by."""
        rank = self.lora_a.shape[0]
        return self.alpha / (math.sqrt(rank) if self.kind == "rslora" else rank)

    @property
    def bias(self) -> Any:
        """The base's."""
        return self.base.bias

    @property
    def weight(self) -> Float[Array, "O I"]:
        """The base's weight with the adapter in it, in the base's dtype: what `merge` keeps."""
        weight = _base_weight(self.base)
        a, b = self.lora_a[...], self.lora_b[...]
        wide = weight.astype(jnp.float32) + self._product(b, a.T) * np.float32(self.scale)
        if self.magnitude is not None:
            wide = wide * self._turn()[:, None]
        return wide.astype(weight.dtype)

    def norms(self, a: Float[Array, "r I"], b: Float[Array, "O r"]) -> Float[Array, " O"]:
        """The lengths of the rows of W + s B A in float32, of factors as the forward rounds them.

        |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b, so that no second [O I] is made.
        """
        weight, scale = _base_weight(self.base).astype(self.dtype), np.float32(self.scale)
        a, b = a.astype(self.dtype), b.astype(self.dtype).astype(jnp.float32)
        across = self._product(weight, a, out_dtype=jnp.dtype(jnp.float32))
        gram = self._product(a, a, out_dtype=jnp.dtype(jnp.float32))
        squares = (
            jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=-1)
            + 2 * scale * jnp.sum(across * b, axis=-1)
            + scale * scale * jnp.sum(self._product(b, gram) * b, axis=-1)
        )
        return jnp.sqrt(jnp.maximum(squares, 0))

    def _turn(self) -> Float[Array, " O"]:
        """What DoRA multiplies each row with. A row of zeros stays one."""
        assert self.magnitude is not None
        norms = jax.lax.stop_gradient(self.norms(self.lora_a[...], self.lora_b[...]))
        some = norms > 0
        return jnp.where(some, self.magnitude[...] / jnp.where(some, norms, 1), 1)

    def _product(self, x, weight, *, out_dtype=None):
        return ops.linear(x, weight, out_dtype=out_dtype, implementation=self.implementation)


def _base_weight(base: Any) -> Float[Array, "O I"]:
    return base.dequantize() if hasattr(base, "dequantize") else base.weight[...]


def is_adapter(name: str) -> bool:
    """Whether a parameter of this dotted name belongs to an adapter: for `trainable=`."""
    return name.rpartition(".")[2] in PARAMETERS


def add_adapters(
    model: nnx.Module,
    *,
    rank: int = RANK,
    alpha: float | None = None,
    targets: str | Sequence[str] = "all-linear",
    kind: str = "lora",
    rngs: nnx.Rngs,
) -> list[str]:
    """Put an adapter beside each Linear of a model, or of a module of yours, that `targets` names;
    return their dotted names.

    targets: "all-linear" (all but the head, as in PEFT); or a regular expression for a whole dotted
        name ("layers.0.self_attn.q_proj") or its end behind a dot ("q_proj|v_proj"); or a list
        of such names or ends, * and ? allowed (["q_proj", "layers.1.mlp.*"]).
    alpha: 2 * rank if None.
    Call it again for other modules with another rank.
    Raises: ValueError for a pattern that matches no Linear, a rank, alpha or kind that cannot be.
    NotImplementedError for the embedding, and so for a head that is tied to it; as `Adapted`.
    """
    if kind not in KINDS:
        raise ValueError(f"lora: kind {kind!r} is not one of {', '.join(KINDS)}")
    rank = integer("rank", rank, 1, who="lora")
    alpha = 2 * rank if alpha is None else alpha
    if not is_number(alpha) or not 0 < alpha < math.inf:
        raise ValueError(f"lora: alpha must be a positive number, got {alpha!r}")
    if not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"lora: rngs must be an nnx.Rngs, as nnx.Rngs(0), got {rngs!r:.60}")
    linears = _linears(model)
    names = _match(targets, linears, tied=getattr(model, "lm_head", model) is None)
    widest = max(max(_base_weight(linears[name]).shape) for name in names)
    if rank > widest:
        raise ValueError(
            f"lora: rank {rank} is more than {widest}, the widest of what gets adapters"
        )
    same = {"rank": rank, "alpha": alpha, "kind": kind, "rngs": rngs}
    for name, module in [(name, Adapted(linears[name], **same)) for name in names]:
        _replace(model, name, module)
    return names


def _linears(model: nnx.Module) -> dict[str, Any]:
    """The modules that may get an adapter, by dotted name."""
    if joined := [name for name, _ in _modules(model) if name.endswith(tuple(FUSED))]:
        raise ValueError(
            f"lora: {joined[0]} is several projections joined by jaxllm.fuse; adapters stand "
            "beside single ones, so load the model anew and fuse it when they are merged"
        )
    return {
        name: module
        for name, module in _modules(model)
        if name and _is_linear(module) and not name.endswith(".base")
    }


def _adapted(model: nnx.Module) -> dict[str, Adapted]:
    return {name: module for name, module in _modules(model) if isinstance(module, Adapted)}


def _modules(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    for path, module in nnx.iter_modules(model):
        yield ".".join(map(str, path)), module


def _match(targets: str | Sequence[str], linears: Mapping[str, Any], *, tied: bool) -> list[str]:
    if targets == "all-linear":
        found = [name for name in linears if name != "lm_head"]
        if not found:
            raise ValueError("lora: every Linear has an adapter already")
        return found
    names = [targets] if isinstance(targets, str) else targets
    patterns = list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"lora: targets must be 'all-linear', a regular expression or a list of names, got "
            f"{targets!r:.60}"
        )
    if not patterns:
        raise ValueError("lora: targets is empty; name modules, or give 'all-linear'")
    found = set()
    for pattern in patterns:
        expression = pattern if isinstance(targets, str) else fnmatch.translate(pattern)
        try:
            re.compile(expression)  # alone: a place in it is told, and `)(` is refused
            compiled = re.compile(rf"(?:.*\.)?(?:{expression})")
        except re.error as error:
            raise ValueError(
                f"lora: {pattern!r} is no regular expression ({error}); a list is read as names "
                "with * and ?"
            ) from None
        matched = {name for name in linears if compiled.fullmatch(name)}
        tables = ("embed_tokens", "lm_head") if tied else ("embed_tokens",)
        if not matched and any(map(compiled.fullmatch, tables)):
            why = "the head is tied to the embedding, which is" if tied else "the embedding is"
            raise NotImplementedError(
                f"lora: {pattern!r} cannot have an adapter: {why} a table and no Linear"
            )
        if not matched:
            raise ValueError(
                f"lora: {pattern!r} matches no Linear without an adapter; there are "
                f"{_enumerate_ends(linears) or 'none'}"
            )
        found |= matched
    return [name for name in linears if name in found]


def _enumerate_ends(names: Mapping[str, Any]) -> str:
    """Names with what counts layers left out: "layers.*.mlp.up_proj, lm_head"."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))


def _replace(model: nnx.Module, name: str, module: Any) -> None:
    *parents, last = name.split(".")
    owner: Any = model
    for part in parents:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    setattr(owner, last, module)


def adapters(model: nnx.Module) -> dict[str, Array]:
    """The adapters' own arrays (not copies) by dotted name: a set for `set_adapters`."""
    return {
        f"{name}.{key}": getattr(module, key)[...]
        for name, module in _adapted(model).items()
        for key in PARAMETERS
        if getattr(module, key) is not None
    }


def set_adapters(model: nnx.Module, arrays: Mapping[str, Any]) -> None:
    """Put a set of adapters into the model's slots, each where the one before it was put, if it
    was; programs compiled for the model stay valid.

    Raises: ValueError if names or shapes are not those of the model's own set.
    """
    own = adapters(model)
    if arrays.keys() != own.keys():
        missing, surplus = sorted(own.keys() - arrays.keys()), sorted(arrays.keys() - own.keys())
        raise ValueError(
            f"lora: the set does not fit the model: {len(missing)} missing {missing[:3]}, "
            f"{len(surplus)} surplus {surplus[:3]}"
        )
    for name, array in own.items():
        if np.shape(arrays[name]) != array.shape:
            raise ValueError(
                f"lora: {name} has shape {np.shape(arrays[name])}, the model's {array.shape}"
            )
    for name, module in _adapted(model).items():
        for key in PARAMETERS:
            if getattr(module, key) is not None:
                new = jnp.asarray(arrays[f"{name}.{key}"], jnp.float32)
                old = own[f"{name}.{key}"]
                if isinstance(old, jax.Array) and not isinstance(old, Tracer) and old.committed:
                    new = jax.device_put(new, old.sharding)
                getattr(module, key).set_value(new)


@contextlib.contextmanager
def disabled(model: nnx.Module) -> Iterator[None]:
    """Inside, the model computes what its base does: the frozen reference of preference tuning.

    For use while a program is traced, or without one; the adapters are not touched.
    """
    modules = [module for module in _adapted(model).values() if module.enabled]
    for module in modules:
        module.enabled = False
    try:
        yield
    finally:
        for module in modules:
            module.enabled = True


def merge(model: nnx.Module) -> None:
    """Put the adapters into the weights: plain modules again, with the same logits; also those that
    `disabled` has turned off.

    Weights keep their dtype, to which the sum is rounded. A quantised base becomes a plain Linear
    of its dequantised weights in the runtime's dtype (in its own, in a module without a runtime),
    since packing the sum again would change it: more memory, same logits.
    Raises: NotImplementedError if one stands beside a ternary layer, which rounds its input, too,
    so that no plain module computes the sum; then nothing is changed.
    """
    for name, module in _adapted(model).items():
        if isinstance(module.base, BitLinear) or getattr(module.base, "scheme", "") == "ternary":
            raise NotImplementedError(
                f"lora: {name} is ternary, and the sum of it and its adapter is not; keep the "
                "adapter beside it (lora.save_peft, jaxllm export --adapter)"
            )
    for name, module in _adapted(model).items():
        _replace(model, name, _merged(module, getattr(model, "runtime", None)))


def _merged(module: Adapted, runtime: Runtime | None) -> Any:
    weight, base = module.weight, module.base
    runtime = runtime or Runtime(base.dtype, implementation=base.implementation)
    if not hasattr(base, "dequantize"):
        base.weight.set_value(weight)
        return base
    out_features, in_features = weight.shape
    plain: Any = nnx.eval_shape(
        lambda: Linear(
            in_features,
            out_features,
            bias=base.bias is not None,
            runtime=runtime,
            rngs=nnx.Rngs(0),
        )
    )
    plain.weight.set_value(weight.astype(runtime.weight_dtype))
    if base.bias is not None:
        plain.bias.set_value(base.bias[...])
    return plain


def remove_adapters(model: nnx.Module) -> None:
    """Take the adapters away: the base alone."""
    for name, module in _adapted(model).items():
        _replace(model, name, module.base)


def save_peft(
    model: Transformer, folder: str | os.PathLike[str], *, base_model_name: str | None = None
) -> None:
    """Write the adapters as a PEFT folder. `base_model_name`: what PEFT shall load them onto.

    In a family that stores q/k/v as one tensor (Phi-3), adapters of their own for q, k and v become
    one of the sum of their ranks.
    Raises: ValueError if there are no adapters; NotImplementedError as `write_folder`.
    """
    modules = _adapted(model)
    if not modules:
        raise ValueError("save_peft: the model has no adapters; jaxllm.save writes whole models")
    factors = {
        name: LowRank(
            np.asarray(module.lora_a[...], np.float32),
            np.asarray(module.lora_b[...], np.float32),
            None if module.magnitude is None else np.asarray(module.magnitude[...], np.float32),
            module.alpha,
            module.kind == "rslora",
        )
        for name, module in modules.items()
    }
    write_folder(
        Path(os.path.expanduser(folder)),
        factors,
        _shapes(model),
        fused=_is_fused(model),
        base_model_name=base_model_name,
    )


def load_peft(model: Transformer, folder: str | os.PathLike[str]) -> None:
    """Put the adapters of a PEFT folder beside the model's Linears; into its slots if it has some.

    Raises: as `read_folder`, and as `read_peft` if the model has adapters; ValueError if the model
    is fused.
    """
    if _adapted(model):
        return set_adapters(model, read_peft(model, folder))
    linears = _linears(model)  # refuses a fused model
    loaded = _read(model, folder)
    for name, factors in loaded.items():
        kind = _kind(factors)
        module = Adapted(
            linears[name], rank=factors.rank, alpha=factors.alpha, kind=kind, rngs=nnx.Rngs(0)
        )
        if factors.rslora:  # DoRA has alpha / r here: the scale is what counts
            module.alpha = factors.scale * (
                math.sqrt(factors.rank) if kind == "rslora" else factors.rank
            )
        _replace(model, name, module)
    set_adapters(model, _fit(model, loaded))


def check_peft(model: Transformer, folder: str | os.PathLike[str]) -> None:
    """Whether a PEFT folder fits the model, which may be traced. Raises: as `read_folder`."""
    _read(model, folder)


def read_peft(model: Transformer, folder: str | os.PathLike[str]) -> dict[str, Array]:
    """The adapters of a PEFT folder as a set for `set_adapters`: for models that switch between.

    Smaller ranks are filled up with zeros, another alpha goes into b, and modules that the folder
    leaves out get adapters that do nothing; so adapters of several kinds share one model's slots.
    Raises: as `read_folder`; ValueError if the folder has a larger rank, a module without a slot,
    or DoRA where the slot has none.
    """
    return _fit(model, _read(model, folder))


def no_adapters(model: Transformer) -> dict[str, Array]:
    """The set with which the model computes what its base does."""
    return _fit(model, {})


def _kind(factors: LowRank) -> str:
    return "dora" if factors.magnitude is not None else "rslora" if factors.rslora else "lora"


def _read(model: Transformer, folder: str | os.PathLike[str]) -> dict[str, LowRank]:
    path = Path(os.path.expanduser(folder))
    return read_folder(path, _shapes(model), fused=_is_fused(model))


def _fit(model: Transformer, loaded: Mapping[str, LowRank]) -> dict[str, Array]:
    slots = _adapted(model)
    if without := [name for name in loaded if name not in slots]:
        raise ValueError(
            f"lora: {len(without)} modules of the folder have no slot in the model: {without[:3]}; "
            "give them to add_adapters"
        )
    arrays: dict[str, Array] = {}
    for name, slot in slots.items():
        a = np.zeros(slot.lora_a.shape, np.float32)
        b = np.zeros(slot.lora_b.shape, np.float32)
        magnitude = None
        if name in loaded:
            factors = loaded[name]
            if factors.rank > len(a):
                raise ValueError(
                    f"lora: {name} has rank {factors.rank}, but the model's slot {len(a)}; give "
                    f"add_adapters rank={factors.rank}"
                )
            if factors.magnitude is not None and slot.magnitude is None:
                raise ValueError(
                    f"lora: {name} has DoRA, but the model's slot is {slot.kind}; give "
                    "add_adapters kind='dora'"
                )
            a[: factors.rank] = factors.a
            b[:, : factors.rank] = factors.b * np.float32(factors.scale / slot.scale)
            magnitude = factors.magnitude
        arrays[f"{name}.lora_a"], arrays[f"{name}.lora_b"] = jnp.asarray(a), jnp.asarray(b)
        if slot.magnitude is not None:
            arrays[f"{name}.magnitude"] = (
                slot.norms(jnp.asarray(a), jnp.asarray(b))
                if magnitude is None
                else jnp.asarray(magnitude)
            )
    return arrays


def _shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    """[out, in] of every module that has, or may get, an adapter."""
    modules = {name.removesuffix(".base"): m for name, m in _modules(model) if _is_linear(m)}
    return {
        name: tuple(jax.eval_shape(lambda m=module: _base_weight(m)).shape)
        for name, module in modules.items()
    }


def _is_linear(module: Any) -> bool:
    return isinstance(module, Linear | PackedLinear)


def _is_fused(model: Transformer) -> bool:
    if not hasattr(model, "config"):
        raise ValueError(
            f"lora: a PEFT folder is of a Transformer, not of a {type(model).__name__}"
        )
    return FAMILIES[model.config.model_type].fused
