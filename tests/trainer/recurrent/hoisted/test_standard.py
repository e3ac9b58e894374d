"""Which layers run in the hoisted form."""

import re

import keras
import pytest

from looptape.trainer.recurrent.hoisted import standard

LAYERS = keras.layers


class Quiet(keras.layers.LSTM):
    pass


@pytest.mark.parametrize(
    "layer",
    [
        LAYERS.LSTM(2),
        LAYERS.GRU(2, reset_after=False, dropout=0.5),
        LAYERS.SimpleRNN(2, use_bias=False, go_backwards=True),
        LAYERS.RNN(LAYERS.LSTMCell(2), stateful=True),
        LAYERS.LSTM(2, dtype="mixed_bfloat16", use_cudnn=False),
    ],
)
def test_applies(layer):
    assert standard.applies(layer) is None


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Quiet(2), "a layer class of its own, Quiet"),
        (LAYERS.RNN([LAYERS.LSTMCell(2)]), "a cell that is not .*: StackedRNNCells"),
        (LAYERS.ConvLSTM1D(2, 3), "ConvLSTM1D"),
        (LAYERS.LSTM(2, unroll=True), "unroll=True"),
        (LAYERS.SimpleRNN(2, activation="relu"), "activation=relu instead of tanh"),
        (LAYERS.GRU(2, recurrent_activation="hard_sigmoid"), "recurrent_activation=hard_sigmoid instead of sigmoid"),
        (LAYERS.GRU(2, recurrent_dropout=0.1), "recurrent dropout"),
        (LAYERS.RNN(LAYERS.LSTMCell(2, dropout=0.1, implementation=1)), "dropout with implementation=1"),
        (LAYERS.RNN(LAYERS.LSTMCell(2, dtype="float16")), "a cell that computes in float16 in a layer .* float32"),
        (LAYERS.RNN(LAYERS.LSTMCell(2, activity_regularizer="l2")), "an activity regularizer"),
    ],
)
def test_reason_for_every_other_layer(layer, reason):
    assert re.search(reason, standard.applies(layer))
