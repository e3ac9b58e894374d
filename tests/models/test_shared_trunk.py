"""Heads by name on one trunk."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.models import (
    SharedTrunk,
)


def test_heads_have_their_names_and_share_the_trunk():
    model = SharedTrunk(3, {"label": 4, "value": 1}, (8,), head_units=5)
    outputs = model(np.ones((2, 3), np.float32))
    assert {name: tuple(output.shape) for name, output in outputs.items()} == {"label": (2, 4), "value": (2, 1)}
    with tf.GradientTape(persistent=True) as tape:
        outputs = model(np.ones((2, 3), np.float32))
        losses = {name: tf.reduce_sum(output) for name, output in outputs.items()}
    reached = {}
    for name, loss in losses.items():
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        pairs = zip(model.trainable_variables, gradients, strict=True)
        reached[name] = {v.path.split("/")[-2] for v, gradient in pairs if gradient is not None}
    assert reached == {
        "label": {"trunk_0", "label_hidden", "label"},
        "value": {"trunk_0", "value_hidden", "value"},
    }
    with pytest.raises(ValueError, match="`heads` is empty; it must be {name: size of its output}"):
        SharedTrunk(3, {})
