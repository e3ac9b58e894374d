"""What each combiner costs: time per update against the plain sum and against a hand-written loop, in one process.

    python -m benchmarks.combiners

A trunk of four layers of 512 units and five heads, one loss each, batches of 256. `shared` means that gradients are
compared at the trunk's output. The second table is the K x K part of each direction method by itself, with 20 losses
whose gradients are in general position, over 4 decades.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.measure import Clock, interleave, machine, ratio, row, table, timed
from looptape import Trainer, losses
from looptape.losses.combiners.numerics.gramian import gramian

HEADS, UNITS, BATCH, FEATURES = 5, 512, 256, 64
UPDATES, ROUNDS = 20, 9
PARTS = 4
BASE = "WeightedSum"
BY_VALUE = ("RandomWeights", "Uncertainty", "DynamicWeightAverage", "LogSum", "GeometricMean", "ReLoBRaLo")
BY_VALUE += ("STCH", "SoftAdapt")
BY_DIRECTION = ("PCGrad", "MGDA", "CAGrad", "ConFIG", "UPGrad", "DualProj", "PCD", "FairGrad", "NashMTL", "AlignedMTL")
BY_DIRECTION += ("IMTLG", "GradVac")
REWRITING = ("GradDrop", "DBMTL", "MomentumConFIG")
MANY, SMALL_LIMIT = 20, 1.0  # losses, and milliseconds for what is done with their Gramian


def model():
    keras.utils.set_random_seed(0)
    inputs = values = keras.Input((FEATURES,))
    for index in range(4):
        values = keras.layers.Dense(UNITS, activation="tanh", name=f"trunk_{index}")(values)
    return keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(values) for name in names()})


def names():
    return [f"task_{index}" for index in range(HEADS)]


def data(batch):
    x = np.random.default_rng(0).normal(size=(4 * batch, FEATURES)).astype("float32")
    targets = {name: x[:, index : index + 1] for index, name in enumerate(names())}
    return tf.data.Dataset.from_tensor_slices((x, targets)).batch(batch, drop_remainder=True).cache().repeat()


def trainer_of(combiner, shared=False, parts=1):
    """Function of a number of updates that gives the seconds they take."""
    named = {name: keras.losses.MeanSquaredError() for name in names()}
    trainer = Trainer(model(), keras.optimizers.SGD(1e-3), named, combiner=combiner, accumulation_steps=parts)
    trainer.shared_features = "trunk_3" if shared else None
    dataset = data(BATCH // parts)

    def run(updates):
        clock = Clock()
        trainer.fit(dataset, steps=trainer._engine.counters.step + updates, callbacks=[clock], progress=False)
        return clock.seconds

    return run


def hand_written(combiner):
    """A persistent tape, one gradient for each loss, the Gramian, and the weighted sum of the gradients."""
    net, optimizer = model(), keras.optimizers.SGD(1e-3)
    variables = [v.value for v in net.trainable_variables]
    optimizer.build(net.trainable_variables)
    combiner.build(names())
    iterator = iter(data(BATCH))

    @tf.function
    def call(iterator, updates):
        for _ in tf.range(updates):
            x, targets = next(iterator)
            with tf.GradientTape(persistent=True) as tape:
                outputs = net(x, training=True)
                each = [tf.reduce_mean(tf.square(outputs[name] - targets[name])) for name in names()]
            gradients = [tape.gradient(loss, variables, unconnected_gradients="zero") for loss in each]
            coefficients = tf.unstack(combiner.coefficients(tf.stack(each), None, gramian(gradients)))
            combined = [
                tf.add_n([c * g for c, g in zip(coefficients, column, strict=True)])
                for column in zip(*gradients, strict=True)
            ]
            if tf.math.is_finite(tf.linalg.global_norm(combined)):
                optimizer.apply(combined, net.trainable_variables)

    return lambda updates: timed(lambda: call(iterator, tf.constant(updates)))


def contestants():
    made = {BASE: trainer_of(None)}
    made |= {name: trainer_of(getattr(losses, name)()) for name in BY_VALUE}
    made["FAMO"] = trainer_of(losses.FAMO())
    made["GradNorm, every 10th update"] = trainer_of(losses.GradNorm(update_every=10))
    made["GradientBalance, every 10th update"] = trainer_of(losses.GradientBalance())
    made["NTKBalance, every 10th update"] = trainer_of(losses.NTKBalance())
    made |= {name: trainer_of(getattr(losses, name)()) for name in REWRITING}
    made["MGDA"] = trainer_of(losses.MGDA())
    made["hand-written MGDA"] = hand_written(losses.MGDA())
    made |= {f"{name}, shared": trainer_of(getattr(losses, name)(), shared=True) for name in BY_DIRECTION}
    made[f"WeightedSum, {PARTS} parts"] = trainer_of(None, parts=PARTS)
    made[f"ReLoBRaLo, {PARTS} parts"] = trainer_of(losses.ReLoBRaLo(), parts=PARTS)
    made[f"MGDA, {PARTS} parts"] = trainer_of(losses.MGDA(), parts=PARTS)
    return made


def small_problem(name):
    """Function of a number of calls that gives the seconds they take: coefficients from a Gramian of 20 losses."""
    combiner = getattr(losses, name)()
    combiner.build([f"loss_{index}" for index in range(MANY)])
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(16, MANY, 100)) * 10 ** rng.uniform(-2, 2, size=(16, MANY, 1))
    matrices = tf.constant(rows @ rows.transpose(0, 2, 1))
    ones = tf.ones([MANY])

    @tf.function(autograph=False)
    def call(count):
        def body(index, total):
            return index + 1, total + combiner.coefficients(ones, None, tf.gather(matrices, index % 16))

        return tf.while_loop(lambda index, _: index < count, body, (tf.constant(0), ones), parallel_iterations=1)

    return lambda calls: timed(lambda: call(tf.constant(calls)))


def small_problems():
    """Rows of the second table: milliseconds per call."""
    rows = []
    for name in BY_DIRECTION:
        run = small_problem(name)
        run(16)
        times = [1e3 * run(48) / 48 for _ in range(ROUNDS)]
        median = float(np.median(times))
        reached = "yes" if median <= SMALL_LIMIT else "**no**"
        rows.append([name, f"{median:.3f} ms", f"{min(times):.2f}–{max(times):.2f}", f"≤ {SMALL_LIMIT:g} ms", reached])
    return rows


def printed(times, name, base):
    """A row without a limit."""
    median, low, high = ratio(times, name, base)
    return [f"{name} / {base}", f"{median:.3f}", f"{low:.2f}–{high:.2f}", "", ""]


def main():
    runs = contestants()
    for run in runs.values():
        run(UPDATES)
    times = interleave({name: (lambda run=run: run(UPDATES) / UPDATES) for name, run in runs.items()}, ROUNDS)
    accumulated = f"WeightedSum, {PARTS} parts"
    rows = [row(times, name, BASE, 1.03) for name in BY_VALUE]
    rows.append(row(times, "MGDA", "hand-written MGDA", 1.1))
    rows += [row(times, f"{name}, shared", BASE, 1.35) for name in BY_DIRECTION]
    others = ("FAMO", "GradNorm, every 10th update", "GradientBalance, every 10th update")
    others += ("NTKBalance, every 10th update", "MGDA", *REWRITING)
    rows += [printed(times, name, BASE) for name in others]
    rows += [printed(times, f"{name}, {PARTS} parts", accumulated) for name in ("ReLoBRaLo", "MGDA")]
    print(machine())
    print(f"{HEADS} losses; {BASE} takes {1e3 * np.median(times[BASE]):.2f} ms per update")
    print(table(["compared", "ratio", "spread", "limit", "reached"], rows))
    print("\nWhat is done with the Gramian, by itself:\n")
    print(table([f"K x K part of {MANY} losses", "time", "spread", "limit", "reached"], small_problems()))


if __name__ == "__main__":
    main()
