"""GPU kernels in Pallas that know nothing of language models.

Each is a function of the module of its name (`linear_cross_entropy` of `cross_entropy`,
`scale_softmax` of `softmax`, the gates of `swiglu`), which also tells what keeps it from a call
(`why_not`) and, where there is a choice, how it is tiled (`Config`): `from pallas_kernels.rms_norm
import why_not`. `quantize` and `dequantize` are plain XLA, on any device. What calls take beside
arrays has a name here too: `Norm`, `Rotary` and `Cache` around a product, `Packed` weights, the
`Link` of `between_attentions`, the `Layer` and `Token` of `decode_layers`.
"""

from pallas_kernels.around_product import Cache, Norm, Rotary
from pallas_kernels.between_attentions import Following, Link, Weights, between_attentions
from pallas_kernels.cast_transpose import cast_transpose
from pallas_kernels.cross_entropy import linear_cross_entropy
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_layers import Layer, Token, decode_layers
from pallas_kernels.embedding import embedding
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.gemv import gemv
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.matmul import matmul
from pallas_kernels.packed import Packed
from pallas_kernels.quantize import dequantize, quantize
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rope
from pallas_kernels.rope_into_cache import rope_into_cache
from pallas_kernels.sampling_threshold import sampling_threshold
from pallas_kernels.softmax import scale_softmax
from pallas_kernels.swiglu import geglu, relu2_glu, swiglu

__all__ = [
    "Cache",
    "Following",
    "Layer",
    "Link",
    "Norm",
    "Packed",
    "Rotary",
    "Token",
    "Weights",
    "between_attentions",
    "cast_transpose",
    "decode_attention",
    "decode_layers",
    "dequantize",
    "embedding",
    "flash_attention",
    "geglu",
    "gemv",
    "layer_norm",
    "linear_cross_entropy",
    "matmul",
    "quantize",
    "quantized_matmul",
    "relu2_glu",
    "rms_norm",
    "rope",
    "rope_into_cache",
    "sampling_threshold",
    "scale_softmax",
    "swiglu",
]
