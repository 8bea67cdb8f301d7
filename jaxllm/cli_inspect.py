"""`jaxllm inspect`: what a checkpoint holds, and what would run it here."""

from __future__ import annotations

import argparse
import collections
import functools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from jaxllm import chain, cli_quantize, ops, train
from jaxllm.cache import KV_DTYPES, KVCache, LayerCache
from jaxllm.checkpoint.folder import find_folder, list_tensors, read_config, read_quantization
from jaxllm.checkpoint.hf import pack_as_stored
from jaxllm.config import ModelConfig, Runtime
from jaxllm.fusion import fuse
from jaxllm.layers import BitLinear, Block, Tables
from jaxllm.model import Transformer
from jaxllm.quantize import packed_weights, quantize

CAPACITY = 1024  # of the cache of a row that is asked about: how "auto" chooses goes by it


def inspect(
    args: argparse.Namespace, checkpoint: str | os.PathLike[str], dtype: str, out: Console
) -> None:
    """Prints three tables: the checkpoint's facts, what would run the model's ops here, and what
    keeps the other implementations from them. They are made for 80 columns.
    """
    cli_quantize.check(args)
    folder = find_folder(checkpoint)
    config, hf = read_config(folder)
    quantization = read_quantization(folder, config, hf)
    tensors = list_tensors(folder)
    by_dtype: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for tensor in tensors.values():
        by_dtype[tensor.dtype][0] += math.prod(tensor.shape)
        by_dtype[tensor.dtype][1] += tensor.size_bytes

    facts = Table(title=Text(str(folder)), show_header=False, title_justify="left")
    for name, value in _facts(config).items():
        facts.add_row(name, value)
    model = _in_memory(args, folder, config, dtype)
    name, unit, parameters = "parameters", "numbers", sum(count for count, _ in by_dtype.values())
    if quantization is not None:  # an element of a packed weight holds several
        name, unit = f"parameters, {quantization.method}", "elements"
        parameters = train.count_parameters(model)
    facts.add_row(name, f"{parameters:,} in {len(tensors)} tensors")
    for stored, (count, size) in sorted(by_dtype.items()):
        facts.add_row(f"stored as {stored}", f"{count:,} {unit}, {decimal(size)}")
    for name, value in _sizes(model).items():
        facts.add_row(name, value)
    out.print(facts)

    device = jax.devices()[0]
    cache = "" if args.kv_dtype is None else f", keys and values in {args.kv_dtype}"
    title = Text(f"on {device.device_kind}, {dtype}{cache}")
    choice = Table(title=title, title_justify="left")
    for column in ("op", "call", "runs with"):
        choice.add_column(column)
    rows = list(explained(model, dtype, args.kv_dtype))
    for op, call, reasons in rows:
        choice.add_row(op, call, next(name for name, reason in reasons.items() if reason is None))
    out.print(choice)
    others = Table(title="why not the others", title_justify="left", show_lines=True)
    others.add_column("implementation: what keeps it", ratio=1)
    others.add_column("from", ratio=1)
    for why, kept_from in _kept(rows).items():
        others.add_row(why, kept_from)
    if others.row_count:
        out.print(others)


def _kept(rows: Sequence[tuple[str, str, dict[str, str | None]]]) -> dict[str, str]:
    """Each reason of `explained`'s rows once, with the ops that it keeps an implementation from;
    with their calls where it is not from all of an op's.
    """
    calls = collections.defaultdict(list)
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for op, call, reasons in rows:
        calls[op].append(call)
        for name, reason in reasons.items():
            if reason is not None:
                found[f"{name}: {reason}"][op].append(call)
    return {
        why: ", ".join(
            op if some == calls[op] else f"{op} ({'; '.join(some)})" for op, some in ops_.items()
        )
        for why, ops_ in found.items()
    }


def _facts(config: ModelConfig) -> dict[str, str]:
    kinds = collections.Counter(config.layer_types)
    rope = config.rope
    n, k, h = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    head = "tied" if config.tie_word_embeddings else "own"
    layers = (f"{count} {kind.removesuffix('_attention')}" for kind, count in kinds.items())
    positions = f"{config.max_position_embeddings:,}"
    facts = {
        "family": config.model_type,
        "layers": ", ".join(layers),
        "width (D)": f"{config.hidden_size:,}",
        "MLP width (F)": f"{config.intermediate_size:,}, {config.hidden_act}",
        "heads (N, K, H)": f"{n} query, {k} key/value, {h} wide",
        "vocabulary (V)": f"{config.vocab_size:,}, {head} head",
        "positions": f"{positions}, {rope.rope_type} rope, theta {rope.rope_theta:g}",
    }
    if config.bit_linear:
        facts["projections"] = "ternary times int8 (BitNet b1.58)"
    if config.sliding_window and "sliding_attention" in kinds:
        facts["window"] = f"{config.sliding_window:,} tokens"
    token = 2 * config.num_hidden_layers * k
    facts["cache"] = (
        f"{decimal(2 * token * h)} a token in 16 bits, {decimal(token * (h + 4))} in 8, before "
        "windows"
    )
    return facts


