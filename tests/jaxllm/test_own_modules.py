"""Modules of a user's own in a model: what they keep; decoding, saving and training with them."""

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import TINY, build

import jaxllm
from jaxllm import Runtime, fp8, layers, train

BITNET = dataclasses.replace(
    TINY, model_type="bitnet", hidden_act="relu2", bit_linear=True, sub_norms=True
)
TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 9]], jnp.int32)


def made(**runtime: Any) -> jaxllm.Transformer:
    return jaxllm.Transformer(TINY, Runtime(dtype="float32", **runtime), rngs=nnx.Rngs(0))


def made_tied() -> jaxllm.Transformer:
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    model = jaxllm.Transformer(config, Runtime(dtype="float32"), rngs=nnx.Rngs(0))
    jaxllm.quantize(model, "int8", head="int8")
    return model


class Around(nnx.Module):
    """Another module, and no more."""

    def __init__(self, inner: nnx.Module):
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Dropped(Around):
    """A block whose outputs are dropped by chance, which counts the draws."""

    def __init__(self, inner: nnx.Module):
        super().__init__(inner)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x, entry = self.inner(*args, **kwargs)
        self.sow(nnx.Intermediate, "norm", jnp.linalg.norm(x))
        return self.dropout(x), entry


class Frozen(nnx.Variable):
    """A weight that `nnx.grad` leaves alone."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("jit", [False, True])
def test_what_a_block_keeps_is_kept_under_remat_too(jit):
    calls = {}
    for remat in ("none", "full"):
        model = made(remat=remat)
        model.layers[0] = Dropped(model.layers[0])
        call = nnx.jit(lambda model: model(TOKENS)) if jit else lambda model: model(TOKENS)
        calls[remat] = [np.asarray(call(model)) for _ in range(2)]
        assert model.layers[0].dropout.rngs.count[...] == 2
        assert len(jax.tree.leaves(nnx.state(model, nnx.Intermediate))) > 0
        nnx.grad(lambda model: jnp.sum(model(TOKENS)))(model)
        assert model.layers[0].dropout.rngs.count[...] == 3
    assert np.abs(calls["none"][0] - calls["none"][1]).max() > 0.01
    for ours, plain in zip(calls["full"], calls["none"], strict=True):
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_block_with_a_frozen_weight_may_be_closed_over(remat):
    """Whose variables no other trace may write to."""
    model = made(remat=remat)
    frozen(model)
    plain = model(TOKENS)
    np.testing.assert_allclose(jax.jit(lambda tokens: model(tokens))(TOKENS), plain, atol=1e-5)
    graph, params, others = nnx.split(model, nnx.Param, ...)
    gradient = jax.grad(lambda p: jnp.sum(nnx.merge(graph, p, others)(TOKENS)))(params)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(gradient))


def replaced(model: jaxllm.Transformer, name: str) -> None:
    if name == "block":
        model.layers[0] = Around(model.layers[0])
    elif name == "blocks":
        model.layers = nnx.List([Around(block) for block in model.layers])
    else:
        setattr(model.layers[0], name, Around(getattr(model.layers[0], name)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "name", ["block", "blocks", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]
)
def test_a_model_with_modules_of_ones_own_decodes(name, fused):
    wanted = jaxllm.generate(made(), None, [[1, 2]], max_new_tokens=4).tokens
    model = made()
    replaced(model, name)
    if fused:
        jaxllm.fuse(model)
    assert jaxllm.generate(model, None, [[1, 2]], max_new_tokens=4).tokens == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *(("self_attn", "attn_sub_norm"), ("mlp", "ffn_sub_norm")),
        *(("self_attn", "q_norm"), ("self_attn", "k_norm")),
    ],
)
def test_a_norm_of_ones_own_within_a_layer_of_bitnet(owner, name):
    config, runs = dataclasses.replace(BITNET, qk_norm=True), []
    for change in (False, True):
        model = build(config, Runtime(dtype="float32"))
        if change:
            part = getattr(model.layers[0], owner)
            setattr(part, name, Around(getattr(part, name)))
        jaxllm.quantize(model, "ternary")
        jaxllm.fuse(model)
        runs.append(jaxllm.generate(model, None, [[1, 2]], max_new_tokens=4).tokens)
        assert (model.layers[0].why_not_fused(1) is None) is not change
    assert runs[0] == runs[1]


class Gated(nnx.Module):
    """An MLP that is no `jaxllm.layers.MLP`, with the names of one."""

    def __init__(self, rngs: nnx.Rngs):
        self.gate_proj, self.up_proj = (layers.Linear(24, 24, rngs=rngs) for _ in range(2))

    def __call__(self, x: Any) -> Any:
        return nnx.sigmoid(self.gate_proj(x)) * self.up_proj(x)


class Summed(layers.Attention):
    """Attention of another kind."""

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(q + jnp.concatenate([k, v], -1)), None


class Wide(Around):
    """What another module returns, in float32."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), self.inner(*args, **kwargs))


