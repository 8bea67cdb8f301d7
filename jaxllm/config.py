"""What a model computes (`ModelConfig`), how it is run (`Runtime`), how its checkpoint samples.

`families.py` reads and writes a `ModelConfig` as a Hugging Face `config.json`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pallas_kernels.options import check_flags, check_number
from pallas_kernels.whole_number import is_whole

LAYER_TYPES = ("full_attention", "sliding_attention")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
REMAT = ("none", "full", "dots", "save_attention", "offload")
DTYPES = ("float32", "bfloat16", "float16")

# Angles are reduced in 32-bit integers (ops/rope.py), which holds for positions below 2**20.
MAX_POSITIONS = 2**20
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 10_000  # so that nothing is made of a number that is none


def check_size(owner: str, name: str, value: Any) -> int:
    """The value, if the size of this name can be that. Raises: ValueError by `owner`."""
    most = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
    if not is_whole(value) or not 1 <= value <= most:
        raise ValueError(
            f"{owner}: {name} must be a positive integer of at most {most}, got {value!r:.40}"
        )
    return int(value)


def _as_python(owner: str, options: Any, names: str, *, optional: bool = False) -> None:
    """Makes the options of these names Python's floats, of numbers of NumPy and JAX too, for a
    config is a static argument and is written as JSON. Raises: ValueError by `owner`.
    """
    for name in names.split():
        value = getattr(options, name)
        check_number(owner, name, value, positive=True, optional=optional)
        object.__setattr__(options, name, None if value is None else float(value))


def _as_bools(owner: str, options: Any, names: str) -> None:
    """Likewise of flags."""
    for name in names.split():
        check_flags(owner, **{name: getattr(options, name)})
        object.__setattr__(options, name, bool(getattr(options, name)))


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary frequencies of one kind of layer, in the words of `rope_parameters`.

    Which fields count depends on `rope_type`: linear reads factor; llama3 factor, low_freq_factor,
    high_freq_factor and original_max_position_embeddings; yarn factor, beta_fast, beta_slow,
    truncate, original_max_position_embeddings and attention_factor; longrope short_factor,
    long_factor, original_max_position_embeddings and attention_factor.
    Source: Hugging Face `modeling_rope_utils.py` (transformers 5.23).
    """

    rope_theta: float
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    original_max_position_embeddings: int | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope: rope_type {self.rope_type!r} is not one of {', '.join(ROPE_TYPES)}"
            )
        for name in ("short_factor", "long_factor"):
            if (factors := getattr(self, name)) is None:
                continue
            many = isinstance(factors, Iterable) and getattr(factors, "shape", None) != ()
            factors: tuple[Any, ...] = tuple(factors) if many else (factors,)
            for factor in factors:
                check_number("rope", f"each number of {name}", factor, positive=True)
            object.__setattr__(self, name, tuple(map(float, factors)))
        _as_python(
            "rope",
            self,
            "rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow "
            "attention_factor partial_rotary_factor",
        )
        _as_bools("rope", self, "truncate")
        if self.partial_rotary_factor > 1:
            raise ValueError(
                f"rope: partial_rotary_factor must be in (0, 1], got {self.partial_rotary_factor}"
            )
        original = self.original_max_position_embeddings
        if original is not None:
            original = check_size("rope", "original_max_position_embeddings", original)
            object.__setattr__(self, "original_max_position_embeddings", original)
        if self.rope_type in ("llama3", "yarn", "longrope") and (original is None or original < 2):
            raise ValueError(
                f"rope: {self.rope_type} needs original_max_position_embeddings, at least 2, got "
                f"{original}"
            )
        if self.rope_type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope: high_freq_factor must be above low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )
        if self.rope_type == "yarn" and not self.rope_theta > 1:
            raise ValueError(f"rope: rope_theta of yarn must be above 1, got {self.rope_theta}")
        if self.rope_type == "longrope" and not (self.short_factor and self.long_factor):
            raise ValueError("rope: longrope needs the lists short_factor and long_factor")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What one decoder computes. Fields have the names of Hugging Face's `config.json`, if any.

    Sizes: vocab_size V, hidden_size D, intermediate_size F, num_hidden_layers L,
    num_attention_heads N, num_key_value_heads K, head_dim H. `layer_types` names the kind of each
    layer (all "full_attention" if empty, where `sliding_window` says nothing); a
    "sliding_attention" layer sees the last `sliding_window` tokens, its own included, and turns by
    `sliding_rope` (`rope` if None). `query_pre_attn_scalar` is the number whose inverse root scales
    the scores (head_dim if None). `post_norms` adds a norm behind attention and behind the MLP;
    `zero_centered_norm` multiplies by 1 + weight; `qk_norm` normalises each head of q and k before
    the rotation; `scale_embedding` multiplies by sqrt(D); `sub_norms` norms what attention hands to
    its output projection and the gated product before the down projection. `bit_linear` makes the
    projections of a layer those of BitNet b1.58, ternary weights times int8 activations, but for
    those that `modules_to_not_convert` names, as in "model.layers.0.mlp" or "o_proj". `model_type`
    says under which name the model is saved: a name that cannot say the rest makes `to_hf` raise.

    Raises: ValueError if the numbers cannot be a model.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope: Rope
    sliding_rope: Rope | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    zero_centered_norm: bool = False
    post_norms: bool = False
    scale_embedding: bool = False
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    sub_norms: bool = False
    bit_linear: bool = False
    modules_to_not_convert: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layer_types", "modules_to_not_convert"):
            names: Any = () if getattr(self, name) is None else getattr(self, name)
            if isinstance(names, str) or not isinstance(names, Iterable):
                raise ValueError(f"config: {name} must be a tuple of names, got {names!r:.60}")
            object.__setattr__(self, name, tuple(names))  # a list has no hash
        for name in self.modules_to_not_convert:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(
                    f"config: modules_to_not_convert has {name!r:.60}; it must be names of "
                    "modules, or beginnings or ends of those: no other expressions are read"
                )
        sizes = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads"
        )
        for name in (*sizes.split(), "head_dim", "max_position_embeddings"):
            object.__setattr__(self, name, check_size("config", name, getattr(self, name)))
        for name in ("rope", "sliding_rope"):
            rope = getattr(self, name)
            if not isinstance(rope, Rope) and (name == "rope" or rope is not None):
                kinds = "a Rope" if name == "rope" else "a Rope or None"
                raise ValueError(f"config: {name} must be {kinds}, got {rope!r:.80}")
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config: {self.num_attention_heads} query heads cannot share "
                f"{self.num_key_value_heads} key heads; num_attention_heads must be a multiple of "
                "num_key_value_heads"
            )
        if self.max_position_embeddings > MAX_POSITIONS:
            raise ValueError(
                f"config: max_position_embeddings is {self.max_position_embeddings}, but at most "
                f"{MAX_POSITIONS} positions keep their rotary angles exact"
            )
        _as_python("config", self, "rms_norm_eps")
        caps = "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"
        _as_python("config", self, caps, optional=True)
        _as_bools(
            "config",
            self,
            "tie_word_embeddings qkv_bias o_bias mlp_bias qk_norm zero_centered_norm post_norms "
            "scale_embedding sub_norms bit_linear",
        )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"config: hidden_act {self.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"config: layer_types has {len(self.layer_types)} entries for "
                f"{self.num_hidden_layers} layers; give as many, or () for full attention in all"
            )
        for kind in self.layer_types:
            if kind not in LAYER_TYPES:
                raise ValueError(
                    f"config: layer type {kind!r} is not one of {', '.join(LAYER_TYPES)}"
                )
        window: Any = self.sliding_window
        is_window = is_whole(window) and 0 < window < 2**31  # positions are int32
        if "sliding_attention" in self.layer_types and not is_window:
            raise ValueError(
                f"config: sliding layers need a positive sliding_window below 2**31, got {window!r}"
            )
        if window is not None:
            if not is_whole(window):
                raise ValueError(f"config: sliding_window must be a whole number, got {window!r}")
            object.__setattr__(self, "sliding_window", int(window))
        for kind, rope in self.ropes.items():
            pairs = self.rotary_dim(kind) // 2
            for name in ("short_factor", "long_factor"):
                factors = getattr(rope, name)
                if rope.rope_type == "longrope" and len(factors) != pairs:
                    raise ValueError(
                        f"config: {name} of the rope has {len(factors)} entries, but {pairs} pairs "
                        "of the head are rotated"
                    )

    @property
    def ropes(self) -> dict[str, Rope]:
        """The rope of each kind of layer that the model has."""
        both = {"full_attention": self.rope, "sliding_attention": self.sliding_rope or self.rope}
        return {kind: rope for kind, rope in both.items() if kind in self.layer_types}

    def rotary_dim(self, layer_type: str) -> int:
        """How many of a head's H numbers are rotated; they are the first ones."""
        dim = int(self.head_dim * self.ropes[layer_type].partial_rotary_factor)
        if dim < 2 or dim % 2:
            raise ValueError(
                f"config: {dim} numbers of a head cannot be rotated in pairs; the count must be "
                "even and not 0"
            )
        return dim

    def window(self, layer: int) -> int | None:
        """How many keys, its own included, a token of this layer sees; None for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def is_bit_linear(self, module: str) -> bool:
        """Whether the module of this path ("layers.0.mlp.up_proj") is a `BitLinear`; no head is.

        A name of `modules_to_not_convert` is the beginning of the path with "model." before it, or
        its end: as transformers reads them, for which a dot at the beginning is any character.
        """
        path = f"model.{module}"
        kept = any(
            re.match(rf"{name}(?:(?<=\.)|(?=\.|$))", path) or path.endswith(name)
            for name in self.modules_to_not_convert
        )
        return self.bit_linear and module.startswith("layers.") and not kept


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says of sampling: `generation_config.json`, and `config.json` for ids.

    `generate` takes only `stop_ids` from it; `jaxllm chat` takes the rest too, the temperature when
    `do_sample` is set. The other ids are only saved. A `top_k` of None was not said: all tokens are
    kept, as with 0, but transformers takes 50.
    """

    stop_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclasses.dataclass(frozen=True)
