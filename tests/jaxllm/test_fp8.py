import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from flax import nnx
from tiny_models import TINY

from jaxllm import aot, fp8, lora, ops, train
from jaxllm.config import Runtime
from jaxllm.layers import Linear
from jaxllm.model import Transformer


def draw(*shape: int, scale: float = 1.0, dtype=np.float32, seed: int = 0) -> jax.Array:
    numbers = scale * np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(numbers.astype(np.float32), dtype)


def rounded(x, dtype) -> np.ndarray:
    """What the tensor is in the 8-bit dtype, times its scale, in float64."""
    x = np.asarray(x, np.float64)
    scale = 2 ** np.ceil(np.log2(np.max(np.abs(x)) / float(ml_dtypes.finfo(dtype).max)))
    return (x / scale).astype(dtype).astype(np.float64) * scale


@pytest.mark.parametrize("dtype", [fp8.FORWARD, fp8.GRADIENT])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
def test_the_scale_is_the_least_power_of_two_with_which_all_fit(dtype, size, x_dtype):
    most = float(ml_dtypes.finfo(dtype).max)
    x = draw(64, 33, scale=size, dtype=x_dtype)
    scale = fp8.scale_of(x, dtype)
    assert (scale.shape, scale.dtype) == ((), jnp.float32)
    assert np.frexp(float(scale))[0] == 0.5
    assert most / 2 < np.max(np.abs(np.asarray(x, np.float64))) / float(scale) <= most


@pytest.mark.parametrize("dtype", [fp8.FORWARD, fp8.GRADIENT])
def test_what_just_fits_has_scale_one_and_a_little_more_has_two(dtype):
    most = jnp.float32(jnp.finfo(dtype).max)
    found = [float(fp8.scale_of(x, dtype)) for x in (most, -most, jnp.nextafter(most, np.inf))]
    assert found == [1, 1, 2]


def test_zeros_have_scale_one():
    assert fp8.scale_of(jnp.zeros((3, 4))) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad):
    """So that a step knows that it must change nothing."""
    x, d_y = draw(8, 32, dtype="bfloat16"), draw(8, 48, dtype="bfloat16")
    y, _, d_weight = products(layer("bfloat16"), x.at[3, 5].set(bad), d_y)
    assert not np.all(np.isfinite(np.asarray(y, np.float32)))
    assert not np.all(np.isfinite(d_weight))
    _, *slopes = products(layer("bfloat16"), x, d_y.at[3, 5].set(bad))
    assert not any(np.all(np.isfinite(np.asarray(slope, np.float32))) for slope in slopes)


def layer(dtype: str = "float32", bias: bool = False, shape=(32, 48), **how) -> fp8.Fp8Linear:
    runtime = Runtime(dtype, "float32", **how)
    plain = Linear(*shape, bias=bias, runtime=runtime, rngs=nnx.Rngs(0))
    return fp8.Fp8Linear(tiny_models.fill(plain))


def products(linear: fp8.Fp8Linear, x: jax.Array, d_y: jax.Array) -> list[jax.Array]:
    """y, d_x and the gradient of the weight."""
    graph, state = nnx.split(linear)

    def both(state, x, d_y):
        y, pull = jax.vjp(lambda s, x: nnx.merge(graph, s)(x), state, x)
        d_state, d_x = pull(d_y)
        return [y, d_x, d_state["weight"][...]]

    return jax.jit(both)(state, x, d_y)


