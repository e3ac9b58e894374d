"""The loss Jacobian against `tape.jacobian` in float64, the values of case A, and a limit of memory that holds."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.losses import summed
from looptape.trainer import Trainer
from looptape.trainer.analysis import adjoints, memory
from tests.trainer.probing.tools import ReadoutCell, TwiceCell

BATCH, TIME, FEATURES = 4, 7, 3
layers = keras.layers


def examples(time=TIME, outputs=2, dtype="float64"):
    rng = np.random.default_rng(3)
    return rng.normal(size=(BATCH, time, FEATURES)).astype(dtype), rng.normal(size=(BATCH, time, outputs)).astype(dtype)


def squares(targets, outputs):
    return tf.square(targets - outputs)


def sequential(*parts, time=TIME):
    return keras.Sequential([keras.Input((time, FEATURES)), *parts])


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def by_tape(model, x, y, weights=None):
    """The oracle: `tape.jacobian` of the shares Σ_b w·l / Σ w."""

    def jacobian():
        with tf.GradientTape() as tape:
            values = squares(y, model(x, training=True))
            w = tf.ones_like(values) if weights is None else tf.constant(weights, values.dtype)[..., None]
            w = tf.broadcast_to(w, values.shape)
            shares = tf.reduce_sum(values * w, axis=[0, 2]) / tf.reduce_sum(w)
        return tape.jacobian(shares, [variable.value for variable in model.trainable_variables])

    return tf.function(jacobian, autograph=False)()


def assert_equal(found, model, expected, tolerance=1e-10):
    assert list(found) == [variable.path for variable in model.trainable_variables]
    for own, rows in zip(found.values(), expected, strict=True):
        assert own.shape == tuple(rows.shape)
        np.testing.assert_allclose(own, rows, atol=tolerance * np.abs(rows).max(), rtol=0)


def holed(x):
    x = x.copy()
    x[1, 4:], x[2, :2], x[3, 2:4] = 0, 0, 0
    return x


MODELS = {
    "LSTM": lambda: sequential(layers.LSTM(5, return_sequences=True), layers.Dense(2)),
    "two layers": lambda: sequential(
        layers.Dense(3), layers.GRU(5, return_sequences=True), layers.SimpleRNN(2, return_sequences=True)
    ),
    "both directions": lambda: sequential(layers.Bidirectional(layers.GRU(5, return_sequences=True)), layers.Dense(2)),
    "stacked cells": lambda: sequential(
        layers.RNN([layers.LSTMCell(4), layers.GRUCell(5)], return_sequences=True), layers.Dense(2)
    ),
    "encoder and decoder": lambda: sequential(
        layers.LSTM(4), layers.RepeatVector(TIME), layers.LSTM(3, return_sequences=True), layers.Dense(2)
    ),
    "an own cell": lambda: sequential(layers.RNN(TwiceCell(4), return_sequences=True), layers.Dense(2)),
    "an output beside the states": lambda: sequential(layers.RNN(ReadoutCell(4), return_sequences=True)),
}


# The others are as quick to break and slower to run.
QUICK = ("LSTM", "encoder and decoder", "an output beside the states")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in MODELS if name not in QUICK)]
)
def test_equals_tape_jacobian(name, float64):
    model = MODELS[name]()
    x, y = examples()
    trainer = Trainer(model, "sgd", {"error": squares})
    assert_equal(trainer.loss_jacobian((x, y)), model, by_tape(model, x, y))


MASKED = {
    "repeated": lambda: layers.LSTM(5, return_sequences=True),
    "zeroed": lambda: layers.GRU(5, return_sequences=True, zero_output_for_mask=True),
    "backwards": lambda: layers.GRU(5, return_sequences=True, go_backwards=True),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_layers_equal_tape_jacobian(name, float64):
    """The trainer weighs by Keras's mask, which for an output in reverse is still that of the input."""
    x, y = examples()
    x = holed(x)
    model = sequential(layers.Masking(), MASKED[name](), layers.Dense(2))
    mask = (x != 0).any(axis=2).astype("float64")
    found = Trainer(model, "sgd", {"error": squares}).loss_jacobian((x, y))
    assert_equal(found, model, by_tape(model, x, y, mask))


