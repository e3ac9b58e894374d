"""Probed updates inside `fit`: the same weights, the right numbers, in the event files."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.dashboard import metadata
from looptape.trainer import Trainer, probe
from looptape.trainer.summaries import event_writer
from tests.trainer.tools import assert_identical_weights, assert_same_weights, dataset, mse, read_events

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 7, 2)).astype("float32")
Y = X[:, 0, :1].copy()


def recurrent_model(mask=False):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((7, 2)),
            *([keras.layers.Masking()] if mask else []),
            keras.layers.LSTM(4, dropout=0.2, recurrent_dropout=0.1, seed=5, name="lstm"),
            keras.layers.Dense(1),
        ]
    )


def fit(probe_every, steps=6, model=None, data=None, losses=None, workdir=None, **options):
    model = recurrent_model() if model is None else model
    trainer = Trainer(
        model, keras.optimizers.Adam(0.01), losses or {"error": mse()}, probe_every=probe_every, **options
    )
    data = dataset(X, Y, batch=8).repeat() if data is None else data
    trainer.fit(data, steps=steps, workdir=workdir, log_every=2, progress=False)
    return trainer


PAIR = {"square": mse(), "absolute": keras.losses.MeanAbsoluteError()}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"losses": PAIR}, marks=pytest.mark.long),
        pytest.param({"accumulation_steps": 3}, marks=pytest.mark.long),
        {"accumulation_steps": 2, "losses": PAIR, "clip_norm": 0.1, "ema_decay": 0.9},
        {"run_eagerly": True},
    ],
    ids=["plain", "two losses", "accumulation", "everything", "eager"],
)
def test_the_weights_are_the_same_bits_with_any_probe_every(options):
    plain = fit(0, **options)
    for every in (1, 4):
        probed = fit(every, **options)
        assert probed._engine.counters.probed == {1: 6, 4: 3}[every]
        assert_identical_weights(plain.model, probed.model)
        for left, right in zip(plain.model.variables, probed.model.variables, strict=True):
            np.testing.assert_array_equal(left.numpy(), right.numpy())  # seeds have advanced equally, too


def test_with_xla_within_rounding():
    assert_same_weights(fit(0, jit_compile=True).model, fit(2, jit_compile=True).model)


def test_a_stateful_layer_carries_the_same_states():
    def model():
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [keras.Input((7, 2), batch_size=8), keras.layers.GRU(4, stateful=True), keras.layers.Dense(1)]
        )

    plain, probed = fit(0, model=model()), fit(2, model=model())
    assert_identical_weights(plain.model, probed.model)
    np.testing.assert_array_equal(plain.model.layers[0].states[0].numpy(), probed.model.layers[0].states[0].numpy())
    assert np.abs(plain.model.layers[0].states[0].numpy()).max() > 0


def simple_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((7, 2)), keras.layers.SimpleRNN(4, name="rnn"), keras.layers.Dense(1)])


def unrolled(model, x, y):
    """‖dL/dh_t‖·B per example [batch, time] and ‖G_t‖ of the recurrent kernel, by an unrolled copy in float64."""
    cell, readout = model.layers[0].cell, model.layers[1]
    kernel, recurrent, bias = (tf.cast(w, tf.float64) for w in (cell.kernel, cell.recurrent_kernel, cell.bias))
    states, copies = [], []
    with tf.GradientTape(persistent=True) as tape:
        h = tf.zeros([len(x), 4], tf.float64)
        for t in range(x.shape[1]):
            copy = tf.identity(recurrent)
            tape.watch(copy)
            copies.append(copy)
            h = tf.tanh(tf.cast(x[:, t], tf.float64) @ kernel + h @ copy + bias)
            tape.watch(h)
            states.append(h)
        output = h @ tf.cast(readout.kernel, tf.float64) + tf.cast(readout.bias, tf.float64)
        loss = tf.reduce_mean(tf.square(output - y))
    per_example = [np.linalg.norm(tape.gradient(loss, s), axis=1) * len(x) for s in states]
    return np.stack(per_example, 1), np.array([np.linalg.norm(tape.gradient(loss, c)) for c in copies])


def test_timestep_gradients_equal_an_unrolled_copy():
    model = simple_model()
    trainer = Trainer(model, "sgd", {"error": mse()})
    states, kernels = unrolled(model, X[:8], Y[:8])
    mean = trainer.timestep_gradients((X[:8], Y[:8]))["rnn"]
    np.testing.assert_allclose(mean["state"], states.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(mean["weight/recurrent_kernel"], kernels, rtol=1e-4, atol=1e-9)
    assert mean["weight/recurrent_kernel"][0] == 0, "the initial state is zero"
    each = trainer.timestep_gradients((X[:8], Y[:8]), per_example=True)["rnn"]
    np.testing.assert_allclose(each["state"], states, rtol=1e-4)
    full = trainer.timestep_gradients((X[:8], Y[:8]), full=True)["rnn"]
    np.testing.assert_allclose(np.linalg.norm(full["state_gradient/0"], axis=-1), states, rtol=1e-4)
    assert max(trainer.check_timestep_sum((X[:8], Y[:8])).values()) < 1e-5


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_what_is_logged_is_the_gradient_of_that_very_update(tmp_path, accumulation_steps):
    """With a learning rate of 0 every update sees the same weights; three micro-batches concatenate."""
    model = simple_model()
    trainer = Trainer(
        model, keras.optimizers.SGD(0.0), {"error": mse()}, probe_every=2, accumulation_steps=accumulation_steps
    )
    data = dataset(X, Y, batch=24 // accumulation_steps).repeat()
    trainer.fit(data, steps=4, workdir=tmp_path, progress=False)
    states, kernels = unrolled(model, X, Y)
    rows = [(step, v) for step, v in read_events(tmp_path / "train") if "timestep/rnn/state" in v]
    assert [step for step, _ in rows] == [1, 2, 4]
    for index, (_, values) in enumerate(rows):
        np.testing.assert_allclose(values["timestep/rnn/state"], states.mean(axis=0), rtol=1e-4)
        if accumulation_steps == 1:
            np.testing.assert_allclose(values["timestep/rnn/weight/recurrent_kernel"], kernels, rtol=1e-4, atol=1e-9)
        means = states.mean(axis=0)
        assert values["timestep/rnn/horizon"] == np.sum(means > 0.01 * means.max())
        assert values["timestep/rnn/nonfinite"] == 0
        assert values["timestep/rnn/rows"] == index + 1
        np.testing.assert_allclose(
            values["timestep/rnn/omega"], np.nansum((values["timestep/rnn/gain"] - 1) ** 2), rtol=1e-5
        )


def test_masked_time_steps_are_marked_as_padding(tmp_path):
    x = X.copy()
    x[:, 5:] = 0.0
    fit(1, steps=1, model=recurrent_model(mask=True), data=dataset(x, Y, batch=8).repeat(), workdir=tmp_path)
    values = next(v for _, v in read_events(tmp_path / "train") if "timestep/lstm/state" in v)
    _, valid = metadata.decode_row(values["timestep/lstm/state"])
    assert valid.tolist() == [True] * 5 + [False] * 2


def test_shares_of_two_losses_and_their_gradients(tmp_path):
    class Two(Trainer):
        def compute_losses(self, batch, training):
            x, y = batch
            sequence = self.model(x, training=training)
            return {"first": tf.square(sequence[:, 2] - y)[:, 0], "last": tf.square(sequence[:, 6] - y)[:, 0]}

    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((7, 2)), keras.layers.GRU(4, return_sequences=True, name="gru"), keras.layers.Dense(1)]
    )
    trainer = Two(model, keras.optimizers.SGD(0.0), probe_every=1, loss_weights={"first": 2.0, "last": 0.5})
    trainer.fit(dataset(X, Y, batch=8).repeat(), steps=1, workdir=tmp_path, progress=False)
    values = next(v for _, v in read_events(tmp_path / "train") if "timestep/gru/state" in v)
    first, last = (values[f"timestep/gru/loss_share/{name}"] for name in ("first", "last"))
    np.testing.assert_allclose(first + last, 1.0, atol=1e-5)
    np.testing.assert_allclose(first[3:], 0.0, atol=1e-7)  # nothing after its own time step can drive it
    gradients = []
    for position, weight in ((2, 2.0), (6, 0.5)):
        with tf.GradientTape() as tape:
            loss = weight * tf.reduce_mean(tf.square(model(X[:8])[:, position] - Y[:8]))
        parts = tape.gradient(loss, model.trainable_variables)
        gradients.append(np.concatenate([g.numpy().ravel() for g in parts]))
    a, b = gradients
    assert values["optimizer/gradient_norm/first"] == pytest.approx(np.linalg.norm(a), rel=1e-4)
    assert values["optimizer/gradient_norm/last"] == pytest.approx(np.linalg.norm(b), rel=1e-4)
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert values["optimizer/gradient_cosine/first-last"] == pytest.approx(cosine, rel=1e-3)
    assert values["optimizer/gradient_cosine/update-mean"] == pytest.approx(1.0, abs=1e-4), (
        "a plain sum points along the mean"
    )


class Power(keras.Model):
    """x_t = a · x_{t−1} in a loop of one's own, with a probe; the loss is the last x."""

    def __init__(self, length):
        super().__init__()
        self.a = self.add_weight(shape=(), initializer=lambda shape, dtype: tf.constant(2.0))
        self.length = length

    def call(self, x):
        def body(t, x):
            return t + 1, self.a * probe("power", x, t)

        return tf.while_loop(lambda t, x: t < self.length, body, (0, x))[1]

    def get_config(self):
        return {"length": self.length}