class Runtime:
    """How a model is run. No field changes the logits beyond the rounding of its dtype.

    dtype: what is computed in ("float32", "bfloat16", "float16", or a dtype that has this name;
        None: the parameters' dtype).
        float32 also means the highest matmul precision.
    param_dtype: what parameters are stored in (None: dtype, or float32 if that is None too).
    implementation: "auto", the name of an implementation that every op has ("xla"), or a mapping
        from op to name ({"attention": "cudnn"}); ops that the mapping leaves out are "auto".
    remat: what the backward pass recomputes: "none"; "full": everything but each block's input;
        "dots": everything but the products with weights; "save_attention": as full, but attention
        does not run again (kernels keep its output and log-sum-exp; "xla" has no such statistic,
        and makes the scores again); "offload": as full, with the blocks' inputs in pinned host
        memory until they are needed (a CPU has one memory, where it is "full").
    """

    dtype: str | None = None
    param_dtype: str | None = None
    implementation: str | Mapping[str, str] = "auto"
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            for attribute in ("name", "__name__"):  # of a dtype, or jnp.bfloat16 and the like
                value = getattr(value, attribute, value)
            object.__setattr__(self, name, value)
            if value is not None and value not in DTYPES:
                raise ValueError(
                    f"runtime: {name} {value!r} is not one of {', '.join(DTYPES)}, None"
                )
        if self.remat not in REMAT:
            raise ValueError(f"runtime: remat {self.remat!r} is not one of {', '.join(REMAT)}")
        names = self.implementation
        parts = [*names, *names.values()] if isinstance(names, Mapping) else [names]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(
                f"runtime: implementation {names!r:.80} is neither a name nor names by op"
            )
        if isinstance(self.implementation, Mapping):
            object.__setattr__(self, "implementation", _FrozenMapping(self.implementation))

    @property
    def weight_dtype(self) -> str:
        return self.param_dtype or self.dtype or "float32"

    @property
    def compute_dtype(self) -> str:
        return self.dtype or self.weight_dtype


class _FrozenMapping(Mapping):
    """A mapping with a hash, since a Runtime is a static argument of compiled programs."""

    def __init__(self, items: Mapping[str, str]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> str:
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._items.items())))

    def __repr__(self) -> str:
        return repr(self._items)
