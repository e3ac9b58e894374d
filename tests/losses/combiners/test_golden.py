"""Golden weights of the newer methods, and their options, by hand or from the definitions in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from looptape import losses

J2 = np.array([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]])
J3 = np.array([[1.0, 0.0, 0.0], [-0.5, 1.0, 0.0], [0.2, -0.8, 1.0]])
NAMES = ["first", "second", "third"]


def built(combiner, count):
    combiner.build(NAMES[:count])
    return combiner


def weights(combiner, rows, values=None):
    combiner = built(combiner, len(rows))
    measured = combiner.measure([[tf.constant(row, tf.float32)] for row in rows])
    return combiner.coefficients(
        tf.ones([len(rows)]) if values is None else tf.constant(values), None, measured
    ).numpy()


@pytest.mark.parametrize(
    ("make", "two", "three"),
    [
        (losses.UPGrad, (1.11111, 0.789474), (0.534146, 0.770543, 0.547615)),
        (losses.DualProj, (0.611111, 0.5), (1 / 3, 0.373333, 1 / 3)),
        (losses.FairGrad, (0.591461, 0.407071), (1.409583, 1.926943, 1.316589)),
        (losses.NashMTL, (0.591461, 0.407071), (1.409583, 1.926943, 1.316589)),
        (losses.IMTLG, (0.59233, 0.40767), (0.27864, 0.430118, 0.291242)),
        (losses.AlignedMTL, (0.559072, 0.408261), (0.298765, 0.386096, 0.281719)),
        (losses.GradVac, (2.2222, 1.5789), None),
    ],
)
def test_golden_weights(make, two, three):
    np.testing.assert_allclose(weights(make(), J2), two, atol=2e-5 if three else 1e-4)
    if three:
        np.testing.assert_allclose(weights(make(), J3), three, atol=2e-6)


def test_nash_is_a_fixed_point():
    found = weights(losses.NashMTL(), J3).astype("float64")
    np.testing.assert_allclose(J3 @ J3.T @ found, 1 / found, rtol=1e-5)


def test_nash_max_norm():
    plain, bounded = weights(losses.NashMTL(), J3), weights(losses.NashMTL(max_norm=0.5), J3)
    np.testing.assert_allclose(np.linalg.norm(J3.T @ plain), np.sqrt(3), rtol=1e-5)
    np.testing.assert_allclose(bounded, plain * 0.5 / np.sqrt(3), rtol=1e-5)


def test_nash_holds_its_weights_between_updates():
    combiner = built(losses.NashMTL(update_every=2), 2)
    first = combiner.coefficients(tf.ones([2]), None, tf.constant(J2 @ J2.T))
    combiner.advance(tf.ones([2]), None, tf.constant(J2 @ J2.T))
    kept = combiner.coefficients(tf.ones([2]), None, tf.eye(2, dtype=tf.float64))
    np.testing.assert_array_equal(kept, tf.cast(first, tf.float32))  # as the state has them


@pytest.mark.parametrize("scale", ["min", "median", "rmse"])
def test_aligned_scales(scale):
    """All singular values of the aligned rows are one of those of J, or their root mean square."""
    _, singular, _ = np.linalg.svd(J3)
    size = {"min": singular[2], "median": singular[1], "rmse": np.sqrt(np.mean(singular**2))}[scale]
    left, _, right = np.linalg.svd(J3)
    expected = size * (np.ones(3) / 3) @ left @ right
    np.testing.assert_allclose(J3.T @ weights(losses.AlignedMTL(scale), J3), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("normalize", "divisors"),
    [
        ("l2", np.linalg.norm(J2, axis=1)),
        ("loss", np.array([2.0, 5.0])),
        ("loss+", np.linalg.norm(J2, axis=1) * np.array([2.0, 5.0])),
    ],
)
def test_mgda_of_normalized_gradients(normalize, divisors):
    """K = 2 in closed form on the divided gradients; the weights of the gradients themselves sum to 1."""
    a, b = J2 / divisors[:, None]
    share = np.clip((b - a) @ b / ((a - b) @ (a - b)), 0, 1)
    shortest = share * a + (1 - share) * b
    found = weights(losses.MGDA(normalize), J2, [2.0, 5.0])
    update = J2.T @ found
    np.testing.assert_allclose(found.sum(), 1.0, rtol=1e-6)
    np.testing.assert_allclose(update / np.linalg.norm(update), shortest / np.linalg.norm(shortest), atol=1e-6)


def test_mgda_by_losses_needs_positive_ones():
    combiner = built(losses.MGDA("loss"), 2)
    with pytest.raises(ValueError, match=r"MGDA divides gradients by the losses, but got \{'second': -1.0\}"):
        combiner.validate([1.0, -1.0])
    built(losses.MGDA(), 2).validate([1.0, -1.0])


def test_gradvac_turns_towards_the_usual_cosine():
    """One pair: the turned gradient has the wanted cosine with the other, and the averages move by beta."""
    combiner = built(losses.GradVac(beta=0.25), 2)
    combiner.cosines.assign([[0.0, 0.3], [0.3, 0.0]])
    found = weights(combiner, J2)
    g, h = J2
    for a, b in ((g, h), (h, g)):
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        step = 0.3 * np.sqrt(1 - cosine**2) - cosine * np.sqrt(1 - 0.09)
        turned = a + np.linalg.norm(a) * step / np.linalg.norm(b) / np.sqrt(1 - 0.09) * b
        np.testing.assert_allclose(turned @ b / np.linalg.norm(turned) / np.linalg.norm(b), 0.3, rtol=1e-9)
    ratio = step * np.linalg.norm(h) / np.linalg.norm(g) / np.sqrt(1 - 0.09)
    np.testing.assert_allclose(found[0], 1 + ratio, rtol=1e-5)
    combiner.advance(tf.ones([2]), None, tf.constant(J2 @ J2.T))
    np.testing.assert_allclose(
        combiner.cosines, [[0, 0.75 * 0.3 + 0.25 * cosine], [0.75 * 0.3 + 0.25 * cosine, 0]], rtol=1e-5
    )


def test_pcd_of_two_losses_in_closed_form():
    """Unit gradients: enough along the second to meet its constraint, and no more."""
    for tau in (0.0, 0.1, 0.9):
        found = weights(losses.PCD(tau=tau, memory=0.0), J2)
        first, second = J2 / np.linalg.norm(J2, axis=1, keepdims=True)
        update = (J2.T @ found) / np.linalg.norm(J2[0])
        np.testing.assert_allclose(update, first + (tau - first @ second) * second, atol=1e-6)
    free = np.array([[1.0, 0.0], [1.0, 1.0]])
    np.testing.assert_allclose(weights(losses.PCD(tau=0.5), free), [1.0, 0.0], atol=1e-7)


def test_pcd_follows_the_goal_that_is_named():
    np.testing.assert_allclose(weights(losses.PCD(goal="second"), J2)[1], 1.0)
    with pytest.raises(ValueError, match="`goal` is 'third'; it must be one of the losses.*Correct"):
        built(losses.PCD(goal="third"), 2)


def test_pcd_takes_the_averages_of_the_norms():
    combiner = built(losses.PCD(memory=0.75), 2)
    combiner.advance(tf.ones([2]), None, tf.linalg.diag(tf.constant([4.0, 9.0], tf.float64)))
    np.testing.assert_allclose(combiner.norms, [2.0, 3.0])
    combiner.advance(tf.ones([2]), None, tf.linalg.diag(tf.constant([8.0, 1.0], tf.float64)))
    np.testing.assert_allclose(combiner.norms, np.sqrt([0.75 * 4 + 0.25 * 8, 0.75 * 9 + 0.25 * 1]), rtol=1e-6)


def test_pcd_of_losses_that_contradict_each_other_may_not_raise_them():
    rows = np.array([[1.0, 0.2, 0.1], [0.0, 1.0, 0.0], [0.0, -1.0, 0.0]])
    update = rows.T @ weights(losses.PCD(tau=0.5), rows)
    np.testing.assert_allclose(update, [1.0, 0.0, 0.1], atol=1e-5)


def test_stch():
    values, combiner = tf.constant([1.0, 2.0, 4.0]), built(losses.STCH(mu=1.0), 3)
    found = combiner.coefficients(values, None, None)
    np.testing.assert_allclose(found, [0.065182, 0.090969, 0.177183], atol=1e-6)
    np.testing.assert_allclose(combiner.total(values, found), 1.965295, atol=1e-6)


def test_stch_of_weighted_losses_is_what_is_optimised():
    combiner, static = built(losses.STCH(mu=1.0), 3), tf.constant([2.0, 0.5, 3.0])
    found = combiner.coefficients(static * [1.0, 2.0, 4.0], None, None)
    expected = np.log(np.exp(np.array([2.0, 1.0, 12.0]) / 3).sum())
    np.testing.assert_allclose(combiner.total(tf.constant([1.0, 2.0, 4.0]), found, static), expected, rtol=1e-6)


def test_stch_with_preferences_and_a_reference():
    combiner = built(losses.STCH(mu=0.5, preferences={"first": 2.0}, reference={"second": 1.0}), 2)
    values = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(values)
        heights = tf.stack([2.0 * values[0], 0.5 * (values[1] - 1.0)])
        total = 0.5 * tf.reduce_logsumexp(heights / 0.5)
    found = combiner.coefficients(values, None, None)
    np.testing.assert_allclose(combiner.total(values, found), total, rtol=1e-6)
    np.testing.assert_allclose(found, tape.gradient(total, values), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.STCH(mu=0), "`mu` is 0; it must be above 0"),
        (lambda: losses.STCH(preferences={"a": -1.0}), "`preferences` is .*-1.0.*above 0"),
        (lambda: built(losses.STCH(reference={"other": 1.0}), 2), r"`reference` names \['other'\].*Correct"),
        (lambda: losses.FairGrad(alpha=0), "`alpha` is 0; it must be above 0"),
        (lambda: losses.MGDA("norm"), "`normalize` is 'norm'; it must be one of"),
        (lambda: losses.AlignedMTL("max"), "`scale` is 'max'; it must be one of"),
        (lambda: losses.GradVac(beta=0), r"`beta` is 0; it must be in \(0, 1\]"),
        (lambda: losses.PCD(tau=2), r"`tau` is 2; it must be in \[0, 1\]"),
        (lambda: losses.SoftAdapt(beta=0), "`beta` is 0; it must be other than 0"),
        (lambda: losses.GradDrop(leak=1.0), r"`leak` is 1.0; it must be in \[0, 1\)"),
        (lambda: losses.DBMTL(beta=1.0), r"`beta` is 1.0; it must be in \[0, 1\)"),
        (lambda: losses.NashMTL(max_norm=0), "`max_norm` is 0; it must be above 0"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("variant", ["plain", "normalized", "loss_weighted"])
def test_softadapt(variant):
    combiner = built(losses.SoftAdapt(beta=2.0, variant=variant), 3)
    before, now = np.array([2.0, 3.0, 1.0]), np.array([1.0, 3.5, 0.9])
    np.testing.assert_allclose(combiner.coefficients(tf.constant(before, tf.float32), None, None).numpy().sum(), 1.0)
    combiner.advance(tf.constant(before, tf.float32), None, None)
    change = now - before
    change = change if variant == "plain" else change / np.abs(change).sum()
    expected = np.exp(2 * change) * (now if variant == "loss_weighted" else 1)
    found = combiner.coefficients(tf.constant(now, tf.float32), None, None)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-5)


def test_ntk_balance_is_inverse_to_the_traces():
    """For L = mean of squares, |grad sqrt(L)|^2 is the kernel's quotient along the residuals."""
    rng = np.random.default_rng(0)
    jacobians, residuals = [rng.normal(size=(5, 4)), rng.normal(size=(5, 4))], rng.normal(size=(2, 5))
    values = (residuals**2).mean(1)
    rows = np.stack([2 * r @ j / 5 for r, j in zip(residuals, jacobians, strict=True)])
    traces = [r @ (j @ j.T) @ r / (r @ r) / 5 for r, j in zip(residuals, jacobians, strict=True)]
    combiner = built(losses.NTKBalance(moving_average=0.0), 2)
    combiner.advance(tf.constant(values, tf.float32), None, tf.constant(rows @ rows.T))
    np.testing.assert_allclose(combiner.coefficients(None, None, None), sum(traces) / np.array(traces), rtol=1e-5)


