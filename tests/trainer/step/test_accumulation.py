"""Accumulation equals the large batch, whatever the split."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses
from tests.losses.combiners.representative import every_combiner
from tests.trainer.tools import (
    assert_identical_weights,
    assert_same_weights,
    dataset,
    dense_model,
    mse,
    regression,
    train,
)

X, Y = regression(40)


def ragged_batches(sizes, *arrays):
    """A dataset with batches of the sizes given, in order."""

    def generate():
        start = 0
        for size in sizes:
            yield tuple(array[start : start + size] for array in arrays)
            start += size

    signature = tuple(tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in arrays)
    return tf.data.Dataset.from_generator(generate, output_signature=signature)


def test_four_times_eight_is_thirty_two():
    small, large = dense_model(), dense_model()
    train(small, dataset(X[:32], Y[:32], batch=8).repeat(), steps=5, accumulation_steps=4)
    train(large, dataset(X[:32], Y[:32], batch=32).repeat(), steps=5)
    assert_same_weights(small, large)


def test_sixteen_sixteen_and_eight_are_forty():
    split, whole = dense_model(), dense_model()
    one = train(split, ragged_batches([16, 16, 8], X, Y), epochs=3, accumulation_steps=3)
    train(whole, dataset(X, Y, batch=40), epochs=3)
    assert one._engine.counters.step == 3 and one._engine.calls.traces == 1
    assert_same_weights(split, whole)


def test_data_that_end_inside_an_update_are_applied_with_their_own_divisor():
    """5 batches, 2 per update: the third update has one batch of 8 and must be its mean."""
    split, oracle = dense_model(), dense_model()
    trainer = train(split, dataset(X, Y, batch=8), epochs=2, accumulation_steps=2)
    assert trainer._engine.counters.step == 6
    train(oracle, ragged_batches([16, 16, 8], X, Y), epochs=2)
    assert_same_weights(split, oracle)


class TwoMasks(Trainer):
    """Two losses whose masks differ between examples."""

    def compute_losses(self, batch, training):
        x, y, first, second = batch["x"], batch["target"], batch["first"], batch["second"]
        error = self.model(x, training=training) - y
        return {"square": (tf.square(error)[:, 0], first), "absolute": (tf.abs(error)[:, 0], second)}


def masked_data(batch):
    rng = np.random.default_rng(1)
    first, second = (rng.integers(0, 2, 40).astype("float32") for _ in range(2))
    parts = {"x": X, "target": Y, "first": first, "second": second}
    return tf.data.Dataset.from_tensor_slices(parts).batch(batch)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_masks_that_differ_between_losses(clip_norm):
    options = {"trainer_class": TwoMasks, "loss_weights": {"square": 1.0, "absolute": 0.5}, "clip_norm": clip_norm}
    small, large = dense_model(), dense_model()
    trainer = train(small, masked_data(8).repeat(), steps=4, accumulation_steps=5, **options)
    train(large, masked_data(40).repeat(), steps=4, **options)
    assert_same_weights(small, large)
    assert len(trainer._engine.main.plan.losses.groups) == 2, "two divisors need two accumulators"


def test_losses_that_share_a_divisor_share_an_accumulator():
    pair = {"square": mse(), "absolute": keras.losses.MeanAbsoluteError()}
    weight = np.random.default_rng(2).uniform(0, 2, 40).astype("float32")
    small, large = dense_model(), dense_model()
    trainer = train(small, dataset(X, Y, weight, batch=10).repeat(), losses=pair, steps=3, accumulation_steps=4)
    train(large, dataset(X, Y, weight, batch=40).repeat(), losses=pair, steps=3)
    assert_same_weights(small, large)
    assert len(trainer._engine.main.plan.losses.groups) == 1


class TwoShapes(Trainer):
    """A loss [batch], and one whose values have the shape that `shape` makes of [batch, outputs]."""

    def compute_losses(self, batch, training):
        outputs = self.model(batch[0], training=training)
        return {"size": tf.reduce_mean(tf.abs(outputs), axis=1), "error": self.shape(tf.square(outputs - batch[1]))}


SHAPES = {
    "flattened": lambda values: tf.reshape(values, [-1]),
    "mean over the batch": lambda values: tf.reduce_mean(values, axis=0),
    "mean over the batch, kept": lambda values: tf.reduce_mean(values, axis=0, keepdims=True),
    "transposed": tf.transpose,
}


def five_outputs():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])


def train_shape(shape, data, **options):
    trainer = TwoShapes(five_outputs(), keras.optimizers.SGD(0.1), **options)
    trainer.shape = shape
    trainer.fit(data, steps=1, progress=False)
    return trainer.model


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", ["known", "unknown"])
def test_losses_whose_first_axis_is_not_the_batch(shape, sizes):
    targets = np.tile(Y[:16], (1, 5))
    if sizes == "known":
        data, large = (tf.data.Dataset.from_tensors((X[s], targets[s])) for s in (slice(8), slice(16)))
        data = data.concatenate(tf.data.Dataset.from_tensors((X[8:16], targets[8:16])))
    else:
        data, large = ragged_batches([12, 4], X[:16], targets), dataset(X[:16], targets, batch=16)
    expected = train_shape(lambda values: values, large)
    if (shape, sizes) == ("flattened", "unknown"):  # it might as well be a selection of elements
        with pytest.raises(
            ValueError, match="A loss, 'error', has 60 values where 'size' has 12; .* must be the batch"
        ):
            train_shape(SHAPES[shape], data, accumulation_steps=2)
    else:
        assert_same_weights(train_shape(SHAPES[shape], data, accumulation_steps=2), expected)


def test_a_flattened_loss_of_an_unknown_batch_size_trains_nothing_under_xla():
    data = ragged_batches([12, 4], X[:16], np.tile(Y[:16], (1, 5)))
    trained = train_shape(SHAPES["flattened"], data, accumulation_steps=2, jit_compile=True)
    assert_identical_weights(trained, five_outputs())


@pytest.mark.parametrize("name", every_combiner(lambda cls: cls.__name__))
def test_every_combiner_equals_the_large_batch(name):
    make = getattr(losses, name)
    options = {"trainer_class": TwoMasks, "loss_weights": {"square": 1.0, "absolute": 0.5}}
    small, large = dense_model(), dense_model()
    train(small, masked_data(8).repeat(), steps=3, accumulation_steps=5, combiner=make(), **options)
    train(large, masked_data(40).repeat(), steps=3, combiner=make(), **options)
    assert_same_weights(small, large, 2e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_sequences_of_an_unknown_batch_size(jit_compile):
    """Of the kernel of a Dense layer on [batch, time, features] TensorFlow does not know the gradient's whole shape."""
    x = np.random.default_rng(0).normal(size=(20, 6, 3)).astype("float32")

    def run(batch, **options):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6, 3)), keras.layers.Dense(2, "tanh"), keras.layers.Dense(1)])
        train(model, dataset(x, x[..., :1], batch=batch), keras.optimizers.SGD(0.1), epochs=2, **options)
        return model

    assert_same_weights(run(8, accumulation_steps=3, jit_compile=jit_compile), run(20))


