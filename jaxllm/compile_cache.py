"""JAX's persistent compilation cache: the next process reads compiled programs from disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def enable_compile_cache(folder: str | os.PathLike[str] | None = None) -> Path:
    """Keep compiled programs in `folder` from here on, for the whole process; returns the folder.

    It is $XDG_CACHE_HOME/jaxllm or ~/.cache/jaxllm if None. The command line calls this; an import
    never does.
    Raises: OSError if the folder cannot be made or written to; RuntimeError if there is no home.
    """
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxllm"
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):  # else JAX warns at every program that it cannot write
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # JAX would go on with the folder that it began with
    # The small programs around the large ones count too when a process lives for one prompt.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return folder
