"""Stand-ins for what is not on a CPU."""

import jax
import pytest


@pytest.fixture
def plain_cudnn(monkeypatch):
    """JAX's own plain path stands in for its cuDNN call: the same arguments mean the same there."""
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *args, implementation, **kwargs: plain(*args, implementation="xla", **kwargs),
    )