@pytest.mark.parametrize("post_norms", [False, True])
def test_a_block_computes_in_its_dtype(post_norms):
    config = dataclasses.replace(TINY, post_norms=post_norms)
    model: Any = build(config, Runtime(dtype="bfloat16"))
    x = jnp.ones((1, 5, TINY.hidden_size))
    out = model.layers[0](x)[0]
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, model.layers[0](x.astype(jnp.bfloat16))[0])
    with pytest.raises(ValueError, match="rms_norm: x is int32; it must be floating point"):
        model.layers[0](jnp.ones((1, 5, TINY.hidden_size), jnp.int32))
    before, block = model(TOKENS), model.layers[-1]
    parts = ["self_attn", "mlp", "post_attention_layernorm"]
    for name in parts + post_norms * ["pre_feedforward_layernorm", "post_feedforward_layernorm"]:
        setattr(block, name, Wide(getattr(block, name)))
        assert block(x)[0].dtype == jnp.bfloat16, name
        np.testing.assert_array_equal(model(TOKENS), before)


def test_a_block_that_makes_its_own_parts_computes_in_what_comes():
    class Own(jaxllm.Block):
        def __init__(self, block: jaxllm.Block):
            for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
                setattr(self, name, getattr(block, name))
            self.post_norms = False

    model: Any = build(TINY, Runtime())
    x = jnp.ones((1, 5, TINY.hidden_size))
    np.testing.assert_array_equal(Own(model.layers[0])(x)[0], model.layers[0](x)[0])


class Sum(nnx.Module):
    """In attention's place: the sum of all so far, which is what it keeps."""

    def __call__(self, x: Any, rotary: Any = None, *, segment_ids: Any = None, cache: Any = None):
        del rotary, segment_ids
        if cache is None:
            return jnp.cumsum(x, 1), None
        out = jnp.cumsum(x, 1) + cache.entry["sum"][:, None]
        return out, {"sum": out[:, -1]}


def test_a_layer_may_keep_an_entry_of_its_own():
    model: Any = made()
    model.layers[0].self_attn = Sum()
    whole, _ = model.hidden(TOKENS)
    cache = jaxllm.KVCache.create(TINY, 1, 8, jnp.float32)
    entry: Any = {"sum": jnp.zeros((1, TINY.hidden_size))}
    cache = dataclasses.replace(cache, layers=(entry, *cache.layers[1:]))
    parts = []
    for start in (0, 3):
        part, cache = model.hidden(TOKENS[:, start : start + 3], cache=cache)
        parts.append(part)
    # Sums of float32 in another order at most
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=2e-5)


@pytest.mark.slow
def test_what_a_layer_may_have_can_be_put_there_later():
    both: dict[str, Any] = {"rngs": nnx.Rngs(0)}
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    model: Any = build(config, Runtime(dtype="float32"))
    before = model(TOKENS)
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    norms = {"eps": 1e-5, **both}
    attention.q_norm = layers.RMSNorm(TINY.head_dim, **norms)
    attention.k_norm = layers.RMSNorm(TINY.head_dim, **norms)
    attention.attn_sub_norm = layers.RMSNorm(TINY.num_attention_heads * TINY.head_dim, **norms)
    mlp.ffn_sub_norm = layers.RMSNorm(TINY.intermediate_size, **norms)
    mlp.down_proj.bias = nnx.Param(jnp.ones(TINY.hidden_size))
    model.lm_head = layers.Linear(TINY.hidden_size, TINY.vocab_size, **both)
    after = model(TOKENS)
    assert np.abs(after - before).max() > 0.1
    for again in (pickle.loads(pickle.dumps(model)), jaxllm.flatten(model).model()):
        np.testing.assert_array_equal(again(TOKENS), after)
    assert jaxllm.generate(model, None, [[1, 2]], max_new_tokens=2).tokens
    for pack in (fp8.use_fp8, lambda model: jaxllm.quantize(model, "int8")):
        other = build(TINY, Runtime(dtype="float32"))
        pack(other)
        linear: Any = other.layers[1].mlp.up_proj
        assert not isinstance(linear, layers.Linear) or isinstance(linear, fp8.Fp8Linear)
        before = other(TOKENS)
        linear.bias = nnx.Param(jnp.ones(TINY.intermediate_size))
        assert np.abs(other(TOKENS) - before).max() > 0.1


