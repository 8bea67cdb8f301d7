import contextlib
import dataclasses
import importlib
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
from flax import nnx
from numerics import assert_as_accurate
from tiny_models import ALL, TINY

import jaxllm
from jaxllm import aot, lora, train
from jaxllm.config import Runtime
from jaxllm.layers import Linear
from jaxllm.model import Transformer
from jaxllm.ops.linear import _packed_linear, _packed_xla
from jaxllm.quantize import KEEP, PackedEmbedding, PackedLinear, linears, packed_weights
from pallas_kernels.packed import SCHEMES
from pallas_kernels.quantize import dequantize
from pallas_kernels.quantize import quantize as pack
from pallas_kernels.ternary_matmul import quantize_rows

MODULE = importlib.import_module("jaxllm.quantize")  # its function has the same name
G = 8  # divides the widths of TINY
# Widths that every scheme divides
EVEN = dataclasses.replace(TINY, hidden_size=32, intermediate_size=64)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def draw(*shape: int, dtype=np.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


class Rounding(Linear):
    """The product that ternary weights have, with a weight that is no longer packed."""

    def __call__(self, x, *, out_dtype=None):
        xq, scale = quantize_rows(x)
        return super().__call__(xq.astype(x.dtype) * scale[..., None].astype(x.dtype))


def layers(scheme: str, dtype: str = "float32", bias: bool = True) -> tuple[PackedLinear, Linear]:
    """A packed layer, and a plain one with the weight that it stands for, in float32."""
    weight = Linear(64, 12, bias=bias, runtime=Runtime(dtype), rngs=nnx.Rngs(0))
    tiny_models.fill(weight)
    packed = PackedLinear(pack(weight.weight[...], scheme), weight.bias, dtype=dtype)
    kind = Rounding if scheme == "ternary" else Linear
    plain = kind(64, 12, bias=bias, runtime=Runtime("float32"), rngs=nnx.Rngs(0))
    plain.weight.set_value(dequantize(packed.packed))
    plain.bias = weight.bias
    return packed, plain


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_product_is_that_of_the_weight_it_stands_for(scheme, strict_jax):
    packed, plain = layers(scheme)
    x = draw(3, 5, 64)
    ours, other = packed(x), plain(x)
    assert ours.dtype == jnp.float32
    # Of sums of 64 numbers of about 1, scaled before or after
    np.testing.assert_allclose(ours, other, atol=2e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_product_in_bfloat16(scheme, strict_jax):
    """As accurate as with the weight rounded to bfloat16, and more so: int8 and what NVFP4 and MX
    have before the tensor's scale are exact there.
    """
    packed, plain = layers(scheme, "bfloat16", bias=False)
    x = draw(3, 5, 64, dtype=jnp.bfloat16)
    rows = np.asarray(x, np.float64)
    if scheme == "ternary":
        xq, scale = quantize_rows(x)
        rows = np.asarray(xq, np.float64) * np.asarray(scale, np.float64)[..., None]
    weight = np.asarray(plain.weight[...], np.float64)
    truth = rows @ weight.T
    rounded = jnp.asarray(weight, jnp.bfloat16)
    for out_dtype in (jnp.float32, jnp.bfloat16):
        ours = packed(x, out_dtype=out_dtype)
        assert ours.dtype == out_dtype
        other = jaxllm.ops.linear(jnp.asarray(rows, jnp.bfloat16), rounded, out_dtype=out_dtype)
        assert_as_accurate(ours, other, truth)
    exact = np.abs(np.asarray(packed(x, out_dtype=jnp.float32), np.float64) - truth).max()
    if scheme in ("int8", "fp8", "nvfp4", "mxfp4", "mxfp8", "ternary"):
        assert exact < 1e-5
    else:
        assert exact > 1e-5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_weight_it_stands_for(scheme, strict_jax):
    packed, plain = layers(scheme)
    x, out = draw(3, 5, 64), draw(3, 5, 12, seed=1)

    def gradients(layer):
        graph, bias, rest = nnx.split(layer, lambda path, _: path[-1] == "bias", ...)

        def loss(bias, x):
            return jnp.sum(nnx.merge(graph, bias, rest)(x) * out)

        d_bias, d_x = jax.grad(loss, (0, 1))(bias, x)
        return d_bias["bias"][...], d_x

    d_bias, d_x = gradients(packed)
    # Straight through: that of a plain product, though ternary ones round x
    expected = np.einsum("bto,oi->bti", out, plain.weight[...])
    np.testing.assert_allclose(d_x, expected, atol=2e-6)
    np.testing.assert_allclose(d_bias, out.sum((0, 1)), rtol=1e-6)


def residuals(layer, x) -> list[tuple[int, ...]]:
    """Shapes of all that the backward pass of one layer is handed."""
    graph, state = nnx.split(layer)
    saved = jax.eval_shape(lambda s, x: jax.vjp(lambda x: nnx.merge(graph, s)(x), x)[1], state, x)
    return [leaf.shape for leaf in jax.tree.leaves(saved)]


def test_no_dequantised_weight_is_saved():
    packed, plain = layers("int4", bias=False)
    x = draw(4, 64)
    assert (12, 64) in residuals(plain, x)
    assert (12, 64) not in residuals(packed, x)
    assert (12, 32) in residuals(packed, x)


@pytest.mark.aot
def test_the_backward_pass_of_a_program_makes_its_weights_again():
    """XLA would otherwise share the forward pass's, and keep them all (its CPU compiler of jax
    0.10.2 drops the barriers, and does).
    """

    def temporary_bytes(barrier) -> int:
        weight = jax.eval_shape(lambda: pack(jnp.zeros((512, 512), jnp.bfloat16), "int4", 16))
        x = jax.ShapeDtypeStruct((16, 512), jnp.bfloat16)

        def total(x, weights):
            for packed in weights:
                x = jnp.sin(_packed_linear(_packed_xla, jnp.dtype("bfloat16"), x, packed, None))
            return jnp.sum(x.astype(jnp.float32))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "optimization_barrier", barrier)
            # The library's own product: no emitter that dequantises inside it
            options = {"xla_gpu_enable_triton_gemm": False}
            program = aot.compile_for(jax.grad(total), x, [weight] * 6, compiler_options=options)
        return program.temporary_bytes - 2**22  # cuBLAS's own

    weight = 512 * 512 * 2
    ours = temporary_bytes(jax.lax.optimization_barrier)
    assert ours < 2.5 * weight, ours / weight
    shared = temporary_bytes(lambda x: x)
    assert shared > 5 * weight, shared / weight


@pytest.mark.aot
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_packing_takes(scheme):
    weight = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    program = aot.compile_for(lambda w: pack(w, scheme), weight)
    rest = program.peak_bytes - 2 * 512 * 1024  # the weight itself
    assert rest <= MODULE.WORKING_BYTES * 512 * 1024


# -------------------------------------------------------------------------------- whole models


def dense_twin(model: Transformer, twin: Transformer) -> Transformer:
    """The twin, with the weights that the model's packed ones stand for."""
    for path, module in list(nnx.iter_modules(model)):
        if not isinstance(module, (PackedLinear, PackedEmbedding)):
            continue
        parent: Any = twin
        for part in path[:-1]:
            parent = parent[part] if isinstance(part, int) else getattr(parent, str(part))
        other = getattr(parent, str(path[-1]))
        if module.scheme == "ternary":
            rounding = Rounding(2, 2, runtime=Runtime("float32"), rngs=nnx.Rngs(0))
            rounding.weight, rounding.bias = other.weight, other.bias
            setattr(parent, str(path[-1]), rounding)
            other = rounding
        other.weight.set_value(dequantize(module.packed))
    return twin


CALLS = [
    *((EVEN, scheme, None) for scheme in SCHEMES),
    (EVEN, "int4", "int8"),
    (dataclasses.replace(EVEN, tie_word_embeddings=True), "int4", "int8"),
    (dataclasses.replace(EVEN, tie_word_embeddings=True), "mxfp8", "nvfp4"),
    (ALL, "int8", "int8"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "scheme", "head"), CALLS)
def test_a_model_follows_its_dense_twin_to_the_same_tokens(config, scheme, head):
    model, twin = (tiny_models.build(config, Runtime("float32")) for _ in range(2))
    jaxllm.quantize(model, scheme, head=head)
    dense_twin(model, twin)
    tokens = tiny_models.tokens(2, 7)
    ours, other = tiny_models.logits(model, tokens), tiny_models.logits(twin, tokens)
    # The same products; what stands around them is fused otherwise, and int8 rows of x may then
    # round to the other side
    np.testing.assert_allclose(ours, other, atol=2e-5 if scheme != "ternary" else 0.1)
    plain = tiny_models.logits(tiny_models.build(config, Runtime("float32")), tokens)
    assert not np.allclose(ours, plain, atol=1e-3)
    prompts = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    results = [
        jaxllm.generate(m, None, prompts, max_new_tokens=24, stop_ids=[]) for m in (model, twin)
    ]
    assert results[0].tokens == results[1].tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "head"),
    [
        ("int8", "mxfp8"),
        ("int4", "int8"),
        ("fp8", "int4"),
        ("nvfp4", "fp8"),
        ("mxfp4", "nvfp4"),
        ("mxfp8", None),
        ("ternary", "int8"),
    ],
)
def test_a_real_checkpoint_follows_its_dense_twin(scheme, head):
    folder = jaxllm.shipped_checkpoint()
    (model, tokenizer), (twin, _) = (jaxllm.load(folder, "float32") for _ in range(2))
    jaxllm.quantize(model, scheme, head=head)
    dense_twin(model, twin)
    jaxllm.fuse(model)
    texts = ["ROMEO:\n", "To be, or", "What say you to my suit? our feast tonight"]
    ours, other = (jaxllm.generate(m, tokenizer, texts, max_new_tokens=48) for m in (model, twin))
    assert ours.tokens == other.tokens


