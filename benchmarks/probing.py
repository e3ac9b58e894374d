"""What probing costs: `python -m benchmarks.probing` prints the tables as Markdown.

Every figure is a ratio of two programs that take turns in one process; the median over the rounds is printed,
with the range. CPU only. Settings: `--rounds`, `--only <table>`.
"""

import argparse
import os
import resource
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from models import LoopRNN
from trainer.probing import ProbeSession, probe, recurrent_loop

FEATURES = 32


def interleaved(programs, rounds, seconds=0.4):
    """{name: seconds per call, one for each round}; all programs take turns in each round."""
    repeats = {}
    for name, program in programs.items():
        program()
        start = time.perf_counter()
        program()
        repeats[name] = max(1, int(seconds / (time.perf_counter() - start)))
    times = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                program()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return times


def ratio(times, name, base):
    """Median and range of the ratios of each round."""
    ratios = np.array(times[name]) / np.array(times[base])
    return f"{np.median(ratios):.2f} ({ratios.min():.2f}–{ratios.max():.2f})"


def make_model(kind, units, length):
    layers = {
        "LSTM": lambda: keras.layers.LSTM(units, return_sequences=True),
        "GRU": lambda: keras.layers.GRU(units, return_sequences=True),
        "LoopRNN(LSTMCell)": lambda: LoopRNN(keras.layers.LSTMCell(units), return_sequences=True),
        "LoopRNN(GRUCell)": lambda: LoopRNN(keras.layers.GRUCell(units), return_sequences=True),
    }
    return keras.Sequential([keras.Input((length, FEATURES)), layers[kind](), keras.layers.Dense(1)])


def make_update(model, batch, length, probed=False, jit_compile=False):
    """One whole update: forward, loss, backward, Adam; probed with all that is logged."""
    generator = np.random.default_rng(0)
    x = tf.constant(generator.normal(size=[batch, length, FEATURES]).astype("float32"))
    y = tf.constant(generator.normal(size=[batch, length, 1]).astype("float32"))
    optimizer = keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function(jit_compile=jit_compile, autograph=False)
    def update(x, y):
        session = ProbeSession(model) if probed else None
        with tf.GradientTape() as tape:
            if probed:
                with session:
                    outputs = model(x, training=True)
            else:
                outputs = model(x, training=True)
            loss = tf.reduce_mean(tf.square(outputs - y))
        gradients = tape.gradient(loss, variables + (session.sources if probed else []))
        optimizer.apply(gradients[: len(variables)], model.trainable_variables)
        return loss, session.totals(gradients[len(variables) :], batch) if probed else {}

    return lambda: float(update(x, y)[0])


def table_updates(rounds):
    """A fully probed update against a plain one."""
    print("\n### A fully probed update against the plain one\n")
    print(
        "| layer | batch | time | units | XLA | plain ms | probed / plain | wanted |\n|---|---|---|---|---|---|---|---|"
    )
    cases = [("LSTM", 32, 200, 128, "≤ 1.20"), ("LSTM", 64, 50, 256, "≤ 1.10"), ("GRU", 8, 1600, 16, "≤ 1.40")]
    for kind, batch, length, units, wanted in cases:
        for jit_compile in (False, True):
            model = make_model(kind, units, length)
            programs = {
                "plain": make_update(model, batch, length, jit_compile=jit_compile),
                "probed": make_update(model, batch, length, probed=True, jit_compile=jit_compile),
            }
            times = interleaved(programs, rounds)
            print(
                f"| {kind} | {batch} | {length} | {units} | {'yes' if jit_compile else 'no'} "
                f"| {1e3 * np.median(times['plain']):.1f} | {ratio(times, 'probed', 'plain')} "
                f"| {'' if jit_compile else wanted} |",
                flush=True,
            )


