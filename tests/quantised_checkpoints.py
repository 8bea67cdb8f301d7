"""Made-up quantised checkpoints: random codes and scales in each layout, packed number by number.

What the codes stand for is computed here in float64, so that a loader is compared with it.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxllm.checkpoint.safetensors_file import FLOATS, INTEGERS, read_header
from jaxllm.config import ModelConfig, Rope
from jaxllm.families import to_hf

LLAMA = ModelConfig(
    model_type="llama",
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=Rope(10_000.0),
)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array(E2M1 + [-x for x in E2M1])
E4M3 = ml_dtypes.float8_e4m3fn
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


DTYPES = FLOATS | INTEGERS


class Weight(NamedTuple):
    """The tensors of a module, and what they stand for: float64 [O, I]."""

    tensors: dict[str, np.ndarray]
    values: np.ndarray


def pack(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Four bits each, eight of the last axis in a word: place i holds number order[i]."""
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // 8)), np.uint32)
    for word in range(words.shape[-1]):
        for place, number in enumerate(order):
            if 8 * word + number < codes.shape[-1]:
                code = codes[..., 8 * word + number].astype(np.uint32)
                words[..., word] |= code << np.uint32(4 * place)
    return words.view(np.int32)


def pairs(codes: np.ndarray) -> np.ndarray:
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)


def e8m0(codes: np.ndarray) -> np.ndarray:
    return 2.0 ** (codes.astype(np.float64) - 127)


