"""Mixed precision: which dtypes a run has, and the scale of its loss.

A policy chooses `NoScale` or `DynamicScale`; whoever knows a scale that fits a run gives
`train.init_state` or the `Trainer` a `StaticScale`. They are pytrees with all their state in
leaves, so they pass through `jit` and checkpoints whole; `NoScale` has none, and the training step
is written once for all three.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.options import is_number

Tree = TypeVar("Tree")


class Scale(Protocol):
    """What a loss is multiplied by before its gradient is taken."""

    def scale_loss(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        """The loss in float32, times the scale."""
        ...

    def unscale(self, grads: Tree) -> Tree:
        """Gradients of the scaled loss to those of the loss, in float32."""
        ...

    def adjust(self, finite: Bool[Array, ""]) -> Any:
        """The scale of the next step, after gradients that were all finite or were not."""
        ...

    @property
    def value(self) -> Float[Array, ""]:
        """The scale itself, float32."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoScale:
    """The loss as it is: for float32 and bfloat16."""

    def scale_loss(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        return loss.astype(jnp.float32)

    def unscale(self, grads: Tree) -> Tree:
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    def adjust(self, finite: Bool[Array, ""]) -> NoScale:
        del finite
        return self

    @property
    def value(self) -> Float[Array, ""]:
        return jnp.ones((), jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticScale:
    """One scale for the whole run; a power of two keeps it exact."""

    scale: float | Float[Array, ""]

    def __post_init__(self) -> None:
        _to_arrays(self, scale=np.float32)

    def scale_loss(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        return loss.astype(jnp.float32) * self.scale

    def unscale(self, grads: Tree) -> Tree:
        return jax.tree.map(lambda g: g.astype(jnp.float32) / self.scale, grads)

    def adjust(self, finite: Bool[Array, ""]) -> StaticScale:
        del finite
        return self

    @property
    def value(self) -> Float[Array, ""]:
        return jnp.asarray(self.scale, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicScale:
    """A scale that is multiplied by `growth` after `interval` steps of finite gradients in a row,
    and by `backoff` after a step of others, within [`min_scale`, `max_scale`].

    `good` counts the steps since the last change. Powers of two keep all of it exact.
    Source: Micikevicius et al., arXiv:1710.03740.
    """

    scale: float | Float[Array, ""] = 2.0**15
    growth: float | Float[Array, ""] = 2.0
    backoff: float | Float[Array, ""] = 0.5
    interval: int | Int[Array, ""] = 2000
    min_scale: float | Float[Array, ""] = 1.0
    max_scale: float | Float[Array, ""] = 2.0**24
    good: int | Int[Array, ""] = 0

    def __post_init__(self) -> None:
        real = np.float32
        _to_arrays(self, scale=real, growth=real, backoff=real, min_scale=real, max_scale=real)
        _to_arrays(self, interval=np.int32, good=np.int32)

    def scale_loss(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        return loss.astype(jnp.float32) * self.scale

    def unscale(self, grads: Tree) -> Tree:
        return jax.tree.map(lambda g: g.astype(jnp.float32) / self.scale, grads)

    def adjust(self, finite: Bool[Array, ""]) -> DynamicScale:
        grows = jnp.asarray(self.good) + 1 >= jnp.asarray(self.interval)
        grown = jnp.minimum(jnp.asarray(self.scale) * self.growth, self.max_scale)
        shrunk = jnp.maximum(jnp.asarray(self.scale) * self.backoff, self.min_scale)
        return dataclasses.replace(
            self,
            scale=jnp.where(finite, jnp.where(grows, grown, self.scale), shrunk),
            good=jnp.where(finite & ~grows, self.good + 1, 0).astype(jnp.int32),
        )

    @property
    def value(self) -> Float[Array, ""]:
        return jnp.asarray(self.scale, jnp.float32)


_BETWEEN = {"growth": (1.0, math.inf), "backoff": (0.0, 1.0), "good": (-1.0, math.inf)}


def check_scale(scale: Any) -> None:
    """Of `train.init_state`, and not where one is made: JAX makes pytrees of anything.

    Raises: ValueError for what is no scale, and for numbers that cannot be one's.
    """
    members = "scale_loss", "unscale", "adjust", "value"
    if isinstance(scale, type) or not all(hasattr(scale, name) for name in members):
        raise ValueError(
            "precision: a scale is one of jaxllm.precision's, as StaticScale(1024.0), got "
            f"{scale!r:.60}"
        )
    if not isinstance(scale, StaticScale | DynamicScale):
        return  # one of its caller's own
    shapes = Tracer | jax.ShapeDtypeStruct
    known = {n: np.asarray(x).tolist() for n, x in vars(scale).items() if not isinstance(x, shapes)}
    for name, x in known.items():
        low, high = _BETWEEN.get(name, (0.0, math.inf))
        if not is_number(x) or not low < x < high:
            raise ValueError(
                f"precision: {name} of a {type(scale).__name__} must be above {low:g} and "
                f"{'finite' if high == math.inf else f'below {high:g}'}, got {x!r:.60}"
            )
    low, high = known.get("min_scale", 0), known.get("max_scale", math.inf)
    if not low <= known.get("scale", low) <= high:
        raise ValueError(
            f"precision: scale {known.get('scale', low)} is not between min_scale {low} and "
            f"max_scale {high}"
        )


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a run: of the weights that the optimiser holds, and of what is computed.

    fp8: products with weights in 8 bits, on top of `compute_dtype`. loss_scaling: "none" or
    "dynamic".
    """

    name: str
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    fp8: bool = False
    loss_scaling: str = "none"

    def scale(self) -> NoScale | DynamicScale:
        """The loss scale that a run begins with."""
        return DynamicScale() if self.loss_scaling == "dynamic" else NoScale()


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fp32"),
        Policy("bf16", compute_dtype="bfloat16"),
        Policy("fp16", compute_dtype="float16", loss_scaling="dynamic"),
        Policy("fp8", compute_dtype="bfloat16", fp8=True),
    )
}


def policy(name: str) -> Policy:
    """The policy of that name. Raises: ValueError if there is none."""
    if name not in POLICIES:
        raise ValueError(f"precision: no policy is named {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]


def _to_arrays(owner: Any, /, **dtypes: Any) -> None:
    """Python's numbers to NumPy's, which have a dtype; what JAX puts into a pytree stays."""
    for name, dtype in dtypes.items():
        value = getattr(owner, name)
        if isinstance(value, (int, float)):
            object.__setattr__(owner, name, np.asarray(value, dtype))
