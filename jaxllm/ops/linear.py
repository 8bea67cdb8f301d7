"""Every projection, embedding and head: a product with a weight [out, in], a gather of rows.

A weight, or a table, is an array or a `Packed`: codes and scales. Of a packed one nothing is
learned: only x and the bias have a gradient, and no array of the weight's size is kept for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.ops._select import Implementation, Table, pallas, select, slower_for_few
from pallas_kernels import device as device_lib
from pallas_kernels.embedding import check as check_embedding
from pallas_kernels.embedding import embedding as embedding_kernel
from pallas_kernels.embedding import embedding_reference
from pallas_kernels.embedding import why_not as why_not_embedding
from pallas_kernels.matmul import matmul as matmul_kernel
from pallas_kernels.matmul import why_not as why_not_matmul
from pallas_kernels.matmul_finish import precision
from pallas_kernels.options import check_arrays, check_dtype
from pallas_kernels.packed import Packed
from pallas_kernels.quantize import dequantize, take_rows
from pallas_kernels.quantized_matmul import FEW_ROWS, quantized_matmul
from pallas_kernels.quantized_matmul import why_not as why_not_quantized
from pallas_kernels.quantized_matmul_check import OUT_DTYPES
from pallas_kernels.ternary_matmul import quantize_rows, scaled_sums, ternary_sums
from pallas_kernels.varying import vary_alike
from pallas_kernels.wgmma_tiles import WGMMA_ROWS

SEVERAL_ROWS = WGMMA_ROWS  # of x, at most, that "auto" has the kernel multiply by a plain weight
LEAST_SIDE = 128  # the fewest rows and columns of such a weight: those of adapters are fewer


def linear(
    x: Float[Array, "*B I"],
    weight: Float[Array, "O I"] | Packed,
    bias: Float[Array, " O"] | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    implementation: str | Mapping[str, str] = "auto",
) -> Float[Array, "*B O"]:
    """x @ weight.T + bias, with the weight stored [out, in] as checkpoints have it.

    Dtypes: an array is cast to x's dtype; sums are float32; the result has `out_dtype`, x's if
    None, and the bias is added in that (a kernel adds that of a packed weight in float32). A packed
    weight's numbers are rounded to x's dtype without their row scale, which the sums are multiplied
    by. Where it is ternary, x becomes int8 a token (BitNet b1.58), and the gradient is that of x at
    the ternary weight.
    Raises: ValueError for an x that is no float or has no axis, a weight whose inputs are not x's
    width, a packed one whose parts do not fit each other, a bias that is not one number an output,
    or an `out_dtype` that is no float's.
    """
    numbers = weight.codes if isinstance(weight, Packed) else weight
    check_arrays("linear", x=x, weight=numbers, bias=bias)
    check_dtype("linear", "out_dtype", out_dtype)
    if out_dtype is not None and not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(f"linear: out_dtype must be a float's, got {jnp.dtype(out_dtype)}")
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"linear: x must be floats [.., I], got {x.dtype}{list(x.shape)}")
    if isinstance(weight, Packed) and (reason := weight.problem()) is not None:
        raise ValueError(f"linear: {reason}")
    if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1]:
        kind = "packed weight" if isinstance(weight, Packed) else "weight"
        raise ValueError(
            f"linear: x has {x.shape[-1]} inputs, but the {kind} is {list(weight.shape)}, and not "
            f"[outputs, {x.shape[-1]}]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear: bias {list(bias.shape)} is not a number for each of {weight.shape[0]} outputs"
        )
    run = select("linear", LINEAR, implementation, x, weight, bias, out_dtype=out_dtype)
    return run(x, weight, bias, out_dtype=out_dtype)


def _linear_xla(x, weight, bias, *, out_dtype):
    if isinstance(weight, Packed):
        dtype = jnp.dtype(out_dtype or x.dtype)
        return _packed_linear(_packed_xla, dtype, *vary_alike(x, weight, bias))
    y = jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision(x.dtype),
        preferred_element_type=out_dtype or x.dtype,
    )
    return add_bias(y, bias)


def add_bias(y: Float[Array, "*B O"], bias: Float[Array, " O"] | None) -> Float[Array, "*B O"]:
    """y + bias in y's dtype."""
    return y if bias is None else y + _in_last_axis(bias.astype(y.dtype), y.ndim)


