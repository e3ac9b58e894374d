"""A generative adversarial network on a ring of eight Gaussians: two optimizers in one `train_step`.

    looptape run gan --workdir=runs/gan

The generator turns noise into points of the plane; the discriminator tells them from points of eight narrow Gaussians
on a circle. The typical failure is a generator that covers only some of the eight. `modes` counts those that it
covers: at least a quarter of their fair share of the generated points lies within three standard deviations of the
centre. `quality` is the share of generated points that lie so close to any centre; for the real points it is 0.989.
Each network has its own update, with its own losses, variables and optimizer, and checkpoints hold all of them. The
discriminator's slope at real points is penalised (Mescheder et al. 2018). Evaluations and pictures use the averaged
weights. TensorBoard's image tab shows the generated points.

Expect all eight `modes` and a `quality` above 0.8 in about a minute on two CPU cores: seeds 0, 1 and 2 covered all
eight, with a quality of 0.846, 0.869 and 0.836.
"""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf

from looptape import Trainer, launch
from looptape.experiments.records import media
from looptape.models import AdversarialPair

MODES, RADIUS, DEVIATION = 8, 2.0, 0.02
WEIGHTS = {"real": 1.0, "fake": 1.0, "slope": 0.1, "fooling": 1.0}


@dataclasses.dataclass(frozen=True)
class Config(launch.Config):
    steps: int = 10_000
    batch_size: int = 256
    learning_rate: float = 1e-3
    learning_rate_schedule: str = "cosine"
    ema_decay: float | None = 0.995
    evaluate_averaged: bool = True
    jit_compile: bool = True
    log_every: int = 100
    eval_every: int | None = 1000
    checkpoint_every: int | None = 1000

    units: int = launch.option(128, "size of each of the two hidden layers of both networks", least=1)
    latent_size: int = launch.option(16, "size of the generator's input", least=1)
    eval_examples: int = launch.option(10_000, "points made in an evaluation", least=MODES, resume="accept")


def centres():
    """[8, 2]: the middles of the Gaussians, at equal distances on a circle."""
    angles = tf.range(MODES, dtype=tf.float32) * (2 * math.pi / MODES)
    return RADIUS * tf.stack([tf.cos(angles), tf.sin(angles)], axis=1)


def batch(size, latent_size, seed):
    """{"real": points [size, 2], "latents": noise for the generator [size, latent_size]} from a seed of two numbers."""
    mode_seed, point_seed, latent_seed = tf.unstack(tf.random.split(seed, 3))
    modes = tf.random.stateless_uniform([size], mode_seed, maxval=MODES, dtype=tf.int32)
    real = tf.gather(centres(), modes) + DEVIATION * tf.random.stateless_normal([size, 2], point_seed)
    return {"real": real, "latents": tf.random.stateless_normal([size, latent_size], latent_seed)}


class Coverage(keras.metrics.Metric):
    """{"modes": centres that are covered, "quality": share of points close to a centre} of the points seen."""

    def __init__(self, name="coverage", **options):
        super().__init__(name=name, **options)
        self._close = self.add_weight(name="close", shape=(MODES,), initializer="zeros")
        self._seen = self.add_weight(name="seen", initializer="zeros")

    def update_state(self, targets, outputs, sample_weight=None):
        squares = tf.reduce_sum(tf.square(outputs[:, tf.newaxis] - targets), axis=-1)
        self._close.assign_add(tf.reduce_sum(tf.cast(squares < (3 * DEVIATION) ** 2, tf.float32), axis=0))
        self._seen.assign_add(tf.cast(tf.shape(outputs)[0], tf.float32))

    def result(self):
        shares = tf.math.divide_no_nan(tf.convert_to_tensor(self._close), tf.convert_to_tensor(self._seen))
        covered = tf.cast(shares > 0.25 / MODES, tf.float32)
        return {"modes": tf.reduce_sum(covered), "quality": tf.reduce_sum(shares)}


