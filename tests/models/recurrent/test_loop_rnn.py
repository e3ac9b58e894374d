"""`LoopRNN` against the Keras layers with copied weights, saved and loaded, compiled, probed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.models import LoopRNN
from looptape.trainer.probing import ProbeSession

BATCH, TIME, FEATURES, UNITS = 3, 6, 4, 5

PAIRS = {
    "simple": (keras.layers.SimpleRNN, keras.layers.SimpleRNNCell),
    "lstm": (keras.layers.LSTM, keras.layers.LSTMCell),
    "gru": (keras.layers.GRU, keras.layers.GRUCell),
}


def make_inputs(seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=[BATCH, TIME, FEATURES]).astype("float32"))


def make_mask():
    mask = np.ones([BATCH, TIME], bool)
    mask[0, 4:] = mask[1, 2] = mask[2, :2] = False
    return mask


def make_pair(kind, **options):
    """A Keras layer and a `LoopRNN` with the same weights."""
    layer_class, cell_class = PAIRS[kind]
    layer, ours = layer_class(UNITS, **options), LoopRNN(cell_class(UNITS), **options)
    layer.build((BATCH, TIME, FEATURES))
    ours.build((BATCH, TIME, FEATURES))
    ours.set_weights(layer.get_weights())
    return layer, ours


def run(layer, x, mode, **call):
    """Outputs, and gradients of inputs and weights."""

    def differentiated(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x, **call)
            loss = tf.add_n([tf.reduce_sum(output**2) for output in tf.nest.flatten(outputs)])
        return outputs, tape.gradient(loss, [x, *[v.value for v in layer.trainable_variables]])

    if mode != "eager":
        differentiated = tf.function(differentiated, jit_compile=mode == "xla", autograph=False)
    return tf.nest.flatten(differentiated(x))


OPTIONS = [
    {},
    {"return_sequences": True},
    {"return_sequences": True, "return_state": True, "go_backwards": True},
    {"return_sequences": True, "zero_output_for_mask": True},
    {"return_state": True, "unroll": True},
]


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "last")
@pytest.mark.parametrize("kind", PAIRS)
def test_equal_to_keras(kind, options, masked, mode):
    if mode == "graph" and (kind == "simple" or options.get("unroll")):
        pytest.skip("the eager comparison covers it")
    layer, ours = make_pair(kind, **options)
    call = {"mask": make_mask()} if masked else {}
    for expected, found in zip(
        run(layer, make_inputs(), mode, **call), run(ours, make_inputs(), mode, **call), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_compiled(kind):
    layer, ours = make_pair(kind, return_sequences=True)
    results = [run(layer, make_inputs(), "graph", mask=make_mask()), run(ours, make_inputs(), "xla", mask=make_mask())]
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_stacked_cells_and_initial_states():
    def cells():
        return [keras.layers.LSTMCell(4), keras.layers.GRUCell(3)]

    layer, ours = keras.layers.RNN(cells(), return_state=True), LoopRNN(cells(), return_state=True)
    for each in (layer, ours):
        each.build((BATCH, TIME, FEATURES))
    ours.set_weights(layer.get_weights())
    generator = np.random.default_rng(3)
    initial = [[generator.normal(size=[BATCH, 4]) for _ in range(2)], generator.normal(size=[BATCH, 3])]
    initial = tf.nest.map_structure(lambda x: tf.constant(x, tf.float32), initial)
    for call in ({}, {"initial_state": initial}):
        for expected, found in zip(
            run(layer, make_inputs(), "graph", **call), run(ours, make_inputs(), "graph", **call), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_stateful():
    layer, ours = make_pair("gru", stateful=True, return_sequences=True)
    for seed in range(3):
        np.testing.assert_allclose(ours(make_inputs(seed)), layer(make_inputs(seed)), rtol=1e-6, atol=1e-6)
    ours.reset_state()
    assert np.all(ours.states[0].numpy() == 0)


@pytest.mark.parametrize("probed", [False, True])
def test_stateful_inside_a_scope_that_catches_assignments(probed):
    _, ours = make_pair("lstm", stateful=True)
    before = [state.numpy() for state in ours.states]
    scope = keras.StatelessScope([(state, state.value.read_value()) for state in ours.states])
    session = ProbeSession(ours if probed else ())
    with tf.GradientTape(), scope, session:
        ours(make_inputs())
    for state, old in zip(ours.states, before, strict=True):
        np.testing.assert_array_equal(state, old)
        assert np.all(scope.get_current_value(state).numpy() != 0)


def test_dropout_draws_what_keras_draws():
    options = {"dropout": 0.4, "recurrent_dropout": 0.3, "seed": 3}
    layer, ours = keras.layers.GRU(UNITS, **options), LoopRNN(keras.layers.GRUCell(UNITS, **options))
    for each in (layer, ours):
        each.build((BATCH, TIME, FEATURES))
    ours.set_weights(layer.get_weights())
    for _ in range(2):
        a, b = layer(make_inputs(), training=True), ours(make_inputs(), training=True)
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-6)
    assert not np.allclose(ours(make_inputs(), training=True), ours(make_inputs()))


def test_saved_and_loaded(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((None, FEATURES)),
            keras.layers.Masking(),
            LoopRNN([keras.layers.LSTMCell(4), keras.layers.GRUCell(3)], return_sequences=True),
            keras.layers.Bidirectional(LoopRNN(keras.layers.GRUCell(2), name="ours"), name="both"),
        ]
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.layers[1], LoopRNN) and isinstance(loaded.layers[2].backward_layer, LoopRNN)
    assert loaded.layers[2].backward_layer.go_backwards
    x = make_inputs().numpy()
    x[1, 3:] = 0
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert LoopRNN.from_config(model.layers[1].get_config()).get_config() == model.layers[1].get_config()


def test_unknown_sizes_and_keras_fit():
    model = keras.Sequential([keras.Input((None, FEATURES)), LoopRNN(keras.layers.LSTMCell(4)), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    for length in (3, 5):
        x = np.random.default_rng(0).normal(size=[6, length, FEATURES])
        history = model.fit(x, x[:, -1, :1], epochs=8, batch_size=4, verbose=0).history["loss"]
        assert history[-1] < history[0]
    assert model.output_shape == (None, 1)


def test_probed_like_a_keras_layer():
    layer, ours = make_pair("lstm", return_sequences=True)
    reports = []
    for each in (layer, ours):

        @tf.function(autograph=False)
        def probed(x, each=each):
            session = ProbeSession(each)
            with tf.GradientTape() as tape:
                with session:
                    outputs = each(x, mask=make_mask())
                loss = tf.reduce_sum(outputs**2)
            return session.report(tape.gradient(loss, session.sources))

        reports += probed(make_inputs()).values()
    assert set(reports[0]) == set(reports[1])
    for name, expected in reports[0].items():
        np.testing.assert_allclose(reports[1][name], expected, rtol=1e-6, atol=1e-7, err_msg=name)


def test_probing_changes_no_bit_of_it():
    for mode in ("eager", "graph"):
        _, ours = make_pair("gru", return_sequences=True)
        plain = run(ours, make_inputs(), mode)

        def probed(x, ours=ours):
            session = ProbeSession(ours)
            with tf.GradientTape() as tape:
                tape.watch(x)
                with session:
                    outputs = ours(x)
                loss = tf.reduce_sum(outputs**2)
            sources = [x, *[v.value for v in ours.trainable_variables]]
            return outputs, tape.gradient(loss, sources + session.sources)[: len(sources)]

        probed = probed if mode == "eager" else tf.function(probed, autograph=False)
        for expected, found in zip(plain, tf.nest.flatten(probed(make_inputs())), strict=True):
            np.testing.assert_array_equal(found, expected)
