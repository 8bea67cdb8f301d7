"""Training: the state, one step as one compiled program, and sums of losses for evaluation.

A model is split once. What the loop holds is a `TrainState`, a pytree of plain arrays; a step takes
it and a batch and returns it, and the old one is donated. A batch is a dictionary of arrays [B, T]:
`tokens`, `targets` (already shifted; -100 is not counted) and, if the text is packed, `positions`
and `segment_ids`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Float, Int, Num

from jaxllm import ops
from jaxllm.integers import integer
from jaxllm.layers import Embedding, Linear
from jaxllm.meshes import mesh_problem
from jaxllm.model import Transformer
from jaxllm.optimizers import apply_updates_stochastically
from jaxllm.precision import NoScale, Scale, check_scale
from jaxllm.quantize import PackedEmbedding, PackedLinear, packed_weights
from pallas_kernels.packed import Packed

IGNORE = -100  # a target that is not counted

Batch = Mapping[str, Any]
Params = dict[str, Array]
Loss = Callable[[Transformer, Batch], tuple[Float[Array, ""], Num[Array, ""]]]
_KEYS = ("tokens", "targets", "positions", "segment_ids")
_CALLS_THE_LOSS = re.compile(
    r"keyword-only arguments?: (.*'(?:grad|value_fn)'.*)|^((?:obj|grad)_fn) must be provided"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What training changes, and what it needs beside that.

    params: what is trained, by dotted name, in the dtype that the optimiser updates.
    frozen: the model's other parameters, by dotted name; no step changes them.
    step: how many batches were taken. skipped: how many of them changed no parameter, because a
    gradient was not finite or no target counted. scale: the scale of the loss.
    """

    params: Params
    frozen: Params
    opt_state: optax.OptState
    step: Int[Array, ""]
    scale: Scale
    skipped: Int[Array, ""]

    @property
    def all_params(self) -> Params:
        """Trained and frozen parameters, as `update` and `evaluate` take them."""
        return {**self.params, **self.frozen}


