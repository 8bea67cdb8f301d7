"""The operations of a model; `explain` tells which implementations of one can run a call,
`chosen` which one does.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from jaxllm.ops._select import Table, choose, known_name, name_for
from jaxllm.ops.attention import ATTENTION, HOLDS_SCORES, attention
from jaxllm.ops.between_attentions import (
    BETWEEN_ATTENTIONS,
    Following,
    Link,
    Weights,
    between_attentions,
    no_meeting,
)
from jaxllm.ops.cast_transpose import CAST_TRANSPOSE, cast_transpose
from jaxllm.ops.decode_layers import (
    DECODE_LAYERS,
    Layer,
    Token,
    decode_layers,
)
from jaxllm.ops.fused_linear import (
    EPILOGUES,
    FUSED_LINEAR,
    Cache,
    Norm,
    Rotary,
    fused_linear,
    gates_itself,
    takes_gate,
    takes_rows,
)
from jaxllm.ops.glu import GLU, glu
from jaxllm.ops.linear import EMBEDDING, LINEAR, embedding, linear
from jaxllm.ops.log_probs import linear_log_probs, log_probs
from jaxllm.ops.loss import LINEAR_CROSS_ENTROPY, cross_entropy, linear_cross_entropy
from jaxllm.ops.norm import LAYER_NORM, RMS_NORM, layer_norm, rms_norm
from jaxllm.ops.rope import ROPE, rope
from jaxllm.ops.sampling_threshold import SAMPLING_THRESHOLD, sampling_threshold
from jaxllm.ops.softmax import SCALE_SOFTMAX, scale_softmax
from jaxllm.ops.ternary import bit_linear
from pallas_kernels import device as device_lib

OPS = {
    "attention": (attention, ATTENTION),
    "scale_softmax": (scale_softmax, SCALE_SOFTMAX),
    "linear": (linear, LINEAR),
    "embedding": (embedding, EMBEDDING),
    "rms_norm": (rms_norm, RMS_NORM),
    "layer_norm": (layer_norm, LAYER_NORM),
    "rope": (rope, ROPE),
    "glu": (glu, GLU),
    "fused_linear": (fused_linear, FUSED_LINEAR),
    "between_attentions": (between_attentions, BETWEEN_ATTENTIONS),
    "decode_layers": (decode_layers, DECODE_LAYERS),
    "linear_cross_entropy": (linear_cross_entropy, LINEAR_CROSS_ENTROPY),
    "sampling_threshold": (sampling_threshold, SAMPLING_THRESHOLD),
    "cast_transpose": (cast_transpose, CAST_TRANSPOSE),
}


def check_names(implementation: str | Mapping[str, str]) -> None:
    """Raises: ValueError if an op has no implementation of that name, or a mapping names no op."""
    for op, (_, table) in OPS.items():
        known_name(op, table, implementation)


def explain(op: str, *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """Why each implementation of the op is passed over (None: it would run), as "auto" asks them.

    The arguments are those of the op itself, in a call that it takes, for what the op refuses is no
    implementation's reason; shapes suffice (`jax.ShapeDtypeStruct`), for nothing is run.
    """
    table, operands, named = _call("explain", op, args, kwargs)
    del named["implementation"]
    device = device_lib.current()
    return {
        name: entry.why_not_auto(*operands, device=device, **named) for name, entry in table.items()
    }


def chosen(op: str, *args: Any, **kwargs: Any) -> str:
    """The name of the implementation that runs a call of the op, whose arguments are as in
    `explain`.

    Raises: as the op would, for an implementation that is unknown or cannot run the call.
    """
    table, operands, named = _call("chosen", op, args, kwargs)
    implementation = named.pop("implementation")
    return choose(op, table, implementation, *operands, **named)


def why_not(op: str, *args: Any, **kwargs: Any) -> str | None:
    """What keeps a call of the op, whose arguments are as in `explain`, from the implementation
    that it names; if that is "auto", from the first that there is, a kernel. None: nothing.
    """
    table, operands, named = _call("why_not", op, args, kwargs)
    name = known_name(op, table, named.pop("implementation"))
    first = next(iter(table.values()))
    ask = first.why_not_auto if name == "auto" else table[name].why_not
    return ask(*operands, device=device_lib.current(), **named)


def _call(name: str, op: str, args: Any, kwargs: Any) -> tuple[Table, Any, dict[str, Any]]:
    """The table of the op, and what it is called with, defaults included."""
    if op not in tuple(OPS):  # a list has no hash
        raise ValueError(f"{name}: no op is named {op!r}; there are {', '.join(OPS)}")
    function, table = OPS[op]
    try:
        call = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {op}: {error}") from None
    call.apply_defaults()
    return table, call.args, call.kwargs


__all__ = [
    "EPILOGUES",
    "HOLDS_SCORES",
    "OPS",
    "Cache",
    "Following",
    "Layer",
    "Link",
    "Norm",
    "Rotary",
    "Token",
    "Weights",
    "attention",
    "between_attentions",
    "bit_linear",
    "cast_transpose",
    "check_names",
    "chosen",
    "cross_entropy",
    "decode_layers",
    "embedding",
    "explain",
    "fused_linear",
    "gates_itself",
    "glu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_log_probs",
    "log_probs",
    "name_for",
    "no_meeting",
    "rms_norm",
    "rope",
    "sampling_threshold",
    "scale_softmax",
    "takes_gate",
    "takes_rows",
    "why_not",
]
