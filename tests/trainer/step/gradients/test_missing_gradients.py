"""Why no gradient reaches a variable, and what the trainer does about it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.trainer.tools import dataset, mse, regression

DATA = dataset(*regression(16), batch=8)


class Unused(keras.Model):
    """One layer is used, one reaches no loss, one is cut off, one is cast away, one is never called."""

    def __init__(self):
        super().__init__()
        names = ("used", "idle", "detached", "counted", "forgotten")
        self.used, self.idle, self.detached, self.counted, self.forgotten = (
            keras.layers.Dense(1, name=name, use_bias=False) for name in names
        )
        for name in names:
            getattr(self, name).build((None, 3))
        self.built = True

    def call(self, x):
        self.idle(x)
        count = tf.cast(tf.cast(self.counted(x), tf.int32), tf.float32)
        return self.used(x) + tf.stop_gradient(self.detached(x)) + count


def test_why_no_gradient_reaches_a_variable():
    with pytest.raises(RuntimeError) as caught:
        Trainer(Unused(), "sgd", {"error": mse()}).fit(DATA, steps=1, progress=False)
    message = str(caught.value)
    assert "from any loss (error)" in message
    assert "idle/kernel: it is read, but nothing that is computed from it enters a loss" in message
    assert "detached/kernel: its path to the losses is cut by `tf.stop_gradient`" in message
    assert "counted/kernel: its path to the losses is cut by a cast to int32" in message
    assert "forgotten/kernel: it is not read in the forward pass" in message
    assert "used/kernel" not in message


def test_the_policy_for_variables_without_a_gradient():
    class Warning_(Trainer):
        on_none_gradient = "warn"

    class Ignoring(Trainer):
        on_none_gradient = "ignore"

    trainer = Warning_(Unused(), "sgd", {"error": mse()})
    with pytest.warns(UserWarning, match="No gradient reaches"):
        trainer.fit(DATA, steps=1, progress=False)
    model = Unused()
    before = {v.path: v.numpy() for v in model.trainable_variables}
    Ignoring(model, keras.optimizers.SGD(0.1), {"error": mse()}).fit(DATA, steps=1, progress=False)
    moved = [v.path for v in model.trainable_variables if not np.array_equal(before[v.path], v.numpy())]
    assert len(moved) == 1 and "used" in moved[0]
