"""Changes while a trainer lives: they take effect, or they are refused; none is ignored."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses
from tests.trainer.tools import dataset, dense_model, mse, regression

X, Y = regression(24)
DATA = dataset(X, Y, batch=4)


class Freezes(keras.callbacks.Callback):
    """Freezes the first layer after an epoch and unfreezes it after another; notes its kernel at each end."""

    def __init__(self, freeze=0, unfreeze=2):
        super().__init__()
        self.freeze, self.unfreeze, self.kernels, self.optimizers = freeze, unfreeze, [], []

    def on_epoch_end(self, epoch, logs=None):
        self.kernels.append(self.model.layers[0].kernel.numpy())
        self.optimizers.append(self.model.optimizer)
        if epoch == self.freeze:
            self.model.layers[0].trainable = False
        if epoch == self.unfreeze:
            self.model.layers[0].trainable = True


def test_a_layer_frozen_in_a_callback_stands_still_until_it_is_unfrozen():
    trainer, freezes = Trainer(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()}), Freezes()
    trainer.fit(DATA, epochs=4, callbacks=[freezes], progress=False)
    first, second, third, fourth = freezes.kernels
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)
    assert np.abs(fourth - third).max() > 1e-3
    assert freezes.optimizers[-1] is trainer.optimizer


def test_a_layer_unfrozen_in_a_callback_is_trained_and_callbacks_see_the_new_optimizer():
    model = dense_model()
    model.layers[0].trainable = False
    trainer, freezes = Trainer(model, keras.optimizers.Adam(0.01), {"error": mse()}), Freezes(freeze=9, unfreeze=0)
    trainer.fit(DATA, epochs=2, callbacks=[freezes], progress=False)
    assert np.abs(freezes.kernels[1] - freezes.kernels[0]).max() > 1e-3
    assert freezes.optimizers[0] is not freezes.optimizers[1] is trainer.optimizer


class Beside(Trainer):
    """Trains a second network, an attribute."""

    def train_step(self, batch):
        self.minimize(batch)
        loss = lambda batch, training: {"error": tf.square(self.other(batch[0]) - batch[1])}  # noqa: E731
        options = {"variables": self.other.trainable_variables, "optimizer": self.other_optimizer, "name": "other"}
        self.minimize(batch, loss, **options)
        return {}


@pytest.mark.parametrize("frozen_first", [False, True])
def test_a_network_beside_the_model_that_is_frozen_too_late_is_refused(frozen_first):
    trainer = Beside(dense_model(), keras.optimizers.SGD(0.01), {"error": mse()})
    trainer.other, trainer.other_optimizer = dense_model(), keras.optimizers.SGD(0.01)
    trainer.encoder = trainer.model.layers[0]  # a part of the model: may be frozen at any time
    layer = trainer.other.layers[0]
    layer.trainable = not frozen_first
    freezing = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(layer, "trainable", frozen_first)
    )
    trainer.fit(DATA, epochs=1, progress=False)
    trainer.encoder.trainable = False
    trainer.fit(DATA, epochs=2, progress=False)
    with pytest.raises(ValueError, match="dense.*/kernel.* was frozen or unfrozen after .* Freeze it before the first"):
        trainer.fit(DATA, epochs=4, callbacks=[freezing], progress=False)
    assert trainer.step.numpy() == 18  # of three epochs


def test_a_resume_freezes_the_layers_that_a_callback_froze_before(tmp_path):
    def fit(epochs):
        trainer = Trainer(dense_model(), keras.optimizers.SGD(0.01), {"error": mse()})
        trainer.fit(DATA, epochs=epochs, callbacks=[Freezes(unfreeze=9)], workdir=tmp_path, progress=False)
        return trainer.model.layers[0]

    before, after = fit(2), fit(3)
    assert not before.trainable and not after.trainable
    np.testing.assert_array_equal(before.kernel, after.kernel)


@pytest.mark.parametrize("name", ["combiner", "metrics", "losses"])
def test_what_is_traced_is_refused_after_a_fit(name):
    trainer = Trainer(dense_model(), "sgd", {"error": mse()}, metrics={"mae": keras.metrics.MeanAbsoluteError()})
    trainer.fit(DATA, epochs=1, progress=False)
    new = {"combiner": losses.GradientBalance(), "metrics": {"mse": keras.metrics.MeanSquaredError()}, "losses": {}}
    setattr(trainer, name, new[name])
    with pytest.raises(ValueError, match=f"`trainer.{name}` was set after the update had been traced"):
        trainer.fit(DATA, epochs=2, progress=False)


def test_a_metric_added_to_the_dict_after_a_fit_is_refused():
    trainer = Trainer(dense_model(), "sgd", {"error": mse()}, metrics={"mae": keras.metrics.MeanAbsoluteError()})
    trainer.fit(DATA, epochs=1, progress=False)
    trainer.metrics["mse"] = keras.metrics.MeanSquaredError()
    with pytest.raises(ValueError, match=r"`trainer.metrics` was set after"):
        trainer.fit(DATA, epochs=2, progress=False)


def test_metrics_replaced_before_the_first_fit_hold():
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.0), {"error": mse()}, metrics={})
    trainer.metrics = {"mae": keras.metrics.MeanAbsoluteError()}
    history = trainer.fit(DATA, epochs=1, progress=False)
    expected = np.abs(dense_model().predict(X, verbose=0) - Y).mean()
    assert history.history["mae"] == pytest.approx([expected], rel=1e-5)


def normalized(rows):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    trainer = Trainer(model, keras.optimizers.SGD(0.01), {"error": mse()})
    x = X[:8].copy()
    x[:, 0] *= rows
    return trainer, tf.data.Dataset.from_tensors((x, Y[:8])).repeat()


def test_a_variance_that_overflows_skips_the_update():
    trainer, data = normalized(1e25)
    before = trainer.model.get_weights()
    trainer.fit(data, steps=2, progress=False)
    for left, right in zip(before, trainer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)
    assert trainer._engine.counters.skips.total == 2
    trainer.max_skipped = 3
    with pytest.raises(FloatingPointError, match=r"norm/moving_variance.*became non-finite while losses and gradients"):
        trainer.fit(data, steps=9, progress=False)


def test_predict_leaves_stateful_layers_alone_and_begins_with_zeros():
    keras.utils.set_random_seed(1)
    cells = [keras.Input((5, 2), batch_size=4), keras.layers.GRU(3, stateful=True), keras.layers.Dense(1)]
    trainer = Trainer(keras.Sequential(cells), keras.optimizers.SGD(0.1), {"error": mse()})
    x, y = np.random.default_rng(0).normal(size=(4, 5, 2)).astype("float32"), np.ones([4, 1], "float32")
    data = tf.data.Dataset.from_tensors((x, y))
    trainer.fit(data.repeat(), steps=3, progress=False)
    [state] = trainer.model.layers[0].states
    before = state.numpy()
    first, second = trainer.predict(data), trainer.predict(data)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(state.numpy(), before)
    assert np.abs(before).max() > 0
    state.assign(tf.zeros([4, 3]))
    np.testing.assert_allclose(first, trainer.model(x).numpy(), rtol=1e-5)


def test_uncertainty_refuses_negative_losses_by_name():
    class Signed(Trainer):
        def compute_losses(self, batch, training):
            error = tf.square(self.model(batch[0]) - batch[1])[:, 0]
            return {"error": error, "reward": -error - 1.0}

    trainer = Signed(dense_model(), keras.optimizers.SGD(0.01), combiner="uncertainty")
    with pytest.raises(ValueError, match=r"Uncertainty takes logarithms of the losses, but got \{'reward': -"):
        trainer.fit(DATA, epochs=1, progress=False)
