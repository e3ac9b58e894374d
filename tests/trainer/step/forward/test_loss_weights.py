"""Several named losses: weights, schedules, masks, sample weights, outputs; each against NumPy."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.losses import LinearRamp, summed
from tests.trainer.tools import assert_same_weights, dataset, dense_model, linear_model, mse, read_events, regression

X, Y = regression(32)


def numpy_linear_step(kernel, bias, x, y, rate, weight_square, weight_absolute):
    """One SGD step of weight_square · MSE + weight_absolute · MAE for a linear model, by hand."""
    error = x @ kernel + bias - y
    delta = weight_square * 2 * error / len(x) + weight_absolute * np.sign(error) / len(x)
    return kernel - rate * x.T @ delta, bias - rate * delta.sum(axis=0)


def test_a_weighted_sum_moves_the_weights_as_numpy_says():
    model = linear_model()
    kernel, bias = (w.numpy().astype("float64") for w in model.trainable_variables)
    trainer = Trainer(
        model,
        keras.optimizers.SGD(0.05),
        {"square": mse(), "absolute": keras.losses.MeanAbsoluteError()},
        loss_weights={"square": 0.7, "absolute": lambda step: 0.1 * tf.cast(step, tf.float32)},
    )
    trainer.fit(dataset(X, Y, batch=32).repeat(), steps=4, progress=False)
    for step in range(4):
        kernel, bias = numpy_linear_step(kernel, bias, X, Y, 0.05, 0.7, 0.1 * step)
    np.testing.assert_allclose(model.trainable_variables[0].numpy(), kernel, atol=1e-6)
    np.testing.assert_allclose(model.trainable_variables[1].numpy(), bias, atol=1e-6)


def test_a_weight_changes_without_a_retrace():
    changed, oracle = linear_model(), linear_model()
    pair = {"square": mse(), "absolute": keras.losses.MeanAbsoluteError()}
    data = dataset(X, Y, batch=32).repeat()
    trainer = Trainer(changed, keras.optimizers.SGD(0.05), pair, loss_weights={"square": 1, "absolute": 1})
    trainer.fit(data, steps=2, progress=False)
    trainer.loss_weights["absolute"] = 0.25
    trainer.fit(data, steps=4, progress=False)
    assert trainer._engine.calls.traces == 1
    weight = lambda step: tf.where(step < 2, 1.0, 0.25)  # noqa: E731
    other = Trainer(oracle, keras.optimizers.SGD(0.05), pair, loss_weights={"square": 1, "absolute": weight})
    other.fit(data, steps=4, progress=False)
    assert_same_weights(changed, oracle, 1e-7)


def falling(step):
    return 1.0 - tf.cast(step, tf.float32)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=str)
def test_a_schedule_below_zero_is_an_error(options):
    trainer = Trainer(linear_model(), "sgd", {"error": "mse"}, loss_weights={"error": falling}, **options)
    with pytest.raises(ValueError, match="The weight of loss 'error' is -1 at step 2 .*; it must not be negative"):
        trainer.fit(dataset(X, Y, batch=32).repeat(), steps=4, progress=False)


def test_under_xla_a_schedule_below_zero_skips_the_update():
    model = linear_model()
    trainer = Trainer(model, "sgd", {"error": "mse"}, loss_weights={"error": falling}, jit_compile=True)
    trainer.on_nonfinite = "skip"
    data = dataset(X, Y, batch=32).repeat()
    trainer.fit(data, steps=2, progress=False)
    before = [w.numpy() for w in model.weights]
    trainer.fit(data, steps=3, progress=False)
    for w, old in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(w, old)


def test_a_schedule_that_ends_below_zero_is_refused_at_once():
    with pytest.raises(ValueError, match="The weight of loss 'error' is -1.0; it must be finite and not negative"):
        Trainer(linear_model(), "sgd", {"error": "mse"}, loss_weights={"error": LinearRamp(1.0, -1.0, 10)})


def test_masks_sample_weights_and_time_weights_divide_by_their_sum():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 5, 3)).astype("float32")
    x[0, 3:] = 0.0  # masked time steps
    x[4, 1:] = 0.0
    y = rng.normal(size=(6, 5, 2)).astype("float32")
    time_weight = rng.uniform(0, 1, (6, 5)).astype("float32")
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 3))
    outputs = keras.layers.Dense(2)(keras.layers.Masking()(inputs))
    model = keras.Model(inputs, outputs)
    trainer = Trainer(model, keras.optimizers.SGD(0.1), {"error": mse()})
    mask = np.any(x != 0, axis=-1)
    values = np.mean((model(x).numpy() - y) ** 2, axis=-1)
    data = dataset(x, y, time_weight, batch=6)
    weight = mask * time_weight
    assert trainer.evaluate(data)["error"] == pytest.approx(np.sum(values * weight) / np.sum(weight), rel=1e-5)
    plain = dataset(x, y, batch=4)  # two batches whose masks have different sums
    assert trainer.evaluate(plain)["error"] == pytest.approx(np.sum(values * mask) / np.sum(mask), rel=1e-5)


def test_several_outputs_each_with_its_loss_and_target():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    heads = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("height", "width")}
    model = keras.Model(inputs, heads)
    targets = {"height": Y, "width": 2 * Y}
    trainer = Trainer(model, keras.optimizers.SGD(0.1), {"height": mse(), "width": keras.losses.MeanAbsoluteError()})
    data = tf.data.Dataset.from_tensor_slices((X, targets)).batch(8)
    results = trainer.evaluate(data)
    outputs = model(X)
    assert results["height"] == pytest.approx(np.mean((outputs["height"].numpy() - Y) ** 2), rel=1e-5)
    assert results["width"] == pytest.approx(np.mean(np.abs(outputs["width"].numpy() - 2 * Y)), rel=1e-5)
    assert results["loss"] == pytest.approx(results["height"] + results["width"], rel=1e-6)
    trainer.fit(data, epochs=1, progress=False)


@pytest.mark.parametrize("form", ["tuple", "x_y", "inputs_targets", "names"])
def test_forms_of_a_batch(form):
    parts = {
        "tuple": (X, Y),
        "x_y": {"x": X, "y": Y},
        "inputs_targets": {"inputs": X, "targets": Y},
        "names": {"features": X, "error": Y},
    }[form]
    if form == "names":
        inputs = {"features": keras.Input((3,), name="features"), "error": keras.Input((1,), name="error")}
        keras.utils.set_random_seed(1)
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs["features"]))
    else:
        model = linear_model()
    trainer = Trainer(model, keras.optimizers.SGD(0.1), {"error": mse()})
    value = trainer.evaluate(tf.data.Dataset.from_tensor_slices(parts).batch(8))["error"]
    oracle = np.mean((X @ model.trainable_variables[0].numpy() + model.trainable_variables[1].numpy() - Y) ** 2)
    assert value == pytest.approx(oracle, rel=1e-5)


def test_a_term_may_ask_for_a_sum():
    model = linear_model()
    trainer = Trainer(model, keras.optimizers.SGD(0.1), {"error": summed(mse())})
    expected = np.sum((model(X).numpy() - Y) ** 2)
    history = trainer.fit(dataset(X, Y, batch=32).repeat(), steps=1, progress=False).history
    assert history["loss"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("combiner", [None, "pcgrad", "famo"])
@pytest.mark.parametrize("parts", ["2 micro-batches", "4 micro-batches", "2 replicas"])
def test_a_sum_is_that_of_the_whole_update(parts, combiner, two_devices):
    """Of 32 rows in any number of parts: the loss, beside a mean, and the weights after two updates."""
    found = []
    for count, strategy in ((1, None), (1 if "replicas" in parts else int(parts[0]), two_devices)):
        strategy = strategy if "replicas" in parts else None
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = linear_model()
            terms = {"added": summed(mse()), "mean": mse()}
            options = {"combiner": combiner, "accumulation_steps": count, "strategy": strategy}
            trainer = Trainer(model, keras.optimizers.SGD(1e-3), terms, **options)
        data = dataset(X[:32], Y[:32], batch=32 // count).repeat()
        history = trainer.fit(data, steps=2, log_every=1, progress=False).history
        found.append([*history["added"], *history["mean"], *np.concatenate([w.ravel() for w in model.get_weights()])])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_scalars_weigh_by_examples():
    class Scalar(Trainer):
        def compute_losses(self, batch, training):
            x, y = batch
            return {"error": tf.reduce_mean(tf.square(self.model(x, training=training) - y))}

    ours, oracle = dense_model(), dense_model()
    x, y = regression(20)
    Scalar(ours, keras.optimizers.SGD(0.1), accumulation_steps=3).fit(dataset(x, y, batch=8), epochs=2, progress=False)
    Trainer(oracle, keras.optimizers.SGD(0.1), {"e": mse()}).fit(dataset(x, y, batch=20), epochs=2, progress=False)
    assert_same_weights(ours, oracle)


def test_what_tensorboard_gets(tmp_path):
    class Logged(Trainer):
        def compute_losses(self, batch, training):
            self.log("norm", tf.linalg.norm(self.model.trainable_variables[0].value))
            return super().compute_losses(batch, training)

    model = linear_model()
    kernel, bias = (w.numpy().astype("float64") for w in model.trainable_variables)
    trainer = Logged(
        model,
        keras.optimizers.SGD(0.05),
        {"square": mse(), "absolute": keras.losses.MeanAbsoluteError()},
        loss_weights={"square": 0.7, "absolute": lambda step: 0.1 * tf.cast(step, tf.float32)},
        metrics={"mae": keras.metrics.MeanAbsoluteError()},
    )
    data = dataset(X, Y, batch=32).repeat()
    trainer.fit(data, steps=5, log_every=2, eval_dataset=data.take(1), workdir=tmp_path, progress=False)

    squares, absolutes, totals, norms, kernels = [], [], [], [], []
    for step in range(5):
        error = X @ kernel + bias - Y
        weight = 0.1 * step
        squares.append(np.mean(error**2))
        absolutes.append(np.mean(np.abs(error)))
        totals.append(0.7 * squares[-1] + weight * absolutes[-1])
        kernels.append(np.linalg.norm(kernel))
        after = numpy_linear_step(kernel, bias, X, Y, 1.0, 0.7, weight)
        norms.append(np.sqrt(np.sum((kernel - after[0]) ** 2) + np.sum((bias - after[1]) ** 2)))
        kernel, bias = numpy_linear_step(kernel, bias, X, Y, 0.05, 0.7, weight)

    first, *rows = read_events(tmp_path / "train")
    assert first[0] == 0 and set(first[1]) == {"custom_scalars__config__"}
    assert [step for step, _ in rows] == [2, 4, 5]
    for (first, last), (_, values) in zip([(0, 2), (2, 4), (4, 5)], rows, strict=True):
        window = slice(first, last)
        weight = 0.1 * (last - 1)
        square, absolute = np.mean(squares[window]), np.mean(absolutes[window])
        expected = {
            "loss/square": square,
            "loss/absolute": absolute,
            "loss/total": np.mean(totals[window]),
            "loss/sum": 0.7 * square + 0.1 * 10**9 * absolute,
            "loss_weight/square": 0.7,
            "loss_weight/absolute": weight,
            "loss_share/square": 0.7 * square / (0.7 * square + weight * absolute),
            "loss_share/absolute": weight * absolute / (0.7 * square + weight * absolute),
            "optimizer/gradient_norm/global": np.mean(norms[window]),
            "optimizer/learning_rate": 0.05,
            "metrics/norm": np.mean(kernels[window]),
            "metrics/mae": np.mean(absolutes[:last]),
            "optimizer/skipped_updates": 0,
        }
        for tag, value in expected.items():
            assert values[tag] == pytest.approx(value, rel=1e-4), (last, tag)
        assert set(values) == {*expected, "throughput/examples_per_second", "throughput/data_wait"}
        assert values["throughput/examples_per_second"] > 0
    ((step, values),) = read_events(tmp_path / "eval")
    error = X @ kernel + bias - Y
    assert step == 5
    assert values["loss/square"] == pytest.approx(np.mean(error**2), rel=1e-4)
    assert values["metrics/mae"] == pytest.approx(np.mean(np.abs(error)), rel=1e-4)


def test_tensorboard_opens_with_the_loss_whatever_hooks_log(tmp_path):
    """TensorBoard sorts tags by name. Callbacks and results keep the names that the hook gave."""

    class Logged(Trainer):
        def compute_losses(self, batch, training):
            self.log("accuracy", 0.5)
            self.log("reward/mean", 2.0)
            return super().compute_losses(batch, training)

    trainer = Logged(linear_model(), "sgd", {"error": mse()})
    history = trainer.fit((X, Y), steps=2, eval_dataset=(X, Y), workdir=tmp_path, progress=False).history
    assert history["accuracy"] == history["val_accuracy"] == [0.5] and history["reward/mean"] == [2.0]
    assert trainer.evaluate((X, Y))["accuracy"] == 0.5
    for run in ("train", "eval"):
        tags = sorted({tag for _, row in read_events(tmp_path / run) for tag in row})
        assert tags[0] == "loss/error" and {"metrics/accuracy", "reward/mean"} < set(tags) and "accuracy" not in tags


def test_tensorboard_opens_with_the_loss_whatever_is_measured(tmp_path):
    """Everything beside the loss that TensorBoard's own views show sorts after it."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4, 3)), keras.layers.GRU(2, name="gru"), keras.layers.Dense(1)])
    measured = {"probe_every": 1, "health_every": 1, "health": "histograms,activations,positions"}
    trainer = Trainer(model, "sgd", {"error": mse()}, bptt_window=2, bptt_compare_every=1, **measured)
    trainer.fit((np.stack([X] * 4, axis=1), Y), steps=2, workdir=tmp_path, progress=False)
    tags = sorted({tag for _, row in read_events(tmp_path / "train") for tag in row if not tag.startswith("health/")})
    assert tags[0] == "loss/error" and "optimizer/bptt/cosine" in tags
    assert any(tag.startswith("variables/gradient/") for tag in tags)


