"""Which implementation rounds a matrix both ways round."""

import jax
import jax.numpy as jnp
import pytest
from absent_device import absent

from jaxllm import ops

ONE = jax.ShapeDtypeStruct((), jnp.float32)


@pytest.mark.parametrize(
    ("shape", "gpu", "name"),
    [
        ((256, 128), "NVIDIA H200", "pallas"),
        ((100, 128), "NVIDIA H200", "xla"),  # rows that fill no tile
        ((256, 128), "NVIDIA A100-SXM4-80GB", "xla"),
    ],
)
def test_auto_takes_the_kernel_where_it_can(shape, gpu, name):
    with absent(gpu):
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        assert ops.chosen("cast_transpose", x, ONE) == name
        reasons = ops.explain("cast_transpose", x, ONE)
    assert (reasons["pallas"] is None) == (name == "pallas")


def test_by_any_name_the_result_is_the_same():
    x = jnp.linspace(-3, 3, 128 * 256, dtype=jnp.float32).reshape(128, 256)
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        by_name = [
            ops.cast_transpose(x, jnp.float32(0.5), dtype, implementation=name)
            for name in ("xla", "pallas-interpret")
        ]
        for one, other in zip(*by_name, strict=True):
            assert one.dtype == dtype
            assert jnp.array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


def test_bad_input_is_told_before_anything_is_chosen():
    with pytest.raises(ValueError, match="^cast_transpose: dtype is int8; it must be float8"):
        ops.cast_transpose(jnp.ones((2, 3)), jnp.float32(1), jnp.int8, implementation="pallas")