class Last(Trainer):
    def compute_losses(self, batch, training):
        return {"last": self.model(batch)[:, 0]}


def test_a_probe_in_a_loop_of_ones_own_grows_its_capacity(tmp_path):
    """λ_t = a^(T−t) before the step that uses it; 600 steps do not fit into the first capacity of the probe."""
    model = Power(600)
    model.a.assign(0.99)
    data = tf.data.Dataset.from_tensors(tf.ones([4, 1])).repeat()
    trainer = Last(model, keras.optimizers.SGD(0.0), probe_every=1)
    trainer.fit(data, steps=3, workdir=tmp_path, progress=False)
    rows = [v["timestep/power/state"] for _, v in read_events(tmp_path / "train") if "timestep/power/state" in v]
    np.testing.assert_allclose(rows[-1], 0.99 ** (600 - np.arange(600)), rtol=1e-4)
    assert trainer._engine.calls.probed_traces == 2 and len(rows[0]) < 600
    found = Last(model, "sgd").timestep_gradients(tf.ones([4, 1]))
    np.testing.assert_allclose(found["power"]["state"], rows[-1], rtol=1e-5)


def test_a_layer_that_reads_backwards_is_labelled_so(tmp_path):
    gru = keras.layers.Bidirectional(keras.layers.GRU(3), name="both")
    fit(1, steps=1, model=keras.Sequential([keras.Input((7, 2)), gru, keras.layers.Dense(1)]), workdir=tmp_path)
    found = {}
    for _, value in event_writer.read(str(tmp_path / "train")):
        content = metadata.parse_content(value.metadata.plugin_data.content)
        if content and content["kind"] == metadata.VECTOR:
            found.setdefault(content["layer"], set()).add(content.get("direction"))
    assert sorted(found.values(), key=str) == [{"backward"}, {None}]


