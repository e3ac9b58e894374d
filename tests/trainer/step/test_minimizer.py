"""Several calls of `minimize` in one `train_step`: names, arguments, and what is logged."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer import Trainer
from tests.trainer.tools import assert_same_weights, dataset, dense_model, linear_model, mse, read_events, regression

X, Y = regression(16)


def fit(trainer, steps=2, **options):
    trainer.fit(dataset(X, Y, batch=8).repeat(), steps=steps, progress=False, **options)
    return trainer


def other_losses(batch, training):
    return {"error": tf.ones([8])}


@pytest.mark.parametrize("argument", ["variables", "optimizer", "compute_losses", "loss_weights"])
def test_a_second_call_with_the_same_name_and_other_arguments_is_refused(argument):
    class Twice(Trainer):
        def train_step(self, batch):
            first, second = self.model.layers
            own = {
                "variables": first.trainable_variables,
                "optimizer": self.optimizer,
                "compute_losses": self.compute_losses,
                "loss_weights": {"error": 1.0},
            }
            other = {
                "variables": second.trainable_variables,
                "optimizer": self.other,
                "compute_losses": other_losses,
                "loss_weights": {"error": 2.0},
            }
            self.minimize(batch, **own)
            self.minimize(batch, **{**own, argument: other[argument]})
            return {}

    trainer = Twice(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    trainer.other = keras.optimizers.SGD(0.5)
    with pytest.raises(ValueError, match=f"name='' before.*other `{argument}`; .*Give each of them a name of its own"):
        fit(trainer)


@pytest.mark.parametrize("argument", ["compute_losses", "loss_weights"])
def test_a_function_that_a_loop_writes_again_belongs_before_the_loop(argument):
    class Looped(Trainer):
        def train_step(self, batch):
            for _ in range(2):
                written = {
                    "compute_losses": lambda batch, training: self.compute_losses(batch, training),
                    "loss_weights": {"error": lambda step: 1.0},
                }
                self.minimize(batch, name="all", **{argument: written[argument]})
            return {}

    with pytest.raises(ValueError, match=f"other `{argument}`; .*another one in each pass. Write it before the loop"):
        fit(Looped(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()}))


def test_calls_that_repeat_their_arguments_are_logged_as_one_mean(tmp_path):
    class Thrice(Trainer):
        def train_step(self, batch):
            for _ in range(3):
                self.minimize(batch, self.compute_losses, variables=self.model.trainable_variables, name="all")
            return {}

    trainer = fit(Thrice(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()}), workdir=tmp_path, log_every=1)
    oracle, values, norms = linear_model(), [], []
    for step in range(2):
        x, y = X[8 * step : 8 * step + 8], Y[8 * step : 8 * step + 8]
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(oracle(x) - y))
            gradients = tape.gradient(loss, oracle.trainable_variables)
            values.append(loss.numpy())
            norms.append(tf.linalg.global_norm(gradients).numpy())
            for variable, gradient in zip(oracle.trainable_variables, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)
    assert_same_weights(trainer.model, oracle)
    for step, row in read_events(tmp_path / "train"):
        if "loss/all/error" in row:
            part = slice(3 * step - 3, 3 * step)
            np.testing.assert_allclose(row["loss/all/error"], np.mean(values[part]), rtol=1e-5)
            np.testing.assert_allclose(row["optimizer/gradient_norm/all/global"], np.mean(norms[part]), rtol=1e-5)
    history = trainer.fit(dataset(X, Y, batch=8).repeat(), steps=4, progress=False).history
    np.testing.assert_allclose(history["loss"], history["all/error"], rtol=1e-6)


def test_functions_written_in_the_train_step_may_be_traced_again():
    class Inline(Trainer):
        def train_step(self, batch):
            self.minimize(batch, lambda batch, training: self.compute_losses(batch, training), name="inline")
            return {}

    trainer = fit(Inline(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()}, probe_every=1))
    assert trainer._engine.counters.step == 2


def test_a_loss_written_in_train_step_sees_the_tensors_of_its_own_trace():
    """A second trace, of batches of another shape, has another function of the same name and other tensors."""

    class Noisy(Trainer):
        def train_step(self, batch):
            x, y = batch
            shift = tf.reduce_mean(y)
            self.minimize(batch, lambda batch, training: {"error": tf.square(self.model(x) - shift)[:, 0]}, name="one")
            return {}

    x, y = regression(12)
    trainer = Noisy(linear_model(), keras.optimizers.SGD(0.1))
    trainer.fit(tf.data.Dataset.from_tensors((x, y)).repeat(), steps=1, progress=False)
    with pytest.warns(UserWarning, match="traced again"):
        trainer.fit(tf.data.Dataset.from_tensors((x[:5], y[:5])).repeat(), steps=3, progress=False)
    kernel, bias = (v.numpy().astype(np.float64) for v in linear_model().weights)
    for rows in (12, 5, 5):
        error = x[:rows] @ kernel + bias - y[:rows].mean()
        kernel = kernel - 0.1 * 2 * x[:rows].T @ error / rows
        bias = bias - 0.1 * 2 * error.mean()
    np.testing.assert_allclose(trainer.model.get_weights()[0], kernel, rtol=1e-5)
