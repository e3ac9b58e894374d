"""`transform_gradients`: what it logs, what it may return."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer import Trainer
from tests.trainer.tools import assert_same_weights, dataset, linear_model, mse, regression, weights

X, Y = regression(16)
DATA = dataset(X, Y, batch=8)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("eager", [False, True])
def test_logs_of_probed_updates(eager, accumulation_steps):
    class Logging(Trainer):
        def transform_gradients(self, gradients, variables):
            self.log("count", float(len(gradients)))
            return gradients

    losses = {"error": mse(), "size": keras.losses.MeanAbsoluteError()}
    options = {"run_eagerly": eager, "accumulation_steps": accumulation_steps}
    trainer = Logging(linear_model(), keras.optimizers.SGD(0.1), losses, probe_every=2, **options)
    assert trainer.fit(DATA.repeat(), steps=4, progress=False).history["count"] == [2.0]


def test_logs_are_weighted_by_the_examples_of_all_micro_batches():
    """Updates of 12 and of 4 examples: their means count 3 to 1."""

    class Logging(Trainer):
        def transform_gradients(self, gradients, variables):
            self.log("first", tf.where(self.step == 0, 1.0, 0.0))
            return gradients

    trainer = Logging(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()}, accumulation_steps=3)
    assert trainer.fit(dataset(X, Y, batch=4), epochs=1, progress=False).history["first"] == [0.75]


@pytest.mark.parametrize("eager", [False, True])
def test_python_conditions_on_tensors(eager):
    class Halving(Trainer):
        def transform_gradients(self, gradients, variables):
            if self.step % 2 == 1:
                gradients = [0.5 * g for g in gradients]
            return gradients

    model, by_hand = linear_model(), linear_model()
    Halving(model, keras.optimizers.SGD(0.1), {"error": mse()}, run_eagerly=eager).fit(DATA, epochs=1, progress=False)
    for (x, y), rate in zip(DATA, [0.1, 0.05], strict=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(by_hand(x) - y))
        variables = [v.value for v in by_hand.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(rate * gradient)
    assert_same_weights(model, by_hand)


@pytest.mark.parametrize("probe_every", [0, 1])
def test_what_is_not_finite_is_not_applied(probe_every):
    class Breaking(Trainer):
        def transform_gradients(self, gradients, variables):
            return [g * tf.where(self.step == 1, np.nan, 1.0) for g in gradients]

    losses = {"error": mse(), "size": keras.losses.MeanAbsoluteError()}
    trainer = Breaking(linear_model(), keras.optimizers.SGD(0.1), losses, probe_every=probe_every)
    trainer.fit(DATA.repeat(), steps=4, progress=False)
    assert trainer._engine.counters.skips.total == 1
    assert all(np.isfinite(value).all() for value in weights(trainer.model))


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda gradients: gradients[::-1], r"a gradient of shape \(1,\)"),
        (lambda gradients: [tf.reduce_mean(gradient) for gradient in gradients], r"a gradient of shape \(\)"),
        (lambda gradients: [None, *gradients[1:]], "NoneType"),
    ],
    ids=["another order", "broadcasts", "None"],
)
@pytest.mark.parametrize("optimizer", ["sgd", "lion"])
def test_gradients_of_another_shape_are_refused(change, given, optimizer):
    class Other(Trainer):
        def transform_gradients(self, gradients, variables):
            return change(gradients)

    trainer = Other(linear_model(), optimizer, {"error": mse()})
    with pytest.raises(
        ValueError, match=f"returned {given} for '.*kernel', of shape .* must have the variable's shape"
    ):
        trainer.fit(DATA, steps=1, progress=False)


def test_a_list_of_another_length_is_refused():
    class Short(Trainer):
        def transform_gradients(self, gradients, variables):
            return gradients[:-1]

    trainer = Short(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    with pytest.raises(ValueError, match="got 2 gradients and returned 1; .*one for each variable"):
        trainer.fit(DATA, epochs=1, progress=False)