def test_an_update_that_explodes_is_skipped_and_reported(tmp_path):
    bad = X.copy()
    bad[8, 3] = np.nan  # the second batch
    trainer = fit(2, steps=4, model=simple_model(), data=dataset(bad, Y, batch=8).repeat(), workdir=tmp_path)
    rows = {s: v for s, v in read_events(tmp_path / "train") if "timestep/rnn/state" in v}
    assert trainer._engine.counters.skips.total == 1 and set(rows) == {1, 2, 4}
    assert rows[2]["timestep/rnn/nonfinite"] > 0 and rows[4]["timestep/rnn/nonfinite"] == 0


def test_two_devices_report_what_one_does(two_devices, tmp_path):
    def run(workdir, strategy):
        with strategy.scope() if strategy else tf.init_scope():
            model, optimizer = simple_model(), keras.optimizers.SGD(0.1)
        trainer = Trainer(model, optimizer, PAIR, probe_every=2, strategy=strategy)
        trainer.fit(dataset(X, Y, batch=8).repeat(), steps=4, workdir=workdir, progress=False)
        rows = [v for _, v in read_events(workdir / "train") if "timestep/rnn/state" in v]
        return model, rows

    one, first = run(tmp_path / "one", None)
    two, second = run(tmp_path / "two", two_devices)
    assert_same_weights(one, two)
    for left, right in zip(first, second, strict=True):
        for tag in ("state", "input", "gain", "loss_share/square"):
            name = f"timestep/rnn/{tag}"
            np.testing.assert_allclose(left[name], right[name], rtol=1e-4, atol=1e-6, err_msg=tag)
        assert left["optimizer/gradient_cosine/square-absolute"] == pytest.approx(
            right["optimizer/gradient_cosine/square-absolute"], rel=1e-4
        )


