"""What each format of weights costs a model: its loss on held-out text, and its bytes.

    python -m benchmarks.weight_formats --shakespeare input.txt --stories stories260K

Of the checkpoint that ships, on the last tenth of tiny shakespeare, which it has not seen (where
that text is from: checkpoints/README.md); and of stories260K (karpathy/tinyllamas in Hugging Face's
layout) on the stories of stories.txt, which were written for this. Either may be left out. It
prints a Markdown table: nats a character, what they are above bfloat16's, and bits and bytes of the
first checkpoint. Weights are the
stored ones in bfloat16, packed; the rest is computed in float32. A star: 172 inputs are no whole
groups of that format, and the down projection stays in bfloat16.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from flax import nnx

import jaxllm
from jaxllm import train

STORIES = Path(__file__).parent / "stories.txt"
# Scheme of the projections, and of the table that is embedding and head
FORMATS = (
    (None, None),
    ("int8", None),
    ("int8", "int8"),
    ("fp8", None),
    ("mxfp8", None),
    ("int4", None),
    ("int4", "int8"),
    ("nvfp4", None),
    ("mxfp4", None),
    ("ternary", None),
)
GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


@dataclasses.dataclass(frozen=True)
class Text:
    """A checkpoint, and windows of a text of so many characters."""

    name: str
    folder: Path
    windows: list[train.Batch]
    characters: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One format: the loss in nats a character, bits a number of the packed weights, bytes."""

    loss: float
    bits: float
    size_bytes: int
    kept: tuple[str, ...]


def shakespeare(file: Path) -> Text:
    """The last tenth, as `checkpoints/README.md` measures it."""
    text = file.read_bytes().decode()
    held_out = text[len(text) * 9 // 10 :]
    folder = jaxllm.shipped_checkpoint()
    model, tokenizer = jaxllm.load(folder)
    assert tokenizer is not None
    ids = [*model.generation.stop_ids[:1], *tokenizer.encode(held_out)]
    windows = train.cover_windows(ids, rows=8, length=512, stride=256)
    return Text("tiny-shakespeare", folder, windows, len(held_out))


def stories(folder: Path) -> Text:
    """Each story of stories.txt alone, behind the token that begins a text."""
    texts = STORIES.read_text(encoding="utf-8").split("\n\n")
    _, tokenizer = jaxllm.load(folder)
    assert tokenizer is not None
    windows = []
    for text in texts:
        windows += train.cover_windows(tokenizer.encode(text), rows=1, length=512, stride=512)
    return Text("stories260K", folder, windows, sum(map(len, texts)))


def measure(text: Text, scheme: str | None, head: str | None) -> Row:
    """The model with its projections in `scheme` and its head in `head`."""
    runtime = jaxllm.Runtime(dtype="float32", param_dtype="bfloat16")
    model, _ = jaxllm.load(text.folder, "bfloat16", runtime)
    kept: tuple[str, ...] = ()
    if scheme is not None:
        kept = _kept(model, scheme)
        jaxllm.quantize(model, scheme, head=head, keep=kept)
    params = train.parameters(model)
    total, _ = train.make_evaluate(model)(params, text.windows)
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(params)]
    return Row(total / text.characters, _bits(model), sum(sizes), kept)


def _kept(model: jaxllm.Transformer, scheme: str) -> tuple[str, ...]:
    """The projections whose inputs the scheme's groups do not divide."""
    config, group = model.config, GROUPS.get(scheme, 1)
    return ("down_proj",) if config.intermediate_size % group else ()


def _bits(model: jaxllm.Transformer) -> float:
    """Of the packed weights, scales counted in; of the projections, if none is packed."""
    packed = (jaxllm.PackedLinear, jaxllm.PackedEmbedding)
    found = [m.packed for _, m in nnx.iter_modules(model) if isinstance(m, packed)]
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(found))
    numbers = sum(weight.shape[0] * weight.shape[1] for weight in found)
    return 8 * size / numbers if numbers else 16.0


def table(texts: Sequence[Text]) -> Iterator[str]:
    """The lines, as they come."""
    names = [f"{text.name} | above bfloat16" for text in texts]
    yield f"| projections | embedding and head | bits a number | bytes | {' | '.join(names)} |"
    yield "|---|---|--:|--:|" + "--:|--:|" * len(texts)
    plain = [measure(text, *FORMATS[0]) for text in texts]
    for scheme, head in FORMATS:
        rows = plain
        if scheme is not None:
            rows = [measure(text, scheme, head) for text in texts]
        cells = [scheme or "bfloat16", head or "bfloat16"]
        cells += [f"{rows[0].bits:.2f}", f"{rows[0].size_bytes:,}"]
        for row, first in zip(rows, plain, strict=True):
            above = f"{row.loss - first.loss:+.4f}{'*' * bool(row.kept)}"
            cells += [f"{row.loss:.4f}", "" if row is first else above]
        yield f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 2 without a text, or for files that are not there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_formats")
    parser.add_argument("--shakespeare", type=Path, metavar="FILE", help="tiny shakespeare")
    parser.add_argument("--stories", type=Path, metavar="FOLDER", help="the checkpoint stories260K")
    options = parser.parse_args(arguments)
    folder = options.stories
    for name, file in (
        ("--shakespeare", options.shakespeare),
        ("--stories", None if folder is None else folder / "config.json"),
    ):
        if file is not None and not file.is_file():
            parser.error(f"{name}: there is no file {file}")
    texts = []
    if options.shakespeare is not None:
        texts.append(shakespeare(options.shakespeare))
    if folder is not None:
        texts.append(stories(folder))
    if not texts:
        print("weight_formats: give --shakespeare, --stories or both", file=sys.stderr)
        return 2
    for line in table(texts):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