def test_what_is_packed_and_what_stays():
    model = tiny_models.build(EVEN)
    jaxllm.quantize(model, "int4", G, keep=("down_proj", "layers.0.self_attn.*"))
    names = tiny_models.weights(model).keys()
    stays = {"lm_head.weight", "embed_tokens.weight", "layers.0.self_attn.q_proj.weight"}
    stays |= {"layers.0.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight", "norm.weight"}
    assert stays <= names
    assert {"layers.0.mlp.up_proj.codes", "layers.1.self_attn.q_proj.scale"} <= names
    assert not any(name.endswith(("zero", "row_scale")) for name in names)
    packed: Any = model.layers[1].self_attn.q_proj
    assert packed.group_size == G


def test_the_head_has_its_schemes_own_groups():
    jaxllm.quantize(model := tiny_models.build(EVEN), "int4", G, head="int4")
    sizes = {name: packed.group_size for name, packed in packed_weights(model).items()}
    assert sizes.pop("lm_head") == 32
    assert set(sizes.values()) == {G}


@pytest.mark.parametrize("tied", [False, True])
def test_packed_modules_keep_the_implementation(tied):
    config = dataclasses.replace(EVEN, tie_word_embeddings=tied)
    model = tiny_models.build(config, Runtime(implementation="xla"))
    jaxllm.quantize(model, "int8", head="int8")
    jaxllm.fuse(model)
    kinds = (PackedLinear, PackedEmbedding)
    found = [module for _, module in nnx.iter_modules(model) if isinstance(module, kinds)]
    assert len(found) == 4 * TINY.num_hidden_layers + 1
    assert {module.implementation for module in found} == {"xla"}


