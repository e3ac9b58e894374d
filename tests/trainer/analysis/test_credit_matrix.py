"""The credit matrix and the gradients of each loss, against Python-unrolled copies and `timestep_gradients`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.trainer.recurrent import tools
from tests.trainer.tools import read_events

BATCH, TIME, FEATURES, UNITS = 4, 6, 3, 5
layers = keras.layers


def examples(seed=3):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, TIME, FEATURES)).astype("float32")
    return x, rng.normal(size=(BATCH, TIME, UNITS)).astype("float32")


def squares(targets, outputs):
    return tf.square(targets - outputs)


def recurrent_model(cell="LSTM", **options):
    layer = getattr(layers, cell)(UNITS, return_sequences=True, name="loop", **options)
    return keras.Sequential([keras.Input((TIME, FEATURES)), layer])


def unrolled(cell, x, y, count):
    """{"state", "input"}: [time, time, batch] norms ‖∂l_s/∂(·_t)‖ · batch from a Python loop, one tape for all."""
    inputs = [tf.constant(x[:, t]) for t in range(TIME)]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(inputs)
        states, kept, losses = [tf.zeros([BATCH, UNITS])] * count, [], []
        for t in range(TIME):
            output, states = cell(inputs[t], list(states))
            # A state is one tensor for the output and for what is handed on.
            states = [tf.identity(state) for state in states]
            output = states[0]
            kept.append(list(states))
            losses.append(tf.reduce_sum(tf.square(y[:, t] - output)) / y.size)
    found = {"state": np.zeros([TIME, TIME, BATCH]), "input": np.zeros([TIME, TIME, BATCH])}
    for s in range(TIME):
        for t in range(TIME):
            for kind, sources in (("state", kept[t]), ("input", [inputs[t]])):
                gradients = [g for g in tape.gradient(losses[s], sources) if g is not None]
                total = sum((np.square(g).sum(axis=1) for g in gradients), np.zeros(BATCH))
                found[kind][s, t] = BATCH * np.sqrt(total)
    return found


@pytest.mark.parametrize(("cell", "count"), [("LSTM", 2), ("GRU", 1)])
def test_equals_an_unrolled_copy(cell, count):
    model = recurrent_model(cell)
    x, y = examples()
    trainer = Trainer(model, "sgd", {"error": squares})
    expected = unrolled(model.layers[0].cell, x, y, count)
    for kind in ("state", "input"):
        found = trainer.credit_matrix((x, y), with_respect_to=kind)["loop"]
        assert found.shape == (TIME, TIME) and not np.triu(found, 1).any()
        np.testing.assert_allclose(found, expected[kind].mean(axis=2), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("cell", [tools.DiagonalCell, tools.NormalisedCell, tools.ProjectedCell])
def test_an_output_that_is_not_a_state(cell):
    """M[s, t] = ‖∂l_s/∂s_t‖ from a loop that adds a zero to each state before the output is read from it."""
    layer = layers.RNN(cell(), return_sequences=True, name="loop")
    model = keras.Sequential([keras.Input((tools.TIME, tools.FEATURES)), layer])
    x = tools.make_inputs()
    found = Trainer(model, "sgd", {"sum": lambda y, p: tf.reduce_sum(p**2, -1)}).credit_matrix((x, x))["loop"]
    with tf.GradientTape(persistent=True) as tape:
        states, kept, losses = [tf.zeros([tools.BATCH, n]) for n in layer.cell.state_size], [], []
        for t in range(tools.TIME):
            states = layer.cell.update(x[:, t], states)
            kept.append([tf.zeros_like(state) for state in states])
            tape.watch(kept[-1])
            states = [state + zero for state, zero in zip(states, kept[-1], strict=True)]
            losses.append(tf.reduce_sum(layer.cell.read(x[:, t], states) ** 2) / tools.TIME)
    for s in range(tools.TIME):
        for t in range(s + 1):
            gradients = tape.gradient(losses[s], kept[t], unconnected_gradients="zero")
            norms = np.sqrt(sum(np.square(g).sum(axis=1) for g in gradients))
            np.testing.assert_allclose(found[s, t], norms.mean(), rtol=1e-4, atol=1e-7)


def test_a_linear_loop_by_hand():
    """h_t = a·h_{t-1} + x_t and the loss at s the mean of h_s: M[s, t] = a^(s−t) / time."""
    model = keras.Sequential(
        [
            keras.Input((4, 1)),
            layers.SimpleRNN(1, activation=None, use_bias=False, return_sequences=True, name="loop"),
        ]
    )
    model.layers[0].cell.recurrent_kernel.assign([[2.0]])
    trainer = Trainer(model, "sgd", {"sum": lambda targets, outputs: outputs[..., 0]})
    x = np.ones((3, 4, 1), "float32")
    expected = np.array([[2.0 ** (s - t) / 4 if t <= s else 0 for t in range(4)] for s in range(4)])
    np.testing.assert_allclose(trainer.credit_matrix((x, x))["loop"], expected, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"go_backwards": True}])
def test_a_loss_on_the_last_output_agrees_with_timestep_gradients(options):
    """With one loss at the end the last row is the ordinary state gradient; masked and in both directions."""
    x, y = examples()
    x[1, 4:], x[2, :2] = 0, 0
    model = keras.Sequential(
        [keras.Input((TIME, FEATURES)), layers.Masking(), layers.LSTM(UNITS, name="loop", **options)]
    )
    trainer = Trainer(model, "sgd", {"error": squares})
    found = trainer.credit_matrix((x, y[:, 0]))
    expected = trainer.timestep_gradients((x, y[:, 0]))
    assert list(found) == list(expected)
    name = next(iter(found))
    np.testing.assert_allclose(found[name][-1], expected[name]["state"], rtol=1e-4)
    assert not found[name][:-1].any()
    inputs = trainer.credit_matrix((x, y[:, 0]), with_respect_to="input", time_steps=[-1])
    np.testing.assert_allclose(inputs[name][0], expected[name]["input"], rtol=1e-4)


def test_time_steps_that_are_all_padding_are_nan():
    x, y = examples()
    x[:, 4:] = 0
    model = keras.Sequential(
        [keras.Input((TIME, FEATURES)), layers.Masking(), layers.GRU(UNITS, return_sequences=True, name="loop")]
    )
    found = Trainer(model, "sgd", {"error": squares}).credit_matrix((x, y))["loop"]
    assert np.isnan(found[:, 4:]).all() and np.isfinite(found[:, :4]).all()


def test_it_is_logged_on_request(tmp_path):
    trainer = Trainer(recurrent_model(), "sgd", {"error": squares})
    found = trainer.credit_matrix(examples(), workdir=str(tmp_path))
    ((step, values),) = read_events(tmp_path / "train")
    assert step == 0 and list(values) == ["timestep/loop/credit"]
    np.testing.assert_array_equal(values["timestep/loop/credit"], found["loop"])


def test_what_has_no_credit_matrix():
    batch = examples()
    with pytest.raises(ValueError, match="must be one of"):
        Trainer(recurrent_model(), "sgd", {"error": squares}).credit_matrix(batch, with_respect_to="weights")
    with pytest.raises(ValueError, match=r"\['loop'\] cannot be computed"):
        Trainer(recurrent_model(dropout=0.5), "sgd", {"error": squares}).credit_matrix(batch)
    dense = keras.Sequential([keras.Input((TIME, FEATURES)), layers.Dense(UNITS)])
    with pytest.raises(ValueError, match="no recurrent Keras layer"):
        Trainer(dense, "sgd", {"error": squares}).credit_matrix(batch)
    with pytest.raises(ValueError, match="whole matrix"):
        Trainer(recurrent_model(), "sgd", {"error": squares}).credit_matrix(batch, time_steps=[0], workdir="unused")


# ---- Each loss by itself.


def last(targets, outputs):
    return tf.reduce_sum(tf.abs(targets - outputs)[:, -1], axis=1)


def test_each_loss_equals_a_trainer_with_that_loss_alone():
    model, batch = recurrent_model(), examples()
    both = Trainer(model, "sgd", {"all": squares, "end": last}, loss_weights={"all": 1.0, "end": 0.25})
    found, shares = both.timestep_gradients_by_loss(batch)
    for name, loss, weight in (("all", squares, 1.0), ("end", last, 0.25)):
        alone = Trainer(model, "sgd", {name: loss}, loss_weights={name: weight}).timestep_gradients(batch)
        assert found[name].keys() == alone.keys() and found[name]["loop"].keys() == alone["loop"].keys()
        for quantity, vector in alone["loop"].items():
            np.testing.assert_allclose(found[name]["loop"][quantity], vector, rtol=1e-5, atol=1e-8, err_msg=quantity)
    np.testing.assert_allclose(shares["loop"]["all"] + shares["loop"]["end"], np.ones(TIME), rtol=1e-6)


def test_shares_equal_the_projections_of_the_gradients():
    """⟨λᵏ_t, λ_t⟩ / ‖λ_t‖² from the whole gradients of each loss, which are additive."""
    model, batch = recurrent_model("GRU"), examples()
    _, shares = Trainer(model, "sgd", {"all": squares, "end": last}).timestep_gradients_by_loss(batch)
    each = [
        Trainer(model, "sgd", {"only": loss}).timestep_gradients(batch, full=True)["loop"]["state_gradient/0"]
        for loss in (squares, last)
    ]
    total = each[0] + each[1]
    for name, own in zip(("all", "end"), each, strict=True):
        expected = (own * total).sum(axis=(0, 2)) / (total**2).sum(axis=(0, 2))
        np.testing.assert_allclose(shares["loop"][name], expected, rtol=1e-4)


def test_per_loss_gradients_need_a_loop():
    model = keras.Sequential([keras.Input((TIME, FEATURES)), layers.Dense(UNITS)])
    with pytest.raises(ValueError, match="no time steps to examine"):
        Trainer(model, "sgd", {"error": squares}).timestep_gradients_by_loss(examples())
