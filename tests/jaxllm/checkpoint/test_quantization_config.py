"""What a config says of packed weights: which modules in what form, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from quantised_checkpoints import Layout

from jaxllm.checkpoint.quantization_config import Form, read_quantization

FILE = Path("x/config.json")
UP = "model.layers.3.mlp.up_proj"
INT4 = Form("words", "int4", "group", 32)


def read(said: Any, beside: Any = None):
    hf = {} if said is None else {"quantization_config": said}
    found = read_quantization(FILE, hf, beside)
    assert found is not None
    return found


def group(**changes: Any) -> dict[str, Any]:
    """A compressed-tensors config of int4 whose weights are changed."""
    said = Layout("int4").config()
    said["config_groups"]["group_0"]["weights"].update(changes)
    return said


def test_nothing_is_packed():
    assert read_quantization(FILE, {}, None) is None
    assert read_quantization(FILE, {"quantization_config": {}}, None) is None
    assert (
        read_quantization(FILE, {"quantization_config": {"quant_method": "bitnet"}}, None) is None
    )


def test_targets_and_ignored_modules():
    said = Layout("int4").config()
    form = read(said).form
    assert form(UP) == INT4
    assert form("lm_head") is None
    said["ignore"] = ["re:.*down_proj", "model.layers.3.mlp.up_proj"]
    form = read(said).form
    assert form(UP) is None
    assert form("model.layers.3.mlp.down_proj") is None
    assert form("model.layers.30.mlp.up_proj") == INT4
    said["ignore"] = [r"re:model\.layers\.3\.", "re:layers"]  # what a name begins with
    form = read(said).form
    assert form(UP) is None
    assert form("model.layers.30.mlp.up_proj") == INT4
    said["ignore"] = ["Linear"]
    assert read(said).form(UP) is None
    said["ignore"] = []
    said["config_groups"]["group_0"]["targets"] = ["re:.*up_proj$"]
    form = read(said).form
    assert form(UP) == INT4
    assert form("model.layers.3.mlp.down_proj") is None


def test_a_name_counts_for_more_than_a_class():
    said = Layout("int4").config()
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    said["config_groups"]["group_1"] = {
        "targets": ["re:.*lm_head", UP],
        "weights": weights,
        "format": "pack-quantized",
    }
    said |= {"ignore": [], "format": "mixed-precision"}
    said["config_groups"]["group_0"]["format"] = "pack-quantized"
    form = read(said).form
    assert form(UP) == form("lm_head") == Form("words", "int8", "channel")
    assert form("model.layers.2.mlp.up_proj") == INT4


@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"]])
def test_a_whole_name_counts_for_more_than_an_expression(names):
    """And of expressions the first by the alphabet, in whatever order the groups are."""
    said = {**Layout("int4").config(), "ignore": [], "config_groups": {}}
    int4 = Layout("int4").config()["config_groups"]["group_0"]["weights"]
    weights = {"a": {"num_bits": 8, "type": "int", "strategy": "channel"}, "b": int4}
    targets = {"a": [r"re:.*_proj$", "re:a.*|.*lm_head"], "b": [UP, r"re:.*down_proj$", "re:b|.*"]}
    for name in names:
        said["config_groups"][name] = {"targets": targets[name], "weights": weights[name]}
    form, int8 = read(said).form, Form("words", "int8", "channel")
    assert form(UP) == INT4
    assert form("model.layers.2.mlp.up_proj") == int8
    assert form("model.layers.2.mlp.down_proj") == int8
    assert form("lm_head") == int8


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({"symmetric": False}, Form("words", "int4", "group", 32, zero_points=True)),
        ({"strategy": None}, INT4),
        ({"strategy": None, "group_size": None}, Form("words", "int4", "tensor")),
        ({"strategy": None, "group_size": -1}, Form("words", "int4", "channel")),
        ({"actorder": "weight", "observer": "mse", "observer_kwargs": {"a": 1}}, INT4),
        ({"num_bits": 8}, Form("words", "int8", "group", 32)),
        ({"type": "INT", "strategy": "GROUP"}, INT4),
    ],
)
def test_forms_of_compressed_tensors(changes, form):
    assert read(group(**changes)).form(UP) == form


def test_formats_of_gptq_and_awq():
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False, "desc_act": True}
    v1 = Form("gptq", "int4", "channel", None, zero_points=True, plus_one=True)
    assert read(gptq).form(UP) == v1
    assert read(gptq).form("lm_head") is None
    assert read({**gptq, "lm_head": True}).form("lm_head") == v1
    v2 = read({**gptq, "checkpoint_format": "gptq_v2", "group_size": 64}).form(UP)
    assert v2 == Form("gptq", "int4", "group", 64, zero_points=True)
    inside = {**gptq, "modules_in_block_to_quantize": [["mlp.up_proj"], ["self_attn.q_proj"]]}
    assert read(inside).form(UP) == v1
    assert read(inside).form("model.layers.3.mlp.down_proj") is None
    awq = {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True}
    assert read(awq).form(UP) == Form("awq", "int4", "group", 128, zero_points=True)
    assert read({**awq, "modules_to_not_convert": ["layers.3."]}).form(UP) is None
    assert read(awq).form("lm_head") is None  # whose files leave it out, and do not say so


AUTOROUND = {
    "provider": "auto-round",
    "autoround_version": "0.16.1",
    "data_type": "int",
    "to_quant_block_names": "model.layers",
    "enable_quanted_input": False,
}


def test_what_autoround_says():
    assert read({**GPTQ, **AUTOROUND, "sym": True}).form(UP) == read(GPTQ).form(UP)
    awq = {**AWQ, **AUTOROUND, "version": "gemm"}
    assert read({**awq, "sym": False, "zero_point": True}).form(UP) == read(AWQ).form(UP)
    symmetric = read({**awq, "sym": True, "zero_point": False}).form(UP)
    assert symmetric == read({**AWQ, "zero_point": False}).form(UP)


def test_formats_of_modelopt():
    nvfp4 = Form("modelopt_nvfp4", "nvfp4", group_size=16)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    beside["quantization"] |= {"exclude_modules": ["lm_head", "model.layers.1*", "*.q_proj"]}
    form = read(None, beside).form
    assert form(UP) == nvfp4
    assert form("model.layers.3.self_attn.q_proj") is None
    assert form("model.layers.12.mlp.up_proj") is None
    fp8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.3.mlp"]}
    assert read(fp8).form(UP) is None
    assert read(fp8, beside).form("model.layers.4.mlp.up_proj") == Form(
        "modelopt_fp8", "fp8", "tensor"
    )


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; suppo"),
        ({"bits": 4}, "quant_method None is not supported"),
        ({**Layout("int4").config(), "format": "marlin-24"}, "format 'marlin-24' is not supported"),
        ({**Layout("int4").config(), "quantization_status": "frozen"}, "quantization_status 'froz"),
        (
            {**Layout("int4").config(), "sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config .* is not supported",
        ),
        (
            {**Layout("int4").config(), "transform_config": {"config_groups": {"R1": 1}}},
            "transform_config .* is not supported",
        ),
        (group(num_bits=3), "pack-quantized of 3 bits of type 'int' is not supported"),
        (group(type="float"), "pack-quantized of 4 bits of type 'float' is not supported"),
        (group(num_bits=8, symmetric=False), "int8 with zero points is not supported"),
        (group(strategy="token"), "strategy 'token' is not supported"),
        (group(actorder="group"), "actorder 'group' is not supported"),
        (group(dynamic=True), "dynamic True is not supported"),
        ({**GPTQ, "bits": 3}, "3 bits are not supported; supported: 4"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format True is not supported"),
        ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, "rules a module is not supported"),
        ({**AWQ, "version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({**AWQ, "bits": 8}, "8 bits are not supported"),
        ({**AWQ, "data_type": "mx_fp"}, "data_type 'mx_fp' is not supported; supported: None, int"),
        ({**GPTQ, "data_type": "fp"}, "data_type 'fp' is not supported; supported: None, int"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "pre_quant_scale": True},
            "pre_quant_scale and has_zero_point are not supported",
        ),
    ],
)
def test_what_is_not_supported(said, sentence):
    with pytest.raises(NotImplementedError, match=f"^x/config.json: [^\n]*{sentence}[^\n]*$"):
        read(said)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ([1], r"quantization_config must be an object, got \[1\]"),
        ({**Layout("int4").config(), "config_groups": {}}, "config_groups names no group"),
        (
            {**Layout("int4").config(), "config_groups": {"a": 3}},
            "config_groups.a must be an object, got 3",
        ),
        ({**Layout("int4").config(), "ignore": "lm_head"}, "ignore must be a list of names"),
        ({**Layout("int4").config(), "ignore": [3]}, "ignore must be a list of names"),
        (
            {**Layout("int4").config(), "ignore": ["re:(["]},
            r"ignore has 're:\(\[', no regular expression: unterminated character set",
        ),
        ({**Layout("int4").config(), "format": ["dense"]}, r"format must be a name, got \['dense"),
        (
            {**Layout("int4").config(), "format": None},
            "config_groups.group_0: format is missing, .*; supported: int-quantized, ",
        ),
        (
            {**Layout("int4").config(), "format": "mixed-precision"},
            "config_groups.group_0: format is missing, .*; supported: int-quantized, ",
        ),
        ({**Layout("int4").config(), "rotate": 2}, "could change the weights: rotate=2"),
        (group(type=["int"]), r"type must be a name, got \['int'\]"),
        (group(group_size=None), "strategy 'group' needs a group_size, got None"),
        (group(group_size="32"), "group_size must be a number, got '32'"),
        (group(num_bits=True), "num_bits must be a number, got True"),
        (group(symmetric="no"), "symmetric must be true or false, got 'no'"),
        (group(permute=True), "could change the weights: permute=True"),
        (group(strategy="block"), "blocks are of fp8 and have two sizes, got int4 None"),
        ({**GPTQ, "group_size": 0}, "group_size must be -1 or at least 1, got 0"),
        ({**GPTQ, "group_size": None}, "group_size must be -1 or at least 1, got None"),
        ({**AWQ, "sym": True}, "sym and zero_point are both True"),
        ({**AWQ, "sym": False, "zero_point": False}, "sym and zero_point are both False"),
        ({**AWQ, "sym": 1}, "sym must be true or false, got 1"),
        ({**GPTQ, "zebra": 1}, "could change the weights: zebra=1"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            "nvfp4 has groups of 16, not of 32",
        ),
    ],
)
def test_what_is_wrong(said, sentence):
    with pytest.raises(ValueError, match=f"^x/config.json: [^\n]*{sentence}[^\n]*$"):
        read(said)


def test_mx_and_nvfp4_have_groups_of_their_own():
    said = Layout("nvfp4").config()
    said["config_groups"]["group_0"]["weights"]["group_size"] = 32
    with pytest.raises(ValueError, match="nvfp4 has groups of 16, not tensor_group 32"):
        read(said)
    said = Layout("mxfp4").config()
    said["config_groups"]["group_0"]["weights"] |= {"group_size": None, "strategy": "channel"}
    with pytest.raises(ValueError, match="mxfp4 has groups of 32, not channel"):
        read(said)


def test_words_of_long_ago():
    with pytest.raises(NotImplementedError, match="compression_config is .* not supported"):
        read_quantization(FILE, {"compression_config": {"format": "int-quantized"}}, None)
