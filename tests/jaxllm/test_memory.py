"""How much memory is free: from /proc and control groups, here made-up ones."""

from types import SimpleNamespace

import jax
import pytest

from jaxllm import memory


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that makes /proc and /sys/fs/cgroup from file names and contents."""
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")

    def make(**files):
        for name, content in files.items():
            file = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)

    return make


MEMINFO = "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\n"


def test_this_machine_has_memory():
    free = memory.host_free_bytes()
    assert free is None or 1e6 < free < 1e15
    assert memory.free_bytes(jax.devices("cpu")[0]) is None or free is not None


def test_off_linux_nobody_says(machine):
    assert memory.host_free_bytes() is None


def test_what_linux_has_available(machine):
    machine(proc__meminfo=MEMINFO)
    assert memory.host_free_bytes() == 4000 * 1024
    machine(proc__self__cgroup="0::/job\n5:cpu:/\n")
    assert memory.host_free_bytes() == 4000 * 1024


def test_limits_of_control_groups_count(machine):
    machine(proc__meminfo=MEMINFO, proc__self__cgroup="0::/slice/job\n")
    machine(
        cgroup__slice__job__memory_dot_max="max\n",
        cgroup__slice__job__memory_dot_current="700000\n",
        cgroup__slice__job__memory_dot_stat="anon 5\ninactive_file 300000\n",
        cgroup__slice__memory_dot_max="1000000\n",
        cgroup__slice__memory_dot_current="800000\n",
        cgroup__slice__memory_dot_stat="anon 5\ninactive_file 300000\n",
    )
    assert memory.host_free_bytes() == 1000000 - 800000 + 300000


@pytest.mark.parametrize(
    ("group", "folder"),
    [
        ("4:memory:/only/on/the/host", "cgroup__memory"),
        ("4:cpu,memory:/job", "cgroup__memory__job"),
    ],
    ids=["in a container", "of several controllers"],
)
def test_limits_of_old_control_groups_count(machine, group, folder):
    texts = {
        "limit_in_bytes": "1000000\n",
        "usage_in_bytes": "800000\n",
        "stat": "total_inactive_file 1000\n",
    }
    machine(proc__meminfo=MEMINFO, proc__self__cgroup=f"{group}\n")
    machine(**{f"{folder}__memory_dot_{name}": text for name, text in texts.items()})
    assert memory.host_free_bytes() == 1000000 - 800000 + 1000


def test_the_least_that_anything_leaves_is_free(machine):
    """A group, one above it, or the machine; a group beyond its limit leaves nothing."""
    machine(proc__meminfo=MEMINFO, proc__self__cgroup="0::/slice/job\n")
    for job, above, free in (
        (10**6, 10**9, 10**6 - 100),
        (10**9, 10**6, 10**6 - 100),
        (10**9, 10**9, 4000 * 1024),
        (10**9, 99, 0),
    ):
        for at, limit in (("cgroup__slice__job", job), ("cgroup__slice", above)):
            machine(**{f"{at}__memory_dot_max": f"{limit}\n"})
            machine(**{f"{at}__memory_dot_current": "100\n", f"{at}__memory_dot_stat": "anon 5\n"})
        assert memory.host_free_bytes() == free


def test_an_accelerator_says_itself():
    def device(stats):
        return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    assert memory.free_bytes(device({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert memory.free_bytes(device(None)) is None
