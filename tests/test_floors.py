"""Imports go down, an import does no work, no submodule hides a public name."""

import ast
import fnmatch
import functools
import gc
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PACKAGES = ("pallas_kernels", "jaxllm")

# Which of our own modules a module may import; the order is that of the floors, the lowest first.
KERNELS = "pallas_kernels pallas_kernels.*"
OP = f"{KERNELS} jaxllm.ops._select"
LAYERS = "jaxllm.ops jaxllm.ops.[!_]* jaxllm.cache jaxllm.config"
MAY_IMPORT = {
    "pallas_kernels": "pallas_kernels.*",
    "pallas_kernels.device": "pallas_kernels._compat",
    "pallas_kernels._wgmma": "pallas_kernels.wgmma_tiles",
    "pallas_kernels._compat": "pallas_kernels._wgmma pallas_kernels.varying",
    "pallas_kernels.varying": "",
    "pallas_kernels.ring": "",
    "pallas_kernels.rows": "pallas_kernels._compat pallas_kernels.device",
    "pallas_kernels.over_rows": "pallas_kernels._compat pallas_kernels.device pallas_kernels.rows",
    "pallas_kernels.rms_norm": (
        "pallas_kernels.device pallas_kernels.norm_lanes pallas_kernels.norm_lanes_backward "
        "pallas_kernels.options pallas_kernels.over_rows pallas_kernels.rows pallas_kernels.tuned"
    ),
    "pallas_kernels.norm_lanes": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.lane_code "
        "pallas_kernels.lane_arithmetic pallas_kernels.rows pallas_kernels.tuned"
    ),
    "pallas_kernels.norm_lanes_backward": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.lane_code "
        "pallas_kernels.lane_arithmetic pallas_kernels.norm_lanes"
    ),
    "pallas_kernels.layer_norm": (
        "pallas_kernels.device pallas_kernels.norm_lanes pallas_kernels.norm_lanes_backward "
        "pallas_kernels.options pallas_kernels.over_rows pallas_kernels.rows pallas_kernels.tuned"
    ),
    "pallas_kernels.swiglu": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.options pallas_kernels.rows "
        "pallas_kernels.tuned"
    ),
    "pallas_kernels._triton_kernels": "",
    "pallas_kernels._triton_call": (
        "pallas_kernels._triton_kernels pallas_kernels.device pallas_kernels.tuned"
    ),
    "pallas_kernels.triton_rms_norm": (
        "pallas_kernels._triton_call pallas_kernels.device pallas_kernels.options "
        "pallas_kernels.rms_norm pallas_kernels.tuned"
    ),
    "pallas_kernels.triton_softmax": (
        "pallas_kernels._triton_call pallas_kernels.device pallas_kernels.options "
        "pallas_kernels.softmax pallas_kernels.tuned"
    ),
    "pallas_kernels.wgmma_tiles": "",
    "pallas_kernels.matmul_finish": "",
    "pallas_kernels.matmul_kernel": (
        "pallas_kernels._compat pallas_kernels.matmul_finish pallas_kernels.ring "
        "pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.matmul_few_rows": (
        "pallas_kernels._compat pallas_kernels.cluster pallas_kernels.device "
        "pallas_kernels.matmul_kernel pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.matmul_config": (
        "pallas_kernels.device pallas_kernels.matmul_few_rows pallas_kernels.matmul_finish "
        "pallas_kernels.matmul_kernel pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.matmul_backward": (
        "pallas_kernels.matmul_config pallas_kernels.matmul_few_rows "
        "pallas_kernels.matmul_finish pallas_kernels.matmul_kernel"
    ),
    "pallas_kernels.matmul": (
        "pallas_kernels.device pallas_kernels.matmul_backward pallas_kernels.matmul_config "
        "pallas_kernels.matmul_few_rows pallas_kernels.matmul_finish pallas_kernels.matmul_kernel "
        "pallas_kernels.options pallas_kernels.tuned pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.quantized_unpack": "pallas_kernels.lane_code pallas_kernels.packed",
    "pallas_kernels.quantized_matmul_config": (
        "pallas_kernels.device pallas_kernels.packed pallas_kernels.quantized_unpack"
    ),
    "pallas_kernels.quantized_rows": (
        "pallas_kernels.device pallas_kernels.lane_code pallas_kernels.lane_arithmetic "
        "pallas_kernels.quantized_matmul_config pallas_kernels.quantized_unpack "
        "pallas_kernels.awaited"
    ),
    "pallas_kernels.quantized_tma": (
        "pallas_kernels.device pallas_kernels.lane_arithmetic pallas_kernels.lane_code "
        "pallas_kernels.quantized_matmul_config pallas_kernels.quantized_rows "
        "pallas_kernels.quantized_unpack"
    ),
    "pallas_kernels.quantized_finish": (
        "pallas_kernels.device pallas_kernels.lane_code pallas_kernels.lane_arithmetic "
        "pallas_kernels.quantized_matmul_config pallas_kernels.quantized_unpack "
        "pallas_kernels.awaited"
    ),
    "pallas_kernels.quantized_matmul_lanes": (
        "pallas_kernels.device pallas_kernels.lane_arithmetic pallas_kernels.lane_code "
        "pallas_kernels.packed pallas_kernels.quantized_finish "
        "pallas_kernels.quantized_matmul_config pallas_kernels.quantized_rows "
        "pallas_kernels.quantized_tma pallas_kernels.quantized_unpack"
    ),
    "pallas_kernels.quantized_digits": (
        "pallas_kernels.lane_arithmetic pallas_kernels.lane_code pallas_kernels.packed "
        "pallas_kernels.quantized_matmul_config pallas_kernels.quantized_rows"
    ),
    "pallas_kernels.between_attentions_config": (
        "pallas_kernels.around_product pallas_kernels.device pallas_kernels.packed "
        "pallas_kernels.quantized_digits pallas_kernels.quantized_matmul_config"
    ),
    "pallas_kernels.between_attentions_tiles": (
        "pallas_kernels.between_attentions_config pallas_kernels.device "
        "pallas_kernels.lane_arithmetic pallas_kernels.lane_code pallas_kernels.quantized_digits "
        "pallas_kernels.packed pallas_kernels.quantized_matmul_config "
        "pallas_kernels.quantized_matmul_lanes pallas_kernels.quantized_unpack "
        "pallas_kernels.ternary_rows"
    ),
    "pallas_kernels.between_attentions_bring": (
        "pallas_kernels.between_attentions_config pallas_kernels.between_attentions_tiles "
        "pallas_kernels.device pallas_kernels.lane_code"
    ),
    "pallas_kernels.between_attentions_join": (
        "pallas_kernels.between_attentions_config pallas_kernels.device "
        "pallas_kernels.lane_arithmetic pallas_kernels.lane_code pallas_kernels.quantized_rows"
    ),
    "pallas_kernels.between_attentions_lanes": (
        "pallas_kernels.between_attentions_bring pallas_kernels.between_attentions_join "
        "pallas_kernels.between_attentions_config pallas_kernels.between_attentions_tiles "
        "pallas_kernels.device pallas_kernels.lane_code pallas_kernels.quantized_matmul_config "
        "pallas_kernels.meeting"
    ),
    "pallas_kernels.between_attentions_kernel": (
        "pallas_kernels._compat pallas_kernels.between_attentions_config "
        "pallas_kernels.between_attentions_lanes pallas_kernels.device pallas_kernels.lane_code "
        "pallas_kernels.packed pallas_kernels.rms_norm"
    ),
    "pallas_kernels.between_attentions": (
        "pallas_kernels._compat pallas_kernels.around_product "
        "pallas_kernels.between_attentions_config pallas_kernels.between_attentions_kernel "
        "pallas_kernels.device pallas_kernels.matmul_finish pallas_kernels.options "
        "pallas_kernels.packed pallas_kernels.quantized_matmul "
        "pallas_kernels.quantized_matmul_check "
        "pallas_kernels.quantized_matmul_config pallas_kernels.rms_norm "
        "pallas_kernels.ternary_matmul"
    ),
    "pallas_kernels.decode_layers_config": (
        "pallas_kernels.between_attentions_config pallas_kernels.device "
        "pallas_kernels.quantized_matmul_config"
    ),
    "pallas_kernels.decode_layers_turn": (
        "pallas_kernels.between_attentions_config pallas_kernels.decode_layers_config "
        "pallas_kernels.device pallas_kernels.lane_arithmetic pallas_kernels.lane_code "
        "pallas_kernels.quantized_matmul_config"
    ),
    "pallas_kernels.decode_layers_attention": (
        "pallas_kernels.attention_reference pallas_kernels.decode_layers_config "
        "pallas_kernels.decode_layers_turn pallas_kernels.device pallas_kernels.lane_arithmetic "
        "pallas_kernels.lane_code pallas_kernels.quantized_matmul_config pallas_kernels.awaited "
        "pallas_kernels.meeting"
    ),
    "pallas_kernels.decode_layers_lanes": (
        "pallas_kernels.between_attentions_config pallas_kernels.between_attentions_lanes "
        "pallas_kernels.decode_layers_attention pallas_kernels.decode_layers_config "
        "pallas_kernels.device pallas_kernels.lane_code pallas_kernels.awaited "
        "pallas_kernels.meeting"
    ),
    "pallas_kernels.decode_layers_kernel": (
        "pallas_kernels._compat pallas_kernels.between_attentions_config "
        "pallas_kernels.decode_layers_config pallas_kernels.decode_layers_lanes "
        "pallas_kernels.device pallas_kernels.lane_code"
    ),
    "pallas_kernels.decode_layers": (
        "pallas_kernels.around_product pallas_kernels.attention_reference "
        "pallas_kernels.between_attentions pallas_kernels.between_attentions_config "
        "pallas_kernels.decode_attention pallas_kernels.decode_layers_config "
        "pallas_kernels.decode_layers_kernel pallas_kernels.device pallas_kernels.options "
        "pallas_kernels.packed pallas_kernels.quantized_matmul pallas_kernels.ternary_matmul"
    ),
    "pallas_kernels.quantized_matmul_kernel": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.lane_code "
        "pallas_kernels.head_places pallas_kernels.packed "
        "pallas_kernels.quantized_matmul_config pallas_kernels.quantized_matmul_lanes"
    ),
    "pallas_kernels.quantized_tiles_config": (
        "pallas_kernels.device pallas_kernels.packed pallas_kernels.quantized_matmul_config "
        "pallas_kernels.quantized_unpack pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.quantized_expand": (
        "pallas_kernels._compat pallas_kernels.lane_code pallas_kernels.packed "
        "pallas_kernels.quantize pallas_kernels.quantized_tiles_config "
        "pallas_kernels.quantized_unpack pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.quantized_matmul_tiles": (
        "pallas_kernels._compat pallas_kernels.matmul_finish pallas_kernels.packed "
        "pallas_kernels.quantized_expand pallas_kernels.quantized_matmul_config "
        "pallas_kernels.quantized_tiles_config pallas_kernels.quantized_unpack "
        "pallas_kernels.ring pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.quantized_matmul_check": (
        "pallas_kernels.around_product pallas_kernels.matmul_finish pallas_kernels.options "
        "pallas_kernels.packed"
    ),
    "pallas_kernels.quantized_matmul": (
        "pallas_kernels._compat pallas_kernels.around_product pallas_kernels.device "
        "pallas_kernels.matmul_finish pallas_kernels.options pallas_kernels.packed "
        "pallas_kernels.quantize pallas_kernels.quantized_matmul_check "
        "pallas_kernels.quantized_matmul_config pallas_kernels.quantized_matmul_kernel "
        "pallas_kernels.quantized_matmul_tiles pallas_kernels.quantized_tiles_config "
        "pallas_kernels.quantized_unpack pallas_kernels.rms_norm pallas_kernels.ternary_matmul "
        "pallas_kernels.tuned"
    ),
    "pallas_kernels.lane_code": "pallas_kernels.device",
    "pallas_kernels.lane_arithmetic": "pallas_kernels.device pallas_kernels.lane_code",
    "pallas_kernels.meeting": "pallas_kernels.device pallas_kernels.lane_code",
    "pallas_kernels.awaited": "pallas_kernels.device pallas_kernels.lane_code",
    "pallas_kernels.ternary_rows": (
        "pallas_kernels.device pallas_kernels.lane_code pallas_kernels.lane_arithmetic "
        "pallas_kernels.awaited"
    ),
    "pallas_kernels.ternary_finish": "pallas_kernels.device pallas_kernels.lane_code",
    "pallas_kernels.ternary_matmul_kernel": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.lane_code "
        "pallas_kernels.packed pallas_kernels.ternary_finish pallas_kernels.ternary_rows"
    ),
    "pallas_kernels.ternary_matmul": (
        "pallas_kernels.device pallas_kernels.matmul_finish pallas_kernels.options "
        "pallas_kernels.packed pallas_kernels.rms_norm pallas_kernels.ternary_matmul_kernel "
        "pallas_kernels.ternary_rows pallas_kernels.tuned"
    ),
    "pallas_kernels.embedding_sums_lanes": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.embedding_lanes "
        "pallas_kernels.lane_arithmetic pallas_kernels.lane_code"
    ),
    "pallas_kernels.embedding_zeros_lanes": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.embedding_sums_lanes "
        "pallas_kernels.lane_arithmetic pallas_kernels.lane_code"
    ),
    "pallas_kernels.embedding_backward": (
        "pallas_kernels._compat pallas_kernels.embedding_sums_lanes "
        "pallas_kernels.embedding_zeros_lanes"
    ),
    "pallas_kernels.embedding": (
        "pallas_kernels.device pallas_kernels.embedding_backward pallas_kernels.embedding_lanes "
        "pallas_kernels.options pallas_kernels.tuned"
    ),
    "pallas_kernels.embedding_lanes": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.lane_arithmetic "
        "pallas_kernels.lane_code"
    ),
    "pallas_kernels.packed": "",
    "pallas_kernels.options": "",
    "pallas_kernels.whole_number": "",
    "pallas_kernels.quantize": (
        "pallas_kernels.options pallas_kernels.packed pallas_kernels.whole_number"
    ),
    "pallas_kernels.attention_reference": (
        "pallas_kernels.matmul_finish pallas_kernels.options pallas_kernels.whole_number"
    ),
    "pallas_kernels.soft_cap": "pallas_kernels.device pallas_kernels.lane_code",
    "pallas_kernels.attention_fp8": "pallas_kernels.attention_reference pallas_kernels.options",
    "pallas_kernels.flash_attention_blocks": "",
    "pallas_kernels.flash_attention_schedule": "",
    "pallas_kernels.flash_attention_plan": (
        "pallas_kernels.device pallas_kernels.flash_attention_blocks "
        "pallas_kernels.flash_attention_schedule pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.flash_attention_tiles": (
        "pallas_kernels._compat pallas_kernels.device "
        "pallas_kernels.flash_attention_plan pallas_kernels.ring pallas_kernels.soft_cap "
        "pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.flash_attention_forward": (
        "pallas_kernels._compat pallas_kernels.flash_attention_plan "
        "pallas_kernels.flash_attention_tiles pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.flash_attention_fp8": (
        "pallas_kernels._compat pallas_kernels.attention_fp8 pallas_kernels.flash_attention_plan "
        "pallas_kernels.flash_attention_tiles pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.flash_attention_backward_kernel": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.soft_cap "
        "pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.flash_attention_backward": (
        "pallas_kernels.device "
        "pallas_kernels.flash_attention_backward_kernel "
        "pallas_kernels.flash_attention_blocks"
    ),
    "pallas_kernels.flash_attention": (
        "pallas_kernels.attention_fp8 pallas_kernels.attention_reference pallas_kernels.device "
        "pallas_kernels.flash_attention_backward pallas_kernels.flash_attention_forward "
        "pallas_kernels.flash_attention_fp8 pallas_kernels.flash_attention_plan "
        "pallas_kernels.flash_attention_tiles pallas_kernels.options pallas_kernels.soft_cap "
        "pallas_kernels.tuned pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.decode_attention_bytes": "pallas_kernels._compat pallas_kernels.wgmma_tiles",
    "pallas_kernels.decode_attention_parts": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.decode_attention_kernel": (
        "pallas_kernels._compat pallas_kernels.device "
        "pallas_kernels.cluster pallas_kernels.decode_attention_bytes "
        "pallas_kernels.decode_attention_parts pallas_kernels.soft_cap "
        "pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.decode_attention_config": (
        "pallas_kernels.decode_attention_kernel pallas_kernels.decode_attention_parts "
        "pallas_kernels.device pallas_kernels.tuned"
    ),
    "pallas_kernels.decode_attention": (
        "pallas_kernels._compat pallas_kernels.attention_reference "
        "pallas_kernels.decode_attention_config pallas_kernels.decode_attention_kernel "
        "pallas_kernels.decode_attention_parts pallas_kernels.device pallas_kernels.options "
        "pallas_kernels.soft_cap pallas_kernels.tuned pallas_kernels.whole_number"
    ),
    "pallas_kernels.cross_entropy_kernel": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.ring pallas_kernels.soft_cap "
        "pallas_kernels.wgmma_tiles"
    ),
    "pallas_kernels.cast_transpose": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.lane_code "
        "pallas_kernels.options"
    ),
    "pallas_kernels.cross_entropy": (
        "pallas_kernels._compat pallas_kernels.cross_entropy_kernel pallas_kernels.device "
        "pallas_kernels.matmul_finish pallas_kernels.options pallas_kernels.packed "
        "pallas_kernels.quantize pallas_kernels.soft_cap pallas_kernels.whole_number"
    ),
    "pallas_kernels.rope_lanes": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.lane_code "
        "pallas_kernels.lane_arithmetic"
    ),
    "pallas_kernels.rope_kernel": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.rope_lanes pallas_kernels.rows"
    ),
    "pallas_kernels.rope": (
        "pallas_kernels.device pallas_kernels.options pallas_kernels.rope_kernel "
        "pallas_kernels.tuned"
    ),
    "pallas_kernels.around_product": (
        "pallas_kernels.options pallas_kernels.rms_norm pallas_kernels.rope"
    ),
    "pallas_kernels.head_places": "",
    "pallas_kernels.gemv_kernel": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.head_places "
        "pallas_kernels.matmul_finish"
    ),
    "pallas_kernels.gemv": (
        "pallas_kernels._compat pallas_kernels.around_product pallas_kernels.device "
        "pallas_kernels.gemv_kernel pallas_kernels.matmul_finish pallas_kernels.options "
        "pallas_kernels.rms_norm pallas_kernels.tuned"
    ),
    "pallas_kernels.rope_into_cache": (
        "pallas_kernels._compat pallas_kernels.around_product pallas_kernels.device "
        "pallas_kernels.head_places pallas_kernels.options"
    ),
    "pallas_kernels.cluster": "",
    "pallas_kernels.sampling_threshold": (
        "pallas_kernels._compat pallas_kernels.cluster pallas_kernels.device "
        "pallas_kernels.options pallas_kernels.varying"
    ),
    "pallas_kernels.softmax_tiles": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.rows"
    ),
    "pallas_kernels.softmax_kernel": (
        "pallas_kernels._compat pallas_kernels.cluster pallas_kernels.device "
        "pallas_kernels.rows pallas_kernels.softmax_tiles"
    ),
    "pallas_kernels.softmax_lanes": (
        "pallas_kernels._compat pallas_kernels.device pallas_kernels.lane_arithmetic "
        "pallas_kernels.lane_code"
    ),
    "pallas_kernels.softmax": (
        "pallas_kernels.device pallas_kernels.options pallas_kernels.rows "
        "pallas_kernels.softmax_kernel pallas_kernels.softmax_lanes pallas_kernels.softmax_tiles "
        "pallas_kernels.tuned pallas_kernels.whole_number"
    ),
    "pallas_kernels.measure": "",
    "pallas_kernels.tuned": "pallas_kernels.device",
    "pallas_kernels.tune": "pallas_kernels.device pallas_kernels.measure pallas_kernels.tuned",
    "jaxllm.aot": "",
    "jaxllm.config": "pallas_kernels.options pallas_kernels.whole_number",
    "jaxllm.config_keys": "jaxllm.config",
    "jaxllm.config_rope": "jaxllm.config jaxllm.config_keys",
    "jaxllm.families": "jaxllm.config jaxllm.config_keys jaxllm.config_rope",
    "jaxllm.flops": "jaxllm.config",
    "jaxllm.byte_size": "",
    "jaxllm.integers": "",
    "jaxllm.memory": "",
    "jaxllm.meshes": "",
    "jaxllm.compile_cache": "",
    "jaxllm.sampling": (
        "jaxllm.integers jaxllm.ops._select jaxllm.ops.sampling_threshold pallas_kernels.options"
    ),
    "jaxllm.chat_template": "",
    "jaxllm.detokenizer": "",
    "jaxllm.tokenizer": "jaxllm.chat_template jaxllm.detokenizer",
    "jaxllm.ops._select": "pallas_kernels.device pallas_kernels.options pallas_kernels.varying",
    "jaxllm.ops.attention": OP,
    "jaxllm.ops.cast_transpose": OP,
    "jaxllm.ops.glu": OP,
    "jaxllm.ops.fused_linear": (
        f"{OP} jaxllm.ops.glu jaxllm.ops.linear jaxllm.ops.norm jaxllm.ops.rope"
    ),
    "jaxllm.ops.linear": OP,
    "jaxllm.ops.loss": f"{OP} jaxllm.integers",
    "jaxllm.ops.log_probs": f"{KERNELS} jaxllm.ops.linear jaxllm.ops.loss",
    "jaxllm.ops.norm": OP,
    "jaxllm.ops.rope": OP,
    "jaxllm.ops.sampling_threshold": OP,
    "jaxllm.ops.softmax": OP,
    "jaxllm.ops.ternary": f"{KERNELS} jaxllm.ops.linear",
    "jaxllm.ops.between_attentions": (
        f"{OP} jaxllm.ops.fused_linear pallas_kernels.between_attentions "
        "pallas_kernels.between_attentions_config pallas_kernels.packed"
    ),
    "jaxllm.ops.decode_layers": (
        f"{OP} jaxllm.ops.attention jaxllm.ops.between_attentions jaxllm.ops.fused_linear "
        "pallas_kernels.between_attentions pallas_kernels.decode_layers pallas_kernels.measure"
    ),
    "jaxllm.ops": f"{OP} jaxllm.ops.*",
    "jaxllm.cache": "jaxllm.config",
    "jaxllm.layers": LAYERS,
    "jaxllm.chain": f"{LAYERS} jaxllm.layers",
    "jaxllm.model": f"{LAYERS} jaxllm.chain jaxllm.layers",
    "jaxllm.programs": "jaxllm.cache jaxllm.config jaxllm.model jaxllm.sampling",
    "jaxllm.prompts": "jaxllm.detokenizer jaxllm.tokenizer",
    "jaxllm.results": "jaxllm.programs jaxllm.prompts",
    "jaxllm.run": (
        "jaxllm.cache jaxllm.integers jaxllm.memory jaxllm.meshes jaxllm.model jaxllm.ops "
        "jaxllm.programs jaxllm.prompts jaxllm.results jaxllm.sampling jaxllm.tokenizer"
    ),
    "jaxllm.generate": (
        "jaxllm.integers jaxllm.model jaxllm.prompts jaxllm.results jaxllm.run jaxllm.tokenizer"
    ),
    "jaxllm.optimizers": "jaxllm.integers pallas_kernels.options",
    "jaxllm.precision": "pallas_kernels.options",
    "jaxllm.record_files": "",
    "jaxllm.records": "jaxllm.integers jaxllm.record_files jaxllm.tokenizer",
    "jaxllm.data": "jaxllm.integers jaxllm.record_files jaxllm.records pallas_kernels.options",
    "jaxllm.fusion": (
        "jaxllm.checkpoint.tensor_names jaxllm.layers jaxllm.quantize pallas_kernels.quantize"
    ),
    "jaxllm.train": (
        "jaxllm.integers jaxllm.layers jaxllm.meshes jaxllm.model jaxllm.ops jaxllm.optimizers "
        "jaxllm.precision jaxllm.quantize pallas_kernels.packed"
    ),
    "jaxllm.quantize": f"{KERNELS} jaxllm.config jaxllm.layers jaxllm.ops",
    "jaxllm.fp8": (
        "jaxllm.layers jaxllm.ops jaxllm.ops.linear jaxllm.quantize pallas_kernels.varying"
    ),
    "jaxllm.checkpoint.shipped": "",
    "jaxllm.checkpoint.bitnet": "jaxllm.checkpoint.quantization_config jaxllm.config",
    "jaxllm.checkpoint.safetensors_file": "",
    "jaxllm.checkpoint.quantization_config": "",
    "jaxllm.checkpoint.packed_weights": (
        "jaxllm.checkpoint.bitnet jaxllm.checkpoint.quantization_config "
        "jaxllm.checkpoint.safetensors_file pallas_kernels.packed"
    ),
    "jaxllm.checkpoint.compressed_tensors": (
        "jaxllm.checkpoint.bitnet jaxllm.checkpoint.quantization_config"
    ),
    "jaxllm.checkpoint.packed_modules": (
        "jaxllm.checkpoint.bitnet jaxllm.checkpoint.compressed_tensors jaxllm.checkpoint.folder "
        "jaxllm.checkpoint.packed_weights jaxllm.checkpoint.placement "
        "jaxllm.checkpoint.quantization_config jaxllm.checkpoint.safetensors_file "
        "jaxllm.checkpoint.tensor_names jaxllm.layers jaxllm.quantize pallas_kernels.packed "
        "pallas_kernels.quantize"
    ),
    "jaxllm.checkpoint.folder": (
        "jaxllm.checkpoint.bitnet jaxllm.checkpoint.quantization_config "
        "jaxllm.checkpoint.safetensors_file jaxllm.config jaxllm.config_keys jaxllm.families"
    ),
    "jaxllm.checkpoint.tensor_names": (
        "jaxllm.checkpoint.folder jaxllm.checkpoint.safetensors_file"
    ),
    "jaxllm.checkpoint.placement": (
        "jaxllm.checkpoint.safetensors_file jaxllm.memory jaxllm.meshes"
    ),
    "jaxllm.checkpoint.hf": (
        "jaxllm.byte_size jaxllm.checkpoint.compressed_tensors jaxllm.checkpoint.folder "
        "jaxllm.checkpoint.packed_modules "
        "jaxllm.checkpoint.placement jaxllm.checkpoint.quantization_config "
        "jaxllm.checkpoint.safetensors_file jaxllm.checkpoint.tensor_names jaxllm.config "
        "jaxllm.families jaxllm.fp8 jaxllm.layers jaxllm.model jaxllm.quantize jaxllm.tokenizer "
        "pallas_kernels.packed pallas_kernels.whole_number"
    ),
    "jaxllm.checkpoint.native": "jaxllm.train",
    "jaxllm.console": "",
    "jaxllm.metrics": "",
    "jaxllm.trace": "",
    "jaxllm.batches": "jaxllm.model jaxllm.train",
    "jaxllm.trainer": (
        "jaxllm.batches jaxllm.checkpoint.native jaxllm.console jaxllm.flops jaxllm.integers "
        "jaxllm.metrics jaxllm.model jaxllm.precision jaxllm.trace jaxllm.train"
    ),
    "jaxllm.checkpoint.peft": (
        "jaxllm.checkpoint.folder jaxllm.checkpoint.safetensors_file jaxllm.checkpoint.tensor_names"
    ),
    "jaxllm.lora": (
        "jaxllm.checkpoint.peft jaxllm.checkpoint.tensor_names jaxllm.config jaxllm.families "
        "jaxllm.integers jaxllm.layers jaxllm.model jaxllm.ops jaxllm.quantize "
        "pallas_kernels.options"
    ),
    "jaxllm.plan": (
        "jaxllm.aot jaxllm.byte_size jaxllm.checkpoint.hf jaxllm.config jaxllm.fp8 jaxllm.integers "
        "jaxllm.lora jaxllm.model jaxllm.optimizers jaxllm.precision jaxllm.quantize jaxllm.train"
    ),
    "jaxllm.dpo": (
        "jaxllm.data jaxllm.integers jaxllm.lora jaxllm.model jaxllm.ops jaxllm.train "
        "pallas_kernels.options"
    ),
    "jaxllm.recipe": (
        "jaxllm.checkpoint.folder jaxllm.config jaxllm.lora jaxllm.optimizers jaxllm.precision "
        "jaxllm.records"
    ),
    "jaxllm.finetune": (
        "jaxllm.checkpoint.folder jaxllm.checkpoint.hf jaxllm.checkpoint.native jaxllm.config "
        "jaxllm.console jaxllm.data jaxllm.fp8 jaxllm.generate jaxllm.lora jaxllm.metrics "
        "jaxllm.model jaxllm.optimizers jaxllm.precision jaxllm.quantize jaxllm.recipe "
        "jaxllm.tokenizer jaxllm.train jaxllm.trainer"
    ),
    "jaxllm.cli_quantize": (
        "jaxllm jaxllm.checkpoint.folder jaxllm.checkpoint.hf jaxllm.config jaxllm.console "
        "jaxllm.families jaxllm.model jaxllm.quantize pallas_kernels.measure pallas_kernels.packed"
    ),
    "jaxllm.cli_inspect": (
        "jaxllm.cache jaxllm.chain jaxllm.checkpoint.folder jaxllm.checkpoint.hf "
        "jaxllm.cli_quantize jaxllm.config jaxllm.fusion jaxllm.layers jaxllm.model jaxllm.ops "
        "jaxllm.quantize jaxllm.train"
    ),
    "jaxllm.cli_train": (
        "jaxllm.checkpoint.folder jaxllm.cli_quantize jaxllm.config jaxllm.console "
        "jaxllm.families jaxllm.finetune jaxllm.lora jaxllm.optimizers jaxllm.plan "
        "jaxllm.precision jaxllm.recipe jaxllm.records jaxllm.trainer"
    ),
    "jaxllm.checkpoint": "jaxllm.checkpoint.*",
    "jaxllm": "jaxllm.*",
    "jaxllm.cli": "jaxllm jaxllm.*",
    "jaxllm.__main__": "jaxllm.cli",
}
ABOVE_ALL = ("pallas_kernels", "jaxllm", "jaxllm.cli", "jaxllm.__main__")

