"""What a training step will need of a card's memory, before anything is allocated.

    print(plan(config, batch=1, seq=8192, lora=16, remat="auto"))

The real training step is compiled for shapes alone (`aot.peak_bytes`, no GPU needed), and XLA's
own plan of the memory is what is told. Where JAX's CUDA plugin is not installed it is compiled for
the CPU, which needs more: no kernel keeps attention's scores out of memory there, and products of
bfloat16 are made in float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.extend.core import Literal
from jax.sharding import AbstractDevice, AbstractMesh

from jaxllm import aot, fp8, lora, train
from jaxllm.byte_size import byte_size
from jaxllm.checkpoint.hf import pack_as_stored
from jaxllm.config import REMAT, ModelConfig, Runtime
from jaxllm.integers import integer
from jaxllm.lora import RANK
from jaxllm.model import Transformer
from jaxllm.optimizers import BY_NAME
from jaxllm.precision import policy as policy_named
from jaxllm.quantize import WORKING_BYTES, packed_weights, qlora_group_size
from jaxllm.quantize import quantize as pack

# From what costs no time to what costs most; each needs less memory than the one before
ORDER = ("none", "dots", "save_attention", "full", "offload")
# Bytes, as the driver of each reports them
CARDS = {"h200": 139 * 2**30, "h100": 79 * 2**30, "a100": 79 * 2**30, "rtx4090": 23 * 2**30}
RESERVED = 2**30  # for CUDA's context, kernels, and the libraries' own

_OPTIMIZERS = {**BY_NAME, "sgd": optax.sgd}
_OF_ADAPTERS = ("alpha", "targets", "kind")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of one training step on one device.

    weights: trained and frozen, as stored; packed: of these, codes and scales. moments: the
    optimiser's state. activations: what the forward pass leaves for the backward pass, on the
    device. gradients: of what is trained.
    temporaries: the rest of the peak (copies of weights in the compute dtype, results that are used
    at once, a library's space; or, where that is more, what packing the largest weight takes).
    Activations and gradients may lie in the same place, the ones gone when the others come: then
    the gradients are what they add. So the five sum up to `peak`.
    host: what is kept in pinned host memory instead. compiled_for: "h200", or "cpu". tried: the
    peaks of the policies before this one, or weights and moments where these are too much alone.
    """

    remat: str
    weights: int
    packed: int
    moments: int
    activations: int
    gradients: int
    temporaries: int
    peak: int
    host: int
    trained: int
    parameters: int
    card: str
    card_bytes: int
    compiled_for: str
    tried: tuple[tuple[str, int], ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the card has room for the peak and for what CUDA takes itself."""
        return self.peak + RESERVED <= self.card_bytes

    @property
    def is_known(self) -> bool:
        """Whether `fits` tells of a GPU. Compiled for a CPU a step may need many times as much, so
        that one that does not fit by that may fit; not if weights and moments do not.
        """
        kept = self.weights + self.moments + RESERVED
        return self.compiled_for != "cpu" or self.fits or kept > self.card_bytes

    def rows(self) -> list[tuple[str, int]]:
        """(kind, bytes), the peak last."""
        kinds = "weights moments activations gradients temporaries".split()
        return [*((kind, getattr(self, kind)) for kind in kinds), ("peak", self.peak)]

    def __str__(self) -> str:
        """A table of the kinds, and in sentences what it means for the card."""
        notes = {
            "weights": f" ({_size(self.packed)} of them packed)" if self.packed else "",
            "gradients": "" if self.gradients else " (in the space of activations that are done)",
        }
        lines = [f"{kind:12} {_size(size):>12}{notes.get(kind, '')}" for kind, size in self.rows()]
        lines[-1:] = ["-" * 25, lines[-1]]
        if self.host:
            lines.append(f"{'on the host':12} {_size(self.host):>12}")
        unit, word = (1e9, "billion") if self.parameters >= 1e8 else (1e6, "million")
        trained = f"{self.trained / self.parameters:.2%} of {self.parameters / unit:.2f} {word}"
        lines += ["", f"Trained: {trained} parameters. Remat policy: {self.remat}."]
        gib = round(self.card_bytes / 2**30, 2)
        room = f"{self.card} ({gib:g} GiB, of which CUDA itself takes 1)"
        verdict = f"The step {'fits' if self.fits else 'does not fit'} on {room}."
        lines.append(verdict if self.is_known else f"Whether the step fits on {room} is not known.")
        says = " does not" if self.is_known else ""
        for name, size in self.tried:
            lines.append(f"Policy {name}{says}: {_size(size)} or more.")
        if self.fits and self.peak > 0.75 * self.card_bytes:
            lines.append(
                "JAX takes three quarters of a card unless XLA_PYTHON_CLIENT_MEM_FRACTION=0.95."
            )
        if self.compiled_for == "cpu":
            lines.append(
                "Compiled for the CPU, where a step may need many times what it needs on a GPU: "
                f"{aot.why_not(code=False)}."
            )
        else:
            lines.append(f"Compiled for an {self.compiled_for.upper()}, not run.")
        return "\n".join(lines)


def _size(size: int) -> str:
    """In GiB, and in MiB where that is under a tenth of one."""
    if not size:
        return "0"
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.2f} MiB"


def plan(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    lora: int | None = None,
    qlora: bool = False,
    quantize: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    policy: str = "bf16",
    remat: str = "none",
    optimizer: str | optax.GradientTransformation = "adamw",
    micro_batches: int = 1,
    card: str = "h200",
    target: str | None = "h200",
    **adapters: Any,
) -> Plan:
    """Compile one training step of packed rows [batch, seq], and say what it needs.

    lora: the rank of adapters beside all linear layers, all weights are trained if None. With it
        the base is frozen and in the compute dtype.
    adapters: alpha, targets and kind of `lora.add_adapters`.
    qlora: the base's linear layers packed in 4 bits; the rank is `lora.RANK` if `lora` is None.
    quantize: the arguments by which `jaxllm.quantize` packs the base, such as {"scheme": "int8"}.
        The base is taken to come from the host's memory, weight by weight, as `jaxllm finetune`
        loads one for qlora.
    checkpoint: a folder or hub id of this config, whose packed weights are counted as they are
        stored there.
    policy: of `precision.POLICIES`. optimizer: "adamw", "adamw_8bit", "sgd", or any of optax.
    remat: of `config.REMAT`; "auto" takes the first of `ORDER` that fits on the card, or the last
        (with adapters without "dots", which then keeps more than "none").
    card: one of `CARDS`, or a size such as "24GB" (10^9 bytes each) or "22GiB".
    target: the GPU to compile for; None: the CPU, as without JAX's CUDA plugin.
    Takes from half a minute to some minutes a policy for a model of 32 layers.
    Raises: ValueError for a name that does not exist, sizes that do not divide, packed weights or
    arguments of adapters without adapters; as `jaxllm.load` for a checkpoint.
    """
    card_bytes = card_size(card)
    if remat != "auto" and remat not in REMAT:
        raise ValueError(f"plan: remat {remat!r} is not one of auto, {', '.join(REMAT)}")
    if isinstance(optimizer, str):
        if optimizer not in _OPTIMIZERS:
            raise ValueError(
                f"plan: optimizer {optimizer!r} is not one of {', '.join(_OPTIMIZERS)}"
            )
        optimizer = _OPTIMIZERS[optimizer](1e-4)
    for name, value in (("batch", batch), ("seq", seq), ("micro_batches", micro_batches)):
        integer(name, value, 1, who="plan")
    if seq > config.max_position_embeddings:
        raise ValueError(
            f"plan: {seq} tokens a row are more than the model's "
            f"{config.max_position_embeddings} positions"
        )
    if batch % micro_batches:
        raise ValueError(
            f"plan: {batch} rows of {seq} tokens cannot be split into {micro_batches} equal "
            "micro-batches"
        )
    if qlora and quantize is not None:
        raise ValueError("plan: qlora packs the base in int4; give it or quantize, not both")
    if qlora:
        quantize = {"scheme": "int4", "group_size": qlora_group_size(config)}
    if quantize is not None and "scheme" not in quantize:
        raise ValueError(f"plan: quantize needs a scheme, got {', '.join(quantize) or 'nothing'}")
    if quantize is not None and policy_named(policy).fp8:
        raise ValueError(
            f"plan: policy {policy!r} is of plain weights, and {quantize['scheme']} packs them; "
            "take policy 'bf16', or leave them plain"
        )
    if target is not None:
        aot.Target.named(target)
        if aot.why_not(code=False) is not None:
            target = None
    rank = RANK if qlora and lora is None else lora
    if unknown := [name for name in adapters if name not in _OF_ADAPTERS]:
        raise ValueError(
            f"plan: there is no argument {unknown[0]!r}; those of adapters are "
            f"{', '.join(_OF_ADAPTERS)}"
        )
    if adapters and rank is None:
        given = ", ".join(adapters)
        raise ValueError(f"plan: {given} are of adapters, and there are none; give lora or qlora")
    recipe = _Recipe(config, policy, rank, quantize, checkpoint, adapters)
    some = quantize is not None or checkpoint is not None
    if rank is None and some and packed_weights(recipe.model("none")):
        raise ValueError(
            "plan: packed weights are not trained; give the rank of adapters beside them (lora)"
        )
    names = ORDER if remat == "auto" else (remat,)
    if rank is not None and len(names) > 1:
        # Beside each product stands the adapter's, and "dots" keeps both: more than "none"
        names = tuple(name for name in names if name != "dots")
    tried: list[tuple[str, int]] = []
    for name in names:
        with _as_if_on(target):
            step = _Step(recipe, name, optimizer, batch, seq, micro_batches)
        # Not the activations, of which XLA computes some again where that costs little
        least = max(step.weights + step.moments, step.packing)
        if name != names[-1] and least + RESERVED > card_bytes:
            tried.append((name, least))  # nothing to compile for
            continue
        peak = max(step.peak(target), step.packing)
        if name != names[-1] and peak + RESERVED > card_bytes:
            tried.append((name, peak))
            continue
        return step.as_plan(peak, card, card_bytes, target or "cpu", tuple(tried))
    raise AssertionError("the last policy is always told")


def card_size(card: str) -> int:
    """Bytes of a card by its name or size ("24GB"). Raises: ValueError for neither."""
    if isinstance(card, str):
        if card in CARDS:
            return CARDS[card]
        if size := byte_size(card):
            return size
    raise ValueError(
        f"plan: card {card!r} is not one of {', '.join(CARDS)}, or a size above 0 such as '24GB'"
    )


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """Which model is trained, and what of it."""

    config: ModelConfig
    policy: str
    rank: int | None
    quantize: Mapping[str, Any] | None
    checkpoint: str | os.PathLike[str] | None
    adapters: dict[str, Any]

    def model(self, remat: str) -> Transformer:
        """Its shapes: nothing is allocated."""
        return nnx.eval_shape(lambda: self._build(remat))

    def _build(self, remat: str) -> Transformer:
        chosen = policy_named(self.policy)
        stored = chosen.param_dtype if self.rank is None else chosen.compute_dtype
        model = Transformer(
            self.config, Runtime(chosen.compute_dtype, stored, remat=remat), rngs=nnx.Rngs(0)
        )
        if self.checkpoint is not None:
            pack_as_stored(model, self.checkpoint)
        if self.quantize is not None:
            pack(model, **self.quantize)
        elif chosen.fp8:
            fp8.use_fp8(model)
        if self.rank is not None:
            lora.add_adapters(model, rank=self.rank, rngs=nnx.Rngs(0), **self.adapters)
        return model

    def trainable(self, name: str) -> bool:
        return self.rank is None or lora.is_adapter(name)


class _Step:
    """A training step of shapes alone."""

    def __init__(self, recipe, remat, optimizer, batch, seq, micro_batches):
        self.remat, self.optimizer, self.micro_batches = remat, optimizer, micro_batches
        self.model = recipe.model(remat)
        chosen = policy_named(recipe.policy)
        self.state = train.init_state(
            self.model, optimizer, trainable=recipe.trainable, scale=chosen.scale()
        )
        self.rows = _rows(batch, seq)
        trained, frozen = self.state.params, self.state.frozen
        self.weights = _bytes((trained, frozen))
        packed = packed_weights(self.model).values()
        self.packed = _bytes(list(packed))
        wide = jnp.dtype(chosen.compute_dtype).itemsize
        largest = max((math.prod(x.shape) for x in packed), default=0)
        self.packing = self.weights
        if recipe.quantize is not None:
            self.packing += largest * (wide + WORKING_BYTES)
        self.moments = _bytes(self.state.opt_state)
        self.trained = _count(trained)
        self.parameters = _parameters(recipe)
        wide = 4 if micro_batches > 1 else jnp.dtype(chosen.compute_dtype).itemsize
        self.gradients = self.trained * wide
        self.activations, self.host = _residuals(
            self.model, recipe.trainable, _rows(batch // micro_batches, seq)
        )

    def peak(self, target: str | None) -> int:
        """Bytes of device memory, by XLA's plan."""
        step = train.make_train_step(self.model, self.optimizer, micro_batches=self.micro_batches)
        if target is not None:
            return aot.peak_bytes(step, self.state, self.rows, target=target)
        memory: Any = step.lower(self.state, self.rows).compile().memory_analysis()
        kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes + kept

    def as_plan(self, peak, card, card_bytes, compiled_for, tried) -> Plan:
        rest = max(peak - self.weights - self.moments, 0)
        activations = min(self.activations, rest)
        gradients = min(self.gradients, rest - activations)
        return Plan(
            self.remat,
            self.weights,
            self.packed,
            self.moments,
            activations,
            gradients,
            rest - activations - gradients,
            peak,
            self.host,
            self.trained,
            self.parameters,
            card,
            card_bytes,
            compiled_for,
            tried,
        )


def _as_if_on(target: str | None) -> contextlib.AbstractContextManager[object]:
    """Ops choose as on that GPU."""
    if target is None:
        return contextlib.nullcontext()
    gpu = aot.Target.named(target)
    device = AbstractDevice(device_kind=gpu.device_kind, num_cores=gpu.num_sms, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def _rows(batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    names = "tokens targets positions segment_ids".split()
    return {name: jax.ShapeDtypeStruct((batch, seq), jnp.int32) for name in names}


def _bytes(tree: Any) -> int:
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def _count(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def _parameters(recipe: _Recipe) -> int:
    """How many numbers the model has, adapters included; packed ones are as many as they were."""
    plain = dataclasses.replace(recipe, quantize=None, checkpoint=None)
    return _count(train.parameters(plain.model("none")))


def _residuals(model: Transformer, trainable: Callable[[str], bool], rows: Any) -> tuple[int, int]:
    """Bytes that the forward pass makes and leaves for the backward pass: (device, host)."""

    def is_trained(path: Any, _: Any) -> bool:
        return trainable(".".join(map(str, path)))

    graph, trained, frozen = nnx.split(model, is_trained, ...)

    def left(trained, frozen, rows):
        def loss(trained):
            return train.token_loss(nnx.merge(graph, trained, frozen), rows)[0]

        return jax.tree.leaves(jax.vjp(loss, trained)[1])

    jaxpr = jax.make_jaxpr(left)(trained, frozen, rows).jaxpr
    # What only has another name or shape is the same array
    made_from = {
        equation.outvars[0]: equation.invars[0]
        for equation in jaxpr.eqns
        if equation.primitive.name in ("name", "reshape")
    }
    device = host = 0
    seen = set(jaxpr.invars) | set(jaxpr.constvars)
    for variable in jaxpr.outvars:
        while not isinstance(variable, Literal) and variable in made_from:
            variable = made_from[variable]
        if isinstance(variable, Literal) or variable in seen:
            continue
        seen.add(variable)
        size = _bytes(variable.aval)
        if "host" in str(getattr(variable.aval, "memory_space", "")).lower():
            host += size
        else:
            device += size
    return device, host
