"""Targets [n] against outputs [n, 1]: aligned as Keras does, or refused at the trace; never trained on [n, n]."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses
from looptape.losses.reduction import reduce_term
from looptape.trainer.step.forward.broadcasting import check_broadcasts
from looptape.trainer.step.forward.loss_terms import apply_losses, check_pair
from tests.trainer.tools import dataset, linear_model, regression

X, Y = regression(16)


def plain(targets, outputs):
    return tf.square(targets - outputs)


def applied(loss, targets, outputs):
    return apply_losses({"error": loss}, None, tf.constant(targets), tf.constant(outputs), None)["error"]


@pytest.mark.parametrize("targets", [Y, Y[:, 0]], ids=["column", "flat"])
def test_a_plain_function_gives_what_keras_gives(targets):
    reference = linear_model()
    reference.compile("sgd", plain)
    expected = reference.evaluate(X, targets, verbose=0)
    found = Trainer(linear_model(), "sgd", {"error": plain}).evaluate(dataset(X, targets, batch=8))
    np.testing.assert_allclose(found["error"], expected, rtol=1e-5)


@pytest.mark.parametrize("targets", [Y, Y[:, 0]], ids=["column", "flat"])
def test_a_plain_function_as_a_metric_measures_what_it_does_as_a_loss(targets):
    trainer = Trainer(linear_model(), "sgd", {"error": plain}, metrics={"measured": plain})
    results = trainer.evaluate(dataset(X, targets, batch=len(X)))
    assert results["measured"] == pytest.approx(results["error"], rel=1e-6)
    assert results["error"] == pytest.approx(np.mean((trainer.model(X).numpy() - Y) ** 2), rel=1e-5)


def test_ranks_are_aligned_on_either_side_and_in_sums():
    flat, column = np.arange(4.0), np.ones([4, 1])
    expected = (flat[:, None] - column) ** 2
    np.testing.assert_array_equal(applied(plain, flat, column), expected)
    np.testing.assert_array_equal(applied(plain, column, flat), expected)
    np.testing.assert_array_equal(applied(losses.summed(plain), flat, column).values, expected)
    assert applied(plain, np.zeros([4, 3]), np.zeros([4, 3, 1])).shape == [4, 3]
    assert applied(losses.summed(losses.squared_error), np.zeros([4, 3]), np.zeros([4, 3, 1])).values.shape == [4, 3]


class Reduced(Trainer):
    def compute_losses(self, batch, training):
        inputs, targets = batch
        return {"error": tf.reduce_mean(tf.square(targets - self.model(inputs, training=training)))}


class Elements(Trainer):
    def compute_losses(self, batch, training):
        inputs, targets = batch
        return {"error": tf.abs(self.model(inputs, training=training)[:, 0] - tf.cast(targets, tf.float32))}


@pytest.mark.parametrize("drop", [False, True], ids=["batch unknown", "batch known"])
@pytest.mark.parametrize(("kind", "targets"), [(Reduced, Y[:, 0]), (Elements, Y)])
def test_own_losses_that_broadcast_are_refused_at_the_trace(kind, targets, drop):
    data = tf.data.Dataset.from_tensor_slices((X, targets)).batch(8, drop_remainder=drop)
    message = r"Loss 'error' combines a tensor of shape \[(n|8)\] with one of shape .* Both must .* Write e.g."
    with pytest.raises(ValueError, match=message):
        kind(linear_model(), "sgd").fit(data, steps=1)


def test_eager_training_looks_as_well():
    with pytest.raises(ValueError, match=r"Loss 'error' combines a tensor of shape"):
        Reduced(linear_model(), "sgd", run_eagerly=True).fit(dataset(X, Y[:, 0], batch=8), steps=1)


def test_a_function_that_was_written_for_flat_targets_is_refused():
    trainer = Trainer(linear_model(), "sgd", {"error": lambda y, outputs: tf.square(y - outputs[:, 0])})
    with pytest.raises(ValueError, match="Loss 'error' combines a tensor of shape"):
        trainer.fit(dataset(X, Y[:, 0], batch=8), steps=1)


LEGITIMATE = {
    "time as long as the batch": lambda x, y: tf.square(x - y),
    "a discount for each time step": lambda x, y: tf.constant([0.5] * 4) * x[:, :1],
    "all pairs": lambda x, y: tf.abs(x[:, 0][:, tf.newaxis] - x[:, 1]),
    "squared norms": lambda x, y: tf.reduce_sum(x * x, 1, keepdims=True) + tf.reduce_sum(y * y, 1),
    "functions of all pairs": lambda x, y: tf.exp(-2.0 * tf.sqrt(x[:, 0][:, tf.newaxis])) - y[:, 1],
    "a product of all": lambda x, y: tf.einsum("i,jk->ij", x[:, 0], y[:, :1]),
    "same class": lambda x, y: tf.where(x[:, 0][:, tf.newaxis] == x[:, 0], tf.matmul(x, y), 0.0),
    "positions": lambda x, y: tf.where(tf.range(4.0) < x[:, :1], x, y),
    "looked up": lambda x, y: tf.gather(x[:, 0], tf.cast(y[:, :1], tf.int32)),
    "a condition with arguments": lambda x, y: tf.cond(
        y[0, 0] > 0, lambda: x[:, 0][:, tf.newaxis] - y[:, 0], lambda: x
    ),
    "all pairs, said so": lambda x, y: x[:, :1] - y[:, 0][tf.newaxis, :],
}


@pytest.mark.parametrize("loss", LEGITIMATE.values(), ids=LEGITIMATE)
def test_deliberate_squares_pass(loss):
    def trace(x, y):
        check_broadcasts("error", loss(x, y))

    spec = tf.TensorSpec([4, 4], tf.float32)
    tf.function(trace, autograph=False).get_concrete_function(spec, spec)


def test_what_passes_there_is_refused_without_the_sign_of_purpose():
    spec = tf.TensorSpec([4, 4], tf.float32)
    function = tf.function(lambda x, y: check_broadcasts("error", x[:, :1] - y[:, 0]), autograph=False)
    with pytest.raises(ValueError, match=r"shape \[4\] with one of shape \[4, 1\]"):
        function.get_concrete_function(spec, spec)


@tf.function(autograph=False)
def own_function(x, y):
    return tf.square(x - y)


@tf.function(autograph=False)
def function_in_function(x, y):
    return tf.reduce_mean(own_function(x, y), -1)


HIDDEN = {
    "log cosh": lambda x, y: tf.math.log(tf.cosh(x - y)),
    "largest error": lambda x, y: tf.reduce_max(tf.abs(x - y), -1),
    "flattened": lambda x, y: tf.reshape(tf.square(x - y), [-1]),
    "norm": lambda x, y: tf.norm(x - y),
    "sum of several": lambda x, y: tf.add_n([tf.square(x - y), tf.abs(x - y)]),
    "einsum": lambda x, y: tf.einsum("ij->i", tf.square(x - y)),
    "expm1": lambda x, y: tf.math.expm1(tf.abs(x - y)),
    "leaky": lambda x, y: tf.nn.leaky_relu(x - y),
    "a slice": lambda x, y: tf.square(x - y)[:, 0],
    "side by side": lambda x, y: tf.concat([tf.square(x - y), y], -1),
    "a gradient of its own": lambda x, y: tf.grad_pass_through(tf.abs)(x - y),
    "softmax": lambda x, y: tf.nn.softmax(x - y),
    "gather": lambda x, y: tf.gather(x - y, [0]),
    "boolean mask": lambda x, y: tf.boolean_mask(x - y, y[:, 0] > 0),
    "running sum": lambda x, y: tf.cumsum(x - y),
    "sorted": lambda x, y: tf.sort(x - y),
    "matrix product": lambda x, y: tf.matmul(x - y, y),
    "constant": lambda x, y: tf.stop_gradient(x - y) * y,
    "condition": lambda x, y: tf.cond(tf.reduce_sum(y) > 0, lambda: x - y, lambda: y - x),
    "one by one": lambda x, y: tf.map_fn(tf.square, x - y),
    "loop": lambda x, y: tf.while_loop(
        lambda i, _: i < 3, lambda i, total: (i + 1, total + tf.reduce_sum(x - y)), [0, 0.0]
    )[1],
    "a choice": lambda x, y: tf.where(x > 0, y, 1.0 - y),
    "x log y": lambda x, y: tf.math.xlogy(x, y),
    "power": lambda x, y: tf.pow(x, y),
    "angle": lambda x, y: tf.atan2(x, y),
    "comparison": lambda x, y: tf.cast(x > y, tf.float32),
    "a function of its own": own_function,
    "a function in a function": function_in_function,
}


@pytest.mark.parametrize("loss", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("size", [None, 4], ids=["batch unknown", "batch known"])
def test_other_operations_hide_nothing(loss, size):
    function = tf.function(lambda x, y: check_broadcasts("error", loss(x, y)), autograph=False)
    with pytest.raises(ValueError, match=r"combines a tensor of shape \[(n|4)\] with one of shape \[(n|4), 1\]"):
        function.get_concrete_function(tf.TensorSpec([size]), tf.TensorSpec([size, 1]))


@pytest.mark.parametrize("sizes", [[None, 4], [4, 4], [None, 1], [None, None], [3, 1, 1]], ids=str)
def test_higher_ranks_broadcast_to_wrong_pairs_as_well(sizes):
    function = tf.function(lambda x, y: check_broadcasts("error", tf.reduce_mean(tf.square(x - y))), autograph=False)
    shape = ", ".join(letter if size is None else str(size) for letter, size in zip("nt ", sizes, strict=False))
    message = f"shape [{shape}] with one of shape [{shape}, 1], which broadcasts to [{shape.split(', ')[0]}, {shape}]"
    with pytest.raises(ValueError, match=f"{re.escape(message)}.*`targets\\[..., tf.newaxis\\]`"):
        function.get_concrete_function(tf.TensorSpec(sizes), tf.TensorSpec([*sizes, 1]))
    function.get_concrete_function(tf.TensorSpec([1, 4]), tf.TensorSpec([1, 4, 1]))  # positions, the same for all


def test_sequences_as_long_as_the_batch_are_refused_in_a_class_and_aligned_in_a_function():
    class Own(keras.losses.Loss):
        def call(self, targets, outputs):
            return tf.square(targets - outputs)

    x = np.random.default_rng(0).normal(size=(4, 4, 2)).astype("float32")
    model = keras.Sequential([keras.Input((4, 2)), keras.layers.Dense(1)])
    data = tf.data.Dataset.from_tensors((x, x.sum(-1)))
    with pytest.raises(ValueError, match=r"shape \[4, 4\] with one of shape \[4, 4, 1\]"):
        Trainer(model, "sgd", {"error": Own()}).evaluate(data)
    expected = np.mean((model(x).numpy()[..., 0] - x.sum(-1)) ** 2)
    assert Trainer(model, "sgd", {"error": plain}).evaluate(data)["error"] == pytest.approx(expected, rel=1e-5)


DELIBERATE = {
    "an axis added before the call": lambda x, y: function_in_function(x, y[:, 0][:, tf.newaxis]),
    "a constant": lambda x, y: own_function(tf.constant([0.5] * 4), y),
}


@pytest.mark.parametrize("loss", DELIBERATE.values(), ids=DELIBERATE)
def test_arguments_of_a_function_keep_the_sign_of_purpose(loss):
    function = tf.function(lambda x, y: check_broadcasts("error", loss(x, y)), autograph=False)
    function.get_concrete_function(tf.TensorSpec([4]), tf.TensorSpec([4, 1]))


@pytest.mark.parametrize("loss", [keras.losses.MeanSquaredError(), keras.losses.get("mse")], ids=["class", "string"])
@pytest.mark.parametrize(
    ("target", "output"), [((5, 1), (5, 3)), ((3,), (3, 3)), ((3, 3), (3,)), ((4, 3), (4, 4, 3)), ((5,), (5, 1, 1))]
)
def test_targets_that_meet_several_outputs_are_refused(loss, target, output):
    """Also [3] for [3, 3], which Keras broadcasts in batches of three and no others."""
    shapes = " and an output of shape ".join(re.escape(str(shape)) for shape in (target, output))
    with pytest.raises(ValueError, match=f"target of shape {shapes}; they must agree"):
        check_pair("error", loss, tf.zeros(target), tf.zeros(output))


WRAPPED = {
    "summed": losses.summed(keras.losses.MeanSquaredError()),
    "over time": losses.over_time(keras.losses.MeanSquaredError(), "last"),
    "partial": functools.partial(keras.losses.huber, delta=2.0),
    "both": losses.summed(functools.partial(keras.losses.huber, delta=2.0)),
}


@pytest.mark.parametrize("loss", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_loss_of_keras_is_refused_like_the_loss(loss):
    with pytest.raises(ValueError, match=r"target of shape \(5, 4, 1\) and an output of shape \(5, 4, 3\)"):
        check_pair("error", loss, tf.zeros([5, 4, 1]), tf.zeros([5, 4, 3]))
    check_pair("error", loss, tf.zeros([5, 4]), tf.zeros([5, 4, 1]))


@pytest.mark.parametrize("kind", [keras.metrics.MeanSquaredError, keras.metrics.RootMeanSquaredError])
def test_a_metric_of_keras_is_refused_like_the_loss(kind):
    trainer = Trainer(linear_model(), "sgd", {"error": plain}, metrics={"measured": kind()})
    with pytest.raises(ValueError, match=r"metric 'measured' has a target of shape \(5, 1\) .* shape \(5, 3\)"):
        trainer.update_metrics(tf.zeros([5, 1]), tf.zeros([5, 3]))
    trainer.update_metrics(tf.zeros([5]), tf.zeros([5, 1]))


def test_a_metric_of_class_numbers_passes():
    metrics = {
        "measured": keras.metrics.SparseCategoricalAccuracy(),
        "top": keras.metrics.SparseTopKCategoricalAccuracy(2),
    }
    Trainer(linear_model(), "sgd", {"error": plain}, metrics=metrics).update_metrics(tf.zeros([5, 1]), tf.eye(5, 3))


def test_outputs_that_are_nan_at_a_weight_of_zero_do_not_count_in_metrics():
    metric = keras.metrics.MeanAbsoluteError()
    trainer = Trainer(linear_model(), "sgd", {"error": plain}, metrics={"measured": metric})
    outputs = tf.constant([[2.0], [np.nan]])
    trainer.update_metrics(tf.constant([[1.0], [np.nan]]), outputs, tf.constant([1.0, 0.0]))
    assert float(metric.result()) == 1.0


@pytest.mark.parametrize(("target", "output"), [((5,), (5, 1)), ((5, 1), (5,)), ((5, 3), (5, 3, 1)), ((5,), (5,))])
def test_ranks_that_keras_makes_equal_pass(target, output):
    check_pair("error", keras.losses.MeanSquaredError(), tf.zeros(target), tf.zeros(output))


def test_class_numbers_by_a_keras_string_pass():
    check_pair("error", keras.losses.get("sparse_categorical_crossentropy"), tf.zeros([5, 1]), tf.zeros([5, 3]))


@pytest.mark.parametrize("loss", [keras.losses.MeanSquaredError(), plain], ids=["class", "function"])
def test_one_row_of_targets_for_many_is_refused(loss):
    with pytest.raises(ValueError, match="a target of one row, .* for an output of 5 rows"):
        check_pair("error", loss, tf.zeros([1, 3]), tf.zeros([5, 3]))


@pytest.mark.parametrize(
    "loss", [[tf.ones([4])], (tf.ones([4]),) * 3, ([tf.ones([4])] * 2, tf.ones([4])), {"part": tf.ones([4])}]
)
def test_a_list_is_no_loss(loss):
    with pytest.raises(TypeError, match="Loss 'error' is a (list|tuple|dict) of .; it must be one tensor, or a pair"):
        reduce_term("error", loss, tf.constant(4.0))


def test_one_target_for_two_outputs_is_refused():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {name: keras.layers.Dense(1)(inputs) for name in ("coarse", "fine")})
    trainer = Trainer(model, "sgd", {"coarse": "mse", "fine": "mse"})
    message = r"one target of shape \(.*, 1\) for the losses \['coarse', 'fine'\].* Give \{'coarse': …, 'fine': …\}"
    with pytest.raises(ValueError, match=message):
        trainer.fit(dataset(X, Y, batch=8), steps=1)
    assert np.isfinite(trainer.evaluate(dataset(X, {"coarse": Y, "fine": Y}, batch=8))["loss"])


def test_shape_one_counts_as_a_scalar():
    term, scalar = (reduce_term("error", tf.fill(shape, 3.0), tf.constant(4.0)) for shape in ([1], []))
    assert (float(term.sum), float(term.divisor), term.divisor_key) == (12.0, 4.0, ("examples",))
    assert float(scalar.sum) == float(term.sum)
