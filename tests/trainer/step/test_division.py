"""`accumulation_steps="auto"`: batches that do not fit into memory are divided, and the update is repeated."""

import os
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses
from looptape.trainer import arguments
from tests.reliability.tools import REPOSITORY
from tests.trainer.tools import assert_same_weights, dense_model, mse, regression

X, Y = regression(48)

pytestmark = pytest.mark.filterwarnings("ignore:The update calls Python")  # to look, or to run out of memory


class Narrow(keras.layers.Layer):
    """Has memory for so many rows at once, and ends with TensorFlow's error where there are more."""

    def __init__(self, rows, **options):
        super().__init__(**options)
        self.limit, self.failures = rows, 0

    def call(self, inputs, training=False):
        if not training:
            return inputs

        def allocate(rows):
            if self.limit is not None and int(rows) > self.limit:
                self.failures += 1
                raise MemoryError(f"OOM when allocating a tensor with {rows} rows")

        allocated = tf.py_function(allocate, [tf.shape(inputs)[0]], [])
        with tf.control_dependencies([allocated] if allocated is not None else []):
            return tf.identity(inputs)


def make(rows=None, accumulation_steps="auto", **options):
    inner = dense_model()
    narrow = Narrow(rows)
    model = keras.Sequential([keras.Input((3,)), narrow, *inner.layers])
    made = {"combiner": options.pop("combiner")()} if "combiner" in options else {}
    options = {"losses": {"error": mse()}, **options, **made}
    trainer = Trainer(model, keras.optimizers.SGD(0.05, momentum=0.9), accumulation_steps=accumulation_steps, **options)
    trainer.narrow = narrow
    return trainer


def data():
    """Batches of 8."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(48, seed=1).repeat().batch(8)


def fit(trainer, steps, dataset=None, **options):
    tf.random.set_seed(3)
    return trainer.fit(data() if dataset is None else dataset, steps=steps, progress=False, **options)


def _two_losses(y, outputs):
    return tf.abs(y - outputs)[:, 0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.1, "ema_decay": 0.9, "metrics": {"mae": "mae"}},
        {"losses": {"error": "mse", "size": _two_losses}, "combiner": losses.Uncertainty},
        {"losses": {"error": "mse", "size": _two_losses}, "combiner": losses.PCGrad},
        {"probe_every": 2, "losses": {"error": "mse", "size": _two_losses}},
        {"health_every": 2},
    ],
    ids=["plain", "clipped and averaged", "learned weights", "gradients per loss", "probed", "examined"],
)
def test_an_update_that_does_not_fit_is_repeated_in_parts_and_equals_the_whole(options, caplog):
    whole, divided = make(None, 1, **options), make(3, **options)
    expected = fit(whole, 5)
    found = fit(divided, 5)
    assert_same_weights(whole.model, divided.model)
    assert divided._engine.counters.divisions == 4 and divided.narrow.failures == 2, "8 rows, 4 rows, 2 rows"
    assert int(divided.step.numpy()) == 5 and int(divided.optimizer.iterations) == 5
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], rtol=1e-5)
    said = [record.message for record in caplog.records if "did not fit into memory" in record.message]
    assert len(said) == 1 and "its 8 examples at once. Each batch is divided into 4 micro-batches" in said[0]


def test_an_update_in_the_middle_of_a_call_is_repeated_with_its_own_data():
    """Sizes grow during the run, so that the call ends after some of its updates."""
    whole, divided = make(None, 1), make(5)
    sizes = [4, 4, 5, 8, 3, 8]

    def batches():
        for index, size in enumerate(sizes):
            yield X[index : index + size], Y[index : index + size]

    spec = tuple(tf.TensorSpec([None, size], tf.float32) for size in (3, 1))
    stream = tf.data.Dataset.from_generator(batches, output_signature=spec)  # its position cannot be saved
    listed = [tuple(batch) for batch in batches()]
    for trainer, dataset in ((whole, lambda: iter(listed)), (divided, stream)):
        fit(trainer, 6, dataset)
    assert_same_weights(whole.model, divided.model)
    assert divided._engine.counters.divisions == 2


def test_the_search_for_a_learning_rate_divides_its_batches_too():
    whole, divided = make(None, 1), make(3)
    expected, found = (trainer.find_learning_rate(data(), lowest=1e-3, steps=10) for trainer in (whole, divided))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert divided.narrow.failures == 2 and divided._engine.counters.divisions == 1, "nothing is changed"
    fit(whole, 4), fit(divided, 4)
    assert_same_weights(whole.model, divided.model)


def test_data_whose_position_can_be_saved_are_fetched_again_at_full_speed():
    trainer = make(3)
    fit(trainer, 4)
    assert not trainer._engine.calls._holding


def test_the_division_is_kept_in_the_checkpoint(tmp_path):
    whole, first, second = make(None, 1), make(3), make(3)
    fit(whole, 6)
    fit(first, 3, workdir=tmp_path)
    fit(second, 6, workdir=tmp_path)
    assert first.narrow.failures == 2 and second.narrow.failures == 0
    assert second._engine.counters.divisions == 4
    assert_same_weights(whole.model, second.model)


def test_a_batch_of_fewer_rows_than_parts_is_exact_too():
    """A part without rows would make statistics NaN."""
    whole, divided = make(None, 1), make(1)
    odd = [(X[:8], Y[:8]), (X[8:11], Y[8:11])]
    for trainer in (whole, divided):
        trainer.fit(lambda: iter(odd), epochs=2, progress=False)
    assert_same_weights(whole.model, divided.model)
    assert divided._engine.counters.divisions == 8


def test_memory_too_small_for_one_example_is_the_error_of_tensorflow():
    trainer = make(4)
    trainer.narrow.limit = 0
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        fit(trainer, 3)
    assert "divided into 8 micro-batches, and even these do not fit" in caught.value.__notes__[0]
    assert int(trainer.step.numpy()) == 0


def test_memory_that_ends_while_weights_are_written_is_an_error_and_not_half_an_update(monkeypatch):
    trainer = make(None)
    fit(trainer, 1)
    trainer._engine.division._writing.assign(True)
    error = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating a copy")
    found = trainer._engine.division.ran_out(error)
    assert isinstance(found, RuntimeError) and "a part of the weights is new and a part is old" in str(found)


def test_the_flag_of_a_write_is_set_while_the_optimizer_writes_and_not_afterwards():
    seen = []

    class Watching(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            def look(gradient):
                seen.append(bool(trainer._engine.division._writing.numpy()))
                return gradient

            looked = tf.ensure_shape(tf.py_function(look, [gradient], tf.float32), gradient.shape)
            super().update_step(looked, variable, learning_rate)

    trainer = Trainer(dense_model(), Watching(0.1), {"error": "mse"}, accumulation_steps="auto")
    fit(trainer, 3)
    assert seen and all(seen) and not trainer._engine.division._writing.numpy()


def test_bad_input():
    with pytest.raises(ValueError, match="`accumulation_steps` is 'automatic'; it must be .* or 'auto'"):
        make(None, "automatic")
    with pytest.raises(ValueError, match="`bptt_updates` is set with .*accumulation_steps=auto"):
        make(None, "auto", bptt_window=2, bptt_updates=True)
    with pytest.raises(ValueError, match="'auto' with 2 replicas; an update can be repeated on one device only"):
        arguments.check_accumulation("auto", types.SimpleNamespace(num_replicas_in_sync=2))


def test_without_auto_the_error_is_that_of_tensorflow():
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating"):
        fit(make(3, 1), 2)


_LIMITED = """
import sys, keras, numpy as np, tensorflow as tf
from looptape import Trainer
accumulation = sys.argv[1]
keras.utils.set_random_seed(1)

