import asyncio
import dataclasses
import gc
import resource
import shutil
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint.type_handlers import NumpyHandler
from tiny_models import TINY

from jaxllm import train
from jaxllm.checkpoint import native
from jaxllm.checkpoint.native import Checkpoints
from jaxllm.model import Transformer
from jaxllm.precision import DynamicScale

ONE_LAYER = dataclasses.replace(TINY, num_hidden_layers=1, layer_types=())
OPTIMIZER = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 8))
TEXT = jnp.arange(500) * 7 % 31


def start(**changes):
    model = Transformer(dataclasses.replace(ONE_LAYER, **changes), rngs=nnx.Rngs(0))
    return train.init_state(model, OPTIMIZER), train.make_train_step(model, OPTIMIZER)


def run(state, step, key, steps):
    """Some steps of training on windows that the key draws."""
    for _ in range(steps):
        key, draw = jax.random.split(key)
        state, _ = step(state, train.draw_windows(TEXT, draw, rows=2, length=8))
    return state, key


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    state, step = start()
    whole, whole_key = run(state, step, jax.random.key(3), 7)

    state, key = run(start()[0], step, jax.random.key(3), 4)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state, key=key, position={"epoch": 1}, loss=2.5)
    del state, key

    like, step = start()  # as another process would
    with Checkpoints(tmp_path / "run") as checkpoints:
        saved = checkpoints.restore(like)
    assert saved.position == {"epoch": 1}
    assert saved.loss == 2.5
    assert saved.state.step == 4
    state, key = run(saved.state, step, saved.key, 3)
    assert_same(state, whole)
    assert_same(jax.random.key_data(key), jax.random.key_data(whole_key))


def test_the_best_and_the_latest_are_kept(tmp_path):
    state, _ = start()
    key = jax.random.key(0, impl="rbg")
    losses = {1: 3.0, 2: 1.5, 3: float("nan"), 4: 2.0, 5: None}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step is checkpoints.best_step is None
        for step, loss in losses.items():
            params = jax.tree.map(lambda x: x + 1, state.params)
            state = dataclasses.replace(state, step=jnp.int32(step), params=params)
            checkpoints.save(state, key=key, loss=loss)
        checkpoints.save(state, key=key)  # the step is there: nothing happens
    with Checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.latest_step, checkpoints.best_step) == (5, 2)
        best = checkpoints.restore(state, step=2)
        latest = checkpoints.restore(state)
        assert_same(checkpoints.parameters(), best.state.params)
        with pytest.raises(FileNotFoundError, match="step 3 was not saved here; .* were: 2, 4, 5"):
            checkpoints.parameters(step=3)
        with pytest.raises(FileNotFoundError, match="step 3 was not saved here; .* were: 2, 4, 5"):
            checkpoints.restore(state, step=3)
    assert (best.state.step, best.loss) == (2, 1.5)
    assert (latest.state.step, latest.loss) == (5, None)
    assert_same(latest.state, state)
    assert jax.random.key_impl(latest.key) == "rbg"


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_of_the_latest_are_kept_as_are_told(tmp_path, keep):
    state, _ = start()
    with Checkpoints(tmp_path, keep=keep) as checkpoints:
        for step in range(5):
            state = dataclasses.replace(state, step=jnp.int32(step))
            checkpoints.save(state, key=jax.random.key(0))
        assert checkpoints.steps == [0, 1, 2, 3, 4][-keep:]


def test_an_empty_or_absent_folder_has_no_training(tmp_path):
    state, _ = start()
    with (
        Checkpoints(tmp_path / "none") as checkpoints,
        pytest.raises(FileNotFoundError, match="none: no training was saved here"),
    ):
        checkpoints.restore(state)


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file/inside"):
        with pytest.raises(ValueError, match="file is a file; give a folder"):
            Checkpoints(path)


def save_two(folder):
    """Checkpoints of steps 1 and 2 with unlike weights; the state of step 1."""
    first, _ = start()
    first = dataclasses.replace(first, step=jnp.int32(1))
    second = dataclasses.replace(
        first, step=jnp.int32(2), params=jax.tree.map(lambda x: x + 1, first.params)
    )
    with Checkpoints(folder) as checkpoints:
        for state in (first, second):
            checkpoints.save(state, key=jax.random.key(0), position={"at": int(state.step)})
    return first


def tear(file):
    """Takes a folder away, or most of a file."""
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.write_bytes(file.read_bytes()[:9])


