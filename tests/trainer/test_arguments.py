"""What people pass that is nearly right: taken as it is meant, or refused with a sentence."""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.examination import Examination
from tests.trainer.tools import dataset, linear_model, regression

X, Y = regression(16)


def largest(targets, outputs, outputs_scale=1.0):
    return tf.reduce_max(tf.abs(targets - outputs_scale * outputs), axis=-1)


class Largest:
    def __call__(self, targets, outputs):
        return largest(targets, outputs)


BOUND = functools.partial(largest, outputs_scale=1.0)


@pytest.mark.parametrize("metrics", ["mae", ["mae"], largest, {"far": largest}, [BOUND], [Largest()]])
def test_metrics_by_name_and_plain_functions(metrics):
    trainer = Trainer(linear_model(), keras.optimizers.SGD(0.0), {"error": "mse"}, metrics=metrics)
    history = trainer.fit(dataset(X, Y, batch=4), epochs=1, progress=False).history
    [name] = set(history) - {"loss", "error"}
    assert history[name] == pytest.approx([np.abs(linear_model().predict(X, verbose=0) - Y).mean()], rel=1e-5)
    assert name == {"mae": "mean_absolute_error"}.get(str(metrics), name)


def public_methods():
    """Methods of `Trainer` but for the hooks and what is called inside them, which TensorFlow traces."""
    named = {name for base in (Trainer, Examination) for name, value in vars(base).items() if inspect.isfunction(value)}
    return sorted(name for name in named if not name.startswith("_"))


@pytest.mark.parametrize("name", public_methods())
def test_every_public_method_explains_an_unknown_argument(name):
    with pytest.raises(TypeError, match=rf"^`{name}`: .*(Its arguments are|It takes no arguments)"):
        getattr(Trainer(linear_model(), "sgd", {"error": "mse"}), name)(1, zork=1)


def test_a_misspelt_argument_is_named():
    with pytest.raises(TypeError, match=r"^`loss_jacobian`: .*'timesteps'. `timesteps`: did you mean `time_steps`\?$"):
        Trainer(linear_model(), "sgd", {"error": "mse"}).loss_jacobian((X, Y), timesteps=[1])


REFUSED = {
    "a metric's class": (
        lambda: make(metrics=[keras.metrics.MeanAbsoluteError]),
        "A metric is the class Mean.*call",
    ),
    "a number as a metric": (lambda: make(metrics={"far": 3}), "The metric 'far' is 3; it must be a keras.metrics"),
    "unknown metric": (lambda: make(metrics=["maee"]), "A metric is 'maee', which Keras does not know; use .*'mae'"),
    "unknown loss": (lambda: make(losses={"e": "msee"}), "Loss 'e' is 'msee', which Keras does not know; use .*'mse'"),
    "unknown optimizer": (lambda: make("adaam"), "`optimizer` is 'adaam', which Keras does not know"),
    "pattern inside a path": (
        lambda: make({"kernel": keras.optimizers.SGD(), ".*": keras.optimizers.SGD()}).fit((X, Y), steps=1),
        r"The patterns \['kernel'\] match no variable.*from its beginning; start it with `\.\*`",
    ),
    "evaluate by batches of 0": (lambda: make().evaluate((X, Y), batch_size=0), "`batch_size` is 0; it must be at"),
    "predict by batches of None": (lambda: make().predict(X, batch_size=None), "`batch_size` is None; it must be an"),
    "predict with targets": (lambda: make().predict(X, Y), "`predict`: too many positional.*targets are not needed"),
    "overfit with targets": (lambda: make().overfit(X, Y), "`batches` is .*; it must be an integer of at least 1"),
    "evaluate no batch": (lambda: make().evaluate((X, Y), steps=0), "`steps` is 0; it must be at least 1"),
    "predict half a batch": (lambda: make().predict(X, steps=0.5), "`steps` is 0.5; it must be an integer"),
    "evaluation in fit of no batch": (
        lambda: make().fit((X, Y), steps=1, eval_dataset=dataset(X, Y, batch=4), eval_steps=-1),
        "`eval_steps` is -1; it must be at least 1",
    ),
    "ragged inputs": (
        lambda: Trainer(keras.Sequential([keras.layers.Dense(1)]), "sgd", "mse").fit(RAGGED, steps=1),
        r"The inputs, of shape \(None, None\), are ragged.*Pad the sequences, dataset.map\(lambda x, y: \(x.to_tensor",
    ),
    "ragged inputs of a built model": (lambda: make().evaluate(RAGGED), "The inputs are ragged.*Pad the sequences"),
}


class NoTraining(Trainer):
    def compute_losses(self, batch):
        return {"error": self.model(batch[0])}


class OnlyGradients(Trainer):
    def transform_gradients(self, gradients):
        return gradients


class NotBegun(Trainer):
    def __init__(self, model):
        self.model = model


class Wordy(Trainer):
    def compute_losses(self, batch, training):
        self.log("state", "good")
        return super().compute_losses(batch, training)


def unequal():
    yield X[:8], Y[:8]
    yield X[:8, :2], Y[:8]


def fit(trainer, data=None, **options):
    trainer.fit(dataset(X, Y, batch=8) if data is None else data, progress=False, **(options or {"steps": 1}))


