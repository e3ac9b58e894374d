"""Makes every number and picture of `is-my-rnn-forgetting.md` (some minutes on two CPU cores).

    .venv/bin/python -m docs.make_forgetting

Trains four cells and a cure on the adding problem and on copy memory, looks at their gradients before and after, and
writes the tables between the markers of the guide.
"""

import math
import re
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from looptape.experiments.adding_problem import sequences
from looptape.losses import squared_error
from looptape.models import IdentityRNNCell, LoopRNN
from looptape.trainer import Trainer
from looptape.trainer.analysis import plots
from looptape.trainer.summaries import event_writer

DOCS = Path(__file__).resolve().parent
GUIDE = DOCS / "is-my-rnn-forgetting.md"
PICTURES = DOCS / "pictures"
UNITS, BATCH, STEPS, LENGTH = 32, 64, 800, 60
SYMBOLS, KINDS, DELAY = 5, 8, 20
EVERY = 20


class LongMemoryLSTM(keras.layers.LSTMCell):
    """The cure: gates that begin almost open for as long as the task lasts (Tallec and Ollivier, 2018)."""

    def __init__(self, units, length, **kwargs):
        super().__init__(units, unit_forget_bias=False, **kwargs)
        self.length = length

    def build(self, input_shape):
        super().build(input_shape)
        times = np.log(np.random.default_rng(0).uniform(1, self.length - 1, size=self.units))
        zeros = np.zeros(self.units)
        self.bias.assign(np.concatenate([-times, times, zeros, zeros]))


CELLS = {
    "plain": lambda length: keras.layers.SimpleRNNCell(UNITS),
    "identity": lambda length: IdentityRNNCell(UNITS),
    "LSTM": lambda length: keras.layers.LSTMCell(UNITS),
    "GRU": lambda length: keras.layers.GRUCell(UNITS),
    "LSTM, long memory": lambda length: LongMemoryLSTM(UNITS, length),
}
RATES = {"plain": 1e-3, "identity": 1e-3}  # what the unbounded and the plain cell can stand; 0.01 for the others


def adding(seed, size=BATCH):
    return sequences(size, LENGTH, [seed, 0])


def copying(seed, size=BATCH):
    """Symbols to remember, a delay, a signal; the symbols are to be repeated after it."""
    symbols = tf.random.stateless_uniform([size, SYMBOLS], [seed, 1], 0, KINDS, tf.int32)
    blank = tf.fill([size, DELAY + SYMBOLS], KINDS)
    signal = tf.one_hot([DELAY] * size, DELAY + SYMBOLS, dtype=tf.int32)
    inputs = tf.one_hot(tf.concat([symbols, blank + signal], axis=1), KINDS + 2)
    return inputs, tf.concat([tf.zeros([size, DELAY + SYMBOLS], tf.int32), symbols], axis=1)


def repeated(targets, outputs):
    """The cross-entropy of the repeated symbols; what comes before them has no weight."""
    values = keras.ops.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    weights = tf.concat([tf.zeros([DELAY + SYMBOLS]), tf.ones([SYMBOLS])], axis=0)
    return values, tf.broadcast_to(weights, tf.shape(values))


def make(task, name):
    """A trainer for a cell."""
    keras.utils.set_random_seed(1)
    length, features = (LENGTH, 2) if task == "adding" else (DELAY + 2 * SYMBOLS, KINDS + 2)
    inputs = keras.Input((length, features), batch_size=BATCH)
    state = LoopRNN(CELLS[name](length), return_sequences=task == "copy", name="loop")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1 if task == "adding" else KINDS)(state))
    losses = {"error": squared_error if task == "adding" else repeated}
    optimizer = keras.optimizers.Adam(RATES.get(name, 0.01))
    return Trainer(model, optimizer, losses, clip_norm=1.0, probe_every=EVERY, jit_compile=True)


def look(trainer, batch):
    """What one batch tells: norms [batch, time], mean norms, gains."""
    each = trainer.timestep_gradients(batch, per_example=True)["loop"]
    return {"norms": each["state"], "mean": np.nanmean(each["state"], axis=0), "gain": np.nanmean(each["gain"], axis=0)}


def horizon(mean):
    return int((mean > 0.01 * np.nanmax(mean)).sum())


