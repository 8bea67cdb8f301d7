"""Rivals of torch and Liger, by op: functions on torch tensors. torch is imported when asked for.

The arguments of a case in its order; statics (eps, scale) do not matter to a stopwatch and are the
usual ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.case import Case
from benchmarks.rivals import is_backward, num_forward

EPS, SCALE = 1e-6, 0.125
# Of how many of the forward's arguments; else of all
GRADIENTS = {"rope": 2, "embedding": 1, "flash_attention_backward": 3}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A rival whose weight, scales or angles have a layout of its own. make: a case's tensors ->
    what is timed.
    """

    make: Callable[..., Callable[[], Any]]


def of(case: Case) -> dict[str, Any]:
    """Forward functions of the case's op; "torch" is what "torch.compile" compiles, if it may."""
    torch, nn = _torch()
    options = {word for word in WORDS if word in case.label.lower()}
    table = OPS.get(case.op)
    rivals = {} if table is None else table(torch, nn, options, case)
    if "torch" in rivals:
        rivals["torch.compile"] = rivals["torch"]
    if is_backward(case) and case.op == "matmul":
        return {}  # two products of transposes, each a row of its own in torch
    return rivals


WORDS = ("residual", "causal", "mask", "transposed", "bias", "silu", "fused", "gelu", "exact")


def arguments(case: Case, seed: int, device: str) -> list[Any]:
    """Tensors of the case's shapes and dtypes: normal numbers, ids within the table, any codes,
    masks.
    """
    torch, _ = _torch()
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for i, spec in enumerate(case.arguments):
        name = str(spec.dtype)
        if i in case.constants:
            x = torch.from_numpy(case.constants[i]).to(device)
        elif name == "bool":
            x = torch.rand(spec.shape, generator=generator, device=device) > 0.25
        elif name.startswith(("int", "uint")) and "packed" in case.keywords:
            low, high = np.iinfo(name).min, np.iinfo(name).max + 1
            dtype = getattr(torch, name)
            x = torch.randint(
                low, high, spec.shape, generator=generator, device=device, dtype=dtype
            )
        elif name == "int8":
            kind = {"dtype": torch.int8, "device": device}
            x = torch.randint(-128, 128, spec.shape, generator=generator, **kind)
        elif name.startswith(("int", "uint")):
            x = torch.from_numpy(_ids(case, spec.shape, seed)).to(device)
        else:
            x = torch.randn(spec.shape, generator=generator, device=device)
            x = x.to(getattr(torch, name))
        made.append(x)
    return made


