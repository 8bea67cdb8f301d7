import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxllm import aot, optimizers
from jaxllm.optimizers import Quantized

KEY = jax.random.key(0)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers of very different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 0, shape)).astype(np.float32)


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_has_256_numbers_and_its_ends(signed):
    code = optimizers.dynamic_code(signed)
    assert len(code) == 256
    assert np.all(np.diff(code) > 0)
    assert 0.0 in code
    assert code[-1] == 1.0
    assert code[0] == (0.0 if not signed else -code[-2])


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(3, 256), (2, 3, 300), (5, 7)])
def test_each_number_gets_the_nearest_code_of_its_block(signed, shape):
    x = draw(*shape) if signed else np.abs(draw(*shape))
    x[0] = 0.0
    ours = optimizers.quantize(jnp.asarray(x), signed=signed)
    blocks = -(-shape[-1] // 256)
    assert (ours.codes.shape, ours.codes.dtype) == (shape, jnp.uint8)
    assert (ours.scales.shape, ours.scales.dtype) == ((*shape[:-1], blocks), jnp.float32)
    code = optimizers.dynamic_code(signed)
    back = np.asarray(optimizers.dequantize(ours, signed=signed))
    assert not np.any(back[0])
    for block in range(blocks):
        part = (..., slice(256 * block, 256 * (block + 1)))
        scale = np.max(np.abs(x[part]), axis=-1, keepdims=True).astype(np.float64)
        safe = np.where(scale > 0, scale, 1)
        distance = np.min(np.abs(x[part][..., None] / safe[..., None] - code), axis=-1)
        found = np.abs(back[part] - x[part]) / safe
        # The ratio and the code are float32
        assert np.max(found - distance) < 1e-6
        assert np.max(distance) > 1e-3


def test_a_positive_second_moment_never_becomes_zero():
    x = jnp.asarray([[1.0, 1e-30, 0.0]])
    back = np.asarray(optimizers.dequantize(optimizers.quantize(x, signed=False), signed=False))
    assert back[0, 1] > 0
    assert back[0, 2] == 0


@pytest.mark.parametrize("shape", [(64, 256), (3, 40, 300)])
def test_it_starts_from_what_zeros_are_quantised_to(shape):
    state = optimizers.scale_by_adam_8bit().init({"w": jnp.ones(shape)})
    for moment, signed in ((state.mu, True), (state.nu, False)):
        zeros = optimizers.quantize(jnp.zeros(shape), signed=signed)
        jax.tree.map(np.testing.assert_array_equal, moment["w"], zeros)
        jax.tree.map(lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), moment["w"], zeros)


def run(optimizer, steps: int = 60) -> tuple[np.ndarray, list[float]]:
    """Least squares with a matrix of 4096 numbers; the weights at the end, and the losses."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((128, 64)), jnp.float32)
    truth = jnp.asarray(rng.standard_normal((64, 64)), jnp.float32)
    params = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}
    state = optimizer.init(params)

    def loss(params):
        return jnp.mean((x @ params["w"] + params["b"][None, :] - x @ truth) ** 2)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

    losses = []
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return np.asarray(params["w"]), losses


def test_it_goes_where_adamw_goes():
    ours, our_losses = run(optimizers.adamw_8bit(0.05, weight_decay=0.01))
    other, losses = run(optax.adamw(0.05, weight_decay=0.01))
    assert losses[-1] < 0.05 * losses[0]
    assert our_losses[-1] < 1.5 * losses[-1]
    # A code of the upper decades is within 1 % of its number; of the second moment the root is
    assert np.linalg.norm(ours - other) < 0.05 * np.linalg.norm(other)
    assert np.linalg.norm(ours - other) > 1e-4 * np.linalg.norm(other)


def test_parameters_may_vary_over_the_axes_of_a_mesh_or_not():
    """A barrier between them would have those that are alike everywhere vary as the others do."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    optimizer = optimizers.scale_by_adam_8bit()
    params = {name: jnp.ones((64, 64)) for name in ("a", "b", "c", "d")} | {"norm": jnp.ones(64)}
    state = optimizer.init(params)
    over = {name: P("x") if name in "bd" else P() for name in params}
    places = optimizers.Adam8BitState(P(), over, over)
    spread = jax.shard_map(
        optimizer.update, mesh=mesh, in_specs=(over, places), out_specs=(over, places)
    )
    ours, theirs = jax.jit(spread)(params, state), jax.jit(optimizer.update)(params, state)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"weight_decay": 0.01},
        {"b1": 0.8, "b2": 0.95, "eps": 1e-2, "weight_decay": 0.5},
        {"weight_decay": 0.5, "mask": {"w": False, "b": True}},
    ],
    ids=lambda given: "-".join(given) or "defaults",
)
def test_small_parameters_are_exactly_adamw(given):
    ours, _ = run(optimizers.adamw_8bit(0.05, **given, min_size=10**9), steps=5)
    other, _ = run(optax.adamw(0.05, **given), steps=5)
    # The same formula, associated otherwise
    np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-7)


