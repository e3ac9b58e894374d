"""Losses and metrics as numbers on the host."""

import math
import types

import keras
import numpy as np
import tensorflow as tf

from looptape.trainer.evaluation.results import metric_results, static_sum
from looptape.trainer.step.forward.loss_weights import LossWeights

ONE_REPLICA = types.SimpleNamespace(replicas=1)


def weights(**given):
    made = LossWeights(given, lambda value, name: tf.Variable(value, name=name))
    made.build(list(given))
    return made


def test_the_static_sum_is_weighted_and_nan_of_no_loss():
    assert static_sum({"a": 2.0, "b": 10.0}, weights(a=1.0, b=0.5)) == 7.0
    assert math.isnan(static_sum({}, weights(a=1.0)))


def test_a_metric_with_several_results_names_each():
    mae = keras.metrics.MeanAbsoluteError()
    mae.update_state([1.0, 2.0], [2.0, 4.0])
    assert metric_results(ONE_REPLICA, "mae", mae) == {"mae": 1.5}

    class Both(keras.metrics.Metric):
        def update_state(self, *_): ...

        def result(self):
            return np.array([1.0, 2.0])

    assert metric_results(ONE_REPLICA, "both", Both()) == {"both/0": 1.0, "both/1": 2.0}