def parameters(model: Transformer) -> Params:
    """The model's own parameter arrays (not copies), by their dotted names."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): param.get_value() for path, param in flat}


def count_parameters(model: Transformer) -> int:
    """The numbers that its parameters stand for: of packed weights no codes, scales or order."""
    packed = packed_weights(model)
    params = parameters(model)
    plain = [x.size for name, x in params.items() if name.rpartition(".")[0] not in packed]
    biases = [x.size for name in packed if (x := params.get(f"{name}.bias")) is not None]
    return sum([*plain, *biases, *(math.prod(weight.shape) for weight in packed.values())])


def update(model: Transformer, params: Params) -> None:
    """Puts parameters back into the model they came from, in the dtype they have.

    Raises: ValueError if one is absent or of another shape; then nothing is changed.
    """
    own = {
        ".".join(map(str, path)): param
        for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    for name, param in own.items():
        if name not in params:
            raise ValueError(
                f"train: there is no parameter {name} to put back into the model; of a state of "
                "which a part is trained, give all_params"
            )
        if (shape := jnp.shape(params[name])) != param.shape:
            raise ValueError(f"train: {name} has shape {shape}, the model's {param.shape}")
    for name, param in own.items():
        param.set_value(params[name])


def init_state(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    *,
    trainable: Callable[[str], bool] | None = None,
    scale: Scale = NoScale(),
) -> TrainState:
    """The state at step 0.

    It takes the model's arrays over: the first step donates them, and the model cannot be used
    again until `update` has put parameters back. `trainable` tells by its name whether a parameter
    is trained (None: all are). The optimiser's moments are float32, also those of bfloat16 weights,
    and lie where their parameter does. Of a model that was put on devices (`load(sharding=)`) the
    rest of the state, and trained adapters that were added to it, are on all of those.
    Of a model of shapes alone (`nnx.eval_shape`) it is a state of shapes, to compile steps for.
    Raises: ValueError if trainable is no function, the optimizer has no init and update, or the
    scale is none or cannot be one; if nothing is to be trained, or a packed weight, or something
    else that is no floating-point array; or if the model has variables that are no `nnx.Param`.
    """
    if trainable is not None and not callable(trainable):
        raise ValueError(
            "train: trainable must be a function of a parameter's name, as lora.is_adapter is, got "
            f"{trainable!r:.60}"
        )
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise ValueError(
            "train: the optimizer must have init and update, as optax.adamw(1e-3) has, got "
            f"{optimizer!r:.60}"
        )
    check_scale(scale)
    _check_variables(model)
    every = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x
        for name, x in parameters(model).items()
    }
    params = {name: x for name, x in every.items() if trainable is None or trainable(name)}
    if not params:
        raise ValueError(f"train: none of the {len(every)} parameters is to be trained")
    packed = packed_weights(model)
    for name, x in params.items():
        owner, _, part = name.rpartition(".")
        if owner in packed and part != "bias":
            raise ValueError(
                f"train: {owner} is packed in {packed[owner].scheme}, which has no gradient; "
                "leave it out with trainable=, as lora.is_adapter does"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"train: {name} is {x.dtype}, which has no gradient; leave it out with trainable="
            )
    frozen = {name: x for name, x in every.items() if name not in params}

    def start(params: Params, scale: Scale) -> tuple[Any, ...]:
        zero = jnp.zeros((), jnp.int32)
        return optimizer.init(_float32(params)), zero, scale, jnp.zeros((), jnp.int32)

    if any(isinstance(x, jax.ShapeDtypeStruct) for x in every.values()):
        return TrainState(params, frozen, *jax.eval_shape(start, params, scale))
    places = None  # JAX puts it on the default device, free to follow other arrays
    if (whole := _whole_sharding(every)) is not None:
        params = {n: x if x.committed else jax.device_put(x, whole) for n, x in params.items()}
        places = _places(jax.eval_shape(start, params, scale), params, whole)
    # In a program of its own, so that no array of the optimiser's is one of the parameters
    return TrainState(params, frozen, *jax.jit(start, out_shardings=places)(params, scale))


def _whole_sharding(params: Params) -> Sharding | None:
    """All of an array on each device of the first parameter that was put on some; None if none."""
    for name, x in params.items():
        if isinstance(x, Tracer) or not x.committed:
            continue
        if problem := mesh_problem(x.sharding):
            raise ValueError(f"train: {name} is spread as {x.sharding}: {problem}")
        if isinstance(x.sharding, NamedSharding):
            return NamedSharding(x.sharding.mesh, PartitionSpec())
        if len(x.devices()) == 1:
            return SingleDeviceSharding(next(iter(x.devices())))
    return None


def _places(state: Any, params: Params, whole: Sharding) -> Any:
    """Where the arrays of a new state go, of which the shapes are given."""

    def place(path: tuple[Any, ...], x: Any) -> Sharding:
        names = {key.key for key in path if isinstance(key, jax.tree_util.DictKey)}
        alike = (params[n].sharding for n in names & params.keys() if params[n].shape == x.shape)
        return next(alike, whole)

    return jax.tree_util.tree_map_with_path(place, state)


def token_loss(model: Transformer, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The sum in nats of the losses of the batch's targets, and their count.

    No array of all logits is made, but where the head is more than a matrix (an adapter beside it).
    """
    tokens = batch["tokens"], batch.get("positions"), batch.get("segment_ids")
    hidden, _ = model.hidden(*tokens)
    with jax.named_scope("loss"):
        if (factors := head_factors(model, hidden)) is None:
            return ops.cross_entropy(model.head(hidden), batch["targets"])
        return ops.linear_cross_entropy(
            *factors,
            batch["targets"],
            softcap=model.config.final_logit_softcapping,
            implementation=model.runtime.implementation,
        )


