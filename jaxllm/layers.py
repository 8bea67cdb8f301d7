"""Flax NNX layers, usable in anyone's module: from `Linear` to `Block`.

Parameter paths are the tensor names of Hugging Face's Llama; weights are [out, in]. One long file,
since the parts of one block are one idea.
"""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm import ops
from jaxllm.cache import Entry, LayerCache
from jaxllm.config import ModelConfig, Rope, Runtime
from jaxllm.ops.rope import cos_sin, frequencies, turns

INIT_STD = 0.02  # Hugging Face's default initializer_range

Tables = tuple[Float[Array, "B T R2"], Float[Array, "B T R2"]]


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], runtime: Runtime) -> nnx.Param:
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * np.float32(INIT_STD)
    return nnx.Param(value.astype(runtime.weight_dtype))


class Linear(nnx.Module):
    """x @ weight.T + bias, computed in the runtime's dtype."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        runtime: Runtime = Runtime(),
        rngs: nnx.Rngs,
    ):
        self.weight = _normal(rngs, (out_features, in_features), runtime)
        # What may be None is data: so one can be put there later
        zeros = nnx.Param(jnp.zeros(out_features, runtime.weight_dtype)) if bias else None
        self.bias = nnx.data(zeros)
        self.dtype = runtime.compute_dtype
        self.implementation = runtime.implementation

    def __call__(self, x: Float[Array, "*B I"], *, out_dtype=None) -> Float[Array, "*B O"]:
        bias = None if self.bias is None else self.bias[...]
        return ops.linear(
            x.astype(self.dtype),
            self.weight[...],
            bias,
            out_dtype=out_dtype,
            implementation=self.implementation,
        )


class BitLinear(Linear):
    """A `Linear` of BitNet b1.58, to be trained: at each call the weight becomes ternary, and x
    int8 a token. The gradient is that of a `Linear` at the quantised x and weight.
    """

    def __call__(self, x: Float[Array, "*B I"], *, out_dtype=None) -> Float[Array, "*B O"]:
        bias = None if self.bias is None else self.bias[...]
        weight = self.weight[...].astype(self.dtype)  # first, as a training step casts it
        return ops.bit_linear(x.astype(self.dtype), weight, bias, out_dtype=out_dtype)


class Embedding(nnx.Module):
    """Rows of a table by id, times `scale`; `attend`, for tied heads, multiplies by the table."""

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        scale: float | None = None,
        runtime: Runtime = Runtime(),
        rngs: nnx.Rngs,
    ):
        self.weight = _normal(rngs, (vocab_size, features), runtime)
        self.scale = scale
        self.dtype = runtime.compute_dtype
        self.implementation = runtime.implementation

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        # Gemma rounds sqrt(D) to the dtype of the activations first: 55.5 for D = 3072 in bfloat16.
        return ops.embedding(
            self.weight[...],
            ids,
            scale=self.scale,
            dtype=jnp.dtype(self.dtype),
            implementation=self.implementation,
        )

    def attend(self, x: Float[Array, "*B D"], *, out_dtype=None) -> Float[Array, "*B V"]:
        return ops.linear(
            x.astype(self.dtype),
            self.weight[...],
            out_dtype=out_dtype,
            implementation=self.implementation,
        )


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, with a weight [D].

    With a residual: (the norm of x + residual, that sum), which is one read and one write less.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        zero_centered: bool = False,
        runtime: Runtime = Runtime(),
        rngs: nnx.Rngs,
    ):
        del rngs  # ones (or zeros where 1 is added) need no randomness
        start = jnp.zeros if zero_centered else jnp.ones
        self.weight = nnx.Param(start(size, runtime.weight_dtype))
        self.eps = eps
        self.zero_centered = zero_centered
        self.implementation = runtime.implementation

    def __call__(
        self, x: Float[Array, "*B D"], residual: Float[Array, "*B D"] | None = None
    ) -> Any:
        return ops.rms_norm(
            x,
            self.weight[...],
            eps=self.eps,
            residual=residual,
            zero_centered=self.zero_centered,
            implementation=self.implementation,
        )

    def as_argument(self) -> ops.Norm:
        """The norm as `ops.fused_linear` takes it."""
        return ops.Norm(self.weight[...], self.eps, self.zero_centered)


def rotary_tables(
    rope: Rope,
    rotary_dim: int,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B #T"] | None = None,
) -> Tables:
    """cos and sin of the rotary angles of one kind of layer: float32 [B, T, R / 2] each.

    `lengths`: of the text that each token belongs to; longrope chooses its list by it. It is the
    largest position + 1 of the row if None.
    """
    if rope.rope_type != "longrope":
        return cos_sin(positions, *_turns(rope, rotary_dim, None), scale=rope.attention_factor)
    if lengths is None:
        lengths = jnp.max(positions, axis=-1, keepdims=True) + 1
    original = rope.original_max_position_embeddings or 0  # longrope has one: Rope checks it
    long = (lengths > original)[..., None]
    parts = [
        jnp.where(long, for_long, for_short)
        for for_short, for_long in zip(
            _turns(rope, rotary_dim, rope.short_factor),
            _turns(rope, rotary_dim, rope.long_factor),
            strict=True,
        )
    ]
    return cos_sin(positions, *parts, scale=rope.attention_factor)


def _turns(rope: Rope, rotary_dim: int, divisors: tuple[float, ...] | None) -> list[np.ndarray]:
    radians = frequencies(
        rotary_dim,
        rope_theta=rope.rope_theta,
        rope_type=rope.rope_type,
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        truncate=rope.truncate,
        original_max_position_embeddings=rope.original_max_position_embeddings,
        divisors=divisors,
    )
    return [part[None, None, :] for part in turns(radians)]


class Product(NamedTuple):
    """A projection of a layer, with the norm before it and the one behind it, if there are such."""

    linear: Any
    norm: RMSNorm | None = None
    post_norm: RMSNorm | None = None


class Attention(nnx.Module):
    """Self-attention of layer `layer` of the config, from its projections to its output's."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        *,
        runtime: Runtime = Runtime(),
        rngs: nnx.Rngs,
    ):
        heads, kv_heads, width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        both = {"runtime": runtime, "rngs": rngs}
        d, bias = config.hidden_size, config.qkv_bias
        linear = functools.partial(_linear_class, config, f"layers.{layer}.self_attn")
        self.q_proj = linear("q_proj")(d, heads * width, bias=bias, **both)
        self.k_proj = linear("k_proj")(d, kv_heads * width, bias=bias, **both)
        self.v_proj = linear("v_proj")(d, kv_heads * width, bias=bias, **both)
        self.qkv_proj: Any = nnx.data(None)  # jaxllm.fuse puts one in the place of the three
        self.o_proj = linear("o_proj")(heads * width, d, bias=config.o_bias, **both)
        norm = {"eps": config.rms_norm_eps, "zero_centered": config.zero_centered_norm, **both}
        self.q_norm = nnx.data(RMSNorm(width, **norm) if config.qk_norm else None)
        self.k_norm = nnx.data(RMSNorm(width, **norm) if config.qk_norm else None)
        sub_norm = RMSNorm(heads * width, **norm) if config.sub_norms else None
        self.attn_sub_norm = nnx.data(sub_norm)
        kind = config.layer_types[layer]
        self.rope, self.rotary_dim = config.ropes[kind], config.rotary_dim(kind)
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.scale = (config.query_pre_attn_scalar or width) ** -0.5
        self.softcap = config.attn_logit_softcapping
        self.window = config.window(layer)
        self.implementation = runtime.implementation

    @property
    def is_sliced(self) -> bool:
        """Whether queries and keys are cut out of one product's result, as `ops.rope` asks."""
        return self.qkv_proj is not None and self.q_norm is None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotary: Tables | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "B T D"], Entry | None]:
        """The result, and the cache entry with these tokens (None without a cache).

        `rotary` is what `self.rotary` returns for the tokens' positions; None means positions that
        count from 0, or from what the cache holds. With a cache, padding is what the cache's counts
        leave out, and segment ids are not looked at.
        """
        b, t, _ = x.shape
        if self.qkv_proj is None:
            q = self.q_proj(x).reshape(b, t, self.heads, self.width)
            k = self.k_proj(x).reshape(b, t, self.kv_heads, self.width)
            v = self.v_proj(x).reshape(b, t, self.kv_heads, self.width)
        else:
            every = self.qkv_proj(x).reshape(b, t, self.heads + 2 * self.kv_heads, self.width)
            q, k, v = jnp.split(every, (self.heads, self.heads + self.kv_heads), axis=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is None:
            start = jnp.zeros((b,), jnp.int32) if cache is None else cache.lengths
            rotary = self.rotary(start[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :])
        q, k = ops.rope(q, k, *rotary, sliced=self.is_sliced, implementation=self.implementation)
        if cache is None:
            entry = None
            keys = {"k": k, "v": v, "q_segment_ids": segment_ids, "kv_segment_ids": segment_ids}
        else:
            entry, keys = cache.append(k, v)
        out = self.attend(q, keys)
        if self.attn_sub_norm is not None:
            out = self.attn_sub_norm(out)
        return self.o_proj(out), entry

    def rotary(self, positions: Int[Array, "B T"]) -> Tables:
        """`rotary_tables` of the layer's kind."""
        return rotary_tables(self.rope, self.rotary_dim, positions)

    def turning(self, rotary: Tables) -> ops.Rotary:
        """How a product's heads are normed and turned, as `ops.fused_linear` takes it."""
        norms = (_as_argument(self.q_norm), _as_argument(self.k_norm))
        return ops.Rotary(*rotary, self.heads, self.kv_heads, *norms)

    def attend(self, q: Float[Array, "B T N H"], keys: dict[str, Any]) -> Float[Array, "B T NH"]:
        """What the heads see, side by side; `keys` is the key side of the attention call."""
        out = ops.attention(
            q,
            **keys,
            causal=True,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            implementation=self.implementation,
        )
        return out.reshape(*q.shape[:2], self.heads * self.width)


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) of layer `layer`; with sub_norms down(norm(...))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        *,
        runtime: Runtime = Runtime(),
        rngs: nnx.Rngs,
    ):
        d, f = config.hidden_size, config.intermediate_size
        both = {"runtime": runtime, "rngs": rngs}
        kwargs = {"bias": config.mlp_bias, **both}
        linear = functools.partial(_linear_class, config, f"layers.{layer}.mlp")
        self.gate_proj = linear("gate_proj")(d, f, **kwargs)
        self.up_proj = linear("up_proj")(d, f, **kwargs)
        self.gate_up_proj: Any = nnx.data(None)  # jaxllm.fuse puts one in the place of the two
        self.down_proj = linear("down_proj")(f, d, **kwargs)
        norm = {"eps": config.rms_norm_eps, "zero_centered": config.zero_centered_norm, **both}
        self.ffn_sub_norm = nnx.data(RMSNorm(f, **norm) if config.sub_norms else None)
        self.activation = config.hidden_act
        self.implementation = runtime.implementation

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        gated = self._gated(x)
        if self.ffn_sub_norm is not None:
            gated = self.ffn_sub_norm(gated)
        return self.down_proj(gated)

    def _gated(self, x: Float[Array, "*B D"]) -> Float[Array, "*B F"]:
        if self.gate_up_proj is None:
            both = self.gate_proj(x), self.up_proj(x)
        elif ops.gates_itself(weight_of(self.gate_up_proj), self.activation):
            gate = ops.EPILOGUES[self.activation]
            return _fused(Product(self.gate_up_proj), x, epilogue=gate)
        else:
            both = (self.gate_up_proj(x),)
        return ops.glu(*both, activation=self.activation, implementation=self.implementation)


