"""Direction methods against float64 oracles on the gradients themselves, and their invariances."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from looptape.losses.combiners.by_gradient.bargaining import fairgrad
from looptape.losses.combiners.by_gradient.cone import dualproj, pcd, upgrad
from looptape.losses.combiners.by_gradient.hull import cagrad, mgda
from looptape.losses.combiners.by_gradient.inverse import aligned_mtl, config, imtl_g
from looptape.losses.combiners.by_gradient.surgery import gradvac, pcgrad
from looptape.losses.combiners.numerics.complementarity import complementary
from looptape.losses.combiners.numerics.gramian import gramian
from looptape.losses.combiners.numerics.random import normal, permutations, uniform

quick = settings(max_examples=15, deadline=None, derandomize=True)
COUNT, SIZE = 3, 6
ORDERS = np.array([[2, 0, 1], [0, 1, 2], [1, 0, 2]], "int32")


def combined(method):
    """A traced function: gradients [K, n] and presence [K] to coefficients."""

    def coefficients(rows, present):
        return method(gramian([[row] for row in tf.unstack(rows)]), present)

    return tf.function(coefficients, autograph=False)


def own_norms(matrix, present):
    return tf.where(present, tf.sqrt(tf.linalg.diag_part(matrix)), 0.0)


METHODS = {
    "pcgrad": combined(lambda matrix, present: pcgrad(matrix, tf.constant(ORDERS), present)),
    "mgda": combined(mgda),
    "cagrad": combined(lambda matrix, present: cagrad(matrix, 0.5, present)),
    "config": combined(config),
    "upgrad": combined(upgrad),
    "dualproj": combined(dualproj),
    "fairgrad": combined(lambda matrix, present: fairgrad(matrix, 1.0, present)),
    "imtl_g": combined(imtl_g),
    "aligned_mtl": combined(lambda matrix, present: aligned_mtl(matrix, "min", present)),
    "pcd": combined(lambda matrix, present: pcd(matrix, own_norms(matrix, present), 0, 0.1, present)),
    "gradvac": combined(lambda matrix, present: gradvac(matrix, tf.constant(ORDERS), tf.eye(COUNT), 0.1, present)[0]),
}
# One size of all gradients cancels out of these; those of FairGrad with alpha 1 fall with it.
DEGREE = {"fairgrad": -1}
every_method = pytest.mark.parametrize("name", METHODS)


def coefficients(name, rows, present=(True,) * COUNT):
    found = METHODS[name](tf.constant(rows, tf.float32), tf.constant(present)).numpy()
    assert np.isfinite(found).all(), found
    return found.astype("float64")


def update(name, rows):
    return rows.astype("float64").T @ coefficients(name, rows)


numbers = st.floats(-4, 4, width=32)
matrices = arrays.arrays("float32", (COUNT, SIZE), elements=numbers)


@st.composite
def general(draw, count=COUNT):
    """Gradients in general position: independent, so that every method is smooth there."""
    seed = draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, SIZE)).astype("float32")


# Oracles.


def pcgrad_oracle(rows, orders):
    total = np.zeros(rows.shape[1])
    for i, order in enumerate(orders):
        g = rows[i].copy()
        for j in order:
            if i != j and g @ rows[j] < 0:
                g -= (g @ rows[j]) / (rows[j] @ rows[j]) * rows[j]
        total += g
    return total


def shortest_oracle(matrix):
    """The min-norm point by trying every face."""
    best, weights = np.inf, None
    for size in range(1, len(matrix) + 1):
        for face in itertools.combinations(range(len(matrix)), size):
            system = np.ones((size + 1, size + 1))
            system[:size, :size] = matrix[np.ix_(face, face)]
            system[size, size] = 0
            solution = np.linalg.lstsq(system, np.r_[np.zeros(size), 1], rcond=None)[0][:size]
            if (solution > -1e-9).all():
                candidate = np.zeros(len(matrix))
                candidate[list(face)] = solution
                if candidate @ matrix @ candidate < best:
                    best, weights = candidate @ matrix @ candidate, candidate
    return weights


def config_oracle(rows):
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    u = np.linalg.pinv(units) @ np.ones(len(rows))
    u /= np.linalg.norm(u)
    return (rows @ u).sum() * u


def cagrad_value(matrix, weights, c):
    mean = matrix.mean(1)
    return weights @ mean + c * np.sqrt(mean.mean()) * np.sqrt(max(weights @ matrix @ weights, 0))


@quick
@given(general())
def test_pcgrad_is_the_algorithm_of_the_paper(rows):
    np.testing.assert_allclose(
        update("pcgrad", rows), pcgrad_oracle(rows.astype("float64"), ORDERS), rtol=1e-3, atol=1e-4
    )


@quick
@given(general())
def test_mgda_is_the_shortest_vector(rows):
    rows64 = rows.astype("float64")
    np.testing.assert_allclose(update("mgda", rows), rows64.T @ shortest_oracle(rows64 @ rows64.T), atol=1e-4)


@quick
@given(general())
def test_config_is_the_pseudo_inverse(rows):
    np.testing.assert_allclose(update("config", rows), config_oracle(rows.astype("float64")), rtol=1e-3, atol=1e-4)


@quick
@given(general())
def test_config_has_equal_angles(rows):
    d = update("config", rows)
    cosines = rows @ d / np.linalg.norm(rows, axis=1) / np.linalg.norm(d)
    np.testing.assert_allclose(cosines, np.full(COUNT, cosines.mean()), atol=1e-4)
    assert cosines.mean() > 0


@quick
@given(general(), st.integers(0, 10**6))
def test_cagrad_weights_are_optimal(rows, seed):
    matrix = rows.astype("float64") @ rows.T.astype("float64")
    weights = coefficients("cagrad", rows) - 1 / COUNT
    assert (weights > -1e-6).all()
    weights /= weights.sum()
    rivals = np.random.default_rng(seed).dirichlet(np.full(COUNT, 0.3), 300)
    near = weights + 1e-2 * (rivals - weights)
    least = min(cagrad_value(matrix, rival, 0.5) for rival in np.concatenate([rivals, near]))
    assert cagrad_value(matrix, weights, 0.5) <= least + 1e-5 * np.trace(matrix)


@every_method
@quick
@given(rows=general(), exponent=st.floats(-20, 20))
def test_scale_does_not_matter(name, rows, exponent):
    size = np.float32(10.0**exponent)
    found = coefficients(name, rows * size) * float(size) ** -DEGREE.get(name, 0)
    np.testing.assert_allclose(found, coefficients(name, rows), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("pcgrad", "gradvac", "pcd")])
@quick
@given(rows=general(), order=st.permutations(range(COUNT)))
def test_order_does_not_matter(name, rows, order):
    np.testing.assert_allclose(
        coefficients(name, rows[list(order)]), coefficients(name, rows)[list(order)], rtol=1e-3, atol=1e-4
    )


@quick
@given(rows=general(), scale=arrays.arrays("float32", (COUNT,), elements=st.floats(0.125, 64, width=32)))
def test_config_direction_does_not_depend_on_the_sizes(rows, scale):
    one, other = update("config", rows), update("config", rows * scale[:, None])
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert cosine > 1 - 1e-4


@quick
@given(matrices)
def test_mgda_increases_no_loss(rows):
    """J d >= 0, for any matrix at all."""
    d = update("mgda", rows)
    size = np.linalg.norm(rows, axis=1)
    assert (rows @ d >= -1e-4 * max(size.max(), 1e-30) ** 2).all()


@every_method
@quick
@given(rows=matrices, exponent=st.sampled_from([-10, 0, 15]))
def test_finite_on_any_matrix(name, rows, exponent):
    found = coefficients(name, rows * np.float32(10.0**exponent))
    assert np.isfinite(rows.T @ found).all()


@every_method
@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e15])
def test_rank_deficient_and_zero_matrices(name, scale):
    row = np.array([1.0, -2.0, 0.5, 0.0, 1.0, 3.0], "float32") * np.float32(scale)
    other = np.array([1.0, 1.0, -0.5, 2.0, 0.0, 0.0], "float32") * np.float32(scale)
    zero = np.zeros_like(row)
    singular = [[row, row, row], [row, -row, other], [row, -row, zero], [row, 2 * row, other]]
    for rows in [*singular, [zero, zero, row], [row, other, -row - other], [zero, zero, zero]]:
        d = np.array(rows).T @ coefficients(name, np.array(rows))
        bound = 4 * sum(np.linalg.norm(r) for r in rows) if name != "fairgrad" else COUNT  # at any size
        assert np.linalg.norm(d) <= bound


@every_method
@quick
@given(rows=general(), exponents=st.lists(st.floats(-6, 6), min_size=COUNT, max_size=COUNT))
def test_losses_of_very_different_size(name, rows, exponents):
    sizes = 10.0 ** np.array(exponents)
    d = update(name, (rows * sizes[:, None]).astype("float32"))
    assert np.isfinite(d).all()
    # The update of a bargain has the length sqrt(K), whatever the gradients are.
    bargain = np.sqrt(COUNT) * 1.001 if name in ("fairgrad", "nash_mtl") else 0.0
    assert np.linalg.norm(d) <= max(bargain, 20 * (np.linalg.norm(rows, axis=1) * sizes).sum())


@every_method
@quick
@given(rows=general(), absent=st.integers(0, COUNT - 1))
def test_an_absent_loss_does_not_disturb_the_others(name, rows, absent):
    """Whatever its row holds."""
    present = [k != absent for k in range(COUNT)]
    other = rows.copy()
    other[absent] = 100.0
    one, two = (coefficients(name, r, present)[np.array(present)] for r in (rows, other))
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_equal_gradients_are_left_alone():
    rows = np.tile(np.array([1.0, 2.0, 3.0, 0.0, 0.0, 1.0], "float32"), (COUNT, 1))
    np.testing.assert_allclose(update("pcgrad", rows), COUNT * rows[0], rtol=1e-5)
    np.testing.assert_allclose(update("mgda", rows), rows[0], rtol=1e-5)
    np.testing.assert_allclose(update("config", rows), COUNT * rows[0], rtol=1e-4)
    np.testing.assert_allclose(update("cagrad", rows), 1.5 * rows[0], rtol=1e-4)


def test_opposed_gradients_fall_back_to_the_sum_in_config():
    rows = np.array([[3.0, 0, 0, 0, 0, 0], [-1.0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], "float32")
    np.testing.assert_allclose(update("config", rows), [2, 0, 0, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("angle", [1e-1, 1e-3, 1e-5])
def test_nearly_opposed_gradients_have_a_direction_between_them(angle):
    """Equal angles to both, at a right angle to nearly all of them; a float32 Gramian does not know it below 1e-3."""
    rows = np.array([[3.0, 0, 0, 0, 0, 0], [-1.0, angle, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], "float32")
    d = rows.astype("float64").T @ config_weights(rows)
    units = rows[:2].astype("float64") / np.linalg.norm(rows[:2].astype("float64"), axis=1, keepdims=True)
    np.testing.assert_allclose(units @ d, (units @ d)[0], rtol=1e-4)
    np.testing.assert_allclose(d, config_oracle(rows[:2].astype("float64")), rtol=1e-4, atol=1e-12)


def config_weights(rows):
    matrix = rows.astype("float64") @ rows.T.astype("float64")
    return config(tf.constant(matrix), tf.ones([len(rows)], tf.bool)).numpy()


def test_a_loss_without_gradient_leaves_cagrad_at_the_mean():
    rows = np.zeros((COUNT, SIZE), "float32")
    rows[0, 0] = rows[1, 1] = 1.0
    np.testing.assert_allclose(coefficients("cagrad", rows), np.full(3, 1 / 3), rtol=1e-6)


def test_a_loss_without_gradient_stops_mgda():
    rows = np.zeros((COUNT, SIZE), "float32")
    rows[0, 0] = rows[1, 1] = 1.0
    np.testing.assert_allclose(coefficients("mgda", rows), [0, 0, 1])


@pytest.mark.parametrize("count", [5, 17])
def test_complementarity_is_solved(count):
    """x >= 0, Mx + q >= 0, one of them 0: ten problems at once, a singular matrix among the cases."""
    rng = np.random.default_rng(count)
    for columns in (count, count // 2):
        rows = rng.normal(size=(count, columns))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        linear = rng.normal(size=(10, columns)) @ rows.T  # in the range of the matrix: there is a solution
        found = complementary(tf.constant(rows @ rows.T), tf.constant(linear), tf.ones([count], tf.bool)).numpy()
        slack = found @ (rows @ rows.T) + linear
        assert (found >= 0).all() and slack.min() > -1e-10
        np.testing.assert_allclose(found * slack, 0.0, atol=1e-9)


def test_entries_that_are_not_allowed_stay_at_zero():
    linear = tf.constant([[-1.0, -1.0, -1.0]], tf.float64)
    found = complementary(tf.eye(3, dtype=tf.float64), linear, tf.constant([True, False, True]))
    np.testing.assert_allclose(found, [[1.0, 0.0, 1.0]], rtol=1e-12)


@pytest.mark.parametrize("count", [10, 20])
def test_many_losses(count):
    rows = np.random.default_rng(0).normal(size=(count, 30)).astype("float32")
    matrix = rows.astype("float64") @ rows.T.astype("float64")
    everyone = tf.ones([count], tf.bool)
    weights = tf.function(mgda, autograph=False)(tf.constant(matrix), everyone).numpy()
    gains = matrix @ weights
    assert (gains >= (1 - 1e-9) * weights @ matrix @ weights).all()  # the optimality condition


@every_method
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_gramian_that_is_not_finite_raises_nothing(name, bad):
    """Its update is skipped for the gradients; a factorization of NaN would end the run."""
    rows = np.eye(COUNT, SIZE, dtype="float32")
    rows[0, 0] = bad
    METHODS[name](tf.constant(rows), tf.ones([COUNT], tf.bool))


def test_draws_do_not_depend_on_xla():
    for draw in (
        lambda t: uniform(3, t, [50]),
        lambda t: normal(3, t, [50]),
        lambda t: permutations(3, t, 6),
    ):
        counter = tf.constant(11, tf.int64)
        plain = tf.function(draw, autograph=False)(counter)
        compiled = tf.function(draw, autograph=False, jit_compile=True)(counter)
        np.testing.assert_allclose(plain, compiled, rtol=1e-5, atol=1e-6)
        assert (plain.numpy() != draw(tf.constant(12, tf.int64)).numpy()).any()


def test_draws_have_the_right_distribution():
    flat = uniform(0, tf.constant(1, tf.int64), [20_000]).numpy()
    assert flat.min() > 0 and flat.max() < 1 and abs(flat.mean() - 0.5) < 0.01
    bell = normal(0, tf.constant(1, tf.int64), [20_000]).numpy()
    assert abs(bell.mean()) < 0.03 and abs(bell.std() - 1) < 0.03
    orders = np.concatenate([permutations(0, tf.constant(t, tf.int64), 3).numpy() for t in range(200)])
    assert (np.sort(orders, 1) == [0, 1, 2]).all()
    counts = [(orders == p).all(1).mean() for p in itertools.permutations(range(3))]
    assert max(abs(share - 1 / 6) for share in counts) < 0.06
