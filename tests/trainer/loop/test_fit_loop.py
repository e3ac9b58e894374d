"""`fit`, `evaluate` and `predict`: steps and epochs, the schedule, and the state that each leaves alone."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.trainer.tools import (
    assert_identical_weights,
    assert_same_weights,
    dataset,
    dense_model,
    mse,
    read_events,
    regression,
    train,
)

X, Y = regression(32)


def make(model=None, **options):
    return Trainer(dense_model() if model is None else model, keras.optimizers.Adam(0.01), {"error": mse()}, **options)


@pytest.mark.parametrize("steps_per_call", [1, 3, "auto"])
@pytest.mark.parametrize("log_every", [1, 4])
def test_results_do_not_depend_on_how_the_calls_are_cut(steps_per_call, log_every):
    trainer, oracle = make(steps_per_call=steps_per_call), make()
    trainer.fit(dataset(X, Y, batch=4).repeat(), steps=11, log_every=log_every, progress=False)
    oracle.fit(dataset(X, Y, batch=4).repeat(), steps=11, log_every=11, progress=False)
    assert_identical_weights(trainer.model, oracle.model)


def test_one_trace_also_with_a_partial_batch_a_second_fit_and_another_dataset():
    traces = []

    class Counting(Trainer):
        def compute_losses(self, batch, training):
            traces.append(training)
            return super().compute_losses(batch, training)

    trainer = Counting(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()})
    trainer.fit(dataset(X[:30], Y[:30], batch=8), epochs=3, progress=False)
    trainer.fit(dataset(X, Y, batch=5), epochs=5, progress=False)
    assert traces == [True] and trainer._engine.calls.traces == 1
    for _ in range(2):
        trainer.evaluate(dataset(X, Y, batch=5))
    assert traces == [True, False]


def test_eager_equals_traced():
    traced, eager = make(), make(run_eagerly=True)
    for trainer in (traced, eager):
        trainer.fit(dataset(X, Y, batch=5), epochs=2, eval_dataset=dataset(X, Y, batch=5), progress=False)
    assert_same_weights(traced.model, eager.model)
    left, right = (trainer.evaluate(dataset(X, Y, batch=7)) for trainer in (traced, eager))
    assert left == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_xla_equals_plain(accumulation_steps):
    def model():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((6, 2)), keras.layers.LSTM(5), keras.layers.Dense(1)])

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 6, 2)).astype("float32"), rng.normal(size=(20, 1)).astype("float32")
    plain, compiled = model(), model()
    for each, jit in ((plain, False), (compiled, True)):
        train(each, dataset(x, y, batch=6), epochs=3, jit_compile=jit, accumulation_steps=accumulation_steps)
    assert_same_weights(plain, compiled)


def test_evaluation_leaves_training_alone():
    def model():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5, seed=3),
                keras.layers.Dense(1),
            ]
        )

    metric, other = keras.metrics.MeanAbsoluteError(name="mae"), keras.metrics.MeanAbsoluteError(name="mae")
    evaluated, oracle = make(model(), metrics=[metric]), make(model(), metrics=[other])
    data = dataset(X, Y, batch=4)
    history = evaluated.fit(data, epochs=2, eval_dataset=dataset(X, Y, batch=16), eval_every=3, progress=False).history
    expected = oracle.fit(data, epochs=2, progress=False).history
    assert_identical_weights(evaluated.model, oracle.model)
    assert history["mae"] == expected["mae"]
    # The loss is summed in float32 between two looks of the host, of which there are more here.
    assert history["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert "val_mae" in history and "val_mae" not in expected


def test_a_stateful_layer_evaluates_from_zero_and_trains_on():
    def model():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((4, 2), batch_size=8), keras.layers.GRU(3, stateful=True), keras.layers.Dense(1)]
        )

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 4, 2)).astype("float32"), rng.normal(size=(32, 1)).astype("float32")
    ours, oracle = model(), model()
    trainer = make(ours)
    trainer.fit(dataset(x, y, batch=8).repeat(), steps=3, progress=False)
    first = trainer.evaluate(dataset(x, y, batch=8))
    assert trainer.evaluate(dataset(x, y, batch=8)) == first
    states = [state.numpy() for state in ours.layers[0].states]
    assert np.abs(states[0]).max() > 0
    # The states are carried over batches as Keras does it.
    optimizer = keras.optimizers.Adam(0.01)
    for start in (0, 8, 16):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(oracle(x[start : start + 8], training=True) - y[start : start + 8]))
        optimizer.apply(tape.gradient(loss, oracle.trainable_weights), oracle.trainable_weights)
    assert_same_weights(ours, oracle)
    np.testing.assert_allclose(states[0], oracle.layers[0].states[0].numpy(), atol=1e-6)


def test_when_evaluations_and_epochs_happen_by_steps():
    trainer = make()
    seen = []
    spy = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(("begin", epoch, trainer._engine.counters.step)),
        on_epoch_end=lambda epoch, logs: seen.append(("end", epoch, trainer._engine.counters.step, "val_loss" in logs)),
    )
    data = dataset(X, Y, batch=8)
    trainer.fit(data.repeat(), steps=7, eval_dataset=data, eval_every=3, callbacks=[spy], progress=False)
    assert seen == [
        ("begin", 0, 0),
        ("end", 0, 3, True),
        ("begin", 1, 3),
        ("end", 1, 6, True),
        ("begin", 2, 6),
        ("end", 2, 7, True),
    ]


def test_predict_keeps_the_order_and_the_structure():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {"a": keras.layers.Dense(2)(inputs), "b": inputs})
    trainer = Trainer(model, "sgd", {"a": mse(), "b": mse()})
    outputs = trainer.predict(dataset(X, Y, batch=7))
    np.testing.assert_array_equal(outputs["b"], X)
    np.testing.assert_allclose(outputs["a"], model(X)["a"].numpy(), atol=1e-6)


def test_an_unbuilt_model_is_built_by_the_first_batch():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = keras.layers.Dense(4), keras.layers.Dense(1)

        def call(self, inputs, training=False):
            return self.out(self.hidden(inputs))

    keras.utils.set_random_seed(0)
    ours = Net()
    trainer = make(ours)
    trainer.fit(dataset(X, Y, batch=8), epochs=2, progress=False)
    assert ours.built and len(ours.trainable_variables) == 4
    assert trainer.evaluate(dataset(X, Y, batch=8))["loss"] < np.mean(Y**2) * 5


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    """Killed after the checkpoint of step 6 (7 and 8 are logged and lost), off the boundary of an epoch."""

    def model():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5, seed=3),
                keras.layers.Dense(1),
            ]
        )

    def data():
        return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(32, seed=4).batch(4).repeat()

    def fit(workdir, steps, **options):
        trainer = make(model(), ema_decay=0.9, accumulation_steps=3, metrics=[keras.metrics.MeanAbsoluteError()])
        trainer.fit(data(), steps=steps, log_every=2, workdir=workdir, progress=False, **options)
        return trainer

    whole = fit(tmp_path / "whole", 10)

    class Killed(Exception):
        pass

    def die(batch, logs):
        if batch == 7:
            raise Killed

    with pytest.raises(Killed):
        fit(
            tmp_path / "killed",
            10,
            checkpoint_every=6,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=die)],
        )
    resumed = fit(tmp_path / "killed", 10)
    assert resumed._engine.counters.step == 10
    for left, right in zip(whole.model.variables, resumed.model.variables, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())
    for left, right in zip(whole._engine.main.pipeline.averages, resumed._engine.main.pipeline.averages, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())
    left, right = read_events(tmp_path / "whole" / "train"), read_events(tmp_path / "killed" / "train")
    assert [step for step, _ in left] == [step for step, _ in right] == [2, 4, 6, 8, 10]
    for (_, a), (_, b) in zip(left, right, strict=True):
        for tag in set(a) - {"throughput/examples_per_second", "throughput/data_wait"}:
            assert a[tag] == pytest.approx(b[tag], rel=1e-6), tag


def test_a_run_killed_before_its_first_checkpoint_logs_each_step_once(tmp_path):
    def die(batch, logs):
        if batch == 5:
            raise KeyboardInterrupt

    data = dataset(X, Y, batch=4).repeat()
    killer = keras.callbacks.LambdaCallback(on_train_batch_end=die)
    with pytest.raises(KeyboardInterrupt):
        make().fit(data, steps=10, log_every=2, workdir=tmp_path, progress=False, callbacks=[killer])
    assert [step for step, _ in read_events(tmp_path / "train")] == [2, 4]
    make().fit(data, steps=10, log_every=2, workdir=tmp_path, progress=False)
    assert [step for step, _ in read_events(tmp_path / "train")] == [2, 4, 6, 8, 10]


DETERMINISTIC = """
import keras, numpy as np, tensorflow as tf
from looptape import Trainer
keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()
x, mse = np.ones((8, 3), np.float32), keras.losses.MeanSquaredError()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
for parts in (1, 2):
    trainer = Trainer(model, keras.optimizers.SGD(0.1), {"e": mse}, accumulation_steps=parts)
    trainer.fit(tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2).repeat(), steps=3, progress=False)
print("trained", trainer._engine.counters.step)
"""


def test_deterministic_operations_may_not_ask_for_the_time():
    """In a process of its own: determinism cannot be switched off again."""
    done = subprocess.run([sys.executable, "-c", DETERMINISTIC], capture_output=True, text=True, check=False)
    assert "trained 3" in done.stdout, done.stderr[-2000:]


def test_a_finished_run_leaves_weights_and_model(tmp_path):
    trainer = make()
    trainer.fit(dataset(X, Y, batch=8).repeat(), steps=2, workdir=tmp_path, progress=False)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), trainer.model.predict(X, verbose=0))
    other = dense_model(seed=9)
    other.load_weights(tmp_path / "model.weights.h5")
    assert_identical_weights(other, trainer.model)
