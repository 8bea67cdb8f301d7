"""The `jaxllm` command: generate, chat, inspect; `cli_quantize.py` adds quantize, `cli_train.py`
those that train.

It parses, prints and calls; the library does the work. A third of it are the options with their
help.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import jax
from flax import nnx
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn

import jaxllm
from jaxllm import cli_inspect, cli_quantize, cli_train, ops
from jaxllm.cache import KV_DTYPES
from jaxllm.checkpoint.folder import find_folder, read_config
from jaxllm.checkpoint.shipped import shipped_checkpoint
from jaxllm.compile_cache import enable_compile_cache
from jaxllm.config import DTYPES, Runtime
from jaxllm.console import Lines
from jaxllm.quantize import on_host

DEFAULT_PROMPT = "ROMEO:\n"
SETTINGS = [field.name for field in dataclasses.fields(jaxllm.Sampling)]
DRAWS = ("top_k", "top_p", "min_p", "seed")  # which say how to draw
KV_DTYPE_HELP = "keys and values of the text in 8 bits (default: in the dtype)"
CUT_SHORT = {
    "length": "the answer ended at --max-new-tokens",
    "context": "the answer ended at the model's last position; /reset begins anew",
}


errors = Lines(stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0; 2 for bad input, with one sentence; 130 for Ctrl-C; 141 where nobody reads the output.
    """
    args = _parser().parse_args(arguments)
    try:
        if getattr(args, "compile_cache", False):
            _keep_programs()
        _find_device()
        code = args.run(args)
        print(end="", flush=True)  # sys.stdout is None where it was closed before Python began
        return code
    except BrokenPipeError:
        _drop_output()
        return 141
    except (ValueError, OSError, NotImplementedError, MemoryError) as error:
        _complain(f"jaxllm: {_sentence(error)}")
        try:
            print(end="", flush=True)
        except OSError:  # it is the output that cannot be written, to a full disk for example
            _drop_output()
        return 2
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _complain(f"jaxllm: {_out_of_memory(str(error))}")
        return 2
    except KeyboardInterrupt:
        _complain()
        return 130


def _find_device() -> None:
    try:
        jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # the latter where a plugin is not installed
        asked = jax.config.values["jax_platforms"]
        place = f" with JAX_PLATFORMS={asked}" if asked else ""
        found = str(error).partition("\n")[0] or "there is no plugin for it"
        raise ValueError(f"JAX cannot start{place}: {found}") from None


def _complain(text: str = "") -> None:
    if sys.stderr is not None:  # as `2>&-` leaves it; print would take the output instead
        print(text, file=sys.stderr)


def _drop_output() -> None:
    """What cannot be written: Python flushes once more at its end, and would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sentence(error: Exception) -> str:
    """What is wrong; the system's own errors without their number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _out_of_memory(message: str) -> str:
    """What XLA's message comes to, which gives bytes or a unit such as GiB."""
    wanted = re.search(r"allocat\w* ([\d.]+)\s?([KMGT]iB|bytes)", message)
    asked = ""
    if wanted:
        number, unit = wanted.groups()
        size = f"{float(number) / 1e9:.1f} GB" if unit == "bytes" else f"{number} {unit}"
        asked = f" (it was asked for {size})"
    return (
        f"the device ran out of memory{asked}; fewer rows, shorter ones, more micro-batches or "
        "weights of fewer bits take less"
    )