def test_famo_looks_at_the_same_data_again_and_moves_nothing_by_it():
    """FAMO's second forward pass must not move BatchNorm or draw another dropout mask."""

    def model():
        keras.utils.set_random_seed(2)
        return keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3, seed=3),
                keras.layers.Dense(1),
            ]
        )

    pair = {"square": mse(), "absolute": keras.losses.MeanAbsoluteError()}
    famo, plain = model(), model()
    combiner = losses.FAMO()
    for each, how in ((famo, combiner), (plain, None)):
        train(each, dataset(X, Y, batch=10), keras.optimizers.SGD(0.0), pair, epochs=1, combiner=how)
    for left, right in zip(famo.non_trainable_variables, plain.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())
    # The weights did not move: with the same masks the losses before and after are equal, and ξ stays 0.
    assert int(combiner.updates) == 4
    np.testing.assert_allclose(combiner.logits.numpy(), 0.0, atol=1e-6)
    moving = losses.FAMO()
    train(model(), dataset(X, Y, batch=10), keras.optimizers.SGD(0.1), pair, epochs=3, combiner=moving)
    assert np.abs(moving.logits.numpy()).max() > 1e-3


def test_schedules_averages_and_counters_move_once_per_update():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.0])
    model = dense_model()
    trainer = Trainer(model, keras.optimizers.SGD(schedule), {"error": mse()}, accumulation_steps=4, ema_decay=0.5)
    data = dataset(X[:32], Y[:32], batch=8).repeat()
    seen, averages = [], None
    for step in range(1, 6):
        trainer.fit(data, steps=step, progress=False)
        now = [w.numpy() for w in model.trainable_variables]
        start = [w.numpy() for w in dense_model().trainable_variables] if averages is None else averages
        averages = [0.5 * a + 0.5 * w for a, w in zip(start, now, strict=True)]
        seen.append(now)
    assert int(trainer.optimizer.iterations) == int(trainer.step) == 5
    # The schedule's boundary is at iteration 2: updates 1–3 move, 4 and 5 have a learning rate of 0.
    assert not np.array_equal(seen[1][0], seen[2][0])
    np.testing.assert_array_equal(seen[2][0], seen[4][0])
    for expected, average in zip(averages, trainer._engine.main.pipeline.averages, strict=True):
        np.testing.assert_allclose(average.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_sparse_gradients(accumulation_steps):
    """An embedding's gradient is sparse; repeated indices must count as often as they occur, also in the norm."""
    rng = np.random.default_rng(3)
    tokens, y = rng.integers(0, 6, (32, 5)), rng.normal(size=(32, 1)).astype("float32")

    def model():
        keras.utils.set_random_seed(2)
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(6, 3),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )

    ours, oracle = model(), model()
    train(
        ours,
        dataset(tokens, y, batch=32 // accumulation_steps).repeat(),
        steps=3,
        accumulation_steps=accumulation_steps,
        clip_norm=0.1,
    )
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(oracle(tokens) - y))
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, oracle.trainable_weights)]
        norm = float(tf.linalg.global_norm(gradients))
        assert norm > 0.1
        for weight, gradient in zip(oracle.trainable_weights, gradients, strict=True):
            weight.assign(weight - 0.1 * gradient * (0.1 / norm))
    assert_same_weights(ours, oracle)


