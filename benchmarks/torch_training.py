"""The step of training.py in torch: eager, compiled, and with Liger's kernels where they are.

The same Llama in plain torch: bfloat16 under autocast over float32 weights, torch's attention, the
fused AdamW, clipping. torch is imported when asked for.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

from benchmarks.training import LENGTH, LLAMA_1B, ROWS, STEPS, WARM_UP, figures
from jaxllm.config import ModelConfig

PARTS = (1, 2, 4, 8)  # micro-batches: as few as fit


def rivals() -> dict[str, tuple[bool, bool]]:
    """(compiled, Liger's loss) by name."""
    found = {"torch eager": (False, False), "torch.compile": (True, False)}
    if importlib.util.find_spec("liger_kernel") is not None:
        found["torch.compile, Liger's loss"] = (True, True)
    return found


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


def measure(
    compiled: bool,
    liger: bool,
    *,
    config: ModelConfig = LLAMA_1B,
    rows: int = ROWS,
    length: int = LENGTH,
    steps: int = STEPS,
    device: str = "cuda",
) -> dict[str, Any]:
    """As `training.measure`, with as few micro-batches as there is memory for."""
    import torch
    import torch._functorch.config

    for parts in PARTS:
        if rows % parts:
            continue
        try:
            with torch._functorch.config.patch(donated_buffer=True):  # torch's own default
                return _measure(compiled, liger, parts, config, rows, length, steps, device)
        except torch.OutOfMemoryError:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    raise MemoryError(f"not in {PARTS[-1]} parts either")


def _measure(
    compiled: bool,
    liger: bool,
    parts: int,
    config: ModelConfig,
    rows: int,
    length: int,
    steps: int,
    device: str,
) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    llama = model(config, device)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    text = torch.randint(0, config.vocab_size, (rows, length + 1), device=device)
    loss = _loss(liger)

    def forward(ids: Any, targets: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return loss(llama.head, llama(ids), targets)

    run = torch.compile(forward, dynamic=False) if compiled else forward
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    losses, seconds, compile_s = [], [], 0.0
    for _ in range(WARM_UP + steps):
        synchronize()
        start = time.perf_counter()
        total = torch.zeros((), device=device)
        for part in text.chunk(parts):
            each = run(part[:, :-1], part[:, 1:]) / parts
            each.backward()
            total += each.detach()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        seconds.append(time.perf_counter() - start)
        compile_s = compile_s or seconds[0]
        del total, each
    return {
        **figures(config, rows, length, seconds[WARM_UP:]),
        "losses": losses,
        "compile_s": compile_s,
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