def _keep_programs() -> None:
    try:
        enable_compile_cache()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _complain(
            f"jaxllm: compiled programs are not kept: {_sentence(error)}; "
            "--no-compile-cache silences this"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxllm", description=jaxllm.__doc__)
    parser.add_argument("--version", action="version", version=f"jaxllm {jaxllm.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a prompt")
    _add_model(generate)
    generate.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="the text to continue; '-' reads it from standard input; several are run as one batch",
    )
    generate.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template"
    )
    _add_sampling(generate, max_new_tokens=128)
    generate.add_argument(
        "--ignore-eos", action="store_true", help="do not end at the checkpoint's stop ids"
    )
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk with a model, by its own chat template")
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    _add_sampling(chat, max_new_tokens=512)
    chat.set_defaults(run=_chat)

    inspect = commands.add_parser(
        "inspect", help="what a checkpoint holds, and what would run it here"
    )
    inspect.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder or a hub id (default: the shipped one)"
    )
    text = "of the weights in memory; auto: bfloat16 on a GPU, float32 on a CPU"
    inspect.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help=text)
    inspect.add_argument("--kv-dtype", choices=tuple(KV_DTYPES), help=KV_DTYPE_HELP)
    cli_quantize.add_options(inspect)
    inspect.set_defaults(run=_inspect)
    cli_quantize.add_command(commands)
    cli_train.add_commands(commands)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face folder or hub id (default: the checkpoint that ships with jaxllm)",
    )
    parser.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="a PEFT adapter to put beside the model, such as DIR/adapter of jaxllm finetune",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="auto: bfloat16 on a GPU, float32 on a CPU",
    )
    parser.add_argument(
        "--implementation",
        default="auto",
        metavar="NAME",
        help="xla, or op=name,op=name such as attention=cudnn (default: auto)",
    )
    parser.add_argument(
        "--no-compile-cache",
        dest="compile_cache",
        action="store_false",
        help="do not keep compiled programs in ~/.cache/jaxllm (or $XDG_CACHE_HOME/jaxllm)",
    )
    cli_quantize.add_options(parser)


def _add_sampling(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    group = parser.add_argument_group(
        "sampling (what is not given: greedy; chat: as the checkpoint says)"
    )
    text = f"to write at most (default {max_new_tokens})"
    group.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=text)
    for name, kind, value, text in (
        ("temperature", float, "T", "0 takes the likeliest token"),
        ("top-k", int, "K", "keep the K likeliest; 0 keeps all"),
        ("top-p", float, "P", "keep the likeliest tokens that hold this mass"),
        ("min-p", float, "P", "keep tokens with this share of the likeliest one's probability"),
        ("repetition-penalty", float, "X", "above 1: tokens that occurred become less likely"),
        ("presence-penalty", float, "X", "taken off the score of tokens already generated"),
        ("frequency-penalty", float, "X", "the same, for each time"),
        ("seed", int, "N", "of the random draws (default 0: the same text each time)"),
    ):
        group.add_argument(f"--{name}", type=kind, metavar=value, help=text)
    group.add_argument("--kv-dtype", choices=tuple(KV_DTYPES), help=KV_DTYPE_HELP)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text"
    )


def _settings(args: argparse.Namespace, rows: int) -> dict[str, Any]:
    """The sampling settings that were given, checked before anything is loaded."""
    settings = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    jaxllm.Sampling.of(rows, **settings)
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    for text in args.stop:
        _check_text("--stop", text)
    if "" in args.stop:
        raise ValueError("--stop must be a text of at least one character, got ''")
    return settings


def _check_draws(settings: dict[str, Any]) -> None:
    """Refuses what would say nothing."""
    idle = [name for name in DRAWS if name in settings]
    if idle and not settings.get("temperature"):
        raise ValueError(
            f"--{idle[0].replace('_', '-')} needs --temperature above 0: without it the likeliest "
            "token is taken"
        )


def _standard_input() -> TextIO:
    if sys.stdin is None:
        raise ValueError("there is no standard input, which `chat` and `--prompt -` read")
    return sys.stdin


def _line(terminal: bool) -> str:
    """What was typed, or the next line of a pipe. Raises: EOFError behind the last."""
    if terminal and None not in (sys.stdout, sys.stderr):  # without these `input` does not work
        return input("> ")
    line = _standard_input().readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _path(args: argparse.Namespace) -> Any:
    return shipped_checkpoint() if args.model is None else args.model


