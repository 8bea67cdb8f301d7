"""Where the model that ships with the project lies."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# Inside the package when it comes from a wheel, beside it in a clone.
_FOLDERS = (_PACKAGE / "checkpoints", _PACKAGE.parent / "checkpoints")


def shipped_checkpoint(name: str = "tiny-shakespeare") -> Path:
    """The Hugging Face folder of a model that ships with the project.

    Raises: FileNotFoundError that lists what ships.
    """
    found = {
        config.parent.name: config.parent
        for folder in reversed(_FOLDERS)
        for config in sorted(folder.glob("*/config.json"))
    }
    if name not in found:
        ships = ", ".join(sorted(found)) or "none"
        raise FileNotFoundError(
            f"no model called {name!r} ships with jaxllm; those that do: {ships}"
        )
    return found[name]