@pytest.mark.parametrize(
    ("platforms", "there"), [("cuda", False), ("cuda,cpu", True), (None, True)]
)
def test_the_hosts_memory_is_asked_for_where_it_is(monkeypatch, platforms, there):
    monkeypatch.setattr(MODULE.jax, "config", types.SimpleNamespace(jax_platforms=platforms))
    assert isinstance(MODULE.on_host(), contextlib.nullcontext) is not there


def test_one_name_is_kept_without_a_list():
    model = tiny_models.build(EVEN)
    jaxllm.quantize(model, "int4", G, keep="down_proj")
    assert type(model.layers[0].mlp.down_proj) is Linear
    assert isinstance(model.layers[0].mlp.up_proj, PackedLinear)


def test_one_table_serves_gather_and_head():
    config = dataclasses.replace(EVEN, tie_word_embeddings=True, scale_embedding=True)
    model, plain = (tiny_models.build(config, Runtime("float32")) for _ in range(2))
    jaxllm.quantize(model, "int4", head="int8")
    table = model.embed_tokens
    assert isinstance(table, PackedEmbedding)
    ids = tiny_models.tokens(2, 3)
    rows = dequantize(table.packed)[np.asarray(ids)]
    np.testing.assert_allclose(table(ids), rows * np.float32(32**0.5), rtol=1e-6)
    np.testing.assert_allclose(table(ids), plain.embed_tokens(ids), atol=0.05)
    with pytest.raises(ValueError, match="^embedding: ids go from 61 to 61"):
        table(jnp.asarray([61]))


