"""What probing costs: a probed update against a plain one, long sequences against short ones, against `tape.jacobian`.

    python -m benchmarks.probing [--rounds 5] [--only updates|growth|jacobian]

An update is that of `Trainer.fit` with Adam and event files; a probed one reports and writes in addition all that is
logged.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.measure import machine, peak_memory, ratio, table
from benchmarks.recurrent import by_keras, by_trainer, measured
from looptape.models import LoopRNN
from looptape.trainer.probing import ProbeSession, probe, recurrent_loop

FEATURES = 32
PER_CALL = 10
CASES = [("LSTM", 32, 200, 128, 1.20), ("LSTM", 64, 50, 256, 1.10), ("GRU", 8, 1600, 16, 1.40)]


def calls(program):
    """run(updates) -> seconds of that many calls."""

    def run(updates):
        start = time.perf_counter()
        for _ in range(updates):
            program()
        return time.perf_counter() - start

    return run


def make_model(kind, units, length):
    layers = {
        "LSTM": lambda: keras.layers.LSTM(units, return_sequences=True),
        "GRU": lambda: keras.layers.GRU(units, return_sequences=True),
        "LoopRNN(LSTMCell)": lambda: LoopRNN(keras.layers.LSTMCell(units), return_sequences=True),
    }
    return keras.Sequential([keras.Input((length, FEATURES)), layers[kind](), keras.layers.Dense(1)])


def data(batch, length):
    generator = np.random.default_rng(0)
    shapes = (batch, length, FEATURES), (batch, length, 1)
    return tf.data.Dataset.from_tensors(tuple(generator.normal(size=s).astype("float32") for s in shapes)).repeat()


def training(kind, batch, length, units, probed):
    """run(updates) -> seconds, by `Trainer.fit`: every update probed, or none. Writes event files."""
    model = make_model(kind, units, length)
    return by_trainer(model, data(batch, length), tempfile.mkdtemp(), PER_CALL, probe_every=int(probed))


def table_updates(rounds):
    """An update in which everything is probed (states, inputs, weights) against a plain one and one of Keras's."""
    rows = []
    for kind, batch, length, units, limit in CASES:
        contestants = {
            "probed": training(kind, batch, length, units, True),
            "plain": training(kind, batch, length, units, False),
            "Keras, plain": by_keras(make_model(kind, units, length), data(batch, length), PER_CALL),
        }
        times = measured(contestants, rounds, PER_CALL)
        what = f"{kind} {units}, batch {batch}, T {length}"
        for base, most in (("plain", limit), ("Keras, plain", None)):
            median, low, high = ratio(times, "probed", base)
            both = " / ".join(f"{1e3 * statistics.median(times[name]):.1f}" for name in ("probed", base))
            reached = "" if most is None else ("yes" if median <= most else "**no**")
            wanted = "" if most is None else f"≤ {most}"
            rows.append([what, f"probed / {base}", both, f"{median:.2f}", f"{low:.2f}–{high:.2f}", wanted, reached])
    print(table(["update", "compared", "ms", "ratio", "spread", "limit", "reached"], rows), flush=True)


def table_growth(rounds):
    """Cost per time step at T = 6,400 against T = 400, probed and plain."""
    rows = []
    for kind in ("LSTM", "GRU", "LoopRNN(LSTMCell)"):

        def make(length, probed, kind=kind):
            return training(kind, 8, length, 16, probed)

        rows.append(_growth(f"{kind}, batch 8, 16 units", make, rounds, 1.5))
    rows.append(_growth("`recurrent_loop` with two probes, batch 32, 16 units", make_own_loop, rounds, 1.5))
    rows.append(_growth("`tf.while_loop` with two probes, batch 32, 16 units", make_user_loop, rounds, None))
    header = ["loop", "probed, µs per time step at 400", "at 6,400", "growth", "plain growth", "limit", "reached"]
    print(table(header, rows), flush=True)


def _growth(name, make, rounds, limit):
    contestants = {(probed, length): make(length, probed) for probed in (True, False) for length in (400, 6400)}
    times = measured(contestants, rounds, PER_CALL)
    each = {key: [1e6 * seconds / key[1] for seconds in values] for key, values in times.items()}
    probed, plain = [ratio(each, (kind, 6400), (kind, 400))[0] for kind in (True, False)]
    middle = [f"{statistics.median(each[True, length]):.0f}" for length in (400, 6400)]
    reached = "printed" if limit is None else ("yes" if probed <= limit else "**no**")
    return [name, *middle, f"{probed:.2f}", f"{plain:.2f}", "" if limit is None else f"≤ {limit}", reached]


def _weights(units):
    generator = np.random.default_rng(0)
    return [tf.Variable(generator.normal(size=[units, units]).astype("float32") / units**0.5) for _ in range(2)]