def test_metrics_see_every_micro_batch():
    model = dense_model()
    metric = keras.metrics.MeanAbsoluteError(name="mae")
    trainer = Trainer(model, keras.optimizers.SGD(0.0), {"error": mse()}, metrics=[metric], accumulation_steps=4)
    history = trainer.fit(dataset(X, Y, batch=4), epochs=1, progress=False).history
    expected = np.mean(np.abs(model(X).numpy() - Y))
    np.testing.assert_allclose(history["mae"], [expected], rtol=1e-5)


def test_dropout_draws_a_new_mask_for_each_micro_batch_and_goes_on_from_there():
    def model():
        keras.utils.set_random_seed(4)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5, seed=9), keras.layers.Dense(1)])

    graph, eager = model(), model()
    data = dataset(X, Y, batch=10)
    one = train(graph, data.repeat(), steps=4, accumulation_steps=2)
    two = train(eager, data.repeat(), steps=4, accumulation_steps=2, run_eagerly=True)
    assert_same_weights(graph, eager)
    for trainer in (one, two):
        (seed,) = [v for v in trainer.model.variables if "seed" in v.path]
        assert int(seed.numpy()[1]) == 8


def test_accumulating_twice_gives_the_same_bits():
    a, b = dense_model(), dense_model()
    for model in (a, b):
        train(model, dataset(X, Y, batch=10).repeat(), steps=5, accumulation_steps=2)
    assert_identical_weights(a, b)
