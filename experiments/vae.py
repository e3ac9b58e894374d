"""A variational autoencoder of generated shapes: reconstruction and an annealed KL divergence.

    looptape run vae --workdir=runs/vae
    looptape run vae --workdir=runs/vae_cyclical --annealing=cyclical

Each update draws new triangles, squares and circles of any place and size. The losses are the negative log-likelihood
of the pixels and the divergence of the posterior from the prior, in nats per image. The weight of the divergence rises
gradually, once (Bowman et al. 2016) or in cycles (Fu et al. 2019), so that the network uses the code before it has to
pay for it. `evidence_lower_bound` is minus their sum with full weight on held-out images, with codes drawn from the
posterior. Reconstructions and samples are in the run `shown` of TensorBoard, under Images.

Expect an `evidence_lower_bound` above -30 in about a minute on two CPU cores: -25.5, -26.0 and -26.1 with seeds 0 to 2.
The best constant image has -197.

With cyclical annealing it reached -26.0, and without annealing -25.5 (seed 0): these shapes do not need it; `loss/kl`
shows its effect. Reconstructions have the right kind of shape; not all samples are a shape.
"""

import dataclasses
import math

import numpy as np
import tensorflow as tf

from looptape import Trainer, launch
from looptape.experiments.records import media
from looptape.losses import CyclicalKL, KLWarmup, bernoulli_negative_log_likelihood, standard_normal_kl
from looptape.models import VariationalAutoencoder

SIZE = 24  # pixels along each side
CORNERS = (3, 4, 0)  # of a triangle, a square, a circle

ANNEALING = {
    "linear": KLWarmup,
    "cyclical": CyclicalKL,
    "none": lambda steps: 1.0,
}


@dataclasses.dataclass(frozen=True)
class Config(launch.Config):
    steps: int = 6000
    batch_size: int = 128
    learning_rate: float = 1e-3
    jit_compile: bool = True
    log_every: int = 50
    eval_every: int | None = 500
    checkpoint_every: int | None = 500

    annealing: str = launch.option(
        "linear",
        "weight of the KL divergence: from 0 to 1 once, again and again, or always 1",
        choices=ANNEALING,
    )
    annealing_steps: int = launch.option(
        1000, "updates of the rise, or of a cycle that rises for its first half", least=1
    )
    latent: int = launch.option(8, "dimensions of the code", least=1)
    units: int = launch.option(256, "size of the first hidden layer; the second has half of it", least=2)
    eval_examples: int = launch.option(2000, "held-out images", least=16, resume="accept")


def shapes(count, seed):
    """Images [count, 24, 24, 1] of zeros and ones: a triangle, a square or a circle each, anywhere and of any size."""
    kind_seed, place_seed = tf.unstack(tf.random.split(seed, 2))
    kind = tf.random.stateless_uniform([count, 1, 1], kind_seed, 0, len(CORNERS), tf.int32)
    place, size = tf.split(tf.random.stateless_uniform([count, 3, 1], place_seed), [2, 1], axis=1)
    radius = SIZE * (0.2 + 0.2 * size)
    middle = radius + (SIZE - 2 * radius) * place
    pixels = tf.range(SIZE, dtype=tf.float32) + 0.5
    y, x = pixels[:, None] - middle[:, :1], pixels[None, :] - middle[:, 1:]
    reached = tf.stack([_reach(x, y, corners) for corners in CORNERS], axis=-1)
    chosen = tf.reduce_sum(reached * tf.one_hot(kind, len(CORNERS)), axis=-1)
    return tf.cast(chosen < radius, tf.float32)[..., None]


def _reach(x, y, corners):
    """How large a regular polygon around the origin has to be to reach a point: the radius of the circle around it."""
    if not corners:
        return tf.sqrt(x**2 + y**2)
    sides = [math.pi / 2 + 2 * math.pi * side / corners for side in range(corners)]
    return tf.reduce_max([x * math.cos(side) + y * math.sin(side) for side in sides], axis=0) / math.cos(
        math.pi / corners
    )


def constant_image(images, held_out):
    """The log-likelihood in nats of a held-out image if all have the same pixels' probabilities: the mean image's."""
    mean = (np.sum(images, axis=0) + 0.5) / (len(images) + 1)
    return np.sum(np.log(np.where(held_out > 0.5, mean, 1 - mean)), axis=(1, 2, 3)).mean()


class VaeTrainer(Trainer):
    """The two losses; their sum is the negative evidence lower bound, whatever weight they are trained with."""

    def compute_losses(self, images, training):
        # The latent is drawn in evaluation, too: with the posterior's mean the sum would not be a bound.
        outputs = self.model(images, training=True)
        reconstruction = bernoulli_negative_log_likelihood(images, outputs["reconstruction"])
        divergence = standard_normal_kl(None, outputs["latent"])
        self.log("evidence_lower_bound", -reconstruction - divergence)
        return {"reconstruction": reconstruction, "kl": divergence}


def data(config):
    """(endless batches, held-out images)."""
    train = tf.data.Dataset.counter().map(lambda i: shapes(config.batch_size, [config.seed, i]))
    return train.prefetch(2), shapes(config.eval_examples, [config.seed, -1])


def build(config):
    model = VariationalAutoencoder((SIZE, SIZE, 1), config.latent, (config.units, config.units // 2), seed=config.seed)
    weights = {"reconstruction": 1.0, "kl": ANNEALING[config.annealing](config.annealing_steps)}
    trainer = VaeTrainer(model, launch.optimizer(config), **launch.trainer_options(config, weights))
    dataset, held_out = data(config)
    latents = tf.random.stateless_normal([64, config.latent], [config.seed, -2])

    def reconstructions():
        """Held-out images above what becomes of them."""
        images = held_out[:16]
        return media.tiled(tf.concat([images, tf.sigmoid(model(images)["reconstruction"])], axis=0), columns=16)

    pictures = {
        "reconstructions": reconstructions,
        "samples": lambda: media.tiled(model.generate(latents), columns=16),
    }
    goal = launch.Goal(
        "evidence_lower_bound",
        above=-30,
        baseline=constant_image(shapes(5000, [config.seed, -3]).numpy(), held_out.numpy()),
        baseline_name="best constant image",
    )
    evaluated = tf.data.Dataset.from_tensor_slices(held_out).batch(500)
    shown = media.Show(trainer, config.workdir, pictures)
    return launch.Experiment(trainer, dataset, evaluated, goals=(goal,), callbacks=(shown,))


if __name__ == "__main__":
    launch.main(Config, build)
