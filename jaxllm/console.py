"""A console that the command line and a run of training print on."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class Lines(Console):
    """Prints brackets as they are, for a path may hold them, and without colours of its own; a
    closed pipe is an error, as it is to what prints without a console.
    """

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
