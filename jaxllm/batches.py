"""What a `Trainer` asks of the batches that it is given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import train
from jaxllm.model import Transformer
from jaxllm.train import Batch


@runtime_checkable
class Batches(Protocol):
    """What a Trainer reads: an iterator of batches that can say, and take, how far it has got.

    `state` returns what JSON gives back as it was (numbers, strings, lists, dictionaries by
    strings), for a checkpoint keeps it so. Around an iterator of grain, whose dictionary it is:

        class Batches:
            def __init__(self, dataset):
                self.iterator = iter(dataset)
                self.state, self.restore = self.iterator.get_state, self.iterator.set_state

            def __next__(self):
                return next(self.iterator)
    """

    def __next__(self) -> Batch: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


def check_batch(batch: Any, name: str, model: Transformer, loss: train.Loss) -> None:
    """Raises: ValueError if there are no tokens [B, T], for lists, or, of arrays in the host's
    memory, for ids and positions that the model does not have: an embedding clamps those,
    `token_loss` has no number for targets beyond, and turns are by any of these.
    """
    if not isinstance(batch, Mapping) or "tokens" not in batch:
        what = f"only {sorted(batch)}" if isinstance(batch, Mapping) else f"{batch!r:.60}"
        raise ValueError(f"trainer: the {name} has no 'tokens', got {what}")
    own = loss is not train.token_loss  # what a batch has beside tokens may then be anything
    for key in ("tokens",) if own else ("tokens", "targets", "positions", "segment_ids"):
        x = batch.get(key)
        shape = getattr(x, "shape", None)
        if (shape is None and x is not None) or (key == "tokens" and len(shape or ()) != 2):
            found = f"a {type(x).__name__}" if shape is None else f"shape {shape}"
            raise ValueError(
                f"trainer: the {key} of the {name} must be an array [B, T], got {found}"
            )
    config = model.config
    tokens = "tokens in its vocabulary"
    limits = {
        "tokens": (config.vocab_size, tokens),
        "positions": (config.max_position_embeddings, "positions"),
    }
    if not own:
        limits["targets"] = config.vocab_size, f"{tokens} ({train.IGNORE} is not counted)"
    for key, (beyond, what) in limits.items():
        x = batch.get(key)
        if not isinstance(x, np.ndarray):
            continue
        x = x[x != train.IGNORE] if key == "targets" else x
        low, high = int(x.min(initial=0)), int(x.max(initial=0))
        if low < 0 or high >= beyond:
            raise ValueError(
                f"trainer: the {key} of the {name} go from {low} to {high}, but the model has "
                f"{beyond} {what}"
            )


def kept_state(state: Any) -> Any:
    """The batches' state as a checkpoint will give it back, whatever its owner goes on to do.

    Raises: ValueError if that is another.
    """

    def listed(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: listed(value) for key, value in x.items()}
        return [listed(value) for value in x] if isinstance(x, list | tuple) else x

    try:
        kept = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"trainer: the batches' state must be plain JSON: {error}") from None
    if kept != listed(state):
        raise ValueError(
            "trainer: the batches' state must be plain JSON, whose dictionaries have strings as "
            f"keys, got {state!r:.60}, which comes back as {kept!r:.60}"
        )
    return kept


def digest_of(batches: Sequence[Batch]) -> str | None:
    """Of what is measured, for losses of other batches must not be compared: whole numbers and
    masks. Others, such as a reference's, may have other last bits where they were computed anew.
    """
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(b"batch")
        for path, x in jax.tree_util.tree_leaves_with_path(dict(batch)):
            dtype = jax.dtypes.result_type(x)
            if jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_):
                x = np.ascontiguousarray(x)
                name = jax.tree_util.keystr(path)
                digest.update(f"{name} {x.dtype}{x.shape}".encode() + x.tobytes())
    return digest.hexdigest()[:16] if batches else None
