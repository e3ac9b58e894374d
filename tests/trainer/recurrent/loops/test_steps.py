"""Steps that read and move Keras variables, under a `Trainer` and without."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, timesteps
from looptape.trainer.probing import recurrent_loop
from tests.trainer.tools import assert_identical_weights, assert_same_weights

TIME, BATCH = 5, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(BATCH, TIME, 3)).astype("float32")
CLIP = {"loop": [timesteps.ClipNorm(0.3)]}


class Own(Trainer):
    """A step over tensors that were read before the loop."""

    memory = name = None

    def compute_losses(self, batch, training):
        inputs, targets = batch
        states = [tf.zeros([tf.shape(inputs)[0], 3])]
        outputs, _ = recurrent_loop(self.make_step(), inputs, states, memory=self.memory, name=self.name)
        return {"error": tf.square(outputs - targets[:, tf.newaxis])}

    def make_step(self):
        kernel, bias = [tf.convert_to_tensor(weight) for weight in self.model.trainable_variables]
        return lambda t, x, states: self.twice(tf.tanh(tf.concat([x, states[0]], 1) @ kernel + bias))

    def twice(self, state):
        return state, [state]


class OfLayer(Own):
    def make_step(self):
        return lambda t, x, states: self.twice(self.model(tf.concat([x, states[0]], 1), training=True))


def trained(trainer_class, memory=None, name=None, batch=BATCH, layers=(), **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "tanh"), *layers])
    trainer = trainer_class(model, keras.optimizers.SGD(0.5), **options)
    trainer.memory, trainer.name = memory, name
    data = tf.data.Dataset.from_tensor_slices((X, X[:, 0])).batch(batch, drop_remainder=True).repeat()
    trainer.fit(data, steps=2, progress=False)
    return model


ASKED = {"name": "loop", "timestep_actions": CLIP}


@pytest.fixture(scope="module")
def steered():
    return trained(Own, **ASKED)


def test_a_step_over_a_keras_layer_equals_one_over_tensors(steered):
    assert_identical_weights(trained(OfLayer, memory="every 2", **ASKED), steered)
    plain = trained(Own)
    assert np.abs(plain.get_weights()[0] - steered.get_weights()[0]).max() > 1e-3


@pytest.mark.long
def test_with_accumulation_and_probes(steered):
    assert_same_weights(trained(OfLayer, batch=2, accumulation_steps=2, probe_every=1, **ASKED), steered)
    assert_identical_weights(trained(OfLayer, memory="sqrt", name="loop", probe_every=1), trained(Own))


class Count(keras.layers.Layer):
    """Adds up how often it was called, and scales by it."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs * (1.0 + 0.1 * self.calls)


def test_what_a_step_moves_is_carried_along_and_repeated():
    def layers():
        return [Count(), keras.layers.Dropout(0.5, seed=3)]

    plain = trained(OfLayer, layers=layers())
    assert float(plain.layers[1].calls.numpy()) == 2 * (TIME + 1)  # two updates, each with a trial run
    bounded = trained(OfLayer, layers=layers(), memory="sqrt")
    for one, other in zip(plain.variables, bounded.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    kernel, bias = plain.get_weights()[:2]
    alone = trained(Own)
    assert np.abs(alone.get_weights()[0] - kernel).max() > 1e-3 and np.abs(bias).max() > 0


def test_a_layer_that_is_built_in_the_step():
    """By the trial run, outside any trainer."""
    layer = keras.layers.Dense(3, "tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=1))

    @tf.function(autograph=False)
    def run():
        def step(t, x, states):
            state = layer(tf.concat([x, states[0]], 1))
            return state, [state]

        with tf.GradientTape() as tape:
            outputs, _ = recurrent_loop(step, tf.constant(X), [tf.zeros([BATCH, 3])], memory="sqrt")
            total = tf.reduce_sum(outputs**2)
        return total, tape.gradient(total, [variable.value for variable in layer.trainable_variables])

    total, found = run()
    with tf.GradientTape() as tape:
        state, expected = tf.zeros([BATCH, 3]), 0.0
        for t in range(TIME):
            state = layer(tf.concat([X[:, t], state], 1))
            expected += tf.reduce_sum(state**2)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for one, other in zip(found, tape.gradient(expected, layer.trainable_variables), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


class OfVariable(Own):
    def make_step(self):
        kernel, bias = [weight.value for weight in self.model.trainable_variables]
        return lambda t, x, states: self.twice(tf.tanh(tf.concat([x, states[0]], 1) @ kernel + bias))


def test_a_tf_variable_that_no_keras_variable_is_asked_for():
    message = r"its time step reads the `tf.Variable`s \['.*kernel:0', '.*bias:0'\] inside the loop over updates"
    with pytest.raises(RuntimeError, match=message):
        trained(OfVariable, memory="sqrt")


def gradient_with(act):
    """Of a loop's loss with respect to a kernel, with `act` in the backward pass."""
    kernel = tf.constant(RANDOM_KERNEL)

    def step(t, x, states):
        state = tf.tanh(x + states[0] @ kernel)
        return state, [state]

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            outputs, _ = recurrent_loop(step, tf.constant(X), [tf.zeros([BATCH, 3])], act=act)
            total = tf.reduce_sum(outputs**2)
        return tape.gradient(total, kernel)

    return run().numpy()


RANDOM_KERNEL = RANDOM.normal(size=(3, 3)).astype("float32")


def test_actions_of_one_loop():
    def halved(t, gradients, valid):
        return [0.5 * gradient for gradient in gradients]

    expected = gradient_with(halved)
    for act in (timesteps.Scale(0.5), [timesteps.ClipNorm(1e9), timesteps.Scale(0.5)]):
        np.testing.assert_allclose(gradient_with(act), expected, rtol=1e-6)
    assert np.abs(gradient_with([]) - expected).max() > 1e-2


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda t, gradients, valid: None, r"`act` returned None for 1 gradient\(s\)"),
        (lambda t, gradients, valid: gradients * 2, "`act` returned 2 gradients for 1. Return all of them"),
        (lambda t, gradients, valid: [gradients[0][:, :1]], r"`act` returned \(4, 1\) float32 for a gradient \(4, 3\)"),
        (0.5, "`act` is 0.5; it must be an action such as"),
        ([0.5], "has 0.5; each must be an action"),
    ],
)
def test_an_act_that_cannot_be(act, message):
    with pytest.raises((TypeError, ValueError), match=message):
        gradient_with(act)
