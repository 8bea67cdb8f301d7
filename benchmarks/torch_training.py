"""The steps of training.py in torch: eager, compiled, with Liger's loss, and adapters by PEFT.

The same Llama in plain torch, and for PEFT transformers': bfloat16 under autocast over float32
weights (over a base in bfloat16 and float32 adapters), torch's attention, the fused AdamW,
clipping. torch is imported when asked for.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.models import LLAMA_1B, LLAMA_8B
from benchmarks.training import (
    ADAPTED_ROWS,
    LENGTH,
    RANK,
    ROWS,
    STEPS,
    WARM_UP,
    figures,
    in_a_row,
    in_fewest_parts,
)
from jaxllm.config import ModelConfig
from jaxllm.families import to_hf

PARTS = (1, 2, 4, 8)  # micro-batches: as few as fit
Work = Callable[[], dict[str, Any]]
# (config, device) to what is trained, and (ids, targets) to their mean loss
Build = Callable[[ModelConfig, str], tuple[list[Any], Callable[[Any, Any], Any]]]


def tasks(names: Sequence[str]) -> list[tuple[str, Work]]:
    """(key, work), if "train" is among the names, of the libraries that are here."""
    found: dict[str, Work] = {
        "torch eager": functools.partial(measure, whole),
        "torch.compile": functools.partial(measure, whole, compiled=True),
    }
    if importlib.util.find_spec("liger_kernel") is not None:
        with_liger = functools.partial(whole, liger=True)
        found["torch.compile, Liger's loss"] = functools.partial(measure, with_liger, compiled=True)
    if importlib.util.find_spec("peft") is not None:
        adapters = functools.partial(
            measure, adapted, config=LLAMA_8B, rows=ADAPTED_ROWS, trains_all=False
        )
        found["lora-8b, PEFT, 8 parts"] = functools.partial(adapters, try_parts=(8,))
        found["lora-8b, PEFT"] = adapters
    return [(f"train/{name}", work) for name, work in found.items() if "train" in names]


def model(config: ModelConfig, device: str) -> Any:
    """A Llama as a torch module: ids [B, T] to hidden states [B, T, D], and its head."""
    import torch
    from torch import nn
    from torch.nn import functional

    d, f, heads, width = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.head_dim,
    )

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    class Norm(nn.RMSNorm):
        def forward(self, x: Any) -> Any:  # of one dtype, which the fused kernel wants
            return functional.rms_norm(x, (d,), self.weight.to(x.dtype), self.eps)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = Norm(d, eps=config.rms_norm_eps)
            self.norm2 = Norm(d, eps=config.rms_norm_eps)
            self.qkv = nn.Linear(d, 3 * heads * width, bias=False)
            self.out = nn.Linear(heads * width, d, bias=False)
            self.gate_up = nn.Linear(d, 2 * f, bias=False)
            self.down = nn.Linear(f, d, bias=False)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            b, t, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, heads, width).unbind(2)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            q, k, v = (y.transpose(1, 2).to(v.dtype) for y in (q, k, v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, heads * width))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
            return x + self.down(functional.silu(gate) * up)

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(config.vocab_size, d)
            self.layers = nn.ModuleList(Layer() for _ in range(config.num_hidden_layers))
            self.norm = Norm(d, eps=config.rms_norm_eps)
            self.head = nn.Linear(d, config.vocab_size, bias=False)

        def forward(self, ids: Any) -> Any:
            turns = config.rope.rope_theta ** (
                -torch.arange(0, width, 2, device=ids.device, dtype=torch.float32) / width
            )
            angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * turns
            cos, sin = (g(angles)[None, :, None, :].bfloat16() for g in (torch.cos, torch.sin))
            x = self.embed(ids).bfloat16()
            for layer in self.layers:
                x = layer(x, cos, sin)
            return self.norm(x)

    made = Llama().to(device)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return made


def whole(config: ModelConfig, device: str, *, liger: bool = False) -> Any:
    """All of `model` trained."""
    llama, loss = model(config, device), _loss(liger)
    return list(llama.parameters()), lambda ids, targets: loss(llama.head, llama(ids), targets)


def adapted(config: ModelConfig, device: str, *, rank: int = RANK) -> Any:
    """Adapters beside all linear layers of transformers' model in bfloat16, as PEFT makes them."""
    import peft
    import torch
    import transformers

    with torch.device(device):
        base = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**to_hf(config)),
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
        )
    options = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    made: Any = peft.get_peft_model(base, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
    made.train()

    def loss(ids: Any, targets: Any) -> Any:
        logits = made(ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return [parameter for parameter in made.parameters() if parameter.requires_grad], loss


def measure(
    build: Build,
    *,
    compiled: bool = False,
    config: ModelConfig = LLAMA_1B,
    rows: int = ROWS,
    length: int = LENGTH,
    steps: int = STEPS,
    try_parts: Sequence[int] = PARTS,
    trains_all: bool = True,
    device: str = "cuda",
) -> dict[str, Any]:
    """As `training.measure`, with as few micro-batches as there is memory for."""
    import torch
    import torch._functorch.config

    def run(parts: int) -> dict[str, Any]:
        _forget()
        with torch._functorch.config.patch(donated_buffer=True):  # torch's own default
            row = _measure(build, compiled, parts, config, rows, length, steps, device)
        seconds = row.pop("seconds")
        return {**figures(config, rows, length, seconds, trains_all=trains_all), **row}

    return in_fewest_parts(
        "torch", rows, try_parts, run, lambda error: isinstance(error, torch.OutOfMemoryError)
    )


def _forget() -> None:
    """Let go of what was there before, so that the peak is that of what comes."""
    import torch

    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _measure(
    build: Build,
    compiled: bool,
    parts: int,
    config: ModelConfig,
    rows: int,
    length: int,
    steps: int,
    device: str,
) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    parameters, loss = build(config, device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)
    text = torch.randint(0, config.vocab_size, (rows, length + 1), device=device)

    def forward(ids: Any, targets: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return loss(ids, targets)

    run = torch.compile(forward, dynamic=False) if compiled else forward

    def step() -> Any:
        total = torch.zeros((), device=device)
        for part in text.chunk(parts):
            each = run(part[:, :-1], part[:, 1:]) / parts
            each.backward()
            total += each.detach()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    losses, seconds = in_a_row(step, WARM_UP + steps)
    return {
        "seconds": seconds[WARM_UP:],
        "losses": losses,
        "compile_s": seconds[0],
        "parts": parts,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
    }


def _loss(liger: bool) -> Callable[[Any, Any, Any], Any]:
    """(head, hidden states, targets) to the mean loss."""
    import torch
    from torch.nn import functional

    if liger:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore

        fused: Any = torch.compiler.disable(LigerFusedLinearCrossEntropyLoss())
        return lambda head, hidden, targets: fused(
            head.weight.bfloat16(), hidden.flatten(0, 1).bfloat16(), targets.flatten()
        )
    return lambda head, hidden, targets: functional.cross_entropy(
        head(hidden).float().flatten(0, 1), targets.flatten()
    )