def head_factors(
    model: Transformer, hidden: Float[Array, "*B D"]
) -> tuple[Float[Array, "*B D"], Float[Array, "V D"] | Packed] | None:
    """What the head multiplies: `hidden` as its weight's columns want it, and the weight. None if
    the head is more than a matrix.
    """
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    if isinstance(head, PackedLinear):
        return head.arranged(hidden), head.packed
    if isinstance(head, PackedEmbedding):
        return hidden, head.packed
    if type(head) in (Linear, Embedding):
        return hidden, head.weight[...]
    return None


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    loss: Loss = token_loss,
    micro_batches: int = 1,
    stochastic_rounding: bool = False,
) -> tuple[TrainState, dict[str, Array]]:
    """One step: the pure function that `make_train_step` compiles, for loops of one's own.

    Of the model only its structure and the dtype that it computes in are looked at. Weights of
    blocks are cast to that dtype once; sums of gradients, the update and the metrics are float32.
    The rest is told there.
    """
    if "tokens" not in batch:
        raise ValueError(f"train: the batch has no tokens, got only {sorted(batch)}")
    call = _functional(model, loss)
    # A power of two, so nothing is rounded: the true count is known when all parts are done
    nominal = 2.0 ** int(math.log2(max(batch["tokens"].size, 1)))

    def objective(weights: Params, part: Batch):
        total, count = call({**weights, **state.frozen}, part)
        return state.scale.scale_loss(total / nominal), (total, count)

    def gradient(part: Batch):
        grads, sums = jax.grad(objective, has_aux=True)(weights, part)
        return _float32(grads), sums

    weights = _computed(state.params, model.runtime.compute_dtype)
    grads, (total, count) = _accumulate(gradient, batch, micro_batches)
    tokens = jnp.where(count != 0, count, 1).astype(jnp.float32)
    grads = jax.tree.map(lambda g: g * (nominal / tokens), state.scale.unscale(grads))
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(total)  # a sum is finite only if each part is
    moves = finite & (count != 0)  # without targets weight decay would move weights all the same

    value = total / tokens  # which some optimisers want, `optax.contrib.reduce_on_plateau`
    takes = inspect.signature(optimizer.update).parameters.values()
    wanted = any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in takes)
    extra = {"value": value} if wanted else {}
    try:
        updates, opt_state = cast(optax.GradientTransformationExtraArgs, optimizer).update(
            grads, state.opt_state, state.params, **extra
        )
    except (TypeError, ValueError) as error:  # no signature tells: `optax.chain` takes all there is
        if (asked := _CALLS_THE_LOSS.search(str(error))) is None:
            raise
        raise ValueError(
            f"train: the optimizer's update asks for {asked[1] or asked[2]}, and a step has "
            "gradients, parameters and `value`, the loss; one that calls the loss itself (a line "
            "search, as optax.lbfgs has, or optax.contrib.sophia) cannot be used"
        ) from error
    if stochastic_rounding:
        key = jax.random.fold_in(jax.random.key(0), state.step)  # the same when a run is resumed
        params = apply_updates_stochastically(state.params, updates, key)
    else:
        params = optax.apply_updates(state.params, updates)

    def keep(new, old, where=moves):
        return jax.tree.map(lambda n, o: jnp.where(where, n, o), new, old)

    after = TrainState(
        cast(Params, keep(params, state.params)),
        state.frozen,
        keep(opt_state, state.opt_state),
        state.step + 1,
        keep(state.scale.adjust(finite), state.scale, count != 0),
        state.skipped + jnp.where(moves, 0, 1).astype(jnp.int32),
    )
    metrics = {
        "loss": value,
        "tokens": count,
        "grad_norm": norm,
        "scale": state.scale.value,
        "skipped": after.skipped,
    }
    return after, metrics


def make_train_step(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    loss: Loss = token_loss,
    *,
    micro_batches: int = 1,
    stochastic_rounding: bool = False,
) -> TrainStep:
    """A compiled `step(state, batch) -> (state, metrics)` that donates the state.

    What is trained, and the scale of the loss, are the state's. The batch's rows are worked on in
    `micro_batches` equal parts, one after the other (all its arrays then have the rows of `tokens`;
    a number is every part's): less memory, same result up to rounding, since
    the gradient is that of the loss's sum over all parts divided by its count over all parts (or by
    the sum of its weights, if a loss of your own returns that). An optimiser that takes `value` is
    given that quotient; one that calls the loss itself (a line search) is refused by the step.
    A step whose loss or gradient is not finite, or whose count is 0 (a sum of weights may be below
    it), changes neither parameters nor the optimiser's state, and is counted as skipped. What is
    spread over devices stays spread as it was. With `stochastic_rounding`, bfloat16 weights are
    rounded up or down by chance, so that steps smaller than their last digit are not lost.
    Metrics, scalars on the device: `loss` (that quotient), `tokens` (the count), `grad_norm`
    (before any clipping), `scale` (what the loss was multiplied by) and `skipped` (steps so far
    that changed nothing).
    """
    micro_batches = integer("micro_batches", micro_batches, 1, who="train")
    step = functools.partial(
        train_step,
        model=model,
        optimizer=optimizer,
        loss=loss,
        micro_batches=micro_batches,
        stochastic_rounding=stochastic_rounding,
    )
    # cuBLASLt adds a product to the sum of those before it in the same launch, XLA's own products
    # leave that to a kernel more: 944 and 958 ms a step of a Llama of 1.3B parameters on an H200
    options = {"xla_gpu_enable_triton_gemm": False}
    if model.runtime.remat == "offload":
        # Around copies to the host that schedule puts the products for gradients off, and keeps
        # what they need: 38 GiB for an 8B with adapters at 8192 tokens, and 19 without offloading
        options["xla_gpu_enable_latency_hiding_scheduler"] = False
    return TrainStep(step, options)


