"""What is wrong is said in three parts, in the constructor or at the first trace: received, needed, what to do."""

import errno
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.trainer.tools import dataset, dense_model, linear_model, mse, regression

X, Y = regression(16)
DATA = dataset(X, Y, batch=8)


def make(model=None, optimizer=None, losses=None, **options):
    return Trainer(
        dense_model() if model is None else model,
        keras.optimizers.SGD(0.1) if optimizer is None else optimizer,
        {"error": mse()} if losses is None else losses,
        **options,
    )


PAIR = {"error": mse(), "penalty": mse()}
CONSTRUCTOR = {
    "no losses": (lambda: Trainer(dense_model(), "sgd"), "There are no losses: `losses` is empty and"),
    "losses not a dict": (lambda: make(losses=[mse()]), "`losses` is a list; it must be a dict of names to losses"),
    "a number as a loss": (lambda: make(losses={"error": 3}), "Loss 'error' is 3; it must be a keras.losses.Loss"),
    "unknown weight": (
        lambda: make(losses=PAIR, loss_weights={"error": 1, "penality": 1}),
        r"Losses without a weight: \['penalty'\]; weights without a loss: \['penality'\]",
    ),
    "negative weight": (lambda: make(loss_weights={"error": -1.0}), "The weight of loss 'error' is -1.0; it must be"),
    "infinite weight": (lambda: make(loss_weights={"error": float("inf")}), "is inf; it must be finite"),
    "a word as a weight": (lambda: make(loss_weights={"error": "big"}), "is 'big'; it must be a number or"),
    "accumulation": (lambda: make(accumulation_steps=0), "`accumulation_steps` is 0; it must be at least 1"),
    "accumulation in parts": (
        lambda: make(accumulation_steps=1.5),
        "`accumulation_steps` is 1.5; it must be an integer",
    ),
    "clip": (lambda: make(clip_norm=0), "`clip_norm` is 0; it must be a positive number or None"),
    "decay": (lambda: make(ema_decay=1.0), "`ema_decay` is 1.0; it must lie between 0 and 1"),
    "probe": (lambda: make(probe_every=-1), "`probe_every` is -1; it must be at least 0"),
    "steps per call": (lambda: make(steps_per_call=0), "`steps_per_call` is 0; it must be at least 1"),
    "strategy": (lambda: make(strategy="mirrored"), "`strategy` is 'mirrored'; it must be a tf.distribute.Strategy"),
    "metric": (lambda: make(metrics=[3]), "it must be a keras.metrics.Metric"),
    "optimizer": (lambda: make(optimizer=0.1), "`optimizer` is 0.1; it must be a Keras optimizer or the name"),
    "optimizer clips": (
        lambda: make(optimizer=keras.optimizers.SGD(global_clipnorm=1.0)),
        "global_clipnorm=1.0; the trainer does this itself.*Use the trainer's `clip_norm`",
    ),
    "optimizer clips each": (lambda: make(optimizer=keras.optimizers.SGD(clipnorm=1.0)), "clipnorm=1.0"),
    "optimizer averages": (lambda: make(optimizer=keras.optimizers.SGD(use_ema=True)), "Use the trainer's `ema_decay`"),
    "optimizer accumulates": (
        lambda: make(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2)),
        "Use the trainer's `accumulation_steps`",
    ),
    "optimizer scales": (
        lambda: make(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
        "`optimizer` is a LossScaleOptimizer.*Pass the inner optimizer",
    ),
    "model": (lambda: make(model=3), "`model` is 3; it must be a keras.Model"),
}


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_in_the_constructor(name):
    call, message = CONSTRUCTOR[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def fit(compute=None, data=DATA, model=None, losses=None, options=None, **arguments):
    arguments = arguments or {"steps": 1}
    if compute is None:
        trainer = make(model=model, losses=losses, **(options or {}))
    else:

        class Own(Trainer):
            def compute_losses(self, batch, training):
                return compute(self.model(batch[0], training=training), batch[1])

        trainer = Own(dense_model() if model is None else model, "sgd", **(options or {}))
    trainer.fit(data, progress=False, **arguments)


def used_elsewhere():
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(linear_model().trainable_variables)
    make(optimizer=optimizer).fit(DATA, steps=1, progress=False)


def frozen():
    model = dense_model()
    model.trainable = False
    return model


TWO_OUTPUTS = lambda: (lambda x: keras.Model(x, {"a": x[:, :1], "b": keras.layers.Dense(1)(x)}))(keras.Input((3,)))  # noqa: E731
FIT = {
    "empty dict": (lambda: fit(lambda o, y: {}), "`compute_losses` returned an empty dict"),
    "not a dict": (lambda: fit(lambda o, y: o), "`compute_losses` returned .*; it must return a dict of named losses"),
    "a loss that is None": (lambda: fit(lambda o, y: {"error": None}), "Loss 'error' is None; it must be a tensor"),
    "integer loss": (
        lambda: fit(lambda o, y: {"error": tf.cast(o, tf.int32)}),
        "has dtype int32; a loss must be a floating",
    ),
    "weights of the wrong shape": (
        lambda: fit(lambda o, y: {"error": (tf.square(o - y)[:, 0], tf.ones([8, 5]))}),
        r"The weights of loss 'error' have shape \(8, 5\), its values .*; weights can have at most",
    ),
    "weights that do not broadcast": (
        lambda: fit(lambda o, y: {"error": (tf.tile(o, [1, 4]), tf.ones([8, 3]))}),
        "which does not broadcast to its values' shape",
    ),
    "weights of a scalar": (
        lambda: fit(lambda o, y: {"error": (tf.reduce_mean(o), tf.ones([8]))}),
        "is a scalar with weights",
    ),
    "weight of a loss that does not exist": (
        lambda: fit(lambda o, y: {"error": tf.square(o - y)}, options={"loss_weights": {"eror": 1.0}}),
        r"Losses without a weight: \['error'\]; weights without a loss: \['eror'\]",
    ),
    "no output of that name": (
        lambda: fit(model=TWO_OUTPUTS(), losses={"c": mse()}),
        r"The loss 'c' has no output of its name among \['a', 'b'\]",
    ),
    "four parts": (
        lambda: fit(data=tf.data.Dataset.from_tensors((X, Y, Y, Y))),
        r"A batch is a tuple of 4 parts; it must be \(x,\), \(x, y\)",
    ),
    "no trainable variables": (lambda: fit(model=frozen()), "The model has no trainable variables"),
    "optimizer of another model": (used_elsewhere, "The optimizer was built for other variables"),
    "nothing to probe": (lambda: fit(options={"probe_every": 1}), "there is nothing to probe. Use probe_every=0"),
    "eval_every without data": (lambda: fit(steps=1, eval_every=1), "`eval_every` is given without `eval_dataset`"),
    "log_every": (lambda: fit(steps=1, log_every=0), "`log_every` is 0; it must be at least 1"),
    "steps": (lambda: fit(steps=0), "`steps` is 0; it must be at least 1"),
    "no targets": (
        lambda: fit(data=tf.data.Dataset.from_tensors(X)),
        "The batches have no targets, but the loss 'error' needs some",
    ),
    "labels out of range": (
        lambda: fit(
            model=keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)]),
            losses={"class": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
            data=dataset(X, np.full(16, 4), batch=8),
        ),
        "A label of loss 'class' is 4; the output has 4 classes, so labels must lie between 0 and 3",
    ),
    "targets of another shape": (
        lambda: fit(data=dataset(X, np.zeros((16, 5), "float32"), batch=8)),
        r"loss 'error' .*target.*\(None, 5\).*output.*\(None, 1\)",
    ),
}


@pytest.mark.parametrize("name", FIT)
def test_at_the_first_trace(name):
    call, message = FIT[name]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call()


def test_a_workdir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="`workdir` .* cannot be used: .*Choose a directory"):
        make().fit(DATA, steps=1, workdir=tmp_path / "file" / "below", progress=False)


def test_checkpoints_without_a_workdir_are_noted(caplog):
    with caplog.at_level("WARNING", logger="absl"):
        make().fit(DATA, steps=1, checkpoint_every=1, progress=False)
    assert "`checkpoint_every` is 1 without `workdir`: no checkpoint is written" in caplog.text


def test_a_workdir_on_a_full_disk(tmp_path, monkeypatch):
    """A disk that is full cannot even hold the file of the lock."""

    def full(path, *arguments, **options):
        if os.path.basename(path) == "lock":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open(path, *arguments, **options)

    monkeypatch.setattr("looptape.trainer.checkpoints.lock.open", full, raising=False)
    with pytest.raises(ValueError, match="`workdir` .* cannot be used: No space left on device. Free some space"):
        make().fit(DATA, steps=1, workdir=tmp_path, progress=False)
