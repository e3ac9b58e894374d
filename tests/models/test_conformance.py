"""What every public model keeps, in one table driven by `models.__all__`."""

import contextlib
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, models

BATCH, TIME, FEATURES = 4, 5, 3


def sequences(batch=BATCH, time=TIME):
    return np.random.default_rng(0).normal(size=(batch, time, FEATURES)).astype(np.float32)


def points(size):
    return lambda batch=BATCH: np.random.default_rng(0).random((batch, size), np.float32)


def tokens(batch=BATCH, time=TIME):
    return np.random.default_rng(0).integers(0, 7, (batch, time)).astype(np.int32)


def over_time(cell):
    return keras.Sequential([keras.Input((None, FEATURES)), models.LoopRNN(cell)])


# name: (a new model, an input of it, the input's specification with everything unknown that may be)
SEQUENCES = tf.TensorSpec([None, None, FEATURES])
TABLE = {
    "ActorCritic": (lambda: models.ActorCritic(3, 2, (8,)), points(3), tf.TensorSpec([None, 3])),
    "AdversarialPair": (lambda: models.AdversarialPair(2, 3, (8,)), points(3), tf.TensorSpec([None, 3])),
    "IdentityRNNCell": (lambda: over_time(models.IdentityRNNCell(6)), sequences, SEQUENCES),
    "LanguageModel": (lambda: models.LanguageModel(7, 6, 2), tokens, tf.TensorSpec([None, None], tf.int32)),
    "LoopRNN": (lambda: over_time(keras.layers.LSTMCell(6)), sequences, SEQUENCES),
    "MinimalGatedCell": (lambda: over_time(models.MinimalGatedCell(6)), sequences, SEQUENCES),
    "OrthogonalRNNCell": (lambda: over_time(models.OrthogonalRNNCell(6, 4)), sequences, SEQUENCES),
    "PhysicsInformedNetwork": (lambda: models.PhysicsInformedNetwork(2, (8, 8)), points(2), tf.TensorSpec([None, 2])),
    "SharedTrunk": (lambda: models.SharedTrunk(3, {"a": 2, "b": 1}, (8,)), points(3), tf.TensorSpec([None, 3])),
    "VariationalAutoencoder": (
        lambda: models.VariationalAutoencoder((3, 2), 2, (8,), seed=1),
        lambda batch=BATCH: np.random.default_rng(0).random((batch, 3, 2), np.float32),
        tf.TensorSpec([None, 3, 2]),
    ),
}


@contextlib.contextmanager
def policy(name):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


every_model = pytest.mark.parametrize("name", models.__all__)


def flat(outputs):
    return [np.asarray(output) for output in keras.tree.flatten(outputs)]