def test_the_heat_map_of_a_resumed_run_shows_it_from_the_beginning(tmp_path):
    fit(1, steps=3, workdir=tmp_path)
    trainer = fit(1, steps=5, workdir=tmp_path)
    assert trainer._engine.counters.probed == 5
    assert trainer._engine.timesteps._history("lstm").steps == [1, 2, 3, 4, 5]
    images = [v["timestep/lstm/heatmap"] for _, v in read_events(tmp_path / "train") if "timestep/lstm/heatmap" in v]
    pixels = tf.io.decode_png(images[-1][2]).numpy()
    assert pixels.shape[2] == 3 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20


def test_the_heat_maps_of_a_resumed_run_come_when_they_would_have(tmp_path):
    """Drawn at rows 1, 2, 3, 5 and 8. A resumed run must not draw the next one at row 5 or 7 for a new beginning."""

    def drawn(workdir):
        return [step for step, values in read_events(workdir / "train") if "timestep/lstm/heatmap" in values]

    fit(1, steps=8, workdir=tmp_path / "whole")
    for steps in (4, 6, 8):
        fit(1, steps=steps, workdir=tmp_path / "parts")
    assert drawn(tmp_path / "parts") == drawn(tmp_path / "whole") == [1, 2, 3, 5, 8]


def test_a_step_of_several_updates_may_have_one_with_nothing_to_probe(tmp_path):
    """A GAN: two losses of the discriminator are compared, the generator has only one."""

    class Two(Trainer):
        def both(self, batch, training):
            error = self.model(batch[0]) - batch[1]
            return {"square": tf.square(error)[:, 0], "absolute": tf.abs(error)[:, 0]}

        def one(self, batch, training):
            return {"size": tf.square(self.model(batch[0]))[:, 0]}

        def train_step(self, batch):
            first, second = self.model.layers
            self.minimize(batch, self.both, variables=first.trainable_variables, name="first")
            self.minimize(batch, self.one, variables=second.trainable_variables, optimizer=self.other, name="second")
            return {}

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    trainer = Two(model, keras.optimizers.SGD(0.01), probe_every=2)
    trainer.other = keras.optimizers.SGD(0.01)
    trainer.fit(dataset(X[:, 0], Y, batch=8).repeat(), steps=4, workdir=tmp_path, progress=False)
    tags = {tag for _, values in read_events(tmp_path / "train") for tag in values}
    assert {"optimizer/gradient_norm/first/square", "optimizer/gradient_cosine/first/square-absolute"} <= tags
