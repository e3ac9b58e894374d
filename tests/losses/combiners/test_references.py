"""Direction methods on 300 random Jacobians each against SciPy, on the gradients themselves in float64.

Up to 20 losses, gradients over 12 decades; in general position, nearly parallel or opposed (angles down to 1e-4),
dependent (fewer dimensions than losses), and with a common part. The methods see the Gramian.
"""

import functools

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import tensorflow as tf

from looptape import losses
from looptape.losses.combiners.by_gradient.bargaining import fairgrad
from looptape.losses.combiners.by_gradient.cone import dualproj, pcd, upgrad
from looptape.losses.combiners.by_gradient.hull import cagrad, mgda
from looptape.losses.combiners.by_gradient.inverse import aligned_mtl, config, imtl_g
from looptape.losses.combiners.by_gradient.surgery import gradvac, pcgrad
from looptape.trainer.step.gradients import stages

MOST, COUNT, TOLERANCE = 20, 300, 1e-5
C, TAU, BETA = 0.5, 0.1, 0.01
VALUES = 10 ** np.random.default_rng(1).uniform(-2, 2, size=MOST)  # of the losses
KINDS = ("general", "near", "dependent", "common")


@functools.cache
def jacobians():
    """[(kind, [K, n] float64 that float32 holds)]."""
    rng, found = np.random.default_rng(0), []
    for index in range(COUNT):
        kind, count = KINDS[index % 4], rng.integers(2, MOST + 1)
        rows = rng.normal(size=(count, count + rng.integers(0, 20)))
        if kind == "near":
            for i in range(1, count, 2):
                rows[i] = rng.choice([-1, 1]) * rows[i - 1] + 10 ** rng.uniform(-4, -1) * rows[i]
        elif kind == "dependent":
            rows = rows[:, : max(1, count // 2)]
        elif kind == "common":
            rows = rows + 3 * rng.normal(size=rows.shape[1])
        rows *= 10 ** rng.uniform(-6, 6, size=(count, 1)) / np.linalg.norm(rows, axis=1, keepdims=True)
        found.append((kind, rows.astype("float32").astype("float64")))
    return found


def orders(count, seed=0):
    rng = np.random.default_rng(seed)
    return np.array([rng.permutation(count) for _ in range(count)], "int32")


# Oracles: the update in units of the largest gradient, from unit gradients U [K, n] and relative norms n [K].


def projection(units, centre, least):
    """The point nearest to the centre with U d >= least: Lawson and Hanson's LDP by NNLS. None if there is none."""
    gap = least - units @ centre
    system = np.vstack([units.T, gap])
    solution, _ = scipy.optimize.nnls(system, np.r_[np.zeros(units.shape[1]), 1.0], maxiter=10_000)
    rest = system @ solution - np.r_[np.zeros(units.shape[1]), 1.0]
    return None if np.linalg.norm(rest) < 1e-7 or rest[-1] == 0 else centre - rest[:-1] / rest[-1]


def on_cone(units, vector):
    """The projection of a vector on {d: U d >= 0}."""
    solution, _ = scipy.optimize.nnls(units.T, -vector, maxiter=10_000)
    return vector + units.T @ solution


def mgda_oracle(units, norms, divisors=1.0):
    sizes = norms / divisors
    system = np.vstack([units.T, sizes.min() / sizes])
    target = np.r_[np.zeros(units.shape[1]), 1.0]
    lengths, _ = scipy.optimize.nnls(system, target, maxiter=10_000)
    tight = np.abs(system.T @ (system @ lengths - target)) < 1e-9
    if np.ndim(divisors) and np.linalg.matrix_rank(system[:, tight]) < tight.sum():
        return None  # other weights give the same shortest vector, and gradients that are not divided another length
    weights = lengths / norms
    return (norms * weights / weights.sum()) @ units


def mgda_l2_oracle(units, norms):
    return mgda_oracle(units, norms, norms)


def mgda_loss_oracle(units, norms):
    return mgda_oracle(units, norms, VALUES[: len(norms)])


def mgda_loss_plus_oracle(units, norms):
    return mgda_oracle(units, norms, norms * VALUES[: len(norms)])


def cagrad_oracle(units, norms):
    mean = norms @ units / len(norms)
    size = np.linalg.norm(mean)
    floor = norms.min() / norms

    def excess(level):
        found = projection(units, mean / size, level * floor)
        return 1e3 if found is None else np.linalg.norm(found - mean / size) - C

    low = (units @ mean / size / floor).min()
    if excess(1e-9) < 0 and projection(units, 0 * mean, floor) is None:
        return None  # the origin is in the hull: any direction that is orthogonal to the gradients
    level = scipy.optimize.brentq(excess, low - 1e-3 * abs(low), 1 + C, xtol=1e-300, rtol=1e-14, maxiter=500)
    return size * projection(units, mean / size, level * floor)


def config_oracle(units, norms):
    u = scipy.linalg.lstsq(units, np.ones(len(units)), cond=1e-7)[0]
    u /= np.linalg.norm(u)
    return (norms @ units @ u) * u


def imtl_g_oracle(units, norms):
    u = scipy.linalg.lstsq(units, np.ones(len(units)), cond=1e-7)[0]
    weights = scipy.linalg.lstsq(units.T, u, cond=1e-7)[0] / norms
    if np.abs(units @ u - 1).max() > 1e-6 or abs(weights.sum()) < 0.1 * np.abs(weights).sum():
        return None  # opposed gradients, or a sum that cancels
    return u / abs(weights.sum())


def aligned_oracle(units, norms):
    order = np.argsort(-norms)  # from the largest down the singular values are exact to their own size
    left, singular, right = scipy.linalg.svd((norms[:, None] * units)[order], full_matrices=False)
    rank = np.linalg.matrix_rank(units)
    return singular[rank - 1] * np.ones(len(norms)) / len(norms) @ left[:, :rank] @ right[:rank]


def pcgrad_oracle(units, norms):
    total = np.zeros(units.shape[1])
    for i, order in enumerate(orders(len(units))):
        g = units[i].copy()
        for j in order:
            if i != j and g @ units[j] < 0:
                g -= (g @ units[j]) * units[j]
        total += norms[i] * g
    return total


def goals(count):
    return np.random.default_rng(count).uniform(-0.5, 0.5, size=(count, count))


def gradvac_oracle(units, norms):
    total, wanted = np.zeros(units.shape[1]), goals(len(units))
    for i, order in enumerate(orders(len(units))):
        g = units[i].copy()
        for j in order:
            size = max(np.linalg.norm(g), 1e-300)
            cosine, goal = g @ units[j] / size, wanted[i, j]
            if i != j and cosine < goal:
                sine = np.sqrt(1 - goal**2)
                g += size * (goal * np.sqrt(max(1 - cosine**2, 0)) - cosine * sine) / sine * units[j]
        total += norms[i] * g
    return total


def pcd_oracle(units, norms):
    found = projection(units[1:], units[0], np.full(len(units) - 1, TAU))
    return norms[0] * (on_secondaries(units) if found is None else found)


def on_secondaries(units):
    solution, _ = scipy.optimize.nnls(units[1:].T, -units[0], maxiter=10_000)
    return units[0] + units[1:].T @ solution


def dualproj_oracle(units, norms):
    return on_cone(units, norms @ units / len(norms))


def upgrad_oracle(units, norms):
    return sum(norm * on_cone(units, unit) for norm, unit in zip(norms, units, strict=True)) / len(norms)


# [K, K] Gramian, presence and K orders to coefficients, and the oracle.
METHODS = {
    "mgda": (lambda matrix, present, order, goal: mgda(matrix, present), mgda_oracle),
    "mgda, l2": (lambda matrix, present, order, goal: mgda(matrix, present, "l2"), mgda_l2_oracle),
    "mgda, loss": (lambda matrix, present, order, goal: mgda(matrix, present, "loss", VALUES), mgda_loss_oracle),
    "mgda, loss+": (lambda matrix, present, order, goal: mgda(matrix, present, "loss+", VALUES), mgda_loss_plus_oracle),
    "cagrad": (lambda matrix, present, order, goal: cagrad(matrix, C, present), cagrad_oracle),
    "upgrad": (lambda matrix, present, order, goal: upgrad(matrix, present), upgrad_oracle),
    "dualproj": (lambda matrix, present, order, goal: dualproj(matrix, present), dualproj_oracle),
    "pcd": (
        lambda matrix, present, order, goal: pcd(matrix, tf.sqrt(tf.linalg.diag_part(matrix)), 0, TAU, present),
        pcd_oracle,
    ),
    "config": (lambda matrix, present, order, goal: config(matrix, present), config_oracle),
    "imtl_g": (lambda matrix, present, order, goal: imtl_g(matrix, present), imtl_g_oracle),
    "aligned_mtl": (lambda matrix, present, order, goal: aligned_mtl(matrix, "min", present), aligned_oracle),
    "pcgrad": (lambda matrix, present, order, goal: pcgrad(matrix, order, present), pcgrad_oracle),
    "gradvac": (lambda matrix, present, order, goal: gradvac(matrix, order, goal, BETA, present)[0], gradvac_oracle),
}
NO_CONFLICT = {"mgda", "mgda, l2", "mgda, loss", "mgda, loss+", "upgrad", "dualproj"}  # promised for every matrix
NO_CONFLICT_IF_INDEPENDENT = {"config", "imtl_g"}


def traced(function):
    """One trace for all numbers of losses: those that a Jacobian does not have are absent."""
    return tf.function(function, autograph=False)


def padded(array, fill=0.0):
    full = np.full((MOST,) * array.ndim, fill, array.dtype)
    full[tuple(slice(0, n) for n in array.shape)] = array
    return full


def solved(method, rows):
    count = len(rows)
    order = orders(MOST)
    order[:count] = np.concatenate([orders(count), np.tile(np.arange(count, MOST), (count, 1))], axis=1)
    present = tf.constant(np.arange(MOST) < count)
    weights = method(tf.constant(padded(rows @ rows.T)), present, tf.constant(order), tf.constant(padded(goals(count))))
    return weights.numpy()[:count]


@pytest.mark.parametrize("name", METHODS)
def test_against_scipy(name):
    function, oracle = METHODS[name]
    method, compared = traced(function), 0
    for index, (kind, rows) in enumerate(jacobians()):
        norms = np.linalg.norm(rows, axis=1)
        units, norms = rows / norms[:, None], norms / norms.max()
        weights = solved(method, rows)
        assert np.isfinite(weights).all(), (index, kind)
        update = (weights * norms) @ units
        size = np.linalg.norm(update)
        if size > 1e-7 * (np.abs(weights) @ norms):
            independent = name in NO_CONFLICT_IF_INDEPENDENT and kind != "dependent"
            if name in NO_CONFLICT or independent:
                assert (units @ update / size).min() > -1e-6, (index, kind)
        expected = oracle(units, norms)
        if expected is None:
            continue
        compared += 1
        scale = max(np.linalg.norm(expected), 1e-7 * (np.abs(weights) @ norms))
        assert np.linalg.norm(update - expected) < TOLERANCE * scale, (index, kind, len(rows), weights)
    assert compared >= 0.65 * COUNT


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 5.0])
def test_fairgrad_is_a_fixed_point(alpha):
    """G w = w^(-1/alpha), of which there is one; TorchJD's Nash-MTL is no oracle, for it gives up on simple cases.

    With w = y / |g|, cosines C and s = |g|^(1/alpha - 1) that is C y = s y^(-1/alpha). Where gradients oppose each
    other and sizes differ, the terms of C y cancel to less than their rounding, so the error is relative to them.
    """
    method = traced(lambda matrix, present, order, goal: fairgrad(matrix, alpha, present))
    for index, (kind, rows) in enumerate(jacobians()):
        norms = np.linalg.norm(rows, axis=1)
        units = rows / norms[:, None]
        system = np.vstack([units.T, np.ones(len(rows))])
        if scipy.optimize.nnls(system, np.eye(len(system))[-1])[1] < 1e-6:
            # A convex combination vanishes: there is no solution.
            assert kind == "dependent"
            continue
        weights = solved(method, rows)
        assert (weights > 0).all(), (index, kind)
        update = (weights * norms / norms.max()) @ units
        assert (units @ update).min() > -1e-7 * np.linalg.norm(update), (index, kind)
        lengths = weights * norms
        owed = norms ** (1 / alpha - 1) * lengths ** (-1 / alpha)
        shared = np.abs(units @ units.T) @ lengths + owed
        assert (np.abs(units @ (units.T @ lengths) - owed) < 1e-8 * shared).all(), (index, kind)
        if alpha == 1:
            np.testing.assert_allclose(rows @ (rows.T @ weights) * weights, 1.0, rtol=TOLERANCE)


