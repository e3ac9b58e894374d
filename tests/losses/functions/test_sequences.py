import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import losses

RNG = np.random.default_rng(2)
LOGITS = RNG.normal(size=(2, 4, 5)).astype("float32")
TOKENS = np.array([[3, 1, 0, 0], [2, 4, 1, 0]])


def log_softmax(x):
    x = x.astype("float64")
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


PER_TOKEN = -np.take_along_axis(log_softmax(LOGITS), TOKENS[..., None], -1)[..., 0]


def test_masked_cross_entropy_leaves_padding_out():
    values, weights = losses.masked_cross_entropy(TOKENS, LOGITS)
    mask = (TOKENS != 0).astype("float64")
    np.testing.assert_array_equal(weights, mask)
    np.testing.assert_allclose(values, PER_TOKEN * mask, rtol=1e-5)


def test_masked_cross_entropy_with_a_mask_of_its_own():
    mask = np.array([[1, 0, 1, 1], [0, 0, 1, 1]], bool)
    values, weights = losses.masked_cross_entropy(padding=None)((TOKENS, mask), LOGITS)
    np.testing.assert_array_equal(weights, mask)
    np.testing.assert_allclose(values, PER_TOKEN * mask, rtol=1e-5)


def test_masked_cross_entropy_counts_all_without_padding():
    values, weights = losses.masked_cross_entropy(padding=None)(TOKENS, LOGITS)
    np.testing.assert_array_equal(weights, np.ones((2, 4)))
    np.testing.assert_allclose(values, PER_TOKEN, rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_that_is_no_class_number_has_no_gradient(smoothing):
    tokens = np.where(TOKENS == 0, -1, TOKENS)
    logits = tf.constant(LOGITS)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        values, weights = losses.masked_cross_entropy(padding=-1, label_smoothing=smoothing)(tokens, logits)
        total = tf.reduce_sum(values * weights)
    gradient = tape.gradient(total, logits).numpy()
    assert np.isfinite(gradient).all()
    assert (gradient[tokens == -1] == 0).all() and (gradient[tokens != -1] != 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("label", [-1, 5])
def test_a_token_that_is_no_class_is_refused_where_it_counts(label, smoothing):
    loss = losses.masked_cross_entropy(padding=None, label_smoothing=smoothing)
    tokens = np.array([[3, 1, label, 0], [2, 4, 1, label]])
    mask = tokens != label
    message = f"A label of loss 'masked_cross_entropy' is {label}; the output has 5 classes" if smoothing else "label"
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        loss(tokens, LOGITS)
    traced = tf.function(lambda a, b: loss(a, b), autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="A label of loss" if smoothing else "label"):
        traced(tf.constant(tokens), tf.constant(LOGITS))
    smooth = (1 - smoothing) * np.eye(5)[np.where(mask, tokens, 0)] + smoothing / 5
    expected = -(smooth * log_softmax(LOGITS)).sum(-1) * mask
    for call in (loss, traced):
        values, weights = call((tf.constant(tokens), tf.constant(mask)), tf.constant(LOGITS))
        np.testing.assert_allclose(values, expected, rtol=1e-5)
        np.testing.assert_array_equal(weights, mask)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"from_logits": False}], ids=str)
def test_tokens_at_padding_have_no_gradient_whatever_the_logits_are(options, bad):
    mask = TOKENS != 0
    clean = np.abs(LOGITS) / np.abs(LOGITS).sum(-1, keepdims=True) if "from_logits" in options else LOGITS
    gradients, results = [], []
    for outputs in (clean, np.where(mask[..., None], clean, bad)):
        outputs = tf.constant(outputs, tf.float32)
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            values, weights = losses.masked_cross_entropy(**options)(TOKENS, outputs)
            total = tf.reduce_sum(values * weights)
        gradients.append(tape.gradient(total, outputs).numpy())
        results.append(values.numpy())
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(*gradients)
    assert (gradients[1][~mask] == 0).all() and (gradients[1][mask] != 0).any(-1).all()


