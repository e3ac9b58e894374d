"""The hoisted cells against `keras.layers`, finite differences and their own promises."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from looptape.trainer.recurrent.hoisted import adjoint_pass, both_ways, standard
from looptape.trainer.recurrent.hoisted.cells import lstm

KINDS = {
    "lstm": lambda units, **options: keras.layers.LSTM(units, **options),
    "gru": lambda units, **options: keras.layers.GRU(units, **options),
    "gru_reset_before": lambda units, **options: keras.layers.GRU(units, reset_after=False, **options),
    "simple_rnn": lambda units, **options: keras.layers.SimpleRNN(units, **options),
}
BATCH, TIME, FEATURES, UNITS = 4, 6, 3, 5
TOLERANCE = 1e-6


def make_layer(kind, units=UNITS, features=FEATURES, **options):
    """A layer whose weights, biases too, are random; its outputs and final states."""
    layer = KINDS[kind](units, return_sequences=True, return_state=True, **options)
    layer.build((None, None, features))
    rng = np.random.default_rng(0)
    layer.set_weights([rng.normal(size=weight.shape) * 0.5 for weight in layer.weights])
    return layer


def make_data(batch=BATCH, time=TIME, features=FEATURES, units=UNITS, states=2, dtype=tf.float32):
    rng = np.random.default_rng(1)
    x = tf.constant(rng.normal(size=(batch, time, features)), dtype)
    return x, [tf.constant(rng.normal(size=(batch, units)), dtype) for _ in range(states)]


def make_mask(batch=BATCH, time=TIME):
    mask = np.random.default_rng(2).random((batch, time)) > 0.4
    mask[0, :2] = False  # nothing to repeat
    mask[1] = False  # never valid
    return tf.constant(mask)


def make_taps(keys):
    return {key: tf.zeros([TIME, BATCH, UNITS]) for key in keys}


def loss_of(outputs, states):
    rng = np.random.default_rng(3)
    weights = [tf.constant(rng.normal(size=value.shape), value.dtype) for value in (outputs, *states)]
    return tf.add_n([tf.reduce_sum(tf.sin(v) * w) for v, w in zip((outputs, *states), weights, strict=True)])


def differentiated(call, layer, x, states):
    """Outputs, final states and gradients of inputs, initial states and weights, in one list."""
    sources = [x, *states, *(weight.value for weight in layer.weights)]
    with tf.GradientTape() as tape:
        tape.watch([x, *states])
        outputs, *final = call(x, states)
        loss = loss_of(outputs, final)
    return [outputs, *final, *tape.gradient(loss, sources)]


def ours(layer, mask=None, compiled=False, **options):
    def call(x, states):
        _, outputs, final = standard.inner_loop(layer, x, states, mask, compiled=compiled, **options)
        return outputs, *final

    return call


def keras_own(layer, mask=None, **options):
    return lambda x, states: layer(x, initial_state=states, mask=mask, **options)


def distance(found, wanted):
    """The largest difference, by the largest entry of the tensor."""
    pairs = [(np.array(a), np.array(b)) for a, b in zip(found, wanted, strict=True)]
    return max(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30) for a, b in pairs)


def number_of_states(kind):
    return 2 if kind == "lstm" else 1


@pytest.mark.parametrize("go_backwards", [False, True])
@pytest.mark.parametrize("masking", ["no mask", "repeat", "zero"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_keras(kind, masking, go_backwards):
    layer = make_layer(kind, go_backwards=go_backwards, zero_output_for_mask=masking == "zero")
    x, states = make_data(states=number_of_states(kind))
    mask = None if masking == "no mask" else make_mask()
    wanted = tf.function(differentiated)(keras_own(layer, mask), layer, x, states)
    for compiled in (False, True) if masking != "zero" and not go_backwards else (False,):
        found = tf.function(differentiated)(ours(layer, mask, compiled), layer, x, states)
        assert distance(found, wanted) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_eager_and_without_bias(kind):
    layer = make_layer(kind, use_bias=False)
    x, states = make_data(states=number_of_states(kind))
    wanted = differentiated(keras_own(layer), layer, x, states)
    assert distance(differentiated(ours(layer), layer, x, states), wanted) < TOLERANCE


@pytest.mark.parametrize(("compiled", "parts"), [(False, 1), (True, 1), (True, 2)])
def test_unknown_sizes(monkeypatch, compiled, parts):
    monkeypatch.setattr(both_ways.compilation, "parts", lambda batch, units: parts)
    layer = make_layer("lstm")

    @tf.function(input_signature=[tf.TensorSpec([None, None, FEATURES])] + [tf.TensorSpec([None, UNITS])] * 2)
    def gradients(x, *states):
        weights = [weight.value for weight in layer.weights]
        with tf.GradientTape() as tape:
            tape.watch([x, *states])
            outputs, *final = ours(layer, compiled=compiled)(x, list(states))
            loss = tf.add_n([tf.reduce_sum(tf.square(value)) for value in (outputs, *final)])
        return [outputs, *final, *tape.gradient(loss, [x, *states, *weights])]

    for batch, time in ((2, 3), (1, 1), (3, 4)):
        x, states = make_data(batch, time)
        with tf.GradientTape() as tape:
            tape.watch([x, *states])
            outputs, *final = keras_own(layer)(x, states)
            loss = tf.add_n([tf.reduce_sum(tf.square(value)) for value in (outputs, *final)])
        wanted = [outputs, *final, *tape.gradient(loss, [x, *states, *(weight.value for weight in layer.weights)])]
        assert distance(gradients(x, *states), wanted) < TOLERANCE


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    *(st.integers(1, most) for most in (4, 5, 4, 4)),
    st.booleans(),
)
def test_any_shape(kind, batch, time, features, units, masked):
    """In float64, where no cancellation of a few entries hides a mistake or looks like one."""
    layer = make_layer(kind, units, features, dtype="float64")
    x, states = make_data(batch, time, features, units, number_of_states(kind), tf.float64)
    mask = make_mask(max(batch, 2), max(time, 2))[:batch, :time] if masked else None
    wanted = differentiated(keras_own(layer, mask), layer, x, states)
    assert distance(differentiated(ours(layer, mask), layer, x, states), wanted) < 1e-12


@pytest.mark.parametrize("batch", [5, 6])
def test_parts_of_a_batch_give_the_same(monkeypatch, batch):
    layer = make_layer("lstm")
    x, states = make_data(batch)
    mask = make_mask(batch)
    whole = differentiated(ours(layer, mask, compiled=True), layer, x, states)
    monkeypatch.setattr(both_ways.compilation, "parts", lambda batch, units: 2)
    parts = differentiated(ours(layer, mask, compiled=True), layer, x, states)
    assert distance(parts, whole) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences(kind):
    layer = make_layer(kind, dtype="float64")
    x, states = make_data(batch=2, time=3, states=number_of_states(kind), dtype=tf.float64)
    mask = tf.constant([[True, False, True], [True, True, False]])
    gradients = differentiated(ours(layer, mask), layer, x, states)[1 + len(states) :]
    rng = np.random.default_rng(4)
    for source, gradient in zip([x, *states, *layer.weights], gradients, strict=True):
        direction = tf.constant(rng.normal(size=source.shape))
        values = []
        for step in (1e-5, -1e-5):
            moved = tf.convert_to_tensor(source) + step * direction
            values.append(_loss_with(layer, mask, x, states, source, moved))
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(float(tf.reduce_sum(gradient * direction)), rel=1e-7)


def _loss_with(layer, mask, x, states, source, value):
    if source is x or any(source is state for state in states):
        x, states = (value if source is x else x), [value if source is state else state for state in states]
        outputs, *final = ours(layer, mask)(x, states)
    else:
        before = source.numpy()
        source.assign(value)
        outputs, *final = ours(layer, mask)(x, states)
        source.assign(before)
    return float(loss_of(outputs, final))


@pytest.mark.parametrize(
    ("kind", "traced"), [*((kind, False) for kind in KINDS), pytest.param("gru", True, marks=pytest.mark.long)]
)
def test_second_derivatives(kind, traced):
    layer = make_layer(kind)
    x, states = make_data(batch=2, time=3, states=number_of_states(kind))
    mask = tf.constant([[True, False, True], [True, True, False]])

    def penalty(call):
        sources = [x, *states, *(weight.value for weight in layer.weights)]
        with tf.GradientTape() as outer:
            outer.watch([x, *states])
            first = differentiated(call, layer, x, states)[1 + len(states) :]
            loss = tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in first])
        return outer.gradient(loss, sources)

    penalty = tf.function(penalty) if traced else penalty
    wanted = penalty(keras_own(layer, mask))
    for compiled in (False, True) if traced else (False,):
        assert distance(penalty(ours(layer, mask, compiled)), wanted) < 3e-6


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_taps_are_the_adjoints(kind, compiled):
    """dL/d(state after t) is what an initial state would get if the sequence began after t."""
    layer = make_layer(kind)
    number = number_of_states(kind)
    x, states = make_data(states=number)
    mask = make_mask()
    taps = make_taps(f"state/{j}" for j in range(number))
    weights = [tf.constant(np.random.default_rng(5).normal(size=[BATCH, TIME, UNITS]), tf.float32)]

    with tf.GradientTape() as tape:
        tape.watch(list(taps.values()))
        outputs, *_ = ours(layer, mask, compiled, taps=taps)(x, states)
        loss = tf.reduce_sum(outputs * weights[0])
    adjoints = tape.gradient(loss, list(taps.values()))
    for t in range(1, TIME):
        _, *reached = keras_own(layer, mask[:, :t])(x[:, :t], states)
        with tf.GradientTape() as tape:
            tape.watch(reached)
            outputs, *_ = keras_own(layer, mask[:, t:])(x[:, t:], reached)
            loss = tf.reduce_sum(outputs * weights[0][:, t:])
        wanted = tape.gradient(loss, reached)
        assert wanted is not None
        later = [adjoint[t - 1] for adjoint in adjoints]
        # What arrives at the output of t - 1 itself is part of its adjoint, where that output is the state.
        begun = tf.reduce_any(mask[:, :t], 1)[:, tf.newaxis]
        direct = tf.where(begun, weights[0][:, t - 1], 0.0)
        # Outputs before the first valid time step of the rest repeat the state here, but are zero there.
        rest = tf.cumsum(tf.cast(mask[:, t:], tf.int32), 1) > 0
        repeated = tf.reduce_sum(tf.where(rest[..., tf.newaxis], 0.0, weights[0][:, t:]), 1)
        wanted[0] = wanted[0] + direct + tf.where(begun, repeated, 0.0)
        assert distance(later, wanted) < 3e-6


def test_act_changes_the_adjoint_on_its_way():
    layer = make_layer("lstm", go_backwards=True)
    x, states = make_data()
    mask = make_mask()
    cut = 2

    def act(t, adjoints, valid):
        return [tf.where(t == cut, tf.zeros_like(adjoint), adjoint) for adjoint in adjoints]

    def both(taps, **options):
        with tf.GradientTape() as tape:
            tape.watch([x, *taps.values()])
            outputs, *_ = ours(layer, mask, taps=taps, **options)(x, states)
            loss = tf.reduce_sum(outputs[:, -1])
        return tape.gradient(loss, [x, *taps.values()])

    taps = make_taps(["state/0", "state/1", "after/0", "after/1"])
    plain, *_ = both({})
    for compiled in (False, True):
        gradient, *adjoints = tf.function(both)(taps, act=act, compiled=compiled)
        place = TIME - 1 - cut  # in the order of the iterations
        valid = mask[:, cut]
        for before, after in zip(adjoints[:2], adjoints[2:], strict=True):
            assert np.any(before[place])
            np.testing.assert_array_equal(after[place][valid], 0)
            np.testing.assert_array_equal(after[place][~valid], before[place][~valid])
            np.testing.assert_array_equal(np.delete(after, place, 0), np.delete(before, place, 0))
        np.testing.assert_allclose(gradient[:, :cut], plain[:, :cut], rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(gradient[valid][:, cut:], 0)


def test_a_second_derivative_of_an_action_is_refused():
    layer = make_layer("gru")
    x, states = make_data(states=1)
    with tf.GradientTape() as outer:
        outer.watch(x)
        gradient = differentiated(ours(layer, act=lambda t, adjoints, valid: adjoints), layer, x, states)[2]
    with pytest.raises(adjoint_pass.SecondDerivativeError, match="Leave out the action or the nested tape"):
        outer.gradient(gradient, x)


@pytest.mark.parametrize("compiled", [False, True])
def test_probes_do_not_change_a_bit(compiled):
    layer = make_layer("lstm")
    x, states = make_data()
    taps = make_taps(["recurrent/0", "recurrent/1", "state/0", "state/1"])

    def probed(x, states):
        with tf.GradientTape() as tape:
            tape.watch(list(taps.values()))
        return ours(layer, compiled=compiled, taps=taps)(x, states)

    plain = tf.function(differentiated)(ours(layer, compiled=compiled), layer, x, states)
    for a, b in zip(plain, tf.function(differentiated)(probed, layer, x, states), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["lstm", "gru", "simple_rnn"])
def test_dropout_of_inputs(kind):
    """The same masks as Keras: from the same seed, one for all time steps."""
    results = []
    for own in (True, False):
        layer = make_layer(kind, dropout=0.5, seed=3)
        x, states = make_data(states=number_of_states(kind))
        call = ours(layer, training=True) if own else keras_own(layer, training=True)
        results.append(differentiated(call, layer, x, states))
    assert distance(*results) < TOLERANCE


@pytest.mark.parametrize(("dtype", "precision"), [("mixed_float16", 2**-11), ("mixed_bfloat16", 2**-8)])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_is_as_near_to_float32_as_keras(kind, dtype, precision):
    x, states = make_data(states=number_of_states(kind))
    full, layer = make_layer(kind), make_layer(kind, dtype=dtype)
    exact = differentiated(keras_own(full), full, x, states)
    wanted = differentiated(keras_own(layer), layer, x, states)
    found = differentiated(ours(layer), layer, x, states)
    assert [value.dtype for value in found] == [value.dtype for value in wanted]
    for value, theirs, reference in zip(found, wanted, exact, strict=True):
        error = distance([tf.cast(theirs, tf.float32)], [reference])
        assert distance([tf.cast(value, tf.float32)], [reference]) < 1.5 * error + 4 * precision


def test_many_steps_and_saturated_gates():
    """Far from zero σ is computed by another formula than Keras's."""
    layer = make_layer("lstm")
    layer.set_weights([4 * weight for weight in layer.get_weights()])
    x, states = make_data(time=60)
    wanted = tf.function(differentiated)(keras_own(layer), layer, x, states)
    assert distance(tf.function(differentiated)(ours(layer), layer, x, states), wanted) < 2e-6


