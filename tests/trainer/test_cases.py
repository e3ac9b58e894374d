"""Cases D and E of the problems behind the project, with values worked out by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.losses import summed
from tests.trainer.tools import assert_same_weights, dataset, linear_model, mse, regression, train


def test_fits_a_line():
    x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
    model = linear_model(features=1)
    train(model, dataset(x, 3 * x + 2, batch=64).repeat(), keras.optimizers.SGD(0.5), steps=200)
    kernel, bias = (w.numpy() for w in model.trainable_variables)
    assert kernel.item() == pytest.approx(3, abs=1e-4) and bias.item() == pytest.approx(2, abs=1e-4)


class Logits(keras.Model):
    """A model that is a vector."""

    def __init__(self, values):
        super().__init__()
        self.theta = self.add_weight(shape=(len(values),), initializer=lambda shape, dtype: tf.constant(values, dtype))

    def call(self, inputs):
        return self.theta + 0.0 * tf.reduce_sum(inputs)


def test_a_policy_objective_moves_by_its_gradient():
    """−Σ softmax(θ)·r with θ = (.5, −.5), r = (1, 2): gradient (.19661193, −.19661194), θ' = (.4803388, −.4803388)."""

    class Policy(Trainer):
        def compute_losses(self, batch, training):
            return {"policy": -tf.reduce_sum(tf.nn.softmax(self.model(batch)) * batch[0])}

    model = Logits([0.5, -0.5])
    data = tf.data.Dataset.from_tensors(tf.constant([[1.0, 2.0]])).repeat()
    train(model, data, keras.optimizers.SGD(0.1), steps=1, trainer_class=Policy)
    np.testing.assert_allclose(model.theta.numpy(), [0.4803388, -0.4803388], atol=1e-7)


@pytest.mark.parametrize(
    ("loss", "gradient"),
    [
        # Σ over the example of d/dz at logits z = (0.5, −0.5) with labels (1, 0).
        (
            lambda y, z: tf.nn.sigmoid_cross_entropy_with_logits(y, z),
            [1 / (1 + np.exp(-0.5)) - 1, 1 / (1 + np.exp(0.5))],
        ),
        # Hinge max(0, 1 − s·z) with signs (1, −1): both margins are violated.
        (lambda y, z: tf.maximum(0.0, 1.0 - (2 * y - 1) * z), [-1.0, 1.0]),
    ],
)
def test_classification_losses_have_their_gradients(loss, gradient):
    class Classifier(Trainer):
        def compute_losses(self, batch, training):
            return {"loss": summed(loss(batch[0], self.model(batch)))}

    model = Logits([0.5, -0.5])
    data = tf.data.Dataset.from_tensors(tf.constant([[1.0, 0.0]])).repeat()
    train(model, data, keras.optimizers.SGD(1.0), steps=1, trainer_class=Classifier)
    np.testing.assert_allclose(np.array([0.5, -0.5]) - model.theta.numpy(), gradient, atol=1e-6)


def test_second_derivatives_in_a_loss_by_nested_tapes():
    """u = w·x³ has u'' = 6·w·x; the loss (u'' − 12x)² has the gradient 2·(6w − 12)·6·x²."""

    class Cubic(keras.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return self.w * x**3

    class Residual(Trainer):
        def compute_losses(self, batch, training):
            x = batch
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    u = self.model(x)
                first = inner.gradient(u, x)
            second = outer.gradient(first, x)
            return {"residual": tf.square(second - 12 * x)[:, 0]}

    model = Cubic()
    model.build((None, 1))
    x = np.array([[0.5], [1.0], [2.0]], dtype="float32")
    train(model, tf.data.Dataset.from_tensors(x).repeat(), keras.optimizers.SGD(1e-3), steps=1, trainer_class=Residual)
    expected = 1 - 1e-3 * np.mean(2 * (6 - 12) * 6 * x**2)
    assert model.w.numpy() == pytest.approx(expected, rel=1e-6)


def test_error_plus_a_tenth_of_l1():
    x, y = regression(30)

    class Sparse(Trainer):
        def compute_losses(self, batch, training):
            losses = super().compute_losses(batch, training)
            return {**losses, "l1": tf.reduce_sum(tf.abs(self.model.trainable_variables[0]))}

    ours = linear_model()
    kernel, bias = (w.numpy().astype("float64") for w in ours.trainable_variables)
    train(
        ours,
        dataset(x, y, batch=30).repeat(),
        losses={"error": mse()},
        steps=3,
        trainer_class=Sparse,
        loss_weights={"error": 1.0, "l1": 0.1},
    )
    for _ in range(3):
        error = x @ kernel + bias - y
        kernel, bias = (
            kernel - 0.1 * (2 * x.T @ error / 30 + 0.1 * np.sign(kernel)),
            bias - 0.1 * 2 * error.mean(axis=0),
        )
    np.testing.assert_allclose(ours.trainable_variables[0].numpy(), kernel, atol=1e-5)


def test_three_micro_batches_are_a_mean_not_a_sum():
    x, y = regression(30)
    three, one = linear_model(), linear_model()
    train(three, dataset(x, y, batch=10).repeat(), steps=4, accumulation_steps=3)
    train(one, dataset(x, y, batch=30).repeat(), steps=4)
    assert_same_weights(three, one)


def test_autograph_loops_and_branches_in_a_hook():
    """x³ by a loop in the hook, written as plain Python: the gradient at x = 2 is 12."""

    class Loop(Trainer):
        def compute_losses(self, batch, training):
            x, result = self.model(batch)[0], tf.constant(1.0)
            for _ in tf.range(tf.cast(batch[0, 0], tf.int32)):
                if result > 0:  # noqa: SIM108 (a branch in the loop is what is tested)
                    result = result * x
                else:
                    result = result * 0.0
            return {"cube": result}

    model = Logits([2.0])
    data = tf.data.Dataset.from_tensors(tf.constant([[3.0]])).repeat()
    train(model, data, keras.optimizers.SGD(1.0), steps=1, trainer_class=Loop)
    assert model.theta.numpy()[0] == pytest.approx(2 - 12, rel=1e-6)
