"""Llama-family language models in JAX: load a Hugging Face checkpoint, generate text, train."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxllm import layers, ops
from jaxllm.cache import KVCache
from jaxllm.checkpoint.hf import load, save
from jaxllm.checkpoint.shipped import shipped_checkpoint
from jaxllm.compile_cache import enable_compile_cache
from jaxllm.config import GenerationDefaults, ModelConfig, Rope, Runtime
from jaxllm.fusion import fuse
from jaxllm.generate import TextStream, generate, stream, warmup
from jaxllm.layers import Block
from jaxllm.model import Transformer
from jaxllm.programs import (
    Decoded,
    DecodeState,
    Weights,
    compile_count,
    decode,
    decode_step,
    flatten,
    prefill,
)
from jaxllm.quantize import PackedEmbedding, PackedLinear, quantize
from jaxllm.results import GenerationResult, Timings
from jaxllm.sampling import Sampling
from jaxllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm import (
        aot,
        data,
        dpo,
        finetune,
        flops,
        fp8,
        lora,
        metrics,
        optimizers,
        plan,
        precision,
        recipe,
        records,
        train,
        trainer,
    )
    from jaxllm.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Block",
    "DecodeState",
    "Decoded",
    "GenerationDefaults",
    "GenerationResult",
    "KVCache",
    "ModelConfig",
    "PackedEmbedding",
    "PackedLinear",
    "Rope",
    "Runtime",
    "Sampling",
    "TextStream",
    "Timings",
    "Tokenizer",
    "Trainer",
    "Transformer",
    "Weights",
    "aot",
    "compile_count",
    "data",
    "decode",
    "decode_step",
    "dpo",
    "enable_compile_cache",
    "finetune",
    "flatten",
    "flops",
    "fp8",
    "fuse",
    "generate",
    "layers",
    "load",
    "lora",
    "metrics",
    "ops",
    "optimizers",
    "plan",
    "precision",
    "prefill",
    "quantize",
    "recipe",
    "records",
    "save",
    "shipped_checkpoint",
    "stream",
    "train",
    "trainer",
    "warmup",
]


def __getattr__(name: str) -> Any:
    """What is imported when it is first asked for: Orbax, which trainers bring, is slow."""
    if name == "Trainer":
        return importlib.import_module("jaxllm.trainer").Trainer
    if name in __all__:
        return importlib.import_module(f"jaxllm.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
