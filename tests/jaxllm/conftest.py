"""Models that several files generate with."""

import dataclasses

import numpy as np
import pytest
from tiny_models import SLIDING, build

import jaxllm
from jaxllm.config import Runtime


@pytest.fixture(scope="module")
def tiny():
    return build(
        dataclasses.replace(SLIDING, max_position_embeddings=512), Runtime(dtype="float32")
    )


@pytest.fixture(scope="module")
def stories(shared):
    folder = shared / "data/stories260K"
    return *jaxllm.load(folder, dtype="float32"), np.load(folder / "reference.npz")
