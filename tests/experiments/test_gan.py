"""The GAN: data, metric and losses against NumPy, its two updates against a hand-written loop, and that it learns."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import launch
from looptape.experiments.gan import (
    DEVIATION,
    WEIGHTS,
    Config,
    Coverage,
    GanTrainer,
    batch,
    build,
    centres,
    data,
    picture,
)
from looptape.models import AdversarialPair
from looptape.trainer.summaries import event_writer

ANGLES = 2 * np.pi * np.arange(8) / 8
CENTRES = 2.0 * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)


def nearest(points):
    """(index of the nearest centre, distance to it) of every point."""
    distances = np.linalg.norm(np.asarray(points)[:, np.newaxis] - CENTRES, axis=-1)
    return distances.argmin(axis=1), distances.min(axis=1)


def test_real_points_are_eight_narrow_gaussians():
    np.testing.assert_allclose(centres(), CENTRES, atol=1e-6)
    drawn = batch(8000, 5, [1, 2])
    mode, distance = nearest(drawn["real"])
    np.testing.assert_allclose(np.bincount(mode, minlength=8) / 8000, 1 / 8, atol=0.015)
    # The distance from the centre of a Gaussian in the plane: E r² = 2σ².
    assert np.mean(distance**2) == pytest.approx(2 * 0.02**2, rel=0.05)
    assert drawn["latents"].shape == (8000, 5) and np.std(drawn["latents"]) == pytest.approx(1.0, rel=0.02)


def test_batches_are_all_different_and_the_same_seed_gives_the_same():
    config = Config(batch_size=6, eval_examples=8)
    dataset, held_out = data(config)
    seen = [part["latents"].numpy() for part in [*dataset.take(3), *held_out]]
    rows = np.concatenate(seen)
    assert len(np.unique(rows, axis=0)) == len(rows) == 26
    np.testing.assert_array_equal(next(iter(data(config)[0]))["latents"], seen[0])


def test_coverage_counts_modes_and_close_points():
    metric = Coverage()
    metric.update_state(centres(), batch(4000, 1, [3, 4])["real"])
    result = {name: float(value) for name, value in metric.result().items()}
    assert result["modes"] == 8 and result["quality"] == pytest.approx(1 - np.exp(-4.5), abs=0.005)
    # Ten points on each of five centres, one on a sixth (below a quarter of its share), the others far away.
    metric.reset_state()
    metric.update_state(centres(), tf.constant(np.repeat(CENTRES[:5], 10, axis=0), tf.float32))
    far = np.concatenate([CENTRES[5:6], CENTRES[6:] + [0.0, 3.1 * DEVIATION], np.zeros((27, 2))])
    metric.update_state(centres(), tf.constant(far, tf.float32))
    result = {name: float(value) for name, value in metric.result().items()}
    assert result["modes"] == 5 and result["quality"] == pytest.approx(51 / 80)


def numpy_softplus(x):
    return np.log1p(np.exp(x))


def trainer_of(model, rate=0.01, **options):
    optimizers = keras.optimizers.Adam(rate), keras.optimizers.SGD(rate)
    return GanTrainer(model, *optimizers, loss_weights=WEIGHTS, **options)


def test_the_losses_of_known_networks():
    """A discriminator that is x·a: its slope is a everywhere. A generator that is the first two latents."""
    model = AdversarialPair(2, 2, ())
    a = np.array([[0.7], [-0.4]], "float32")
    model.discriminator.set_weights([a, np.zeros(1)])
    model.generator.set_weights([np.eye(2), np.zeros(2)])
    trainer, drawn = trainer_of(model), batch(16, 2, [1, 2])
    real, latents = drawn["real"].numpy(), drawn["latents"].numpy()
    losses = trainer.discriminator_losses(drawn, True)
    np.testing.assert_allclose(losses["real"], numpy_softplus(-real @ a)[:, 0], rtol=1e-5)
    np.testing.assert_allclose(losses["fake"], numpy_softplus(latents @ a)[:, 0], rtol=1e-5)
    np.testing.assert_allclose(losses["slope"], np.full(16, 0.65), rtol=1e-5)
    np.testing.assert_allclose(
        trainer.generator_losses(drawn, True)["fooling"], numpy_softplus(-latents @ a)[:, 0], rtol=1e-5
    )


def test_two_updates_per_step_equal_a_hand_written_loop():
    """The discriminator's update first, with its own optimizer; then the generator's against the new discriminator."""
    model = AdversarialPair(2, 3, (5,))
    copy = AdversarialPair(2, 3, (5,))
    copy.set_weights(model.get_weights())
    trainer = trainer_of(model)
    dataset, _ = data(Config(batch_size=12, latent_size=3))
    trainer.fit(dataset, steps=3, progress=False)

    first, second = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01)
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    for drawn in dataset.take(3):
        real, latents = drawn["real"], drawn["latents"]
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(real)
                on_real = copy.discriminator(real)
            on_fake = copy.discriminator(copy.generator(latents))
            loss = cross_entropy(tf.ones([12, 1]), on_real) + cross_entropy(tf.zeros([12, 1]), on_fake)
            loss += 0.1 * tf.reduce_mean(tf.norm(inner.gradient(on_real, real), axis=1) ** 2)
        variables = copy.discriminator.trainable_variables
        second.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            loss = cross_entropy(tf.ones([12, 1]), copy.discriminator(copy.generator(latents)))
        variables = copy.generator.trainable_variables
        first.apply(tape.gradient(loss, variables), variables)
    for ours, theirs in zip(model.get_weights(), copy.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_it_finds_the_ring_and_shows_it(tmp_path):
    """In a few seconds the points surround the origin at the ring's radius: a wrong loss makes them elsewhere."""
    made = []
    config = Config(
        steps=1000,
        batch_size=128,
        learning_rate=2e-3,
        learning_rate_schedule="constant",
        units=64,
        jit_compile=False,
        eval_every=500,
        eval_examples=500,
        workdir=str(tmp_path),
    )
    launch.run(config, lambda config: made.append(build(config)) or made[0], show=False)
    trainer = made[0].trainer
    with trainer.averaged_weights():
        points = trainer.model.generator(batch(2000, config.latent_size, [9, 9])["latents"])
    mode, _ = nearest(points)
    radius = np.linalg.norm(points, axis=1)
    assert np.bincount(mode, minlength=8).min() > 0.05 * 2000
    assert np.median(np.abs(radius - 2.0)) < 0.5
    shown = [(step, value.tag) for step, value in event_writer.read(tmp_path / "shown")]
    assert shown == [(500, "points_made"), (1000, "points_made")]


def test_the_picture_has_points_where_they_are():
    """From -3 to 3 in 100 pixels, the second coordinate upwards; what is outside is left out."""
    pixels = picture(np.array([[0.0, 1.5], [9.0, 0.0]]), size=100)
    blue = np.argwhere((pixels == (0.0, 0.45, 0.7)).all(axis=-1))
    np.testing.assert_array_equal(blue, [[25, 50]])
    circles = np.argwhere((pixels == (0.84, 0.37, 0.0)).all(axis=-1))
    mode, distance = nearest(((circles + 0.5) * 0.06 - 3.0)[:, ::-1] * [1, -1])
    assert set(mode) == set(range(8)) and distance.max() < 3 * DEVIATION + 0.05
