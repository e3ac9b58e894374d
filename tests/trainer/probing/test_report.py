"""Sums over micro-batches, means over valid examples, scalars: pure functions, against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.dashboard.rules import verdicts
from looptape.trainer.probing import ProbeSession, add, present, scalars, totals, vectors

NAN = float("nan")


def make_report(batch=3, length=4, seed=0):
    generator = np.random.default_rng(seed)
    valid = generator.random([batch, length]) > 0.3
    valid[:, -1] = False
    values = {name: generator.random([batch, length]) for name in ("state", "recurrent", "gain")}
    report = {name: np.where(valid, value, NAN).astype("float32") for name, value in values.items()}
    report |= {
        "valid": valid,
        "zeros": np.where(valid, 2.0, 0.0).astype("float32"),
        "elements": np.where(valid, 8.0, 0.0).astype("float32"),
        "weight/kernel": generator.random(length).astype("float32"),
    }
    return {"layer": {name: tf.constant(value) for name, value in report.items()}}


def as_numpy(report):
    return {name: value.numpy() for name, value in report["layer"].items()}


def test_vectors_are_means_over_valid_examples():
    report = make_report()
    found, own = as_numpy(vectors(totals(report))), as_numpy(report)
    with np.errstate(invalid="ignore"):
        for name in ("state", "recurrent", "gain"):
            counts = own["valid"].sum(axis=0)
            np.testing.assert_allclose(found[name], np.nansum(own[name], axis=0) / counts, rtol=1e-6)
    assert np.isnan(found["state"][-1])
    np.testing.assert_allclose(found["weight/kernel"], own["weight/kernel"], rtol=1e-6)


def test_examples_and_scale_enter_as_the_contract_says():
    sums = totals(make_report())
    plain, scaled = as_numpy(vectors(sums)), as_numpy(vectors(sums, examples=6.0, scale=4.0))
    np.testing.assert_allclose(scaled["state"], 1.5 * plain["state"], rtol=1e-6)
    np.testing.assert_allclose(scaled["gain"], plain["gain"])
    np.testing.assert_allclose(scaled["weight/kernel"], plain["weight/kernel"] / 4, rtol=1e-6)


def concatenate(reports):
    """Per-example reports of several micro-batches as one, scaled by the examples of the whole update."""
    joined = {}
    for layer, first in reports[0].items():
        joined[layer] = {}
        for name in first:
            parts = [report[layer][name] for report in reports]
            if name in ("visits", "beyond"):
                joined[layer][name] = tf.add_n(parts)
            elif name == "weight" or name.startswith("weight/"):
                squares = tf.add_n([tf.square(tf.cast(part, tf.float64)) for part in parts])
                joined[layer][name] = tf.cast(tf.sqrt(squares * len(parts)), tf.float32)
            elif name.startswith("weight_gradient/"):
                joined[layer][name] = tf.add_n(parts)
            else:
                joined[layer][name] = tf.concat(parts, axis=0)
    return joined


def test_totals_of_parts_add_up_to_those_of_the_whole():
    parts = [make_report(batch, seed=batch) for batch in (2, 5)]
    joined = concatenate(parts)
    whole = vectors(totals(joined))["layer"]
    summed = vectors(add(totals(parts[0]), totals(parts[1])))["layer"]
    assert joined["layer"]["state"].shape == (7, 4)
    for name in ("state", "recurrent", "gain"):
        np.testing.assert_allclose(summed[name], whole[name], rtol=1e-6)
    # The root mean square over the parts of what each part's norm would be, were it the whole update.
    squares = sum(np.square(part["layer"]["weight/kernel"]) for part in parts)
    np.testing.assert_allclose(summed["weight/kernel"], np.sqrt(2 * squares), rtol=1e-6)
    np.testing.assert_allclose(joined["layer"]["weight/kernel"], np.sqrt(2 * squares), rtol=1e-6)
    first, second = [scalars(x)["layer"] for x in (totals(joined), add(totals(parts[0]), totals(parts[1])))]
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=1e-6)


def test_lengths_may_differ_between_micro_batches():
    short, long = make_report(2, 3, seed=1), make_report(3, 6, seed=2)
    first, second = totals(short), totals(long)
    found = vectors(add(first, second))["layer"]["state"].numpy()
    assert found.shape == (6,)
    np.testing.assert_allclose(found[3:], vectors(second)["layer"]["state"][3:], rtol=1e-6)
    own = [np.nansum(r["layer"]["state"][:, 0]) for r in (short, long)]
    count = sum(np.sum(r["layer"]["valid"][:, 0]) for r in (short, long))
    assert found[0] == pytest.approx(sum(own) / count, rel=1e-6)


def test_micro_batches_give_what_the_whole_batch_gives():
    """4 + 2 examples against 6: per-example norms are exact, whatever the split, once scaled by all examples."""
    layer = keras.layers.GRU(3, return_sequences=True, name="gru")
    x = np.random.default_rng(0).normal(size=[6, 5, 2]).astype("float32")
    layer(x)

    def run(x):
        session = ProbeSession(layer)
        with tf.GradientTape() as tape:
            with session:
                outputs = layer(x)
            loss = tf.reduce_sum(tf.square(outputs))  # not divided: the sum over the whole update is
        return session.totals(tape.gradient(loss, session.sources))

    whole = vectors(run(x), examples=6.0, scale=6.0)["gru"]
    split = vectors(add(run(x[:4]), run(x[4:])), examples=6.0, scale=6.0)["gru"]
    for name in ("state", "hidden", "recurrent", "external", "input", "gain"):
        np.testing.assert_allclose(split[name], whole[name], rtol=1e-5)


def test_scalars_by_hand():
    gains = np.array([0.5, 2.0, NAN, 1.0], "float32")
    sums = {
        "layer": {
            "parts": tf.constant(1.0),
            "examples": tf.constant([1.0, 1.0, 0.0, 2.0]),
            "state": tf.constant([0.005, 0.5, 0.0, 2.0]),
            "gain": tf.constant(np.where(np.isnan(gains), 0, gains) * [1, 1, 1, 2], tf.float32),
            "gain_examples": tf.constant([1.0, 1.0, 0.0, 2.0]),
            "zeros": tf.constant(3.0),
            "elements": tf.constant(12.0),
            "nonfinite": tf.constant(2.0),
            "cut_off": tf.constant(6.0),
            "cut_off_examples": tf.constant(3.0),
        }
    }
    found = {name: float(value) for name, value in scalars(sums, examples=10.0, scale=5.0)["layer"].items()}
    assert found == {
        "horizon": 2.0,  # 0.5 and 1.0 (a mean); 0.005 is below 1 % of the largest
        "median_gain": 1.0,
        "omega": 1.25,
        "zero_fraction": 0.25,
        "nonfinite": 2.0,
        "cut_off": 4.0,
    }


DENSE = {
    "every time step": (np.ones(64), np.full(64, 0.32), 4.0, True),
    "the last one only": (np.eye(64)[-1], np.full(64, 0.32), 3.0, False),
    "below 1 % outside": (np.r_[np.full(63, 0.005), 1.0], np.full(64, 0.32), 3.0, False),
    "a gain of 1": (np.ones(64), np.ones(64), 64.0, True),
    "a gain of 0": (np.ones(64), np.zeros(64), 0.0, True),
    "an exact power": (np.ones(64), np.full(64, 0.1), 2.0, True),
    "padded": (np.r_[np.ones(8), np.full(56, NAN)], np.r_[np.full(8, 0.9), np.full(56, NAN)], 8.0, True),
}


@pytest.mark.parametrize(("external", "gain", "expected", "dense"), DENSE.values(), ids=DENSE)
def test_the_horizon_comes_from_the_gain_where_gradients_enter_at_most_time_steps(external, gain, expected, dense):
    valid = ~np.isnan(external)
    state = np.where(valid, 0.2 ** np.arange(63, -1, -1), NAN)
    rows = {"state": state, "external": external, "gain": gain}
    report = {name: tf.constant(value[None], tf.float32) for name, value in rows.items()}
    report |= {"valid": tf.constant(valid[None]), "zeros": tf.zeros([1]), "elements": tf.ones([1])}
    found = scalars(totals({"layer": report}))["layer"]
    assert (float(found["horizon"]), bool(found["dense"])) == (expected, dense)
    steps = [100, 200, 300]
    told = verdicts.judge("layer", steps, [state] * 3, gain=[gain] * 3, external=[external] * 3)
    assert told.horizons == (expected,) * 3, "the same rule on logged rows"
    assert told.source == ("gain" if dense else "state")


def test_the_horizon_is_at_most_the_way_between_two_cuts():
    """A window of five of a hundred time steps: λ is 1.5 everywhere, and what happens at a boundary is what entered."""
    state, gain, external = np.full(100, 1.5), np.ones(100), np.ones(100)
    steered = np.where(np.arange(100) % 5 == 4, external, state)
    steered[-1] = state[-1]  # nothing comes from behind the last one
    rows = {"state": state, "external": external, "gain": gain, "steered": steered}
    report = {name: tf.constant(value[None], tf.float32) for name, value in rows.items()}
    report |= {"valid": tf.ones([1, 100], tf.bool), "zeros": tf.zeros([1]), "elements": tf.ones([1])}
    assert float(scalars(totals({"layer": report}))["layer"]["horizon"]) == 5
    many = {name: np.array([value] * 3) for name, value in rows.items()}
    told = verdicts.judge("layer", [100, 200, 300], **many)
    assert (told.horizons, told.word) == ((5.0,) * 3, "vanishing")
    assert told.text.endswith("An action cuts the gradient off at 19 time steps.") and "bptt_window" in told.advice
    steady = verdicts.judge("layer", [100, 200, 300], **many | {"steered": many["state"]})
    assert (steady.horizons, steady.word) == ((100.0,) * 3, "healthy"), "an action that changes nothing cuts nothing"


@pytest.mark.parametrize(
    ("gains", "median"), [([3.0, 1.0], 2.0), ([3.0, 1.0, 2.0], 2.0), ([NAN, 5.0], 5.0), ([NAN], NAN)]
)
def test_the_median_leaves_nan_out(gains, median):
    report = {"state": gains, "gain": gains, "valid": np.ones(len(gains), bool), "zeros": [0.0], "elements": [1.0]}
    sums = totals(
        {
            "layer": {
                name: tf.constant(np.array([value], bool if name == "valid" else "float32"))
                for name, value in report.items()
            }
        }
    )
    np.testing.assert_array_equal(scalars(sums)["layer"]["median_gain"], np.float32(median))


def test_non_finite_gradients_are_counted_and_shown():
    layer = keras.layers.SimpleRNN(2, return_sequences=True, name="rnn")
    x = np.zeros([3, 4, 2], "float32")
    layer(x)
    weights = np.ones([3, 4, 1], "float32")
    weights[1, 2] = np.inf

    def run(x):
        session = ProbeSession(layer)
        with tf.GradientTape() as tape:
            with session:
                outputs = layer(x)
            loss = tf.reduce_sum(outputs * weights)
        return session.totals(tape.gradient(loss, session.sources))

    found = present(run(x))
    assert found.scalars["rnn"]["nonfinite"] == 3  # at the third time step and before, of one example
    assert not np.any(np.isfinite(found.vectors["rnn"]["state"][:3])) and np.isfinite(found.vectors["rnn"]["state"][3])


def test_reports_leave_functions_and_go_round_loops():
    layer = keras.layers.LSTM(3, name="lstm")
    x = tf.constant(np.random.default_rng(0).normal(size=[3, 2, 5, 2]).astype("float32"))
    layer(x[0])

    def one(x):
        session = ProbeSession(layer)
        with tf.GradientTape() as tape:
            with session:
                outputs = layer(x)
            loss = tf.reduce_sum(outputs)
        return session.totals(tape.gradient(loss, session.sources))

    for jit_compile in (False, True):
        micro = tf.function(one, jit_compile=jit_compile, autograph=False)

        @tf.function(autograph=False)
        def accumulate(x, micro=micro):
            first = micro(x[0])

            def body(index, sums):
                return index + 1, tf.nest.map_structure(tf.add, sums, micro(x[index]))

            return tf.while_loop(lambda index, _: index < 3, body, (tf.constant(1), first))[1]

        found = accumulate(x)
        assert float(found["lstm"]["parts"]) == 3.0
        np.testing.assert_array_equal(found["lstm"]["examples"], np.full(5, 6.0))
        expected = sum(one(part)["lstm"]["state"].numpy() for part in x)
        np.testing.assert_allclose(found["lstm"]["state"], expected, rtol=1e-5)
