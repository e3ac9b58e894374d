"""Weights of time steps against NumPy, and the same update whatever the number of micro-batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses
from tests.trainer.tools import assert_same_weights

TIME = 5
LENGTHS = np.array([5, 2, 4, 1])
RANDOM = np.random.default_rng(0)
X = (RANDOM.normal(size=(4, TIME, 2)) * (np.arange(TIME) < LENGTHS[:, None])[..., None]).astype("float32")
Y = RANDOM.normal(size=(4, TIME, 1)).astype("float32")
EXPECTED = {
    "last": lambda t, n: float(t == n - 1),
    "linear": lambda t, n: (t + 1) / n,
    "discount": lambda t, n: 0.5 ** (n - 1 - t),
    "list": lambda t, n: [3.0, 0.0, 1.0, 2.0, 0.5][t],
    "function": lambda t, n: 1.0 + t,
}
GIVEN = {
    "last": "last",
    "linear": "linear",
    "discount": 0.5,
    "list": [3.0, 0.0, 1.0, 2.0, 0.5],
    "function": lambda t, length: 1.0 + t,
}


def by_hand(name, errors, lengths):
    pairs = [(EXPECTED[name](t, n), errors[row, t]) for row, n in enumerate(lengths) for t in range(TIME) if t < n]
    return sum(w * e for w, e in pairs) / sum(w for w, _ in pairs)


def model():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((TIME, 2)),
            keras.layers.Masking(),
            keras.layers.GRU(3, return_sequences=True),
            keras.layers.Dense(1),
        ]
    )


@pytest.mark.parametrize("name", GIVEN)
def test_against_numpy_with_a_mask(name):
    net = model()
    trainer = Trainer(net, "sgd", {"error": losses.over_time(losses.squared_error, GIVEN[name])})
    errors = np.square(net.predict(X, verbose=0) - Y)[..., 0].astype("float64")
    found = trainer.evaluate((X, Y), batch_size=4)["error"]
    assert found == pytest.approx(by_hand(name, errors, LENGTHS), rel=1e-5)


@pytest.mark.parametrize("name", ["last", "discount"])
def test_accumulation_equals_the_large_batch(name):
    nets = [model(), model()]
    for net, parts in zip(nets, (1, 4), strict=True):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4 // parts).repeat()
        given = {"error": losses.over_time(keras.losses.MeanSquaredError(), GIVEN[name])}
        trainer = Trainer(net, keras.optimizers.SGD(0.5), given, accumulation_steps=parts)
        trainer.fit(data, steps=3, progress=False)
    assert_same_weights(*nets)


def test_weights_of_the_loss_itself_say_where_a_sequence_ends():
    labels = tf.constant([[1, 2, 0, 0], [2, 1, 2, 1]])
    logits = tf.constant(RANDOM.normal(size=(2, 4, 3)), tf.float32)
    values, weights = losses.over_time(losses.masked_cross_entropy(padding=0), "last")(labels, logits)
    np.testing.assert_array_equal(weights, [[0, 1, 0, 0], [0, 0, 0, 1]])
    assert values.shape == (2, 4)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("first", "`weights` is 'first'; it must be one of"),
        (1.5, "`weights` is the discount 1.5; it must be above 0"),
        ([1.0, -1.0], "must be finite, not negative"),
        ([0.0, 0.0], "not all 0"),
    ],
)
def test_bad_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        losses.over_time(losses.squared_error, weights)


def test_a_loss_without_time():
    with pytest.raises(ValueError, match=r"returns values of shape \(2,\); to weight its time steps"):
        losses.over_time(losses.squared_error, "last")(tf.zeros([2, 1]), tf.zeros([2, 1]))
    with pytest.raises(ValueError, match="a list of 2 numbers, and the loss has 3 time steps"):
        losses.over_time(losses.squared_error, [1.0, 2.0])(tf.zeros([4, 3, 1]), tf.zeros([4, 3, 1]))
    with pytest.raises(TypeError, match="`over_time` got 3 as the loss"):
        losses.over_time(3, "last")