class Waves(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return tf.sin(x * self.scale)

model = keras.Sequential([keras.Input((512,)), *[Waves() for _ in range(8)]])
x = np.random.default_rng(0).normal(size=(4096, 512)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x)).repeat().batch(4096)
trainer = Trainer(model, keras.optimizers.SGD(0.01), {"error": "mse"},
                  accumulation_steps="auto" if accumulation == "auto" else int(accumulation))
trainer.fit(data, steps=3, progress=False)
print(trainer._engine.counters.divisions, *[float(np.abs(w).sum()) for w in model.get_weights()])
"""


@pytest.mark.long
def test_a_process_with_limited_memory_trains_with_divided_batches():
    """TensorFlow's host memory is limited to less than a whole batch needs: 8 MB for each of some 20 activations.

    Without matrix products: oneDNN's kernels end the process where they get no memory.
    """

    def run(accumulation, megabytes=None):
        environment = {**os.environ, "PYTHONPATH": REPOSITORY, "TF_CPP_MIN_LOG_LEVEL": "3"}
        if megabytes:
            environment["TF_MKL_ALLOC_MAX_BYTES"] = str(megabytes * 10**6)
        command = [sys.executable, "-c", _LIMITED, accumulation]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)

    refused = run("1", 160)
    if refused.returncode == 0:
        pytest.skip("this build of TensorFlow has no limit for the memory of the host")
    assert "ResourceExhaustedError" in refused.stderr, "it does not fit"
    limited, free = run("auto", 160), run("1")
    assert limited.returncode == 0, limited.stderr
    divisions, *found = map(float, limited.stdout.split())
    _, *expected = map(float, free.stdout.split())
    assert divisions > 1
    np.testing.assert_allclose(found, expected, rtol=1e-5)


PHASES = {0: 1, 3: 2, 5: 1}


def small_batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(4)


def test_accumulation_by_step_equals_batches_put_together_by_hand():
    trainer, oracle = make(None, PHASES), make(None, 1)
    fit(trainer, 7, small_batches())
    stream, joined = iter(small_batches()), []
    for count in (1, 1, 1, 2, 2, 1, 1):
        parts = [next(stream) for _ in range(count)]
        joined.append(tuple(np.concatenate(leaves) for leaves in zip(*parts, strict=True)))
    fit(oracle, 7, lambda: iter(joined))
    assert_same_weights(trainer.model, oracle.model)
    assert trainer._engine.calls.traces == 3, "one for each phase"


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_run_with_accumulation_by_step_resumes_exactly(stop, tmp_path):
    """Before, at and after a change."""
    whole, first, second = (make(None, PHASES) for _ in range(3))
    fit(whole, 6, small_batches())
    fit(first, stop, small_batches(), workdir=tmp_path)
    fit(second, 6, small_batches(), workdir=tmp_path)
    assert_same_weights(whole.model, second.model, tolerance=0)


def test_a_dataset_too_short_for_a_schedule_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match="The dataset ends at step 5, before steps=6"):
        make(None, PHASES).fit(small_batches().take(7), steps=6, progress=False)


def test_bad_schedules():
    with pytest.raises(ValueError, match="must begin at step 0"):
        make(None, {5: 2})
    with pytest.raises(ValueError, match="`accumulation_steps` is 0; it must be at least 1"):
        make(None, {0: 0})
    with pytest.raises(TypeError, match="`accumulation_steps` is 'a'; it must be an integer of at least 0"):
        make(None, {"a": 1})
    for inner in ("auto", {0: 1}):
        with pytest.raises(TypeError, match="A schedule holds numbers of micro-batches by step. Use e.g. {0: 1, 1000"):
            make(None, {0: 1, 5: inner})