def test_fuse_leaves_modules_of_ones_own_alone():
    model: Any = made()
    model.layers[0].mlp = Gated(nnx.Rngs(0))
    model.layers[1].self_attn = Summed(TINY, 1, rngs=nnx.Rngs(1))
    before = model(TOKENS)
    jaxllm.fuse(model)
    assert model.layers[0].self_attn.qkv_proj is not None
    assert model.layers[1].mlp.gate_up_proj is not None
    assert model.layers[1].self_attn.qkv_proj is None
    np.testing.assert_allclose(model(TOKENS), before, atol=2e-5)  # sums in another order at most


def test_attention_and_mlp_are_fused_wherever_they_are():
    class Mine(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.sees: Any = layers.Attention(TINY, rngs=rngs)
            self.mixes: Any = layers.MLP(TINY, rngs=rngs)

    mine = Mine(nnx.Rngs(0))
    jaxllm.fuse(mine)
    assert mine.sees.qkv_proj is not None
    assert mine.mixes.gate_up_proj is not None


def test_stacked_blocks_are_not_fused():
    stack = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: jaxllm.Block(TINY, rngs=rngs)))
    blocks = stack(nnx.Rngs(0))
    found = r"^fuse: mlp.gate_proj.weight is \[3, 40, 24\]; a weight must be \[out, in\], "
    with pytest.raises(ValueError, match=found):
        jaxllm.fuse(blocks)
    assert blocks.self_attn.qkv_proj is None

    class Both(nnx.Module):
        def __init__(self):
            self.first: Any = jaxllm.Block(TINY, rngs=nnx.Rngs(0))
            self.second = blocks

    both = Both()
    with pytest.raises(ValueError, match=r"^fuse: second\.mlp\.gate_proj\.weight is"):
        jaxllm.fuse(both)
    assert both.first.mlp.gate_up_proj is None  # nothing is changed


def test_a_subclass_of_a_block_is_not_passed_over():
    """All layers in one launch would compute what `Block` does."""

    class Scaled(jaxllm.Block):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            x, entry = super().__call__(*args, **kwargs)
            return 0.5 * x, entry

    model = made()
    jaxllm.fuse(model)
    x = jnp.zeros((1, 1, TINY.hidden_size))
    blocks = list(model.layers)[:2]
    assert jaxllm.chain.why_not(blocks, x) is None
    blocks[1].__class__ = Scaled
    assert jaxllm.chain.why_not(blocks, x) == "layer 1 is a Scaled, not a Block"
    assert blocks[1].why_not_fused(1) is not None


def frozen(model: jaxllm.Transformer) -> None:
    linear = model.layers[0].mlp.up_proj
    linear.weight = Frozen(linear.weight[...])


def shared(model: jaxllm.Transformer) -> None:
    model.layers[1] = model.layers[0]


def without_a_layer(model: jaxllm.Transformer) -> None:
    model.layers = nnx.List(list(model.layers)[:-1])


def of_another_width(model: jaxllm.Transformer) -> None:
    jaxllm.fuse(model)
    linear = model.layers[0].mlp.gate_up_proj
    linear.weight = nnx.Param(linear.weight[...][:-2])


def around(model: jaxllm.Transformer) -> None:
    replaced(model, "mlp")


def assert_not_saved(change: Any, match: str, folder: Path) -> None:
    model = made()
    change(model)
    with pytest.raises(ValueError, match=match):
        jaxllm.save(model, None, folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (frozen, "the model has no nnx.Param: layers.0.mlp.up_proj.weight"),
        (shared, "the model has no nnx.Param: layers.1."),
        (without_a_layer, f"the model has no nnx.Param: layers.{TINY.num_hidden_layers - 1}."),
        (of_another_width, "has no nnx.Param: layers.0.mlp.gate_proj.weight, layers.0.mlp.up_pro"),
        (around, "has more than its config says: layers.0.mlp.inner."),
    ],
)
def test_a_model_that_is_not_what_its_config_says_is_not_saved(change, sentence, tmp_path):
    assert_not_saved(change, rf"^save: .*{re.escape(sentence)}", tmp_path / "new")


def test_a_number_of_a_module_of_ones_own_is_not_saved(tmp_path):
    model = made()
    model.norm = Around(model.norm)
    model.norm.bias = nnx.Param(jnp.float32(1))
    with pytest.raises(ValueError, match="has more than its config says: norm.bias, norm.inner.w"):
        jaxllm.save(model, None, tmp_path / "new")


