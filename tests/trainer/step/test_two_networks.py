"""Two networks, one trainer: unbuilt, without a `call`, in the model or as attributes of the trainer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.trainer.tools import regression

X, _ = regression(16)
DATA = tf.data.Dataset.from_tensors(X).repeat()


def network(units):
    return keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(units)])


class Pair(keras.Model):
    """Holds two networks that do not know their inputs; nobody calls it."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = network(3), network(1)


class GAN(Trainer):
    def __init__(self, model, discriminator=None):
        super().__init__(model, keras.optimizers.SGD(0.1))
        self.judge = discriminator
        self.second = keras.optimizers.SGD(0.1)

    def networks(self):
        return (self.model.generator, self.model.discriminator) if self.judge is None else (self.model, self.judge)

    def train_step(self, batch):
        generator, discriminator = self.networks()

        def judged(real, training):
            return {
                "real": tf.nn.softplus(-discriminator(real)),
                "fake": tf.nn.softplus(discriminator(generator(real))),
            }

        def forged(real, training):
            return {"fooled": tf.nn.softplus(-discriminator(generator(real)))}

        before = self.minimize(batch, judged, variables=discriminator.trainable_variables, name="discriminator")
        variables = generator.trainable_variables
        self.minimize(batch, forged, variables=variables, optimizer=self.second, name="generator")
        return {"twice": 2.0 * before["real"]}


@pytest.mark.parametrize("place", ["model", "attribute"])
def test_unbuilt_networks_are_built_by_the_step_and_trained(place, tmp_path):
    """From the first update on, the same as gradients by the tape, applied in turns."""
    trainer = GAN(Pair()) if place == "model" else GAN(network(3), network(1))
    trainer.fit(DATA, steps=1, progress=False)
    generator, discriminator = trainer.networks()
    copies = [keras.models.clone_model(each) for each in (generator, discriminator)]
    for copy, each in zip(copies, (generator, discriminator), strict=True):
        copy.set_weights(each.get_weights())
    trainer.fit(DATA, steps=3, workdir=tmp_path, progress=False)

    make, judge = copies
    for _ in range(2):
        for variables, real, fake in (
            (judge.trainable_variables, -1.0, 1.0),
            (make.trainable_variables, 0.0, -1.0),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.softplus(fake * judge(make(X))))
                loss += tf.reduce_mean(tf.nn.softplus(real * judge(X))) if real else 0.0
            for variable, gradient in zip(variables, tape.gradient(loss, [v.value for v in variables]), strict=True):
                variable.assign(variable - 0.1 * gradient)
    for copy, each in zip(copies, (generator, discriminator), strict=True):
        for one, two in zip(copy.get_weights(), each.get_weights(), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
    assert (tmp_path / "model.weights.h5").exists()


@pytest.mark.filterwarnings("ignore::UserWarning:keras")
def test_a_model_without_a_call_is_explained_where_one_is_needed():
    trainer = GAN(Pair())
    with pytest.raises(NotImplementedError, match="The model Pair has no `call`.*Override `compute_losses`, or `eval_"):
        trainer.predict(DATA, steps=1)
    with pytest.raises(NotImplementedError, match="The model Pair has no `call`"):
        trainer.evaluate(DATA, steps=1)


def test_a_hook_that_is_converted_makes_no_line_of_autograph(caplog):
    """AutoGraph converts what a hook calls, Looptape's own functions as well, and reports those it cannot convert."""
    keras.utils.set_random_seed(1)
    GAN(Pair()).fit(DATA, steps=1, progress=False)
    assert "AutoGraph" not in caplog.text


def test_a_teacher_that_is_an_unbuilt_attribute():
    class Distilled(Trainer):
        def compute_losses(self, batch, training):
            return {"error": tf.square(self.model(batch) - self.teacher(batch))[:, 0]}

    trainer = Distilled(network(1), keras.optimizers.SGD(0.1))
    trainer.teacher = network(1)
    trainer.fit(DATA, steps=1, progress=False)
    teacher = trainer.teacher.get_weights()
    trainer.fit(DATA, steps=4, progress=False)
    for one, two in zip(teacher, trainer.teacher.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    assert trainer.evaluate(DATA.take(1))["loss"] > 0
