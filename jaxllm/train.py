"""Training: the state, one step as one compiled program, and sums of losses for evaluation.

A model is split once. What the loop holds is a `TrainState`, a pytree of plain arrays; a step takes
it and a batch and returns it, and the old one is donated. A batch is a dictionary of arrays [B, T]:
`tokens`, `targets` (already shifted; -100 is not counted) and, if the text is packed, `positions`
and `segment_ids`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm import ops
from jaxllm.model import Transformer

IGNORE = -100  # a target that is not counted

Batch = Mapping[str, Any]
Params = dict[str, Array]
Loss = Callable[[Transformer, Batch], tuple[Float[Array, ""], Int[Array, ""]]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What training changes: parameters by name, the optimiser's state, and the count of steps."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]


def parameters(model: Transformer) -> Params:
    """The model's own parameter arrays (not copies), by their dotted names."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): param[...] for path, param in flat}


def update(model: Transformer, params: Params) -> None:
    """Puts parameters back into the model they came from, in the dtype they have."""
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, path))
        if name not in params:
            raise ValueError(f"train: there is no parameter {name} to put back into the model")
        param.set_value(params[name])


def init_state(model: Transformer, optimizer: optax.GradientTransformation) -> TrainState:
    """The state at step 0.

    It takes the model's arrays over: the first step donates them, and the model cannot be used
    again until `update` has put parameters back.
    """
    params = parameters(model)
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def token_loss(model: Transformer, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The sum in nats of the losses of the batch's targets, and their count."""
    logits = model(batch["tokens"], batch.get("positions"), batch.get("segment_ids"))
    return ops.cross_entropy(logits, batch["targets"])


def make_train_step(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    loss: Loss = token_loss,
    *,
    micro_batches: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """A compiled `step(state, batch) -> (state, metrics)` that donates the state.

    The batch's rows are worked on in `micro_batches` equal parts, one after the other: less memory,
    same result up to rounding, since the gradient is that of the loss's sum over all parts divided
    by its count over all parts.
    Metrics: `loss` (that quotient), `tokens` (the count) and `grad_norm`, before any clipping.
    """
    gradient = jax.value_and_grad(_functional(model, loss), has_aux=True)

    def accumulate(params: Params, batch: Batch):
        if micro_batches == 1:
            return gradient(params, batch)
        rows = len(batch["tokens"])
        if rows % micro_batches:
            raise ValueError(
                f"train: {rows} rows cannot be split into {micro_batches} equal micro-batches"
            )
        parts = jax.tree.map(
            lambda x: x.reshape(micro_batches, x.shape[0] // micro_batches, *x.shape[1:]), batch
        )
        first = jax.tree.map(lambda x: x[0], parts)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, params, first)
        )

        def add(sums, part):
            return jax.tree.map(jnp.add, sums, gradient(params, part)), None

        return jax.lax.scan(add, zeros, parts)[0]

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        (total, count), grads = accumulate(state.params, batch)
        scale = 1.0 / jnp.maximum(count, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": total * scale,
            "tokens": count,
            "grad_norm": optax.tree.norm(grads),
        }
        return TrainState(cast(Params, params), opt_state, state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)


def make_evaluate(
    model: Transformer, loss: Loss = token_loss
) -> Callable[[Params, Iterable[Batch]], tuple[float, int]]:
    """An `evaluate(params, batches) -> (sum of losses, count)` with one compiled program for each
    shape; nothing is donated.
    """
    call = jax.jit(_functional(model, loss))

    def evaluate(params: Params, batches: Iterable[Batch]) -> tuple[float, int]:
        sums = [call(params, batch) for batch in batches]
        return sum(float(total) for total, _ in sums), sum(int(count) for _, count in sums)

    return evaluate


def _functional(model: Transformer, loss: Loss) -> Callable[[Params, Batch], Any]:
    """The loss as a function of parameters by name. The module is split here, and merged only while
    a program is traced.
    """
    graph, state = nnx.split(model, nnx.Param)
    names = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}

    def call(params: Params, batch: Batch):
        flat = {path: nnx.Param(params[name]) for name, path in names.items()}
        return loss(nnx.merge(graph, nnx.from_flat_state(flat)), batch)

    return call


def draw_windows(
    tokens: Int[Array, " S"], key: Array, *, rows: int, length: int
) -> dict[str, Int[Array, "B T"]]:
    """A batch of `rows` windows of a long text, each from a place drawn with `key`."""
    starts = jax.random.randint(key, (rows, 1), 0, len(tokens) - length)
    text = tokens[starts + jnp.arange(length + 1)[None, :]]
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def cover_windows(tokens: Sequence[int], *, rows: int, length: int, stride: int) -> list[Batch]:
    """Batches in which each token of a text but the first is a target once.

    Windows are `length` tokens long and begin `stride` apart. What two of them share is a target in
    the earlier one, and only context in the later: a target sees `length - stride` tokens at least,
    or all there are. The last batch is filled up with windows without targets.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"train: stride must be in [1, {length}], got {stride}")
    ids = np.asarray(tokens, np.int32)
    if len(ids) < 2:
        raise ValueError(f"train: a text of {len(ids)} tokens holds no target; give 2 or more")
    count = 1 + max(0, -(-(len(ids) - 1 - length) // stride))
    starts = np.arange(-(-count // rows) * rows) * stride
    at = starts[:, None] + np.arange(length + 1)[None, :]
    text = ids[np.minimum(at, len(ids) - 1)]
    inputs, targets = text[:, :-1], np.where(at < len(ids), text, IGNORE)[:, 1:]
    targets[1:, : length - stride] = IGNORE
    return [
        {"tokens": inputs[i : i + rows], "targets": targets[i : i + rows]}
        for i in range(0, len(inputs), rows)
    ]


@contextlib.contextmanager
def catch_interrupt() -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C only sets the event, for a loop to look at between two steps: a step
    that is cut off has donated the old state and not returned the new one. The second one raises.
    """
    event = threading.Event()

    def on_interrupt(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
