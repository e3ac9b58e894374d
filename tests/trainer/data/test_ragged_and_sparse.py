"""Ragged and sparse batches through everything, against the same data as dense arrays."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses
from tests.trainer.tools import assert_same_weights

RNG = np.random.default_rng(0)
ROWS = tf.ragged.constant([RNG.integers(1, 9, size=size).tolist() for size in (3, 1, 4, 2, 5, 2, 1, 3)])
WIDE = np.where(RNG.random((8, 6)) < 0.4, RNG.normal(size=(8, 6)), 0).astype("float32")
Y = RNG.normal(size=(8, 1)).astype("float32")


class Bag(keras.Model):
    """The mean of the embeddings of a row: of ragged numbers, or of dense ones with zeros at the end."""

    def __init__(self):
        super().__init__(name="bag")
        self.table = self.add_weight(shape=(10, 4), name="table", initializer=keras.initializers.RandomNormal(seed=1))
        self.readout = keras.layers.Dense(1, name="out", kernel_initializer=keras.initializers.RandomNormal(seed=2))

    def call(self, rows):
        if isinstance(rows, tf.RaggedTensor):
            found = tf.ragged.map_flat_values(lambda numbers: tf.gather(self.table, numbers), rows)
            return self.readout(tf.reduce_mean(found, axis=1))
        counted = tf.cast(rows > 0, tf.float32)[..., tf.newaxis]
        found = tf.reduce_sum(tf.gather(self.table, rows) * counted, axis=1)
        return self.readout(found / tf.reduce_sum(counted, axis=1))


def wide():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")]
    return keras.Sequential([keras.Input((6,)), *layers])


# (model, data as they are, the same data as dense arrays)
KINDS = {"ragged": (Bag, ROWS, ROWS.to_tensor()), "sparse": (wide, tf.sparse.from_dense(WIDE), WIDE)}
OPTIONS = {
    "plain": {},
    "accumulated": {"accumulation_steps": 2},
    "auto": {"accumulation_steps": "auto"},
    "clipped, averaged": {"clip_norm": 0.1, "ema_decay": 0.9},
    "eager": {"run_eagerly": True},
    "examined": {"health_every": 1, "health": ("activations", "histograms")},
}


def trainers(kind, **options):
    made, given, dense = KINDS[kind]
    return [(Trainer(made(), keras.optimizers.SGD(0.1), {"error": "mse"}, **options), x) for x in (given, dense)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_training_equals_that_of_dense_data(kind, options):
    pairs = trainers(kind, **options)
    for trainer, x in pairs:
        trainer.fit(tf.data.Dataset.from_tensor_slices((x, Y)).batch(4).repeat(), steps=4, progress=False)
    assert_same_weights(pairs[0][0].model, pairs[1][0].model)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_in_fit_evaluate_and_predict(kind):
    (given, x), (dense, plain) = trainers(kind)
    for trainer, data in ((given, x), (dense, plain)):
        trainer.fit((data, Y), epochs=2, batch_size=3, progress=False)
    assert_same_weights(given.model, dense.model)
    assert given.evaluate((x, Y), batch_size=3) == pytest.approx(dense.evaluate((plain, Y), batch_size=3), rel=1e-5)
    np.testing.assert_allclose(given.predict(x, batch_size=3), dense.predict(plain, batch_size=3), rtol=1e-5)
    named = given.evaluate({"first": (x, Y), "second": (x, Y)})
    assert named["first_loss"] == named["second_loss"] == pytest.approx(given.evaluate((x, Y))["loss"])


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_a_function_and_a_resume(kind, tmp_path):
    (given, x), (dense, plain) = trainers(kind)
    part = lambda x, a, b: tf.sparse.slice(x, [a, 0], [b - a, 6]) if kind == "sparse" else x[a:b]  # noqa: E731
    batches = [(part(x, 0, 4), Y[:4]), (part(x, 4, 7), Y[4:7])]
    given.fit(lambda: iter(batches), epochs=3, progress=False)
    dense.fit(lambda: iter([(plain[:4], Y[:4]), (plain[4:7], Y[4:7])]), epochs=3, progress=False)
    assert_same_weights(given.model, dense.model)
    parts = [trainer for _ in range(2) for trainer, _ in trainers(kind)[:1]]

    def stream():
        return tf.data.Dataset.from_tensor_slices((x, Y)).shuffle(8, seed=1).batch(4).repeat()

    parts[0].fit(stream(), steps=3, workdir=tmp_path, progress=False)
    parts[1].fit(stream(), steps=5, workdir=tmp_path, progress=False)
    whole, _ = trainers(kind)[0]
    whole.fit(stream(), steps=5, progress=False)
    assert_same_weights(whole.model, parts[1].model, tolerance=0)


class PerElement(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = self.add_weight(shape=(10,), name="table", initializer=keras.initializers.RandomNormal(seed=1))

    def call(self, rows):
        return tf.ragged.map_flat_values(lambda numbers: tf.gather(self.table, numbers), rows)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_ragged_loss_is_the_mean_over_its_elements(weighted, parts):
    """NumPy's mean over all elements of the update, weighted by rows."""
    weight = np.arange(1.0, 9.0, dtype="float32")

    class Squares(Trainer):
        def compute_losses(self, batch, training):
            rows, own = batch
            values = tf.square(self.model(rows) - 1.0)
            return {"error": (values, own) if weighted else values, "added": losses.summed(values)}

    trainer = Squares(PerElement(), keras.optimizers.SGD(0.0), accumulation_steps=parts)
    data = tf.data.Dataset.from_tensor_slices((ROWS, weight)).batch(8 // parts)
    history = trainer.fit(data, epochs=1, progress=False).history
    table = trainer.model.table.numpy()
    elements = [(table[number] - 1) ** 2 for row in ROWS.to_list() for number in row]
    own = [w if weighted else 1.0 for row, w in zip(ROWS.to_list(), weight, strict=True) for _ in row]
    assert history["error"] == pytest.approx([np.average(elements, weights=own)], rel=1e-5)
    if parts == 1:
        assert history["added"] == pytest.approx([np.sum(elements)], rel=1e-5)
    found = trainer.predict(data.map(lambda rows, _: rows))
    assert [row.tolist() for row in found] == [[table[number] for number in row] for row in ROWS.to_list()]
