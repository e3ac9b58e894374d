"""`Trainer.fit` against hand-written loops and `keras.Model.fit`: time per update, in one process.

python -m benchmarks.overhead
"""

import os
import statistics
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.measure import Clock, interleave, machine, row, table
from looptape import Trainer


def mlp():
    return keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def lstm():
    return keras.Sequential([keras.Input((100, 2)), keras.layers.LSTM(64), keras.layers.Dense(1)])


def mlp_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6400, 32)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(64, drop_remainder=True).cache()


def lstm_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(640, 100, 2)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, 0, :1])).batch(32, drop_remainder=True).cache()


def hand_written(model, dataset, per_call, safe):
    """A `tf.function` loop with `per_call` updates per call; `safe` adds the global norm and a finite check."""
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    iterator = iter(dataset)

    @tf.function
    def call(iterator):
        total = tf.zeros([])
        for _ in tf.range(per_call):
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            gradients = tape.gradient(loss, model.trainable_variables)
            if safe:
                norm = tf.linalg.global_norm(gradients)
                if tf.math.is_finite(norm):
                    optimizer.apply(gradients, model.trainable_variables)
            else:
                optimizer.apply(gradients, model.trainable_variables)
            total += loss
        return total / per_call

    def run(updates):
        start = time.perf_counter()
        for _ in range(updates // per_call):
            float(call(iterator))
        return time.perf_counter() - start

    return run


def looptape(model, dataset, per_call, workdir, **options):
    trainer = Trainer(model, keras.optimizers.Adam(1e-3), {"error": keras.losses.MeanSquaredError()}, **options)

    def run(updates):
        clock = Clock()
        trainer.fit(
            dataset,
            steps=trainer._engine.counters.step + updates,
            log_every=per_call,
            workdir=workdir,
            callbacks=[clock],
            progress=False,
        )
        return clock.seconds

    return run


def keras_fit(model, dataset, per_call=1):
    model.compile(keras.optimizers.Adam(1e-3), loss="mse", steps_per_execution=per_call)

    def run(updates):
        clock = Clock()
        model.fit(dataset, epochs=1, steps_per_epoch=updates, verbose=0, callbacks=[clock])
        return clock.seconds

    return run


INSTANCES = 3


def compare(name, make_model, dataset, per_call, updates, rounds, limits):
    """Rows of the table.

    Each contestant is built several times, because two instances of one program differ by up to 15 % for good (where
    their memory lies, how their threads fall), and a round is the mean over its instances. Rounds are short and many:
    the noise of a shared machine comes in waves of seconds.
    """
    dataset = dataset.repeat()
    makers = {
        "Trainer.fit": lambda: looptape(make_model(), dataset, per_call, tempfile.mkdtemp(dir=workdir)),
        "safe loop": lambda: hand_written(make_model(), dataset, per_call, safe=True),
        "bare loop": lambda: hand_written(make_model(), dataset, per_call, safe=False),
        "Keras fit": lambda: keras_fit(make_model(), dataset),
    }
    with tempfile.TemporaryDirectory() as workdir:
        contestants = {(key, instance): make() for instance in range(INSTANCES) for key, make in makers.items()}
        for run in contestants.values():
            run(2 * per_call)
        timed_runs = {key: (lambda run=run: run(updates) / updates) for key, run in contestants.items()}
        single = interleave(timed_runs, rounds)
    times = {
        key: [statistics.mean(own) for own in zip(*(single[key, i] for i in range(INSTANCES)), strict=True)]
        for key in makers
    }
    for key, values in times.items():
        print(f"{name}: {key} {1e6 * np.median(values):.0f} µs per update")
    return [[name, *row(times, "Trainer.fit", base, limit)] for base, limit in limits.items()]


def main():
    limits = {"safe loop": 1.05, "bare loop": 1.4, "Keras fit": 0.5}
    rows = compare("MLP 32-64-64-1, batch 64", mlp, mlp_data(), 100, 300, 11, limits)
    limits = {"safe loop": 1.02, "bare loop": 1.03, "Keras fit": 0.9}
    rows += compare("LSTM 64, batch 32, T 100", lstm, lstm_data(), 25, 25, 11, limits)
    print(machine())
    print(table(["model", "compared", "ratio", "spread", "limit", "reached"], rows))


if __name__ == "__main__":
    main()