def _dtype(name: str) -> str:
    if name != "auto":
        return name
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def _implementation(text: str) -> str | dict[str, str]:
    if "=" not in text:
        return text
    pairs = [part.split("=", 1) for part in text.split(",")]
    for pair in pairs:
        if len(pair) != 2 or pair[0] not in ops.OPS:
            raise ValueError(
                f"--implementation: {'='.join(pair)!r} is not op=name; the ops are "
                f"{', '.join(ops.OPS)}"
            )
    if len(names := dict(pairs)) < len(pairs):
        raise ValueError(f"--implementation: {text!r} names an op twice")
    return names


def _load(args: argparse.Namespace) -> tuple[jaxllm.Transformer, Any]:
    path = _path(args)
    dtype = _dtype(args.dtype)
    runtime = Runtime(param_dtype=dtype, implementation=_implementation(args.implementation))
    how = cli_quantize.arguments(args)
    if args.adapter is not None:  # before the weights are read
        _check_adapter(path, args.adapter)
    # The device need not have room for what is packed as it was
    place = contextlib.nullcontext() if how is None else on_host()
    with place, _bar(f"loading {path}", DownloadColumn()) as progress:
        model, tokenizer = jaxllm.load(path, dtype=dtype, runtime=runtime, progress=progress)
    if how is not None:
        jaxllm.quantize(model, **how, from_host=True)
    if args.adapter is None:
        jaxllm.fuse(model)
    else:
        jaxllm.lora.load_peft(model, args.adapter)
    return model, tokenizer


def _check_adapter(path: Any, adapter: str) -> None:
    """Whether it fits the model, by shapes alone."""
    config, _ = read_config(find_folder(path))

    def check() -> None:
        jaxllm.lora.check_peft(jaxllm.Transformer(config, Runtime(), rngs=nnx.Rngs(0)), adapter)

    nnx.eval_shape(check)


@contextlib.contextmanager
def _bar(text: str, column: Any) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on the terminal; nothing where standard error is none."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), column)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _generate(args: argparse.Namespace) -> int:
    texts = args.prompt or [DEFAULT_PROMPT]
    if "-" in texts:
        texts = [_standard_input().read() if text == "-" else text for text in texts]
    for i, text in enumerate(texts):
        if not text:
            raise ValueError(f"prompt {i} is empty; give at least one character")
        _check_text(f"prompt {i}", text)
    settings = _settings(args, len(texts))
    _check_draws(settings)
    cli_quantize.check(args)
    model, tokenizer = _load(args)
    if tokenizer is None:
        raise ValueError(f"{_path(args)}: there is no tokenizer.json, which a text prompt needs")
    prompts: list[Any] = texts
    if args.chat:
        prompts = [[{"role": "user", "content": text}] for text in texts]
    options = {
        "max_new_tokens": args.max_new_tokens,
        "stop": args.stop,
        "kv_dtype": args.kv_dtype,
        "stop_ids": [] if args.ignore_eos else None,
        **settings,
    }
    if len(prompts) > 1:
        with _bar("generating", MofNCompleteColumn()) as progress:
            result = jaxllm.generate(model, tokenizer, prompts, progress=progress, **options)
        assert result.texts is not None
        for text, continuation in zip(texts, result.texts, strict=True):
            print(text if not args.chat else f"> {text}\n", continuation, sep="", end="\n\n")
        _print_speed(result, note="compilation counted in")
        return 0
    pieces = jaxllm.stream(model, tokenizer, prompts[0], **options)
    with errors.status("compiling") if errors.is_terminal else contextlib.nullcontext():
        pieces.compile()
    if not args.chat:
        print(texts[0], end="", flush=True)
    _print_pieces(pieces)
    _print_speed(pieces.result)
    return 0


def _print_pieces(pieces: jaxllm.TextStream) -> None:
    """The text as it comes, and an end of line."""
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)


def _print_speed(result: jaxllm.GenerationResult, note: str = "") -> None:
    timings = result.timings
    reasons = ", ".join(sorted(set(result.finish_reasons)))
    errors.print(
        f"prefill {timings.prefill_tokens} tokens, {timings.prefill_tokens_per_s:,.0f} tokens/s; "
        f"decode {timings.decode_tokens} tokens, {timings.decode_tokens_per_s:,.0f} tokens/s; "
        f"ended by: {reasons}{'; ' + note if note else ''}",
        style="dim" if errors.is_terminal else None,
        soft_wrap=True,
    )