class GanTrainer(Trainer):
    """One update is two: the discriminator's, then the generator's against the new discriminator."""

    def __init__(self, model, optimizer, discriminator_optimizer, **options):
        super().__init__(model, optimizer, **options)
        self.discriminator_optimizer = discriminator_optimizer

    def train_step(self, batch):
        self.minimize(
            batch,
            self.discriminator_losses,
            variables=self.model.discriminator.trainable_variables,
            optimizer=self.discriminator_optimizer,
            loss_weights={name: self.loss_weights[name] for name in ("real", "fake", "slope")},
            name="discriminator",
        )
        self.minimize(
            batch,
            self.generator_losses,
            variables=self.model.generator.trainable_variables,
            loss_weights={"fooling": self.loss_weights["fooling"]},
            name="generator",
        )
        return {}

    def discriminator_losses(self, batch, training):
        judge, real = self.model.discriminator, batch["real"]
        fake = tf.stop_gradient(self.model.generator(batch["latents"], training=training))
        with tf.GradientTape() as tape:
            tape.watch(real)
            logits = judge(real, training=training)
        slope = tape.gradient(logits, real)
        return {
            "real": tf.nn.softplus(-logits)[:, 0],
            "fake": tf.nn.softplus(judge(fake, training=training))[:, 0],
            "slope": tf.reduce_sum(tf.square(slope), axis=-1),
        }

    def generator_losses(self, batch, training):
        made = self.model.generator(batch["latents"], training=training)
        self.update_metrics(centres(), made)
        return {"fooling": tf.nn.softplus(-self.model.discriminator(made, training=training))[:, 0]}

    def eval_step(self, batch):
        return self.generator_losses(batch, training=False)


def data(config):
    """(endless batches, held-out noise)."""
    train = tf.data.Dataset.counter().map(lambda i: batch(config.batch_size, config.latent_size, [config.seed, i]))
    held_out = batch(config.eval_examples, config.latent_size, [config.seed, -1])
    return train.prefetch(2), tf.data.Dataset.from_tensor_slices(held_out).batch(1000)


def picture(points, size=256):
    """[size, size, 3]: points [count, 2] in blue on white, circles where they are close to a centre; y upwards."""
    reach = 1.5 * RADIUS
    pixels = np.ones((size, size, 3))

    def place(at):
        columns, rows = ((np.asarray(at) * [1, -1] + reach) / (2 * reach) * size).astype(int).T
        seen = (columns >= 0) & (columns < size) & (rows >= 0) & (rows < size)
        return rows[seen], columns[seen]

    around = np.linspace(0, 2 * np.pi, 64)
    circle = 3 * DEVIATION * np.stack([np.cos(around), np.sin(around)], axis=1)
    pixels[place((centres()[:, np.newaxis] + circle).numpy().reshape(-1, 2))] = (0.84, 0.37, 0.0)
    pixels[place(points)] = (0.0, 0.45, 0.7)
    return pixels


def build(config):
    model = AdversarialPair(2, config.latent_size, (config.units,) * 2)
    metrics = {"coverage": Coverage()}
    optimizers = [launch.optimizer(config), launch.optimizer(config)]
    options = launch.trainer_options(config, WEIGHTS)
    trainer = GanTrainer(model, *optimizers, metrics=metrics, **options)
    dataset, held_out = data(config)
    latents = batch(2000, config.latent_size, [config.seed, -1])["latents"]

    def points_made():
        if not config.evaluate_averaged:
            return picture(model.generator(latents))
        with trainer.averaged_weights():
            return picture(model.generator(latents))

    goals = (launch.Goal("modes", above=7.5), launch.Goal("quality", above=0.8))
    shown = media.Show(trainer, config.workdir, {"points_made": points_made})
    return launch.Experiment(trainer, dataset, held_out, goals=goals, callbacks=(shown,))


if __name__ == "__main__":
    launch.main(Config, build)
