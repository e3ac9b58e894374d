"""What is trained on one device, on two, and in two processes, to be compared."""

import time

import keras
import numpy as np
import tensorflow as tf

from looptape import IndexedData, ShardedData, Trainer, losses
from tests.trainer.tools import dataset

UPDATES = 40
RNG = np.random.default_rng(3)
X = RNG.normal(size=(36, 5, 3)).astype("float32")
Y = np.stack([X[:, :, 0].sum(1), X[:, -1, 1]], axis=1).astype("float32")
MASK = (np.arange(5) < RNG.integers(1, 6, size=(36, 1))).astype("float32")


def small_model(*extra):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, 3))
    hidden = keras.layers.Dense(4, "tanh", name="hidden")(keras.layers.Flatten()(inputs))
    for layer in extra:
        hidden = layer()(hidden)
    return keras.Model(inputs, keras.layers.Dense(2, name="out")(hidden))


def normalized():
    return small_model(keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.5, seed=3))


def stateful():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, 3), batch_size=12)
    hidden = keras.layers.LSTM(4, stateful=True)(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="out")(hidden))


class Two(Trainer):
    """Losses of different masks, so that each has a divisor of its own; a scalar; something logged."""

    def compute_losses(self, batch, training):
        x, y, mask = batch
        out = self.model(x, training=training)
        error = tf.square(out - y)
        self.update_metrics(y, out)
        self.log("spread", tf.reduce_mean(error))
        return {
            "masked": (error[:, :1] * tf.ones_like(mask), mask),
            "second": tf.abs(error[:, 1]) + 0.1,
            "mean": 0.1 * tf.reduce_mean(error),
        }


class Rounded(Two):
    """Sends gradients of 8 significant bits."""

    communication_dtype = "bfloat16"


class ByTensorFlow(Two):
    """Sums gradients by TensorFlow's collective operations."""

    communication = "tensorflow"


class Counted(keras.metrics.Metric):
    """The number of examples: a sum, which a merge by the mean would halve."""

    def __init__(self, dtype="float32"):
        super().__init__()
        self.count = self.add_variable((), "zeros", dtype=dtype, name="count")

    def update_state(self, targets, outputs, sample_weight=None):
        self.count.assign_add(tf.cast(tf.shape(outputs)[0], self.count.dtype))

    def result(self):
        return self.count


def made(strategy, cls=Two, model=small_model, optimizer=lambda: keras.optimizers.SGD(0.02), **options):
    with strategy.scope() if strategy else tf.init_scope():
        metrics = {"mae": keras.metrics.MeanAbsoluteError(), "count": Counted()}
        combiner = options.pop("combiner", lambda: None)()
        return cls(model(), optimizer(), metrics=metrics, strategy=strategy, combiner=combiner, **options)


def batched(batch, x=X):
    return dataset(x, Y, MASK, batch=batch)


def shuffled(seed=4, batch=13):
    """Endless; batches of 13 examples do not divide by two."""
    tf.random.set_seed(4)  # a part of what a shuffle is seeded with
    return tf.data.Dataset.from_tensor_slices((X, Y, MASK)).shuffle(36, seed=seed).repeat().batch(batch)


def other_last(rank):
    """`X` with another last example on each worker."""
    x = X.copy()
    x[-1] += rank
    return x


def broken():
    """Endless batches of 12, of which the second of each pass has a NaN in its last row: the second replica's."""
    x = X.copy()
    x[23] = np.nan
    return batched(12, x).repeat()


def by_index(x=X, **options):
    """Endless in training; batches of 13, 13 and 10 examples in each pass."""
    arrays = [tf.constant(array) for array in (x, Y, MASK)]
    return IndexedData(36, lambda index: tuple(array[index] for array in arrays), **{"batch_size": 13, **options})


def hanging(rank, path):
    """As `by_index`; the second worker leaves a file and waits for ever when it makes its 60th example."""
    made = []

    def late(value):
        made.append(value)
        if rank == 1 and len(made) == 60:
            open(path, "w").close()
            time.sleep(3600)
        return value

    data = by_index(num_parallel_calls=1)
    function = data.function
    data.function = lambda index: function(tf.ensure_shape(tf.numpy_function(late, [index], tf.int64), []))
    return data


def sharded():
    """Batches of 5 of every n-th example, each worker's in an order of its own; of two workers, 18 examples each."""

    def shard(rank, workers):
        tf.random.set_seed(4)  # a part of what a shuffle is seeded with
        data = tf.data.Dataset.from_tensor_slices((X, Y, MASK)).shard(workers, rank)
        return data.shuffle(36, seed=rank).batch(5)

    return ShardedData(shard)


def unseeded():
    """Batches that nobody can save the position of, and that differ from process to process."""
    rng = np.random.default_rng()

    def shuffled():
        while True:
            rows = rng.permutation(36)[:13]
            yield X[rows], Y[rows], MASK[rows]

    return shuffled


def ending(passes):
    """Batches whose number nobody knows before: three in each of so many passes."""
    return batched(13).repeat(passes).filter(lambda *_: True)


def held_out():
    return batched(13)


def adam():
    return keras.optimizers.Adam(0.003)


CASES = {
    "sgd": {},
    "adam, seven updates per call": {"optimizer": adam, "steps_per_call": 7},
    "clip": {"clip_norm": 0.05, "optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9)},
    "accumulation": {"accumulation_steps": 3, "optimizer": adam, "ema_decay": 0.9},
    "uncertainty": {"combiner": lambda: losses.Uncertainty()},
    "dwa": {"combiner": lambda: losses.DynamicWeightAverage(), "accumulation_steps": 2},
    "pcgrad": {"combiner": lambda: losses.PCGrad(), "clip_norm": 1.0},
    # It looks at the same data a second time after the update, accumulated and with an empty share.
    "famo": {"combiner": lambda: losses.FAMO(), "accumulation_steps": 2},
    # Of processes only:
    "everything": {"optimizer": adam, "accumulation_steps": 2, "ema_decay": 0.9, "model": normalized, "clip_norm": 1.0},
    "other data": {},
    "unseeded": {"steps_per_call": 2},
    "indexed": {"optimizer": adam, "accumulation_steps": 2, "ema_decay": 0.9},
    "stateful": {"model": stateful},
    "other index": {},
    "other example": {"steps_per_call": 1},
    "ends earlier": {"steps_per_call": 5},
    "evaluates fewer": {},
    "evaluates other": {},
    "evaluates other later": {},
    "evaluates other by index": {},
    "waiting": {"optimizer": adam, "steps_per_call": 7},
    "by tensorflow": {"optimizer": adam, "cls": ByTensorFlow},
    "differing": {},
    # Batches of two rows: of three workers one gets none, of four two.
    "few": {"optimizer": adam, "accumulation_steps": 2, "steps_per_call": 5},
    "sharded": {"optimizer": adam},
    "bfloat16": {"optimizer": adam, "cls": Rounded},
    "nan": {"optimizer": adam, "model": normalized},
}
REPLICATED = list(CASES)[: list(CASES).index("everything")]