def test_the_logits_behind_a_softmax_are_still_used():
    logits = tf.constant([[[30.0, -30.0], [1.0, 2.0]]])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = losses.masked_cross_entropy(padding=-1, from_logits=False)
        values, _ = loss(np.array([[1, 0]]), keras.ops.softmax(logits))
    expected = -np.take_along_axis(log_softmax(logits.numpy()), np.array([[[1], [0]]]), -1)[..., 0]
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert (tape.gradient(values, logits).numpy() != 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_steps_at_padding_have_no_gradient_whatever_the_output_is(bad):
    targets = np.array([[1.0, np.nan, 2.0]], "float32")
    outputs = tf.constant([[3.0, bad, 5.0]])
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        values, _ = losses.masked_squared_error(targets, outputs)
    np.testing.assert_array_equal(values, [[4.0, 0.0, 9.0]])
    np.testing.assert_array_equal(tape.gradient(values, outputs), [[4.0, 0.0, 6.0]])


def test_masked_squared_error_of_integers():
    values, weights = losses.masked_squared_error(np.array([[1, 2]]), np.array([[3.0, 5.0]], "float32"))
    np.testing.assert_array_equal(values, [[4.0, 9.0]])
    np.testing.assert_array_equal(weights, [[1.0, 1.0]])
    values, weights = losses.masked_squared_error(padding=-1)(np.array([[1, -1]]), np.array([[3.0, 5.0]], "float32"))
    np.testing.assert_array_equal(values, [[4.0, 0.0]])
    np.testing.assert_array_equal(weights, [[1.0, 0.0]])


@pytest.mark.parametrize("padding", [np.nan, -7.0])
def test_masked_squared_error(padding):
    targets = RNG.normal(size=(2, 3, 2)).astype("float32")
    outputs = RNG.normal(size=(2, 3, 2)).astype("float32")
    expected = ((targets - outputs) ** 2).mean(-1)
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    expected = expected * mask
    targets[mask == 0, 0] = padding
    loss = losses.masked_squared_error(padding=padding)
    variable = tf.Variable(outputs)
    with tf.GradientTape() as tape:
        values, weights = loss(targets, tf.convert_to_tensor(variable))
        total = tf.reduce_sum(values * weights)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    np.testing.assert_array_equal(weights, mask)
    gradient = tape.gradient(total, variable).numpy()
    assert np.isfinite(gradient).all() and (gradient[mask == 0] == 0).all()


def test_masked_squared_error_without_a_feature_axis():
    values, weights = losses.masked_squared_error(padding=None)(
        (np.ones((2, 3), "f"), np.eye(2, 3)), np.zeros((2, 3), "f")
    )
    np.testing.assert_array_equal(values, np.eye(2, 3))
    np.testing.assert_array_equal(weights, np.eye(2, 3))


def ctc_by_enumeration(labels, logits, blank=0):
    """-log of the summed probability of all paths that collapse to the labels."""
    logp = log_softmax(logits)
    total = -np.inf
    for path in itertools.product(range(logits.shape[1]), repeat=logits.shape[0]):
        collapsed = [k for k, _ in itertools.groupby(path) if k != blank]
        if collapsed == list(labels):
            total = np.logaddexp(total, sum(logp[t, k] for t, k in enumerate(path)))
    return -total


def test_ctc_against_all_alignments():
    logits = RNG.normal(size=(2, 4, 3)).astype("float32")
    labels = np.array([[1, 2], [2, 0]])
    expected = [ctc_by_enumeration([1, 2], logits[0]), ctc_by_enumeration([2], logits[1])]
    np.testing.assert_allclose(losses.ctc(labels, logits), expected, rtol=1e-5)
    np.testing.assert_allclose(losses.ctc(labels, logits), keras.losses.CTC().call(labels, logits), rtol=1e-6)


def test_ctc_with_output_lengths_and_another_blank():
    logits = RNG.normal(size=(1, 5, 3)).astype("float32")
    expected = [ctc_by_enumeration([1, 0], logits[0, :3], blank=2)]
    labels = np.array([[1, 0, 2, 2]])
    np.testing.assert_allclose(losses.ctc(blank=2)((labels, np.array([3])), logits), expected, rtol=1e-5)


def test_ctc_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"`ctc` got labels of shape \(2,\)"):
        losses.ctc(np.array([1, 2]), LOGITS)


@pytest.mark.parametrize("label", [-1, 5])
def test_ctc_refuses_labels_that_are_no_classes(label):
    labels, fine = tf.constant([[1, 2], [label, 0]]), tf.constant([[1, 2], [3, 0]])
    with pytest.raises(ValueError, match=f"A label of loss 'ctc' is {label}; the output has 5 classes, .* 0 and 4"):
        losses.ctc(labels, LOGITS)
    traced = tf.function(lambda a, b: losses.ctc(a, b), autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="A label of loss .*ctc.* is outside the class range"):
        traced(labels, tf.constant(LOGITS))
    expected = [ctc_by_enumeration(row, logits) for row, logits in zip(([1, 2], [3]), LOGITS, strict=True)]
    np.testing.assert_allclose(traced(fine, tf.constant(LOGITS)), expected, rtol=1e-5)


