# %% [markdown]
# # Actor-critic
#
# A cart balances a pole. The simulation is part of the traced update: each update plays a batch of episodes in a loop
# of the graph and learns from them. The dataset only supplies random numbers. There are three losses, and each counts
# only the pushes made while the pole stood.

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import numpy as np
import tensorflow as tf

STEPS = 300
EPISODES = 16
LENGTH = 200
UNITS = 64
DISCOUNT = 0.97
keras.utils.set_random_seed(0)


def make_data():
    """Endless batches of {"start": states [EPISODES, 4], "chance": numbers [EPISODES, LENGTH] for the choices}."""

    def batch(i):
        start = tf.random.stateless_uniform([EPISODES, 4], [0, i], -0.05, 0.05)
        return {"start": start, "chance": tf.random.stateless_uniform([EPISODES, LENGTH], [1, i])}

    return tf.data.Dataset.counter().map(batch)


# %%
def push(state, right):
    """The state (position, speed, angle, turning) [batch, 4] a fiftieth of a second after a push."""
    position, speed, angle, turning = tf.unstack(state, axis=1)
    pushed = (tf.where(right, 10.0, -10.0) + 0.05 * turning**2 * tf.sin(angle)) / 1.1
    falling = (9.8 * tf.sin(angle) - tf.cos(angle) * pushed) / (0.5 * (4 / 3 - 0.1 * tf.cos(angle) ** 2 / 1.1))
    rolling = pushed - 0.05 * falling * tf.cos(angle) / 1.1
    return state + 0.02 * tf.stack([speed, rolling, turning, falling], axis=1)


def play(model, start, chance):
    """(states [LENGTH, batch, 4], pushes [LENGTH, batch], 1 where the pole still stood [LENGTH, batch])."""
    states, rights, standing = (tf.TensorArray(dtype, LENGTH) for dtype in (tf.float32, tf.bool, tf.float32))
    state, alive = start, tf.ones(tf.shape(start)[:1])
    for t in tf.range(LENGTH):
        policy, _ = model(state)
        right = chance[:, t] < tf.sigmoid(policy[:, 0])
        states, rights, standing = states.write(t, state), rights.write(t, right), standing.write(t, alive)
        state = push(state, right)
        upright = (tf.abs(state[:, 0]) < 2.4) & (tf.abs(state[:, 2]) < 0.21)
        alive = tf.where(upright, alive, 0.0)
    return [tf.stop_gradient(states.stack()), rights.stack(), standing.stack()]


def discounted(rewards):
    """The sum of all later rewards [LENGTH, batch], each push further away worth less."""
    return tf.scan(lambda later, reward: reward + DISCOUNT * later, rewards, reverse=True)


# %%
def make_model():
    keras.utils.set_random_seed(0)
    state = keras.Input((4,))
    hidden = keras.layers.Dense(UNITS, "tanh")(state)
    policy, value = (keras.layers.Dense(1, name=name)(hidden) for name in ("policy", "value"))
    return keras.Model(state, [policy, value])


class ActorCritic(Trainer):
    def compute_losses(self, batch, training):
        states, rights, alive = play(self.model, batch["start"], batch["chance"])
        self.log("pushes", tf.reduce_sum(alive, axis=0))
        policy, value = (tf.reshape(out, tf.shape(alive)) for out in self.model(tf.reshape(states, [-1, 4])))
        returns = (1 - DISCOUNT) * discounted(alive)
        better = tf.stop_gradient(returns - value)
        choice = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(rights, tf.float32), policy)
        surprise = tf.nn.sigmoid_cross_entropy_with_logits(tf.sigmoid(policy), policy)
        return {
            "policy": (better * choice, alive),
            "value": (tf.square(returns - value), alive),
            "entropy": (-surprise, alive),
        }


# %%
data = make_data()
trainer = ActorCritic(
    make_model(), keras.optimizers.Adam(1e-2), loss_weights={"policy": 1.0, "value": 1.0, "entropy": 1e-3}
)
history = trainer.fit(data, steps=STEPS, eval_dataset=data.take(4), eval_every=max(STEPS // 5, 1), progress=False)
print("pushes before the pole falls, at most", LENGTH, "over training:", np.round(history.history["val_pushes"], 1))
