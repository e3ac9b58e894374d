"""Which layers run on our loop under a `Trainer`, the switch, the bound on memory, and what the summary says."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.recurrent.loops.memory import check_memory, stride_of
from tests.trainer.recurrent import tools
from tests.trainer.recurrent.tools import BATCH, FEATURES, TIME, UNITS

L = keras.layers


def make_trainer(*extra, **options):
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input((TIME, FEATURES)),
            L.LSTM(UNITS, return_sequences=True, recurrent_dropout=0.2, seed=1, name="lstm"),
            *extra,
            L.GRU(3, name="gru"),
            L.Dense(1),
        ]
    )
    return Trainer(model, keras.optimizers.SGD(0.1), {"error": "mse"}, **options)


def fitted(trainer, steps=3):
    x = np.concatenate([tools.make_inputs(seed) for seed in range(2)])
    trainer.fit((x, x[:, 0, :1]), steps=steps, batch_size=BATCH, progress=False)
    return trainer.model.get_weights()


@pytest.fixture(scope="module")
def on_keras():
    return fitted(make_trainer(recurrent="keras"))


@pytest.mark.parametrize(
    "options",
    [
        {"recurrent": "adjoint"},
        {"recurrent": "adjoint", "recurrent_memory": "sqrt", "probe_every": 2},
        pytest.param({"recurrent": "adjoint", "recurrent_memory": "every 2"}, marks=pytest.mark.long),
        pytest.param({"recurrent": "adjoint", "recurrent_memory": "1KB"}, marks=pytest.mark.long),
    ],
)
def test_training_is_the_same_bit_for_bit(options, on_keras):
    tools.assert_same_bits(fitted(make_trainer(**options)), on_keras)


def test_hoisted_layers_train_alike_and_probing_changes_no_bit(on_keras):
    plain, probed = [fitted(make_trainer(probe_every=every)) for every in (0, 2)]
    tools.assert_same_bits(plain, probed)
    for ours, theirs in zip(plain, on_keras, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_hoisted_layers_with_bounded_memory_train_alike_and_probing_changes_no_bit(on_keras):
    plain, probed = [fitted(make_trainer(probe_every=every, recurrent_memory="every 2")) for every in (0, 2)]
    tools.assert_same_bits(plain, probed)
    for ours, theirs in zip(plain, on_keras, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_stateful_layer_with_a_bound_in_bytes():
    """Its states are variables, whose size counts."""
    found = []
    for memory in (None, 100):
        layer = L.LSTM(3, stateful=True)
        model = keras.Sequential([keras.Input((6, 2), batch_size=2), layer, L.Dense(1)])
        model.set_weights([np.full(w.shape, 0.3, "float32") for w in model.get_weights()])
        x = np.random.default_rng(0).normal(size=(4, 6, 2)).astype("float32")
        Trainer(model, "sgd", {"error": "mse"}, recurrent_memory=memory).fit(
            (x, x[:, 0, :1]), steps=2, batch_size=2, progress=False
        )
        found.append([*model.get_weights(), *(state.numpy() for state in layer.states)])
    for kept, bounded in zip(*found, strict=True):
        np.testing.assert_allclose(kept, bounded, rtol=1e-5, atol=1e-6)


def test_hoisted_layers_report_what_the_loop_reports():
    x = tools.make_inputs()
    found = [make_trainer(recurrent=loops).timestep_gradients((x, x[:, 0, :1])) for loops in ("auto", "adjoint")]
    assert list(found[0]) == list(found[1]) == ["lstm", "gru"]
    for layer, quantities in found[1].items():
        assert list(found[0][layer]) == list(quantities)
        for name, values in quantities.items():
            np.testing.assert_allclose(found[0][layer][name], values, rtol=1e-4, atol=1e-6, err_msg=name)


def test_two_replicas(two_devices):
    found = []
    for loops in ("keras", "adjoint"):
        with two_devices.scope():
            trainer = make_trainer(recurrent=loops, strategy=two_devices)
        found.append(fitted(trainer, 2))
    tools.assert_same_bits(*found)


def test_the_summary_names_the_reason(capsys):
    """The test would fail without the reasons: each layer but the last runs on Keras's loop for one of its own."""

    class Own(L.SimpleRNN):
        def inner_loop(self, *args, **kwargs):
            return super().inner_loop(*args, **kwargs)

    class Noisy(L.SimpleRNNCell):
        def call(self, inputs, states, training=False):
            return super().call(inputs + tf.random.normal([FEATURES]), states, training=training)

    model = keras.Sequential(
        [
            keras.Input((TIME, FEATURES), batch_size=BATCH),
            L.RNN(Noisy(FEATURES), return_sequences=True, name="noisy"),
            Own(3, return_sequences=True, name="own"),
            L.LSTM(3, unroll=True, return_sequences=True, name="unrolled"),
            L.GRU(1, name="last"),
        ]
    )
    trainer = Trainer(model, "sgd", {"error": "mse"})
    fitted(trainer, 1)
    trainer.summary()
    lines = capsys.readouterr().out.split("Loops\n")[1].splitlines()
    assert lines[0].startswith("  noisy: Keras's: its time step has the operations ['RandomStandardNormal']")
    assert lines[1:4] == [
        "  own: Keras's: Own has an `inner_loop` of its own",
        "  unrolled: Keras's: unroll=True",
        "  last: Looptape's",
    ]
    Trainer(model, "sgd", {"error": "mse"}, recurrent="keras").summary()
    assert "  last: Keras's: recurrent='keras'" in capsys.readouterr().out


def test_what_keras_has_to_run_cannot_be_bounded():
    trainer = make_trainer(L.LSTM(3, use_cudnn=True, return_sequences=True, name="cudnn"), recurrent_memory="sqrt")
    with pytest.raises(ValueError, match="'cudnn' cannot have `recurrent_memory`, because .* use_cudnn=True"):
        fitted(trainer, 1)


def test_bad_values():
    with pytest.raises(ValueError, match=r"`recurrent` is 'fast'; it must be one of \['auto', 'adjoint', 'keras'\]"):
        make_trainer(recurrent="fast")
    for value in (0, True, "big", "5 bytes", "every 0", -3, 1.5):
        with pytest.raises(ValueError, match='`recurrent_memory` is .*; it must be None .* Use "sqrt" for the least'):
            make_trainer(recurrent_memory=value)
    trainer = make_trainer()
    fitted(trainer, 1)
    trainer.recurrent = "keras"
    with pytest.raises(ValueError, match=r"`trainer.recurrent` was set after the update had been traced"):
        fitted(trainer, 2)


@pytest.mark.parametrize(
    ("memory", "length", "stride"),
    [
        (None, 100, None),
        ("sqrt", 100, 10),
        ("sqrt", 101, 11),
        ("sqrt", 1, 1),
        ("every 7", 100, 7),
        (40960, 100, None),
        ("40KB", 100, None),
    ],
)
def test_strides(memory, length, stride):
    states = [tf.zeros([10, 10])]
    assert stride_of(check_memory(memory), length, states) == stride
    if memory == "40KB":
        assert stride_of("39KB", length, states) == 10
        assert stride_of("39KB", tf.constant(length), states) == 10
        assert stride_of(memory, tf.constant(length), states) == length