class Block(nnx.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    With post_norms, what attention and the MLP return is normed too. Norms carry Hugging Face's
    names, which mean different things in the two kinds of block: without post_norms,
    post_attention_layernorm is the MLP's own norm; with them it norms what attention returns.
    Its switches are three biases, norms that are there or not (qk_norm, sub_norms, post_norms), how
    norms are centred, and the class of the projections (bit_linear): one path through the layer,
    and so one block.
    """

    dtype: Any = None  # of a subclass that makes its own parts: as x comes

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        *,
        runtime: Runtime = Runtime(),
        rngs: nnx.Rngs,
    ):
        if layer not in range(config.num_hidden_layers):
            raise ValueError(
                f"layers: the config has layers 0 to {config.num_hidden_layers - 1}, got {layer!r}"
            )
        norm = {
            "eps": config.rms_norm_eps,
            "zero_centered": config.zero_centered_norm,
            "runtime": runtime,
            "rngs": rngs,
        }
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(config, layer, runtime=runtime, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = MLP(config, layer, runtime=runtime, rngs=rngs)
        self.post_norms = config.post_norms
        self.dtype = runtime.compute_dtype
        if config.post_norms:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, **norm)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, **norm)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotary: Tables | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "B T D"], Entry | None]:
        """The layer's output in the compute dtype, and its cache entry with these tokens (None
        without a cache).
        """
        if self.dtype is not None and jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(self.dtype)
        dtype = x.dtype  # modules of one's own may return another
        if (
            cache is not None
            and rotary is not None
            and not self.why_not_fused(x.shape[0] * x.shape[1])
        ):
            return self._decode(x, rotary, cache)
        with jax.named_scope("attention"):
            out, entry = self.self_attn(
                self.input_layernorm(x), rotary, segment_ids=segment_ids, cache=cache
            )
            out = out.astype(dtype)
            if self.post_norms:
                out = self.post_attention_layernorm(out).astype(dtype)
        with jax.named_scope("mlp"):
            normed, x = self._mlp_norm(out, x)
            out = self.mlp(normed)
            if self.post_norms:
                out = self.post_feedforward_layernorm(out.astype(dtype))
            x = x.astype(dtype) + out.astype(dtype)
        return x, entry

    def why_not_fused(self, tokens: int) -> str | None:
        """What keeps the layer from being had as `_decode` does it, of so many tokens: it is for
        few, after `jaxllm.fuse`, and for modules of this file.
        """
        attention, mlp = self.self_attn, self.mlp
        if [*map(type, (self, attention, mlp))] != [Block, Attention, MLP]:
            return "its attention or MLP is a module of another kind"
        products = self.products()
        norms = [norm for each in products for norm in (each.norm, each.post_norm)]
        kinds = {*map(type, norms), type(attention.q_norm), type(attention.k_norm)}
        required = {type(self.input_layernorm), type(self._mlp_norm)}
        if required != {RMSNorm} or not kinds <= {RMSNorm, type(None)}:
            return "a norm of it is a module of another kind"
        if (attention.q_norm is None) != (attention.k_norm is None):
            return "of q's and k's norm it has but one"
        weights = [weight_of(each.linear) for each in products]
        if any(weight is None for weight in weights):
            return "it is not fused (jaxllm.fuse), or has projections of another kind"
        if not ops.takes_rows(tokens, *weights):
            return f"{tokens} tokens are too many"
        if not ops.takes_gate(mlp.activation, *weights):
            return f"a gate of {mlp.activation!r} is in no product with its weights"
        return None

    @property
    def _mlp_norm(self) -> RMSNorm:
        """Before the MLP, whatever its name."""
        return self.pre_feedforward_layernorm if self.post_norms else self.post_attention_layernorm

    def products(self) -> tuple[Product, Product, Product, Product]:
        """q's, k's and v's projection joined, attention's, the joined one of gate and up, and the
        last.
        """
        attention, mlp, behind = self.self_attn, self.mlp, (None, None)
        if self.post_norms:
            behind = self.post_attention_layernorm, self.post_feedforward_layernorm
        return (
            Product(attention.qkv_proj, self.input_layernorm),
            Product(attention.o_proj, attention.attn_sub_norm, behind[0]),
            Product(mlp.gate_up_proj, self._mlp_norm),
            Product(mlp.down_proj, mlp.ffn_sub_norm, behind[1]),
        )

    def _decode(self, x: Float[Array, "B T D"], rotary: Tables, cache: LayerCache):
        """`__call__` of a few tokens in as few launches as can be: norms in front of a product,
        rotation, gate and sum behind it, are part of it. A norm behind it is not, and its sum.
        """
        _, out, gate_up, down = self.products()
        with jax.named_scope("attention"):
            q, entry, keys = self.begin(x, rotary, cache)
            x = _fused(out, self.self_attn.attend(q, keys), residual=x)
        with jax.named_scope("mlp"):
            gated = _fused(gate_up, x, epilogue=ops.EPILOGUES[self.mlp.activation])
            x = _fused(down, gated, residual=x)
        return x, entry

    def begin(
        self, x: Float[Array, "B T D"], rotary: Tables, cache: LayerCache
    ) -> tuple[Float[Array, "B T N H"], Entry, dict[str, Any]]:
        """Of a layer that is fused, what `attend` is called with: q, and the keys; and between them
        the cache entry.
        """
        attention = self.self_attn
        place = cache.place(x.dtype) if x.shape[1] == 1 else None
        q, k, v = _fused(
            self.products()[0],
            x,
            epilogue="rope",
            rotary=attention.turning(rotary),
            cache=None if place is None else ops.Cache(*place),
        )
        return q, *(cache.append(k, v) if place is None else cache.written(k, v))


def computes_as(module: Any, kind: type[nnx.Module]) -> bool:
    """Whether it is one of these modules, with no method of its own in place of the kind's."""
    if not isinstance(module, kind):
        return False
    names = {"__call__", *dir(kind)} - (set(dir(nnx.Module)) - {"__call__"})
    own = {name for name in names & vars(module).keys() if callable(getattr(kind, name))}
    methods = ([inspect.getattr_static(x, name) for name in names] for x in (type(module), kind))
    return not own and all(map(operator.is_, *methods))


def weight_of(linear: Any) -> Any:
    """The weight of a `Linear`, as an array or packed; None of whatever else."""
    if type(linear) is Linear:
        return linear.weight.get_value()  # [...] would refuse shapes
    return getattr(linear, "packed", None)


def _as_argument(norm: RMSNorm | None) -> ops.Norm | None:
    return None if norm is None else norm.as_argument()


def _fused(product: Product, x: Float[Array, "*B I"], **around: Any) -> Any:
    """The product with what stands around it, as `ops.fused_linear` names it."""
    linear, norm, post_norm = product
    bias, before = None if linear.bias is None else linear.bias[...], _as_argument(norm)
    x = x.astype(linear.dtype)
    if getattr(linear, "order", None) is not None:
        x = linear.arranged(x)  # the norm's mean of squares is of any order, its weight is not
        if before is not None:
            before = before._replace(weight=linear.arranged(before.weight))
    return ops.fused_linear(
        x,
        weight_of(linear),
        bias,
        norm=before,
        post_norm=_as_argument(post_norm),
        implementation=linear.implementation,
        **around,
    )


def _linear_class(config: ModelConfig, owner: str, name: str) -> type[Linear]:
    return BitLinear if config.is_bit_linear(f"{owner}.{name}") else Linear
