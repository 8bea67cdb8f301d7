import dataclasses
import gc
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import TINY

from jaxllm import train
from jaxllm.checkpoint.native import Checkpoints
from jaxllm.model import Transformer

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
            state = dataclasses.replace(state, step=jnp.int32(step))
            checkpoints.save(state, key=key, loss=loss)
        checkpoints.save(state, key=key)  # the step is there: nothing happens
    with Checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.latest_step, checkpoints.best_step) == (5, 2)
        best = checkpoints.restore(state, step=2)
        latest = checkpoints.restore(state)
        with pytest.raises(FileNotFoundError, match="step 4 was not saved here; .* were: 2, 5"):
            checkpoints.restore(state, step=4)
    assert (best.state.step, best.loss) == (2, 1.5)
    assert (latest.state.step, latest.loss) == (5, None)
    assert_same(latest.state, state)
    assert jax.random.key_impl(latest.key) == "rbg"


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


# What Orbax gave up on halfway (tasks of a loop that is closed) complains when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("part", ["state", "notes", "state/manifest.ocdbt"])
def test_a_torn_checkpoint_is_one_sentence(tmp_path, part):
    state, _ = start()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, key=jax.random.key(0))
    torn = tmp_path / "0" / part
    if torn.is_dir():
        torn.rename(tmp_path / "elsewhere")
    else:
        torn.write_bytes(torn.read_bytes()[:9])
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="0: this checkpoint cannot be read, a part of it") as error,
    ):
        checkpoints.restore(state)
    assert "\n" not in str(error.value)
    del error
    gc.collect()


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
    sys.unraisablehook(report)  # as pytest takes it from a thread of Orbax
