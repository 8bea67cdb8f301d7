"""Tokenizers of a few hundred tokens, of the two kinds that the supported families have."""

import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ("<unk>", "<s>", "</s>")


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: 256 bytes and a few merges, some inside characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello there 你好你好 👩 👩 🇩🇪 🇩🇪 नमस्ते नमस्ते ééé"], trainer)
    return tokenizer


def byte_fallback(*, strip: bool = True, bos: bool = False) -> tokenizers.Tokenizer:
    """As Llama 2, Mistral and Phi-3 (and as Gemma without `strip`): pieces, bytes for the rest."""
    pieces = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdeghilnorstuéà"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("l", "l"), ("he", "ll")]
    pieces += ["".join(merge) for merge in merges]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    before = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence(steps)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def files(tokenizer: tokenizers.Tokenizer, **config: Any) -> dict[str, bytes]:
    """The files of a folder with this tokenizer and this tokenizer_config.json."""
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
