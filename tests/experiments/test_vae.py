"""The autoencoder of shapes: its images and its bound against NumPy, the annealing, the pictures, what it learns."""

import os

import numpy as np
import pytest
import tensorflow as tf

from looptape import launch
from looptape.experiments.vae import SIZE, Config, build, constant_image, data, shapes
from looptape.trainer.summaries import event_writer


def test_images_are_whole_shapes_of_three_kinds():
    images = shapes(600, [1, 2]).numpy()
    assert images.shape == (600, SIZE, SIZE, 1) and set(np.unique(images)) == {0.0, 1.0}
    ones = images[..., 0].sum(axis=(1, 2))
    # The circle around a shape has a radius of 0.2 to 0.4 of the side; the smallest shape is a triangle in the first.
    assert ones.min() >= 0.7 * 3 * np.sqrt(3) / 4 * (0.2 * SIZE) ** 2
    assert ones.max() <= 1.1 * np.pi * (0.4 * SIZE) ** 2
    # Nothing is cut off by the border, and shapes are everywhere.
    middle = np.stack(
        [np.average(np.indices((SIZE, SIZE))[axis] + 0.5, weights=image) for image in images[..., 0] for axis in (0, 1)]
    )
    assert middle.min() > 0.1 * SIZE and middle.max() < 0.9 * SIZE and middle.std() > 0.1 * SIZE
    # How much of its circle a shape fills tells the kinds apart: 0.41, 0.64 and 1.
    rows, columns = np.indices((SIZE, SIZE)) + 0.5
    filled = []
    for image, (y, x) in zip(images[..., 0], middle.reshape(-1, 2), strict=True):
        radius = np.sqrt(((rows - y) ** 2 + (columns - x) ** 2)[image > 0].max())
        filled.append(image.sum() / (np.pi * radius**2))
    counts = np.histogram(filled, [0, 0.57, 0.83, 2])[0]
    assert counts.min() > 120


def test_the_constant_image_against_a_loop():
    images, held_out = shapes(50, [1, 1]).numpy(), shapes(3, [2, 2]).numpy()
    total = 0.0
    for image in held_out:
        for place in np.ndindex(image.shape):
            p = (sum(other[place] for other in images) + 0.5) / 51
            total += np.log(p if image[place] else 1 - p)
    assert constant_image(images, held_out) == pytest.approx(total / 3, rel=1e-5)


def test_the_bound_of_a_model_that_ignores_its_latent():
    """With zero weights it is a coin for every pixel, and the posterior is the prior."""
    experiment = build(Config(eval_examples=20, jit_compile=False))
    for variable in experiment.trainer.model.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    results = experiment.trainer.evaluate(experiment.eval_dataset)
    assert results["evidence_lower_bound"] == pytest.approx(-SIZE * SIZE * np.log(2), rel=1e-5)
    assert results["kl"] == pytest.approx(0.0, abs=1e-6)


def test_the_latent_is_drawn_in_evaluation():
    """Else the sum would not be a bound: a narrow posterior would cost nothing in the reconstruction."""
    experiment = build(Config(eval_examples=16, jit_compile=False))
    model = experiment.trainer.model
    images = data(Config(eval_examples=16))[1]
    logits = model(images)["reconstruction"].numpy().astype(np.float64)
    by_mean = np.sum(np.logaddexp(0, logits) - images.numpy() * logits, axis=(1, 2, 3)).mean()
    drawn = experiment.trainer.evaluate(experiment.eval_dataset)["reconstruction"]
    assert abs(drawn - by_mean) > 0.01 and drawn == pytest.approx(by_mean, rel=0.05)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("linear", [0, 0.25, 0.5, 1, 1, 1]), ("cyclical", [0, 0.5, 1, 1, 0, 1]), ("none", [1, 1, 1, 1, 1, 1])],
)
def test_annealing(name, expected):
    weights = build(Config(annealing=name, annealing_steps=400, eval_examples=16)).trainer.loss_weights
    steps = (0, 100, 200, 399, 400, 1000)
    found = [weights.scalars(["kl"], tf.constant(step, tf.int64))[0] for step in steps]
    np.testing.assert_allclose(found, expected, atol=0.01)


def test_it_learns_and_shows_what_it_does(tmp_path):
    """Better than the best constant image after a few hundred updates, though the bound pays for the latent."""
    config = Config(
        steps=300,
        workdir=str(tmp_path),
        eval_every=None,
        eval_examples=200,
        units=128,
        learning_rate=3e-3,
        jit_compile=False,
    )
    made = []
    results = launch.run(config, lambda config: made.append(build(config)) or made[0], show=False)
    assert results["evidence_lower_bound"] > made[0].goals[0].baseline + 10
    assert results["evidence_lower_bound"] == pytest.approx(-results["reconstruction"] - results["kl"], rel=1e-4)
    assert results["kl"] > 1  # the latent is used
    shown = {
        value.tag: (step, value.tensor.string_val) for step, value in event_writer.read(os.path.join(tmp_path, "shown"))
    }
    assert set(shown) == {"reconstructions", "samples"}
    step, (width, height, png) = shown["reconstructions"]
    assert step == 300 and (int(width), int(height)) == (16 * SIZE, 2 * SIZE)
    top, bottom = np.split(tf.io.decode_png(png).numpy() / 255, 2)
    held_out = data(config)[1].numpy()[:16]
    np.testing.assert_array_equal(top, np.concatenate(held_out, axis=1))
    assert np.abs(top - bottom).mean() < 0.5 * np.abs(top - np.roll(top, SIZE, axis=1)).mean()
