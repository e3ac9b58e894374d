"""Every kind of recurrent layer on our loop, against Keras's own: not a bit differs on the CPU without XLA."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.probing.tools import TwiceCell
from tests.trainer.recurrent import tools
from tests.trainer.recurrent.tools import BATCH, FEATURES, TIME, UNITS

L = keras.layers


class NestedCell(L.Layer):
    """A cell that runs a recurrent layer over its inputs."""

    state_size = output_size = UNITS

    def __init__(self, **options):
        super().__init__(**options)
        self.inner, self.outer = L.GRU(2), L.SimpleRNNCell(UNITS)

    def build(self, shape):
        self.inner.build((None, FEATURES, 1))
        self.outer.build((None, 2))

    def call(self, inputs, states):
        return self.outer(self.inner(inputs[:, :, None]), states)


class MovingCell(L.Layer):
    """A cell with batch normalisation and dropout inside, and no `training` argument of its own."""

    state_size = output_size = UNITS

    def __init__(self, **options):
        super().__init__(**options)
        self.inner, self.norm, self.drop = L.SimpleRNNCell(UNITS), L.BatchNormalization(), L.Dropout(0.3, seed=3)

    def build(self, shape):
        self.inner.build(shape)
        self.norm.build(shape)

    def call(self, inputs, states):
        return self.inner(self.drop(self.norm(inputs)), states)


KINDS = {
    "simple": lambda **o: L.SimpleRNN(UNITS, **o),
    "gru": lambda **o: L.GRU(UNITS, **o),
    "gru_reset_before": lambda **o: L.GRU(UNITS, reset_after=False, **o),
    "lstm": lambda **o: L.LSTM(UNITS, **o),
    "stack": lambda **o: L.RNN([L.LSTMCell(UNITS), L.GRUCell(3)], **o),
    "own_cell": lambda **o: L.RNN(TwiceCell(UNITS), **o),
    "output_not_a_state": lambda **o: L.RNN(tools.DiagonalCell(), **o),
    "nested": lambda **o: L.RNN(NestedCell(), **o),
}
VARIANTS = {
    "sequences": {"return_sequences": True},
    "backwards": {"go_backwards": True},
    "stateful": {"stateful": True, "return_sequences": True, "go_backwards": True},
    "zeroed": {"zero_output_for_mask": True, "return_sequences": True},
}
# Those that are quick tests; the others have only masks, directions and kinds in another combination.
QUICK = {("sequences", False), ("backwards", True)}
SLOW = {("nested", "sequences"), ("gru", "sequences"), ("simple", "sequences"), ("gru_reset_before", "backwards")}


def is_quick(kind, variant, masked):
    if variant == "stateful":
        return masked and kind == "lstm"
    return (variant, masked) in QUICK and (kind, variant) not in SLOW


TABLE = [
    pytest.param(
        kind,
        variant,
        masked,
        marks=[] if is_quick(kind, variant, masked) else [pytest.mark.long],
    )
    for kind in KINDS
    for variant in VARIANTS
    for masked in (False, True)
]


def pair(make):
    """Two models with the same weights and seeds."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        models.append(make())
    return models


def compare(models, core, mask=None, passes=1, mode="graph"):
    """Passes over the two models, the second one on our loop; all that they compute and move is the same."""
    runs = [tools.make_pass(models[0], None, mode, mask), tools.make_pass(models[1], core, mode, mask)]
    for seed in range(passes):
        found = [tf.nest.flatten(run(tools.make_inputs(seed))) for run in runs]
        tools.assert_same_bits(*found)
        tools.assert_same_bits(*map(tools.moved_by, models))


def layers(make):
    """The layer of a kind, built."""

    def build():
        layer = make()
        layer.build((BATCH, TIME, FEATURES))
        return layer

    return pair(build)


@pytest.mark.parametrize(("kind", "variant", "masked"), TABLE)
def test_same_bits_as_keras(kind, variant, masked):
    models = layers(lambda: KINDS[kind](**VARIANTS[variant]))
    core = tools.make_core(models[1], loops="adjoint")
    mask = tools.make_mask() if masked else None
    compare(models, core, mask, passes=2 if variant == "stateful" else 1)
    assert core.reasons == {name: "it runs inside the time step of another recurrent layer" for name in core.reasons}
    assert len(core.reasons) == (kind == "nested")


