"""The hub's packing of ternary weights and ours, into each other."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint.bitnet import from_hub, to_hub
from pallas_kernels.quantize import quantize
from pallas_kernels.ternary_matmul import unpack


def ternary(*shape):
    return np.random.default_rng(0).integers(-1, 2, shape).astype(np.int8)


def test_golden_of_the_hub():
    column = np.array([1, -1, 0, 1, 0, 0, -1, 1], np.int8)
    weight = np.repeat(column[:, None], 4, axis=1)
    stored = np.repeat(np.array([[22], [152]], np.uint8), 4, axis=1)
    codes = from_hub(stored, "w")
    np.testing.assert_array_equal(unpack(codes), weight)
    np.testing.assert_array_equal(to_hub(codes, "w"), stored)


@pytest.mark.parametrize("shape", [(4, 4), (116, 96), (12, 20)])
def test_round_trip(shape):
    weight = ternary(*shape)
    # A weight of -1, 0 and 1 whose mean is near that of its quantised self
    packed = quantize(jnp.asarray(weight, jnp.float32), "ternary")
    codes = np.asarray(packed.codes)
    stored = to_hub(codes, "w")
    assert stored.shape == (shape[0] // 4, shape[1])
    for place in range(4):
        rows = slice(place * shape[0] // 4, (place + 1) * shape[0] // 4)
        code = (stored >> 2 * place & 3).astype(np.int8) - 1
        np.testing.assert_array_equal(code, weight[rows])
    np.testing.assert_array_equal(from_hub(stored, "w"), codes)
    np.testing.assert_array_equal(unpack(codes), weight)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="layer: holds the code 3; ternary codes are 0, 1 and 2"):
        from_hub(np.full((1, 4), 3 << 4, np.uint8), "layer")
    with pytest.raises(ValueError, match="layer: a ternary weight of 6 inputs cannot be packed"):
        from_hub(np.zeros((1, 6), np.uint8), "layer")
    with pytest.raises(ValueError, match="layer: a ternary weight of 6 outputs cannot be stored"):
        to_hub(np.zeros((6, 1), np.uint8), "layer")


@pytest.fixture(scope="module")
def original(transformers):
    """transformers' own module, not compiled by torch; which warns of itself as it is imported."""
    import torch

    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from transformers.integrations import bitnet
    before, torch._dynamo.config.disable = torch._dynamo.config.disable, True
    yield bitnet
    torch._dynamo.config.disable = before


@pytest.mark.reference
def test_the_original_packs_so(original):
    import torch

    weight = ternary(36, 20)
    codes = np.asarray(quantize(jnp.asarray(weight, jnp.float32), "ternary").codes)
    theirs = original.pack_weights(torch.from_numpy(weight.astype(np.float32)))
    np.testing.assert_array_equal(to_hub(codes, "w"), theirs.numpy())