def test_what_is_packed_and_what_it_weighs():
    shapes = {"w": (64, 256), "few": (63, 65), "long": (10_000,)}
    params = {k: jax.ShapeDtypeStruct(v, jnp.bfloat16) for k, v in shapes.items()}
    state = jax.eval_shape(optimizers.scale_by_adam_8bit().init, params)
    for moments in (state.mu, state.nu):
        assert isinstance(moments["w"], Quantized)
        assert (moments["few"].dtype, moments["long"].dtype) == (jnp.float32, jnp.float32)
    weighs = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.mu["w"], state.nu["w"])))
    assert weighs == 64 * 256 * 2 + 64 * 2 * 4


def test_the_state_keeps_its_types_through_a_step():
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    optimizer = optimizers.scale_by_adam_8bit()
    state = optimizer.init(params)
    updates, after = jax.jit(optimizer.update)(params, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]
    assert updates["w"].dtype == jnp.float32
    np.testing.assert_allclose(updates["w"], 1.0, rtol=1e-5)  # the first step's size


# ---------------------------------------------------------------------------- rounding by chance


def test_rounding_is_to_a_neighbour_and_right_on_average():
    x = jnp.asarray(draw(200))
    keys = jax.random.split(KEY, 2000)
    drawn = jax.vmap(lambda key: optimizers.round_stochastically(x, key))(keys)
    drawn = np.asarray(drawn, np.float64)
    exact = np.asarray(x, np.float64)
    step = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    assert np.all(np.abs(drawn - exact) < step)
    # The mean of 2000 draws has a standard error of at most half a step / sqrt(2000)
    error = (drawn.mean(axis=0) - exact) / (0.5 * step / np.sqrt(2000))
    assert np.max(np.abs(error)) < 5
    assert abs(np.mean(error)) < 5 / np.sqrt(len(error))
    nearest = np.asarray(x.astype(jnp.bfloat16), np.float64)
    assert np.max(np.abs((nearest - exact) / (0.5 * step / np.sqrt(2000)))) > 5


def test_what_bfloat16_holds_stays_and_what_is_not_finite_too():
    kept = jnp.asarray([0.0, -0.0, 1.5, -3.0, np.inf, -np.inf, 2.0**-130], jnp.float32)
    ours = optimizers.round_stochastically(kept, KEY)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(ours, np.float32), kept)
    assert np.isnan(np.asarray(optimizers.round_stochastically(jnp.asarray([np.nan]), KEY)))[0]


def test_small_steps_add_up():
    params = {"w": jnp.ones(4000, jnp.bfloat16), "norm": jnp.ones(3, jnp.float32)}
    plain, updates = params, jax.tree.map(lambda p: jnp.full(p.shape, 1e-4), params)
    apply = jax.jit(optimizers.apply_updates_stochastically)
    for i in range(20):
        params = apply(params, updates, jax.random.fold_in(KEY, i))
        with jax.numpy_dtype_promotion("standard"):
            plain = optax.apply_updates(plain, updates)
    assert {k: p.dtype for k, p in params.items()} == {"w": jnp.bfloat16, "norm": jnp.float32}
    assert np.all(np.asarray(plain["w"], np.float32) == 1.0)  # each step is lost
    # Of 4000 weights, steps of 2^-7 with a probability of 1e-4 * 2^7: the standard error is 8e-6
    assert np.mean(np.asarray(params["w"], np.float64)) == pytest.approx(1.002, abs=4e-5)
    np.testing.assert_allclose(params["norm"], 1.002, rtol=1e-6)


def test_two_parameters_do_not_share_their_draws():
    x = jnp.full(64, 1.001, jnp.float32)
    params = {k: jnp.zeros(64, jnp.bfloat16) for k in "ab"}
    ours = optimizers.apply_updates_stochastically(params, {"a": x, "b": x}, KEY)
    assert np.any(np.asarray(ours["a"], np.float32) != np.asarray(ours["b"], np.float32))


def test_another_dtype_is_refused():
    params = {"w": jnp.zeros(3, jnp.float16)}
    with pytest.raises(ValueError, match="^optimizers: a parameter is float16, but weights that"):
        optimizers.apply_updates_stochastically(params, params, KEY)


def step_of(optimizer):
    def step(params, state, grads):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def shapes_of(names: str, shape: tuple[int, ...]):
    optimizer = optimizers.adamw_8bit(1e-4)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in names}
    return step_of(optimizer), params, jax.eval_shape(optimizer.init, params), params