def _ids(case: Case, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Rows of the table, or words of the loss's head: spread as those that JAX is timed with."""
    table = case.arguments[1 if case.op == "linear_cross_entropy" else 0]
    count = table.shape[0]
    chance = np.random.default_rng(seed).random(shape)
    if case.op == "embedding" and is_backward(case):  # as in text, few of them often
        return (count**chance).astype(np.int64) - 1
    return (count * chance).astype(np.int64)


def call(case: Case, forward: Any, tensors: Sequence[Any]) -> Callable[[], Any]:
    """What is timed: the forward pass, or its backward pass alone with the graph kept."""
    torch, _ = _torch()
    if isinstance(forward, Prepared):
        return torch.no_grad()(forward.make(*tensors))
    if not is_backward(case):
        return torch.no_grad()(functools.partial(forward, *tensors))
    inputs = [x.detach() for x in tensors[: num_forward(case)]]
    wanted = [
        x.requires_grad_(True)
        for x in inputs[: GRADIENTS.get(case.op, len(inputs))]
        if x.is_floating_point()
    ]
    out = forward(*inputs)
    outs = list(out) if isinstance(out, tuple) else [out]
    cotangents = [torch.randn_like(y) for y in outs]
    return lambda: torch.autograd.grad(outs, wanted, cotangents, retain_graph=True)


def _torch() -> tuple[Any, Any]:
    import torch
    from torch.nn import functional

    return torch, functional


def _liger() -> Any:
    """Liger's functions, or None where it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import functional  # type: ignore

    return functional


def _rms_norm(torch, nn, options, case) -> dict[str, Callable[..., Any]]:
    liger = _liger()
    if "residual" in options:

        def norm(x, w, residual):
            total = x + residual
            return nn.rms_norm(total, w.shape, w, EPS), total

        rivals: dict[str, Callable[..., Any]] = {"torch": norm}
        if liger is not None:
            rivals["liger"] = lambda x, w, r: liger.liger_fused_add_rms_norm(
                x, r, w, EPS, in_place=False
            )
        return rivals
    rivals = {"torch": lambda x, w: nn.rms_norm(x, w.shape, w, EPS)}
    if liger is not None:
        rivals["liger"] = lambda x, w: liger.liger_rms_norm(x, w, EPS, in_place=False)
    return rivals


def _layer_norm(torch, nn, options, case) -> dict[str, Callable[..., Any]]:
    liger = _liger()
    rivals = {"torch": lambda x, w, b: nn.layer_norm(x, w.shape, w, b, 1e-5)}
    if liger is not None:
        rivals["liger"] = lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5)
    return rivals


def _scale_softmax(torch, nn, options, case) -> dict[str, Callable[..., Any]]:
    def softmax(x, mask=None):
        x = x * SCALE
        if "causal" in options:
            t, s = x.shape[-2:]
            keep = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
            x = x.masked_fill(~keep, -torch.inf)
        if mask is not None:
            x = x.masked_fill(~mask, -torch.inf)
        return torch.softmax(x, -1)

    rivals: dict[str, Callable[..., Any]] = {"torch": softmax}
    if not options & {"causal", "mask"}:
        rivals["torch softmax alone"] = lambda x: torch.softmax(x, -1)
        liger = _liger()
        if liger is not None:
            rivals["liger softmax alone"] = liger.liger_softmax
    return rivals


def _rope(torch, nn, options, case) -> dict[str, Any]:
    def rotate(x, cos, sin):
        r = 2 * cos.shape[-1]
        first, second, rest = x[..., : r // 2], x[..., r // 2 : r], x[..., r:]
        cos, sin = cos.unsqueeze(2).to(x.dtype), sin.unsqueeze(2).to(x.dtype)
        parts = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat(parts + ([rest] if rest.shape[-1] else []), -1)

    rivals: dict[str, Any] = {
        "torch": lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))
    }
    liger = _liger()
    q, _, cos = case.arguments[:3]
    if liger is not None and 2 * cos.shape[-1] == q.shape[-1]:

        def turn(q, k, cos, sin):
            return liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

        def make(q, k, *angles):  # which Liger's users have twice, side by side
            return functools.partial(turn, q, k, *(torch.cat([x, x], -1) for x in angles))

        backward = is_backward(case)
        rivals["liger"] = (lambda *tensors: make(*tensors)()) if backward else Prepared(make)
    return rivals


def _glu(torch, nn, options, case) -> dict[str, Callable[..., Any]]:
    swiglu = case.op == "swiglu"

    def gated(gate, up=None):
        if up is None:
            gate, up = gate.chunk(2, -1)
        if swiglu:
            return nn.silu(gate) * up
        return nn.gelu(gate, approximate="none" if "exact" in options else "tanh") * up

    rivals = {"torch": gated}
    liger = _liger()
    forward = num_forward(case) if is_backward(case) else len(case.arguments)
    if liger is not None and forward == 2 and "exact" not in options:  # its GeGLU is with tanh
        rivals["liger"] = liger.liger_swiglu if swiglu else liger.liger_geglu
    return rivals


def _embedding(torch, nn, options, case) -> dict[str, Callable[..., Any]]:
    if (scale := case.keywords.get("scale")) is None:
        return {"torch": lambda table, ids: nn.embedding(ids, table)}
    return {"torch": lambda table, ids: nn.embedding(ids, table) * scale}


def _matmul(torch, nn, options, case) -> dict[str, Any]:
    a = case.arguments[0]
    if str(a.dtype) == "int8":

        def integers(a, b, a_scale=None, b_scale=None, out_scale=None):
            y = torch._int_mm(a, b.t())
            if a_scale is None or b_scale is None:
                return y
            y = y * a_scale[:, None] * b_scale
            if out_scale is None:
                return y.to(torch.bfloat16)
            y = nn.gelu(y, approximate="tanh") * out_scale
            return torch.round(y).clamp(-127, 127).to(torch.int8)

        # it takes no fewer than 17 rows
        return {"torch": integers} if a.shape[0] > 16 else {}
    if "blocks" in case.label:

        def of_blocks(a, b, a_scale, b_scale):
            a_scale = a_scale.t().contiguous().t()  # numbers of one block of K side by side
            kind = {"scale_a": a_scale, "scale_b": b_scale.t(), "out_dtype": torch.bfloat16}
            return functools.partial(torch._scaled_mm, a, b.t(), **kind)

        return {"torch scaled_mm": Prepared(of_blocks)} if len(case.arguments) == 4 else {}
    if "float8" in str(a.dtype):

        def scaled(a, b, *_):
            b = b.t() if "transposed" in options else b.t().contiguous().t()
            one = torch.ones((), device=a.device)
            kind = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
            return functools.partial(torch._scaled_mm, a, b, **kind)

        return {"torch scaled_mm": Prepared(scaled)} if len(a.shape) == 2 else {}

    def product(a, b, other=None):
        y = torch.matmul(a, b.transpose(-1, -2) if "transposed" in options else b)
        if other is not None:
            y = y + other
        if "silu" in options:
            gate, up = y.chunk(2, -1)
            y = nn.silu(gate) * up
        return y

    return {"torch": product}


def _quantized_matmul(torch, nn, options, case) -> dict[str, Any]:
    """gemlite, of the case's own codes; where more than a product is asked for, that alone."""
    tree = case.keywords["packed"]
    packed = jax.tree.unflatten(tree, case.arguments[1 : 1 + tree.num_leaves])
    if importlib.util.find_spec("gemlite") is None or packed.scheme not in ("int8", "int4"):
        return {}
    from gemlite import helper  # type: ignore

    def make(x, *parts):
        weight = jax.tree.unflatten(tree, parts[: tree.num_leaves])
        where = {"device": x.device, "dtype": x.dtype}
        if weight.scheme == "int8":
            scales = weight.row_scale[:, None]
            layer = helper.A16W8_INT8(**where).from_weights(weight.codes, scales=scales)
        else:
            codes = torch.stack([weight.codes & 15, weight.codes >> 4], -1).flatten(1)
            scales = weight.scale.t().contiguous()
            zeros = torch.full_like(scales, 8) if weight.zero is None else weight.zero.t()
            zeros = zeros.to(x.dtype).contiguous()
            layer = helper.A16W4_HQQ_INT(**where).from_weights(codes, scales, zeros)
        return functools.partial(layer, x)

    whole = "silu" not in options and len(case.arguments) == 1 + tree.num_leaves
    return {"gemlite" if whole else "gemlite, product alone": Prepared(make)}


def _linear_cross_entropy(torch, nn, options, case) -> dict[str, Callable[..., Any]]:
    """The loss and, if the case is of these too, its gradients, at once as ours."""
    dtype = torch.bfloat16

    def eager(hidden, head, targets):
        logits = hidden @ head.to(dtype).t()
        return nn.cross_entropy(logits.float(), targets, reduction="sum")

    def whole(loss, hidden, head, targets):
        targets = targets.long()
        if not case.keywords["gradients"]:
            return loss(hidden, head, targets)
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (hidden, head)]
            total = loss(*inputs, targets)
            return total, *torch.autograd.grad(total, inputs)

    losses: dict[str, Any] = {"torch eager": eager}
    if _liger() is not None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore

        fused: Any = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        losses["liger"] = lambda hidden, head, targets: fused(head.to(dtype), hidden, targets)
    return {name: functools.partial(whole, loss) for name, loss in losses.items()}


