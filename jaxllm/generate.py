"""Text out of a model: `generate`, `stream`, and `warmup` to compile ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from jaxllm.integers import integer, is_list
from jaxllm.model import Transformer
from jaxllm.prompts import Prompt, several
from jaxllm.results import GenerationResult
from jaxllm.run import Run, per_row
from jaxllm.tokenizer import Tokenizer


def generate(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int] = 64,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
    presence_penalty: float | Sequence[float] = 0.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    stop_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    top_logprobs: int = 0,
    steps_per_dispatch: int = 64,
    prefill_chunk: int = 512,
    kv_dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> GenerationResult:
    """Continue each prompt: a text, a chat (a list of messages) or a list of token ids.

    Greedy by default: temperature 0 takes the likeliest token, top_k 0, top_p 1, min_p 0 keep all,
    penalties of 1 (repetition) and 0 change nothing. Settings, seeds and max_new_tokens are one
    value for all rows or one a row. In float32 a row's tokens depend on its own prompt, settings
    and seed alone; in 16 bits, with ternary weights and with a cache of 8 bits, a batch of another
    size, or another `prefill_chunk`, may round otherwise.
    `stop_ids` end a row (None: the checkpoint's own; []: none), and so do the texts of `stop`,
    a special token among them (one inside of a longer text is not found).
    `top_logprobs` alternatives are returned for every token. `steps_per_dispatch` tokens are made
    on the device between two looks from the host, which sees stop strings only then; where none are
    given it may look when the next are already on their way. Prompts longer than `prefill_chunk` go
    in by chunks. `progress` is called with the tokens made and the most there can be.
    `kv_dtype` "int8" or "fp8" keeps keys and values in 8 bits with a scale for each token and head:
    half the cache of 16 bits, or a quarter of 32, and other numbers than without it.
    Raises: ValueError for a prompt that is empty or longer than the model's positions, ids outside
    the vocabulary, settings out of range, logits that are not finite; MemoryError, before anything
    is allocated, if the batch does not fit.
    """
    if not callable(progress) and progress is not None:
        raise ValueError(f"generate: progress must be a function or None, got {progress!r:.60}")
    run = Run(
        model,
        tokenizer,
        prompts,
        max_new_tokens=max_new_tokens,
        settings={
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
        },
        stop_ids=stop_ids,
        stop=stop,
        top_logprobs=top_logprobs,
        steps_per_dispatch=steps_per_dispatch,
        prefill_chunk=prefill_chunk,
        kv_dtype=kv_dtype,
    )
    total = sum(row.budget for row in run.rows)
    for _ in run.dispatches():
        if progress is not None:
            progress(sum(len(row.tokens) for row in run.rows), total)
    return run.result()


class TextStream(Iterator[str]):
    """The pieces of a text as they become certain. Closing it, or its end, frees the cache; that
    waits for the tokens that are on their way.
    """

    def __init__(self, run: Run):
        self._run = run
        self._pieces = _pieces(run)
        self._begun = False

    def __next__(self) -> str:
        self._begun = True
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End it here."""
        self._pieces.close()

    def compile(self) -> None:
        """Compile the programs now, so that timings and the first piece do not wait for it."""
        if self._begun:
            raise ValueError("stream: it has begun; compile it before the first piece")
        self._run.compile()

    @property
    def result(self) -> GenerationResult:
        """The whole result; if pieces are still to come, what there is so far."""
        return self._run.result()


def _pieces(run: Run):
    for _ in run.dispatches():
        if piece := run.rows[0].piece():
            yield piece


def stream(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    stop_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    top_logprobs: int = 0,
    steps_per_dispatch: int = 16,
    prefill_chunk: int = 512,
    kv_dtype: str | None = None,
    **settings: Any,
) -> TextStream:
    """The text of one prompt, piece by piece; never half a character, never part of a stop string.

    Arguments and errors as for `generate` (`settings`: temperature, top_k, top_p, min_p, the
    penalties, seed); they are checked here, before the first piece is asked for. A piece is what
    `steps_per_dispatch` tokens gave.
    """
    if tokenizer is None:
        raise ValueError("stream: text needs a tokenizer; generate gives token ids without one")
    if several(prompt):
        raise ValueError(f"stream: takes one prompt, not a list of them, got {prompt!r:.60}")
    return TextStream(
        Run(
            model,
            tokenizer,
            [prompt],
            max_new_tokens=max_new_tokens,
            settings=settings,
            stop_ids=stop_ids,
            stop=stop,
            top_logprobs=top_logprobs,
            steps_per_dispatch=steps_per_dispatch,
            prefill_chunk=prefill_chunk,
            kv_dtype=kv_dtype,
        )
    )


def warmup(
    model: Transformer,
    tokenizer: Tokenizer | None,
    *,
    batch_size: int = 1,
    prompt_lengths: Sequence[int] | None = None,
    max_new_tokens: int | Sequence[int] = 64,
    stop_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    top_logprobs: int = 0,
    steps_per_dispatch: int = 64,
    prefill_chunk: int = 512,
    kv_dtype: str | None = None,
    **settings: Any,
) -> None:
    """Compile ahead what `generate` and `stream` need for batches whose longest prompt is as given.

    `prompt_lengths` are in tokens; None is one prompt of 512, or of what the model's positions and
    `max_new_tokens` leave. Programs depend on sizes, how many stop ids there are among them (in
    steps of 8), and on the kind of sampling, not on its values; give the tokenizer and the options
    of the call to come. Each program runs once, on nothing; over several devices again, for caches
    that XLA has spread.
    Raises: ValueError for what is no model, a length that leaves no position for a new token, and
    as `generate`.
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"warmup: model must be a Transformer, not {type(model).__name__}")
    batch_size = integer("batch_size", batch_size, 1, who="warmup")
    if prompt_lengths is None:
        most = max(per_row("max_new_tokens", max_new_tokens, batch_size, who="warmup"))
        prompt_lengths = (max(1, min(512, model.config.max_position_embeddings - most)),)
    if not is_list(prompt_lengths):
        raise ValueError(
            f"warmup: prompt_lengths must be a list of lengths or None, got {prompt_lengths!r}"
        )
    room = max(1, model.config.max_position_embeddings - 1)  # a new token needs a position
    for length in prompt_lengths:
        length = integer("a prompt's length", length, 1, room, who="warmup")
        Run(
            model,
            tokenizer,
            [[0] * length] * batch_size,
            max_new_tokens=max_new_tokens,
            settings=settings,
            stop_ids=stop_ids,
            stop=stop,
            top_logprobs=top_logprobs,
            steps_per_dispatch=steps_per_dispatch,
            prefill_chunk=prefill_chunk,
            kv_dtype=kv_dtype,
        ).compile()
