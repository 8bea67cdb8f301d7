"""Which implementation of an op runs: the only place that decides.

Each op has an ordered table of `Implementation`s. `why_not` looks at shapes, dtypes and a `Device`,
and never runs anything; "auto" takes the first entry without a reason, a name takes that entry or
raises.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels import device as device_lib
from pallas_kernels import varying
from pallas_kernels.options import is_known

logger = logging.getLogger("jaxllm")

# The names that a mapping from op to implementation may have
OP_NAMES = (
    *("attention", "scale_softmax", "linear", "embedding", "rms_norm", "layer_norm", "rope", "glu"),
    "fused_linear",
    "between_attentions",
    "decode_layers",
    "linear_cross_entropy",
    "sampling_threshold",
    "cast_transpose",
)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """How an op is computed, and what may stand in the way.

    `run(*args, **kwargs)` computes; `why_not(*args, device=, **kwargs)` is None or one phrase.
    `not_auto`, asked likewise, says why "auto" leaves out an entry that could run: another is
    faster there.
    """

    run: Callable[..., Any]
    why_not: Callable[..., str | None] = lambda *args, **kwargs: None
    not_auto: Callable[..., str | None] = lambda *args, **kwargs: None

    def why_not_auto(self, *args: Any, **kwargs: Any) -> str | None:
        """Why "auto" passes over this entry."""
        return self.why_not(*args, **kwargs) or self.not_auto(*args, **kwargs)


Table = Mapping[str, Implementation]


def unless_symbolic(why_not: Callable[..., str | None]) -> Callable[..., str | None]:
    """That of what is made for known sizes, also asked whether all are: those that `jax.export`
    has letters for cannot be compared.
    """

    def reason(*args: Any, **kwargs: Any) -> str | None:
        for x in jax.tree.leaves((args, kwargs)):
            for size in getattr(x, "shape", ()):
                if not is_known(size):
                    return f"it is made for known sizes, and one is {size}"
        return why_not(*args, **kwargs)

    return reason


def of_kernel(why_not: Callable[..., str | None]) -> Callable[..., str | None]:
    """As `unless_symbolic`, also asked whether a `jax.shard_map` around the call would check its
    results.
    """
    known = unless_symbolic(why_not)
    return lambda *args, **kwargs: varying.why_no_kernel(args, kwargs) or known(*args, **kwargs)


def pallas(
    run: Callable[..., Any],
    why_not: Callable[..., str | None],
    not_auto: Callable[..., str | None] = lambda *args, **kwargs: None,
    interpreted: device_lib.Device = device_lib.INTERPRETED,
    name: str = "pallas",
    *,
    not_interpreted: Callable[[], str | None] = lambda: None,
) -> dict[str, Implementation]:
    """The entries of a kernel that takes `interpret=`: on the GPU, and in the interpreter.

    The second, "pallas-interpret", is there to test whole models with the kernels on a CPU.
    interpreted: what `why_not` is told there; not_interpreted: what else keeps the kernel from it;
    name: of the first.
    """
    why_not = of_kernel(why_not)

    def why_not_interpret(*args: Any, device: device_lib.Device, **kwargs: Any) -> str | None:
        del device
        return why_not(*args, device=interpreted, **kwargs) or not_interpreted()

    return {
        name: Implementation(run, why_not, not_auto),
        f"{name}-interpret": Implementation(
            functools.partial(run, interpret=True),
            why_not_interpret,
            lambda *args, **kwargs: "runs only by name: it is a test, and slow",
        ),
    }


# H200, decoding with Qwen2.5-0.5B's shape, one row: 939 tokens a second with XLA and cuDNN alone;
# with our norm 844, rotation 801, gate 780, embedding (as it was) 750: XLA fuses each with others
FEW_TOKENS = 512


def slower_for_few(tokens: int) -> str | None:
    """Why "auto" leaves small kernels to XLA in decoding."""
    if tokens >= FEW_TOKENS:
        return None
    return f"a model decodes faster where XLA does it ({tokens} tokens; from {FEW_TOKENS} on)"


def select(
    op: str, table: Table, implementation: str | Mapping[str, str], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """The `run` of the entry that `implementation` names for this call; raises as `choose`."""
    return table[choose(op, table, implementation, *args, **kwargs)].run


def name_for(op: str, implementation: str | Mapping[str, str]) -> str:
    """The name that `implementation` has for the op; "auto" if it is a mapping without one.

    Raises: ValueError if a mapping names what is no op.
    """
    if isinstance(implementation, str):
        return implementation
    if not isinstance(implementation, Mapping):
        raise ValueError(
            f"{op}: implementation must be a name or a mapping from ops to names, got "
            f"{implementation!r:.80}"
        )
    if unknown := set(implementation) - set(OP_NAMES):
        raise ValueError(
            f"implementation: the mapping names no op: {', '.join(sorted(map(str, unknown)))}; "
            f"there are {', '.join(OP_NAMES)}"
        )
    return implementation.get(op, "auto")


def known_name(op: str, table: Table, implementation: str | Mapping[str, str]) -> str:
    """As `name_for`; "auto", or a name that the table has.

    Raises: ValueError if it has not, or a mapping names what is no op.
    """
    name = name_for(op, implementation)
    if name not in ("auto", *table):
        raise ValueError(
            f"{op}: no implementation is named {name!r}; there are {', '.join(table)} "
            "(a mapping such as {'attention': 'cudnn'} names one for some ops only)"
        )
    return name


def choose(
    op: str, table: Table, implementation: str | Mapping[str, str], *args: Any, **kwargs: Any
) -> str:
    """Which entry `implementation` means for this call: its name.

    Raises: ValueError as `known_name`; NotImplementedError if the named entry cannot run the call.
    """
    name = known_name(op, table, implementation)
    if name != "auto":
        reason = table[name].why_not(*args, device=device_lib.current(), **kwargs)
        if reason is not None:
            raise NotImplementedError(f"{op}: {name!r} cannot run this call: {reason}")
        return name
    device = device_lib.current()
    passed_over = []
    for name, entry in table.items():
        reason = entry.why_not_auto(*args, device=device, **kwargs)
        if reason is None:
            if passed_over and device.platform == "gpu":
                _log_once(op, name, tuple(passed_over))
            return name
        passed_over.append(f"{name}: {reason}")
    raise AssertionError(f"{op}: no implementation is without conditions")


@functools.lru_cache(maxsize=1024)
def _log_once(op: str, name: str, passed_over: tuple[str, ...]) -> None:
    logger.info("%s runs with %r; passed over %s", op, name, "; ".join(passed_over))
