"""Kernels that write into arrays, in a loop that takes slices of arrays and puts results in one's
slices: XLA fuses a kernel with such slices, and then forgets which results are arrays it was given.
"""

import functools
import re
from typing import Any

import between_calls
import jax
import jax.numpy as jnp
import layers_calls
import numpy as np
import pytest
from quantized_calls import BF16, numbers

import pallas_kernels
from jaxllm import aot
from pallas_kernels import Cache, Rotary, _compat, decode_attention, rope_into_cache
from pallas_kernels.cross_entropy import Config as LossConfig
from pallas_kernels.gemv import gemv

B, S, N, K, H, D = 2, 64, 8, 2, 64, 512
WIDTH = (N + 2 * K) * H


def attention() -> Any:
    def call(q, k, v, new_k, new_v):
        lengths = jnp.asarray([7, S - 3])
        return decode_attention(q, k, v, lengths, new_k=new_k, new_v=new_v)

    shapes = (B, 1, N, H), (B, S, K, H), (B, S, K, H), (B, 1, K, H), (B, 1, K, H)
    return call, [numbers(i, shape, BF16) for i, shape in enumerate(shapes)]


def rotary(rows: int) -> Rotary:
    angles = jnp.linspace(0.0, 3.0, rows * H // 2).reshape(rows, -1)
    return Rotary(jnp.cos(angles), jnp.sin(angles), N, K)


def rotation() -> Any:
    def call(heads, k, v):
        return rope_into_cache(heads, rotary(B), Cache(k, v, jnp.asarray([3, S - 1])))

    return call, [numbers(i, x, BF16) for i, x in enumerate(((B, WIDTH), *[(B, S, K, H)] * 2))]


def product(*, one_row: bool) -> Any:
    rows = 1 if one_row else B
    weight = numbers(7, (WIDTH, D), BF16, scale=D**-0.5)
    packed = pallas_kernels.quantize(weight, "int8")

    def call(x, k, v):
        cache = Cache(k, v, jnp.asarray([5, 9][:rows]))
        more: dict[str, Any] = {"epilogue": "rope", "rotary": rotary(rows), "cache": cache}
        if one_row:
            return gemv(x, weight, **more)
        return pallas_kernels.quantized_matmul(x, packed, **more)

    shapes = (rows, D), (rows, S, K, H), (rows, S, K, H)
    return call, [numbers(i, shape, BF16) for i, shape in enumerate(shapes)]


def layers(calls: Any, arguments: dict[str, Any]) -> Any:
    call, (arrays, meeting) = calls.jitted(arguments)
    return lambda *arrays: call(list(arrays), meeting), arrays


def embedding() -> Any:
    ids = jnp.arange(1000) * 7 % 300

    def call(dy):
        table = jnp.zeros((300, 256), BF16)
        return jax.vjp(lambda table: pallas_kernels.embedding(table, ids), table)[1](dy)

    return call, [numbers(0, (1000, 256), BF16)]


def loss(config: LossConfig, width: int = 128) -> Any:
    targets = jnp.arange(700) * 11 % 3000

    def call(hidden, head):
        of = functools.partial(pallas_kernels.linear_cross_entropy, targets=targets, config=config)
        return jax.value_and_grad(of, (0, 1))(hidden, head)

    return call, [numbers(0, (700, width), BF16), numbers(1, (3000, width), BF16)]


CALLS: dict[str, Any] = {
    "decode_attention": attention,
    "rope_into_cache": rotation,
    "gemv_rope": functools.partial(product, one_row=True),
    "quantized_matmul_rope": functools.partial(product, one_row=False),
    "between_attentions": lambda: layers(
        between_calls, between_calls.call(896, 4864, (14, 2, 64), "int4")
    ),
    "decode_layers": lambda: layers(
        layers_calls, layers_calls.call(896, 4864, (14, 2, 64), slots=64, keys=40)
    ),
    "embedding_backward_sums": embedding,
    "linear_cross_entropy": lambda: loss(LossConfig()),
    # With at least as many columns as tokens the head's gradient is written over E
    "linear_cross_entropy_d_head": lambda: loss(LossConfig(slab=1024), width=768),
    "linear_cross_entropy, in chunks": lambda: loss(LossConfig(chunk=256)),
}


def looped(call: Any) -> Any:
    return jax.jit(lambda *arrays: jax.lax.map(lambda slices: call(*slices), arrays))


def compiled(name: str) -> tuple[list[str], list[str]]:
    """Of a loop over three calls: its kernels by themselves, and what XLA fused with slices though
    a kernel in it writes into an array.
    """
    call, arrays = CALLS[name]()
    stacked = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in arrays]
    program = aot.compile_for(looped(call), *stacked)
    fused = re.findall(r"^%dynamic-slice-fusion.*?^}", program.compiled.as_text(), re.M | re.S)
    return program.mosaic_launches(), [x for x in fused if "output_to_operand_aliasing" in x]


@pytest.mark.aot
@pytest.mark.parametrize("name", CALLS)
def test_a_loop_leaves_the_kernel_to_itself(name: str):
    alone, lost = compiled(name)
    assert name.split(",")[0] in alone
    assert lost == []


@pytest.mark.aot
def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "_by_itself", lambda tree: tree)
    alone, lost = compiled("decode_layers")
    assert alone == []
    assert len(lost) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_slices_of_a_loop_on_a_gpu(name: str):
    call, arrays = CALLS[name]()
    slices = [[x, -x, x + x][i] for x in arrays for i in range(3)]
    stacked = [jnp.stack(slices[i : i + 3]) for i in range(0, len(slices), 3)]
    before = jax.device_get(stacked)
    found = looped(call)(*stacked)
    for x, y in zip(before, stacked, strict=True):
        np.testing.assert_array_equal(x, y)  # which a kernel may not write into
    for i in range(3):
        alone = jax.jit(call)(*(x[i] for x in stacked))
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), found, alone)