def _in_last_axis(vector, ndim: int):
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


def _linear_pallas(x, weight, bias=None, *, out_dtype=None, interpret=False):
    dtype = out_dtype or x.dtype
    if isinstance(weight, Packed):
        run = _packed_interpreted if interpret else _packed_pallas
        return _packed_linear(run, jnp.dtype(dtype), x, weight, bias)
    y = matmul_kernel(
        x.reshape(-1, x.shape[-1]),
        weight.astype(x.dtype),
        transpose_b=True,
        bias=None if bias is None else bias.astype(dtype),
        out_dtype=dtype,
        interpret=interpret,
    )
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _linear_pallas_why_not(x, weight, bias=None, *, out_dtype=None, device):
    del bias
    if (out := jnp.dtype(out_dtype or x.dtype)) not in OUT_DTYPES:
        return f"gives bfloat16, float16 or float32, not {out}"
    if isinstance(weight, Packed):
        return why_not_quantized(x, weight, out_dtype=out_dtype, device=device)
    rows = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    weight = jax.ShapeDtypeStruct(weight.shape, x.dtype)  # it is cast
    return why_not_matmul(rows, weight, transpose_b=True, out_dtype=out_dtype, device=device)


def _linear_pallas_not_auto(x, weight, bias=None, *, out_dtype=None, device):
    del bias, out_dtype, device
    if isinstance(weight, Packed):  # XLA would write the weight as numbers, and read those
        return None
    # H100, 24 to 64 rows: a decode step's kernels take 4 to 12 % less time; not fused, those of
    # Llama-3.1-8B 8 %, and of Qwen2.5-0.5B 3 % more to 2 % less (benchmarks/notes.md)
    several = FEW_ROWS < math.prod(x.shape[:-1]) <= SEVERAL_ROWS
    if several and x.dtype == jnp.bfloat16 and min(weight.shape) >= LEAST_SIDE:
        return None
    # H200, bfloat16: alone the kernel is 2 to 7 % faster than XLA's at 8192 tokens, at few up to a
    # third, but a model decodes slower with it (benchmarks/notes.md)
    return "a model decodes faster where XLA joins products with what stands before and behind them"


def _packed_xla(x, packed: Packed, bias, out_dtype):
    """By XLA, with a weight that is made for this one product."""
    if packed.scheme == "ternary":
        xq, scale = quantize_rows(x)
        sums = _when_needed(ternary_sums, xq, packed, jnp.dtype(jnp.int32))
        return add_bias(scaled_sums(sums, scale, packed).astype(out_dtype), bias)
    return add_bias(_when_needed(_product, x, packed, jnp.dtype(out_dtype)), bias)


def _product(x, packed: Packed, dtype):
    weight, scale = _parts(packed, x.dtype)
    y = jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision(x.dtype),
        preferred_element_type=dtype if scale is None else jnp.float32,
    )
    return y if scale is None else (y * _in_last_axis(scale, y.ndim)).astype(dtype)


def _product_backward(d_y, packed: Packed, dtype):
    weight, scale = _parts(packed, dtype)
    if scale is not None:
        d_y = d_y.astype(jnp.float32) * _in_last_axis(scale, d_y.ndim)
    return jax.lax.dot_general(
        d_y.astype(dtype),
        weight,
        (((d_y.ndim - 1,), (0,)), ((), ())),
        precision=precision(dtype),
        preferred_element_type=dtype,
    )


def _when_needed(product: Any, x, packed: Packed, dtype):
    """product(x, packed, dtype), which makes the weight then: not for all layers at the start of
    the program, not in front of a loop over micro-batches, and in a backward pass once more.
    """
    # Within a `shard_map` both branches would have to vary over the same axes
    spread = jax.sharding.get_abstract_mesh().manual_axes
    if device_lib.current().platform == "cpu" and not spread:
        return _in_a_branch(product, x, packed, dtype)
    return product(*jax.lax.optimization_barrier((x, packed)), dtype)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _in_a_branch(product: Any, x, packed: Packed, dtype):
    """A CPU's compiler drops barriers. But what a branch of a conditional makes it holds no longer
    than that runs: a forward pass of 8 layers in int4 has temporaries of one weight, and takes a
    quarter of the time.
    """
    run = functools.partial(product, dtype=dtype)
    like = jax.eval_shape(run, x, packed)
    # True, but not for XLA
    known = (packed.codes[0, 0].astype(jnp.int32) & 1) < 2
    return jax.lax.cond(known, run, lambda *_: jnp.zeros(like.shape, like.dtype), x, packed)