@pytest.mark.long
def test_a_cell_that_mixes_examples_goes_the_general_way(float64):
    """Calling such a cell on several time steps at once would be wrong; the tape goes through it instead."""

    class Mixing(TwiceCell):
        def call(self, inputs, states):
            output, new = super().call(inputs, states)
            output = output - keras.ops.mean(output, axis=0, keepdims=True)
            return output, [output]

    model = sequential(layers.RNN(Mixing(4), return_sequences=True), layers.Dense(2))
    x, y = examples()
    found = Trainer(model, "sgd", {"error": squares}).loss_jacobian((x, y))
    assert_equal(found, model, by_tape(model, x, y))


@pytest.mark.long
def test_dropout_in_a_cell_draws_one_mask_for_all_chunks():
    """Whatever the chunks, the same masks."""
    model = sequential(layers.LSTM(5, return_sequences=True, recurrent_dropout=0.3), layers.Dense(2))
    x, y = examples(dtype="float32")
    trainer = Trainer(model, "sgd", {"error": squares})
    whole = trainer.loss_jacobian((x, y))
    for path, rows in trainer.loss_jacobian((x, y), time_steps=[2, 6]).items():
        np.testing.assert_allclose(rows, whole[path][[2, 6]], atol=1e-6)


def test_sums_to_the_gradient_of_all_losses():
    """Weighted terms with and without a time axis, masks, and a regularizer: all of dL/dW is in the sum."""
    model = sequential(
        layers.Masking(), layers.GRU(5, return_sequences=True, kernel_regularizer="l2"), layers.Dense(2, name="out")
    )
    x, y = examples(dtype="float32")
    x = holed(x)
    losses = {"all": squares, "last": lambda t, o: tf.abs(t - o)[:, -1, 0], "total": lambda t, o: summed(squares(t, o))}
    weights = {"all": 1.0, "last": 0.5, "total": 0.01}
    found = Trainer(model, "sgd", losses, loss_weights=weights).loss_jacobian((x, y))
    mask = tf.constant((x != 0).any(axis=2), tf.float32)
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        values = squares(y, outputs)
        weighted = values * mask[..., None]
        total = tf.reduce_sum(weighted) / (2 * tf.reduce_sum(mask)) + 0.01 * tf.reduce_sum(weighted)
        total += 0.5 * tf.reduce_mean(tf.abs(y - outputs)[:, -1, 0]) + tf.add_n(model.losses)
    gradients = tape.gradient(total, [variable.value for variable in model.trainable_variables])
    for rows, gradient in zip(found.values(), gradients, strict=True):
        np.testing.assert_allclose(rows.sum(axis=0), gradient, atol=2e-6)