def test_gradnorm_as_published_stands_still_once_norms_have_shrunk():
    """Adam remembers the large norms for a thousand measurements: the measurement behind the default."""
    moved = {}
    for relative in (True, False):
        combiner = built(losses.GradNorm(alpha=0.0, relative=relative), 2)
        advance = tf.function(combiner.advance, autograph=False)
        for squares, count in (([9.0, 1.0], 300), ([1e-6, 9e-6], 200)):
            before = combiner.balance.numpy()
            for _ in range(count):
                advance(tf.ones([2]), tf.ones([2], tf.bool), tf.linalg.diag(tf.constant(squares, tf.float64)))
        moved[relative] = np.abs(combiner.balance.numpy() - before).max()
    assert moved[True] > 0.9 and moved[False] < 0.03  # 0.5 and 1.5 swap places


@pytest.mark.parametrize("make", [losses.MGDA, losses.UPGrad, losses.FairGrad])
def test_the_moving_average_begins_with_the_first_coefficients(make):
    combiner = built(make(moving_average=0.75), 2)
    one, two = J2 @ J2.T, np.array([[4.0, 1.0], [1.0, 2.0]])
    first, second = (built(make(), 2).coefficients(tf.ones([2]), None, tf.constant(m)).numpy() for m in (one, two))
    np.testing.assert_allclose(combiner.coefficients(tf.ones([2]), None, tf.constant(one)), first, rtol=1e-6)
    combiner.advance(tf.ones([2]), None, tf.constant(one))
    averaged = combiner.coefficients(tf.ones([2]), None, tf.constant(two))
    np.testing.assert_allclose(averaged, 0.75 * first + 0.25 * second, rtol=1e-6)