@pytest.mark.parametrize("name", METHODS)
def test_the_size_of_all_gradients_does_not_matter(name):
    method = traced(METHODS[name][0])
    for _, rows in jacobians()[:8]:
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        expected = solved(method, rows)
        for size in (2.0**-66, 2.0**-33, 2.0**33, 2.0**66):  # 1e-20 to 1e20, without rounding
            np.testing.assert_allclose(solved(method, size * rows), expected, rtol=1e-9)


PUBLIC = {
    "mgda": losses.MGDA,
    "upgrad": losses.UPGrad,
    "dualproj": losses.DualProj,
    "config": losses.ConFIG,
    "imtl_g": losses.IMTLG,
    "aligned_mtl": losses.AlignedMTL,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_update_of_the_class_keeps_the_promise(name):
    """From float32 gradients to a float32 update, where nearly opposed gradients have large weights that cancel."""
    combiner, expected = PUBLIC[name](), METHODS[name][1]
    combiner.build([str(k) for k in range(MOST)])

    @tf.function(autograph=False)
    def update(rows, present):
        gradients = [[row] for row in tf.unstack(rows)]
        return stages.combine(gradients, combiner.coefficients(tf.ones([MOST]), present, combiner.measure(gradients)))

    for _, rows in [each for each in jacobians() if each[0] == "near"][:20]:
        norms = np.linalg.norm(rows, axis=1)
        units, norms = rows / norms[:, None], norms / norms.max()
        table = np.zeros((MOST, 2 * MOST), "float32")
        table[: rows.shape[0], : rows.shape[1]] = rows
        found = update(tf.constant(table), tf.constant(np.arange(MOST) < len(rows)))[0].numpy().astype("float64")
        found = found[: rows.shape[1]] / np.linalg.norm(rows, axis=1).max()
        if name in NO_CONFLICT | NO_CONFLICT_IF_INDEPENDENT:
            assert (units @ found).min() > -1e-6 * np.linalg.norm(found)
        oracle = expected(units, norms)
        if oracle is not None:
            assert np.linalg.norm(found - oracle) < TOLERANCE * np.linalg.norm(oracle)
