import contextlib
import os

import pytest

from jaxllm.console import Lines


def test_a_closed_pipe_is_an_error_to_what_prints():
    reader, writer = os.pipe()
    os.close(reader)
    console = Lines()
    console.file = os.fdopen(writer, "w")
    with pytest.raises(BrokenPipeError):
        console.print("[a line]")
    with contextlib.suppress(BrokenPipeError):
        console.file.close()
