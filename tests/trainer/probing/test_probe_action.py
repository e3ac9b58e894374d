"""Actions of `probe` in a user's own loop, against a loop that does the same by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, probe, timesteps
from looptape.trainer.probing import ProbeSession, recurrent_loop
from tests.trainer.tools import assert_identical_weights, assert_same_weights

TIME = 5
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(4, TIME, 3)).astype("float32")
W = RANDOM.normal(size=(3, 3)).astype("float32")
EXAMPLES = 4


def run(weights, action, graph):
    """The gradient of a mean over examples with respect to the weights, through a loop with probes."""

    def loss(weights):
        state = tf.zeros([4, 3])
        if not graph:
            for t in range(TIME):
                state = tf.tanh(X[:, t] + probe("mine", state, t, action=action) @ weights)
        else:
            x = tf.constant(X)
            _, state = tf.while_loop(
                lambda t, s: t < TIME,
                lambda t, s: (t + 1, tf.tanh(tf.gather(x, t, axis=1) + probe("mine", s, t, action=action) @ weights)),
                (tf.constant(0), state),
            )
        return tf.reduce_mean(tf.reduce_sum(state**2, axis=1))

    def gradient(weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            value = loss(weights)
        return tape.gradient(value, weights)

    return (tf.function(gradient, autograph=False) if graph else gradient)(tf.constant(weights))


def by_hand(change):
    """The same in NumPy; `change(t, gradient)` is what becomes of the gradient of the state before time step t."""
    states = [np.zeros([4, 3])]
    for t in range(TIME):
        states.append(np.tanh(X[:, t] + states[-1] @ W))
    back, total = 2 * states[-1] / EXAMPLES, np.zeros([3, 3])
    for t in reversed(range(TIME)):
        inner = back * (1 - states[t + 1] ** 2)
        total += states[t].T @ inner
        back = change(t, inner @ W.T)
    return total


def clipped(t, gradient, limit=0.2):
    norms = np.linalg.norm(gradient, axis=1, keepdims=True)
    return np.where(norms > limit, gradient * limit / norms, gradient)


CASES = {
    "clip": (timesteps.ClipNorm(0.2), clipped),
    "cut": ([timesteps.Cut(at=[2]), timesteps.Scale(0.5)], lambda t, g: 0.5 * g * (t != 2)),
    "nothing": (timesteps.ClipNorm(1e9), lambda t, g: g),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_against_numpy(case, graph):
    action, change = CASES[case]
    np.testing.assert_allclose(run(W, action, graph), by_hand(change), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("graph", [False, True])
def test_before_and_after_are_reported(graph):
    def look():
        with tf.GradientTape() as tape:
            weights = tf.constant(W)
            tape.watch(weights)
            session = ProbeSession(None, tape=tape, per_example=True)
            with session:
                state = tf.ones([4, 3])
                steps = tf.range(TIME) if graph else range(TIME)
                for t in steps if not graph else ():
                    state = tf.tanh(X[:, t] + probe("mine", state, t, action=timesteps.ClipNorm(0.1)) @ weights)
                if graph:
                    x = tf.constant(X)
                    _, state = tf.while_loop(
                        lambda t, s: t < TIME,
                        lambda t, s: (
                            t + 1,
                            tf.tanh(
                                tf.gather(x, t, axis=1) + probe("mine", s, t, action=timesteps.ClipNorm(0.1)) @ weights
                            ),
                        ),
                        (tf.constant(0), state),
                    )
                total = tf.reduce_mean(tf.reduce_sum(state**2, axis=1))
        found = tape.gradient(total, session.sources)
        return {layer: values["state"] for layer, values in session.report(found).items()}

    found = tf.function(look, autograph=False)() if graph else look()
    before, after = (np.asarray(found[name])[:, :TIME] for name in ("mine", "mine_steered"))
    assert np.any(before > 0.11) and np.all(after < 0.1 + 1e-6)
    np.testing.assert_allclose(after, np.minimum(before, 0.1), rtol=1e-5)


class Own(Trainer):
    limit = 0.3

    def compute_losses(self, batch, training):
        inputs, targets = batch
        state, cell = tf.zeros([tf.shape(inputs)[0], 3]), self.model
        for t in range(TIME):
            state = cell(tf.concat([inputs[:, t], probe("mine", state, t, action=timesteps.ClipNorm(self.limit))], 1))
        return {"error": tf.square(state - targets)}


class InLoop(Own):
    """The same in `recurrent_loop`."""

    name = None

    def compute_losses(self, batch, training):
        inputs, targets = batch
        kernel, bias = [tf.convert_to_tensor(weight) for weight in self.model.trainable_variables]

        def step(t, x, states):
            state = probe("mine", states[0], t, action=timesteps.ClipNorm(self.limit))
            state = tf.tanh(tf.concat([x, state], 1) @ kernel + bias)
            return state, [state]

        states = [tf.zeros([tf.shape(inputs)[0], 3])]
        return {"error": tf.square(recurrent_loop(step, inputs, states, name=self.name)[1][0] - targets)}


class Named(InLoop):
    name = "loop"


def trained(limit=0.3, batch=4, trainer_class=Own, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "tanh")])
    trainer = trainer_class(model, keras.optimizers.SGD(0.5), **options)
    trainer.limit = limit
    data = tf.data.Dataset.from_tensor_slices((X, X[:, 0])).batch(batch, drop_remainder=True).repeat()
    trainer.fit(data, steps=3, progress=False)
    return model


def test_limits_are_in_the_units_of_the_logs():
    assert_same_weights(trained(), trained(batch=2, accumulation_steps=2), tolerance=2e-6)
    free, bound = trained(limit=np.inf), trained()
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(free.get_weights(), bound.get_weights(), strict=True))
    assert_identical_weights(trained(), trained(probe_every=1))


@pytest.fixture(scope="module")
def stepped():
    return trained()


@pytest.mark.parametrize(
    ("trainer_class", "options"),
    [
        (InLoop, {}),
        (InLoop, {"batch": 2, "accumulation_steps": 2}),
        (Named, {"probe_every": 2}),
        pytest.param(InLoop, {"probe_every": 1}, marks=pytest.mark.long),
        pytest.param(Named, {"batch": 2, "accumulation_steps": 2, "probe_every": 1}, marks=pytest.mark.long),
    ],
)
def test_in_a_recurrent_loop(trainer_class, options, stepped):
    assert_same_weights(trained(trainer_class=trainer_class, **options), stepped, tolerance=2e-6)


def test_an_output_beside_the_state_that_an_action_acts_on():
    """The trial run must not take the output for the state: what arrives there is not for the action."""

    @tf.function(autograph=False)
    def gradient(weights):
        def step(t, x, states):
            hidden = tf.tanh(x + states[0] @ weights)
            return hidden, [probe("mine", hidden, t, action=timesteps.Scale(0.0))]

        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs, _ = recurrent_loop(step, tf.constant(X), [tf.zeros([4, 3])])
            total = tf.reduce_sum(outputs**2)
        return tape.gradient(total, weights)

    state, expected = np.zeros([4, 3]), np.zeros([3, 3])
    for t in range(TIME):
        after = np.tanh(X[:, t] + state @ W)
        expected += state.T @ (2 * after * (1 - after**2))
        state = after
    np.testing.assert_allclose(gradient(tf.constant(W)), expected, rtol=1e-4, atol=1e-5)


class Clock(keras.layers.Layer):
    """A cell that counts its time steps, and clips what it sends back."""

    state_size, output_size = [3, 1], 3
    acts = True

    def build(self, shape):
        self.kernel = self.add_weight(shape=(6, 3), initializer=keras.initializers.GlorotUniform(seed=1))

    def call(self, inputs, states):
        t = tf.cast(states[1][0, 0], tf.int32)
        state = probe("inside", states[0], t, action=timesteps.ClipNorm(0.1) if self.acts else None)
        new = keras.ops.tanh(keras.ops.matmul(keras.ops.concatenate([inputs, state], 1), self.kernel))
        return new, [new, states[1] + 1.0]


def test_in_a_cell_of_a_keras_layer():
    def run(acts=True, batch=4, **options):
        cell = Clock()
        cell.acts = acts
        model = keras.Sequential([keras.Input((TIME, 3)), keras.layers.RNN(cell)])
        trainer = Trainer(model, keras.optimizers.SGD(0.5), {"error": keras.losses.MeanSquaredError()}, **options)
        data = tf.data.Dataset.from_tensor_slices((X, X[:, 0])).batch(batch, drop_remainder=True).repeat()
        trainer.fit(data, steps=2, progress=False)
        return model

    expected = run(recurrent="keras")
    assert np.abs(run(acts=False).get_weights()[0] - expected.get_weights()[0]).max() > 1e-3
    assert_same_weights(run(batch=2, accumulation_steps=2), expected)
    assert_same_weights(run(probe_every=1), expected)


def test_bad_input():
    with pytest.raises(TypeError, match="`timestep_actions` has 'clip'; each must be an action"):
        probe("mine", tf.ones([2, 3]), 0, action="clip")
    with pytest.raises(ValueError, match=r"`probe\('mine', …\)` has an action and batched=False"):
        probe("mine", tf.ones([2, 3]), 0, batched=False, action=timesteps.ClipNorm(1.0))
    with tf.GradientTape() as outer:
        x = tf.ones([2, 3])
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            total = tf.reduce_sum(tf.square(probe("mine", x, 0, action=timesteps.Scale(0.5))))
        first = inner.gradient(total, x)
    with pytest.raises(RuntimeError, match=r"A second derivative goes through `probe\('mine', …\)`"):
        outer.gradient(first, x)
