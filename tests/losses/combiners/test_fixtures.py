"""The numbers of the papers and of the design notes: golden matrix, one GradNorm step, closed forms."""

import numpy as np
import pytest
import tensorflow as tf

from looptape import losses
from looptape.losses.combiners.by_gradient.hull import cagrad
from looptape.losses.combiners.by_gradient.norms import gradnorm
from looptape.losses.combiners.by_value.history import dynamic_weight_average, relobralo
from looptape.losses.combiners.numerics.gramian import gramian

J = np.array([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]], "float32")
NAMES = ["first", "second", "third", "fourth"]


def built(combiner, count=2):
    combiner.build(NAMES[:count])
    return combiner


def direction(combiner, rows=J):
    combiner = built(combiner, len(rows))
    measured = combiner.measure([[tf.constant(row)] for row in rows])
    weights = combiner.coefficients(tf.ones([len(rows)]), None, measured).numpy()
    return weights, rows.T @ weights


@pytest.mark.parametrize(
    ("combiner", "weights", "update"),
    [
        (losses.PCGrad(), (2.2222, 1.5789), (0.5848, 3.8012, 3.8012)),
        (losses.MGDA(), (0.6, 0.4), (0.0, 1.0, 1.0)),
        (losses.CAGrad(c=0.5), (0.7041, 0.5), (0.1835, 1.2041, 1.2041)),
        (losses.ConFIG(), None, (0.1588, 2.0706, 2.0706)),
        (losses.CAGrad(c=0.0), (0.5, 0.5), (1.0, 1.0, 1.0)),  # the mean gradient
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_golden_matrix(combiner, weights, update):
    found, combined = direction(combiner)
    if weights is not None:
        np.testing.assert_allclose(found, weights, atol=1e-4)
    np.testing.assert_allclose(combined, update, atol=1e-4)


@pytest.mark.parametrize(("rescale", "divisor"), [(None, 1.0), ("square", 1.25), ("linear", 1.5)])
def test_cagrad_rescale(rescale, divisor):
    weights, _ = direction(losses.CAGrad(c=0.5, rescale=rescale))
    np.testing.assert_allclose(weights * divisor, (0.7041, 0.5), atol=1e-4)


def test_cagrad_stays_at_the_distance_c_from_the_mean():
    rows = np.random.default_rng(0).normal(size=(4, 9)).astype("float32")
    mean = rows.mean(0)
    for c in (0.1, 0.5, 0.9):
        weights = cagrad(gramian([[tf.constant(r)] for r in rows]), c, tf.ones([4], tf.bool)).numpy()
        distance = np.linalg.norm(rows.T @ weights - mean)
        np.testing.assert_allclose(distance, c * np.linalg.norm(mean), rtol=1e-4)


def test_gramian():
    np.testing.assert_array_equal(gramian([[tf.constant(row)] for row in J]), [[18, -22], [-22, 38]])


def test_gramian_of_missing_sparse_and_half_precision_gradients():
    rng = np.random.default_rng(0)
    a, b, table = rng.normal(size=(3, 2)), rng.normal(size=(2, 4)), rng.normal(size=(2, 2))
    sparse = tf.IndexedSlices(tf.constant(table, tf.float32), tf.constant([1, 1]), tf.constant([3, 2]))
    gradients = [
        [tf.constant(a, tf.float32), None, None],
        [sparse, tf.constant(b, tf.float16), None],
        [None, tf.constant(-b, tf.float32), None],
    ]
    dense = np.zeros((3, 2))
    dense[1] = table.sum(0)
    rows = [
        np.r_[a.ravel(), 0 * b.ravel()],
        np.r_[dense.ravel(), b.ravel()],
        np.r_[0 * a.ravel(), -b.ravel()],
    ]
    found = gramian(gradients)
    assert found.dtype == tf.float64
    np.testing.assert_allclose(found, np.array(rows) @ np.array(rows).T, rtol=2e-3, atol=2e-3)


def test_gradnorm_one_step():
    ones = tf.ones([2], tf.bool)
    rates, targets, gradient = gradnorm(tf.ones([2]), tf.constant([3.0, 1.0]), tf.constant([0.5, 0.9]), 1.5, ones)
    np.testing.assert_allclose(rates, (0.7143, 1.2857), atol=1e-4)
    np.testing.assert_allclose(targets, (1.2074, 2.9157), atol=1e-4)
    np.testing.assert_allclose(gradient, (3.0, -1.0))


def test_gradnorm_gradient_is_that_of_its_loss():
    """The closed form against a tape, the target held."""
    weights, norms = tf.constant([0.5, 1.5, 1.0]), tf.constant([3.0, 1.0, 0.2])
    ratios, ones = tf.constant([0.5, 0.9, 0.3]), tf.ones([3], tf.bool)
    _, targets, gradient = gradnorm(weights, norms, ratios, 0.7, ones)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        value = tf.reduce_sum(tf.abs(weights * norms - targets))
    np.testing.assert_allclose(gradient, tape.gradient(value, weights))


def test_gradnorm_evens_the_norms_out():
    """With alpha 0 the weighted norms become equal, and the weights keep summing to K."""
    combiner = built(losses.GradNorm(alpha=0.0, learning_rate=0.02), 3)
    norms = np.array([4.0, 1.0, 2.0], "float32")
    advance = tf.function(combiner.advance, autograph=False)
    for _ in range(400):
        advance(tf.ones([3]), tf.ones([3], tf.bool), tf.linalg.diag(tf.constant(norms**2)))
    weights = combiner.coefficients(None, None, None).numpy()
    np.testing.assert_allclose(weights.sum(), 3.0, rtol=1e-5)
    np.testing.assert_allclose(weights, 3 * (1 / norms) / (1 / norms).sum(), rtol=0.05)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_gradnorm_does_not_depend_on_the_scale_of_all_gradients(scale):
    one, other = (built(losses.GradNorm(learning_rate=0.1)) for _ in range(2))
    for _ in range(3):
        one.advance(tf.ones([2]), None, tf.constant([[9.0, 0.0], [0.0, 1.0]]))
        other.advance(tf.ones([2]), None, scale * tf.constant([[9.0, 0.0], [0.0, 1.0]]))
    np.testing.assert_allclose(one.balance, other.balance, rtol=1e-4)


def test_gradnorm_gives_more_weight_to_the_slower_loss():
    combiner = built(losses.GradNorm(alpha=1.5, learning_rate=0.01))
    combiner.advance(tf.constant([1.0, 1.0]), None, tf.eye(2))
    for _ in range(20):
        combiner.advance(tf.constant([0.1, 0.9]), None, tf.eye(2))
    first, second = combiner.coefficients(None, None, None).numpy()
    assert second > 1.1 > 0.9 > first


def test_uncertainty_closed_form():
    combiner = built(losses.Uncertainty(learning_rate=0.1))
    advance = tf.function(combiner.advance, autograph=False)
    for _ in range(600):
        advance(tf.constant([4.0, 1.0]), tf.ones([2], tf.bool), None)
    np.testing.assert_allclose(combiner.log_variance, (np.log(4), 0.0), atol=1e-3)
    weights = combiner.coefficients(None, None, None)
    np.testing.assert_allclose(weights, (1 / 8, 1 / 2), rtol=1e-3)
    total = combiner.total(tf.constant([4.0, 1.0]), weights)
    np.testing.assert_allclose(total, 0.5 + 0.5 + 0.5 * np.log(4), rtol=1e-3)


def test_uncertainty_classification_form():
    combiner = built(losses.Uncertainty(learning_rate=0.1, classification=["second"]))
    np.testing.assert_allclose(combiner.coefficients(None, None, None), (0.5, 1.0))
    advance = tf.function(combiner.advance, autograph=False)
    for _ in range(600):
        advance(tf.constant([4.0, 3.0]), tf.ones([2], tf.bool), None)
    np.testing.assert_allclose(combiner.log_variance, (np.log(4), np.log(6)), atol=1e-3)


def test_uncertainty_stays_finite_for_losses_without_a_fixed_point():
    combiner = built(losses.Uncertainty(learning_rate=10.0))
    for _ in range(20):
        combiner.advance(tf.constant([-1.0, 1e30]), None, None)
    assert np.isfinite(combiner.coefficients(None, None, None)).all()
    np.testing.assert_allclose(np.abs(combiner.log_variance), 20.0)


def test_uncertainty_gradient_is_that_of_its_total():
    combiner = built(losses.Uncertainty())
    s, values = tf.constant([0.3, -0.7]), tf.constant([2.0, 0.4])
    with tf.GradientTape() as tape:
        tape.watch(s)
        total = tf.reduce_sum(0.5 * tf.exp(-s) * values + 0.5 * s)
    combiner.log_variance.assign(s)
    np.testing.assert_allclose(combiner.total(values, combiner.coefficients(None, None, None)), total, rtol=1e-6)
    from looptape.losses.combiners.by_value.learned import uncertainty

    np.testing.assert_allclose(uncertainty(values, s)[1], tape.gradient(total, s), rtol=1e-5)


def test_dynamic_weight_average():
    everyone = tf.ones([2], tf.bool)
    np.testing.assert_allclose(
        dynamic_weight_average(tf.constant([0.5, 1.0]), 2.0, everyone), (0.8756, 1.1244), atol=1e-4
    )


def test_dynamic_weight_average_by_windows():
    combiner = built(losses.DynamicWeightAverage(window=3, temperature=2.0))
    values = [(4.0, 1.0), (2.0, 2.0), (3.0, 3.0), (1.0, 2.0), (2.0, 1.0), (1.5, 3.0)]
    for index, value in enumerate(values):
        np.testing.assert_array_equal(combiner.coefficients(None, None, None), (1.0, 1.0), f"update {index}")
        combiner.advance(tf.constant(value), None, None)
    ratios = np.array(values[3:]).mean(0) / np.array(values[:3]).mean(0)
    expected = np.exp(ratios / 2) * 2 / np.exp(ratios / 2).sum()
    np.testing.assert_allclose(combiner.coefficients(None, None, None), expected, rtol=1e-5)


@pytest.mark.parametrize(("rho", "expected"), [(1.0, (0.9938, 1.0222, 0.9841)), (0.0, (0.8600, 0.8883, 1.2517))])
def test_relobralo(rho, expected):
    now, last, first = (tf.constant(x) for x in ([1, 0.5, 0.1], [2, 0.5, 0.4], [10, 5, 0.2]))
    found = relobralo(now / last, now / first, tf.ones([3]), rho, 0.95, 1.0, tf.ones([3], tf.bool))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(("rho", "expected"), [(1.0, (0.9938, 1.0222, 0.9841)), (0.0, (0.8600, 0.8883, 1.2517))])
def test_relobralo_through_its_state(rho, expected):
    combiner = built(losses.ReLoBRaLo(expected_rho=rho), 3)
    combiner.advance(tf.constant([10.0, 5.0, 0.2]), None, None)
    combiner.advance(tf.constant([2.0, 0.5, 0.4]), None, None)
    combiner.balance.assign(tf.ones([3]))
    now = tf.constant([1.0, 0.5, 0.1])
    np.testing.assert_allclose(combiner.coefficients(now, None, None), expected, atol=1e-4)


def test_relobralo_coin_has_the_mean_it_should():
    combiner = built(losses.ReLoBRaLo(expected_rho=0.7, alpha=1.0))
    combiner.first_losses.assign([2.0, 1.0])
    combiner.last_losses.assign([1.0, 1.0])
    combiner.seen.assign([True, True])

    @tf.function(autograph=False)
    def draw(t):
        combiner.updates.assign(t)
        return combiner.coefficients(tf.constant([1.0, 1.0]), None, None)[0]

    kept = np.mean([float(draw(tf.constant(t, tf.int64))) == 1.0 for t in range(1000)])
    assert abs(kept - 0.7) < 0.05


def test_geometric_mean():
    combiner, values = built(losses.GeometricMean()), tf.constant([4.0, 1.0])
    weights = combiner.coefficients(values, None, None)
    np.testing.assert_allclose(weights, (0.25, 1.0), rtol=1e-6)
    np.testing.assert_allclose(combiner.total(values, weights), 2.0, rtol=1e-6)


@pytest.mark.parametrize("name", ["LogSum", "GeometricMean", "FAMO"])
def test_coefficients_are_the_gradient_of_the_total(name):
    """For FAMO with c held, as the paper has it."""
    combiner, values = built(getattr(losses, name)(), 3), tf.constant([4.0, 1.0, 0.3])
    weights = combiner.coefficients(values, None, None)
    with tf.GradientTape() as tape:
        tape.watch(values)
        if name == "FAMO":
            z, c = tf.fill([3], 1 / 3), 1 / tf.reduce_sum(tf.stop_gradient(1 / values) / 3)
            total = c * tf.reduce_sum(z * tf.math.log(values))
        else:
            total = combiner.total(values, weights)
    np.testing.assert_allclose(weights, tape.gradient(total, values), rtol=1e-5)
    np.testing.assert_allclose(combiner.total(values, weights), total, rtol=1e-5)


def test_famo_start():
    combiner = built(losses.FAMO())
    np.testing.assert_allclose(combiner.coefficients(tf.constant([4.0, 1.0]), None, None), (0.2, 0.8), rtol=1e-5)


def test_famo_moves_towards_the_loss_that_fell_least():
    """One step by hand: Adam's first step is the learning rate against the gradient's sign."""
    combiner = built(losses.FAMO(learning_rate=0.1))
    before, after = tf.constant([4.0, 1.0]), tf.constant([2.0, 0.9])
    combiner.advance(before, None, None)
    combiner.advance_after(before, after, None)
    np.testing.assert_allclose(combiner.logits, (-0.1, 0.1), rtol=1e-4)


def test_famo_decays_towards_even_weights():
    """Nothing changes, so only the decay moves the logits: Adam's first step is the learning rate."""
    combiner = built(losses.FAMO(learning_rate=0.1))
    combiner.logits.assign([0.5, -0.5])
    combiner.advance(tf.ones([2]), None, None)
    combiner.advance_after(tf.ones([2]), tf.ones([2]), None)
    np.testing.assert_allclose(combiner.logits, (0.4, -0.4), rtol=1e-4)


def test_famo_gradient_against_a_tape():
    from looptape.losses.combiners.by_value.learned import famo_gradient

    logits, everyone = tf.constant([0.3, -1.0, 0.5]), tf.ones([3], tf.bool)
    before, after = tf.constant([4.0, 1.0, 2.0]), tf.constant([2.0, 1.5, 0.1])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = tf.reduce_sum(tf.nn.softmax(logits) * (tf.math.log(before) - tf.math.log(after)))
    found = famo_gradient(before, after, logits, everyone)
    np.testing.assert_allclose(found, tape.gradient(value, logits), rtol=1e-5)


def test_famo_minimum_is_subtracted():
    plain, shifted = built(losses.FAMO()), built(losses.FAMO(minimum={"first": 3.0}))
    expected = plain.coefficients(tf.constant([1.0, 1.0]), None, None)
    np.testing.assert_allclose(shifted.coefficients(tf.constant([4.0, 1.0]), None, None), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        # matrices [[3, -1]] and [[0.5, 0.5]]; vectors [9] and [9] do not count for max and mean
        ("max_mean", (1.0, 3.0 / 0.5)),
        ("mean_mean", (1.0, 2.0 / 0.5)),
        (
            "norm",
            (
                (np.sqrt(91) + np.sqrt(81.5)) / 2 / np.sqrt(91),
                (np.sqrt(91) + np.sqrt(81.5)) / 2 / np.sqrt(81.5),
            ),
        ),
    ],
)
def test_gradient_balance(statistic, expected):
    combiner = built(losses.GradientBalance(statistic, moving_average=0.0))
    vector = tf.constant([9.0])
    measured = combiner.measure([[tf.constant([[3.0, -1.0]]), vector], [tf.constant([[0.5, 0.5]]), vector]])
    combiner.advance(tf.ones([2]), None, measured)
    np.testing.assert_allclose(combiner.coefficients(None, None, None), expected, rtol=1e-5)


def test_gradient_balance_has_its_own_weight_in_the_denominator():
    """Wang's code: the fixed point is the square root of max/mean, not max/mean."""
    combiner = built(losses.GradientBalance(update_every=1, clip=None))
    measured = combiner.measure([[tf.constant([[8.0, 0.0]])], [tf.constant([[0.5, 0.5]])]])
    seen = []
    for _ in range(60):
        combiner.advance(tf.ones([2]), None, measured)
        seen.append(float(combiner.balance[1]))
    np.testing.assert_allclose(seen[0], 0.9 + 0.1 * 16.0, rtol=1e-5)
    np.testing.assert_allclose(seen[1], 0.9 * seen[0] + 0.1 * 16.0 / seen[0], rtol=1e-5)
    np.testing.assert_allclose(seen[-1], 4.0, rtol=1e-3)


def test_gradient_balance_counts_elements_not_matrices():
    combiner = built(losses.GradientBalance("mean_mean", moving_average=0.0))
    many, few = tf.ones([3, 3]), 4 * tf.ones([1, 1])
    measured = combiner.measure([[many, few], [many, None]])
    np.testing.assert_allclose(measured, [[4, 1], [1.3, 1], [5, 3]], rtol=1e-6)


@pytest.mark.parametrize("statistic", ["norm", "mean_mean", "max_mean"])
@pytest.mark.parametrize("size", [1e-20, 1e-25, 1.0, 1e19, 1e30])
def test_gradient_balance_does_not_depend_on_the_size_of_all_gradients(statistic, size):
    combiner = losses.GradientBalance(statistic, moving_average=0.0, update_every=1, clip=None)
    built(combiner)
    measured = combiner.measure([[tf.constant([[3.0, 0.0]]) * size], [tf.constant([[0.0, 1.0]]) * size]])
    combiner.advance(tf.ones([2]), None, measured)
    expected = {"norm": [2 / 3, 2.0], "mean_mean": [1.0, 3.0], "max_mean": [1.0, 6.0]}[statistic]
    np.testing.assert_allclose(combiner.coefficients(None, None, None), expected, rtol=1e-6)


@pytest.mark.parametrize("size", [1e-12, 1e-24])
def test_db_mtl_does_not_depend_on_the_scale_of_all_losses(size):
    updates = []
    for scale in (1.0, size):
        combiner = built(losses.DBMTL())
        combiner.build_buffers([tf.zeros([2])])
        rng = np.random.default_rng(0)
        for _ in range(3):
            rows = [[tf.constant(row * scale, tf.float32)] for row in rng.normal(size=(2, 2))]
            values = tf.constant(rng.uniform(0.5, 2, size=2) * scale, tf.float32)
            rewritten, kept = combiner.rewrite(rows, values, None)
            measured = combiner.measure(rewritten)
            used = combiner.coefficients(values, None, measured)
            combiner.advance(values, None, measured, used)
            combiner.remember(kept)
        updates.append(sum(w * row[0].numpy() for w, row in zip(used.numpy(), rewritten, strict=True)))
    np.testing.assert_allclose(updates[1], updates[0], rtol=1e-4)
