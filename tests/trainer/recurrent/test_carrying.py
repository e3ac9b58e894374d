"""One update per window, with states that are carried on, against a loop written by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, timesteps
from looptape.trainer.data import windows
from tests.trainer.tools import assert_identical_weights, assert_same_weights

BATCH, TIME, WINDOW = 4, 7, 3
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2 * BATCH, TIME, 2)).astype("float32")
Y = RANDOM.normal(size=(2 * BATCH, TIME, 1)).astype("float32")


def data(batch=BATCH):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch, drop_remainder=True).repeat()


def model(seed=1):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((None, 2))
    middle = keras.layers.LSTM(3, return_sequences=True, name="lower")(inputs)
    upper = keras.layers.GRU(2, return_sequences=True, name="upper")(middle)
    return keras.Model(inputs, keras.layers.Dense(1)(upper))


def by_hand(net, updates):
    """The same in eager mode: states are passed on, and no gradient with them."""
    lower, upper, dense = net.layers[1:]
    optimizer = keras.optimizers.SGD(0.2)
    done = 0
    while True:
        for first in range(0, 2 * BATCH, BATCH):
            states = [[tf.zeros([BATCH, 3]), tf.zeros([BATCH, 3])], [tf.zeros([BATCH, 2])]]
            for begin in range(0, TIME, WINDOW):
                x, y = (part[first : first + BATCH, begin : begin + WINDOW] for part in (X, Y))
                with tf.GradientTape() as tape:
                    middle, *new_lower = keras.layers.RNN(lower.cell, return_sequences=True, return_state=True)(
                        x, initial_state=states[0]
                    )
                    output, *new_upper = keras.layers.RNN(upper.cell, return_sequences=True, return_state=True)(
                        middle, initial_state=states[1]
                    )
                    loss = tf.reduce_mean(tf.square(dense(output) - y))
                optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
                states = [new_lower, new_upper]
                done += 1
                if done == updates:
                    return net


def make(net, **options):
    return Trainer(
        net,
        keras.optimizers.SGD(0.2),
        {"error": keras.losses.MeanSquaredError()},
        bptt_window=WINDOW,
        bptt_updates=True,
        **options,
    )


def test_against_a_loop_by_hand():
    ours = model()
    trainer = make(ours)
    trainer.fit(data(), steps=8, progress=False)  # two batches of three windows, and two more
    assert_same_weights(ours, by_hand(model(), 8), tolerance=2e-6)
    assert int(trainer.step) == 8


@pytest.mark.parametrize("options", [{"recurrent": "keras"}, {"probe_every": 3}, {"jit_compile": True}], ids=str)
def test_any_loop_carries(options):
    ours, other = model(), model()
    make(ours).fit(data(), steps=5, progress=False)
    make(other, **options).fit(data(), steps=5, progress=False)
    assert_same_weights(ours, other, tolerance=2e-6)


def test_exact_resume_in_the_middle_of_a_sequence(tmp_path):
    whole, resumed = model(), model()
    make(whole).fit(data(), steps=8, progress=False)
    make(resumed).fit(data(), steps=5, workdir=tmp_path, progress=False)  # after the second window of the second batch
    again = model(seed=2)
    make(again).fit(data(), steps=8, workdir=tmp_path, progress=False)
    assert_identical_weights(whole, again)


def test_a_dry_run_leaves_the_states():
    one, two = model(), model()
    trainer = make(one)
    trainer.fit(data(), steps=2, progress=False)
    stream = data()
    trainer.fast_dev_run(stream)
    kept = make(two)
    kept.fit(data(), steps=2, progress=False)
    assert_identical_weights(one, two)
    carried = [v.numpy() for v in trainer._engine.forward_state.variables()]
    for left, right in zip(carried, (v.numpy() for v in kept._engine.forward_state.variables()), strict=True):
        np.testing.assert_array_equal(left, right)


def test_windows_of_unknown_length_and_what_has_no_time():
    def sequences():
        for length in (4, 3):
            yield np.arange(2 * length).reshape(2, length), np.array([1, 2])

    spec = (tf.TensorSpec([2, None], tf.int64), tf.TensorSpec([2], tf.int64))
    found = list(windows.cut(tf.data.Dataset.from_generator(sequences, output_signature=spec), 3))
    assert [window.batch[0].shape[1] for window in found] == [3, 1, 3]
    assert [bool(window.begins) for window in found] == [True, False, True]
    assert all(window.batch[1].numpy().tolist() == [1, 2] for window in found)


FLAGS = RANDOM.random([2 * BATCH, TIME]) < 0.25


def flagged(per_row=False):
    flags = FLAGS[:, 0] if per_row else FLAGS
    parts = {"x": X, "y": Y, "flag": flags}
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH, drop_remainder=True).repeat()


def one_layer(seed=1, layer=keras.layers.LSTM, **options):
    keras.utils.set_random_seed(seed)
    recurrent = layer(3, return_sequences=True, name="lower", **options)
    return keras.Sequential([keras.Input((None, 2), batch_size=BATCH), recurrent, keras.layers.Dense(1)])


def rows_by_hand(net, updates, per_row=False):
    """Time step by time step, in eager mode; a row that is flagged begins with zeros."""
    cell, dense = net.layers[0].cell, net.layers[1]
    optimizer = keras.optimizers.SGD(0.2)
    states, done = [tf.zeros([BATCH, 3]), tf.zeros([BATCH, 3])], 0
    while True:
        for first in range(0, 2 * BATCH, BATCH):
            for begin in range(0, TIME, WINDOW):
                end = min(begin + WINDOW, TIME)
                with tf.GradientTape() as tape:
                    outputs = []
                    for t in range(begin, end):
                        flags = FLAGS[first : first + BATCH, t] & (not per_row or t == 0)
                        states = [tf.where(flags[:, None], 0.0, state) for state in states]
                        output, states = cell(X[first : first + BATCH, t], states)
                        outputs.append(dense(output))
                    loss = tf.reduce_mean(tf.square(tf.stack(outputs, 1) - Y[first : first + BATCH, begin:end]))
                optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
                states = [tf.stop_gradient(state) for state in states]
                done += 1
                if done == updates:
                    return net


@pytest.mark.parametrize("options", [{}, {"probe_every": 2}, {"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_rows_begin_inside_a_window(options):
    ours = one_layer()
    make(ours, bptt_begins=timesteps.Flags("flag"), **options).fit(flagged(), steps=8, progress=False)
    assert_same_weights(ours, rows_by_hand(one_layer(), 8), tolerance=2e-6)


@pytest.mark.parametrize("stateful", [False, True])
def test_rows_begin_with_a_batch(stateful):
    ours = one_layer(stateful=stateful)
    make(ours, bptt_begins=timesteps.Flags("flag")).fit(flagged(per_row=True), steps=8, progress=False)
    assert_same_weights(ours, rows_by_hand(one_layer(), 8, per_row=True), tolerance=2e-6)


def test_rows_resume_exactly_inside_a_sequence(tmp_path):
    whole, again = one_layer(), one_layer(seed=2)
    begins = timesteps.Flags("flag")
    make(whole, bptt_begins=begins).fit(flagged(), steps=8, progress=False)
    make(one_layer(), bptt_begins=begins).fit(flagged(), steps=5, workdir=tmp_path, progress=False)
    make(again, bptt_begins=begins).fit(flagged(), steps=8, workdir=tmp_path, progress=False)
    assert_identical_weights(whole, again)


def test_a_layer_that_goes_backwards_begins_anew_with_each_window():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Bidirectional(keras.layers.GRU(2, return_sequences=True, name="gru")), keras.layers.Dense(1)]
    trainer = make(keras.Sequential([keras.Input((None, 2)), *layers]))
    trainer.fit(data(), steps=2, progress=False)
    carried = [v.name for v in trainer._engine.forward_state.variables() if "carried" in v.name]
    assert carried == ["carried_0_0"]
    keras.utils.set_random_seed(3)
    refused = make(keras.Sequential([keras.Input((None, 2)), *layers]), bptt_begins=timesteps.Flags("flag"))
    with pytest.raises(ValueError, match="'backward_gru' reads a window from its end"):
        refused.fit(flagged(), steps=1, progress=False)


def test_keras_loops_do_not_begin_inside_a_window():
    class Own(keras.layers.LSTM):
        def inner_loop(self, *arguments, **options):
            return super().inner_loop(*arguments, **options)

    trainer = make(one_layer(layer=Own), bptt_begins=timesteps.Flags("flag"))
    with pytest.raises(ValueError, match="'lower' runs on Keras's own loop, which cannot reset its state there"):
        trainer.fit(flagged(), steps=1, progress=False)


def test_a_layer_that_is_called_twice_has_no_second_state():
    shared = keras.layers.GRU(2, return_sequences=True, name="shared")
    both = [keras.Input((None, 2)), keras.Input((None, 2))]
    joined = keras.layers.Concatenate()([shared(x) for x in both])
    twice = make(keras.Model(both, keras.layers.Dense(1)(joined)))
    with pytest.raises(ValueError, match="The layer 'shared' is called twice in one update; .* Make a layer for each"):
        twice.fit(data().map(lambda x, y: ((x, x), y)), steps=1, progress=False)


def test_bad_input():
    with pytest.raises(ValueError, match="`bptt_updates` is set with bptt_window=None"):
        Trainer(model(), "sgd", {"error": "mse"}, bptt_updates=True)
    with pytest.raises(ValueError, match="`bptt_updates` is set with bptt_window=3 and accumulation_steps=2"):
        make(model(), accumulation_steps=2)
    with pytest.raises(ValueError, match=r"the first tensor of a batch has the shape \(8,\)"):
        make(model()).fit(tf.data.Dataset.from_tensors((tf.zeros([8]), tf.zeros([8]))).repeat(), steps=1)
    trainer = make(model())
    trainer.fit(data(), steps=1, progress=False)
    with (
        pytest.warns(UserWarning, match="traced again"),
        pytest.raises(ValueError, match="Give every `fit` batches of"),
    ):
        trainer.fit(data(batch=2), steps=2, progress=False)
    ragged = tf.data.Dataset.from_tensor_slices((X, Y)).batch(3).repeat()
    with pytest.raises(ValueError, match="Batch with drop_remainder=True"):
        make(model()).fit(ragged, steps=1, progress=False)
