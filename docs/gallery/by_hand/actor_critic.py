"""The same policy with a `train_step` in a subclass of `keras.Model`."""

import keras
import tensorflow as tf


class ActorCritic(keras.Model):
    def __init__(self, network, play, returns, weights):
        super().__init__()
        self.network, self.play, self.returns, self.loss_weights = network, play, returns, weights
        self.trackers = {name: keras.metrics.Mean(name=name) for name in (*weights, "pushes")}

    @property
    def metrics(self):
        return list(self.trackers.values())

    def loss_of(self, batch):
        states, rights, alive = self.play(self.network, batch["start"], batch["chance"])
        self.trackers["pushes"].update_state(tf.reduce_sum(alive, axis=0))
        policy, value = (tf.reshape(out, tf.shape(alive)) for out in self.network(tf.reshape(states, [-1, 4])))
        returns = self.returns(alive)
        better = tf.stop_gradient(returns - value)
        choice = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(rights, tf.float32), policy)
        surprise = tf.nn.sigmoid_cross_entropy_with_logits(tf.sigmoid(policy), policy)
        terms = {"policy": better * choice, "value": tf.square(returns - value), "entropy": -surprise}
        total = 0.0
        for name, term in terms.items():
            loss = tf.reduce_sum(term * alive) / tf.reduce_sum(alive)
            self.trackers[name].update_state(loss)
            total += self.loss_weights[name] * loss
        return total

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.loss_of(batch)
        variables = self.network.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {name: tracker.result() for name, tracker in self.trackers.items()}

    def test_step(self, batch):
        self.loss_of(batch)
        return {name: tracker.result() for name, tracker in self.trackers.items()}


def compiled(script):
    weights = {"policy": 1.0, "value": 1.0, "entropy": 1e-3}
    play = tf.function(script.play)  # a loop over tensors: Keras does not convert what `train_step` calls
    model = ActorCritic(script.make_model(), play, lambda a: (1 - script.DISCOUNT) * script.discounted(a), weights)
    model.compile(keras.optimizers.Adam(1e-2))
    return model