def test_a_loss_on_the_last_output_counts_to_the_last_time_step():
    model = sequential(layers.LSTM(5), layers.Dense(2))
    x, y = examples(dtype="float32")
    found = Trainer(model, "sgd", {"error": squares}).loss_jacobian((x, y[:, 0]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(squares(y[:, 0], model(x, training=True)))
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    for rows, gradient in zip(found.values(), gradients, strict=True):
        assert rows.shape[0] == TIME and not rows[:-1].any()
        np.testing.assert_allclose(rows[-1], gradient, atol=1e-6)


@pytest.mark.parametrize("limit_of_rows", [1, 3])
def test_chunks_and_blocks_do_not_change_the_result(limit_of_rows, monkeypatch):
    model = MODELS["two layers"]()
    x, y = examples(dtype="float32")
    trainer = Trainer(model, "sgd", {"error": squares})
    whole = trainer.loss_jacobian((x, y))
    monkeypatch.setattr(memory, "_LARGEST", limit_of_rows)
    monkeypatch.setattr(adjoints, "_ROWS", 3 * BATCH)
    for path, rows in trainer.loss_jacobian((x, y)).items():
        np.testing.assert_allclose(rows, whole[path], atol=1e-6)


def test_a_subset_and_norms():
    model = MODELS["LSTM"]()
    x, y = examples(dtype="float32")
    trainer = Trainer(model, "sgd", {"error": squares})
    whole = trainer.loss_jacobian((x, y))
    kernel, bias = model.trainable_variables[0], model.trainable_variables[-1]
    part = trainer.loss_jacobian((x, y), variables=[bias.path, kernel], time_steps=[5, -1, 0])
    assert list(part) == [bias.path, kernel.path]
    for path, rows in part.items():
        np.testing.assert_allclose(rows, whole[path][[5, 6, 0]], atol=1e-6)
    for path, norms in trainer.loss_jacobian((x, y), norms_only=True).items():
        expected = np.sqrt(np.square(whole[path]).reshape(TIME, -1).sum(axis=1))
        np.testing.assert_allclose(norms, expected, rtol=1e-5)


# ---- Users' loops: the values of case A, worked out by hand and by NumPy.


class Growing(Trainer):
    """w = 0.8, x ← w·x + 1 five times from 1.5; the loss at a step is x²."""

    def compute_losses(self, batch, training):
        def body(t, x, values):
            x = self.model.trainable_variables[0] * x + 1.0
            return t + 1, x, values.write(t, x**2)

        initial = (tf.constant(0), tf.constant(1.5), tf.TensorArray(tf.float32, 5))
        values = tf.while_loop(lambda t, *_: t < 5, body, initial)[2].stack()
        return {"square": summed(values[tf.newaxis])}


def test_a_scalar_loop_of_a_user():
    w = tf.Variable(0.8, name="w")
    found = Growing((lambda x: x, [w]), "sgd").loss_jacobian(tf.zeros([1, 1]))["w"]
    np.testing.assert_allclose(found, [6.6, 18.768, 35.15968, 54.15222, 74.28816], rtol=1e-6)
    assert found.sum() == pytest.approx(188.9681, rel=1e-6)


class Shrinking(Trainer):
    """W = [[.3, .1], [.2, .4]], x ← Wx four times from (1, −1), in an AutoGraph loop; the loss is ‖x‖²."""

    def compute_losses(self, batch, training):
        x, values = tf.constant([[1.0], [-1.0]]), tf.TensorArray(tf.float32, 4)
        for t in tf.range(4):
            x = self.model.trainable_variables[0] @ x
            values = values.write(t, tf.reduce_sum(x**2))
        return {"square": summed(tf.ensure_shape(values.stack(), [4])[tf.newaxis])}


def test_a_matrix_loop_of_a_user():
    start = np.array([[0.3, 0.1], [0.2, 0.4]])
    found = Shrinking((lambda x: x, [tf.Variable(start.astype("float32"), name="w")]), "sgd").loss_jacobian(
        tf.zeros([1, 1])
    )["w"]

    def losses(w):
        x, values = np.array([1.0, -1.0]), []
        for _ in range(4):
            x = w @ x
            values.append(x @ x)
        return np.array(values)

    np.testing.assert_allclose(losses(start), [0.08, 0.0032, 1.28e-4, 5.12e-6], rtol=1e-10)
    expected = np.zeros((4, 2, 2))
    for i, j in np.ndindex(2, 2):
        shift = np.zeros((2, 2))
        shift[i, j] = 1e-6
        expected[:, i, j] = (losses(start + shift) - losses(start - shift)) / 2e-6
    assert found.shape == (4, 2, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found.sum(axis=0), [[0.4244, -0.4244], [-0.4436448, 0.4436448]], rtol=1e-6)


# ---- Memory, and what cannot be done.


def test_the_chunk_follows_the_limit():
    needs = memory.Needs(fixed=100, per_loss=10)
    assert memory.chunk_size(needs, 20, result_bytes=50, limit=1e9) == 20
    assert memory.chunk_size(needs, 20, result_bytes=50, limit=250) == 10
    assert memory.chunk_size(needs, 20, result_bytes=50, limit=160) == 1
    with pytest.raises(ValueError, match="Raise the limit"):
        memory.chunk_size(needs, 20, result_bytes=50, limit=159)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit_bytes": 1000}, "needed even for one time step"),
        ({"memory_limit_bytes": "2 GB"}, "must be a positive number"),
        ({"variables": ["nothing"]}, "'nothing', which is not a trainable variable"),
        ({"variables": []}, "`variables` is empty"),
        ({"time_steps": [7]}, "there are 7 time steps"),
        ({"time_steps": []}, "at least one"),
    ],
)
def test_bad_input(options, message):
    x, y = examples(dtype="float32")
    trainer = Trainer(MODELS["LSTM"](), "sgd", {"error": squares})
    with pytest.raises(ValueError, match=message):
        trainer.loss_jacobian((x, y), **options)


