"""Weights and variables beside `trainer.model`: in checkpoints, and put back after quick looks."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.reliability.tools import Killed, Killer
from tests.trainer.tools import regression

X, _ = regression(24)


def network(units, outputs):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(outputs)])


class Adversarial(Trainer):
    """A GAN whose discriminator, averaged generator and counters are attributes, or only known to a closure."""

    def __init__(self, run_eagerly=False):
        keras.utils.set_random_seed(5)
        super().__init__(network(4, 3), keras.optimizers.Adam(0.01), run_eagerly=run_eagerly)
        self.discriminator = network(4, 1)
        self.discriminator_optimizer = keras.optimizers.Adam(0.02)
        self.target = {"slow": keras.models.clone_model(self.model)}
        self.noise = tf.random.Generator.from_seed(7)
        self.rounds_played = tf.Variable(0.0)  # assigned, never read
        hidden = tf.Variable(0.5, trainable=False, name="hidden")
        self.balance = lambda change: hidden.assign_add(change)

    def train_step(self, batch):
        fake = self.model(self.noise.normal(tf.shape(batch)))
        judge, bce = self.discriminator, tf.nn.sigmoid_cross_entropy_with_logits
        one, zero = tf.ones([tf.shape(batch)[0], 1]), tf.zeros([tf.shape(batch)[0], 1])
        self.minimize(
            batch,
            lambda real, training: {"real": bce(one, judge(real)), "fake": bce(zero, judge(fake))},
            variables=judge.trainable_variables,
            optimizer=self.discriminator_optimizer,
            name="discriminator",
        )
        noise = self.noise.normal(tf.shape(batch))
        self.minimize(batch, lambda real, training: {"fooled": bce(one, judge(self.model(noise)))})
        for slow, fast in zip(self.target["slow"].variables, self.model.variables, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        self.rounds_played.assign_add(1.0)
        return {"balance": self.balance(0.125)}

    def compute_losses(self, batch, training):  # for evaluations
        return {"size": tf.reduce_mean(tf.square(self.model(batch)), axis=1)}

    def everything(self):
        """Values of all that the update moves."""
        models = [self.model, self.discriminator, self.target["slow"]]
        return [
            *(value for model in models for value in model.get_weights()),
            *(v.numpy() for o in (self.optimizer, self.discriminator_optimizer) for v in o.variables),
            *(self.noise.state.numpy(), self.rounds_played.numpy(), self.balance(0.0).numpy()),
        ]


def data():
    return tf.data.Dataset.from_tensor_slices(X).shuffle(24, seed=3).repeat().batch(6)


def fit(trainer, steps, workdir, callbacks=()):
    trainer.fit(data(), steps=steps, workdir=workdir, checkpoint_every=4, callbacks=callbacks, progress=False)
    return trainer


def assert_same(left, right):
    for one, two in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("eager", [False, True])
def test_a_gan_resumes_bit_for_bit(eager, tmp_path):
    whole = fit(Adversarial(), 9, tmp_path / "whole")
    dying = Adversarial()
    with pytest.raises(Killed):
        fit(dying, 9, tmp_path / "killed", [Killer(dying, 6)])
    resumed = fit(Adversarial(eager), 9, tmp_path / "killed")
    if not eager:
        assert_same(whole.everything(), resumed.everything())
        return
    for one, two in zip(whole.everything(), resumed.everything(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_quick_looks_change_nothing():
    trainer = Adversarial()
    trainer.fit(data(), steps=2, progress=False)
    before = trainer.everything()
    trainer.fast_dev_run(data())
    assert_same(before, trainer.everything())
    trainer.overfit(data(), steps=3)
    assert_same(before, trainer.everything())


class Unnamed(Trainer):
    """Variables without names, of one shape, that only an object of the subclass and a closure know."""

    def __init__(self):
        keras.utils.set_random_seed(5)
        super().__init__(network(4, 1), keras.optimizers.SGD(0.01))
        self.own = types.SimpleNamespace(mean=keras.Variable(1.0), size=keras.Variable(2.0))
        hidden = [tf.Variable(float(number)) for number in range(12)]
        self.hidden = lambda: hidden

    def compute_losses(self, batch, training):
        hidden = self.hidden()
        if training:
            self.own.mean.assign(0.5 * self.own.mean + self.own.size)
            for number in (5, 2, 11, 0, 7, 1, 9, 4, 10, 3, 8, 6):
                hidden[number].assign_add(100.0 + number)
        return {"size": tf.square(self.model(batch)[:, 0]) + 0.0 * self.own.mean + 0.0 * tf.add_n(hidden)}

    def everything(self):
        return [v.numpy() for v in (*self.model.variables, *self.own.__dict__.values(), *self.hidden())]


def test_variables_without_names_are_not_exchanged(tmp_path):
    whole = fit(Unnamed(), 6, tmp_path / "whole")
    fit(Unnamed(), 3, tmp_path / "parts")
    assert_same(whole.everything(), fit(Unnamed(), 6, tmp_path / "parts").everything())


class Meter:
    """Holds a variable that only evaluation assigns, and refers to its owner."""

    def __init__(self, owner):
        self.owner, self.seen = owner, tf.Variable(0.0)


class Evaluating(Trainer):
    """Variables in objects, in read-only dicts and of the class, which only evaluation assigns."""

    def __init__(self):
        keras.utils.set_random_seed(5)
        super().__init__(network(4, 1), keras.optimizers.SGD(0.01))
        type(self).shared = tf.Variable(0.0)
        self.meter = Meter(self)
        self.slots = types.MappingProxyType({"inner": types.SimpleNamespace(deep=[Meter(None)])})

    def compute_losses(self, batch, training):
        return {"size": tf.square(self.model(batch)[:, 0])}

    def eval_step(self, batch):
        for variable in self.everything():
            variable.assign_add(1.0)
        return self.compute_losses(batch, False)

    def everything(self):
        return [self.shared, self.meter.seen, self.slots["inner"].deep[0].seen]


def test_variables_in_objects_that_only_evaluation_assigns_are_state(tmp_path):
    def run(steps):
        trainer = Evaluating()
        options = {"eval_dataset": data(), "eval_steps": 1, "eval_every": 2, "workdir": tmp_path, "progress": False}
        trainer.fit(data(), steps=steps, **options)
        return trainer

    run(4)
    trainer = run(8)
    assert [v.numpy() for v in trainer.everything()] == [4.0] * 3
    trainer.fast_dev_run(data(), data().take(2))
    assert [v.numpy() for v in trainer.everything()] == [4.0] * 3
