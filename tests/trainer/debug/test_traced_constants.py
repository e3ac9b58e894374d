"""Values that hooks read from Python: a warning names a change after the trace, which has no effect."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses
from tests.trainer.tools import dataset, dense_model, mse, regression

X, Y = regression(16)
DATA = dataset(X, Y, batch=8)


class Settings:
    scale = 1.0


class Weighted(Trainer):
    """Reads its attributes in every way that a hook may."""

    shared = 1.0  # of the class

    def __init__(self, **options):
        super().__init__(dense_model(), keras.optimizers.SGD(0.1), **options)
        self.beta, self.config, self.weights = 1.0, {"gamma": 1.0}, np.ones(1, "float32")
        self.settings = Settings()
        self.settings.scale = 1.0
        self.exponent = tf.Variable(2.0)
        self.offset = 0.0  # read in evaluation only
        self.calls, self.unread = 0, 1.0

    @property
    def factor(self):
        return self.beta * self.shared

    def scaled(self, value):
        return (lambda: value * self.config["gamma"] * self.settings.scale * self.weights)()

    def compute_losses(self, batch, training):
        self.calls += 1  # the hook's own note
        error = tf.abs(self.model(batch[0]) - batch[1])[:, 0]
        return {"error": self.factor * self.scaled(error**self.exponent)}

    def eval_step(self, batch):
        return {"error": self.compute_losses(batch, False)["error"] + self.offset}


def fitted(**options):
    trainer = Weighted(**options)
    trainer.fit(DATA.repeat(), steps=2, eval_dataset=DATA, progress=False)
    return trainer


def further(trainer, **options):
    return trainer.fit(DATA.repeat(), steps=trainer._engine.counters.step + 2, progress=False, **options)


CHANGES = {
    "beta": lambda trainer: setattr(trainer, "beta", 0.0),
    "shared": lambda trainer: setattr(trainer, "shared", 0.0),
    "config": lambda trainer: trainer.config.update(gamma=0.0),
    "settings": lambda trainer: setattr(trainer.settings, "scale", 0.0),
    "weights": lambda trainer: trainer.weights.fill(0.0),
    "exponent": lambda trainer: setattr(trainer, "exponent", tf.Variable(1.0)),
    "compute_losses": lambda trainer: setattr(trainer, "compute_losses", lambda batch, training: {}),
    "optimizer.clipnorm": lambda trainer: setattr(trainer.optimizer, "clipnorm", 1e-3),
    "optimizer.learning_rate": lambda trainer: setattr(
        trainer.optimizer, "learning_rate", keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_that_a_trace_has_read_is_named_once_when_it_has_changed(name):
    trainer = fitted()
    CHANGES[name](trainer)
    with pytest.warns(UserWarning, match=rf"`trainer\.{name}` was .* when .* was traced"):
        further(trainer)
    further(trainer)  # every other warning is an error here


def test_a_change_by_a_callback_is_named_at_the_next_update():
    class Annealed(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            trainer.beta *= 0.5

    trainer = Weighted()
    with pytest.warns(UserWarning, match=r"`trainer\.beta` was 1\.0 .* and is 0\.5 now.*tf\.Variable"):
        trainer.fit(DATA.repeat(), steps=6, eval_dataset=DATA, eval_every=2, callbacks=Annealed(), progress=False)


def test_what_only_evaluation_reads_is_checked_there():
    trainer = fitted()
    trainer.offset = 5.0
    with pytest.warns(UserWarning, match=r"`trainer\.offset` was 0\.0 when the evaluation was traced"):
        trainer.evaluate(DATA)


def test_what_may_change():
    trainer = fitted()
    trainer.unread, trainer.calls = 5.0, 100
    trainer.exponent.assign(1.0)
    trainer.optimizer.learning_rate = 0.0
    further(trainer)
    assert trainer.evaluate(DATA)["loss"] > 0
    eager = fitted(run_eagerly=True)
    eager.beta = 0.0
    before = eager.model.get_weights()
    further(eager)
    for old, new in zip(before, eager.model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trainer: setattr(trainer.model.layers[0], "rate", 0.0), r"dropout\.rate: 0\.5 → 0\.0"),
        (lambda trainer: setattr(trainer.combiner, "weight", 9.0), r"`trainer\.combiner\.weight` was"),
        (lambda trainer: trainer.losses["error"]._fn_kwargs.update(delta=9.0), r"loss 'error': _fn_kwargs` was"),
    ],
)
def test_options_of_layers_combiners_and_losses(change, message):
    model = keras.Sequential([keras.Input((X.shape[1],)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    trainer = Trainer(model, "sgd", {"error": keras.losses.Huber()}, combiner=losses.WeightedSum())
    trainer.combiner.weight = 1.0
    further(trainer)
    change(trainer)
    with pytest.warns(UserWarning, match=message):
        further(trainer)


def test_a_subclass_without_hooks_has_nothing_to_check():
    trainer = Trainer(dense_model(), "sgd", {"error": mse()})
    trainer.beta = 1.0
    further(trainer)
    trainer.beta = 2.0
    further(trainer)


class Counting(keras.layers.Layer):
    """A layer that counts its traces and has an option of its own."""

    def __init__(self):
        super().__init__()
        self.scale, self.traces = 1.0, 0

    def call(self, x):
        self.traces += 1
        return x * self.scale * min(self.traces, 1)


def test_a_layer_of_ones_own_may_count_but_not_change():
    layer = Counting()
    model = keras.Sequential([keras.Input((X.shape[1],)), layer, keras.layers.Dense(1)])
    trainer = Trainer(model, "sgd", {"error": "mse"})
    further(trainer)
    further(trainer)
    layer.scale = 2.0
    with pytest.warns(UserWarning, match=r"counting\.call: .*'scale': 1\.0.*'scale': 2\.0"):
        further(trainer)