# What lies below all of it. A kernel needs JAX, and the numpy that comes with it, and nothing else.
THIRD_PARTY = {
    "pallas_kernels": {"jax", "jaxtyping", "numpy", "triton", "jax_triton"},  # the last where used
    "jaxllm": {
        *("jax", "jaxtyping", "flax", "numpy", "ml_dtypes", "optax", "orbax"),
        *("tokenizers", "jinja2", "rich", "huggingface_hub"),
        *("matplotlib", "tensorboardX", "wandb"),  # where used
        "grain",  # of the extra "train"
    },
}


def name_of(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    name_of(path): path for package in PACKAGES for path in sorted((REPO / package).rglob("*.py"))
}


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """The syntax tree of a file, flat."""
    # Collecting garbage may print a traceback, which parses too, and a Python before 3.11.8 cannot
    # do both at once (python/cpython#106905)
    collects = gc.isenabled()
    gc.disable()
    try:
        return tuple(ast.walk(ast.parse(path.read_text(), str(path))))
    finally:
        if collects:
            gc.enable()


def imports_of(path: Path) -> set[str]:
    """Full names of all modules that a file imports, at whatever depth of the code."""
    module = name_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                above = parents[: len(parents) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in MODULES else base)
    return found


def is_ours(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


def allowed(module: str, imported: str) -> bool:
    patterns = MAY_IMPORT[module].split()
    return any(fnmatch.fnmatchcase(imported, pattern) for pattern in patterns)


def test_every_file_has_a_row_and_every_row_a_file():
    without_row = MODULES.keys() - MAY_IMPORT.keys()
    assert not without_row, f"say in MAY_IMPORT which floor these stand on: {sorted(without_row)}"
    without_file = MAY_IMPORT.keys() - MODULES.keys()
    assert not without_file, f"MAY_IMPORT names files that are gone: {sorted(without_file)}"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    imported = imports_of(MODULES[module])
    ours = {name for name in imported if is_ours(name)}
    bad = {name for name in ours if not allowed(module, name)}
    assert not bad, f"{module} may import [{MAY_IMPORT[module]}], and imports {sorted(bad)}"
    roots = {name.partition(".")[0] for name in imported - ours} - set(sys.stdlib_module_names)
    strange = roots - THIRD_PARTY[module.partition(".")[0]]
    assert not strange, f"{module} imports {sorted(strange)}, which is no dependency of its package"


def test_what_is_imported_is_what_is_declared():
    imported = {name.partition(".")[0] for file in MODULES.values() for name in imports_of(file)}
    imported -= set(sys.stdlib_module_names) | set(PACKAGES)
    assert imported == set().union(*THIRD_PARTY.values())
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]

    def named(lines: list[str]) -> set[str]:
        names = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}
        return {"orbax" if name == "orbax_checkpoint" else name for name in names}

    base, extras = named(project["dependencies"]), project["optional-dependencies"]
    optional = named(extras["hub"] + extras["triton"] + extras["train"])
    assert base <= imported
    assert imported - base == optional | {"tensorboardX", "wandb"}  # that the user brings