class Layout:
    """One kind of checkpoint: its quantization_config, and a weight of random codes."""

    def __init__(self, name: str, seed: int = 0):
        self.name, self.rng = name, np.random.default_rng(seed)

    def scales(self, *shape: int, dtype: Any = np.float16) -> np.ndarray:
        sign = self.rng.choice([-1.0, 1.0, 1.0], shape)  # AutoRound's have either
        return (sign * self.rng.uniform(0.01, 0.03, shape)).astype(dtype)

    def codes(self, low: int, high: int, *shape: int) -> np.ndarray:
        return self.rng.integers(low, high + 1, shape)

    def spread(self, scale: np.ndarray, inputs: int) -> np.ndarray:
        """[O, I / G] to [O, I]."""
        return np.repeat(scale.astype(np.float64), inputs // scale.shape[1], axis=1)

    def weight(self, outputs: int, inputs: int) -> Weight:
        return getattr(self, "_" + self.name.split(" ")[0].replace("-", "_"))(outputs, inputs)

    # ---------------------------------------------------------------------- compressed-tensors

    def _int8(self, o: int, i: int) -> Weight:
        codes = self.codes(-127, 127, o, i)
        scale = self.scales(o, 1, dtype=ml_dtypes.bfloat16) / ml_dtypes.bfloat16(16)
        tensors = {"weight": codes.astype(np.int8), "weight_scale": scale}
        if "words" in self.name:
            unsigned = (codes + 128).astype(np.uint32)
            words = sum(unsigned[:, k::4] << np.uint32(8 * k) for k in range(4))
            tensors = {
                "weight_packed": np.asarray(words, np.uint32).view(np.int32),
                "weight_scale": scale,
                "weight_shape": np.array([o, i], np.int64),
            }
        return Weight(tensors, codes * scale.astype(np.float64))

    def _int4(self, o: int, i: int) -> Weight:
        groups = 1 if "channel" in self.name else i // 32
        codes, scale = self.codes(0, 15, o, i), self.scales(o, groups)
        zero = np.full((o, groups), 8)
        tensors = {
            "weight_packed": pack(codes),
            "weight_scale": scale,
            "weight_shape": np.array([o, i], np.int64),
        }
        if "zero" in self.name:
            zero = self.codes(0, 15, o, groups)
            tensors["weight_zero_point"] = np.ascontiguousarray(pack(zero.T).T)
        return Weight(tensors, (codes - self.spread(zero, i)) * self.spread(scale, i))

    def _fp8(self, o: int, i: int) -> Weight:
        codes = self.rng.uniform(-4, 4, (o, i)).astype(E4M3)
        values = codes.astype(np.float64)
        shape = (1,) if "tensor" in self.name else (o, 1)
        if "block" in self.name:
            shape = (-(-o // 48), -(-i // 32))
        scale = self.scales(*shape, dtype=np.float32)
        if "block" in self.name:
            wide = np.repeat(np.repeat(scale, 48, axis=0)[:o], 32, axis=1)
            return Weight({"weight": codes, "weight_scale": scale}, values * wide)
        return Weight({"weight": codes, "weight_scale": scale}, values * scale)

    def _nvfp4(self, o: int, i: int) -> Weight:
        codes = self.codes(0, 15, o, i)
        scale = self.rng.uniform(1, 400, (o, i // 16)).astype(E4M3)
        divisor = np.array([self.rng.uniform(2000, 4000)], np.float32)
        tensors = {
            "weight_packed": pairs(codes),
            "weight_scale": scale,
            "weight_global_scale": divisor,
            "input_global_scale": np.array([7.0], np.float32),
        }
        return Weight(tensors, E2M1[codes] * self.spread(scale, i) / float(divisor[0]))

    def _mxfp4(self, o: int, i: int) -> Weight:
        codes, scale = self.codes(0, 15, o, i), self.codes(119, 122, o, i // 32).astype(np.uint8)
        tensors = {"weight_packed": pairs(codes), "weight_scale": scale}
        return Weight(tensors, E2M1[codes] * self.spread(e8m0(scale), i))

    def _mxfp8(self, o: int, i: int) -> Weight:
        codes = self.rng.uniform(-4, 4, (o, i)).astype(E4M3)
        scale = self.codes(119, 122, o, i // 32).astype(np.uint8)
        values = codes.astype(np.float64) * self.spread(e8m0(scale), i)
        return Weight({"weight": codes, "weight_scale": scale}, values)

    # -------------------------------------------------------------------- modelopt, gptq and awq

    def _modelopt_nvfp4(self, o: int, i: int) -> Weight:
        codes = self.codes(0, 15, o, i)
        scale = self.rng.uniform(1, 400, (o, i // 16)).astype(E4M3)
        tensor = np.array(1 / self.rng.uniform(2000, 4000), np.float32)
        tensors = {
            "weight": pairs(codes),
            "weight_scale": scale,
            "weight_scale_2": tensor,
            "input_scale": np.array(0.1, np.float32),
        }
        return Weight(tensors, E2M1[codes] * self.spread(scale, i) * float(tensor))

    def _modelopt_fp8(self, o: int, i: int) -> Weight:
        codes = self.rng.uniform(-4, 4, (o, i)).astype(E4M3)
        scale = np.array(self.rng.uniform(0.01, 0.03), np.float32)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": np.float32(0.1)}
        tensors["input_scale"] = np.array(0.1, np.float32)
        return Weight(tensors, codes.astype(np.float64) * float(scale))

    def _gptq(self, o: int, i: int) -> Weight:
        groups = i // 32
        codes, scale = self.codes(0, 15, i, o), self.scales(groups, o)
        zero = np.full((groups, o), 8) if "asym" not in self.name else self.codes(0, 15, groups, o)
        zeros = pack(zero)
        group = np.arange(i) // 32
        if "order" in self.name:  # of the inputs alone, as GPTQ's is: q, k and v have the same
            group = np.random.default_rng(i).permutation(group)
        if "v2" not in self.name:  # 1 is taken off every code, by one subtraction a word
            zeros = (zeros.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
        tensors = {
            "qweight": np.ascontiguousarray(pack(codes.T).T),
            "qzeros": zeros,
            "scales": scale,
            "g_idx": group.astype(np.int32),
        }
        return Weight(tensors, ((codes - zero[group]) * scale.astype(float)[group]).T)

    def _awq(self, o: int, i: int) -> Weight:
        codes, scale = self.codes(0, 15, i, o), self.scales(i // 32, o)
        zero = self.codes(0, 15, i // 32, o)
        tensors = {"qweight": pack(codes, AWQ), "qzeros": pack(zero, AWQ), "scales": scale}
        values = (codes - np.repeat(zero, 32, axis=0)) * np.repeat(scale.astype(float), 32, axis=0)
        return Weight(tensors, values.T)

    # ----------------------------------------------------------------------------- the configs

    def config(self) -> dict[str, Any]:
        """What stands in config.json under quantization_config."""
        method = self.name.split(" ")[0]
        if method == "gptq":
            return {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 32,
                "sym": "asym" not in self.name,
                "desc_act": "order" in self.name,
                "checkpoint_format": "gptq_v2" if "v2" in self.name else "gptq",
            }
        if method == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 32,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": None,
            }
        if method.startswith("modelopt"):
            algorithm = method.removeprefix("modelopt-").upper()
            return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
        weights, format_ = self._group()
        weights = {"symmetric": "zero" not in self.name, "dynamic": False, **weights}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": format_,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "output_activations": None}},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }

    def _group(self) -> tuple[dict[str, Any], str]:
        name = self.name
        integer, number = {"type": "int"}, {"type": "float"}
        if name.startswith("int8"):
            kind = {**integer, "num_bits": 8, "strategy": "channel"}
            return kind, "pack-quantized" if "words" in name else "int-quantized"
        if name.startswith("int4"):
            kind = {**integer, "num_bits": 4, "strategy": "group", "group_size": 32}
            if "channel" in name:
                kind |= {"strategy": "channel", "group_size": None}
            return kind, "pack-quantized"
        if name.startswith("fp8"):
            kind = {**number, "num_bits": 8, "strategy": name.split(" ")[1]}
            if "block" in name:
                kind["block_structure"] = [48, 32]
            return kind, "float-quantized"
        size, strategy, format_ = {
            "nvfp4": (16, "tensor_group", "nvfp4-pack-quantized"),
            "mxfp4": (32, "group", "mxfp4-pack-quantized"),
            "mxfp8": (32, "group", "mxfp8-quantized"),
        }[name]
        bits = 8 if name == "mxfp8" else 4
        return {**number, "num_bits": bits, "strategy": strategy, "group_size": size}, format_


LAYOUTS = (
    "int8",
    "int8 words",
    "int4",
    "int4 zero",
    "int4 channel",
    "fp8 tensor",
    "fp8 channel",
    "fp8 block",
    "nvfp4",
    "mxfp4",
    "mxfp8",
    "modelopt-nvfp4",
    "modelopt-fp8",
    "gptq",
    "gptq asym",
    "gptq v2 asym",
    "gptq asym order",
    "awq",
)


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file; safetensors' own reader for NumPy knows no fp8."""
    data = file.read_bytes()
    return {
        name: np.frombuffer(data[x.offset :][: x.size_bytes], DTYPES[x.dtype]).reshape(x.shape)
        for name, x in read_header(file).items()
    }


def sizes(config: ModelConfig, *, fused: bool) -> dict[str, tuple[int, int]]:
    """The linear layers of a block as files name them: [O, I]."""
    d, f, width = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * width, config.num_key_value_heads * width
    if fused:
        found = {"self_attn.qkv_proj": (q + 2 * kv, d), "mlp.gate_up_proj": (2 * f, d)}
    else:
        found = {f"self_attn.{n}_proj": (rows, d) for n, rows in (("q", q), ("k", kv), ("v", kv))}
        found |= {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d)}
    return found | {"self_attn.o_proj": (d, q), "mlp.down_proj": (d, f)}


def write(
    folder: Path, name: str, config: ModelConfig = LLAMA, *, fused: bool = False
) -> tuple[Path, Path]:
    """A checkpoint in the layout of that name, and its twin of plain weights in float32."""
    layout = Layout(name)
    rng, d = layout.rng, config.hidden_size
    shared = {
        "model.embed_tokens.weight": rng.standard_normal((config.vocab_size, d)),
        "model.norm.weight": rng.uniform(0.5, 1.5, d),
        "lm_head.weight": rng.standard_normal((config.vocab_size, d)) / 8,
    }
    packed, plain = {}, {}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shared[f"{prefix}{norm}.weight"] = rng.uniform(0.5, 1.5, d)
        for module, shape in sizes(config, fused=fused).items():
            weight = layout.weight(*shape)
            packed |= {f"{prefix}{module}.{last}": x for last, x in weight.tensors.items()}
            plain[f"{prefix}{module}.weight"] = np.ascontiguousarray(weight.values, np.float32)
    shared = {key: x.astype(np.float32) for key, x in shared.items()}
    said = {**to_hf(config), "dtype": "float32"}
    paths = folder / "packed", folder / "plain"
    for path, tensors, more in (
        (paths[0], packed, {"quantization_config": layout.config()}),
        (paths[1], plain, {}),
    ):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps({**said, **more}))
        save_file({**shared, **tensors}, path / "model.safetensors", metadata={"format": "pt"})
    return paths