def table_growth(rounds):
    """Cost per time step of long sequences against short ones."""
    print("\n### Cost per time step at T = 6,400 against T = 400\n")
    print("| what | batch | units | probed, µs per time step at 400 | at 6,400 | growth | plain growth | wanted |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, wanted in [("LSTM", "≤ 1.50"), ("GRU", "≤ 1.50"), ("LoopRNN(LSTMCell)", "≤ 1.50")]:
        programs = {}
        for length in (400, 6400):
            model = make_model(kind, 16, length)
            programs[f"probed {length}"] = make_update(model, 8, length, probed=True)
            programs[f"plain {length}"] = make_update(model, 8, length)
        _print_growth(f"{kind} layer", 8, 16, interleaved(programs, rounds), wanted)
    for name, make in [("`recurrent_loop`", make_own_loop), ("`probe` in a `tf.while_loop`", make_user_loop)]:
        programs = {}
        for length in (400, 6400):
            programs[f"probed {length}"] = make(32, length, 16, True)
            programs[f"plain {length}"] = make(32, length, 16, False)
        wanted = "≤ 1.50" if make is make_own_loop else "printed"
        _print_growth(name, 32, 16, interleaved(programs, rounds), wanted)


def _print_growth(name, batch, units, times, wanted):
    each = {key: 1e6 * np.array(values) / int(key.split()[1]) for key, values in times.items()}
    growths = [np.median(each[f"{kind} 6400"] / each[f"{kind} 400"]) for kind in ("probed", "plain")]
    print(
        f"| {name} | {batch} | {units} | {np.median(each['probed 400']):.0f} | "
        f"{np.median(each['probed 6400']):.0f} "
        f"| {growths[0]:.2f} | {growths[1]:.2f} | {wanted} |",
        flush=True,
    )


def _weights(units):
    generator = np.random.default_rng(0)
    return [tf.Variable(generator.normal(size=[units, units]).astype("float32") / units**0.5) for _ in range(2)]


def _differentiated(forward, variables, probed):
    @tf.function(autograph=False)
    def update(x):
        session = ProbeSession(capacity={"hidden": x.shape[1], "weight": x.shape[1]}) if probed else None
        with tf.GradientTape() as tape:
            if probed:
                with session:
                    state = forward(x)
            else:
                state = forward(x)
            loss = tf.reduce_mean(tf.square(state))
        gradients = tape.gradient(loss, variables + (session.sources if probed else []))
        totals = session.totals(gradients[len(variables) :], 32.0) if probed else {}
        return loss, gradients[: len(variables)], totals

    return update


def make_own_loop(batch, length, units, probed):
    """A step function of a user's on our loop, two probes in it."""
    kernel, recurrent = _weights(units)

    def forward(x):
        def step(t, inputs, states):
            weight = probe("weight", tf.convert_to_tensor(recurrent), t, batched=False)
            hidden = probe("hidden", tf.tanh(inputs @ kernel + states[0] @ weight), t)
            return hidden, [hidden]

        return recurrent_loop(step, x, [tf.zeros([batch, units])], return_sequences=False)[0]

    update = _differentiated(forward, [kernel, recurrent], probed)
    x = tf.constant(np.random.default_rng(0).normal(size=[batch, length, units]).astype("float32"))
    return lambda: float(update(x)[0])


def make_user_loop(batch, length, units, probed):
    """The same in a `tf.while_loop` that knows nothing of us."""
    kernel, recurrent = _weights(units)

    def forward(x):
        slices = tf.TensorArray(tf.float32, length).unstack(tf.transpose(x, [1, 0, 2]))

        def body(t, state):
            weight = probe("weight", tf.convert_to_tensor(recurrent), t, batched=False)
            return t + 1, probe("hidden", tf.tanh(slices.read(t) @ kernel + state @ weight), t)

        initial = (tf.constant(0), tf.zeros([batch, units]))
        return tf.while_loop(lambda t, _: t < length, body, initial, maximum_iterations=length)[1]

    update = _differentiated(forward, [kernel, recurrent], probed)
    x = tf.constant(np.random.default_rng(0).normal(size=[batch, length, units]).astype("float32"))
    return lambda: float(update(x)[0])


def make_jacobian(batch, length, units, how):
    """Norms by time step of an LSTM layer: by probes, or by `tape.jacobian` with respect to one copy of the
    weights per step.
    """
    model = make_model("LSTM", units, length)
    if how == "probes":
        return make_update(model, batch, length, probed=True)
    x = tf.constant(np.random.default_rng(0).normal(size=[batch, length, FEATURES]).astype("float32"))

    @tf.function(autograph=False)
    def jacobian(x):
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(model(x, training=True)), axis=[0, 2])
        rows = tape.jacobian(losses, [variable.value for variable in model.trainable_variables])
        return [tf.reduce_sum(tf.square(row), axis=list(range(1, row.shape.rank))) for row in rows]

    return lambda: float(jacobian(x)[0][0])


def table_jacobian(rounds):
    """Against `tape.jacobian`; memory is the peak of a process of its own."""
    print("\n### Norms by time step: probes against `tape.jacobian` (LSTM, T = 100, batch 32, 64 units)\n")
    programs = {how: make_jacobian(32, 100, 64, how) for how in ("probes", "jacobian")}
    times = interleaved(programs, rounds)
    speed = np.median(np.array(times["jacobian"]) / np.array(times["probes"]))
    memory = {how: _peak_memory(how) for how in ("nothing", "probes", "jacobian")}
    used = {how: memory[how] - memory["nothing"] for how in ("probes", "jacobian")}
    print("| | probes | `tape.jacobian` | ratio | wanted |\n|---|---|---|---|---|")
    print(
        f"| ms | {1e3 * np.median(times['probes']):.0f} | {1e3 * np.median(times['jacobian']):.0f} | "
        f"{speed:.0f} × faster | ≥ 20 |"
    )
    print(
        f"| peak MB over an idle process | {used['probes']:.0f} | {used['jacobian']:.0f} | "
        f"{used['probes'] / used['jacobian']:.2f} | ≤ 0.50 |"
    )


def _peak_memory(how):
    command = [sys.executable, "-m", "benchmarks.probing", "--memory", how]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_memory(how):
    if how == "nothing":
        make_model("LSTM", 64, 100)(tf.zeros([1, 100, FEATURES]))
    else:
        program = make_jacobian(32, 100, 64, how)
        for _ in range(3):
            program()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def table_layers(rounds):
    """`LoopRNN` against the Keras layer."""
    print("\n### `models.LoopRNN` against the Keras layer (a plain update)\n")
    print("| cell | batch | time | units | LoopRNN / Keras | with XLA |\n|---|---|---|---|---|---|")
    for kind, batch, length, units in [("LSTM", 32, 200, 128), ("LSTM", 64, 50, 256), ("GRU", 8, 1600, 16)]:
        ratios = []
        for jit_compile in (False, True):
            programs = {
                name: make_update(make_model(name, units, length), batch, length, jit_compile=jit_compile)
                for name in (kind, f"LoopRNN({kind}Cell)")
            }
            times = interleaved(programs, rounds)
            ratios.append(ratio(times, f"LoopRNN({kind}Cell)", kind))
        print(f"| {kind} | {batch} | {length} | {units} | {ratios[0]} | {ratios[1]} |", flush=True)


TABLES = {"updates": table_updates, "growth": table_growth, "jacobian": table_jacobian, "layers": table_layers}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=TABLES)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print_memory(arguments.memory)
        return
    for name, table in TABLES.items():
        if arguments.only in (None, name):
            table(arguments.rounds)


if __name__ == "__main__":
    main()