def test_tensorboard_itself_reads_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    trainer.fit(dataset(X, Y, batch=8).repeat(), steps=6, log_every=3, workdir=tmp_path, progress=False)
    accumulator = EventAccumulator(str(tmp_path / "train"))
    accumulator.Reload()
    events = accumulator.Tensors("loss/error")
    assert [event.step for event in events] == [3, 6]
    content = accumulator.SummaryMetadata("loss/error")
    assert content.plugin_data.plugin_name == "scalars" and content.data_class == 1


@pytest.mark.parametrize(
    ("weight", "expected"),
    [(None, {"loss/error"}), (0.5, {"loss/error", "loss/total", "loss_weight/error"})],
    ids=["plain", "weighted"],
)
def test_one_loss_is_written_once_and_sorts_first(tmp_path, weight, expected):
    weights = None if weight is None else {"error": weight}
    metrics = [keras.metrics.MeanAbsoluteError(name="mae")]
    trainer = Trainer(
        linear_model(), keras.optimizers.SGD(0.1), {"error": mse()}, loss_weights=weights, metrics=metrics
    )
    data = dataset(X, Y, batch=8)
    trainer.fit(data.repeat(), steps=2, eval_dataset=data, workdir=tmp_path, progress=False)
    ((_, train),), ((_, evaluation),) = (list(read_events(tmp_path / run)) for run in ("train", "eval"))
    assert {tag for tag in train if tag.startswith("loss")} == expected
    assert sorted(train)[: len(expected)] == sorted(expected), "TensorBoard sorts tags by name"
    error = evaluation["loss/error"]
    assert evaluation == {"loss/error": error, "metrics/mae": evaluation["metrics/mae"]} | (
        {} if weight is None else {"loss/sum": pytest.approx(weight * error)}
    )


@pytest.mark.parametrize("name", ["loss", "total", "sum"])
def test_losses_with_the_name_of_a_sum(name):
    def fit(losses, loss_weights=None):
        trainer = Trainer(linear_model(), keras.optimizers.SGD(0.0), losses, loss_weights=loss_weights)
        x, y = regression(8)
        return trainer.fit(dataset(x, y, batch=8), epochs=1, progress=False).history

    message = f"A loss is named '{name}', the name under which a sum .* Give it another name than loss, total, sum"
    for losses, weights in (({name: mse(), "other": "mae"}, None), ({name: mse()}, {name: 2.0})):
        with pytest.raises(ValueError, match=message):
            fit(losses, weights)
    history = fit({name: mse()})  # the only loss is the sum
    assert history[name] == history["loss"]
