"""The layers in other people's models, and what each does by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import tiny_models
from flax import nnx
from numerics import assert_as_accurate
from tiny_models import ALL, LONGROPE, SLIDING, TINY

from jaxllm.cache import KVCache
from jaxllm.config import Rope, Runtime
from jaxllm.layers import (
    MLP,
    Attention,
    BitLinear,
    Block,
    Embedding,
    Linear,
    RMSNorm,
    rotary_tables,
)

D = TINY.hidden_size

# --------------------------------------------------------------------------- in a foreign module


class Foreign(nnx.Module):
    """A regression on sequences that somebody else wrote, with Flax's own layers around ours."""

    def __init__(self, rngs: nnx.Rngs):
        self.inward = nnx.Linear(3, D, rngs=rngs)
        self.block = Block(SLIDING, rngs=rngs)
        self.attention = Attention(TINY, rngs=rngs)
        self.norm = RMSNorm(D, eps=1e-6, rngs=rngs)
        self.outward = nnx.Linear(D, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x, _ = self.block(self.inward(x))
        x = x + self.attention(self.norm(x))[0]
        return self.outward(x)


def loss_of(model: Foreign, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


@pytest.fixture(scope="module")
def foreign() -> tuple[Foreign, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal((2, 5, n)), jnp.float32) for n in (3, 1))
    model = Foreign(nnx.Rngs(0))
    for layer in (model.block, model.attention, model.norm):
        tiny_models.fill(layer)
    return model, x, y


def test_a_layer_that_the_config_has_not_is_refused():
    for layer in (99, 2, -1):
        found = f"^layers: the config has layers 0 to 1, got {layer}$"
        with pytest.raises(ValueError, match=found):
            Block(TINY, layer, rngs=nnx.Rngs(0))


def test_in_a_foreign_module(foreign):
    """Under nnx.jit and nnx.value_and_grad; split once, under jax.jit, jax.grad and jax.vmap."""
    model, x, y = foreign
    loss, gradients = nnx.jit(nnx.value_and_grad(loss_of))(model, x, y)
    graph, state = nnx.split(model)

    @jax.jit
    def plain_loss(state, x, y):
        return loss_of(nnx.merge(graph, state), x, y)

    @jax.jit
    def row_by_row(state, x, y):
        model = nnx.merge(graph, state)
        outputs = jax.vmap(lambda row: model(row[None])[0])(x)
        return jnp.mean((outputs - y) ** 2)

    for function in (plain_loss, row_by_row):
        np.testing.assert_allclose(function(state, x, y), loss, rtol=1e-5)
    again = jax.jit(jax.grad(plain_loss))(state, x, y)
    flat = {path: np.asarray(g[...]) for path, g in nnx.to_flat_state(gradients)}
    assert len(flat) == 2 * 2 + 9 + 4 + 1
    for (path, gradient), other in zip(flat.items(), jax.tree.leaves(again), strict=True):
        assert np.linalg.norm(gradient) > 1e-4, path
        np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=1e-6)

    # Along the gradient the loss rises by its length; a loss near 1 in float32, a step that bends
    here, uphill = (jax.tree.map(np.asarray, tree) for tree in (state, again))
    size = np.sqrt(sum(np.sum(gradient**2) for gradient in flat.values()))
    up, down = (
        jax.tree.map(lambda p, g, s=step: p + np.float32(s / size) * g, here, uphill)
        for step in (1e-2, -1e-2)
    )
    slope = (plain_loss(up, x, y) - plain_loss(down, x, y)) / 2e-2
    np.testing.assert_allclose(slope, size, rtol=0.01)


