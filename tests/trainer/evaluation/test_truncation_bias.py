"""The truncated gradient against the whole one: an eager loop, windows that cut nothing, and what is logged."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, timesteps
from looptape.trainer.evaluation.truncation_bias import TAGS
from tests.trainer.tools import assert_identical_weights, read_events

BATCH, TIME, WINDOW = 3, 8, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(BATCH, TIME, 2)).astype("float32")
Y = RANDOM.normal(size=(BATCH, TIME, 1)).astype("float32")


def data():
    return tf.data.Dataset.from_tensors((X, Y)).repeat()


def network(policy=None, stateful=False):
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.GRU(3, return_sequences=True, name="memory", dtype=policy, stateful=stateful),
        keras.layers.Dense(1),
    ]
    return keras.Sequential([keras.Input((None, 2), batch_size=BATCH if stateful else None), *layers])


def by_hand(net):
    """(relative error, cosine) by an eager loop, with and without a `stop_gradient` between the windows."""
    found = []
    for cut in (True, False):
        with tf.GradientTape() as tape:
            state, outputs = [tf.zeros([BATCH, 3])], []
            for t in range(TIME):
                if cut and t % WINDOW == 0:
                    state = [tf.stop_gradient(state[0])]
                output, state = net.layers[0].cell(X[:, t], state)
                outputs.append(net.layers[1](output))
            total = tf.reduce_mean(tf.square(tf.stack(outputs, 1) - Y))
        found.append(np.concatenate([np.ravel(g) for g in tape.gradient(total, net.trainable_variables)]))
    truncated, whole = found
    norms = np.linalg.norm(truncated), np.linalg.norm(whole)
    return np.linalg.norm(truncated - whole) / norms[1], truncated @ whole / norms[0] / norms[1]


def logged(tmp_path, steps=4, window=WINDOW, policy=None, stateful=False, **options):
    """({tag: [(step, value)]}, trainer)."""
    net = network(policy, stateful)
    options = {"bptt_window": window, "bptt_compare_every": 2, **options}
    trainer = Trainer(net, keras.optimizers.SGD(0.1), {"error": "mse"}, **options)
    trainer.fit(data(), steps=steps, workdir=tmp_path, progress=False)
    rows = read_events(tmp_path / "train")
    return {tag: [(step, float(values[tag])) for step, values in rows if tag in values] for tag in TAGS}, trainer


def after(updates, **options):
    net = network()
    if updates:
        trainer = Trainer(net, keras.optimizers.SGD(0.1), {"error": "mse"}, bptt_window=WINDOW, **options)
        trainer.fit(data(), steps=updates, progress=False)
    return net


@pytest.mark.parametrize("options", [{}, {"bptt_updates": True}, {"probe_every": 2}], ids=str)
def test_against_an_eager_loop(options, tmp_path):
    rows, trainer = logged(tmp_path, **options)
    others = {name: value for name, value in options.items() if name != "probe_every"}
    for place, step in enumerate((2, 4)):
        expected = by_hand(after(step - 1, **others))
        assert 0.001 < expected[0] < 1
        for tag, value in zip(TAGS, expected, strict=True):
            assert rows[tag][place] == (step, pytest.approx(value, rel=1e-4))
    assert_identical_weights(trainer.model, after(4, **others))  # to compare changes nothing


def test_a_window_as_long_as_the_sequence_cuts_nothing(tmp_path):
    rows, _ = logged(tmp_path, steps=2, window=TIME)
    assert rows[TAGS[0]] == [(2, 0.0)] and rows[TAGS[1]] == [(2, pytest.approx(1.0, abs=1e-6))]


def test_stateful_layers_begin_with_the_batch_in_windows(tmp_path):
    options = {"bptt_updates": True, "bptt_begins": "batch"}
    plain, stateful = (logged(tmp_path / str(state), stateful=state, **options)[0] for state in (False, True))
    for tag in TAGS:
        for (_, one), (_, other) in zip(plain[tag], stateful[tag], strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_gradients_too_small_for_float16_are_compared(tmp_path):
    rows = [
        logged(tmp_path / policy, 2, policy=policy, loss_weights={"error": 1e-6})[0]
        for policy in ("float32", "mixed_float16")
    ]
    for tag in TAGS:
        assert rows[1][tag][0] == (2, pytest.approx(rows[0][tag][0][1], rel=1e-2))


def test_bad_input():
    for options in ({}, {"bptt_window": 3, "bptt_updates": True, "bptt_begins": timesteps.Flags("flag")}):
        with pytest.raises(ValueError, match="`bptt_compare_every` is 5 with bptt_window=.*Set `bptt_window`"):
            Trainer(network(), "sgd", {"error": "mse"}, bptt_compare_every=5, **options)
    with pytest.raises(ValueError, match="`bptt_compare_every` is -1; it must be at least 0"):
        Trainer(network(), "sgd", {"error": "mse"}, bptt_window=3, bptt_compare_every=-1)
    losses = {"error": "mse", "penalty": timesteps.Omega()}
    trainer = Trainer(network(), "sgd", losses, bptt_window=3, bptt_updates=True, bptt_compare_every=5)
    with pytest.raises(ValueError, match=r"is 5 and \['penalty'\] is an `Omega`, .* Leave one of the two out"):
        trainer.fit(data(), steps=1, progress=False)
    with pytest.raises(ValueError, match="`bptt_window` is 0; it must be at least 1. Use None for the whole sequence"):
        Trainer(network(), "sgd", {"error": "mse"}, bptt_window=0)
