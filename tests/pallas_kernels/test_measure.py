"""The stopwatch: rotation, both clocks, and what it does where CUPTI does not work."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import measure

profiler = pytest.importorskip("jax.experimental.mosaic.gpu.profiler")

TIMING = measure.Timing(us=10.0, spread_us=0.1, wall_us=12.0, clock="cupti", calls=20)


@pytest.fixture
def f():
    return jax.jit(lambda x: x + 1)


@pytest.fixture
def sets():
    return [(jnp.full(8, i, jnp.float32),) for i in range(3)]


@pytest.fixture
def fake_gpu(monkeypatch):
    """A profiler that sees one kernel for each call, and two more for each clearing of the L2."""
    log = []

    def install(events_of):
        def fake(run, *, aggregate, iterations):
            assert not aggregate

            def measured():
                run()  # the warm-up
                events = []
                for i in range(iterations):
                    run()
                    events.append(events_of(run, i))
                log.append(run)
                return None, (events if iterations > 1 else events[0])

            return measured

        monkeypatch.setattr(profiler, "measure", fake)
        watch = measure.Stopwatch("host")
        watch.reason = None
        watch._clear, watch._clear_kernels = (lambda: 0), ("clear_1", "clear_2")
        return watch, log

    return install


def kernels_of(run, i):
    ours = [("rms_norm", 0.001 * (1 + i % 2))]
    return ours + ([("clear_1", 9.0), ("clear_2", 9.0)] if run.clear else [])


def test_the_host_clock_is_named(f, sets):
    timing = measure.Stopwatch().time(f, sets, calls=4)
    assert timing.us > 0
    assert timing.us == timing.wall_us
    assert timing.calls == 4
    assert timing.kernels is None
    if jax.default_backend() == "cpu":
        assert timing.clock == "host (no CUPTI on cpu)"
    assert measure.Stopwatch("host").time(f, sets).clock == "host (asked for)"


def test_cupti_is_asked_in_vain():
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match=r"no clock 'cupti' here: no CUPTI on cpu"):
            measure.Stopwatch("cupti")
    with pytest.raises(ValueError, match=r"'sundial' is not 'cupti', 'host' or None"):
        measure.Stopwatch("sundial")


def test_nothing_to_time_is_refused(f, sets):
    for arguments, calls in (([], 3), (sets, 0)):
        with pytest.raises(ValueError, match="needs inputs and calls"):
            measure.Stopwatch().time(f, arguments, calls=calls)


def test_cupti_counts_the_kernels_without_those_that_clear_the_cache(fake_gpu, f, sets):
    watch, log = fake_gpu(kernels_of)
    timing = watch.time(f, sets, calls=5)
    assert log[0].clear is not None  # a call of 32 bytes would stay in the L2
    assert timing.clock == "cupti"
    assert timing.kernels == ("rms_norm",)
    assert timing.us == pytest.approx(1.0)
    assert watch.time(f, sets, calls=1).us == pytest.approx(1.0)


def test_large_inputs_need_no_clearing(fake_gpu, f, sets, monkeypatch):
    watch, log = fake_gpu(kernels_of)
    monkeypatch.setattr(measure, "COLD_BYTES", 32)
    watch.time(f, sets, calls=5)
    assert log[0].clear is None
    watch.time(f, sets, calls=5, call_bytes=2)  # a row of a large table would stay in the L2
    assert log[1].clear is not None


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (lambda run, i: [("clear_1", 9.0), ("clear_2", 9.0), ("rms_norm", 1.0)], "another order"),
        (lambda run, i: [], "another order"),
    ],
)
def test_what_cupti_gets_wrong_is_measured_by_the_host(fake_gpu, f, sets, events, reason):
    watch, _ = fake_gpu(events)
    timing = watch.time(f, sets, calls=5)
    assert timing.clock.startswith("host (CUPTI: ")
    assert reason in timing.clock
    assert timing.kernels is None


def test_the_host_clock_clears_the_cache_and_leaves_out_what_that_takes(f, sets, monkeypatch):
    watch, cleared = measure.Stopwatch("host"), []
    watch._clear = lambda: cleared.append(None)
    walls = {(False, False): 5.0, (False, True): 30.0, (True, False): 20.0}

    def wall(f, sets, calls, clear=None, real=watch._wall):
        real(f, sets, calls, clear)
        return walls[f is watch._clear, clear is not None]

    monkeypatch.setattr(watch, "_wall", wall)
    timing = watch.time(f, sets, calls=4)
    assert (timing.us, timing.wall_us) == (10.0, 5.0)
    assert len(cleared) == 2 * 3 * 4
    walls[False, True] = 19.0  # noise
    assert watch.time(f, sets, calls=4).us == measure.LEAST_US
    cleared.clear()
    monkeypatch.setattr(measure, "COLD_BYTES", 32)  # what pushes itself out of the cache
    assert watch.time(f, sets, calls=4).us == 5.0
    assert cleared == []


def test_inputs_rotate_and_results_are_kept(sets):
    seen = []

    def f(x):
        seen.append(float(x[0]))
        return x

    run = measure._Rotation(f, sets, 5, None)
    results = [run() for _ in range(6)]
    assert seen == [0, 1, 2, 0, 1, 2]
    assert [r is not None for r in results] == [True, False, False, False, False, True]
    assert isinstance(run, jax.stages.Wrapped)  # else the profiler would jit it
    with pytest.raises(NotImplementedError):
        run.trace()


@pytest.mark.parametrize(
    ("call_bytes", "sets"), [(0, 4), (2**20, 4), (2**22, 64), (2**23, 32), (2**27, 2), (2**35, 2)]
)
def test_as_many_sets_as_the_cache_asks_for(call_bytes, sets):
    assert measure.num_sets(call_bytes) == sets


def test_size_bytes():
    x = jnp.ones((2, 3), jnp.bfloat16)
    assert measure.size_bytes({"a": x, "b": [x, jnp.ones(3, jnp.int8)]}) == 27


@pytest.mark.parametrize(
    ("us", "spread_us", "wins"), [(9.5, 0.1, True), (9.9, 0.1, False), (9.5, 0.5, False)]
)
def test_faster_means_outside_the_noise(us, spread_us, wins):
    assert dataclasses.replace(TIMING, us=us, spread_us=spread_us).beats(TIMING) is wins


@pytest.mark.gpu
@pytest.mark.alone
def test_the_clocks_agree_on_a_gpu():
    watch = measure.Stopwatch()
    assert watch.reason is None
    x = [(jnp.full(2**28, i, jnp.float32),) for i in range(2)]
    timing = watch.time(jax.jit(lambda x: -x), x)
    assert timing.clock == "cupti"
    assert len(timing.kernels) == 1
    [(name, us)] = watch.kernels(jax.jit(lambda x: -x), x)
    assert name == timing.kernels[0]
    assert us == pytest.approx(timing.us, rel=0.05)
    assert timing.us == pytest.approx(timing.wall_us, rel=0.05)
