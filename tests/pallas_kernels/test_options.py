"""Configs and flags of every kernel, and the checks of what is no array."""

import math
import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import options, rows
from pallas_kernels.gemv_kernel import Config as GemvConfig
from pallas_kernels.quantize import quantize
from pallas_kernels.ternary_matmul import ternary_linear
from pallas_kernels.triton_rms_norm import rms_norm as triton_rms_norm
from pallas_kernels.triton_softmax import scale_softmax as triton_scale_softmax

pytestmark = pytest.mark.usefixtures("strict_jax")


def zeros(*shape: int) -> Any:
    return jnp.zeros(shape, jnp.bfloat16)


X, Q, TOKEN, CACHE = zeros(2, 512), zeros(1, 4, 2, 64), zeros(1, 1, 2, 64), zeros(1, 64, 2, 64)
IDS, LENGTHS, WEIGHT = jnp.asarray([1, 2]), jnp.asarray([3]), jnp.ones((64, 256))

# Each public kernel that has a config, but for those of whole layers
CALLS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (X, zeros(512)),
    "layer_norm": (X, zeros(512), None),
    "swiglu": (X,),
    "geglu": (X,),
    "relu2_glu": (X,),
    "scale_softmax": (X,),
    "rope": (Q, Q, zeros(1, 4, 32), zeros(1, 4, 32)),
    "embedding": (zeros(4, 64), IDS),
    "matmul": (zeros(64, 64), zeros(64, 64)),
    "gemv": (zeros(1, 64), zeros(64, 64)),
    "quantized_matmul": (zeros(1, 256), quantize(WEIGHT, "int4")),
    "flash_attention": (Q, Q, Q),
    "decode_attention": (TOKEN, CACHE, CACHE, LENGTHS),
    "linear_cross_entropy": (zeros(2, 64), zeros(8, 64), IDS),
}
NUMBERS = {"rms_norm": {"eps": 1e-5}, "layer_norm": {"eps": 1e-5}}


@pytest.mark.parametrize("name", CALLS)
def test_a_config_of_another_class(name):
    other: Any = rows.Config(1, 0, 1) if name == "gemv" else GemvConfig(4, 512)
    for config in (other, "fast", {}, 0, ()):
        with pytest.raises(
            ValueError, match=rf"^{name}: config must be None or a pallas_kernels\.\w+\.Config"
        ):
            getattr(pallas_kernels, name)(
                *CALLS[name], **NUMBERS.get(name, {}), config=config, interpret=True
            )


def test_a_config_of_another_class_elsewhere():
    for run, name in (
        (lambda: ternary_linear(zeros(1, 256), quantize(WEIGHT, "ternary"), config={}), "ternary"),
        (lambda: triton_rms_norm(X, zeros(512), eps=1e-5, config={}), "rms_norm"),
        (lambda: triton_scale_softmax(X, config={}), "scale_softmax"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}\w*: config must be None or a .*, got {{}}"):
            run()


def test_it_names_the_class_that_came():
    sentence = (
        r"^mine: config must be None or a pallas_kernels\.rows\.Config, got Config\(outputs=4, "
        r"inputs=512\) of the class pallas_kernels\.gemv_kernel\.Config$"
    )
    with pytest.raises(ValueError, match=sentence):
        options.check_options("mine", GemvConfig(4, 512), rows.Config)
    with pytest.raises(ValueError, match="^mine: config must .*, got 'a' of the class str$"):
        options.check_options("mine", "a", rows.Config)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("geglu", {"approximate": "none"}),
        ("swiglu", {"interpret": "no"}),
        ("rms_norm", {"zero_centered": "no"}),
        ("matmul", {"transpose_b": "no"}),
        ("scale_softmax", {"causal": "no"}),
        ("flash_attention", {"causal": "no"}),
        ("flash_attention", {"return_lse": 1}),
    ],
)
def test_a_flag_that_is_none(name, flags):
    keywords = {"interpret": True, **NUMBERS.get(name, {}), **flags}
    ((what, value),) = flags.items()
    with pytest.raises(ValueError, match=f"^{name}: {what} must be True or False, got {value!r}$"):
        getattr(pallas_kernels, name)(*CALLS[name], **keywords)


@pytest.mark.parametrize(
    "value", [2, 0.5, Fraction(1, 2), np.float32(2), np.asarray(2), jnp.bfloat16(2)], ids=repr
)
def test_what_counts_as_a_number(value):
    options.check_number("mine", "eps", value, positive=True)
    options.check_scale("mine", value)


@pytest.mark.parametrize("dtype", ["", "foo", "f4,q", np.ones(3), 3.0], ids=repr)
def test_what_names_no_dtype(dtype):
    options.check_dtype("mine", "out_dtype", None)
    options.check_dtype("mine", "out_dtype", "bfloat16")
    sentence = re.escape(f"mine: out_dtype must be a dtype, got {dtype!r}")
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        options.check_dtype("mine", "out_dtype", dtype)


def test_flags_of_numpy():
    options.check_flags("mine", one=np.True_, other=False)


@pytest.mark.parametrize("scale", ["a", math.nan, True])
@pytest.mark.parametrize("name", ["flash_attention", "decode_attention"])
def test_the_scale_of_scores(name, scale):
    sentence = "scale is NaN" if scale is math.nan else f"scale must be a number, got {scale!r}"
    with pytest.raises(ValueError, match=f"^{name}: {sentence}$"):
        getattr(pallas_kernels, name)(*CALLS[name], scale=scale, interpret=True)


@pytest.mark.parametrize("name", ["flash_attention", "decode_attention"])
def test_heads_of_no_numbers(name):
    arrays = [x[..., :0] if x.ndim == 4 else x for x in CALLS[name]]
    with pytest.raises(ValueError, match=f"^{name}: q .* has heads of no numbers; H must be 1 at"):
        getattr(pallas_kernels, name)(*arrays, interpret=True)


def test_numbers():
    for number in (1, 0.5, np.float32(1e-5), np.int64(3), jnp.float32(2), jnp.bfloat16(2)):
        options.check_number("mine", "eps", number, positive=True)
    options.check_number("mine", "softcap", None, optional=True)
    bad: list[Any] = [None, "a", True, 1j, 0, -1.0, math.nan, math.inf, np.ones(1), [1.0]]
    for number in bad:
        with pytest.raises(ValueError, match="^mine: eps must be positive and finite, got "):
            options.check_number("mine", "eps", number, positive=True)
    with pytest.raises(ValueError, match="^mine: z must be a finite number or None, got inf$"):
        options.check_number("mine", "z", math.inf, optional=True)


def test_a_traced_number():
    def f(number):
        options.check_number("mine", "eps", number)

    sentence = "^mine: eps is traced; it must be a Python number, known when the call is traced"
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(f, 1.0)


def test_a_number_that_is_known_within_a_traced_call():
    number = jnp.float32(0.5)

    def f(x):
        options.check_number("mine", "eps", number, positive=True)
        return x

    jax.eval_shape(f, 1.0)


def test_what_is_no_array_or_dtype():
    options.check_arrays("mine", x=np.ones(2), y=jax.ShapeDtypeStruct((2,), jnp.int8), z=None)
    for bad in ([1, 2], 3, "a"):
        with pytest.raises(ValueError, match="^mine: ids must be an array, got "):
            options.check_arrays("mine", ids=bad)
    for dtype in (None, "bfloat16", jnp.int8, np.dtype("float32")):
        options.check_dtype("mine", "dtype", dtype)
    with pytest.raises(ValueError, match="^mine: dtype must be a dtype, got 'foo'$"):
        options.check_dtype("mine", "dtype", "foo")