def _chat(args: argparse.Namespace) -> int:
    given = _settings(args, 1)
    _check_text("--system", args.system or "")
    terminal = _standard_input().isatty()
    cli_quantize.check(args)
    model, tokenizer = _load(args)
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ValueError(f"{_path(args)}: there is no chat template; use jaxllm generate")
    options = {
        "max_new_tokens": args.max_new_tokens,
        "stop": args.stop,
        "kv_dtype": args.kv_dtype,
    }
    defaults = model.generation
    said = {name: getattr(defaults, name, None) for name in SETTINGS}
    if not defaults.do_sample:
        said["temperature"] = None
    if not (given.get("temperature") or said["temperature"]):  # what says how to draw says nothing
        said |= dict.fromkeys(DRAWS)
    settings = {name: value for name, value in said.items() if value is not None} | given
    try:
        jaxllm.Sampling.of(1, **settings)
    except ValueError as error:  # what was given is right: `_settings` has looked
        raise ValueError(f"{_path(args)}: generation_config.json: {error}") from None
    options |= settings
    _check_draws({**given, "temperature": settings.get("temperature")})
    # One each, else all answers would be drawn alike
    seeds = (seed % 2**32 for seed in itertools.count(options.get("seed", 0)))
    start = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(start)
    if terminal:
        with contextlib.suppress(ImportError):  # a Python may be built without it
            import readline  # noqa: F401  gives `input` line editing and history
        errors.print(
            "A line is a message. /reset begins anew, /exit (or Ctrl-D) ends.", style="dim"
        )
    while True:
        try:
            line = _line(terminal)
        except EOFError:
            return 0
        if line.strip() in ("/exit", "/quit"):
            return 0
        if line.strip() == "/reset":
            messages = list(start)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            _check_text("the message", line)
            _check_room(model, tokenizer, messages)
            pieces = jaxllm.stream(model, tokenizer, messages, **options | {"seed": next(seeds)})
        except (ValueError, MemoryError) as error:
            longer = terminal and len(messages) > len(start) + 1  # than it would be anew
            _complain(f"jaxllm: {error}{'; /reset begins anew' * longer}")
            if not terminal:
                return 2
            messages.pop()
            continue
        text = _answer(pieces, terminal)
        if text is None:  # nothing was said, and many templates want the roles to alternate
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": text})


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python stands for such a byte by half a surrogate pair
        byte = ord(text[error.start]) & 0xFF
        raise ValueError(
            f"{name} is not UTF-8: byte 0x{byte:02x} at character {error.start}"
        ) from None


def _check_room(
    model: jaxllm.Transformer, tokenizer: jaxllm.Tokenizer, messages: list[dict[str, str]]
) -> None:
    """As `stream` does, but in the words of a conversation."""
    held, limit = len(tokenizer.apply_chat_template(messages)), model.config.max_position_embeddings
    if held >= limit:
        raise ValueError(f"the conversation has {held} tokens, but the model has {limit} positions")


def _answer(pieces: jaxllm.TextStream, terminal: bool) -> str | None:
    """Print an answer and return it; None if Ctrl-C came before its first character.

    In a terminal Ctrl-C ends the answer, not the conversation.
    """
    interrupted = False
    try:
        _print_pieces(pieces)
    except KeyboardInterrupt:
        if not terminal:
            raise
        interrupted = True
        print()
    finally:
        pieces.close()
    result = pieces.result
    assert result.texts is not None
    [text], [reason] = result.texts, result.finish_reasons
    if interrupted:
        return text or None
    if reason in CUT_SHORT:
        errors.print(CUT_SHORT[reason], style="dim" if errors.is_terminal else None, soft_wrap=True)
    return text


def _inspect(args: argparse.Namespace) -> int:
    cli_inspect.inspect(args, _path(args), _dtype(args.dtype), Lines())
    return 0