MODELS = {
    "dropout": lambda: [
        L.LSTM(UNITS, dropout=0.3, recurrent_dropout=0.2, seed=1, return_sequences=True),
        L.GRU(UNITS, recurrent_dropout=0.4, seed=2),
    ],
    "stack_dropout": lambda: [L.RNN([L.LSTMCell(4, dropout=0.3, seed=1), L.GRUCell(3, recurrent_dropout=0.3, seed=2)])],
    "moving": lambda: [L.RNN(MovingCell(), return_sequences=True)],
    "bidirectional": lambda: [L.Bidirectional(L.GRU(3, return_sequences=True)), L.Bidirectional(L.LSTM(2))],
    "convolution": lambda: [L.Reshape((TIME, FEATURES, 1)), L.ConvLSTM1D(2, 2, recurrent_dropout=0.2, seed=1)],
    "regularized": lambda: [L.LSTM(UNITS, kernel_regularizer="l2")],
}


@pytest.mark.parametrize(
    "kind",
    [
        "dropout",
        "moving",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in list(MODELS)[1:] if kind != "moving"),
    ],
)
def test_same_bits_and_the_same_random_numbers_in_whole_models(kind):
    """The time steps are computed again backwards: with the dropout masks and the seeds that they had."""
    models = pair(lambda: keras.Sequential([keras.Input((TIME, FEATURES), batch_size=BATCH), *MODELS[kind]()]))
    core = tools.make_core(models[1], loops="adjoint")
    compare(models, core, passes=2)
    assert not core.reasons


@pytest.mark.parametrize("memory", ["every 4", *(pytest.param(m, marks=pytest.mark.long) for m in ("sqrt", "1KB"))])
def test_fewer_states_kept_give_the_same_bits(memory):
    """With 6 time steps a stride of 4 leaves a shorter stretch at the end."""
    models = pair(
        lambda: keras.Sequential(
            [
                keras.Input((TIME, FEATURES), batch_size=BATCH),
                L.Masking(),
                L.LSTM(UNITS, recurrent_dropout=0.2, seed=1, return_sequences=True, go_backwards=True),
                L.RNN(MovingCell()),
            ]
        )
    )
    compare(models, tools.make_core(models[1], loops="adjoint", memory=memory), passes=2)


@pytest.mark.parametrize("memory", [None, "1KB", pytest.param("sqrt", marks=pytest.mark.long)])
def test_sizes_that_are_not_known(memory):
    models = layers(lambda: L.GRU(UNITS, return_sequences=True))
    weights = [[v.value for v in model.trainable_variables] for model in models]
    core = tools.make_core(models[1], loops="adjoint", memory=memory)

    def run(model, sources, x):
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            value = tf.reduce_sum(outputs**3)
        return outputs, tape.gradient(value, sources)

    def ours(x):
        with core.running():
            return run(models[1], weights[1], x)

    signature = [tf.TensorSpec([None, None, FEATURES])]
    keras_run = tf.function(lambda x: run(models[0], weights[0], x), signature, autograph=False)
    our_run = tf.function(ours, signature, autograph=False)
    for shape in ((4, 6), (2, 1), (3, 11)):
        x = tf.random.stateless_normal([*shape, FEATURES], [1, 2])
        tools.assert_same_bits(tf.nest.flatten(keras_run(x)), tf.nest.flatten(our_run(x)))


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.long), "float64"])
def test_precision(policy):
    models = layers(lambda: L.LSTM(UNITS, return_sequences=True, dtype=policy))
    compare(models, tools.make_core(models[1], loops="adjoint"), tools.make_mask())


def test_xla_comes_close():
    models = layers(lambda: L.RNN([L.LSTMCell(UNITS), L.GRUCell(3)], return_sequences=True))
    for memory in (None, "sqrt"):
        core = tools.make_core(models[1], loops="adjoint", memory=memory)
        first = tools.run(models[0], tools.make_inputs(), mask=tools.make_mask())
        second = tools.run(models[1], tools.make_inputs(), core=core, mode="xla", mask=tools.make_mask())
        for a, b in zip(first, second, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def test_only_what_a_tape_asks_for_is_computed():
    """A layer on raw data has no gradient of its inputs: the backward loop does not compute it."""
    layer = L.SimpleRNN(UNITS)
    layer.build((BATCH, TIME, FEATURES))
    core = tools.make_core(layer, loops="adjoint")

    def carried(inputs):
        graph = tools.make_pass(layer, core, inputs=inputs).get_concrete_function(tools.make_inputs()).graph
        backward = [op for op in graph.get_operations() if "While" in op.type][-1]
        return sum(output.dtype == tf.variant for output in backward.outputs)

    assert carried(True) == carried(False) + 1
