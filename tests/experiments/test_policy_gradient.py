"""Cart-pole: the simulation and the losses against NumPy in float64, and that it is learnt."""

import numpy as np
import pytest
import tensorflow as tf

from looptape import launch
from looptape.experiments.policy_gradient import (
    Config,
    PolicyGradient,
    advantages,
    build,
    data,
    episodes,
    play,
    push,
    standing,
)
from looptape.models import ActorCritic


def numpy_push(state, right):
    """One step of Gym's CartPole-v1, written down from its source: Euler, kinematics first."""
    x, x_dot, theta, theta_dot = state
    gravity, masscart, masspole, length, force_mag, tau = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
    total_mass, polemass_length = masspole + masscart, masspole * length
    force = force_mag if right else -force_mag
    costheta, sintheta = np.cos(theta), np.sin(theta)
    temp = (force + polemass_length * theta_dot**2 * sintheta) / total_mass
    thetaacc = (gravity * sintheta - costheta * temp) / (length * (4.0 / 3.0 - masspole * costheta**2 / total_mass))
    xacc = temp - polemass_length * thetaacc * costheta / total_mass
    return np.array([x + tau * x_dot, x_dot + tau * xacc, theta + tau * theta_dot, theta_dot + tau * thetaacc])


def numpy_over(state):
    return abs(state[0]) > 2.4 or abs(state[2]) > 12 * 2 * np.pi / 360


def test_a_push_equals_numpy_in_float64():
    generator = np.random.default_rng(0)
    states = generator.uniform(-1, 1, (200, 4)) * [3.0, 4.0, 0.4, 4.0]
    rights = generator.uniform(size=200) < 0.5
    expected = [numpy_push(state, right) for state, right in zip(states, rights, strict=True)]
    np.testing.assert_allclose(push(tf.constant(states), tf.constant(rights)), expected, rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(standing(tf.constant(states)), [not numpy_over(state) for state in states])


def test_whole_episodes_equal_numpy():
    """Pushes that follow the pole, with noise from a table, for 60 steps: some fall earlier, some do not."""
    length, count = 60, 12
    generator = np.random.default_rng(1)
    start = generator.uniform(-0.05, 0.05, (count, 4))
    noise = generator.normal(size=(length, count)) * np.linspace(0.05, 0.6, count)
    table = tf.constant(noise)
    choose = lambda state, t: state[:, 2] + 0.5 * state[:, 3] + table[t] > 0  # noqa: E731
    states, rights, going = (x.numpy() for x in tf.function(lambda s: play(choose, s, length))(tf.constant(start)))
    lasting = []
    for index in range(count):
        state, over = start[index], False
        for t in range(length + 1):
            assert going[index, t] == (not over)
            np.testing.assert_allclose(states[index, t], state, rtol=1e-9, atol=1e-12)
            if t == length or over:
                continue
            right = state[2] + 0.5 * state[3] + noise[t, index] > 0
            assert rights[index, t] == right
            state = numpy_push(state, right)
            over = numpy_over(state)
        lasting.append(going[index, :-1].sum())
    assert min(lasting) < length and max(lasting) == length, lasting


def test_advantages_equal_a_backward_loop():
    generator = np.random.default_rng(2)
    values = generator.normal(size=(3, 8))
    lasting = np.array([8, 3, 1])  # states at which each was running: the first one continues after its last push
    going = (np.arange(8) < lasting[:, np.newaxis]).astype(float)
    expected = np.zeros((3, 7))
    for row in range(3):
        trace = 0.0
        for t in reversed(range(min(lasting[row], 7))):
            after = values[row, t + 1] if t + 1 < lasting[row] else 0.0
            trace = (1 - 0.9) + 0.9 * after - values[row, t] + 0.9 * 0.8 * trace
            expected[row, t] = trace
    np.testing.assert_allclose(advantages(tf.constant(values), tf.constant(going), 0.9, 0.8), expected, rtol=1e-10)


def test_the_losses_equal_numpy():
    """Of episodes sampled by a small model, from what the model says of the states that were played."""
    model = ActorCritic(4, 2, (8,))
    trainer = PolicyGradient(model, "sgd", length=40, discount=0.95, trace_decay=0.9)
    batch = episodes(6, 40, [3, 4])
    with trainer._engine.collecting_logs() as logged:
        losses = trainer.compute_losses(batch, True)
    for index in range(6):
        state, rows = batch["start"][index].numpy().astype("float64"), []
        for t in range(40):
            outputs = model(state[np.newaxis].astype("float32"))
            logits, value = outputs["policy"][0].numpy().astype("float64"), float(outputs["value"][0])
            chances = np.exp(logits) / np.exp(logits).sum()
            right = batch["chance"][index, t] < chances[1]
            rows.append((value, np.log(chances[int(right)]), np.sum(chances * np.log(chances))))
            state = numpy_push(state, right)
            if numpy_over(state):
                break
        played = len(rows)
        last = 0.0 if numpy_over(state) else float(model(state[np.newaxis].astype("float32"))["value"][0])
        values, logs, entropies = np.array(rows).T
        surprise = 0.05 + 0.95 * np.append(values[1:], last) - values
        better = [sum((0.95 * 0.9) ** k * surprise[t + k] for k in range(played - t)) for t in range(played)]
        np.testing.assert_array_equal(losses["policy"][1][index], np.arange(40) < played)
        np.testing.assert_allclose(losses["policy"][0][index, :played], -logs * better, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(losses["value"][0][index, :played], np.square(better), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(losses["entropy"][0][index, :played], entropies, rtol=1e-4)
    assert float(logged["return"]) == pytest.approx(float(tf.reduce_sum(losses["policy"][1])) / 6)


def test_episodes_start_near_the_middle_and_are_all_different():
    dataset, held_out = data(Config(batch_size=50, length=3, eval_episodes=40))
    drawn = list(dataset.take(2)) + list(held_out)
    start = np.concatenate([part["start"] for part in drawn])
    assert start.shape == (140, 4) and len(np.unique(start)) > 540
    assert np.abs(start).max() <= 0.05 and np.abs(start).max() > 0.048 and abs(start.mean()) < 0.005


def test_it_is_learnt():
    """Forty updates: twice as long as by chance and more, counted by playing in NumPy."""
    made = []
    config = Config(
        steps=40,
        learning_rate_schedule="constant",
        length=100,
        probe_every=0,
        eval_every=None,
        eval_episodes=20,
        jit_compile=False,
    )
    results = launch.run(config, lambda config: made.append(build(config)) or made[0], show=False)
    states = episodes(20, 100, [config.seed, -1])["start"].numpy().astype("float64")
    pushes, going = np.zeros(20), np.ones(20, bool)
    for _ in range(100):
        left, right = made[0].trainer.model(states.astype("float32"))["policy"].numpy().T
        pushes += going
        states = np.stack([numpy_push(state, push) for state, push in zip(states, right > left, strict=True)])
        going &= [not numpy_over(state) for state in states]
    assert pushes.mean() > 60
    assert results["return"] == pytest.approx(pushes.mean(), abs=1.0)  # in float32 an episode may end a little earlier
