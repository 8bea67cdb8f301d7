"""What `make test-shapes` checks at run time: the annotations of arrays, and no others.

The other types are pyright's, which understands protocols, Self and the aliases of libraries.
"""

import types
from typing import Any, Union, get_args, get_origin

from beartype import beartype
from jaxtyping import AbstractArray


def _arrays_of(hint: Any) -> Any:
    """The hint with Any in place of all that is no array."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray | types.NoneType):
        return hint
    if hint in (None, ...):
        return hint
    parts = tuple(_arrays_of(part) for part in get_args(hint))
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return Union[parts]  # noqa: UP007  a tuple of parts
    if origin in (tuple, list, dict):
        return origin[parts]
    return Any


def check(function):
    if function.__name__ == "__init__":
        return function  # JAX rebuilds a pytree also with leaves that are no arrays
    hints = function.__annotations__
    function.__annotations__ = {name: _arrays_of(hint) for name, hint in hints.items()}
    return beartype(function)
