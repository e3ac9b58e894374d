"""What people who did not write it ran into: silence where there should have been a word."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.trainer.tools import dataset, dense_model, mse, regression

X, Y = regression(32)


def make(**options):
    return Trainer(dense_model(), keras.optimizers.SGD(0.05), {"error": mse()}, **options)


def test_a_missing_target_is_not_another_outputs_target():
    inputs = keras.Input((3,))
    outputs = {"a": keras.layers.Dense(1, name="a")(inputs), "b": keras.layers.Dense(1, name="b")(inputs)}
    trainer = Trainer(keras.Model(inputs, outputs), "sgd", {"a": mse(), "b": mse()})
    with pytest.raises(ValueError, match=r"The loss 'b' has no target of its name among \['a'\]"):
        trainer.evaluate((X, {"a": Y}))


def test_changed_loss_weights_are_mentioned_on_resume(tmp_path, caplog):
    data = dataset(X, Y, batch=8)
    make(loss_weights={"error": 1.0}).fit(data, epochs=1, workdir=tmp_path, progress=False)
    with caplog.at_level("WARNING", logger="absl"):
        make(loss_weights={"error": 7.0}).fit(data, epochs=2, workdir=tmp_path, progress=False)
    assert "The weight of loss 'error' was given as 7; keeping the checkpoint's value, 1." in caplog.text


def test_the_total_keeps_its_name():
    data = dataset(X, Y, batch=32)
    second = keras.losses.MeanAbsoluteError()
    with pytest.raises(ValueError, match="A loss is named 'loss', the name under which a sum of the losses"):
        Trainer(dense_model(), "sgd", {"loss": mse(), "other": second}).fit(data, epochs=1, progress=False)
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.0), {"error": mse(), "other": second})
    history = trainer.fit(data, epochs=1, eval_dataset=data, progress=False).history
    prediction = trainer.predict(data)
    total = np.mean((prediction - Y) ** 2) + np.mean(np.abs(prediction - Y))
    assert history["loss"][0] == pytest.approx(total, rel=1e-5)
    assert history["val_loss"][0] == pytest.approx(total, rel=1e-5)
    with pytest.raises(ValueError, match="A metric is named 'loss', which is the name of the weighted total"):
        make(metrics={"loss": keras.metrics.MeanAbsoluteError()})


def test_an_evaluation_without_a_valid_element_is_not_the_best():
    trainer = make()
    history = trainer.fit(
        dataset(X, Y, batch=8), epochs=1, eval_dataset=(X, Y, np.zeros(32, "float32")), progress=False
    ).history
    assert np.isnan(history["val_loss"][0]) and trainer._engine.counters.best_loss == np.inf


@pytest.mark.parametrize(
    ("name", "value"), [("optimizer", keras.optimizers.SGD(0.0)), ("clip_norm", 1e-9), ("losses", {"error": mse()})]
)
def test_what_a_trace_cannot_see_is_refused(name, value):
    trainer, data = make(), dataset(X, Y, batch=8)
    trainer.fit(data, epochs=1, progress=False)
    setattr(trainer, name, value)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"`trainer.{name}` was set after the update had been traced"):
            trainer.fit(data, epochs=2, progress=False)


def test_infinite_data_are_refused_where_they_would_never_end():
    trainer, data = make(), dataset(X, Y, batch=8)
    endless = data.repeat()
    for call in (
        lambda: trainer.fit(endless, epochs=2),
        lambda: trainer.fit(data, epochs=1, eval_dataset=endless),
        lambda: trainer.evaluate(endless),
        lambda: trainer.predict(endless),
    ):
        with pytest.raises(ValueError, match="infinite"):
            call()
    assert len(trainer.predict(endless, steps=2)) == 16
    assert trainer.evaluate(endless, steps=2)["loss"] > 0


def test_skipped_updates_are_mentioned_at_the_end(capsys):
    bad = X.copy()
    bad[9] = np.nan
    make().fit(dataset(bad, Y, batch=8), epochs=2)
    assert "2 of 8 updates were skipped: a loss or a gradient was not finite." in capsys.readouterr().err


def test_small_slips():
    with pytest.raises(ValueError, match="The dataset is empty: the arrays have no example"):
        make().fit((X[:0], Y[:0]), epochs=1)
    trainer = make()
    trainer.fit([X, Y], epochs=1, batch_size=16, callbacks=keras.callbacks.EarlyStopping("loss"), progress=False)
    assert trainer._engine.counters.step == 2


# ---- Several inputs and outputs, and the words of Keras.


def two_by_two():
    """Inputs a and b, outputs `value` and `label`."""
    a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    both = keras.layers.Concatenate()([a, b])
    outputs = {"value": keras.layers.Dense(1)(both), "label": keras.layers.Dense(4, "softmax")(both)}
    return keras.Model([a, b], outputs)


RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(16, 2)).astype("float32"), RNG.normal(size=(16, 3)).astype("float32")
TARGETS = {"value": A[:, :1], "label": RNG.integers(0, 4, 16)}
LOSSES = {"value": "mse", "label": "sparse_categorical_crossentropy"}


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({"label": keras.metrics.SparseCategoricalAccuracy()}, "label_sparse_categorical_accuracy"),
        ({"label_right": keras.metrics.SparseCategoricalAccuracy()}, "label_right"),
    ],
)
def test_a_metric_does_not_hide_the_loss_of_its_output(metrics, name, tmp_path):
    model = two_by_two()
    trainer = Trainer(model, "adam", LOSSES, metrics=metrics)
    data = tf.data.Dataset.from_tensor_slices(((A, B), TARGETS)).batch(8)
    history = trainer.fit(data, epochs=1, eval_dataset=data, workdir=tmp_path, progress=False)
    found = trainer.evaluate(data)
    outputs = {key: np.asarray(value) for key, value in model([A, B]).items()}
    chosen = outputs["label"][np.arange(16), TARGETS["label"]]
    assert found["label"] == pytest.approx(-np.log(chosen).mean(), rel=1e-5)
    assert found[name] == pytest.approx((outputs["label"].argmax(1) == TARGETS["label"]).mean())
    assert found["loss"] == pytest.approx(found["value"] + found["label"], rel=1e-5)
    assert {"label", name, "val_label", f"val_{name}"} <= set(history.history)


def test_several_metrics_of_one_output():
    metrics = {
        "label": [keras.metrics.SparseCategoricalAccuracy(), keras.metrics.SparseTopKCategoricalAccuracy(2, "two")]
    }
    found = Trainer(two_by_two(), "adam", LOSSES, metrics=metrics).evaluate(((A, B), TARGETS))
    assert {"label_sparse_categorical_accuracy", "label_two"} <= set(found)


def test_a_metric_with_the_name_of_a_loss_of_ones_own_is_refused():
    class Own(Trainer):
        def compute_losses(self, batch, training):
            self.update_metrics(batch[1], self.model(batch[0]))
            return {"error": tf.reduce_sum(tf.square(self.model(batch[0]) - batch[1]), axis=-1)}

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="'error' is the name of a loss and of a metric"):
        Own(model, "sgd", metrics={"error": keras.metrics.MeanAbsoluteError()}).evaluate((A, A[:, :1]))


def test_a_metric_that_keras_would_choose_by_shapes_is_refused():
    with pytest.raises(ValueError, match=r"by the shapes of the data.*SparseCategoricalAccuracy"):
        Trainer(two_by_two(), "adam", LOSSES, metrics={"label": "accuracy"})


@pytest.mark.parametrize("inputs", [[A, B], (A, B), {"a": A, "b": B}], ids=["list", "tuple", "dict"])
def test_several_inputs(inputs):
    """Lists as people pass them to Keras; and `predict` takes the inputs as they are."""
    model = two_by_two()
    trainer = Trainer(model, "adam", LOSSES)
    trainer.fit((inputs, TARGETS), epochs=1, progress=False)
    expected = model.predict([A, B], verbose=0)
    found = trainer.predict(inputs)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((A, A), {"epochs": 1}, r"Second argument: pass the targets with the inputs, as \(x, y\)"),
        (((A, A),), {"epochs": 1, "validation_data": (A, A)}, "`validation_data`: it is called `eval_dataset`"),
        (((A, A),), {"epochs": 1, "verbose": 0}, "`verbose`: it is called `progress`"),
        (((A, A),), {"epoch": 1}, "`epoch`: did you mean `epochs`?"),
    ],
)
def test_the_words_of_keras_are_answered(arguments, options, message):
    trainer = Trainer(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]), "sgd", {"error": "mse"})
    with pytest.raises(TypeError, match=message):
        trainer.fit(*arguments, **options)
