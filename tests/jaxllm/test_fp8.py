import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from flax import nnx
from tiny_models import TINY

from jaxllm import aot, fp8, train
from jaxllm.config import Runtime
from jaxllm.layers import Linear


def draw(*shape: int, scale: float = 1.0, dtype=np.float32, seed: int = 0) -> jax.Array:
    numbers = scale * np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(numbers.astype(np.float32), dtype)


def rounded(x, dtype) -> np.ndarray:
    """What the tensor is in the 8-bit dtype, times its scale, in float64."""
    x = np.asarray(x, np.float32)
    most = np.float32(ml_dtypes.finfo(dtype).max)
    scale = np.max(np.abs(x)) / most
    return np.clip(x / scale, -most, most).astype(dtype).astype(np.float64) * np.float64(scale)


@pytest.mark.parametrize("dtype", [fp8.FORWARD, fp8.GRADIENT])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_rounding_uses_the_whole_range_and_nothing_becomes_nan(dtype, size):
    x = draw(64, 33, scale=size)
    small, scale = fp8.to_fp8(x, dtype)
    assert (small.dtype, scale.dtype) == (dtype, jnp.float32)
    wide = np.asarray(small, np.float64)
    assert np.max(np.abs(wide)) == ml_dtypes.finfo(dtype).max
    truth = np.asarray(x, np.float64)
    normal = np.abs(wide) > float(ml_dtypes.finfo(dtype).smallest_normal)
    relative = np.abs(wide * np.float64(scale) / truth - 1)[normal]
    half_ulp = 2.0 ** -(ml_dtypes.finfo(dtype).nmant + 1)
    assert np.max(relative) <= half_ulp * (1 + 1e-5)  # the quotient is rounded to float32 first
    assert np.max(relative) > 0.8 * half_ulp


def test_zeros_stay_zeros():
    small, scale = fp8.to_fp8(jnp.zeros((3, 4)))
    assert scale == 1
    assert not np.any(np.asarray(small, np.float32))


def layer(dtype: str = "float32", bias: bool = False) -> fp8.Fp8Linear:
    runtime = Runtime(dtype, "float32")
    plain = Linear(32, 48, bias=bias, runtime=runtime, rngs=nnx.Rngs(0))
    return fp8.Fp8Linear(tiny_models.fill(plain))


def test_the_three_products_are_those_of_the_rounded_operands():
    linear, x, d_y = layer(), draw(2, 8, 32), draw(2, 8, 48, scale=1e-6, seed=1)
    graph, state = nnx.split(linear)
    y, pull = jax.vjp(lambda s, x: nnx.merge(graph, s)(x), state, x)
    d_state, d_x = pull(d_y)
    rows = rounded(x, fp8.FORWARD).reshape(-1, 32)
    weight = rounded(linear.weight[...], fp8.FORWARD)
    d_rows = rounded(d_y, fp8.GRADIENT).reshape(-1, 48)
    for ours, truth in (
        (y.reshape(-1, 48), rows @ weight.T),
        (d_x.reshape(-1, 32), d_rows @ weight),
        (d_state["weight"][...], d_rows.T @ rows),
    ):
        largest = np.max(np.abs(truth))
        # float32 sums of 48 terms at most, of products that are exact
        np.testing.assert_allclose(ours, truth, atol=1e-6 * largest, rtol=0)
        assert not np.allclose(1.0001 * ours, truth, atol=1e-6 * largest, rtol=0)
    exact = np.asarray(x.reshape(-1, 32), np.float64) @ np.asarray(linear.weight[...], np.float64).T
    assert not np.allclose(y.reshape(-1, 48), exact, atol=1e-3 * np.max(np.abs(exact)), rtol=0)


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
            return jnp.sum(fp8._product(jnp.dtype("bfloat16"), x, weight).astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1))(x, weight)

    # Without a device nothing can be timed, and XLA would leave each product to its Triton emitter
    options = {"xla_gpu_enable_triton_gemm": False}
    program = aot.compile_for(step, *shapes, compiler_options=options)
    assert program.hlo.count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    assert not [launch for launch in program.launches if launch.kind == "kGemm"]


@pytest.mark.parametrize("dtype", [fp8.FORWARD, fp8.GRADIENT])
def test_the_least_number_does_not_make_nan(dtype):
    x = jnp.full((2, 3), jnp.finfo(jnp.float32).tiny)
    small, scale = fp8.to_fp8(x, dtype)
    assert scale > 0
    assert np.all(np.isfinite(np.asarray(small, np.float32)))
    np.testing.assert_allclose(np.asarray(small, np.float32) * scale, x)
