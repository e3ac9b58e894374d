"""What `fit` takes as data."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.data import adapters
from tests.trainer.tools import (
    assert_identical_weights,
    assert_same_weights,
    dataset,
    dense_model,
    mse,
    read_events,
    regression,
)

X, Y = regression(30)


def fit(data, **options):
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    trainer.fit(data, progress=False, **options)
    return trainer


class Sequence(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.passes = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]

    def on_epoch_end(self):
        self.passes += 1


def batches():
    for start in range(0, 30, 8):
        yield X[start : start + 8], Y[start : start + 8]


@pytest.mark.parametrize(
    "make", [lambda: Sequence(), lambda: batches, lambda: batches()], ids=["py", "function", "iterator"]
)
def test_python_batches_equal_a_dataset(make):
    ours, oracle = fit(make(), epochs=1), fit(dataset(X, Y, batch=8), epochs=1)
    assert ours._engine.counters.step == 4
    assert_same_weights(ours.model, oracle.model, 1e-7)


@pytest.mark.parametrize("kind", [tuple, list, lambda pair: {"inputs": pair[0], "targets": pair[1]}])
def test_a_list_of_batches_equals_a_dataset(kind):
    """Also of two batches of one size, where it might be taken for inputs and targets."""
    data = [kind((X[start : start + 10], Y[start : start + 10])) for start in (0, 10)]
    oracle = fit(dataset(X[:20], Y[:20], batch=10), epochs=2)
    ours = fit(data, epochs=2, eval_dataset={"first": data[:1], "both": data}, eval_every=2)
    assert ours._engine.counters.step == 4
    assert_same_weights(ours.model, oracle.model, 1e-7)
    assert ours.evaluate(data)["error"] == pytest.approx(oracle.evaluate((X[:20], Y[:20]))["error"], rel=1e-5)
    np.testing.assert_allclose(ours.predict(data), oracle.model(X[:20]), atol=1e-6)


def test_batches_in_a_list_may_differ_in_size():
    ours, oracle = fit(list(batches()), epochs=2), fit(dataset(X, Y, batch=8), epochs=2)
    assert_same_weights(ours.model, oracle.model, 1e-7)


def test_a_list_of_inputs_and_targets_is_one_set_of_arrays():
    assert adapters.is_examples([X, Y]) and adapters.is_examples([(X, Y), (Y, Y)]) and adapters.is_examples([[X], Y])
    assert adapters.is_examples(((X, Y), (X, Y))), "a tuple is always the structure of one batch"
    assert adapters.is_batches([(X, Y), (Y[:8], Y[:8])]) and not adapters.is_batches([(X, Y), (X, Y.astype("int32"))])


def test_a_py_dataset_is_passed_over_again_and_told_so():
    data = Sequence()
    trainer = fit(data, epochs=3)
    assert trainer._engine.counters.step == 12 and data.passes == 3
    assert fit(Sequence(), steps=9)._engine.counters.step == 9, "repeats by itself"


def test_an_iterator_is_good_for_one_pass():
    with pytest.raises(ValueError, match="^An iterator can be passed over once.*Pass the function that makes it"):
        fit(batches(), epochs=2)


def test_arrays_are_shuffled_batched_and_repeated():
    trainer = fit((X, Y), epochs=2, batch_size=8)
    assert trainer._engine.counters.step == 8
    assert fit((X, Y), steps=11, batch_size=8)._engine.counters.step == 11
    results = trainer.evaluate((X, Y), batch_size=7)
    assert results["error"] == pytest.approx(np.mean((trainer.model(X).numpy() - Y) ** 2), rel=1e-5)
    np.testing.assert_allclose(trainer.predict((X, Y), batch_size=7), trainer.model(X).numpy(), atol=1e-6)


def test_arrays_of_different_length():
    with pytest.raises(ValueError, match=r"The arrays have \[29, 30\] examples; all must have the same number"):
        fit((X, Y[:29]), epochs=1)


def test_evaluation_on_fewer_batches():
    trainer = fit((X, Y), epochs=1)
    data = dataset(X, Y, batch=8)
    part = trainer.evaluate(data, steps=2)["error"]
    assert part == pytest.approx(np.mean((trainer.model(X[:16]).numpy() - Y[:16]) ** 2), rel=1e-5)
    assert trainer.evaluate(data.repeat(), steps=2)["error"] == part, "an infinite dataset can be evaluated in part"


def test_nested_inputs():
    inputs = {"left": keras.Input((3,), name="left"), "right": (keras.Input((1,)), keras.Input((2,)))}
    joined = keras.layers.Concatenate()([inputs["left"], *inputs["right"]])
    keras.utils.set_random_seed(0)
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    parts = {"left": X, "right": (Y, X[:, :2])}
    trainer = Trainer(model, keras.optimizers.SGD(0.1), {"error": mse()})
    trainer.fit(tf.data.Dataset.from_tensor_slices((parts, Y)).batch(10), epochs=1, progress=False)
    kernel, bias = model.trainable_variables
    value = trainer.evaluate(tf.data.Dataset.from_tensor_slices((parts, Y)).batch(7))["error"]
    oracle = np.mean((np.concatenate([X, Y, X[:, :2]], 1) @ kernel.numpy() + bias.numpy() - Y) ** 2)
    assert value == pytest.approx(oracle, rel=1e-5)


def test_other_data_are_refused():
    with pytest.raises(TypeError, match="The dataset is a str; it must be a tf.data.Dataset of batches, arrays"):
        fit("file.csv", epochs=1)


def test_a_dataset_of_another_shape_is_named_before_it_is_traced_again():
    trainer = fit(dataset(X, Y, batch=8), epochs=1)
    with pytest.warns(UserWarning, match=r"the batches changed: 0: TensorSpec\(.*float64[^;]*\. Give all"):
        trainer.fit(dataset(X.astype("float64"), Y, batch=8), epochs=2, progress=False)


def waited(workdir, examples):
    """Seconds that the updates of a run with one row waited for data: a slow machine does not make them less."""
    ((_, values),) = read_events(workdir / "train")
    assert 0.0 <= values["throughput/data_wait"] <= 1.0
    return values["throughput/data_wait"] * examples / values["throughput/examples_per_second"]


def test_the_time_spent_waiting_for_data_is_measured(tmp_path):
    def slow():
        for batch in batches():
            time.sleep(0.05)
            yield batch

    with pytest.warns(UserWarning, match=r"cannot be saved \(PyFunc is stateful\)"):
        fit(slow, epochs=5, workdir=tmp_path, log_every=20)
    assert waited(tmp_path, 5 * 30) > 0.9, "20 batches of 50 ms each"


@pytest.mark.filterwarnings("ignore:The update calls Python")  # it keeps nothing
def test_the_time_that_updates_take_is_not_waiting_for_data(tmp_path):
    class Heavy(Trainer):
        """Each update takes 100 ms, in which the next batch is made ready."""

        def compute_losses(self, batch, training):
            pause = tf.py_function(lambda: time.sleep(0.1) or 0.0, [], tf.float32)
            return {"error": super().compute_losses(batch, training)["error"] + tf.reshape(pause, [])}

    trainer = Heavy(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    data = dataset(X[:24], Y[:24], batch=8).repeat().prefetch(8)
    trainer.fit(data, steps=20, workdir=tmp_path, log_every=20, progress=False)
    assert waited(tmp_path, 20 * 8) < 1.5, "20 updates take 2 s at least; batches that are ready take next to nothing"


def test_the_same_arrays_twice_give_the_same_bits():
    assert_identical_weights(fit((X, Y), epochs=2).model, fit((X, Y), epochs=2).model)
