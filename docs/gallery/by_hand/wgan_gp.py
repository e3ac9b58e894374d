"""The same two networks with a `train_step` in a subclass of `keras.Model`."""

import keras
import tensorflow as tf


class WGAN(keras.Model):
    def __init__(self, pair, critic_steps, penalty_weight=10.0):
        super().__init__()
        self.pair = pair
        self.critic_steps = critic_steps
        self.penalty_weight = penalty_weight
        self.trackers = {name: keras.metrics.Mean(name=name) for name in ("distance", "penalty", "score")}

    def compile(self, optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer = optimizer
        self.generator_optimizer = generator_optimizer

    @property
    def metrics(self):
        return list(self.trackers.values())

    def criticise(self, real):
        fake = self.pair.draw(tf.shape(real)[0])
        points = self.pair.between(real, fake)
        with tf.GradientTape() as tape:
            tape.watch(points)
            score = self.pair.critic(points)
        slope = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(score, points)), axis=1) + 1e-9)
        distance = self.pair.critic(fake) - self.pair.critic(real)
        return tf.reduce_mean(distance), tf.reduce_mean(tf.square(slope - 1))

    def forge(self, real):
        return -tf.reduce_mean(self.pair.critic(self.pair.draw(tf.shape(real)[0])))

    def track(self, **losses):
        for name, value in losses.items():
            self.trackers[name].update_state(value)

    def train_step(self, real):
        variables = self.pair.critic.trainable_variables
        for _ in range(self.critic_steps):
            with tf.GradientTape() as tape:
                distance, penalty = self.criticise(real)
                loss = distance + self.penalty_weight * penalty
            gradients = tape.gradient(loss, variables)
            self.critic_optimizer.apply_gradients(zip(gradients, variables, strict=True))
            self.track(distance=distance, penalty=penalty)
        variables = self.pair.generator.trainable_variables
        with tf.GradientTape() as tape:
            score = self.forge(real)
        gradients = tape.gradient(score, variables)
        self.generator_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.track(score=score)
        return {name: tracker.result() for name, tracker in self.trackers.items()}

    def test_step(self, real):
        distance, penalty = self.criticise(real)
        self.track(distance=distance, penalty=penalty)
        return {name: tracker.result() for name, tracker in self.trackers.items()}


def compiled(script):
    model = WGAN(script.make_model(), script.CRITIC_STEPS)
    model.compile(*(keras.optimizers.Adam(1e-3, beta_1=0.0, beta_2=0.9) for _ in range(2)))
    return model
