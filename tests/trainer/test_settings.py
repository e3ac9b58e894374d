"""Settings that were set too late are refused: a traced update would not see them."""

import keras
import numpy as np
import pytest

from looptape import Trainer
from tests.trainer.tools import dataset, dense_model, mse, regression

X, Y = regression(16)
DATA = dataset(X, Y, batch=8)


def make():
    return Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})


@pytest.fixture(scope="module")
def fitted():
    trainer = make()
    trainer.fit(DATA, epochs=1, progress=False)
    return trainer


@pytest.mark.parametrize("name", ["freeze", "metrics", "stages", "probe_every"])
def test_a_method_of_the_name_of_a_setting_is_refused(name):
    kind = type("Own", (Trainer,), {name: lambda self: 3})
    with pytest.raises(TypeError, match=rf"Own\.{name} has the name of a setting of `Trainer`.*Give it another name"):
        kind(dense_model(), "sgd", {"error": mse()})


def test_settings_of_a_class_and_its_other_attributes_may_have_any_value():
    class Own(Trainer):
        on_spike, max_skipped, beta = "record", 3, 1.0

        def __init__(self):
            self.beta = 2.0
            super().__init__(dense_model(), "sgd", {"error": mse()})

    assert Own().on_spike == "record" and Own().beta == 2.0


LATE = {
    "model": dense_model,
    "strategy": lambda: None,
    "step": lambda: 3,
    "loss_weights": lambda: {"error": 2.0},
    "shared_features": lambda: "dense",
    "shared_variables": lambda: ["dense"],
    "head_gradients": lambda: "own",
    "health_parts": lambda: ("histograms",),
    "ema_decay": lambda: 0.5,
}


@pytest.mark.parametrize("name", LATE)
def test_a_setting_that_a_trace_cannot_see_is_refused(name, fitted):
    before = getattr(fitted, name)
    setattr(fitted, name, LATE[name]())
    try:
        for use in (lambda: fitted.fit(DATA, epochs=2, progress=False), lambda: fitted.predict(X)):
            # `fit` sees first that parts of health rows need rows.
            other = "|`health_every` is 0" if name == "health_parts" else ""
            with pytest.raises(ValueError, match=f"`trainer.{name}` was set after the update had been traced{other}"):
                use()
    finally:
        setattr(fitted, name, before)
    assert np.isfinite(fitted.evaluate(DATA)["loss"])


def test_another_model_is_refused_by_evaluate(fitted):
    """Its traced function would still have the first one."""
    model = fitted.model
    fitted.model = dense_model()
    try:
        with pytest.raises(ValueError, match="`trainer.model` was set after"):
            fitted.evaluate(DATA)
    finally:
        fitted.model = model


@pytest.mark.parametrize(("name", "value"), [("model", None), ("recurrent", "keras"), ("bptt_window", 3)])
def test_what_the_trainer_was_made_with_is_refused_before_the_first_trace(name, value):
    trainer = make()
    setattr(trainer, name, value)
    with pytest.raises(ValueError, match=f"`trainer.{name}` was set after the trainer had been made.*your own needs"):
        trainer.fit(DATA, epochs=1, progress=False)


def test_variables_are_compared_by_identity(fitted):
    """`==` of two Keras variables is a tensor."""
    fitted.shared_variables = list(fitted.model.trainable_variables)
    try:
        with pytest.raises(ValueError, match="shared_variables"):
            fitted.fit(DATA, epochs=2, progress=False)
    finally:
        del fitted.shared_variables


def test_what_may_change_at_any_time():
    trainer = make()
    trainer.fit(DATA, epochs=1, progress=False)
    trainer.loss_weights["error"] = 0.0
    trainer.optimizer.learning_rate = 0.5
    trainer.on_nonfinite, trainer.max_skipped, trainer.steps_per_call, trainer.clip_norm = "raise", 3, 1, None
    before = trainer.model.get_weights()
    trainer.fit(DATA, epochs=2, progress=False)
    for old, new in zip(before, trainer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_other_layers_may_be_probed_later():
    x = np.random.default_rng(0).normal(size=(8, 4, 2)).astype("float32")
    inputs = keras.Input((4, 2))
    hidden = keras.layers.SimpleRNN(2, name="first", return_sequences=True)(inputs)
    model = keras.Model(inputs, keras.layers.SimpleRNN(1, name="second")(hidden))
    trainer = Trainer(model, "sgd", {"error": "mse"}, probe_every=1)
    found = []
    for steps, layers in ((1, ["first"]), (2, ["second"])):
        trainer.probe_layers = layers
        trainer.fit((x, x[:, 0, :1]), steps=steps, progress=False)
        found.append(list(trainer._engine.main.probed.cells))
    assert found == [["first"], ["second"]]