def test_the_table_that_is_the_head_is_not_kept_and_packed():
    model = tiny_models.build(dataclasses.replace(EVEN, tie_word_embeddings=True))
    with pytest.raises(ValueError, match="^quantize: keep names 'embed_tokens', which is the head"):
        jaxllm.quantize(model, "int4", head="int8", keep=("embed_tokens",))
    assert not packed_weights(model)


def test_a_bitnet_packed_computes_what_it_did():
    config = dataclasses.replace(EVEN, model_type="bitnet", hidden_act="relu2", sub_norms=True)
    config = dataclasses.replace(config, bit_linear=True)
    model, plain = (tiny_models.build(config, Runtime("float32")) for _ in range(2))
    for head in (None, "int8"):
        with pytest.raises(ValueError, match="^quantize: layers.0.mlp.down_proj is a ternary"):
            jaxllm.quantize(model, "int8", head=head)
    assert type(model.lm_head) is Linear
    jaxllm.quantize(model, "ternary")
    assert isinstance(model.layers[0].mlp.up_proj, PackedLinear)
    tokens = tiny_models.tokens(2, 7)
    np.testing.assert_allclose(
        tiny_models.logits(model, tokens), tiny_models.logits(plain, tokens), atol=1e-5
    )


def test_a_bitnet_is_packed_as_it_computes():
    """Float32 weights round to bfloat16 first, which moves some over the edge of a ternary one."""
    config = dataclasses.replace(EVEN, model_type="bitnet", sub_norms=True, bit_linear=True)
    model = tiny_models.build(config, Runtime("bfloat16", "float32"))
    weight = model.layers[0].mlp.down_proj.weight[...]
    jaxllm.quantize(model, "ternary")
    packed = model.layers[0].mlp.down_proj.packed
    wanted, other = (pack(x, "ternary").row_scale for x in (weight.astype("bfloat16"), weight))
    np.testing.assert_array_equal(packed.row_scale, wanted)
    assert not np.array_equal(wanted, other)


def test_a_model_of_shapes_alone_is_packed_too():
    def build():
        model = Transformer(TINY, Runtime("bfloat16"), rngs=nnx.Rngs(0))
        jaxllm.quantize(model, "int4", G)
        return model

    model = nnx.eval_shape(build)
    packed: Any = model.layers[0].mlp.down_proj
    codes = packed.codes
    assert (codes.shape, codes.dtype) == ((24, 20), jnp.uint8)


