"""Two tasks on one trunk: data and results against NumPy, the conflict that is logged, and what a combiner does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import launch
from looptape.experiments.multi_task import Config, build, data, points
from looptape.trainer.summaries import event_writer


def numpy_targets(place):
    """(arm [count], height [count]) of points [count, 2], in float64."""
    x, y = np.asarray(place, "float64").T
    radius, angle = np.hypot(x, y), np.mod(np.arctan2(y, x), 2 * np.pi)
    # An arm is a third of a turn wide, and one turn around the centre on its way from there to the edge.
    return np.floor(np.mod(angle / (2 * np.pi) + radius, 1.0) * 3).astype(int), 10 * np.sin(4 * np.pi * radius)


def test_arms_and_heights_equal_numpy():
    place, targets = points(4000, [1, 2])
    arm, height = numpy_targets(place)
    radius = np.linalg.norm(place, axis=1)
    assert radius.max() < 1 and np.mean(radius < 0.5) == pytest.approx(0.25, abs=0.02)  # uniform on the disc
    assert np.mean(targets["arm"] == arm) > 0.998  # rounding moves a point or two over an edge
    np.testing.assert_allclose(targets["height"][:, 0], height, atol=1e-3)
    np.testing.assert_allclose(np.bincount(arm) / 4000, 1 / 3, atol=0.025)
    # 50 is what `unexplained` divides by: the squared error of answering 0.
    assert np.mean(height**2) == pytest.approx(50, rel=0.03)


def test_batches_are_all_different_and_the_same_seed_gives_the_same():
    config = Config(batch_size=6, eval_examples=5)
    dataset, held_out = data(config)
    seen = np.concatenate([batch[0] for batch in [*dataset.take(3), *held_out]])
    assert seen.shape == (23, 2) and len(np.unique(seen, axis=0)) == 23
    np.testing.assert_array_equal(next(iter(data(config)[0]))[0], seen[:6])


def reached(**options):
    """(accuracy, unexplained) by NumPy from what the trained model answers."""
    made = []
    config = Config(probe_every=0, eval_every=None, eval_examples=2000, **options)
    results = launch.run(config, lambda config: made.append(build(config)) or made[0], show=False)
    place, _ = points(2000, [config.seed, -1])
    outputs = made[0].trainer.model(place)
    arm, height = numpy_targets(place)
    accuracy = np.mean(np.argmax(outputs["arm"], axis=1) == arm)
    unexplained = np.mean((outputs["height"][:, 0] - height) ** 2) / 50
    assert results["accuracy"] == pytest.approx(accuracy, abs=0.003)
    assert results["unexplained"] == pytest.approx(unexplained, rel=0.01)
    return accuracy, unexplained


def test_a_combiner_finds_the_arms_that_the_plain_sum_neglects():
    """1,500 updates; see the docstring of the experiment for 6,000."""
    accuracy, unexplained = reached(steps=1500)
    plain, plain_unexplained = reached(steps=1500, combiner="weighted_sum")
    assert accuracy > 0.85 and plain < 0.75
    assert max(unexplained, plain_unexplained) < 0.65


def test_the_conflict_that_is_logged_is_that_of_the_gradients(tmp_path):
    """The cosine of the first update, from two tapes of its own."""
    config = Config(steps=1, batch_size=64, units=8, eval_examples=8, probe_every=1, workdir=str(tmp_path))
    launch.run(config, build, show=False)
    logged = {v.tag: v.tensor.float_val[0] for _, v in event_writer.read(tmp_path / "train") if v.tensor.float_val}

    keras.utils.set_random_seed(config.seed)
    experiment = build(config)
    model = experiment.trainer.model
    place, targets = next(iter(experiment.dataset))
    gradients = []
    for name, loss in (
        ("arm", keras.losses.SparseCategoricalCrossentropy(True)),
        ("height", keras.losses.MeanSquaredError()),
    ):
        with tf.GradientTape() as tape:
            value = loss(targets[name], model(place)[name])
        found = tape.gradient(value, model.trainable_variables)
        # A head has no part in the other's loss.
        parts = [np.zeros(v.shape) if g is None else g for g, v in zip(found, model.trainable_variables, strict=True)]
        gradients.append(np.concatenate([np.ravel(part) for part in parts]))
    arm, height = gradients
    cosine = arm @ height / np.linalg.norm(arm) / np.linalg.norm(height)
    assert logged["optimizer/gradient_cosine/arm-height"] == pytest.approx(cosine, abs=1e-4)
    assert logged["optimizer/gradient_conflict/rate"] == float(cosine < 0)