def _packed_pallas(x, packed: Packed, bias, out_dtype):
    return quantized_matmul(x, packed, bias=bias, out_dtype=out_dtype)


def _packed_interpreted(x, packed: Packed, bias, out_dtype):
    return quantized_matmul(x, packed, bias=bias, out_dtype=out_dtype, interpret=True)


def _parts(packed: Packed, dtype) -> tuple[Array, Array | None]:
    """The weight without its row scale, which would round its numbers, and that scale."""
    return dequantize(dataclasses.replace(packed, row_scale=None), dtype), packed.row_scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _packed_linear(run: Any, out_dtype: Any, x, packed: Packed, bias):
    return run(x, packed, bias, out_dtype)


def _packed_forward(run, out_dtype, x, packed, bias):
    like = jnp.zeros((0,), x.dtype), None if bias is None else jnp.zeros((0,), bias.dtype)
    return run(x, packed, bias, out_dtype), (packed, like)


def _packed_backward(run, out_dtype, saved, d_y):
    del run, out_dtype
    packed, (like_x, like_bias) = saved
    d_bias = None
    if like_bias is not None:
        d_bias = jnp.sum(d_y, axis=tuple(range(d_y.ndim - 1))).astype(like_bias.dtype)
    d_x = _when_needed(_product_backward, d_y, packed, like_x.dtype)
    return d_x, None, d_bias


_packed_linear.defvjp(_packed_forward, _packed_backward)


def embedding(
    table: Float[Array, "V D"] | Packed,
    ids: Int[Array, "*B"],
    *,
    scale: float | None = None,
    dtype: jnp.dtype | None = None,
    implementation: str | Mapping[str, str] = "auto",
) -> Float[Array, "*B D"]:
    """Rows of the table in `dtype` (the table's if None, float32 of a packed one), times `scale`,
    rounded to that dtype.

    Traced ids outside the table are clamped to its ends. Raises: ValueError for concrete ones,
    for ids in a table without rows, and if the ids are no integers, the table is not [V, D] of
    floating point, or the parts of a packed one do not fit each other.
    """
    if isinstance(table, Packed) and (reason := table.problem()) is not None:
        raise ValueError(f"embedding: {reason}")
    dtype = jnp.float32 if isinstance(table, Packed) and dtype is None else dtype
    check_embedding(_as_array(table), ids, scale, dtype)
    kwargs = {"scale": scale, "dtype": dtype}
    return select("embedding", EMBEDDING, implementation, table, ids, **kwargs)(
        table, ids, **kwargs
    )


def _as_array(table: Array | Packed) -> Any:
    if not isinstance(table, Packed):
        return table
    return jax.ShapeDtypeStruct(table.shape, jnp.float32)


def _embedding_xla(table, ids, *, scale, dtype):
    if not isinstance(table, Packed):
        return embedding_reference(table, ids, scale=scale, dtype=dtype)
    table = jax.lax.stop_gradient(table)
    rows = dequantize(take_rows(table, ids.reshape(-1)), dtype)
    rows = rows if scale is None else rows * jnp.asarray(scale, rows.dtype)
    return rows.reshape(*ids.shape, table.shape[1])


def _embedding_why_not(table, ids, **kwargs) -> str | None:
    if isinstance(table, Packed):
        return "the table is packed"
    return why_not_embedding(table, ids, **kwargs)


def _embedding_not_auto(table, ids, **kwargs) -> str | None:
    del table, kwargs
    return slower_for_few(ids.size)


LINEAR: Table = {
    **pallas(_linear_pallas, _linear_pallas_why_not, _linear_pallas_not_auto),
    "xla": Implementation(_linear_xla),
}
EMBEDDING: Table = {
    **pallas(embedding_kernel, _embedding_why_not, _embedding_not_auto),
    "xla": Implementation(_embedding_xla),
}
