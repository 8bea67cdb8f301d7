"""The operations of a model; `explain` tells which implementations of one can run a call."""

from __future__ import annotations

import inspect
from typing import Any

from jaxllm.ops.attention import ATTENTION, attention
from jaxllm.ops.glu import GLU, glu
from jaxllm.ops.linear import EMBEDDING, LINEAR, embedding, linear
from jaxllm.ops.loss import cross_entropy
from jaxllm.ops.norm import LAYER_NORM, RMS_NORM, layer_norm, rms_norm
from jaxllm.ops.rope import ROPE, rope
from jaxllm.ops.softmax import SCALE_SOFTMAX, scale_softmax
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
}


def explain(op: str, *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """Why each implementation of the op is passed over (None: it would run), as "auto" asks them.

    The arguments are those of the op itself; shapes suffice (`jax.ShapeDtypeStruct`), for nothing
    is run.
    """
    if op not in OPS:
        raise ValueError(f"explain: no op is named {op!r}; there are {', '.join(OPS)}")
    function, table = OPS[op]
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    named = {name: value for name, value in call.kwargs.items() if name != "implementation"}
    device = device_lib.current()
    return {
        name: entry.why_not_auto(*call.args, device=device, **named)
        for name, entry in table.items()
    }


__all__ = [
    "OPS",
    "attention",
    "cross_entropy",
    "embedding",
    "explain",
    "glu",
    "layer_norm",
    "linear",
    "rms_norm",
    "rope",
    "scale_softmax",
]