def test_a_foreign_module_is_trained(foreign):
    _, x, y = foreign
    model = Foreign(nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adam(3e-2), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer):
        loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, gradients)
        return loss

    losses = [float(train(model, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.2 * losses[0]


def test_blocks_can_be_stacked():
    """Parameters of many blocks in one array each, made by vmap and run by scan."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Block:
        return Block(TINY, rngs=rngs)

    blocks = make(nnx.Rngs(0))
    assert blocks.mlp.up_proj.weight.shape == (3, TINY.intermediate_size, D)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, D)), jnp.float32)
    scanned = nnx.scan(lambda x, block: block(x)[0], in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    graph, state = nnx.split(blocks)
    one = jax.jit(lambda x, state, i: nnx.merge(graph, jax.tree.map(lambda p: p[i], state))(x)[0])
    expected = x
    for i in range(3):
        expected = one(expected, state, i)
    np.testing.assert_allclose(nnx.jit(scanned)(x, blocks), expected, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------- layer by layer

strict = pytest.mark.usefixtures("strict_jax")


@strict
def test_names_of_parameters_are_those_of_the_llama_family():
    block = nnx.eval_shape(lambda: Block(ALL, rngs=nnx.Rngs(0)))
    found = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(block, nnx.Param))}
    projections = [f"self_attn.{x}_proj" for x in "qkvo"]
    projections += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    names = {f"{x}.{part}" for x in projections for part in ("weight", "bias")}
    names |= {f"{x}_layernorm.weight" for x in norms}
    names |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    assert found == names


@strict
def test_where_parameters_start():
    """Normal with deviation 0.02, no two alike; norms at identity, biases at zero."""
    block = Block(ALL, rngs=nnx.Rngs(0))
    weights = tiny_models.weights(block)
    drawn = {name: w for name, w in weights.items() if w.ndim == 2}
    for name, weight in drawn.items():
        assert np.std(weight) == pytest.approx(0.02, rel=0.15), name
    assert len({weight.flat[0] for weight in drawn.values()}) == len(drawn)
    for name, weight in weights.items():
        if weight.ndim == 1:
            assert np.all(weight == 0), name  # ALL's norms multiply by 1 + weight
    norm = RMSNorm(8, eps=1e-6, rngs=nnx.Rngs(0))
    assert np.all(norm.weight[...] == 1)
    same = tiny_models.weights(Block(ALL, rngs=nnx.Rngs(0)))
    other = tiny_models.weights(Block(ALL, rngs=nnx.Rngs(1)))
    for name, weight in drawn.items():
        np.testing.assert_array_equal(weight, same[name])
        assert np.any(weight != other[name])


@strict
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(dtype, param_dtype):
    runtime = Runtime(dtype=dtype, param_dtype=param_dtype)
    block = Block(ALL, runtime=runtime, rngs=nnx.Rngs(0))
    stored = {p.dtype for p in jax.tree.leaves(nnx.state(block, nnx.Param))}
    assert stored == {jnp.dtype(param_dtype)}
    out, _ = jax.eval_shape(block, jax.ShapeDtypeStruct((1, 3, D), jnp.dtype(dtype)))
    assert out.dtype == jnp.dtype(dtype)


@strict
def test_linear():
    layer = tiny_models.fill(Linear(5, 3, bias=True, rngs=nnx.Rngs(0)))
    weights = tiny_models.weights(layer)
    x = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)
    plain, truth = (
        oracles.linear(x, weights["weight"], weights["bias"], dtype=d)
        for d in (np.float32, np.float64)
    )
    assert_as_accurate(layer(jnp.asarray(x)), plain, truth)
    assert Linear(5, 3, rngs=nnx.Rngs(0)).bias is None
    half = Linear(5, 3, runtime=Runtime(dtype="bfloat16"), rngs=nnx.Rngs(0))
    assert half(jnp.asarray(x)).dtype == jnp.bfloat16
    assert half(jnp.asarray(x), out_dtype=jnp.dtype("float32")).dtype == jnp.float32
    ternary = BitLinear(8, 3, runtime=Runtime(dtype="bfloat16"), rngs=nnx.Rngs(0))
    assert ternary(jnp.ones((2, 8))).dtype == jnp.bfloat16
    assert ternary(jnp.ones((2, 8)), out_dtype=jnp.dtype("float32")).dtype == jnp.float32


@strict
@pytest.mark.parametrize(("dtype", "result"), [("bfloat16", 62.5), ("float32", 62.353878)])
def test_the_embeddings_scale_is_rounded_first(dtype, result):
    """sqrt(3072) is 55.43; bfloat16 has 55.5. Rounded once at the end, 62.35 would be 62.25."""
    layer = Embedding(2, 4, scale=3072**0.5, runtime=Runtime(dtype=dtype), rngs=nnx.Rngs(0))
    layer.weight[...] = jnp.full((2, 4), 1.125, dtype)
    out = layer(jnp.asarray([[1, 0]], jnp.int32))
    assert out.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.asarray(out, np.float32), result, rtol=1e-6)


@strict
def test_embedding_and_its_head():
    layer = tiny_models.fill(Embedding(7, 4, scale=2.0, rngs=nnx.Rngs(0)))
    table = np.asarray(layer.weight[...])
    out = layer(jnp.asarray([[6, 2]], jnp.int32))
    np.testing.assert_array_equal(out[0], 2 * table[[6, 2]])
    x = jnp.asarray(np.eye(4), jnp.float32)
    np.testing.assert_array_equal(layer.attend(x), table.T)  # which the scale does not touch
    half = Embedding(7, 4, runtime=Runtime(dtype="bfloat16"), rngs=nnx.Rngs(0))
    assert half.attend(x).dtype == jnp.bfloat16


@strict
def test_mlp():
    layer = tiny_models.fill(MLP(ALL, rngs=nnx.Rngs(0)))
    weights = tiny_models.weights(layer)
    x = np.random.default_rng(0).standard_normal((3, D)).astype(np.float32)

    def expected(dtype):
        def project(x, name):
            weight, bias = weights[f"{name}_proj.weight"], weights[f"{name}_proj.bias"]
            return oracles.linear(x, weight, bias, dtype=dtype)

        gated = oracles.glu(
            project(x, "gate"), project(x, "up"), activation="gelu_pytorch_tanh", dtype=dtype
        )
        return project(gated, "down")

    plain, truth = expected(np.float32), expected(np.float64)
    assert_as_accurate(layer(jnp.asarray(x)), plain, truth)
    with pytest.raises(AssertionError, match="error is"):
        assert_as_accurate(1.001 * layer(jnp.asarray(x)), plain, truth)


@strict
@pytest.mark.parametrize("rope", [Rope(1e4), Rope(1e4, "linear", factor=3.0), LONGROPE])
def test_rotary(rope):
    positions = jnp.asarray([[0, 3, 8], [4, 9, 2]], jnp.int32)  # lengths 9 and 10
    cos, sin = rotary_tables(rope, 8, positions)
    assert cos.shape == (2, 3, 4)
    for b, length in enumerate((9, 10)):
        f = oracles.frequencies(8, tiny_models.as_dict(rope), length)
        angles = np.asarray(positions)[b][:, None] * f
        np.testing.assert_allclose(cos[b], rope.attention_factor * np.cos(angles), atol=2e-6)
        np.testing.assert_allclose(sin[b], rope.attention_factor * np.sin(angles), atol=2e-6)


@strict
def test_longrope_chooses_by_the_length_it_is_told():
    rotary = functools.partial(rotary_tables, LONGROPE, 8)
    positions = jnp.asarray([[1, 2]], jnp.int32)
    tables = [
        np.asarray(rotary(positions, jnp.asarray(lengths, jnp.int32))[0])
        for lengths in ([[9]], [[10]], [[10, 9]])
    ]
    short, long, each = tables
    assert not np.allclose(short, long, atol=1e-3)
    np.testing.assert_array_equal(each[0, 0], long[0, 0])
    np.testing.assert_array_equal(each[0, 1], short[0, 1])
    np.testing.assert_array_equal(rotary(positions)[0], short)


@strict
def test_attention_without_a_cache():
    layer = tiny_models.fill(Attention(TINY, rngs=nnx.Rngs(0)))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, D)), jnp.float32)
    graph, state = nnx.split(layer)

    @jax.jit
    def run(x, positions=None):
        layer = nnx.merge(graph, state)
        out, entry = layer(x, None if positions is None else layer.rotary(positions))
        assert entry is None
        return out

    out = run(x)
    positions = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (2, 5))
    np.testing.assert_allclose(run(x, positions), out, rtol=1e-5, atol=1e-6)
    # Only differences of positions count, and no token sees a later one
    np.testing.assert_allclose(run(x, positions + jnp.int32(1000)), out, rtol=1e-4, atol=1e-5)
    assert not np.allclose(run(x, positions * jnp.int32(2)), out, rtol=1e-2)
    later = run(x.at[:, 3:].add(1))
    np.testing.assert_allclose(later[:, :3], out[:, :3], rtol=1e-4, atol=1e-5)
    assert not np.allclose(later[:, 3:], out[:, 3:], rtol=1e-2)


@strict
@pytest.mark.parametrize("layer", [0, 1])
def test_a_block_with_a_cache(layer):
    """Token by token as all at once; a sliding layer (0) and a full one (1)."""
    block = tiny_models.fill(Block(SLIDING, layer, rngs=nnx.Rngs(0)))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, D)), jnp.float32)
    cache = KVCache.create(SLIDING, 2, 7, jnp.float32)
    graph, state = nnx.split(block)
    whole = jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0])(state, x)

    @jax.jit
    def step(state, x, positions, cache, counts):
        block = nnx.merge(graph, state)
        rotary = block.self_attn.rotary(positions)
        return block(x, rotary, cache=cache.layer(layer, counts))

    kind = type(cache.layers[layer])
    for t in range(7):
        lengths = jnp.full((2,), t, jnp.int32)
        here = KVCache(cache.layers, lengths, cache.rope_lengths)
        out, entry = step(state, x[:, t : t + 1], lengths[:, None], here, jnp.ones_like(lengths))
        assert type(entry) is kind
        np.testing.assert_allclose(out[:, 0], whole[:, t], rtol=1e-4, atol=1e-5)
        layers = tuple(entry if i == layer else old for i, old in enumerate(cache.layers))
        cache = KVCache(layers, lengths, cache.rope_lengths)


@strict
def test_positions_count_from_what_the_cache_holds():
    """Rows of other lengths, and no angles given: as with those of the tokens' positions."""
    layer = tiny_models.fill(Attention(TINY, rngs=nnx.Rngs(0)))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, D)), jnp.float32)
    cache = KVCache.create(TINY, 2, 9, jnp.float32)
    lengths = jnp.asarray([3, 5], jnp.int32)
    held = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), cache
    )
    held = KVCache(held.layers, lengths, cache.rope_lengths).layer(0, jnp.full((2,), 2, jnp.int32))
    positions = lengths[:, None] + jnp.arange(2, dtype=jnp.int32)[None, :]
    out, entry = layer(x, cache=held)
    same, same_entry = layer(x, layer.rotary(positions), cache=held)
    np.testing.assert_array_equal(out, same)
    jax.tree.map(np.testing.assert_array_equal, entry, same_entry)
    from_0, _ = layer(x, layer.rotary(positions - lengths[:, None]), cache=held)
    assert not np.allclose(out, from_0, rtol=1e-2)


@strict
def test_layers_of_one_kind_compile_once():
    """What is static in a layer is hashable and equal by value."""
    count = 0

    @functools.partial(jax.jit, static_argnums=0)
    def run(graph, state, x):
        nonlocal count
        count += 1
        return nnx.merge(graph, state)(x)[0]

    x = jnp.ones((1, 2, D))
    for seed in range(2):
        runtime = Runtime(implementation={"attention": "xla"})
        block = Block(SLIDING, 0, runtime=runtime, rngs=nnx.Rngs(seed))
        run(*nnx.split(block), x)
    assert count == 1