# What Orbax gave up on halfway (tasks of a loop that is closed) complains when it is collected.
late_reports = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PARTS = ("state", "notes", "state/manifest.ocdbt", "metrics/metrics")


def test_what_a_killed_run_has_begun_is_removed_by_the_next_save(tmp_path):
    state = save_two(tmp_path)
    begun = tmp_path / "3.orbax-checkpoint-tmp"
    (begun / "state").mkdir(parents=True)
    (begun / "state" / "numbers").write_bytes(b"half of it")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step == 2
        assert begun.exists()  # for who is refused leaves the folder as it was
        checkpoints.save(dataclasses.replace(state, step=jnp.int32(4)), key=jax.random.key(0))
        checkpoints.wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]


def entries(folder):
    """All that is in a folder, with what each file was when it was last written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@late_reports
def test_who_only_reads_changes_nothing(tmp_path):
    with (
        Checkpoints(tmp_path / "none", read_only=True) as checkpoints,
        pytest.raises(FileNotFoundError, match="none: no training was saved here"),
    ):
        checkpoints.parameters()
    assert not (tmp_path / "none").exists()

    folder, said = tmp_path / "run", []
    state = save_two(folder)
    (folder / "3.orbax-checkpoint-tmp").mkdir()
    tear(folder / "2" / "state")
    before = entries(folder)
    with Checkpoints(folder, read_only=True, say=said.append) as checkpoints:
        assert checkpoints.steps == [1, 2]
        assert_same(checkpoints.parameters(step=1), state.params)
        assert checkpoints.restore(state).position == {"at": 1}
        assert said == [
            f"{folder / '2'}: this checkpoint cannot be read, a part of it is missing or broken; "
            "going back to step 1"
        ]
        with pytest.raises(ValueError, match="^checkpoints: .*run was opened to be read, not to"):
            checkpoints.save(state, key=jax.random.key(0))
    assert entries(folder) == before
    tear(folder / "1" / "metrics" / "metrics")
    with pytest.raises(native.TornError, match="1: this checkpoint cannot .*; remove that folder"):
        Checkpoints(folder, read_only=True)
    gc.collect()


@late_reports
def test_who_reads_beside_a_run_is_told_that_it_has_removed_a_step(tmp_path):
    state = save_two(tmp_path)
    with Checkpoints(tmp_path, read_only=True) as reader:
        shutil.rmtree(tmp_path / "1")
        with pytest.raises(FileNotFoundError, match="1: the run at work there has removed this"):
            reader.parameters(step=1)
        assert reader.parameters(step=2).keys() == state.params.keys()
    gc.collect()


@late_reports
@pytest.mark.parametrize("part", PARTS[:3])
def test_the_only_checkpoint_is_torn(tmp_path, part):
    state, _ = start()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, key=jax.random.key(0))
    tear(tmp_path / "0" / part)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="0: this checkpoint cannot be read, a part of it") as error,
    ):
        checkpoints.restore(state)
    assert "\n" not in str(error.value)
    del error
    gc.collect()


@late_reports
@pytest.mark.parametrize("part", PARTS)
def test_behind_a_torn_checkpoint_the_one_before_is_taken(tmp_path, part):
    state = save_two(tmp_path)
    tear(tmp_path / "2" / part)
    said = []
    with Checkpoints(tmp_path, say=said.append) as checkpoints:
        saved = checkpoints.restore(state)
        assert saved.position == {"at": 1}
        assert_same(saved.state, state)
        [sentence] = said
        assert "2: this checkpoint cannot be read" in sentence
        assert "(it is now torn-2)" in sentence
        # The run comes to the step again, and can save it
        again = dataclasses.replace(state, step=jnp.int32(2))
        checkpoints.save(again, key=saved.key, position={"at": "again"})
        assert checkpoints.latest_step == 2
    with Checkpoints(tmp_path, say=said.append) as checkpoints:
        assert checkpoints.restore(state).position == {"at": "again"}
    assert len(said) == 1
    gc.collect()


def test_without_orbaxs_own_dates_a_checkpoint_is_whole(tmp_path):
    state, said = save_two(tmp_path), []
    tear(tmp_path / "2/_CHECKPOINT_METADATA")
    with Checkpoints(tmp_path, say=said.append) as checkpoints:
        assert checkpoints.restore(state).position == {"at": 2}
        assert checkpoints.steps == [1, 2]
    assert not said


@late_reports
def test_a_checkpoint_whose_numbers_are_cut_off_is_torn(tmp_path):
    state = save_two(tmp_path)
    files = [file for file in (tmp_path / "2/state").rglob("*") if file.is_file()]
    tear(max(files, key=lambda file: file.stat().st_size))
    with Checkpoints(tmp_path, say=[].append) as checkpoints:
        assert checkpoints.restore(state).position == {"at": 1}
    gc.collect()


def caused(by):
    error = Exception("Encountered error while reading array index")
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        caused(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")),
        MemoryError(),
        PermissionError(13, "Permission denied"),
        OSError(5, "Input/output error"),
        caused(ValueError("PERMISSION_DENIED: Error opening local file")),
    ],
    ids=lambda error: type(error.__cause__ or error).__name__,
)
def test_what_is_no_fault_of_the_checkpoint_leaves_it_where_it_is(tmp_path, monkeypatch, error):
    state, said = save_two(tmp_path), []
    with Checkpoints(tmp_path, say=said.append) as checkpoints:

        def fails(*_, **__):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints._manager, "restore", fails)
            with pytest.raises(type(error)) as raised:
                checkpoints.restore(state)
        assert raised.value is error
        assert not said
        assert checkpoints.restore(state).position == {"at": 2}


def test_a_donated_state_is_gone_before_the_saved_one_is_read(tmp_path, monkeypatch):
    like = save_two(tmp_path)
    other, _ = start(vocab_size=32)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="but float32"):
            checkpoints.restore(other, donate=True)
        assert not any(x.is_deleted() for x in jax.tree.leaves(other))
        restore, gone = checkpoints._manager.restore, []

        def noted(step, args):
            gone.append(all(x.is_deleted() for x in jax.tree.leaves(like)))
            return restore(step, args=args)

        monkeypatch.setattr(checkpoints._manager, "restore", noted)
        assert checkpoints.restore(like, donate=True).position == {"at": 2}
    assert gone == [False, True]  # the notes, the arrays


@late_reports
def test_a_donated_state_is_no_more_needed_for_the_checkpoint_before(tmp_path):
    like = save_two(tmp_path)
    expected = jax.tree.map(np.array, like)
    tear(tmp_path / "2/state/manifest.ocdbt")
    with Checkpoints(tmp_path, say=[].append) as checkpoints:
        assert_same(checkpoints.restore(like, donate=True).state, expected)
    gc.collect()


def test_of_the_parameters_only_they_are_read_and_to_the_host(tmp_path, monkeypatch):
    state, read = save_two(tmp_path), []
    deserialize = NumpyHandler.deserialize

    async def noted(self, infos, *args, **options):
        read.extend(info.name for info in infos)
        return await deserialize(self, infos, *args, **options)

    monkeypatch.setattr(NumpyHandler, "deserialize", noted)
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.parameters(step=1)
    assert sorted(read) == sorted(f"params.{name}" for name in state.params)
    assert not any(x.committed for x in found.values())
    assert all(x.device.platform == "cpu" for x in found.values())
    assert_same(found, state.params)


def test_a_full_disk_is_one_sentence_and_leaves_the_last_good_checkpoint(tmp_path, capfd):
    state, _ = start()
    key, said = jax.random.key(0), []
    with Checkpoints(tmp_path, say=said.append) as checkpoints:
        checkpoints.save(state, key=key)
        checkpoints.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # files end here, as on a full disk
        try:
            checkpoints.save(dataclasses.replace(state, step=jnp.int32(1)), key=key)
            checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        [sentence] = said
        assert sentence == (
            f"{tmp_path}: step 1 was not saved: File too large; the last good one is step 0"
        )
        assert [file.name for file in tmp_path.iterdir()] == ["0"]  # the room is free again
        assert checkpoints.latest_step == 0
        assert_same(checkpoints.restore(state).state, state)
        checkpoints.save(dataclasses.replace(state, step=jnp.int32(2)), key=key)
        assert checkpoints.latest_step == 2
        assert checkpoints.steps == [0, 2]
    assert len(said) == 1
    assert not capfd.readouterr().err


def test_writes_that_end_after_a_failed_save_leave_no_traceback(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: shown.append(str(what.exc_value)))
    native._pass_over_late_writes()
    hook = sys.unraisablehook
    native._pass_over_late_writes()
    assert sys.unraisablehook is hook  # one for all saves
    late = RuntimeError("Event loop is closed")
    for error, of in ((late, None), (late, object()), (RuntimeError("x"), None)):
        sys.unraisablehook(types.SimpleNamespace(exc_type=type(error), exc_value=error, object=of))
    assert shown == ["Event loop is closed", "x"]


def test_a_position_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    state, _ = start()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(
            ValueError, match="^checkpoints: position must be plain JSON values: .*"
        ):
            checkpoints.save(state, key=jax.random.key(0), position={"row": np.int64(3)})
        assert list(tmp_path.iterdir()) == []


def test_a_position_is_that_of_the_save_whoever_goes_on_with_it(tmp_path, monkeypatch):
    moved = threading.Event()

    async def late(self, *args, write=ocp.JsonCheckpointHandler._save_fn):
        await asyncio.to_thread(moved.wait, 10)
        await write(self, *args)

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", late)
    state, _ = start()
    place = {"epoch": 1, "files": [1]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, key=jax.random.key(0), position={"batches": place})
        place["epoch"] = 2
        place["files"].append(2)
        moved.set()
        assert checkpoints.restore(state).position == {"batches": {"epoch": 1, "files": [1]}}


@pytest.mark.slow
def test_the_state_may_be_donated_while_it_is_written(tmp_path):
    state, step = start()
    state, _ = run(state, step, jax.random.key(3), 1)
    before = jax.tree.map(np.array, state.params)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, key=jax.random.key(0))
        state, _ = run(state, step, jax.random.key(4), 3)
        saved = checkpoints.restore(state, step=1)
    assert_same(saved.state.params, before)


def test_frozen_parameters_are_not_written_and_come_from_the_model(tmp_path):
    def begin(seed):
        model = Transformer(ONE_LAYER, rngs=nnx.Rngs(seed))
        return train.init_state(model, OPTIMIZER, trainable=lambda name: name.startswith("norm"))

    state = begin(0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, key=jax.random.key(0))
        assert_same(checkpoints.parameters(), state.params)
        other = begin(1)
        saved = checkpoints.restore(other)
    assert_same(saved.state.params, state.params)
    assert_same(saved.state.frozen, other.frozen)
    written = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert written < sum(x.nbytes for x in state.frozen.values())


def test_a_dynamic_scale_is_stored(tmp_path):
    model = Transformer(ONE_LAYER, rngs=nnx.Rngs(0))
    state = train.init_state(model, OPTIMIZER, scale=DynamicScale())
    changed = dataclasses.replace(state, scale=state.scale.adjust(jnp.array(False)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(changed, key=jax.random.key(0))
        assert_same(checkpoints.restore(state).state, changed)
    assert changed.scale.value != state.scale.value


def test_an_optimiser_may_hold_arrays_without_numbers(tmp_path):
    """As `optax.contrib.galore` does for what it does not project."""
    state, _ = start()
    empty = {"q": jnp.zeros((0, 3), jnp.bfloat16)}
    state = dataclasses.replace(state, opt_state=(state.opt_state, empty))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, key=jax.random.key(0))
        assert checkpoints.steps == [0]
        assert_same(checkpoints.restore(state).state, state)


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)


def test_a_checkpoint_of_another_model_names_what_differs(tmp_path):
    state, _ = start()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, key=jax.random.key(0))
        for changes, words in (
            (
                {"vocab_size": 32},
                r"embed_tokens.weight is float32\[61, 24\] there, but .*\[32, 24\]",
            ),
            (
                {"tie_word_embeddings": True},
                r"lm_head.weight is float32\[61, 24\] there, but absent",
            ),
            (
                {"num_hidden_layers": 2, "layer_types": ()},
                r"layers.1.* is absent there, but float32",
            ),
        ):
            with pytest.raises(ValueError, match=words):
                checkpoints.restore(start(**changes)[0])


def test_importing_jaxllm_leaves_orbax_out():
    code = "import jaxllm, sys; sys.exit('orbax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_read_given_up_that_reports_late_fails_no_other_test():
    error = RuntimeError("Event loop is closed")
    report = types.SimpleNamespace(
        exc_type=RuntimeError, exc_value=error, exc_traceback=None, err_msg=None, object=None
    )
    hook = sys.unraisablehook
    while isinstance(hook, native._LateWriteHook):  # of a save before, which would pass it over
        hook = hook._hook
    hook(report)  # as pytest takes it from a thread of Orbax