def test_losses_without_time():
    x, _ = examples(dtype="float32")
    trainer = Trainer(
        keras.Sequential([layers.Dense(1)]), "sgd", {"error": lambda t, o: tf.reduce_mean(o, axis=[1, 2])}
    )
    with pytest.raises(ValueError, match=r"No loss has a time axis: their shapes are \{'error': \(4,\)\}"):
        trainer.loss_jacobian((x, x))


def test_a_variable_that_no_loss_reaches_is_explained():
    class Detached(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = layers.Dense(2), layers.Dense(2)

        def call(self, x):
            return self.used(x) + tf.stop_gradient(self.unused(x))

    x, y = examples(dtype="float32")
    with pytest.raises(RuntimeError, match="cut by `tf.stop_gradient`"):
        Trainer(Detached(), "sgd", {"error": squares}).loss_jacobian((x, y))


class PerStep(Trainer):
    def compute_losses(self, batch, training):
        return {"error": tf.square(self.model(batch[0]) - batch[1])[..., 0]}


def translator(kind):
    """An encoder of 7 and a decoder of 5 time steps; the decoder recurrent, plain, or a model of one's own."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((7, 2))
    _, state = keras.layers.GRU(3, return_state=True, name="encoder")(inputs)
    repeated = keras.layers.RepeatVector(5)(state)
    if kind == "recurrent":
        repeated = keras.layers.SimpleRNN(4, return_sequences=True, name="decoder")(repeated)
    place = keras.layers.Lambda(lambda x: x * tf.reshape(tf.range(1.0, 6.0), [1, 5, 1]))(repeated)
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(place))
    if kind != "own":
        return model

    class Wrapped(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = model

        def call(self, inputs):
            return self.inner(inputs)

    return Wrapped()


@pytest.mark.parametrize("kind", ["recurrent", "plain", "own"])
def test_an_encoder_and_a_decoder_of_unequal_lengths(kind):
    """Each row is the tape's gradient of the loss of that step of the decoder."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 7, 2)).astype("float32"), rng.normal(size=(4, 5, 1)).astype("float32")
    trainer = PerStep(translator(kind), "sgd")
    found = trainer.loss_jacobian((x, y))
    with tf.GradientTape(persistent=True) as tape:
        losses = tf.unstack(tf.reduce_sum(tf.square(trainer.model(x) - y)[..., 0], axis=0) / 20.0)
    variables = trainer.model.trainable_variables
    for t, loss in enumerate(losses):
        for variable, expected in zip(variables, tape.gradient(loss, [v.value for v in variables]), strict=True):
            assert found[variable.path].shape[0] == 5
            np.testing.assert_allclose(found[variable.path][t], expected, rtol=1e-4, atol=1e-6)
    credit = trainer.credit_matrix((x, y))["encoder"]
    assert credit.shape == (5, 7) and np.all(credit > 0)


def test_a_loss_for_each_label_is_not_taken_for_one_of_each_time_step():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((7, 2)), keras.layers.GRU(3), keras.layers.Dense(5)])

    class PerLabel(Trainer):
        def compute_losses(self, batch, training):
            return {"error": tf.square(self.model(batch[0]) - batch[1])}

    found = PerLabel(model, "sgd").loss_jacobian((np.ones([4, 7, 2], "float32"), np.ones([4, 5], "float32")))
    assert all(rows.shape[0] == 7 and not rows[:-1].any() and rows[-1].any() for rows in found.values())