def _differentiated(forward, variables, length, probed, batch=32, units=16):
    x = tf.constant(np.random.default_rng(0).normal(size=[batch, length, units]).astype("float32"))

    @tf.function(autograph=False)
    def update(x):
        session = ProbeSession(capacity={"hidden": length, "weight": length})
        with tf.GradientTape() as tape:
            if probed:
                with session:
                    state = forward(x)
            else:
                state = forward(x)
            loss = tf.reduce_mean(tf.square(state))
        gradients = tape.gradient(loss, variables + (session.sources if probed else []))
        totals = session.totals(gradients[len(variables) :], float(batch)) if probed else {}
        return loss, gradients[: len(variables)], totals

    return calls(lambda: float(update(x)[0]))


def make_own_loop(length, probed):
    """A step function of a user's on our loop, two probes in it."""
    kernel, recurrent = _weights(16)

    def forward(x):
        def step(t, inputs, states):
            weight = probe("weight", tf.convert_to_tensor(recurrent), t, batched=False)
            hidden = probe("hidden", tf.tanh(inputs @ kernel + states[0] @ weight), t)
            return hidden, [hidden]

        return recurrent_loop(step, x, [tf.zeros([32, 16])], return_sequences=False, name="loop")[0]

    return _differentiated(forward, [kernel, recurrent], length, probed)


def make_user_loop(length, probed):
    """The same in a `tf.while_loop` that knows nothing of us."""
    kernel, recurrent = _weights(16)

    def forward(x):
        slices = tf.TensorArray(tf.float32, length).unstack(tf.transpose(x, [1, 0, 2]))

        def body(t, state):
            weight = probe("weight", tf.convert_to_tensor(recurrent), t, batched=False)
            return t + 1, probe("hidden", tf.tanh(slices.read(t) @ kernel + state @ weight), t)

        initial = (tf.constant(0), tf.zeros([32, 16]))
        return tf.while_loop(lambda t, _: t < length, body, initial, maximum_iterations=length)[1]

    return _differentiated(forward, [kernel, recurrent], length, probed)


def make_norms(how):
    """Norms by time step, LSTM 64, batch 32, T 100: by probes in a whole update, or by `tape.jacobian` alone."""
    if how == "probes":
        return training("LSTM", 32, 100, 64, True)
    model = make_model("LSTM", 64, 100)
    x = tf.constant(np.random.default_rng(0).normal(size=[32, 100, FEATURES]).astype("float32"))

    @tf.function(autograph=False)
    def jacobian(x):
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(model(x, training=True)), axis=[0, 2])
        rows = tape.jacobian(losses, [variable.value for variable in model.trainable_variables])
        return [tf.reduce_sum(tf.square(row), axis=list(range(1, row.shape.rank))) for row in rows]

    return calls(lambda: float(jacobian(x)[0][0]))


def table_jacobian(rounds):
    """Against `tape.jacobian`: time, and peak memory in a process of its own over that of an idle one."""
    times = measured({how: make_norms(how) for how in ("probes", "jacobian")}, rounds, PER_CALL)
    faster, low, high = ratio(times, "jacobian", "probes")
    memory = {how: _peak_memory(how) for how in ("nothing", "probes", "jacobian")}
    used = {how: memory[how] - memory["nothing"] for how in ("probes", "jacobian")}
    share = used["probes"] / used["jacobian"]
    rows = [
        ["ms"] + [f"{1e3 * statistics.median(times[how]):.0f}" for how in ("probes", "jacobian")],
        ["peak MB"] + [f"{used[how]:.0f}" for how in ("probes", "jacobian")],
    ]
    rows[0] += [f"{faster:.0f} × faster ({low:.0f}–{high:.0f})", "≥ 20", "yes" if faster >= 20 else "**no**"]
    rows[1] += [f"{share:.2f}", "≤ 0.5", "yes" if share <= 0.5 else "**no**"]
    header = ["LSTM 64, batch 32, T 100", "a probed update", "`tape.jacobian`", "ratio", "limit", "reached"]
    print(table(header, rows), flush=True)


def _peak_memory(how):
    command = [sys.executable, "-m", "benchmarks.probing", "--memory", how]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_memory(how):
    """Peak memory of this process in MB after three calls; "nothing": after the plain model alone."""
    idle = calls(lambda: make_model("LSTM", 64, 100)(tf.zeros([1, 100, FEATURES])))
    run = idle if how == "nothing" else make_norms(how)
    run(3)
    print(peak_memory())


TABLES = {
    "updates": table_updates,
    "growth": table_growth,
    "jacobian": table_jacobian,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=TABLES)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print_memory(arguments.memory)
        return
    print(machine())
    for name, make_table in TABLES.items():
        if arguments.only in (None, name):
            print(f"\n{make_table.__doc__}\n")
            make_table(arguments.rounds)


if __name__ == "__main__":
    main()