def test_a_parameter_of_another_shape_is_not_saved(tmp_path):
    model = made()
    norm = model.norm.weight
    model.norm.weight = nnx.Param(norm[...][:-1])
    found = (
        rf"^save: the model has another shape than its config says: norm.weight \[{norm.size - 1}\]"
    )
    with pytest.raises(ValueError, match=found):
        jaxllm.save(model, None, tmp_path / "new")


class NoPE(layers.Attention):
    """Attention that turns nothing."""

    def __call__(self, x: Any, rotary: Any = None, **kwargs: Any) -> Any:
        rotary = self.rotary(jnp.zeros(x.shape[:2], jnp.int32))
        return super().__call__(x, rotary, **kwargs)


class Doubled(layers.Linear):
    """Twice a product."""

    def __call__(self, x: Any, *, out_dtype: Any = None) -> Any:
        return 2 * super().__call__(x, out_dtype=out_dtype)


def own_attention(model: Any) -> None:
    model.layers[1].self_attn = NoPE(TINY, 1, rngs=nnx.Rngs(0))


def own_linear(model: Any) -> None:
    model.lm_head.__class__ = Doubled


def own_linear_fused(model: Any) -> None:
    jaxllm.fuse(model)
    model.layers[0].mlp.gate_up_proj.__class__ = Doubled


def own_model(model: Any) -> None:
    class Half(jaxllm.Transformer):
        def head(self, hidden: Any) -> Any:
            return 0.5 * super().head(hidden)

    model.__class__ = Half


def own_norm(model: Any) -> None:
    model.layers[0].self_attn.attn_sub_norm = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


def activation(model: Any) -> None:
    model.layers[0].mlp.activation = "gelu"


def window(model: Any) -> None:
    model.layers[0].self_attn.window = 2


def own_method(model: Any) -> None:
    model.layers[1].mlp._gated = lambda x: x


def rope(model: Any) -> None:
    model.config = dataclasses.replace(TINY, rope=jaxllm.Rope(5e5))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (own_attention, "layers.1.self_attn is a NoPE, which a config.json cannot say; it must be"),
        (
            own_linear,
            "lm_head is a Doubled, which a config.json cannot say; it must be of the class "
            "Linear, with its methods",
        ),
        (own_linear_fused, "layers.0.mlp.gate_up_proj is a Doubled, which"),
        (own_model, "the model is a Half, which"),
        (own_norm, "layers.0.self_attn.attn_sub_norm is a Dropout, but the config says None"),
        (activation, "layers.0.mlp.activation is 'gelu', but the config says 'silu'"),
        (window, "layers.0.self_attn.window is 2, but the config says None"),
        (own_method, "layers.1.mlp is a MLP, which a config.json cannot say; it must be of the"),
        (rope, "layers.0.self_attn.rope is Rope(rope_theta=10000.0, "),
    ],
)
def test_a_model_that_computes_what_its_config_does_not_say_is_not_saved(
    change, sentence, tmp_path
):
    assert_not_saved(change, rf"^save: {re.escape(sentence)}", tmp_path / "new")


def test_another_scale_of_a_packed_table_is_not_saved(tmp_path):
    model: Any = made_tied()
    model.embed_tokens.scale_by = 2.0
    with pytest.raises(ValueError, match="^save: embed_tokens.scale_by is 2.0, but the config say"):
        jaxllm.save(model, None, tmp_path / "new")


def test_a_subclass_that_computes_the_same_is_saved(tmp_path):
    class Named(layers.Attention):
        """With a method more."""

        def name(self) -> str:
            return "attention"

    model = made()
    model.layers[1].self_attn.__class__ = Named
    jaxllm.fp8.use_fp8(model)
    jaxllm.save(model, None, tmp_path / "new")
    loaded, _ = jaxllm.load(tmp_path / "new", dtype="float32")
    np.testing.assert_array_equal(loaded(TOKENS), made()(TOKENS))


def dropped(model: jaxllm.Transformer) -> None:
    model.layers[0] = Dropped(model.layers[0])


@pytest.mark.parametrize("change", [frozen, dropped])
def test_variables_that_no_step_carries_on_are_named(change):
    model = made()
    change(model)
    found = r"^train: layers\.0\.\S+ is of the type \w+, but a step carries on nnx.Param alone; "
    with pytest.raises(ValueError, match=found):
        train.init_state(model, optax.sgd(1.0))
    with pytest.raises(ValueError, match=found):
        train.make_evaluate(model)({}, [{"tokens": TOKENS, "targets": TOKENS}])
