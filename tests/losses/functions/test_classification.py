"""Against NumPy from the definitions, in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import losses

RNG = np.random.default_rng(1)
LOGITS = RNG.normal(size=(5, 4)).astype("float32") * 2
CLASSES = np.array([0, 3, 1, 2, 2])
ONE_HOT = np.eye(4)[CLASSES]
BINARY = RNG.integers(0, 2, size=(5, 4)).astype("float32")


def log_softmax(x):
    x = x.astype("float64")
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype("float64")))


def binary(targets, logits):
    p = sigmoid(logits)
    return -(targets * np.log(p) + (1 - targets) * np.log(1 - p))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_sparse_and_dense_cross_entropy(smoothing):
    smooth = ONE_HOT * (1 - smoothing) + smoothing / 4
    expected = -(smooth * log_softmax(LOGITS)).sum(-1)
    sparse = losses.sparse_categorical_cross_entropy(label_smoothing=smoothing)
    dense = losses.categorical_cross_entropy(label_smoothing=smoothing)
    np.testing.assert_allclose(sparse(CLASSES, LOGITS), expected, rtol=1e-5)
    np.testing.assert_allclose(sparse(CLASSES[:, None], LOGITS), expected, rtol=1e-5)
    np.testing.assert_allclose(dense(ONE_HOT, LOGITS), expected, rtol=1e-5)
    probabilities = np.exp(log_softmax(LOGITS)).astype("float32")
    np.testing.assert_allclose(sparse(CLASSES, probabilities, from_logits=False), expected, rtol=1e-5)
    np.testing.assert_allclose(dense(ONE_HOT, probabilities, from_logits=False), expected, rtol=1e-5)


def test_sparse_cross_entropy_per_element():
    logits = RNG.normal(size=(2, 3, 4)).astype("float32")
    classes = np.array([[0, 1, 2], [3, 3, 0]])
    expected = -np.take_along_axis(log_softmax(logits), classes[..., None], -1)[..., 0]
    np.testing.assert_allclose(losses.sparse_categorical_cross_entropy(classes, logits), expected, rtol=1e-5)


def test_one_hot_targets_for_the_sparse_loss_are_refused():
    with pytest.raises(ValueError, match=r"shape \(5, 4\).*For one-hot targets use `categorical_cross_entropy`"):
        losses.sparse_categorical_cross_entropy(ONE_HOT, LOGITS)


@pytest.mark.parametrize("label", [-1, 4, 260])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_label_that_is_no_class_is_refused(label, smoothing):
    loss = losses.sparse_categorical_cross_entropy(label_smoothing=smoothing)
    labels = np.array([0, 3, label, 2, 2])
    message = f"A label of loss 'sparse_categorical_cross_entropy' is {label}; the output has 4 classes, .* 0 and 3"
    with pytest.raises(
        ValueError if smoothing else tf.errors.InvalidArgumentError, match=message if smoothing else "label"
    ):
        loss(labels, LOGITS)
    for shape in ([None, 4], [None, None]):
        traced = tf.function(loss.__wrapped__, autograph=False)
        signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec(shape, tf.float32)]
        call = traced.get_concrete_function(*signature, from_logits=True, label_smoothing=smoothing)
        beginning = rf"A label of loss .*is outside the class range; .*\[{label}\]" if smoothing else "label"
        with pytest.raises(tf.errors.InvalidArgumentError, match=beginning):
            call(tf.constant(labels), tf.constant(LOGITS))
        np.testing.assert_allclose(call(tf.constant(CLASSES), tf.constant(LOGITS)), loss(CLASSES, LOGITS), rtol=1e-6)


def test_labels_are_looked_at_in_a_wider_type_and_by_xla_not_at_all():
    loss = losses.sparse_categorical_cross_entropy(label_smoothing=0.1)
    many = RNG.normal(size=(2, 300)).astype("float32")
    few = np.array([7, 255], "uint8")
    np.testing.assert_allclose(loss(few, many), loss(few.astype("int64"), many))
    compiled = tf.function(lambda a, b: loss(a, b), autograph=False, jit_compile=True)
    np.testing.assert_allclose(compiled(tf.constant(CLASSES), tf.constant(LOGITS)), loss(CLASSES, LOGITS), rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_binary_cross_entropy(smoothing):
    expected = binary(BINARY * (1 - smoothing) + 0.5 * smoothing, LOGITS).mean(-1)
    loss = losses.binary_cross_entropy(label_smoothing=smoothing)
    np.testing.assert_allclose(loss(BINARY, LOGITS), expected, rtol=1e-5)
    probabilities = sigmoid(LOGITS).astype("float32")
    np.testing.assert_allclose(loss(BINARY, probabilities, from_logits=False), expected, rtol=1e-4)


@pytest.mark.parametrize("alpha", [None, 0.3])
def test_binary_focal(alpha):
    p = sigmoid(LOGITS)
    truth = np.where(BINARY == 1, p, 1 - p)
    weight = 1.0 if alpha is None else np.where(BINARY == 1, alpha, 1 - alpha)
    expected = (weight * (1 - truth) ** 1.5 * -np.log(truth)).mean(-1)
    np.testing.assert_allclose(losses.binary_focal(gamma=1.5, alpha=alpha)(BINARY, LOGITS), expected, rtol=1e-4)


@pytest.mark.parametrize("alpha", [None, 0.3])
def test_categorical_focal(alpha):
    logp = (ONE_HOT * log_softmax(LOGITS)).sum(-1)
    expected = (1.0 if alpha is None else alpha) * (1 - np.exp(logp)) ** 1.5 * -logp
    loss = losses.categorical_focal(gamma=1.5, alpha=alpha)
    np.testing.assert_allclose(loss(ONE_HOT, LOGITS), expected, rtol=1e-4)


EXTREME = np.array(
    [[20.0, -20.0, 3.0], [9.0, -9.0, 0.0], [1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [0.3, -0.2, 1.0]], "float32"
)


def focal(targets, logits, gamma, alpha, smoothing):
    """From the definition; nothing is clipped."""
    logp = log_softmax(logits)
    smooth = targets * (1 - smoothing) + smoothing / targets.shape[-1]
    return (1.0 if alpha is None else alpha) * -(smooth * (1 - np.exp(logp)) ** gamma * logp).sum(-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alpha", [None, 0.3])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_categorical_focal_of_very_wrong_logits(gamma, alpha, smoothing):
    targets, logits = np.eye(3)[[1, 1, 1, 1, 1]], tf.constant(EXTREME)
    loss = losses.categorical_focal(gamma=gamma, alpha=alpha, label_smoothing=smoothing)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        values = loss(targets, logits)
    np.testing.assert_allclose(values, focal(targets, EXTREME, gamma, alpha, smoothing), rtol=1e-5, atol=1e-6)
    gradient = tape.gradient(values, logits).numpy()
    steps = 1e-3 * np.eye(3)
    for k in range(3):
        up, down = (focal(targets, EXTREME + sign * steps[k], gamma, alpha, smoothing) for sign in (1, -1))
        np.testing.assert_allclose(gradient[:, k], (up - down) / 2e-3, rtol=1e-3, atol=1e-5)
    assert (np.abs(gradient[[0, 1, 2, 4], 1]) > 0.01).all(), "a wrong example learns nothing"


def test_categorical_focal_of_a_class_that_is_ruled_out():
    logits = tf.constant([[-np.inf, 1.0, 0.0]], tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        values = losses.categorical_focal(np.eye(3)[[1]], logits)
    np.testing.assert_allclose(values, focal(np.eye(2)[[0]], np.array([[1.0, 0.0]]), 2.0, None, 0.0), rtol=1e-5)
    assert np.isfinite(tape.gradient(values, logits)).all()


def test_categorical_focal_of_probabilities():
    probabilities = np.exp(log_softmax(LOGITS)).astype("float32")
    options = {"gamma": 1.5, "alpha": 0.3, "label_smoothing": 0.1}
    values = losses.categorical_focal(from_logits=False, **options)(ONE_HOT, 2 * probabilities)
    np.testing.assert_allclose(values, focal(ONE_HOT, LOGITS, 1.5, 0.3, 0.1), rtol=1e-4)
    keras_values = keras.losses.categorical_focal_crossentropy(ONE_HOT, probabilities, **options)
    np.testing.assert_allclose(values, keras_values, rtol=1e-5)


def test_focal_without_gamma_is_cross_entropy():
    plain = losses.binary_cross_entropy(BINARY, LOGITS)
    np.testing.assert_allclose(losses.binary_focal(gamma=0.0)(BINARY, LOGITS), plain, rtol=1e-4)


def test_hinge():
    signs = BINARY * 2 - 1
    expected = np.maximum(1 - signs * LOGITS, 0).mean(-1)
    np.testing.assert_allclose(losses.hinge(signs, LOGITS), expected, rtol=1e-5)
    np.testing.assert_allclose(losses.hinge(BINARY, LOGITS), expected, rtol=1e-5)


def test_categorical_hinge():
    right = (ONE_HOT * LOGITS).sum(-1)
    wrong = ((1 - ONE_HOT) * LOGITS).max(-1)
    np.testing.assert_allclose(
        losses.categorical_hinge(ONE_HOT, LOGITS), np.maximum(1 + wrong - right, 0), rtol=1e-4, atol=1e-6
    )


def test_logits_are_the_default_and_stay_finite():
    extreme = tf.constant([[1000.0, -1000.0]])
    for loss, target in (
        (losses.sparse_categorical_cross_entropy, [1]),
        (losses.binary_cross_entropy, [[0.0, 1.0]]),
    ):
        assert np.isfinite(loss(tf.constant(target), extreme).numpy()).all()
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True).call(CLASSES, LOGITS)
    np.testing.assert_array_equal(losses.sparse_categorical_cross_entropy(CLASSES, LOGITS), expected)


def gradient_of(loss, targets, outputs):
    outputs = tf.constant(outputs)
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        values = loss(tf.constant(targets), outputs)
    return values.numpy(), tape.gradient(values, outputs).numpy()


@pytest.mark.parametrize("gamma", [0.25, 0.5, 1.0, 2.0])
def test_binary_focal_of_confident_logits_has_a_gradient(gamma):
    """1 - p is 0 in float32 above a logit of 16.6, where a power below 1 has no slope."""
    targets, logits = np.float32([[1.0], [1.0], [0.0], [1.0]]), np.float32([[17.0], [60.0], [-17.0], [-30.0]])
    values, gradient = gradient_of(losses.binary_focal(gamma=gamma), targets, logits)
    x = np.where(targets == 1, logits, -logits).astype("float64")
    wrong, entropy = 1 / (1 + np.exp(x)), np.logaddexp(0, -x)
    np.testing.assert_allclose(values, (wrong**gamma * entropy)[:, 0], rtol=1e-5, atol=1e-30)
    slope = -(wrong**gamma) * (gamma * (1 - wrong) * entropy + wrong)
    np.testing.assert_allclose(gradient, np.where(targets == 1, slope, -slope), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_another_class_that_is_ruled_out(smoothing):
    """A logit of -inf, where the target is 0: 0 · inf is not NaN. Smoothed, that class is expected: infinite."""
    logits = np.float32([[1.0, 2.0, -np.inf]])
    loss = losses.categorical_cross_entropy(label_smoothing=smoothing)
    values, gradient = gradient_of(loss, np.float32([[0.0, 1.0, 0.0]]), logits)
    if smoothing:
        assert values[0] == np.inf
        return
    share = np.exp(1.0) / (np.exp(1.0) + np.exp(2.0))
    np.testing.assert_allclose(values, [-np.log(1 - share)], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[share, -share, 0.0]], rtol=1e-5)
