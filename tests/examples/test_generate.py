"""The recipe runs on any folder."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/generate.py"


def test_it_continues_a_prompt(shared):
    folder = shared / "data/stories260K"
    command = [sys.executable, EXAMPLE, folder, "Once upon a time", "--max-new-tokens", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Once upon a time, there was a little girl named Lily.")
    assert "decode" in done.stdout.splitlines()[-1]
