"""Scale, mask and softmax in one."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Array, Bool, Float

from jaxllm.ops._select import Implementation, Table, of_kernel, pallas, select
from pallas_kernels import softmax as kernels
from pallas_kernels import triton_softmax


def scale_softmax(
    x: Float[Array, "*B S"],
    *,
    scale: float | Float[Array, ""] = 1.0,
    mask: Bool[Array, ...] | None = None,
    causal: bool = False,
    axis: int = -1,
    implementation: str | Mapping[str, str] = "auto",
) -> Float[Array, "*B S"]:
    """softmax(scale * x) over `axis`, of what `mask` (True: kept) and `causal` let through.

    The mask broadcasts to x. With causal, x is [.., T, S] and query t sees keys s <= S - T + t:
    aligned to the end. Masked entries are 0, whatever x holds there; a row of masked entries, or at
    a positive scale of -inf, is all 0, and so is its gradient. The scale is a number, or an array
    with a gradient.
    Dtypes: bfloat16, float16, float32; statistics in float32; the result has x's dtype.
    Raises: ValueError as `pallas_kernels.softmax.scale_softmax` does. NotImplementedError if the
    named implementation cannot run the call.
    """
    kernels.check(x, scale, mask, causal, axis)
    kwargs = {"scale": scale, "mask": mask, "causal": causal, "axis": axis}
    return select("scale_softmax", SCALE_SOFTMAX, implementation, x, **kwargs)(x, **kwargs)


def _not_auto(x, *, mask=None, device, **kwargs) -> str | None:
    # H200, bfloat16, [2, 8, 128, 128] with a key mask: 2.8 us in two kernels, XLA 2.3 us in one
    del device, kwargs
    small = mask is not None and x.size < 2**20
    return f"for {x.size} numbers under a mask XLA is as fast" if small else None


SCALE_SOFTMAX: Table = {
    **pallas(kernels.scale_softmax, kernels.why_not, _not_auto),
    "triton": Implementation(
        triton_softmax.scale_softmax,
        of_kernel(triton_softmax.why_not),
        lambda *args, **kwargs: "runs only by name: timed on Hopper only, which 'pallas' is for",
    ),
    "xla": Implementation(kernels.scale_softmax_reference),
}