HALF_ULP = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def check_products(dtype: str, width: int, outputs: int, rows: tuple[int, ...], sums: float):
    """sums: what they may be off, of the largest; each result is rounded once besides."""
    linear = layer(dtype, shape=(width, outputs))
    x = draw(*rows, width, dtype=dtype)
    size = 1.0 if dtype == "float16" else 1e-6
    d_y = draw(*rows, outputs, scale=size, dtype=dtype, seed=1)
    left = rounded(x, fp8.FORWARD).reshape(-1, width)
    weight = rounded(linear.weight[...].astype(dtype), fp8.FORWARD)
    right = rounded(d_y, fp8.GRADIENT).reshape(-1, outputs)
    wanted = left @ weight.T, right @ weight, right.T @ left
    found = products(linear, x, d_y)
    assert [str(array.dtype) for array in found] == [dtype, dtype, "float32"]
    for ours, truth in zip(found, wanted, strict=True):
        ours = np.asarray(ours, np.float64).reshape(truth.shape)
        half_ulp = HALF_ULP["float32" if ours.shape == (outputs, width) else dtype]
        allowed = sums * np.max(np.abs(truth)) + half_ulp * np.abs(truth)
        assert np.all(np.abs(ours - truth) <= allowed)
        for wrong in (1 + 3 * half_ulp + 100 * sums, 0.5):
            assert not np.all(np.abs(wrong * ours - truth) <= allowed)
    exact = np.asarray(x, np.float64).reshape(-1, width) @ np.asarray(linear.weight[...]).T
    assert not np.allclose(wanted[0], exact, atol=1e-3 * np.max(np.abs(exact)), rtol=0)


@pytest.mark.parametrize("dtype", HALF_ULP)
def test_the_three_products_are_those_of_the_rounded_operands(dtype):
    check_products(dtype, 32, 48, (2, 8), sums=1e-6)  # of 48 terms at most, which are exact


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_ULP)
def test_the_three_products_on_a_gpu(dtype):
    # of the largest they were off by 3e-4, 7e-4 and 9e-4, of 896, 384 and 512 terms (H200)
    check_products(dtype, 896, 384, (2, 256), sums=2.0**-9)


def test_they_are_the_same_by_the_kernel():
    x, d_y = draw(2, 64, 128, dtype="bfloat16"), draw(2, 64, 256, dtype="bfloat16", seed=1)
    by_xla, by_kernel = (
        products(
            layer("bfloat16", shape=(128, 256), implementation={"cast_transpose": name}), x, d_y
        )
        for name in ("xla", "pallas-interpret")
    )
    for one, other in zip(by_xla, by_kernel, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("shape", "name", "error", "sentence"),
    [
        ((100, 128), "pallas", NotImplementedError, "'pallas' cannot run this call: "),
        ((128, 128), "palas", ValueError, "no implementation is named 'palas'"),
    ],
)
def test_a_name_is_never_passed_over(shape, name, error, sentence):
    """Not without a gradient either."""
    linear = layer("bfloat16", shape=shape, implementation={"cast_transpose": name})
    with pytest.raises(error, match=f"^cast_transpose: {sentence}"):
        linear(draw(128, shape[0]))


def test_no_rows():
    y, d_x, d_weight = products(layer(), jnp.zeros((2, 0, 32)), jnp.zeros((2, 0, 48)))
    assert (y.shape, d_x.shape) == ((2, 0, 48), (2, 0, 32))
    assert not np.any(d_weight)


def test_dtypes_and_bias():
    linear = layer("bfloat16", bias=True)
    x = draw(4, 32, dtype=jnp.bfloat16)
    assert linear(x).dtype == jnp.bfloat16
    assert linear(x, out_dtype=jnp.float32).dtype == jnp.float32
    graph, state = nnx.split(linear)
    grads = jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(x).astype(jnp.float32)))(state)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(grads["bias"][...], np.full(48, 4.0))


def test_a_model_turns_but_for_its_head_and_keeps_its_parameters():
    model, plain = tiny_models.build(TINY), tiny_models.build(TINY)
    fp8.use_fp8(model)
    assert type(model.lm_head) is Linear
    assert isinstance(model.layers[1].mlp.down_proj, fp8.Fp8Linear)
    before, after = tiny_models.weights(plain), tiny_models.weights(model)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight)
    tokens = tiny_models.tokens(2, 9)
    ours, other = tiny_models.logits(model, tokens), tiny_models.logits(plain, tokens)
    # A product of rounded operands is off by 2^-4 / sqrt(3) of each term; fourteen of them here
    distance = np.linalg.norm(ours - other) / np.linalg.norm(other)
    assert 1e-3 < distance < 0.2, distance
    with pytest.raises(ValueError, match="^fp8: the model has no linear layer that is plain"):
        fp8.use_fp8(model)