def explained(
    model: Transformer, dtype: str, kv_dtype: str | None = None
) -> Iterator[tuple[str, str, dict[str, str | None]]]:
    """The ops of prefill, decoding and the training loss as this model calls them, with the reasons
    of `ops.explain`. The model may be of shapes alone. kv_dtype: as `generate` takes it.
    """
    config = model.config

    def array(*shape: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    d, v, n, k, h = (
        config.hidden_size,
        config.vocab_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    positions = config.max_position_embeddings
    stored = jnp.dtype(dtype) if kv_dtype is None else KV_DTYPES[kv_dtype]
    t = min(512, positions)
    for call, queries in (("prefill", t), ("decode", 1)):
        calls = KVCache.calls(config, 1, positions, queries, jnp.dtype(dtype), stored)
        for kind, (q, keywords) in calls.items():
            reasons = ops.explain("attention", q, **keywords)
            yield "attention", f"{call}, {kind.removesuffix('_attention')}", reasons
    x, row = array(1, t, d), array(1, 1, d)
    rotary = array(1, t, config.rotary_dim(config.layer_types[0]) // 2, dtype="float32")
    head = _weight(model.embed_tokens if model.lm_head is None else model.lm_head)
    mlp = model.layers[-1].mlp
    projection = mlp.up_proj if mlp.gate_up_proj is None else mlp.gate_up_proj
    # BitNet's in training run in one way alone
    weight = head if isinstance(projection, BitLinear) else _weight(projection)
    joined = mlp.gate_up_proj is not None
    gated = joined and ops.gates_itself(weight, mlp.activation)
    alone = _weight(model.layers[-1].self_attn.o_proj) if gated else weight
    yield "linear", "prefill", ops.explain("linear", array(1, t, alone.shape[1]), alone)
    if model.layers[-1].why_not_fused(1) is None:
        yield from _of_several_layers(model, row, stored)
        yield "linear", "decode, head", ops.explain("linear", row, head)
    else:
        yield "linear", "decode", ops.explain("linear", row, weight)
    f = config.intermediate_size
    gates = [array(1, t, 2 * f)] if joined else [array(1, t, f)] * 2
    gate: Any = ("glu", "prefill", gates, {"activation": config.hidden_act})
    if gated:
        named = {"epilogue": ops.EPILOGUES[mlp.activation]}
        gate = ("fused_linear", "prefill, gate", (x, weight), named)
    sliced = {"sliced": model.layers[-1].self_attn.is_sliced}
    ids = array(1, t, dtype="int32")
    filtered = [
        array(*shape, dtype=kind) for shape in ((1, v), (1,)) for kind in ("int32", "float32")
    ]
    for op, call, operands, named in (
        ("embedding", "prefill", (_weight(model.embed_tokens), ids), {}),
        ("rms_norm", "prefill", (x, array(d)), {"eps": config.rms_norm_eps}),
        ("rope", "prefill", (array(1, t, n, h), array(1, t, k, h), rotary, rotary), sliced),
        gate,
        ("sampling_threshold", "top-k, top-p", filtered, {}),
        ("linear_cross_entropy", "training", (x, head, ids), {}),
    ):
        yield op, call, ops.explain(op, *operands, **named)


def _of_several_layers(
    model: Transformer, row: Any, stored: Any
) -> Iterator[tuple[str, str, dict[str, str | None]]]:
    """As `explained`, a fused layer's products, and the ops that have a token in all layers
    together, or, where that one cannot, between two layers' attentions. In place of "xla" of those
    what `chain` does without them.

    row: a token, of shapes alone. stored: the cache's dtype.
    """
    config, found = model.config, {}
    graph, state = nnx.split(model)
    capacity = min(CAPACITY, config.max_position_embeddings)
    blank = functools.partial(KVCache.create, config, 1, capacity, stored)

    def look(state: Any, x: Any) -> None:
        blocks, cache = nnx.merge(graph, state).layers, blank()
        halves = {kind: config.rotary_dim(kind) // 2 for kind in config.layer_types}
        angles = {kind: jnp.zeros((1, 1, half)) for kind, half in halves.items()}
        tables = {kind: (angle, angle) for kind, angle in angles.items()}
        rotary = [tables[kind] for kind in config.layer_types]
        caches = [cache.layer(i, cache.lengths) for i in range(len(blocks))]
        found["products"] = _of_products(blocks[-1], x, rotary[-1], caches[-1])
        none, together, meeting = chain.why_not(blocks, x), None, ops.no_meeting()
        if none is None:
            links = chain.links(blocks, x, rotary, caches)
            heads = jnp.zeros((1, 1, links[0].out.weight.shape[1]), x.dtype)
            call = heads, x, links[0]
            found["linked"] = ops.explain("between_attentions", *call, meeting=meeting)
            together = chain.why_not_together(blocks, x, rotary, caches)
        if none is None and together is None:
            layers = chain.layers_of(blocks, rotary, caches)
            found["layers"] = ops.explain("decode_layers", x, *layers, meeting=meeting)
        found["none"] = none or together

    jax.eval_shape(look, state, row)
    for name, reasons in found["products"].items():
        yield "fused_linear", f"decode, {name}", reasons
    refused = {"pallas": found["none"]}
    layers, linked = (dict(found.get(name, refused)) for name in ("layers", "linked"))
    for reasons, instead in ((layers, "between_attentions"), (linked, "op by op")):
        reasons.pop("xla", None)
        reasons[instead] = None
    call = f"decode, {capacity} tokens of cache"
    yield "decode_layers", call, layers
    if layers["pallas"] is not None:
        yield "between_attentions", "decode", linked


def _of_products(
    block: Block, x: jax.Array, rotary: Tables, cache: LayerCache
) -> dict[str, dict[str, str | None]]:
    """The reasons of `ops.explain` of each product of a fused layer, of one token."""
    qkv, out, gate_up, down = map(chain.weights_of, block.products())
    place = cache.place(x.dtype)
    written = None if place is None else ops.Cache(*place)
    turned = {"epilogue": "rope", "rotary": block.self_attn.turning(rotary), "cache": written}
    gated = {"epilogue": ops.EPILOGUES[block.mlp.activation]}
    found = {}
    for name, product, around in (
        ("q k v", qkv, turned),
        ("output", out, {"residual": x}),
        ("gate and up", gate_up, gated),
        ("down", down, {"residual": x}),
    ):
        weight, bias, norm, post_norm = product
        given = jnp.zeros((1, 1, weight.shape[1]), x.dtype), weight, bias
        norms = {"norm": norm, "post_norm": post_norm}
        found[name] = ops.explain("fused_linear", *given, **norms, **around)
    return found


def _in_memory(
    args: argparse.Namespace, folder: Path, config: ModelConfig, dtype: str
) -> Transformer:
    """The model as `jaxllm generate` would have it, of shapes alone: packed as it is stored and as
    the options say, and fused.

    Raises: ValueError if it cannot be packed so, or packed tensors contradict the config.
    """

    def build() -> Transformer:
        model = Transformer(config, Runtime(dtype), rngs=nnx.Rngs(0))
        pack_as_stored(model, folder)
        if (how := cli_quantize.arguments(args)) is not None:
            quantize(model, **how)
        fuse(model)
        return model

    return nnx.eval_shape(build)


def _sizes(model: Transformer) -> dict[str, str]:
    """A row of the table of `inspect`: the bytes of the weights in memory, by dtype or scheme."""
    sizes: dict[str, int] = collections.Counter()
    for array in jax.tree.leaves(nnx.state(model, nnx.Param)):
        sizes[array.dtype.name] += array.size * array.dtype.itemsize
    total = decimal(sum(sizes.values()))
    for packed in packed_weights(model).values():
        for array in jax.tree.leaves(packed):
            sizes[array.dtype.name] -= array.size * array.dtype.itemsize
            sizes[packed.scheme] += array.size * array.dtype.itemsize
    parts = [f"{decimal(size)} of {name}" for name, size in sorted(sizes.items()) if size]
    return {"weights in memory": f"{total}: {', '.join(parts)}"}


def _weight(module: Any) -> Any:
    """The shapes of its weight, packed or not."""
    return module.packed if hasattr(module, "packed") else module.weight.get_value()