class TrainStep:
    """(state, batch) -> (state, metrics), compiled; `make_train_step` says what it does.

    XLA would spread a new state over devices in a way of its own, for which the next step had to be
    compiled again: it lies as the one before.
    """

    def __init__(self, pure: Callable[..., Any], options: dict[str, Any]):
        self._pure = pure
        self._jit = functools.partial(jax.jit, pure, donate_argnums=0, compiler_options=options)
        self._jitted: dict[Any, Any] = {}  # by where the state lies

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        if isinstance(state.step, Tracer):  # part of a program of its caller's
            return self._pure(state, batch)
        return self._for(state)(state, batch)

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """As `jax.jit` has it; arguments may be shapes."""
        return self._for(state).lower(state, batch)

    def _for(self, state: TrainState) -> Any:
        key, after = None, None
        if jax.device_count() > 1:
            changed, tree = jax.tree.flatten(dataclasses.replace(state, frozen={}))
            places = tuple(map(_place, changed))
            if any(places):
                key = places, tree
                after = dataclasses.replace(tree.unflatten(places), frozen=None), None
        if key not in self._jitted:
            self._jitted[key] = self._jit(out_shardings=after)
        return self._jitted[key]


def _place(x: Any) -> Sharding | None:
    """Where an array lies that is on several devices."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    return sharding if sharding is not None and sharding.num_devices > 1 else None


def make_evaluate(
    model: Transformer, loss: Loss = token_loss
) -> Callable[[Params, Iterable[Batch] | Batch], tuple[float, float]]:
    """An `evaluate(params, batches) -> (sum of losses, count)`, of a single batch too, with one
    compiled program for each shape; nothing is donated. The parameters are all of the model's:
    `TrainState.all_params`.
    """
    call = jax.jit(_functional(model, loss))

    def evaluate(params: Params, batches: Iterable[Batch] | Batch) -> tuple[float, float]:
        several = [batches] if isinstance(batches, Mapping) else batches
        sums = [call(params, batch) for batch in several]
        return sum(float(total) for total, _ in sums), sum(count.item() for _, count in sums)

    return evaluate


def _accumulate(gradient: Callable[[Batch], Any], batch: Batch, parts: int) -> Any:
    """What `gradient` returns for the batch: the sum of what it returns for its parts."""
    if parts == 1:
        return gradient(batch)
    rows = len(batch["tokens"])
    if parts < 1 or rows % parts:
        raise ValueError(f"train: {rows} rows cannot be split into {parts} equal micro-batches")

    def part(path: Any, x: Any) -> Array:
        """Every parts-th row, so that a part of a preference batch holds pairs, chosen ones first;
        a number without rows whole.
        """
        if not jnp.ndim(x):
            return jnp.broadcast_to(x, (parts,))
        if len(x) != rows:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"train: {name} has {len(x)} rows and tokens {rows}; micro_batches cuts a batch by "
                "rows, so that all its arrays must have as many"
            )
        return jnp.reshape(x, (x.shape[0] // parts, parts, *x.shape[1:])).swapaxes(0, 1)

    split = jax.tree.map_with_path(part, batch)
    first = jax.tree.map(lambda x: x[0], split)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, first))

    def add(sums, part):
        return jax.tree.map(jnp.add, sums, gradient(part)), None

    return jax.lax.scan(add, zeros, split)[0]


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _computed(params: Params, dtype: str) -> Params:
    """Matrices of blocks in the dtype of the products they go into.

    Those of embedding and head stay: both are cast where they are used, and the gradient of the
    head is summed over chunks of tokens in float32.
    """
    return {
        name: x.astype(dtype) if name.startswith("layers.") and x.ndim > 1 else x
        for name, x in params.items()
    }


def _functional(model: Transformer, loss: Loss) -> Callable[[Params, Batch], Any]:
    """The loss as a function of parameters by name. The module is split here, and merged only while
    a program is traced.
    """
    if not callable(loss):
        raise ValueError(
            f"train: loss must be a function of a model and a batch, as token_loss is, got "
            f"{loss!r:.60}"
        )
    _check_variables(model)
    graph, state = nnx.split(model, nnx.Param)
    names = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}

    def call(params: Params, batch: Batch):
        if missing := sorted(names.keys() - params.keys()):
            raise ValueError(
                f"train: of the model's {len(names)} parameters {len(missing)} are not given, "
                f"{missing[0]} the first; TrainState.all_params has all"
            )
        if loss is token_loss:
            _check_keys(batch)
        flat = {path: nnx.Param(params[name]) for name, path in names.items()}
        found = loss(nnx.merge(graph, nnx.from_flat_state(flat)), batch)
        if not isinstance(found, tuple | list) or len(found) != 2:
            got = f"{len(found)} values" if isinstance(found, tuple | list) else "one value"
            raise ValueError(
                f"train: a loss returns the sum of the targets' losses and their count, got {got}"
            )
        return found

    return call


def _check_keys(batch: Batch) -> None:
    """Raises: ValueError for a batch with other keys than `token_loss` reads."""
    if missing := [key for key in _KEYS[:2] if key not in batch]:
        raise ValueError(f"train: the batch has no {' and no '.join(missing)}")
    if strange := sorted(batch.keys() - set(_KEYS)):
        raise ValueError(
            f"train: the batch has {', '.join(map(repr, strange))}, which token_loss does not "
            f"read; it reads {', '.join(_KEYS)}"
        )


def _check_variables(model: Transformer) -> None:
    """Raises: ValueError if it has variables that are no parameters, which no step carries on."""
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Param))):
        raise ValueError(
            f"train: {'.'.join(map(str, path))} is of the type {type(variable).__name__}, but a "
            "step carries on nnx.Param alone; freeze parameters with trainable= of init_state"
        )


def draw_windows(
    tokens: Int[Array, " S"], key: Array, *, rows: int, length: int
) -> dict[str, Int[Array, "B T"]]:
    """A batch of `rows` windows of a long text, each from a place drawn with `key`.

    Raises: ValueError if the text is too short for one and its last target.
    """
    for name, value in (("rows", rows), ("length", length)):
        integer(name, value, 1, who="train")
    if len(tokens) <= length:
        raise ValueError(
            f"train: windows of {length} tokens and a target need a text of at least {length + 1} "
            f"tokens, got {len(tokens)}"
        )
    starts = jax.random.randint(key, (rows, 1), 0, len(tokens) - length)
    if isinstance(starts, Tracer):  # which NumPy cannot index with; else only windows are read
        tokens = jnp.asarray(tokens)
    text = tokens[starts + jnp.arange(length + 1)[None, :]]
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def cover_windows(tokens: Sequence[int], *, rows: int, length: int, stride: int) -> list[Batch]:
    """Batches in which each token of a text but the first is a target once.

    Windows are `length` tokens long and begin `stride` apart. What two of them share is a target in
    the earlier one, and only context in the later: a target sees `length - stride` tokens at least,
    or all there are. The last batch is filled up with windows without targets.
    """
    length = integer("length", length, 1, who="train")
    stride = integer("stride", stride, 1, length, who="train")
    rows = integer("rows", rows, 1, who="train")
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
    The event is never set where Ctrl-C is not ours to catch: in a thread beside the main one, in a
    process that ignores it, as a shell's background jobs do, and below a handler that is not
    Python's, which could not be put back.
    """
    event = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before in (signal.SIG_IGN, None):
        yield event
        return

    def on_interrupt(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
