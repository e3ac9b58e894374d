"""What hooks assign at once does not move in a skipped update, and costs nothing where there is nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.step.forward.hook_state import assigned
from tests.trainer.tools import dataset, linear_model, mse, regression

X, Y = regression(24)
BROKEN = 2


def batches(broken):
    x = X.copy()
    if broken:
        x[4 * BROKEN, 1] = np.nan
    return tf.data.Dataset.from_tensor_slices((x, Y)).batch(4)


class Centred(Trainer):
    """Assigns in a loss and in a step, below and beside the pipeline."""

    def train_step(self, batch):
        found = self.minimize(batch)
        self.average.assign(0.9 * self.average + 0.1 * found["error"])
        return {}

    def compute_losses(self, batch, training):
        outputs = self.model(batch[0], training=training)
        if training:
            self.center.assign(tf.reduce_mean(outputs))
            self.count.assign_add(1)
        return {"error": tf.square(outputs - batch[1] - 0.1 * self.center)}


def make(**options):
    trainer = Centred(linear_model(), keras.optimizers.SGD(0.1), **options)
    trainer.center, trainer.count = tf.Variable(0.0), tf.Variable(0)
    trainer.average = keras.Variable(0.0, trainable=False)
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_call": 8},
        pytest.param({"health_every": 1}, marks=pytest.mark.long),
        pytest.param({"run_eagerly": True}, marks=pytest.mark.long),
        pytest.param({"accumulation_steps": 2}, marks=pytest.mark.long),
    ],
)
def test_a_skipped_update_moves_nothing_that_hooks_assign(options):
    """As if the batch had not been there."""
    trainer, oracle = make(**options), make(**options)
    accumulated = options.get("accumulation_steps", 1)
    trainer.fit(batches(broken=True), steps=6 // accumulated, progress=False)
    kept = np.arange(24) // (4 * accumulated) != BROKEN // accumulated
    oracle.fit(dataset(X[kept], Y[kept], batch=4), steps=6 // accumulated - 1, progress=False)
    assert trainer._engine.counters.skips.total == 1
    for name in ("center", "count", "average"):
        value = getattr(trainer, name).numpy()
        np.testing.assert_array_equal(value, getattr(oracle, name).numpy(), err_msg=name)
    np.testing.assert_array_equal(trainer.model.get_weights()[0], oracle.model.get_weights()[0])
    assert int(trainer.count) == 6 - accumulated


class Logging(Trainer):
    def compute_losses(self, batch, training):
        self.log_histogram("inputs", batch[0])
        return super().compute_losses(batch, training)


def test_models_without_such_variables_are_traced_once_and_copy_nothing():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    losses = {"error": mse(), "size": lambda targets, outputs: tf.square(outputs)}
    options = {"clip_norm": 1.0, "ema_decay": 0.9, "metrics": {"mae": "mae"}, "combiner": "uncertainty"}
    trainer = Logging(model, "adam", losses, **options)
    trainer.on_spike = "skip"
    trainer.fit(batches(broken=False), steps=2, progress=False)
    assert trainer._engine.hook_state.variables == [] and trainer._engine.calls.traces == 1


def test_variables_that_a_graph_assigns_in_functions_and_loops():
    written, read, inside = tf.Variable(0.0), tf.Variable(1.0), tf.Variable(2.0)

    @tf.function(jit_compile=True)
    def compiled(x):
        inside.assign_add(x)
        return x * read

    @tf.function
    def graph():
        def body(index):
            tf.cond(index > 1, lambda: written.assign(compiled(3.0)), lambda: tf.constant(0.0))
            return index + 1

        return tf.while_loop(lambda index: index < 3, body, [0])

    found = assigned(graph.get_concrete_function().graph)
    assert {id(variable) for variable in found} == {id(written), id(inside)}