@pytest.mark.parametrize(
    ("arguments", "keywords", "sentence"),
    [
        (("int3",), {}, "scheme 'int3' is not one of int8, int4, fp8, nvfp4, mxfp4, mxfp8, "),
        (("int8",), {"head": "int2"}, "scheme 'int2' is not one of int8, int4, fp8, nvfp4, "),
        (("int4", 7), {}, "groups of 7 do not divide the [24]. inputs of layers.0.*_proj evenly"),
        (("int4", 16), {}, "groups of 16 do not divide the [24]. inputs of layers.0.*_proj eve"),
        (("nvfp4",), {}, "groups of 16 do not divide the [24]. inputs of layers.0.*_proj evenly$"),
        (("int8",), {"head": "mxfp8"}, "groups of 32 do not divide the 24 inputs of lm_head eve"),
        (("int4", 8.0), {}, "group_size must be an integer or None, got 8.0"),
        (("int8", True), {}, "group_size must be an integer or None, got True"),
        (("int8",), {"keep": 5}, "keep must be a list of names or patterns, got 5"),
        (
            ("int8",),
            {"head": "int8", "keep": ("lm_head",)},
            "keep names 'lm_head', which is the head, and head packs that in 'int8'",
        ),
        (
            ("int8",),
            {"head": "int8", "keep": "lm_*"},
            r"keep names 'lm_\*', which is the head",
        ),
        (("int4", 8), {"keep": ("up",)}, "keep names 'up', which no projection is called"),
        (("int4", 8), {"keep": PROJECTIONS}, "the model has no linear layer that is not packed"),
    ],
)
def test_what_cannot_be_packed_is_said_and_nothing_is_changed(arguments, keywords, sentence):
    model = tiny_models.build(TINY)
    before = tiny_models.weights(model).keys()
    with pytest.raises(ValueError, match=f"^quantize: {sentence}"):
        jaxllm.quantize(model, *arguments, **keywords)
    assert tiny_models.weights(model).keys() == before


def test_names_that_stay_may_come_from_a_generator():
    model = tiny_models.build(TINY)
    jaxllm.quantize(model, "int8", keep=(name for name in ["q_proj"]))
    attention = model.layers[0].self_attn
    assert isinstance(attention.q_proj, Linear)
    assert isinstance(attention.k_proj, PackedLinear)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_changed(bad):
    model = tiny_models.build(TINY)
    weight = model.layers[1].mlp.up_proj.weight
    weight.set_value(weight[...].at[3, 3].set(bad))
    before = tiny_models.weights(model).keys()
    with pytest.raises(ValueError, match=r"^quantize: layers.1.mlp.up_proj has numbers that are N"):
        jaxllm.quantize(model, "int8")
    assert tiny_models.weights(model).keys() == before


@pytest.mark.slow
def test_the_rest_of_a_packed_model_in_another_scheme():
    model = tiny_models.build(TINY)
    jaxllm.quantize(model, "int8", keep="down_proj")
    before = packed_weights(model)
    jaxllm.quantize(model, "int4", G, keep=list(before))
    after = packed_weights(model)
    for name, packed in before.items():
        assert after[name].scheme == "int8"
        np.testing.assert_array_equal(after[name].codes, packed.codes)
    rest = {name: packed.scheme for name, packed in after.items() if name not in before}
    assert rest == {f"layers.{i}.mlp.down_proj": "int4" for i in range(TINY.num_hidden_layers)}