def test_ctc_refuses_a_blank_that_is_no_class():
    with pytest.raises(
        ValueError, match=r"`blank` of `ctc` is 9, and the outputs have 5 classes; it must be .*at most 4"
    ):
        losses.ctc(blank=9)(np.array([[1, 2], [3, 9]]), LOGITS)


def test_ctc_does_not_look_beyond_the_lengths():
    labels, lengths = np.array([[1, 2], [3, 0]]), np.array([3, 4])
    broken = LOGITS.copy()
    broken[0, 3:] = np.nan
    results = []
    for logits in (LOGITS, broken):
        outputs = tf.constant(logits)
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            values = losses.ctc((labels, lengths), outputs)
        results.append((values, tape.gradient(values, outputs)))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-6)
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(results[1][1][0, 3:], 0.0)


def test_ctc_refuses_a_blank_before_a_label():
    labels = tf.constant([[1, 0, 2]])
    message = "have the blank, 0, before another label; blanks must only be at the end.*Remove it"
    with pytest.raises(ValueError, match=message):
        losses.ctc(labels, LOGITS[:1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="have the blank, 0, before another label"):
        tf.function(losses.ctc, autograph=False)(labels, tf.constant(LOGITS[:1]))


def test_ctc_under_xla_is_nan_where_a_blank_is_before_a_label():
    labels, logits = tf.constant([[1, 0, 2], [1, 2, 0]]), tf.constant(LOGITS)

    @tf.function(autograph=False, jit_compile=True)
    def compiled():
        with tf.GradientTape() as tape:
            tape.watch(logits)
            values = losses.ctc(labels, logits)
        return values, tape.gradient(values, logits)

    values, gradient = compiled()
    np.testing.assert_array_equal(np.isnan(values), [True, False])
    assert np.isnan(gradient[0]).any() and np.isfinite(gradient[1]).all()
    np.testing.assert_allclose(values[1], losses.ctc(labels[1:], logits[1:])[0], rtol=1e-5)


def test_a_mask_with_an_axis_of_one_is_that_of_the_steps():
    """Two sequences of two steps: the shapes would broadcast to [2, 2, 2]."""
    targets, outputs, mask = TOKENS[:, :2], LOGITS[:, :2], np.array([[True, False], [True, True]])
    expected = losses.masked_cross_entropy((targets, mask), outputs, padding=None)
    found = losses.masked_cross_entropy((targets, mask[..., None]), outputs, padding=None)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == (2, 2)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1), (2, 2, 2)])
@pytest.mark.parametrize("loss", [losses.masked_cross_entropy, losses.masked_squared_error])
def test_a_mask_of_another_shape_is_refused(loss, shape):
    outputs = LOGITS[:, :2] if loss is losses.masked_cross_entropy else LOGITS[:, :2, 0]
    targets = TOKENS[:, :2] if loss is losses.masked_cross_entropy else LOGITS[:, :2, 1]
    with pytest.raises(ValueError, match=r"The mask has shape .* and the targets \(2, 2\); it must be.*sample weight"):
        loss((targets, np.ones(shape, bool)), tf.constant(outputs))


@pytest.mark.parametrize("loss", [losses.masked_cross_entropy, losses.masked_squared_error])
def test_outputs_of_four_axes_are_refused(loss):
    """Of three sequences of three steps with three values each, the mask would be taken for that of the values."""
    outputs = np.zeros((3, 3, 3, 4), "float32")
    targets = np.zeros((3, 3, 3), "int32") if loss is losses.masked_cross_entropy else outputs
    with pytest.raises(ValueError, match=r"got outputs of shape \(3, 3, 3, 4\); it must be \[batch, time, .*Flatten"):
        loss((targets, np.eye(3)), tf.constant(outputs))


def test_a_padding_of_minus_one_is_no_class_of_unsigned_labels():
    logits = np.random.default_rng(0).normal(size=(1, 2, 256)).astype("float32")
    _, weights = losses.masked_cross_entropy(np.array([[255, 3]], "uint8"), logits, padding=-1)
    np.testing.assert_array_equal(weights, [[1.0, 1.0]])
