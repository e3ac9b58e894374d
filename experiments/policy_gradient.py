"""Cart-pole by policy gradients, simulated inside the traced update by a `tf.while_loop`.

    looptape run policy_gradient --workdir=runs/cart_pole

Fifty times a second the policy pushes a cart to the left or to the right, so that the pole on it does not fall. An
episode ends when the pole leans more than 12 degrees, when the cart is more than 2.4 away from its start, or after 500
pushes; its return is the number of pushes. Equations and limits are those of Barto, Sutton & Anderson (1983) as in
Gym's CartPole-v1, where a return above 475 counts as solved. Each update plays new episodes with the present policy:
there is no simulator outside the graph, and the only data are starting points and random numbers. Three weighted
losses, each with one value per push of an episode: `policy` (advantages by Schulman et al. 2016), `value`, and the
negative `entropy`.

Evaluations play 100 episodes and always take the more likely push; the `return` of the training comes from pushes drawn
from the policy.

Expect a `return` above 475 in less than a minute on two CPU cores: seeds 0 to 4 all reached 500.
"""

import dataclasses
import math

import tensorflow as tf

from looptape import Trainer, launch
from looptape.models import ActorCritic

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
MOST_POSITION, MOST_ANGLE = 2.4, 12 * math.pi / 180


@dataclasses.dataclass(frozen=True)
class Config(launch.Config):
    steps: int = 400
    batch_size: int = 32
    learning_rate: float = 3e-3
    learning_rate_schedule: str = "cosine"
    clip_norm: float | None = 0.5
    jit_compile: bool = True
    log_every: int = 10
    eval_every: int | None = 50
    checkpoint_every: int | None = 50
    probe_every: int = 50

    units: int = launch.option(64, "size of each of the two hidden layers of policy and value", least=1)
    length: int = launch.option(500, "largest number of pushes in an episode", least=1)
    discount: float = launch.option(0.99, "discount of a reward per push", above=0, below=1)
    trace_decay: float = launch.option(
        0.95, "λ of the advantages: 0 looks one push ahead, 1 to the end", least=0, most=1
    )
    eval_episodes: int = launch.option(100, "episodes per evaluation", least=1, resume="accept")


def push(state, right):
    """The state [batch, 4] (position, speed, angle, angular speed) after a push to the right or left [batch]."""
    position, speed, angle, turning = tf.unstack(state, axis=1)
    mass, moment = CART_MASS + POLE_MASS, POLE_MASS * HALF_LENGTH
    sine, cosine = tf.sin(angle), tf.cos(angle)
    force = tf.where(right, tf.constant(FORCE, state.dtype), tf.constant(-FORCE, state.dtype))
    pushed = (force + moment * turning**2 * sine) / mass
    falling = (GRAVITY * sine - cosine * pushed) / (HALF_LENGTH * (4 / 3 - POLE_MASS * cosine**2 / mass))
    rolling = pushed - moment * falling * cosine / mass
    rates = tf.stack([speed, rolling, turning, falling], axis=1)
    return state + SECONDS * rates


def standing(state):
    """[batch]: whether the pole stands and the cart is near."""
    return (tf.abs(state[:, 0]) <= MOST_POSITION) & (tf.abs(state[:, 2]) <= MOST_ANGLE)


def play(choose, start, length):
    """Plays episodes [batch] in a loop of the graph. Nothing is differentiated through it.

    Args:
        choose: `(states [batch, 4], t) -> bool [batch]`, whether to push to the right.
        start: [batch, 4].
        length: most pushes of an episode.

    Returns:
        states [batch, length + 1, 4], pushes to the right [batch, length], and whether the episode was still going on
        at each of the states [batch, length + 1]. After its end an episode stands still.
    """

    def body(t, state, going, states, rights, goings):
        right = choose(state, t)
        states, rights, goings = states.write(t, state), rights.write(t, right), goings.write(t, going)
        state = tf.where(going[:, tf.newaxis], push(state, right), state)
        return t + 1, state, going & standing(state), states, rights, goings

    arrays = [tf.TensorArray(dtype, length) for dtype in (start.dtype, tf.bool, tf.bool)]
    first = (tf.constant(0), start, standing(start), *arrays)
    _, state, going, states, rights, goings = tf.while_loop(
        lambda t, *_: t < length, body, first, maximum_iterations=length
    )
    states = tf.concat([tf.stop_gradient(states.stack()), tf.stop_gradient(state)[tf.newaxis]], axis=0)
    goings = tf.concat([goings.stack(), going[tf.newaxis]], axis=0)
    return tf.transpose(states, [1, 0, 2]), tf.transpose(rights.stack()), tf.transpose(goings)