REFUSED |= {
    "a model's class": (lambda: Trainer(keras.Sequential, "sgd", "mse"), "`model` is the class Sequential.*calling"),
    "a loss's class": (lambda: make(losses=keras.losses.MeanSquaredError), "is the class MeanSquaredError.*calling"),
    "a loss of one argument": (
        lambda: make(losses={"e": lambda y: y}),
        r"Loss 'e' is called with \(targets, outputs\)",
    ),
    "two metrics of one name": (lambda: make(metrics=["mae", "mae"]), "Two metrics are named 'mean_absolute_error'"),
    "a pattern that is none": (
        lambda: make({"(": keras.optimizers.SGD()}),
        r"has the pattern '\(', which is not a reg",
    ),
    "jit_compile of Keras": (lambda: make(jit_compile="auto"), "`jit_compile` is 'auto'; it must be True or False"),
    "single examples": (
        lambda: fit(make(), tf.data.Dataset.from_tensor_slices((X, Y))),
        r"shape \(3,\), the model takes \(None, 3\): the dataset gives single examples. Batch it",
    ),
    "a function that returns nothing": (lambda: fit(make(), lambda: None), "a function that returned a NoneType"),
    "batches of other shapes": (
        lambda: fit(make(), unequal, steps=2),
        r"yielded an element of shape \(8, 2\).*pad them",
    ),
    "a number as workdir": (lambda: fit(make(), steps=1, workdir=3), "`workdir` is 3; it must be the path"),
    "a callback's class": (lambda: fit(make(), steps=1, callbacks=[keras.callbacks.History]), "class History.*calling"),
    "a callback's name": (lambda: fit(make(), steps=1, callbacks="History"), "A callback is 'History'; it must be a"),
    "a dataset as a batch": (lambda: make().timestep_gradients(dataset(X, Y, batch=8)), "The batch is a dataset.*next"),
    "a hook without training": (
        lambda: fit(NoTraining(linear_model(), "sgd")),
        r"`compute_losses` of NoTraining takes \(batch\).*Define it as compute_losses\(self, batch, training\)",
    ),
    "a hook without variables": (
        lambda: fit(OnlyGradients(linear_model(), "sgd", "mse")),
        r"Define it as transform_gradients\(self, gradients, variables\)",
    ),
    "a text as a number": (lambda: fit(Wordy(linear_model(), "sgd", "mse")), "`log` of 'state' got a text.*log_text"),
    "a constructor that does not begin": (
        lambda: fit(NotBegun(linear_model())),
        r"super\(\).__init__\(model, optimizer",
    ),
}
RAGGED = tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1.0], [1.0, 2.0]]), Y[:2])).batch(2)


def make(optimizer="sgd", losses=None, **options):
    return Trainer(linear_model(), optimizer, losses or {"error": "mse"}, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_to_do(name):
    call, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call()


def test_build_takes_arrays_too():
    trainer = Trainer(keras.Sequential([keras.layers.Dense(1)]), "sgd", {"error": "mse"})
    trainer.build((X, Y))
    assert trainer.model.weights[0].shape == (3, 1)


def test_loss_weights_that_are_a_list_are_refused():
    with pytest.raises(TypeError, match=r"`loss_weights` is \[1.0\]; it must be a dict"):
        Trainer(linear_model(), "sgd", {"error": "mse"}, loss_weights=[1.0])


def test_evaluate_has_the_hint_of_fit():
    trainer = Trainer(linear_model(), "sgd", {"error": "mse"})
    with pytest.raises(TypeError, match=r"`evaluate`: too many positional arguments.*as \(x, y\)"):
        trainer.evaluate(X, Y)


def test_sparse_batches_are_trained():
    dense, sparse = linear_model(), linear_model()
    for model, convert in ((dense, lambda x: x), (sparse, tf.sparse.from_dense)):
        data = dataset(X, Y, batch=16).map(lambda x, y, convert=convert: (convert(x), y)).repeat()
        Trainer(model, keras.optimizers.SGD(0.1), {"error": "mse"}).fit(data, steps=3, progress=False)
    np.testing.assert_allclose(dense.get_weights()[0], sparse.get_weights()[0], rtol=1e-5)


def test_a_function_that_gives_an_iterator_is_called_once_for_each_pass():
    calls = []

    def batches():
        calls.append(len(calls))
        return iter([(X[:8], Y[:8]), (X[8:], Y[8:])])

    found, expected = linear_model(), linear_model()
    Trainer(found, keras.optimizers.SGD(0.1), {"error": "mse"}).fit(batches, epochs=3, progress=False)
    Trainer(expected, keras.optimizers.SGD(0.1), {"error": "mse"}).fit(dataset(X, Y, batch=8), epochs=3, progress=False)
    assert calls == [0, 1, 2]
    np.testing.assert_array_equal(found.get_weights()[0], expected.get_weights()[0])


def test_no_callbacks_may_be_none():
    trainer = Trainer(linear_model(), "sgd", {"error": "mse"})
    assert trainer.fit(dataset(X, Y, batch=8), epochs=1, callbacks=None, progress=False).history["loss"]