def test_a_head_below_an_adapter_stays():
    model = tiny_models.build(TINY)
    lora.add_adapters(model, rank=2, targets="lm_head|down_proj", rngs=nnx.Rngs(0))
    fp8.use_fp8(model)
    assert type(model.lm_head.base) is Linear
    assert isinstance(model.layers[1].mlp.down_proj.base, fp8.Fp8Linear)


@pytest.mark.slow
def test_it_trains_as_bfloat16_does():
    import optax

    rng = np.random.default_rng(0)
    text = rng.integers(0, TINY.vocab_size, (4, 17)).astype(np.int32)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    ends = []
    for turn in (False, True):
        model = tiny_models.build(TINY, Runtime("bfloat16", "float32"))
        if turn:
            fp8.use_fp8(model)
        optimizer = optax.adamw(3e-3)
        state, step = train.init_state(model, optimizer), train.make_train_step(model, optimizer)
        losses = []
        for _ in range(60):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        ends.append([float(loss) for loss in losses])
    assert ends[0][-1] < 0.5 * ends[0][0]
    assert ends[1][-1] < 1.1 * ends[0][-1] + 0.05


@pytest.mark.aot
def test_an_h200_calls_cublaslt_in_8_bits_for_all_three():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (192, 128))]

    def step(x, weight):
        def loss(x, weight):
            return jnp.sum(
                fp8._product(jnp.dtype("bfloat16"), "xla", x, weight).astype(jnp.float32) ** 2
            )

        return jax.grad(loss, argnums=(0, 1))(x, weight)

    # Without a device nothing can be timed, and XLA would leave each product to its Triton emitter
    options = {"xla_gpu_enable_triton_gemm": False}
    program = aot.compile_for(step, *shapes, compiler_options=options)
    products = [line for line in program.hlo.splitlines() if "__cublas$lt$matmul$f8" in line]
    assert len(products) == 3
    assert all(" = (bf16[" in line for line in products)  # no float32 is written before
    assert not [launch for launch in program.launches if launch.kind == "kGemm"]


@pytest.mark.aot
def test_an_h200_rounds_each_tensor_of_a_layer_once():
    """Four inputs (q, k and v share one, gate and up too), seven gradients, seven weights."""
    config = dataclasses.replace(
        TINY,
        hidden_size=256,
        intermediate_size=384,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        num_hidden_layers=1,
        max_position_embeddings=128,
        layer_types=(),
    )

    def build():
        model = Transformer(config, Runtime("bfloat16", "float32"), rngs=nnx.Rngs(0))
        fp8.use_fp8(model)
        return model

    graph, state = nnx.split(nnx.eval_shape(build))
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def loss(state, tokens):
        return ops.cross_entropy(nnx.merge(graph, state)(tokens), tokens)[0]

    options = {"xla_gpu_enable_triton_gemm": False}
    program = aot.compile_for(jax.grad(loss), state, tokens, compiler_options=options)
    names = [launch.name for launch in program.launches]
    assert sum("cast_transpose" in name for name in names) == 4 + 7 + 7


@pytest.mark.parametrize("dtype", [fp8.FORWARD, fp8.GRADIENT])
def test_the_least_number_does_not_make_nan(dtype):
    x = jnp.full((2, 3), jnp.finfo(jnp.float32).tiny)
    scale = fp8.scale_of(x, dtype)
    assert scale > 0
    (small, _) = ops.cast_transpose(x, scale, dtype)
    assert np.all(np.isfinite(np.asarray(small, np.float32)))
    np.testing.assert_allclose(np.asarray(small, np.float32) * scale, x)