def study(task, name):
    """Trains a cell; what was seen before and after, the rows over training, the held-out loss."""
    start = time.perf_counter()
    make_batch = adding if task == "adding" else copying
    trainer, batch = make(task, name), make_batch(10**6)
    before = look(trainer, batch)
    credit = [trainer.credit_matrix(batch)["loop"]] if task == "copy" else []
    data = tf.data.Dataset.counter().map(lambda i: make_batch(tf.cast(i, tf.int32))).prefetch(2)
    with tempfile.TemporaryDirectory() as workdir:
        trainer.fit(data, steps=STEPS, workdir=workdir, progress=False, log_every=STEPS)
        rows = [
            (step, tf.make_ndarray(value.tensor))
            for step, value in event_writer.read(Path(workdir) / "train")
            if value.tag == "timestep/loop/state"
        ]
    held_out = tf.data.Dataset.from_tensor_slices(make_batch(10**6 + 1, 16 * BATCH)).batch(BATCH)
    loss = trainer.evaluate(held_out)["error"]
    if task == "copy":
        credit.append(trainer.credit_matrix(batch)["loop"])
    advice = trainer.window_advice(batch, 10)["loop"] if task == "copy" else None
    found = {"before": before, "after": look(trainer, batch), "rows": rows, "loss": loss, "credit": credit}
    print(f"{task}, {name}: {loss:.4f} after {time.perf_counter() - start:.0f} s", flush=True)
    return found | {"advice": advice}


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def reach(mean):
    """How much of the gradient at the end is left at the start, as a power of ten."""
    ratio = mean[0] / mean[-1]
    return "0" if ratio == 0 else f"10^{math.log10(ratio):.1f}"


def summary(found, baseline):
    rows = []
    for name, own in found.items():
        before, after = own["before"], own["after"]
        rows.append(
            [
                name,
                reach(before["mean"]),
                f"{np.nanmedian(before['gain']):.2f}",
                horizon(before["mean"]),
                reach(after["mean"]),
                f"{np.nanmedian(after['gain']):.2f}",
                horizon(after["mean"]),
                f"{own['loss']:.4f}",
                "yes" if own["loss"] < 0.5 * baseline else "no",
            ]
        )
    header = ["cell", "first / last, start", "median gain", "horizon", "first / last, end", "median gain", "horizon"]
    return table([*header, "held-out loss", f"below half of {baseline:.3f}"], rows)


def windows_table(found):
    rows = []
    for name, own in found.items():
        advice = own["advice"]
        window = advice.window or f"more than {advice.length}"
        cells = [f"{advice.present_kept:.0%}", f"{advice.error:.0%}", f"{advice.cosine:.2f}", advice.reach, window]
        rows.append([name, *cells])
    header = ["cell", "kept by windows of 10", "error of the gradient", "cosine", "reach of a loss", "window for 95 %"]
    return table(header, rows)


def save(axes, name, title=None):
    if title:
        axes.set_title(title, fontsize=10)
    axes.figure.savefig(PICTURES / f"forgetting-{name}.png")


def draw(adding_found, copy_found):
    shown = adding_found
    save(plots.norms({n: own["before"]["norms"] for n, own in shown.items()}), "start", "Adding problem, at the start")
    save(plots.norms({n: own["after"]["norms"] for n, own in shown.items()}), "end", f"After {STEPS} steps")
    save(plots.gains({n: own["before"]["gain"] for n, own in shown.items()}), "gains", "Gain at the start")
    steps, rows = zip(*adding_found["GRU"]["rows"], strict=True)
    save(plots.over_training(steps, np.stack(rows)), "training", "GRU on the adding problem")
    for index, when in enumerate(("start", "end")):
        for name in ("GRU", "plain"):
            title = f"Copy memory, {name}, {'at the start' if index == 0 else f'after {STEPS} steps'}"
            save(plots.credit(copy_found[name]["credit"][index]), f"credit-{name.lower()}-{when}", title)


def two_losses():
    """Which loss drives which time step: adding, and naming the running maximum at every time step."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH, 2), batch_size=BATCH)
    states = LoopRNN(keras.layers.GRUCell(UNITS), return_sequences=True, name="loop")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(states))

    class Both(Trainer):
        def compute_losses(self, batch, training):
            x, total = batch
            outputs = self.model(x, training=training)
            maximum = tf.math.cumulative_logsumexp(20 * x[..., 0], axis=1) / 20
            return {"sum": tf.square(outputs[:, -1, :1] - total), "maximum": tf.square(outputs[..., 1] - maximum)}

    trainer = Both(model, "adam")
    _, shares = trainer.timestep_gradients_by_loss(adding(10**6))
    save(plots.shares(shares["loop"]), "shares", "GRU at the start, two losses")
    return f"{abs(np.mean(shares['loop']['sum'][: LENGTH // 2])):.1e}"


def main():
    PICTURES.mkdir(exist_ok=True)
    start = time.perf_counter()
    adding_found = {name: study("adding", name) for name in CELLS}
    copy_found = {name: study("copy", name) for name in CELLS}
    draw(adding_found, copy_found)
    share = two_losses()
    parts = {
        "adding": summary(adding_found, 1 / 6),
        "copy": summary(copy_found, math.log(KINDS)),
        "windows": windows_table(copy_found),
        "share": f"On average over the first half of the sequence the share of `sum` has a size of {share}.",
    }
    text = GUIDE.read_text()
    for name, content in parts.items():
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        text, count = re.subn(pattern, lambda m, c=content: m[1] + c + m[2], text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"The guide has {count} places for {name!r}; it needs one.")
    GUIDE.write_text(text)
    for name, content in parts.items():
        print(f"\n{name}\n{content}")
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