def test_every_public_name_is_in_the_table():
    assert set(TABLE) == set(models.__all__)
    assert models.__all__ == sorted(models.__all__)
    public = {name for name, value in vars(models).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(models.__all__)


@every_model
def test_it_has_a_docstring_and_names_its_arguments(name):
    cls = getattr(models, name)
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert f"        {parameter.name}: " in cls.__doc__, parameter


@every_model
def test_it_saves_and_loads(name, tmp_path):
    make, inputs, _ = TABLE[name]
    model = make()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded) is type(model)
    for one, other in zip(flat(model(inputs())), flat(loaded(inputs())), strict=True):
        np.testing.assert_array_equal(one, other)
    model.save_weights(tmp_path / "model.weights.h5")
    another = make()
    another.load_weights(tmp_path / "model.weights.h5")
    for one, other in zip(model.get_weights(), another.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@every_model
def test_its_config_makes_it_again(name):
    model = TABLE[name][0]()
    again = type(model).from_config(model.get_config())
    assert again.get_config() == model.get_config()
    assert [v.shape for v in again.variables] == [v.shape for v in model.variables]


# Every argument of every class, none at its default. `LoopRNN` has the arguments and the config of `keras.layers.RNN`.
ARGUMENTS = {
    "ActorCritic": {"features": 3, "actions": 2, "units": (4,), "shared": True},
    "AdversarialPair": {"features": 3, "latent_size": 5, "units": (4,)},
    "IdentityRNNCell": {"units": 4, "scale": 0.5, "kernel_scale": 0.2},
    "LanguageModel": {
        "vocabulary_size": 7,
        "units": 4,
        "layers": 2,
        "embedding_size": 5,
        "cell": "gru",
        "dropout": 0.5,
        "batch_size": 3,
    },
    "MinimalGatedCell": {"units": 4, "gate_bias": -2.0},
    "OrthogonalRNNCell": {"units": 4, "reflections": 2, "start": "random"},
    "PhysicsInformedNetwork": {"dimensions": 3, "units": (4,), "mean": [1.0, 2.0, 3.0], "scale": [2.0, 3.0, 4.0]},
    "SharedTrunk": {"features": 3, "heads": {"a": 2}, "units": (4,), "head_units": 5},
    "VariationalAutoencoder": {"input_shape": (2, 2), "latent_size": 3, "units": (4,), "seed": 5},
}


@pytest.mark.parametrize("name", sorted(set(models.__all__) - {"LoopRNN"}))
def test_its_config_has_all_arguments(name):
    cls, given = getattr(models, name), ARGUMENTS[name]
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    defaults = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert set(given) == set(defaults)
    assert not [argument for argument, value in given.items() if value == defaults[argument]]
    config = cls(**given).get_config()
    assert {argument: config[argument] for argument in given} == given
    again = cls.from_config(config).get_config()
    assert {argument: again[argument] for argument in given} == given


@every_model
def test_it_prints_a_summary(name):
    lines = []
    TABLE[name][0]().summary(print_fn=lines.append)
    assert f"Total params: {TABLE[name][0]().count_params():,}" in "\n".join(lines)


@every_model
def test_one_trace_serves_every_batch_size_and_length(name):
    make, inputs, spec = TABLE[name]
    model, traces = make(), []

    def call(values):
        traces.append(values)
        return model(values)

    function = tf.function(call, input_signature=[spec])
    sizes = [{"batch": 4}, {"batch": 2}]
    if spec.shape[1] is None:
        sizes.append({"batch": 1, "time": 9})
    for size in sizes:
        values = inputs(**size)
        for traced, eager in zip(flat(function(values)), flat(model(values)), strict=True):
            assert traced.shape[0] == size["batch"]
            np.testing.assert_allclose(traced, eager, atol=1e-5)
    assert len(traces) == 1


@every_model
def test_gradients_reach_all_variables(name):
    make, inputs, _ = TABLE[name]
    model = make()
    with tf.GradientTape() as tape:
        outputs = keras.tree.flatten(model(inputs(), training=True))
        loss = tf.add_n([tf.reduce_sum(tf.square(output - 0.3)) for output in outputs])
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        assert gradient is not None, variable.path
        values = np.asarray(tf.convert_to_tensor(gradient))
        assert np.all(np.isfinite(values)) and np.any(values != 0), variable.path


class Squares(Trainer):
    def compute_losses(self, batch, training):
        outputs = keras.tree.flatten(self.call_model(batch, training))
        return {f"part_{index}": tf.square(output - 0.3) for index, output in enumerate(outputs)}


@every_model
def test_the_trainer_trains_it(name):
    make, inputs, _ = TABLE[name]
    model = make()
    before = [np.array(v) for v in model.trainable_variables]
    trainer = Squares(model, keras.optimizers.SGD(0.1))
    trainer.fit(tf.data.Dataset.from_tensors(inputs()).repeat(), steps=2, progress=False)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        assert not np.array_equal(old, np.array(variable)), variable.path


@every_model
def test_it_runs_in_half_precision(name):
    make, inputs, _ = TABLE[name]
    with policy("mixed_bfloat16"):
        model = make()
        outputs = flat(model(inputs()))
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    assert all(np.all(np.isfinite(output.astype(np.float32))) for output in outputs)
