"""The bench believes itself only if two clocks agree."""

import dataclasses

import pytest

from benchmarks import ceilings
from pallas_kernels.measure import Stopwatch, Timing

TIMING = Timing(us=1000.0, spread_us=1.0, wall_us=1010.0, clock="cupti", calls=20)


def test_two_clocks_that_agree():
    assert ceilings.agree(TIMING) == pytest.approx(0.01)


@pytest.mark.parametrize("wall_us", [940.0, 1060.0])
def test_two_clocks_that_do_not(wall_us):
    timing = dataclasses.replace(TIMING, wall_us=wall_us)
    with pytest.raises(ceilings.ClocksDisagreeError, match=r"6.0 % apart, believed are 5 %"):
        ceilings.agree(timing)


def test_one_clock_is_no_check():
    timing = dataclasses.replace(TIMING, clock="host (no CUPTI on cpu)")
    with pytest.raises(ceilings.ClocksDisagreeError, match=r"one clock only.*--host-clock"):
        ceilings.agree(timing)
    watch = Stopwatch("host")
    with pytest.raises(ceilings.ClocksDisagreeError):
        ceilings.measure(watch, copy_bytes=4096, size=16)


def test_ceilings_come_from_known_bytes_and_operations():
    class Watch(Stopwatch):
        def __init__(self):
            pass

        def time(self, f, sets, *, calls=20):
            f(*sets[0])
            return TIMING

    found = ceilings.measure(Watch(), copy_bytes=4096, size=16)
    assert found["copy"] == pytest.approx(2 * 4096 / 1000e-6)
    assert found["read"] == pytest.approx(4096 / 1000e-6)
    assert found["matmul"] == pytest.approx(2 * 16**3 / 1000e-6)
    assert found["times"].keys() == {"negate", "copy", "read", "matmul"}
