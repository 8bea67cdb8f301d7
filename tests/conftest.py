"""What every test may ask for; and a line at the end about the tests that cannot run here."""

import importlib
import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import pytest

REPO = Path(__file__).resolve().parent.parent

# How many threads JAX's CPU client has; else as many as there are cores. Mosaic's interpreter keeps
# one for each warpgroup that waits, and where a program computes something beside the kernel, two
# are too few for ever (jax 0.11.2: 2 of 6 runs of attention's gradient ended; with 16, all).
os.environ.setdefault("NPROC", "16")


def _why_not(marker: str) -> str | None:
    """Why tests with this marker cannot run here; None if they can."""
    if marker == "gpu" and jax.default_backend() != "gpu":
        return "no NVIDIA GPU that JAX can use"
    if marker == "alone" and int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        return "other test processes keep the GPU from them; without -n they run"
    if marker == "reference":
        missing = [m for m in ("torch", "transformers") if importlib.util.find_spec(m) is None]
        if missing:
            return f"{' and '.join(missing)} not installed: make test-reference"
    if marker == "aot":
        return importlib.import_module("jaxllm.aot").why_not()
    if marker == "triton":
        missing = [m for m in ("jax_triton", "triton") if importlib.util.find_spec(m) is None]
        if missing:
            return f"{' and '.join(missing)} not installed: pip install -e '.[triton]'"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, metavar="N", help="of a file's tests one in N")
    slow = "of a file's slow tests one in N, of the others all (times --every, if both are given)"
    parser.addoption("--slow-every", type=int, default=1, metavar="N", help=slow)
    first = "which of each N: K modulo N"
    parser.addoption("--first", type=int, default=0, metavar="K", help=first)


def pytest_configure(config: pytest.Config) -> None:
    """A shell's background jobs ignore Ctrl-C, and hand that on; the tests send it."""
    for option in ("--every", "--slow-every"):
        if (number := config.getoption(option)) < 1:
            raise pytest.UsageError(f"{option} must be at least 1, got {number}")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # of those that -m and -k have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places: Counter[tuple[Path, int]] = Counter()
    files: dict[Path, int] = {}
    kept, left_out = [], []
    for item in items:
        slow = config.option.slow_every if item.get_closest_marker("slow") else 1
        every = config.option.every * slow
        # Counted from another number in each file, or those with one test each would run at once
        place = places[item.path, every] + files.setdefault(item.path, len(files))
        (kept if (place - config.option.first) % every == 0 else left_out).append(item)
        places[item.path, every] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
    for marker in ("gpu", "alone", "reference", "aot", "triton"):
        reason = _why_not(marker)
        for item in items:
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker} tests: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counted from the reports, which also come from other processes (pytest-xdist)."""
    reasons = (report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    for reason, count in counts.items():
        terminalreporter.write_line(f"not run: {count} {reason}", yellow=True)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data and tools beside the repository."""
    folder = REPO.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"there is no folder {folder.name}/ beside the repository")
    return folder


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """The original implementations."""
    reason = _why_not("reference")
    if reason is not None:
        pytest.skip(reason)
    return importlib.import_module("transformers")


@pytest.fixture
def strict_jax() -> Iterator[None]:
    """JAX as our own forward must bear it: no silent change of dtype, no silent growth of rank.

    Not for code of optax or jax.nn, which need the standard rules.
    """
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
