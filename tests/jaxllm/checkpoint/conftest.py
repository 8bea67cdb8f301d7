"""What every test of a checkpoint may ask for."""

from pathlib import Path

import pytest
from tiny_checkpoints import read_golden, write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama checkpoint in float32."""
    return write_checkpoint(tmp_path / "tiny", read_golden("llama"))