def _attention(torch, nn, options, case) -> dict[str, Callable[..., Any]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    words = case.keywords
    decoding = case.op == "decode_attention"
    if words.get("softcap") is not None or words.get("pages") or words.get("uneven"):
        return {}  # it has no soft cap, and reads one cache of full rows
    if decoding and len(case.arguments) > 4:
        return {}  # nor int8

    @functools.cache
    def mask(t, device):
        """Where the call is more than causal; made once, before the clock starts."""
        if words.get("window") is None and not words.get("documents"):
            return None
        at = torch.arange(t, device=device)
        seen = at[:, None] >= at if words["causal"] else torch.ones(t, t, device=device) > 0
        if words.get("window") is not None:
            seen = seen & (at > at[:, None] - words["window"])
        if words.get("documents"):
            ids = torch.from_numpy(case.constants[3][0]).to(device)
            seen = seen & (ids[:, None] == ids)
        return seen[None, None]

    def attend(backends, q, k, v, *_):
        kept = None if decoding else mask(q.shape[1], q.device)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        kwargs = {"enable_gqa": q.shape[1] != k.shape[1]}
        if not decoding:
            kwargs |= {"attn_mask": kept, "is_causal": words["causal"] and kept is None}
        with contextlib.nullcontext() if backends is None else sdpa_kernel(backends):
            return nn.scaled_dot_product_attention(q, k, v, **kwargs).transpose(1, 2)

    return {  # the faster one first: there may be no time for both
        "torch sdpa cudnn": functools.partial(attend, [SDPBackend.CUDNN_ATTENTION]),
        "torch sdpa": functools.partial(attend, None),
    }


OPS: dict[str, Callable[..., dict[str, Any]]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "scale_softmax": _scale_softmax,
    "rope": _rope,
    "swiglu": _glu,
    "geglu": _glu,
    "embedding": _embedding,
    "matmul": _matmul,
    "quantized_matmul": _quantized_matmul,
    "linear_cross_entropy": _linear_cross_entropy,
    "flash_attention": _attention,
    "flash_attention_backward": _attention,
    "decode_attention": _attention,
}
