"""What a probed hoisted layer reports, against the generic loop, which differentiates every time step by itself."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from looptape.trainer.probing import ProbeSession
from looptape.trainer.recurrent.core import RecurrentCore
from looptape.trainer.recurrent.hoisted import report
from tests.trainer.recurrent.tools import make_inputs, make_mask

KINDS = {
    "lstm": lambda **options: keras.layers.LSTM(4, name="layer", **options),
    "gru": lambda **options: keras.layers.GRU(4, name="layer", **options),
    "gru_reset_before": lambda **options: keras.layers.GRU(4, reset_after=False, name="layer", **options),
    "simple_rnn": lambda **options: keras.layers.SimpleRNN(4, name="layer", **options),
}


def reported(layer, loops, loss, mask=None, **options):
    """The report of one pass on the loops named."""

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            session = ProbeSession(layer, tape=None, **options)
            with RecurrentCore(layer, loops=loops).running(), session:
                value = loss(layer, x, mask)
        [found] = session.report(tape.gradient(value, session.sources)).values()
        return found

    return {name: value.numpy() for name, value in run(make_inputs()).items()}


def weighted(layer, x, mask):
    outputs, *states = layer(x, mask=mask)
    rng = np.random.default_rng(1)
    parts = [tf.reduce_sum(tf.sin(v) * tf.constant(rng.normal(size=v.shape), tf.float32)) for v in (outputs, *states)]
    return tf.add_n(parts)


def penalised(layer, x, mask):
    """A gradient penalty: its report has a second-order part."""
    with tf.GradientTape() as inner:
        inner.watch(x)
        value = weighted(layer, x, mask)
    return value + tf.reduce_sum(tf.square(inner.gradient(value, x)))


def assert_alike(found, wanted, rtol=2e-5):
    """Equal where an example is valid: what is kept of masked time steps is not shown."""
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        if name.startswith("state_gradient/"):
            values, found[name] = values[wanted["valid"]], found[name][wanted["valid"]]
        scale = np.nanmax(np.abs(np.where(np.isfinite(values), values, 0))) if values.dtype != bool else 1
        np.testing.assert_allclose(found[name], values, rtol=rtol, atol=1e-6 * max(scale, 1e-30), err_msg=name)


OPTIONS = [
    ({"return_sequences": True}, False),
    ({"return_sequences": True, "go_backwards": True}, True),
    ({"go_backwards": True}, False),
    ({"zero_output_for_mask": True, "return_sequences": True}, True),
    ({}, True),
]


@pytest.mark.parametrize(
    ("kind", "options", "masked"),
    [
        pytest.param(kind, *each, marks=[] if place < (3 if kind == "lstm" else 1) else [pytest.mark.long])
        for kind in KINDS
        for place, each in enumerate(OPTIONS if kind == "lstm" else OPTIONS[:2])
    ],
)
def test_equals_the_generic_loop(kind, options, masked):
    layer = KINDS[kind](return_state=True, **options)
    mask = tf.constant(make_mask()) if masked else None
    found, wanted = [reported(layer, loops, weighted, mask, full=True) for loops in ("auto", "adjoint")]
    assert {"state", "gain", "external", "recurrent", "input", "weight/kernel", "weight/bias"} <= set(found)
    assert_alike(found, wanted)


@pytest.mark.parametrize("kind", ["lstm", "gru_reset_before", "gru"])
def test_whole_gradients_of_the_weights(kind):
    layer = KINDS[kind](return_state=True, return_sequences=True)
    assert_alike(*[reported(layer, loops, weighted, weights="full") for loops in ("auto", "adjoint")])


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.long)])
def test_second_derivatives_are_part_of_it_except_for_weights(masked):
    layer = KINDS["lstm"](return_state=True, return_sequences=True)
    mask = tf.constant(make_mask()) if masked else None
    with pytest.warns(UserWarning, match=r"through the layer 'layer' \(nested tapes\).*reported as NaN"):
        found = reported(layer, "auto", penalised, mask)
    if not masked:
        assert_alike(found, reported(layer, "adjoint", penalised), 1e-4)
    assert np.isnan(found["weight/kernel"]).all()
    assert np.isfinite(found["state"][make_mask() if masked else ...]).all()


@settings(max_examples=15, deadline=None)
# TensorFlow takes numbers below 1.2e-38 for zero: at 1e-36, which -33 would give, that is 1 % of a number already.
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(-32, 12))
def test_norms_of_any_shape_and_size(time, batch, left, right, power):
    rng = np.random.default_rng(0)
    a, d = rng.normal(size=(time, batch, left)), rng.normal(size=(time, batch, right)) * 10.0**power
    d[0] *= 1e-3
    a, d = a.astype("float32"), d.astype("float32")
    found = report.norms([[(tf.constant(a), tf.constant(d))], [(None, tf.constant(d))]])
    products = np.einsum("tbi,tbj->tij", a.astype("float64"), d.astype("float64"))
    wanted = np.sqrt(np.square(products).sum((1, 2))), np.sqrt(np.square(d.astype("float64").sum(1)).sum(1))
    size = np.sqrt(np.square(d.astype("float64")).sum((1, 2)))[:, None]
    np.testing.assert_allclose(found / size, np.stack(wanted, 1) / size, rtol=1e-4, atol=2e-3)


def test_what_masked_time_steps_repeat_counts_where_it_was_computed():
    mask = tf.constant([[False], [True], [False], [True], [False]])[..., tf.newaxis]
    external = tf.constant([0.0, 1.0, 2.0, 4.0, 8.0])[:, tf.newaxis, tf.newaxis]
    found = report.Found((), (), external, (), mask, None)
    assert tf.reshape(report.read(["external"], found)[0], [-1]).numpy().tolist() == [0, 3, 0, 12, 0]
