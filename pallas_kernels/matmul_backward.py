"""What runs a call of `matmul` over matrices, and its gradient: two more products.

d(a) = dS b^T and d(b) = a^T dS, where dS is the gradient of the sums: the second reads a the other
way round. Where what follows the sums is not linear in them, they are computed once more. With
block scales the gradient is that of the plain mathematics. Imported only by matmul.py.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import matmul_few_rows as few_rows
from pallas_kernels.matmul_config import has_blocks, tile_config
from pallas_kernels.matmul_finish import FP8, finish, sums
from pallas_kernels.matmul_kernel import Static, product


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static: Static, a, b, bias, residual, a_scale, b_scale, out_scale):
    if static.config.form == "vectors":
        return few_rows.vector_products(static, a, b, bias, residual)
    if static.config.form == "split":
        after = {"epilogue": static.epilogue, "out_dtype": static.out_dtype}
        whole = functools.partial(finish, bias=bias, residual=residual, **after)
        return few_rows.split_products(static, a, b, bias, residual, finish=whole)
    return product(static, a, b, bias, residual, a_scale, b_scale, out_scale)


def _forward(static, *arrays):
    return _run(static, *arrays), arrays


def _backward(static, arrays, dy):
    a, b, bias, residual, a_scale, b_scale, out_scale = arrays
    if out_scale is not None:
        raise NotImplementedError(
            f"matmul: a result that is rounded to {static.out_dtype} has no gradient"
        )
    blocks = has_blocks(b_scale)

    def finished(total, bias, residual, a_scale, b_scale):
        if a_scale is not None:
            a_scale = a_scale[:, None]
        after = {"epilogue": static.epilogue, "out_dtype": dy.dtype}
        return finish(total, bias, residual, a_scale, b_scale, **after)

    if a.dtype == jnp.int8:  # such products have no gradient, what follows them has
        total = _sums_again(static, a, b)
        _, pull = jax.vjp(functools.partial(finished, total), bias, residual, a_scale, b_scale)
        return None, None, *pull(dy), None
    if blocks:

        def whole(a, b, bias, residual, a_scale, b_scale):
            scales = {"a_scale": a_scale, "b_scale": b_scale}
            total = sums(a, b, transpose_b=True, **scales)
            return finished(total, bias, residual, None, None)

        wide = (a.astype(jnp.float32), b.astype(jnp.float32), bias, residual, a_scale, b_scale)
        d_a, d_b, *rest = jax.vjp(whole, *wide)[1](dy)
        return _saturate(d_a, a), _saturate(d_b, b), *rest, None
    dtype = jnp.dtype(jnp.bfloat16 if a.dtype == FP8 else a.dtype)
    if static.epilogue is not None or a_scale is not None or b_scale is not None:
        total = _sums_again(static, a, b)
    else:  # what follows is linear: the sums do not matter
        shape = (dy.shape[0], b.shape[0] if static.transpose_b else b.shape[1])
        total = jnp.zeros(shape, jnp.float32)
    _, pull = jax.vjp(finished, total, bias, residual, a_scale, b_scale)
    d_total, *rest = pull(dy)
    d_total = d_total.astype(dtype)
    a16, b16 = a.astype(dtype), b.astype(dtype)
    d_a = _gradient(static, "a", d_total, b16, transpose_b=not static.transpose_b)
    operands = (d_total, a16) if static.transpose_b else (a16, d_total)
    d_b = _gradient(static, "b", *operands, transpose_a=True)
    return _saturate(d_a, a), _saturate(d_b, b), *rest, None


def _sums_again(static: Static, a, b):
    integers = a.dtype == jnp.int8
    config = static.config
    if config.form != "tiles":
        m, n = a.shape[0], b.shape[0] if static.transpose_b else b.shape[1]
        config = tile_config(
            m, n, a.dtype, b_rows=False, gated=False, num_sms=static.num_sms, vectors=0
        )
    again = dataclasses.replace(
        static,
        name="matmul_recomputed",
        epilogue=None,
        out_dtype="int32" if integers else "float32",
        config=config,
    )
    return product(again, a, b)


def _gradient(static: Static, of: str, a, b, *, transpose_a=False, transpose_b=False):
    m = a.shape[1] if transpose_a else a.shape[0]
    n = b.shape[0] if transpose_b else b.shape[1]
    config = tile_config(
        m, n, a.dtype, b_rows=not transpose_b, gated=False, num_sms=static.num_sms, vectors=0
    )
    return product(
        Static(
            f"matmul_backward_{of}",
            config,
            static.num_sms,
            static.interpret,
            a.dtype.name,
            transpose_a,
            transpose_b,
        ),
        a,
        b,
    )


def _saturate(gradient, like):
    """In the dtype of what it is the gradient of; fp8 would turn what it cannot hold into NaN."""
    if like.dtype == FP8:
        limit = jnp.asarray(jnp.finfo(FP8).max, gradient.dtype)
        gradient = jnp.clip(gradient, -limit, limit)
    return gradient.astype(like.dtype)


_run.defvjp(_forward, _backward)
run = jax.jit(_run, static_argnums=0)  # calls alike share one compiled kernel
