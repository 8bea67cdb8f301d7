"""Llama-family language models in JAX: load a Hugging Face checkpoint, generate text, train."""

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
    "compile_count",
    "decode",
    "decode_step",
    "enable_compile_cache",
    "flatten",
    "fuse",
    "generate",
    "layers",
    "load",
    "ops",
    "prefill",
    "quantize",
    "save",
    "shipped_checkpoint",
    "stream",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # it brings Orbax, which is slow to import
        from jaxllm.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
