"""Stages of a user's own: against a loop by hand, with accumulation, probes, replicas and a resume."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Stage, Trainer

ROOT = Path(__file__).resolve().parents[4]
X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X[:, :1] - 0.5
RATE, DECAY = 0.1, 0.9


def heavy_ball():
    """Momentum as a stage: state m ← 0.9 m + g."""

    def apply(gradients, state, variables, step):
        state = [DECAY * m + g for m, g in zip(state, gradients, strict=True)]
        return state, state

    return Stage("heavy ball", lambda variables: [tf.zeros_like(v) for v in variables], apply)


def model():
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.set_weights([np.full((3, 1), 0.1, "float32"), np.zeros(1, "float32")])
    return made


def by_hand(steps):
    """The same updates in NumPy."""
    w, b, mw, mb = np.full((3, 1), 0.1), np.zeros(1), 0.0, 0.0
    for _ in range(steps):
        error = 2 * (X @ w + b - Y) / len(X)
        mw, mb = DECAY * mw + X.T @ error, DECAY * mb + error.sum(0)
        w, b = w - RATE * mw, b - RATE * mb
    return w, b


def data(batch):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch).repeat()


def trained(steps=4, batch=16, **options):
    trainer = Trainer(model(), keras.optimizers.SGD(RATE), {"error": "mse"}, stages=[heavy_ball()], **options)
    trainer.fit(data(batch), steps=steps, progress=False)
    return trainer


@pytest.mark.parametrize("options", [{}, {"batch": 4, "accumulation_steps": 4}, {"run_eagerly": True}], ids=str)
def test_a_stage_with_state_equals_a_loop_by_hand(options):
    for found, expected in zip(trained(**options).model.get_weights(), by_hand(4), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_on_two_devices(two_devices):
    with two_devices.scope():
        made, optimizer = model(), keras.optimizers.SGD(RATE)
    trainer = Trainer(made, optimizer, {"error": "mse"}, stages=[heavy_ball()], strategy=two_devices)
    trainer.fit(data(16), steps=3, progress=False)
    for found, expected in zip(made.get_weights(), by_hand(3), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_state_is_resumed(tmp_path):
    def run(steps, directory):
        trainer = Trainer(model(), keras.optimizers.SGD(RATE), {"error": "mse"}, stages=[heavy_ball()])
        trainer.fit(data(16), steps=steps, progress=False, workdir=directory)
        return trainer.model.get_weights()

    whole = run(6, tmp_path / "whole")
    run(3, tmp_path / "parts")
    for found, expected in zip(run(6, tmp_path / "parts"), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


def moments(first, second):
    """Keeps two moments of the gradients under these names, and changes nothing."""

    def apply(gradients, state, variables, step):
        squares = [tf.square(g) for g in gradients]
        return gradients, {first: gradients, second: squares}

    zeros = lambda variables: [tf.zeros_like(v) for v in variables]  # noqa: E731
    return Stage("moments", lambda variables: {first: zeros(variables), second: zeros(variables)}, apply)


def test_a_state_of_other_names_and_equal_shapes_is_refused(tmp_path):
    def run(steps, *names):
        trainer = Trainer(model(), keras.optimizers.SGD(RATE), {"error": "mse"}, stages=[moments(*names)])
        trainer.fit(data(16), steps=steps, progress=False, workdir=tmp_path)
        return [name for name, _ in trainer._engine.main.pipeline.own_stages.named_variables()]

    assert run(1, "mean", "square") == ["moments/mean/0", "moments/mean/1", "moments/square/0", "moments/square/1"]
    with pytest.raises(ValueError, match=r"Not in the checkpoint: \['stages/moments/first/0'"):
        run(2, "square", "first")


NEELAKANTAN = re.search(r"(def noise\(eta.*?)\n\n\n", (ROOT / "docs/subclassing.md").read_text(), re.S)[1]


@pytest.mark.parametrize(
    "options", [{}, {"batch": 4, "accumulation_steps": 4}, {"health_every": 2}, {"jit_compile": True}], ids=str
)
def test_the_gradient_noise_of_the_guide(options):
    """Weights minus those without noise, with a gradient that does not depend on the weights: −η Σ_t N(0, σ_t²)."""
    names = {"tf": tf, "Stage": Stage}
    exec(NEELAKANTAN, names)
    eta, gamma, steps = 0.01, 0.55, 3
    reached = []
    for stages in ([], [names["noise"](eta, gamma, seed=5)]):
        linear = lambda targets, outputs: outputs[:, 0] - targets[:, 0]  # noqa: E731
        batch = options.get("batch", 16)
        rest = {key: value for key, value in options.items() if key != "batch"}
        trainer = Trainer(model(), keras.optimizers.SGD(RATE), {"error": linear}, stages=stages, **rest)
        trainer.fit(data(batch), steps=steps, progress=False)
        reached.append(trainer.model.get_weights())
    for index, (plain, noisy) in enumerate(zip(*reached, strict=True)):
        drawn = [tf.random.stateless_normal(plain.shape, [5 + index, t]).numpy() for t in range(steps)]
        expected = sum(np.sqrt(eta / (1 + t) ** gamma) * noise for t, noise in enumerate(drawn))
        np.testing.assert_allclose(noisy - plain, -RATE * expected, rtol=1e-4, atol=1e-6)


def test_the_summary_lists_it(capsys):
    Trainer(model(), "sgd", {"error": "mse"}, clip_norm=1.0, stages=[heavy_ball()]).summary()
    shown = capsys.readouterr().out
    assert shown.index("clip to") < shown.index("heavy ball") < shown.index("SGD.apply")


def test_probed_updates_run_it_too():
    x = np.random.default_rng(1).normal(size=(8, 5, 2)).astype("float32")
    reached = []
    for probe_every in (0, 2):
        keras.utils.set_random_seed(3)
        made = keras.Sequential([keras.Input((5, 2)), keras.layers.GRU(3), keras.layers.Dense(1)])
        options = {"stages": [heavy_ball()], "probe_every": probe_every}
        trainer = Trainer(made, keras.optimizers.SGD(RATE), {"error": "mse"}, **options)
        trainer.fit(tf.data.Dataset.from_tensors((x, x[:, 0, :1])).repeat(), steps=4, progress=False)
        reached.append(made.get_weights())
    for plain, probed in zip(*reached, strict=True):
        np.testing.assert_array_equal(plain, probed)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["noise"], "each must be a `looptape.Stage` or a triple"),
        ([("noise", 3, 4)], "a stage is a name and two functions"),
        ([heavy_ball(), heavy_ball()], "they must differ"),
    ],
)
def test_what_is_not_a_stage_is_refused(stages, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Trainer(model(), "sgd", {"error": "mse"}, stages=stages)


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda g, s, v, t: g, r"must return \(gradients, state\)"),
        (lambda g, s, v, t: (g[:1], s), "returned 1 gradients for 2 variables"),
        (lambda g, s, v, t: ([x[tf.newaxis] for x in g], s), "Keep shape and type"),
    ],
)
def test_a_stage_that_returns_something_else_is_refused(apply, message):
    trainer = Trainer(model(), "sgd", {"error": "mse"}, stages=[("own", lambda variables: (), apply)])
    with pytest.raises((TypeError, ValueError), match=message):
        trainer.fit(data(16), steps=1, progress=False)