def test_a_parameter_adds_few_operations():
    """Of which XLA compiles a model's hundreds: with 870 for each, adapters of 224 took 130 s."""

    def operations(names):
        optimizer = optimizers.adamw_8bit(1e-4)
        params = {name: jnp.ones((64, 256)) for name in names}
        arguments = params, optimizer.init(params), params
        return str(jax.make_jaxpr(optimizer.update)(*arguments)).count(" = ")

    assert operations("ab") - operations("a") < 20, "those of a shape are not traced once"
    with jax.disable_jit():  # all of them, as XLA will have them
        assert 100 < operations("ab") - operations("a") < 300


def test_an_update_that_is_not_compiled_is_compiled_once(caplog):
    optimizer = optimizers.scale_by_adam_8bit()
    grads = {"a": jnp.ones((64, 256)), "b": jnp.ones(3)}
    _, state = optimizer.update(grads, optimizer.init(grads))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        optimizer.update(grads, state)
        assert not [line for line in caplog.messages if "ompil" in line]
        jax.jit(optimizer.update)(grads, state)
    assert [line for line in caplog.messages if "ompil" in line]  # the log says it


@pytest.mark.own_errors
@pytest.mark.parametrize("wrong", [{"b1": 2.0}, {"b2": 1.0}, {"b1": -0.1}, {"b2": "0.9"}])
def test_a_moment_that_would_not_fade_is_refused(wrong):
    ((name, value),) = wrong.items()
    words = rf"^scale_by_adam_8bit: {name} must be in \[0, 1\), got {value!r}$"
    with pytest.raises(ValueError, match=words):
        optimizers.adamw_8bit(1e-2, **wrong)


def test_optax_may_inject_its_settings():
    inject = optax.inject_hyperparams(optimizers.adamw_8bit, static_args=("min_size",))
    params = {"a": jnp.ones((64, 256)), "b": jnp.ones(3)}
    grads = jax.tree.map(lambda x: 0.1 * x, params)
    results = []
    with jax.numpy_dtype_promotion("standard"):  # optax's own
        for optimizer in (inject(learning_rate=1e-2), optimizers.adamw_8bit(1e-2)):
            state = jax.jit(optimizer.init)(params)
            updates, _ = jax.jit(optimizer.update)(grads, state, params)
            results.append(updates)
    for ours, plain in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5)

    alone = optax.inject_hyperparams(optimizers.adamw_8bit)(learning_rate=1e-2)
    with pytest.raises(ValueError, match=r"min_size is a traced number.*static_args=\('min_size'"):
        jax.jit(alone.init)(params)


@pytest.mark.aot
def test_a_step_never_holds_the_moments_of_all_parameters_in_float32():
    step, *arguments = shapes_of("abcdef", shape := (512, 2048))
    program = aot.compile_for(step, *arguments)
    # Those of one parameter; of all six it would be twelve
    assert program.temporary_bytes < 2.5 * 4 * np.prod(shape)


def test_learning_rates_warm_up_and_then_go_down():
    def rates(**how):
        return jax.vmap(optimizers.learning_rates(8.0, 6, **how))(jnp.arange(7))

    np.testing.assert_allclose(rates(warmup_steps=3)[:4], [2, 4, 6, 8], rtol=1e-6)
    cosine = 0.8 + 7.2 * (1 + np.cos(np.pi * np.arange(4) / 3)) / 2
    np.testing.assert_allclose(rates(warmup_steps=3)[3:], cosine, rtol=1e-6)
    linear = rates(warmup_steps=3, schedule="linear")[3:]
    np.testing.assert_allclose(linear, [8, 16 / 3, 8 / 3, 0], rtol=1e-6)
    constant = rates(warmup_steps=1, schedule="constant")
    np.testing.assert_allclose(constant, [4, 8, 8, 8, 8, 8, 8])
    np.testing.assert_allclose(rates(schedule="constant"), constant)  # a twentieth, 1 at least
    linear = rates(warmup_steps=0, schedule="linear")
    np.testing.assert_allclose(linear, 8 - np.arange(7) * 8 / 6, rtol=1e-6, atol=1e-6)
    with pytest.raises(
        ValueError, match="schedule must be one of cosine, linear, constant, got 'x'"
    ):
        optimizers.learning_rates(8.0, 6, schedule="x")
    for wrong in (-1, 0.5):
        with pytest.raises(ValueError, match=f"warmup_steps must be an integer .*, got {wrong}"):
            optimizers.learning_rates(8.0, 6, warmup_steps=wrong)
    with pytest.raises(ValueError, match="optimizers: steps must be an integer of at least 1"):
        optimizers.learning_rates(8.0, 0)


@pytest.mark.parametrize("name", optimizers.BY_NAME)
def test_weight_decay_of_matrices_alone(name):
    params = {"weight": jnp.ones((64, 64)), "scale": jnp.ones(64)}
    optimizer = optimizers.BY_NAME[name](1.0, weight_decay=0.25, mask=optimizers.matrices)
    gradients = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    assert jax.tree.map(lambda x: float(x.max()), updates) == {"weight": -0.25, "scale": 0.0}
