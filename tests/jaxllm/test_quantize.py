import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
from flax import nnx
from tiny_models import TINY

from jaxllm import aot, lora, quantize, train
from jaxllm.config import Runtime
from jaxllm.layers import Linear
from jaxllm.model import Transformer

REASON = aot.why_not()
G = 8  # divides the widths of TINY


def draw(*shape: int, dtype=np.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def unpack(packed: np.ndarray) -> np.ndarray:
    """Codes, in NumPy: the lower half of a byte first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("group", [2, 16, 48])
def test_no_number_is_further_than_half_a_scale(dtype, group):
    weight = draw(5, 96, dtype=dtype)
    packed, scale = quantize.quantize(weight, "int4", group)
    assert (packed.shape, packed.dtype) == ((5, 48), jnp.uint8)
    assert (scale.shape, scale.dtype) == ((5, 96 // group), weight.dtype)
    quotients = unpack(np.asarray(packed)).astype(np.float64) - 8
    assert np.abs(quotients).max() == 7
    wide = np.repeat(np.asarray(scale, np.float64), group, axis=-1)
    stands_for, truth = quotients * wide, np.asarray(weight, np.float64)
    # The quotient is rounded once to float32 before it is rounded to an integer
    assert np.all(np.abs(stands_for - truth) <= 0.5 * wide * (1 + 1e-6))
    assert not np.all(np.abs(stands_for - truth) <= 0.45 * wide)
    # Seven times a scale of 8 bits has 11, so bfloat16 rounds it once; in float32 it is exact
    ours = np.asarray(quantize.dequantize(packed, scale))
    np.testing.assert_array_equal(ours, stands_for.astype(np.float32).astype(ours.dtype))


def test_codes_and_their_order_in_a_byte():
    weight = jnp.asarray([[7.0, -7.0, 0.4, 3.6, 0.0, 0.0, 0.0, 0.0]])
    packed, scale = quantize.quantize(weight, "int4", 4)
    np.testing.assert_array_equal(scale, [[1.0, 1.0]])  # of zeros it is 1
    np.testing.assert_array_equal(packed, [[15 | 1 << 4, 8 | 12 << 4, 0x88, 0x88]])


def layers(dtype: str = "float32", bias: bool = True) -> tuple[Linear, quantize.Int4Linear, Linear]:
    """A layer, its packed form, and a plain one with the weight that the packed one stands for."""
    runtime = Runtime(dtype)
    linear, plain = (Linear(32, 12, bias=bias, runtime=runtime, rngs=nnx.Rngs(0)) for _ in range(2))
    tiny_models.fill(linear)
    packed = quantize.Int4Linear(linear, group_size=G)
    plain.weight.set_value(packed.dequantize())
    plain.bias = linear.bias
    return linear, packed, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_is_that_of_the_weight_it_stands_for(dtype):
    linear, packed, plain = layers(dtype)
    x = draw(3, 5, 32, dtype=dtype)
    for out_dtype in (None, jnp.float32):
        ours, other = packed(x, out_dtype=out_dtype), plain(x, out_dtype=out_dtype)
        assert ours.dtype == other.dtype
        np.testing.assert_array_equal(ours, other)
    assert not np.allclose(packed(x), linear(x), atol=1e-2)  # four bits do round


def test_gradients_are_those_of_the_weight_it_stands_for():
    _, packed, plain = layers()
    x = draw(3, 5, 32)

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x)))

    ours, other = (jax.grad(lambda x, m=m: loss(m, x))(x) for m in (packed, plain))
    np.testing.assert_array_equal(ours, other)
    graph, bias, rest = nnx.split(packed, lambda path, _: path[-1] == "bias", ...)
    other_graph, other_bias, other_rest = nnx.split(plain, lambda path, _: path[-1] == "bias", ...)
    ours = jax.grad(lambda b: loss(nnx.merge(graph, b, rest), x))(bias)
    other = jax.grad(lambda b: loss(nnx.merge(other_graph, b, other_rest), x))(other_bias)
    np.testing.assert_array_equal(ours["bias"][...], other["bias"][...])


def residuals(layer, x) -> list[tuple[int, ...]]:
    """Shapes of all that the backward pass of one layer is handed."""
    graph, state = nnx.split(layer)
    saved = jax.eval_shape(lambda s, x: jax.vjp(lambda x: nnx.merge(graph, s)(x), x)[1], state, x)
    return [leaf.shape for leaf in jax.tree.leaves(saved)]


def test_no_dequantised_weight_is_saved():
    _, packed, plain = layers(bias=False)
    x = draw(4, 32)
    assert (12, 32) in residuals(plain, x)
    assert (12, 32) not in residuals(packed, x)
    assert (12, 16) in residuals(packed, x)


@pytest.mark.skipif(REASON is not None, reason=f"tests that compile for a GPU: {REASON}")
def test_the_backward_pass_of_a_program_makes_its_weights_again():
    """XLA would otherwise share the forward pass's, and keep them all (its CPU compiler of jax
    0.10.2 drops the barriers, and does).
    """

    def temporary_bytes(barrier) -> int:
        shapes = [(512, 256), (512, 32)] * 6
        dtypes = [jnp.uint8, jnp.bfloat16] * 6
        weights = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        x = jax.ShapeDtypeStruct((16, 512), jnp.bfloat16)

        def total(x, weights):
            for packed, scale in zip(weights[::2], weights[1::2], strict=True):
                x = jnp.sin(quantize._product(jnp.dtype("bfloat16"), "xla", x, packed, scale))
            return jnp.sum(x.astype(jnp.float32))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "optimization_barrier", barrier)
            # The library's own product: no emitter that dequantises inside it
            options = {"xla_gpu_enable_triton_gemm": False}
            program = aot.compile_for(jax.grad(total), x, weights, compiler_options=options)
        return program.temporary_bytes - 2**22  # cuBLAS's own

    weight = 512 * 512 * 2
    ours = temporary_bytes(jax.lax.optimization_barrier)
    assert ours < 2.5 * weight, ours / weight
    shared = temporary_bytes(lambda x: x)
    assert shared > 5 * weight, shared / weight


def test_a_packed_model_keeps_head_and_embedding_and_follows_its_dense_twin():
    model, twin = (tiny_models.build(TINY) for _ in range(2))
    quantize.quantize_linears(model, group_size=G)
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert {"lm_head.weight", "embed_tokens.weight", "layers.0.mlp.up_proj.packed"} <= names
    assert "layers.1.self_attn.q_proj.weight" not in names
    for path, module in nnx.iter_modules(model):
        if isinstance(module, quantize.Int4Linear):
            other = twin
            for part in path:
                other = other[part] if isinstance(part, int) else getattr(other, part)
            other.weight.set_value(module.dequantize())
    tokens = tiny_models.tokens(2, 7)
    ours, other = tiny_models.logits(model, tokens), tiny_models.logits(twin, tokens)
    # The same products; XLA fuses what stands around them otherwise
    np.testing.assert_allclose(ours, other, atol=1e-5)
    plain = tiny_models.logits(tiny_models.build(TINY), tokens)
    assert not np.allclose(ours, plain, atol=1e-2)


def test_a_model_of_shapes_alone_is_packed_too():
    def build():
        model = Transformer(TINY, Runtime("bfloat16"), rngs=nnx.Rngs(0))
        quantize.quantize_linears(model, group_size=G)
        return model

    model = nnx.eval_shape(build)
    packed = model.layers[0].mlp.down_proj.packed
    assert (packed.shape, packed.dtype) == ((24, 20), jnp.uint8)


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"scheme": "int3"}, "^quantize: scheme 'int3' is not one of int4$"),
        (
            {"group_size": 7},
            "^quantize: groups of 7 do not divide the [24]. inputs of layers.0.*_proj evenly",
        ),
        ({"group_size": 16}, "^quantize: groups of 16 do not divide the [24]. inputs of layers.0."),
        (
            {"keep": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")},
            "^quantize: groups of 64 do not divide the 24 inputs of lm_head evenly",
        ),
    ],
)
def test_what_cannot_be_packed_is_said_and_nothing_is_changed(keywords, sentence):
    model = tiny_models.build(TINY)
    before = tiny_models.weights(model).keys()
    with pytest.raises(ValueError, match=sentence):
        quantize.quantize_linears(model, **keywords)
    assert tiny_models.weights(model).keys() == before


def test_packing_twice_finds_nothing_to_pack():
    model = tiny_models.build(TINY)
    quantize.quantize_linears(model, group_size=G)
    with pytest.raises(ValueError, match="^quantize: the model has no linear layer that is not"):
        quantize.quantize_linears(model, group_size=G)


def test_adapters_on_a_packed_base_train_and_the_base_stays():
    model = tiny_models.build(TINY)
    quantize.quantize_linears(model, group_size=G)
    lora.add_adapters(model, rank=4, rngs=nnx.Rngs(0))
    optimizer = optax.adamw(1e-2)
    state = train.init_state(model, optimizer, trainable=lora.is_adapter)
    before = jax.tree.map(np.asarray, state.frozen)
    assert before["layers.0.mlp.up_proj.base.packed"].dtype == np.uint8
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


@pytest.mark.parametrize("from_host", [False, True])
def test_a_weight_is_let_go_before_the_next_is_packed(monkeypatch, from_host):
    model = tiny_models.build(TINY)
    found = quantize.linears(model, quantize.KEEP)
    weights = [weakref.ref(linear.weight[...]) for _, _, linear in found.values()]
    expected = list(range(len(found), 0, -1))
    del found
    alive = []
    quantized = quantize.quantize

    def counting(weight, *rest):
        alive.append(sum(ref() is not None for ref in weights))
        return quantized(weight, *rest)

    monkeypatch.setattr(quantize, "quantize", counting)
    quantize.quantize_linears(model, group_size=G, from_host=from_host)
    assert alive == expected
    assert not any(ref() is not None for ref in weights)


@pytest.mark.parametrize("from_host", [False, True])
def test_a_model_of_the_hosts_is_brought_weight_by_weight(monkeypatch, from_host):
    """The host's memory stands for another device here: what is not where we are is brought."""
    model, twin = (tiny_models.build(TINY) for _ in range(2))
    brought = []
    monkeypatch.setattr(quantize, "_bring", brought.append)
    quantize.quantize_linears(model, group_size=G, from_host=from_host)
    linears = len(quantize.linears(twin, quantize.KEEP))
    every = len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert len(brought) == (linears + every if from_host else 0)