@pytest.mark.slow
def test_packing_twice_finds_nothing_to_pack():
    model = tiny_models.build(TINY)
    jaxllm.quantize(model, "int4", G)
    with pytest.raises(ValueError, match="^quantize: the model has no linear layer that is not"):
        jaxllm.quantize(model, "int4", G)
    with pytest.raises(ValueError, match="^quantize: layers.0.* is packed in int4 already, and no"):
        jaxllm.quantize(model, "int8", head="int8")
    with pytest.raises(ValueError, match=f"^quantize: .* by groups of {G} already, and not again"):
        jaxllm.quantize(model, "int4", G // 2, head="int8")
    jaxllm.quantize(model, "int4", G, head="int8")
    with pytest.raises(ValueError, match="^quantize: the model has no head that is not packed"):
        jaxllm.quantize(model, "int4", G, head="int8")


@pytest.mark.slow
def test_adapters_on_a_packed_base_train_and_the_base_stays():
    model = tiny_models.build(TINY)
    jaxllm.quantize(model, "int4", G)
    lora.add_adapters(model, rank=4, rngs=nnx.Rngs(0))
    optimizer = optax.adamw(1e-2)
    state = train.init_state(model, optimizer, trainable=lora.is_adapter)
    before = jax.tree.map(np.asarray, state.frozen)
    assert before["layers.0.mlp.up_proj.base.codes"].dtype == np.uint8
    step = train.make_train_step(model, optimizer)
    text = tiny_models.tokens(2, 9)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    losses = []
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    for name, weight in before.items():
        np.testing.assert_array_equal(state.frozen[name], weight)


@pytest.mark.slow
def test_what_stays_stays_below_an_adapter_too():
    def below_adapters(**options):
        model = tiny_models.build(TINY)
        lora.add_adapters(model, rank=2, targets="lm_head|down_proj|up_proj", rngs=nnx.Rngs(0))
        jaxllm.quantize(model, "int8", **options)
        return model

    def packed(name):
        return any(f".{name}." in f".{each}." for each in packed_weights(model))

    for keep in ("down_proj", "layers.*.down_proj.base", "layers.*.down_proj"):
        model = below_adapters(keep=keep)
        assert not packed("lm_head")
        assert not packed("down_proj")
        assert packed("up_proj")
    model = below_adapters(head="int4")
    assert packed_weights(model)["lm_head.base"].scheme == "int4"
    assert packed("down_proj")


@pytest.mark.parametrize("scheme", ["int4", "fp8", "mxfp8"])
def test_packed_weights_are_not_trained(scheme):
    """Codes of fp8 are floating-point numbers, and no weights."""
    model = tiny_models.build(EVEN)
    jaxllm.quantize(model, scheme)
    with pytest.raises(
        ValueError, match=f"^train: layers.0.mlp.* is packed in {scheme}, which has"
    ):
        train.init_state(model, optax.sgd(0.1))


@pytest.mark.parametrize("from_host", [False, True])
def test_a_weight_is_let_go_before_the_next_is_packed(monkeypatch, from_host):
    model = tiny_models.build(TINY)
    found = linears(model, KEEP)
    weights = [weakref.ref(linear.weight[...]) for _, _, linear in found.values()]
    expected = list(range(len(found), 0, -1))
    del found
    alive = []

    def counting(weight, *rest):
        alive.append(sum(ref() is not None for ref in weights))
        return pack(weight, *rest)

    monkeypatch.setattr(MODULE, "pack", counting)
    jaxllm.quantize(model, "int4", G, from_host=from_host)
    assert alive == expected
    assert not any(ref() is not None for ref in weights)


@pytest.mark.parametrize("from_host", [False, True])
def test_a_model_of_the_hosts_is_brought_weight_by_weight(monkeypatch, from_host):
    """The host's memory stands for another device here: what is not where we are is brought."""
    model, twin = (tiny_models.build(TINY) for _ in range(2))
    brought = []
    monkeypatch.setattr(MODULE, "_bring", brought.append)
    jaxllm.quantize(model, "int4", G, from_host=from_host)
    count = len(linears(twin, KEEP))
    every = len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert len(brought) == (count + every if from_host else 0)