def test_the_table_itself_goes_down():
    graph = {
        module: {m for m in MAY_IMPORT if m != module and allowed(module, m)}
        for module in MAY_IMPORT
        if module not in ABOVE_ALL
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_check_can_fail(tmp_path, monkeypatch):
    file = tmp_path / "jaxllm" / "ops" / "rope.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import torch.nn\n"
        "def f():\n"
        "    from jaxllm import model\n"
        "    from ..layers import Attention\n"
        "    from . import _select\n"
    )
    monkeypatch.setitem(globals(), "REPO", tmp_path)
    imported = imports_of(file)
    assert imported == {"torch.nn", "jaxllm.model", "jaxllm.layers", "jaxllm.ops._select"}
    assert {
        name for name in imported if is_ours(name) and not allowed("jaxllm.ops.rope", name)
    } == {
        "jaxllm.model",
        "jaxllm.layers",
    }


def test_only_compat_tells_versions_of_jax_apart():
    asking = {
        module
        for module, path in MODULES.items()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and re.match(r"jax(lib)?\.(version|__version)", ast.unparse(node))
    }
    assert asking == {"pallas_kernels._compat"}


def test_no_kernel_asks_the_grid_for_its_block():
    """Under vmap a grid has one dimension more, which the number of a block in it counts too."""
    asking = {
        module
        for module, path in MODULES.items()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in ("block_idx", "block_id")
    }
    assert not asking


