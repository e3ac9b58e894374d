"""The same two networks with a `train_step` in a subclass of `keras.Model`."""

import keras
import tensorflow as tf


class DCGAN(keras.Model):
    def __init__(self, pair):
        super().__init__()
        self.pair = pair
        self.trackers = {name: keras.metrics.Mean(name=name) for name in ("real", "fake", "fooled")}

    def compile(self, optimizer, generator_optimizer):
        super().compile()
        self.discriminator_optimizer = optimizer
        self.generator_optimizer = generator_optimizer

    @property
    def metrics(self):
        return list(self.trackers.values())

    def judge(self, real, training):
        fake = self.pair.draw(tf.shape(real)[0], training)
        logits = self.pair.discriminator(tf.concat([real, fake], axis=0), training=training)[:, 0]
        on_real, on_fake = tf.split(logits, 2)
        return tf.reduce_mean(tf.nn.softplus(-on_real)), tf.reduce_mean(tf.nn.softplus(on_fake))

    def forge(self, real, training):
        fake = self.pair.draw(tf.shape(real)[0], training)
        return tf.reduce_mean(tf.nn.softplus(-self.pair.discriminator(fake, training=training)[:, 0]))

    def track(self, **losses):
        for name, value in losses.items():
            self.trackers[name].update_state(value)
        return {name: tracker.result() for name, tracker in self.trackers.items()}

    def train_step(self, real):
        with tf.GradientTape() as tape:
            on_real, on_fake = self.judge(real, training=True)
            loss = on_real + on_fake
        variables = self.pair.discriminator.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.discriminator_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        with tf.GradientTape() as tape:
            fooled = self.forge(real, training=True)
        variables = self.pair.generator.trainable_variables
        gradients = tape.gradient(fooled, variables)
        self.generator_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self.track(real=on_real, fake=on_fake, fooled=fooled)

    def test_step(self, real):
        on_real, on_fake = self.judge(real, training=False)
        return self.track(real=on_real, fake=on_fake, fooled=self.forge(real, training=False))


def compiled(script):
    model = DCGAN(script.make_model())
    model.compile(keras.optimizers.Adam(4e-4, beta_1=0.5), keras.optimizers.Adam(4e-4, beta_1=0.5))
    return model
