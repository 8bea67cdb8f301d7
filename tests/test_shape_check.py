"""The check of `make test-shapes` speaks where an array is wrong, and only there."""

import jax.numpy as jnp
import jaxtyping
import pytest
from jaxtyping import Array, Float, jaxtyped
from shape_check import check


@jaxtyped(typechecker=check)
def first(
    x: Float[Array, "B D"], scale: int, rest: tuple[Float[Array, " D"] | None, str]
) -> Float[Array, " D"]:
    return x[0] if scale == 1 else x


X = jnp.ones((2, 3))


def test_what_is_no_array_is_not_checked():
    first(X, 1, (None, "text"))
    first(X, 1, (X[0], 5))  # pyright: ignore
    first(X, 1.0, (None, None))  # pyright: ignore


@pytest.mark.parametrize(
    ("x", "scale", "rest"),
    [
        (X[0], 1, (None, "")),
        (X.astype(int), 1, (None, "")),
        (X, 1, (X[:, 0], "")),
        (X, 2, (None, "")),
    ],
    ids=["rank", "dtype", "letter", "result"],
)
def test_a_wrong_array_is_seen(x, scale, rest):
    with pytest.raises(jaxtyping.TypeCheckError):
        first(x, scale, rest)