def test_lstm_run_takes_tensors():
    layer = make_layer("lstm")
    x, states = make_data()
    weights = [weight.value for weight in layer.weights]
    outputs, final, _ = lstm.run(tf.transpose(x, [1, 0, 2]), states, weights, compiled=False)
    assert distance([tf.transpose(outputs, [1, 0, 2]), *final], keras_own(layer)(x, states)) < TOLERANCE


def test_long_sequences_run_in_stretches(monkeypatch):
    """The same results, reports included; equal stretches where the length allows."""
    assert both_ways.stretches([200, 32, 8], 128) is None
    assert both_ways.stretches([None, 32, 8], 128) is None
    assert both_ways.stretches([3000, 32, 8], 128) == [250] * 12
    assert sum(both_ways.stretches([100_003, 8, 8], 64)) == 100_003
    layer = make_layer("lstm")
    x, states = make_data()
    taps = {**make_taps(["recurrent/0", "state/1"]), "weights": tf.zeros([TIME, 3])}

    def gradients(x, states):
        with tf.GradientTape() as tape:
            tape.watch([*taps.values()])
            found = differentiated(ours(layer, taps=taps), layer, x, states)
            outputs, *final = ours(layer, taps=taps)(x, states)
            loss = loss_of(outputs, final)
        return found + tape.gradient(loss, list(taps.values()))

    whole = tf.function(gradients)(x, states)
    for numbers in (2 * BATCH * UNITS, 5 * BATCH * UNITS):
        monkeypatch.setattr(both_ways, "STRETCH", numbers)
        monkeypatch.setattr(both_ways, "MOST_STRETCHES", 4)
        assert len(both_ways.stretches([TIME, BATCH, FEATURES], UNITS)) > 1
        assert distance(tf.function(gradients)(x, states), whole) < TOLERANCE