def advantages(values, going, discount, trace_decay):
    """[batch, length]: how much better than expected the pushes after each state turned out.

    A push is rewarded by 1 - discount, so that a value is at most 1. An episode that continues after its last push is
    worth what the value says.

    Args:
        values: of the states [batch, length + 1].
        going: whether the episode was going on at each of the states, as numbers [batch, length + 1].
        discount: what a reward is worth one push later.
        trace_decay: how much less the surprise of a later push counts, beside the discount.
    """
    length = values.shape[1] - 1
    surprise = going[:, :-1] * (1 - discount + discount * going[:, 1:] * values[:, 1:] - values[:, :-1])
    later = tf.range(length)[:, tf.newaxis] - tf.range(length)  # [of the surprise, of the push]
    factors = tf.where(later >= 0, (discount * trace_decay) ** tf.cast(tf.maximum(later, 0), values.dtype), 0.0)
    return tf.matmul(surprise, factors)


class PolicyGradient(Trainer):
    """Plays with the present policy, then computes the losses of what was played."""

    def __init__(self, model, optimizer, *, length, discount, trace_decay, **options):
        super().__init__(model, optimizer, **options)
        self.length, self.discount, self.trace_decay = length, discount, trace_decay

    def compute_losses(self, batch, training):
        def choose(state, t):
            left, right = tf.unstack(self.model(state)["policy"], axis=1)
            return batch["chance"][:, t] < tf.sigmoid(right - left) if training else right > left

        states, rights, going = play(choose, batch["start"], self.length)
        going = tf.cast(going, tf.float32)
        self.log("return", tf.reduce_sum(going[:, :-1], axis=1))

        outputs = self.model(tf.reshape(states, [-1, 4]))
        values = tf.reshape(outputs["value"], [-1, self.length + 1])
        logs = tf.reshape(tf.nn.log_softmax(outputs["policy"]), [-1, self.length + 1, 2])[:, :-1]
        fixed = tf.stop_gradient(values)
        better = advantages(fixed, going, self.discount, self.trace_decay)
        losses = {
            "policy": -better * tf.where(rights, logs[..., 1], logs[..., 0]),
            "value": tf.square(fixed[:, :-1] + better - values[:, :-1]),
            "entropy": tf.reduce_sum(tf.exp(logs) * logs, axis=-1),
        }
        played = going[:, :-1]
        return {name: (loss, played) for name, loss in losses.items()}


def episodes(count, length, seed):
    """{"start": [count, 4] near the middle, "chance": uniform numbers for the pushes [count, length]}."""
    start_seed, chance_seed = tf.unstack(tf.random.split(seed, 2))
    start = tf.random.stateless_uniform([count, 4], start_seed, -0.05, 0.05)
    return {"start": start, "chance": tf.random.stateless_uniform([count, length], chance_seed)}


def data(config):
    """(endless batches of episodes to play, those of the evaluation)."""
    train = tf.data.Dataset.counter().map(lambda i: episodes(config.batch_size, config.length, [config.seed, i]))
    held_out = episodes(config.eval_episodes, config.length, [config.seed, -1])
    return train.prefetch(2), tf.data.Dataset.from_tensor_slices(held_out).batch(100)


def build(config):
    model = ActorCritic(features=4, actions=2, units=(config.units,) * 2)
    settings = {"length": config.length, "discount": config.discount, "trace_decay": config.trace_decay}
    options = launch.trainer_options(config, {"policy": 1.0, "value": 1.0, "entropy": 0.001})
    trainer = PolicyGradient(model, launch.optimizer(config), **settings, **options)
    dataset, held_out = data(config)
    goal = launch.Goal("return", above=475, baseline=22, baseline_name="pushes by chance")
    return launch.Experiment(trainer, dataset, held_out, goals=(goal,))


if __name__ == "__main__":
    launch.main(Config, build)