def test_counters_of_a_launch_are_of_one_slice():
    """Under vmap the blocks of all slices would count at the same words."""
    named = {
        module: {getattr(node, "attr", getattr(node, "id", None)) for node in nodes_of(path)}
        for module, path in MODULES.items()
    }
    counting = {module for module, names in named.items() if "get_global" in names}
    assert counting == {"pallas_kernels.flash_attention_backward_kernel"}
    assert all("sequential_vmap" in named[module] for module in counting)


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_does_no_work():
    # A backend of this name cannot be initialised, so whatever asks for a device at import fails.
    run_python(
        """
import logging, os, sys
import jax
import jax.experimental.mosaic.gpu  # JAX's own import writes MOSAIC_GPU_CUDA_ROOT
def world():
    return dict(jax.config.values), dict(os.environ), list(logging.root.handlers), list(sys.path)
before = world()
import jaxllm, pallas_kernels
assert world() == before
heavy = set("torch tensorflow transformers orbax matplotlib grain huggingface_hub triton".split())
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
""",
        JAX_PLATFORMS="asked_for_at_import",
    )


def test_no_submodule_hides_a_public_name():
    run_python(
        """
import importlib, pkgutil
import jaxllm
before = {name: getattr(jaxllm, name) for name in jaxllm.__all__}
for module in pkgutil.walk_packages(jaxllm.__path__, "jaxllm."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert before == {name: getattr(jaxllm, name) for name in jaxllm.__all__}
functions = "load save generate stream prefill decode_step warmup compile_count"
for name in (functions + " ModelConfig Runtime Transformer Block").split():
    assert name in before and callable(before[name]), name
""",
        JAX_PLATFORMS="cpu",
    )


def test_submodules_come_when_they_are_asked_for():
    run_python(
        """
import sys
import jaxllm
assert {"lora", "load", "__version__"} <= set(dir(jaxllm))
lazy = "aot data dpo finetune flops fp8 lora metrics optimizers plan precision recipe".split()
lazy += ["records", "train", "trainer"]
assert not {f"jaxllm.{name}" for name in lazy} & sys.modules.keys()
for name in lazy:
    assert getattr(jaxllm, name) is sys.modules[f"jaxllm.{name}"]
assert not {"grain", "matplotlib"} & sys.modules.keys()  # of an extra
try:
    jaxllm.sundial
except AttributeError as error:
    assert "'sundial'" in str(error)
else:
    raise AssertionError
""",
        JAX_PLATFORMS="cpu",
    )


def test_kernels_hold_what_they_write_into():
    """By `_compat` alone, which keeps XLA from losing what they write (test_in_place.py)."""
    raw = re.compile(r"\b(new_ref|freeze)\(")
    found = {
        path.name for path in (REPO / "pallas_kernels").glob("*.py") if raw.search(path.read_text())
    }
    assert found == {"_compat.py"}
