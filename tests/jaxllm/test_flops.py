import dataclasses

import pytest
from flax import nnx
from tiny_models import TINY

from jaxllm import train
from jaxllm.flops import PEAK_FLOPS, flops_a_token, matrix_weights, peak_flops
from jaxllm.model import Transformer


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_that_a_token_is_multiplied_with(tied):
    config = dataclasses.replace(TINY, tie_word_embeddings=tied)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    matrices = {name: x.size for name, x in train.parameters(model).items() if x.ndim == 2}
    if not tied:
        del matrices["embed_tokens.weight"]  # read, not multiplied with
    assert matrix_weights(config) == sum(matrices.values())


def test_flops_of_a_token():
    products = 2 * matrix_weights(TINY)
    scores = 4 * TINY.num_hidden_layers * TINY.num_attention_heads * TINY.head_dim  # a pair
    assert flops_a_token(TINY, 0) == 3 * products
    assert flops_a_token(TINY, 0, trains_all=False) == 2 * products
    assert flops_a_token(TINY, 8) == 3 * (products + 8 * scores)


def test_the_peak_of_a_device():
    assert peak_flops("NVIDIA H100 PCIe") == PEAK_FLOPS["H100 PCIe"] < peak_flops("NVIDIA H100 SXM")
    assert peak_flops("NVIDIA H100 NVL") == peak_flops("NVIDIA H200 NVL") == 835e12
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("cpu") is None
