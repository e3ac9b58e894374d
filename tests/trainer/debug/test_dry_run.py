"""Dry runs leave the trainer as it was, before and during training, also after an error."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import losses
from looptape.trainer import Trainer
from looptape.trainer.checkpoints import trainer_state
from tests.trainer.tools import (
    assert_identical_weights,
    dataset,
    dense_model,
    mse,
    regression,
    train,
)

X, Y = regression(32)


def test_a_debugging_look_leaves_everything_as_it_was():
    looked, oracle = dense_model(), dense_model()
    one, two = (Trainer(m, keras.optimizers.Adam(0.05), {"error": mse()}, ema_decay=0.9) for m in (looked, oracle))
    results = one.fast_dev_run(dataset(X, Y, batch=8), dataset(X, Y, batch=8))
    assert results["loss"] > 0
    before, after = one.overfit(dataset(X, Y, batch=8), batches=1, steps=300)["error"]
    assert after < 0.05 * before, "eight examples can be learnt by heart"
    for trainer in (one, two):
        trainer.fit(dataset(X, Y, batch=8), epochs=2, progress=False)
    assert_identical_weights(looked, oracle)
    for left, right in zip(one._engine.main.pipeline.averages, two._engine.main.pipeline.averages, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())


class Pulled(Trainer):
    """Two losses, for combiners; the second one is moved by dropout, too."""

    def compute_losses(self, batch, training):
        x, y = batch
        outputs = self.model(x, training=training)
        self.update_metrics(y, outputs)
        return {"error": tf.square(outputs - y)[:, 0], "size": tf.abs(outputs)[:, 0] + 0.1}


def half_precision():
    """Gradients that are too large for the first loss scale, so that it falls; dropout; statistics."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=1)]
    with_policy = [keras.layers.Dense(1, dtype="mixed_float16"), keras.layers.Rescaling(100.0, dtype="float32")]
    return keras.Sequential([keras.Input((3,)), *layers, *with_policy])


LOOKED_AT = {
    "uncertainty": {"combiner": losses.Uncertainty},
    "dwa": {"combiner": losses.DynamicWeightAverage, "accumulation_steps": 2},
    "float16": {"model": half_precision},
}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_looks_before_and_amid_training_change_nothing_that_a_checkpoint_holds(name):
    options = dict(LOOKED_AT[name])
    model, combiner = options.pop("model", dense_model), options.pop("combiner", lambda: None)
    data, state = dataset(X, Y, batch=8), {}
    for looks in (False, True):
        trainer = Pulled(
            model(),
            keras.optimizers.Adam(0.05),
            metrics={"mae": keras.metrics.MeanAbsoluteError()},
            combiner=combiner(),
            loss_weights={"error": 1.0, "size": 0.5},
            ema_decay=0.9,
            **options,
        )
        for epochs in (2, 4):
            if looks:
                trainer.fast_dev_run(dataset(X, 1000 * Y, batch=8))
                trainer.overfit(dataset(X, 1000 * Y, batch=8), steps=4)
            trainer.fit(data, epochs=epochs, progress=False)
        trainer.loss_weights["size"] = 0.25
        if looks:
            trainer.overfit(data, steps=4)
            assert trainer.loss_weights["size"] == 0.25
        variables = trainer_state.tracked_state(trainer._engine, trainer._engine.sources[id(data)])
        state[looks] = {key: v.numpy() for key, v in variables.items() if key != "iterator"}
        state[looks] |= {
            "skips": trainer._engine.counters.skips.state(),
            "step": trainer._engine.counters.step,
            "epoch": trainer._engine.counters.epoch,
        }
    assert state[True].keys() == state[False].keys()
    for key, value in state[False].items():
        np.testing.assert_equal(state[True][key], value, err_msg=key)
    if name == "float16":
        assert state[False]["skips"]["total"] > 0 and trainer._engine.loss_scale.value() < 2.0**15, (
            "the scale stood still"
        )


def test_an_error_in_a_look_changes_nothing_either():
    class Breaking(Trainer):
        on_nonfinite = "raise"

    trainer = Breaking(dense_model(), keras.optimizers.Adam(0.05), {"error": mse()})
    x = X.copy()
    x[-1] = np.nan
    with pytest.raises(FloatingPointError, match="The update of step 3 is not finite"):
        trainer.overfit(dataset(x, Y, batch=8), batches=4)
    assert (trainer._engine.counters.step, trainer._engine.counters.skips.total, len(trainer._engine.sources)) == (
        0,
        0,
        0,
    )
    trainer.fit(dataset(X, Y, batch=8), epochs=1, progress=False)
    oracle = train(dense_model(), dataset(X, Y, batch=8), keras.optimizers.Adam(0.05), epochs=1)
    assert_identical_weights(trainer.model, oracle.model)
