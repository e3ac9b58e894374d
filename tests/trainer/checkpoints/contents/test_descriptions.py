"""Descriptions of losses and hooks change with what they do, and only then."""

import functools
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses, timesteps
from looptape.trainer.checkpoints.contents.descriptions import describe, describe_hook
from tests.reliability.tools import REPOSITORY
from tests.trainer.tools import dataset, linear_model, regression

FACTOR = 2.0


def scaled(factor):
    return lambda targets, outputs: factor * tf.square(targets - outputs)


def with_default(factor):
    def loss(targets, outputs, factor=factor):
        return factor * tf.square(targets - outputs)

    return loss


def option(targets, outputs, factor=1.0):
    return factor * tf.square(targets - outputs)


class Weighted:
    """A loss of one's own, by an object."""

    def __init__(self, factor):
        self.factor, self.inner = factor, scaled(factor)

    def __call__(self, targets, outputs):
        return self.inner(targets, outputs)


class Hidden(keras.losses.Loss):
    """Keeps its option to itself, as losses of Keras do."""

    def __init__(self, factor):
        super().__init__()
        self._factor = factor

    def call(self, targets, outputs):
        return self._factor * tf.square(targets - outputs)


class Averaged(keras.metrics.MeanMetricWrapper):
    def __init__(self, factor):
        super().__init__(option, factor=factor)


MAKERS = {
    "a loss class of one's own": Hidden,
    "a metric": Averaged,
    "a closure": scaled,
    "a default": with_default,
    "a partial": lambda factor: functools.partial(option, factor=factor),
    "an object": Weighted,
    "a tf.function": lambda factor: tf.function(scaled(factor)),
    "in a sum": lambda factor: losses.summed(scaled(factor)),
    "over time": lambda factor: losses.over_time("mse", 0.1 * factor),
    "a list over time": lambda factor: losses.over_time("mse", [1.0, factor]),
    "of Keras": lambda factor: keras.losses.Huber(factor),
    "of Keras in a sum": lambda factor: losses.summed(keras.losses.Huber(factor)),
    "of this package": lambda factor: losses.huber(delta=factor),
    "a schedule": lambda factor: losses.LinearRamp(0.0, factor, 10),
    "an action": timesteps.ClipNorm,
    "an array": lambda factor: np.full([3], factor),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_another_option_is_another_description(kind):
    make = MAKERS[kind]
    assert describe(make(2.0)) == describe(make(2.0)) != describe(make(3.0))


def test_other_code_of_a_loss_class_is_another_description():
    class Loss(Hidden):
        def call(self, targets, outputs):
            return self._factor * tf.abs(targets - outputs)

    Loss.__qualname__ = Hidden.__qualname__  # the same class, edited between two runs
    assert describe(Loss(1.0)) != describe(Hidden(1.0))


class Settings:
    strength, unread = 1.0, 1.0


def test_a_hook_is_described_with_the_objects_and_the_base_class_that_it_reads():
    def described(own=1.0, outer=1.0, unread=1.0, power=2):
        settings, inner = Settings(), Settings()
        settings.strength, settings.unread, inner.strength = own, unread, outer

        class Base(Trainer):
            def compute_losses(self, batch, training):
                return {"error": inner.strength * self.settings.strength * self.raised(batch)}

        class Own(Base):
            def raised(self, batch):
                return batch**power

            def compute_losses(self, batch, training):
                return super().compute_losses(batch, training)

        return describe_hook(Own, "compute_losses", {"settings": settings})

    known = described()
    assert known == described(unread=3.0)
    for change in ({"own": 2.0}, {"outer": 2.0}, {"power": 3}):
        assert described(**change) != known, change


def own_hook(factor=1.0, name="mse"):
    class Own(Trainer):
        """Reads an attribute, a constant of the module and a method."""

        strength = 1.0

        def part(self, error):
            return factor * tf.square(error)

        def compute_losses(self, batch, training):
            error = self.part(self.model(batch[0]) - batch[1]) * self.strength * FACTOR
            return {"error": error[:, 0] + 0.0 * keras.losses.get("mse" if name is None else name)(error, error)}

    return Own


def test_a_hook_is_described_with_what_it_reads_and_calls():
    def described(cls, strength=1.0):
        return describe_hook(cls, "compute_losses", {"strength": strength, "unread": 5.0})

    known = described(own_hook())
    assert known == described(own_hook()) and "'strength': 1.0" in known and "'FACTOR': 2.0" in known
    assert "unread" not in known
    assert known not in (described(own_hook(factor=3.0)), described(own_hook(), 2.0), described(own_hook(name="mae")))


def test_another_process_describes_the_same(tmp_path):
    code = (
        "from tests.trainer.checkpoints.contents import test_descriptions as t\n"
        "print([t.describe(make(2.0)) for make in t.MAKERS.values()])\n"
        "print(t.describe_hook(t.own_hook(), 'compute_losses', {'strength': 1.0}))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    here = [describe(make(2.0)) for make in MAKERS.values()]
    expected = f"{here}\n{describe_hook(own_hook(), 'compute_losses', {'strength': 1.0})}\n"
    assert found.stdout == expected


def test_what_a_resumed_run_reads_or_schedules_otherwise_is_named(tmp_path, caplog):
    x, y = regression(8)
    schedules = keras.optimizers.schedules

    def fit(steps, strength=1.0, rate=0.1, weight=1.0, data=(x, y)):
        optimizer = keras.optimizers.SGD(schedules.CosineDecay(rate, 100))
        trainer = own_hook()(linear_model(), optimizer, loss_weights={"error": losses.LinearRamp(0.0, weight, 10)})
        trainer.strength = strength
        trainer.fit(dataset(*data, batch=4).repeat(), steps=steps, workdir=tmp_path, progress=False)
        trainer.strength = 77.0  # what the host does with it afterwards is not an option
        found = caplog.text
        caplog.clear()
        return found

    fit(2)
    assert not any(word in found for found in [fit(3)] for word in ("other", "changed", "differ"))
    found = fit(4, strength=2.0)
    assert found.index("'strength': 1.0") < found.index("→") < found.index("'strength': 2.0")
    found = fit(5, strength=2.0, rate=0.2)
    assert "schedule changed: CosineDecay {'initial_learning_rate': 0.1" in found
    assert "weight of 'error': LinearRamp(start=0.0, end=1.0" in fit(6, strength=2.0, rate=0.2, weight=2.0)
    assert "contents of TensorSlice" in fit(7, strength=2.0, rate=0.2, weight=2.0, data=(x + 1.0, y))
