"""Hooks beyond one: several optimizers and models, raw variables, freezing, groups, transformations."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import losses
from tests.trainer.tools import (
    assert_identical_weights,
    assert_same_weights,
    dataset,
    dense_model,
    linear_model,
    mse,
    read_events,
    regression,
    train,
    weights,
)
from trainer import Trainer, persistence

X, Y = regression(32)
NOISE = np.random.default_rng(1).normal(size=(32, 2)).astype("float32")


class Pair(keras.Model):
    """A generator and a discriminator."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(6)
        self.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)])
        self.discriminator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        self.built = True


def real_loss(logits):
    return tf.nn.sigmoid_cross_entropy_with_logits(tf.ones_like(logits), logits)[:, 0]


def fake_loss(logits):
    return tf.nn.sigmoid_cross_entropy_with_logits(tf.zeros_like(logits), logits)[:, 0]


class Gan(Trainer):
    def __init__(self, model, generator_optimizer, discriminator_optimizer, **options):
        super().__init__(model, generator_optimizer, **options)
        self.discriminator_optimizer = discriminator_optimizer

    def discriminator_losses(self, batch, training):
        real, noise = batch
        fake = tf.stop_gradient(self.model.generator(noise, training=training))
        return {
            "real": real_loss(self.model.discriminator(real, training=training)),
            "fake": fake_loss(self.model.discriminator(fake, training=training)),
        }

    def generator_losses(self, batch, training):
        return {"fool": real_loss(self.model.discriminator(self.model.generator(batch[1], training=training)))}

    def train_step(self, batch):
        self.minimize(
            batch,
            self.discriminator_losses,
            variables=self.model.discriminator.trainable_variables,
            optimizer=self.discriminator_optimizer,
            name="discriminator",
        )
        values = self.minimize(
            batch, self.generator_losses, variables=self.model.generator.trainable_variables, name="generator"
        )
        return {"fooled": tf.exp(-values["fool"])}

    def eval_step(self, batch):
        return self.generator_losses(batch, training=False)


def hand_written_gan(steps, batch):
    model, first, second = Pair(), keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)
    for step in range(steps):
        start = step * batch % 32
        real, noise = X[start : start + batch], NOISE[start : start + batch]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(real_loss(model.discriminator(real)))
            loss += tf.reduce_mean(fake_loss(model.discriminator(model.generator(noise))))
        variables = model.discriminator.trainable_variables
        second.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(real_loss(model.discriminator(model.generator(noise))))
        variables = model.generator.trainable_variables
        first.apply(tape.gradient(loss, variables), variables)
    return model


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_a_gan_equals_a_hand_written_loop(accumulation_steps, tmp_path):
    trainer = Gan(Pair(), keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1), accumulation_steps=accumulation_steps)
    data = dataset(X, NOISE, batch=8 // accumulation_steps).repeat()
    trainer.fit(data, steps=6, log_every=2, workdir=tmp_path, progress=False)
    assert_same_weights(trainer.model, hand_written_gan(6, 8))
    _, values = read_events(tmp_path / "train")[-1]
    assert {"loss/discriminator/real", "loss/discriminator/fake", "loss/generator/fool", "fooled"} <= set(values)
    assert {"gradient_norm/discriminator/global", "learning_rate/generator"} <= set(values)
    assert values["fooled"] == pytest.approx(np.exp(-values["loss/generator/fool"]), rel=0.05)
    assert set(trainer.evaluate(data.take(2))) == {"loss", "fool"}


def test_alternating_updates():
    """The discriminator every step, the generator every second one: a condition on the step, in the graph."""

    class Alternating(Gan):
        def train_step(self, batch):
            super().train_step(batch)
            return {}

        def generator_losses(self, batch, training):
            due = tf.cast(self.step % 2 == 0, tf.float32)
            return {name: due * value for name, value in super().generator_losses(batch, training).items()}

    trainer = Alternating(Pair(), keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
    data = dataset(X, NOISE, batch=8).repeat()
    moved = []
    for step in range(1, 5):
        before = trainer.model.generator.get_weights()
        trainer.fit(data, steps=step, progress=False)
        moved.append(not np.array_equal(before[0], trainer.model.generator.get_weights()[0]))
    assert moved == [True, False, True, False]


def test_raw_variables_equal_a_hand_written_loop():
    w, b = tf.Variable([[1.0], [0.5], [-1.0]]), tf.Variable([0.0])
    train((lambda x: x @ w + b, [w, b]), dataset(X, Y, batch=8), epochs=2)
    kernel, bias = np.array([[1.0], [0.5], [-1.0]]), np.zeros(1)
    for _ in range(2):
        for start in range(0, 32, 8):
            x, y = X[start : start + 8], Y[start : start + 8]
            error = x @ kernel + bias - y
            kernel, bias = kernel - 0.1 * 2 * x.T @ error / 8, bias - 0.1 * 2 * error.mean(axis=0)
    np.testing.assert_allclose(w.numpy(), kernel, atol=1e-5)
    np.testing.assert_allclose(b.numpy(), bias, atol=1e-5)


def test_a_tf_module_trains_and_resumes(tmp_path):
    class Line(tf.Module):
        def __init__(self):
            self.w = tf.Variable([[1.0], [0.5], [-1.0]])

        def __call__(self, x):
            return x @ self.w

    def fit(steps, workdir):
        trainer = Trainer(Line(), keras.optimizers.Adam(0.1), {"error": mse()})
        trainer.fit(dataset(X, Y, batch=8).repeat(), steps=steps, workdir=workdir, progress=False)
        return trainer.model.w.numpy()

    fit(3, tmp_path / "a")
    np.testing.assert_array_equal(fit(7, tmp_path / "a"), fit(7, tmp_path / "b"))


def test_freezing_and_unfreezing_between_two_fits():
    model, oracle = dense_model(), dense_model()
    trainer = Trainer(model, keras.optimizers.Adam(0.05), {"error": mse()})
    data = dataset(X, Y, batch=32).repeat()
    model.layers[0].trainable = False
    first = model.layers[0].kernel.numpy()
    trainer.fit(data, steps=3, progress=False)
    np.testing.assert_array_equal(first, model.layers[0].kernel.numpy())
    model.layers[0].trainable = True
    trainer.fit(data, steps=5, progress=False)
    assert not np.array_equal(first, model.layers[0].kernel.numpy())
    # Adam by hand: the moments of the second layer go on, those of the first begin at the third update; Keras
    # corrects all biases by the optimizer's iterations.
    moments = {}
    for step in range(5):
        trained = oracle.layers[1].trainable_weights + (oracle.layers[0].trainable_weights if step >= 3 else [])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(oracle(X) - Y))
        gradients = tape.gradient(loss, trained)
        for variable, gradient in zip(trained, gradients, strict=True):
            g = gradient.numpy().astype("float64")
            m, v = moments.get(variable.path, (0.0, 0.0))
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            moments[variable.path] = m, v
            rate = 0.05 * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
            variable.assign(variable.numpy() - rate * m / (np.sqrt(v) + 1e-7))
    assert_same_weights(model, oracle, 1e-5)


def test_optimizers_by_pattern_are_per_layer_learning_rates():
    model = linear_model()
    kernel, bias = weights(model)
    optimizer = {".*bias": keras.optimizers.SGD(0.01), ".*": keras.optimizers.SGD(0.1)}
    train(model, dataset(X, Y, batch=32).repeat(), optimizer, steps=1)
    error = X @ kernel + bias - Y
    np.testing.assert_allclose(weights(model)[0], kernel - 0.1 * 2 * X.T @ error / 32, atol=1e-6)
    np.testing.assert_allclose(weights(model)[1], bias - 0.01 * 2 * error.mean(axis=0), atol=1e-6)


def test_freezing_with_optimizers_by_pattern():
    """Frozen between two fits: one optimizer has nothing to do. What it never knew cannot be unfrozen."""
    model = dense_model()
    optimizer = {f".*{model.layers[0].name}/.*": keras.optimizers.SGD(0.1), ".*": keras.optimizers.Adam(0.01)}
    trainer, data = Trainer(model, optimizer, {"error": mse()}), dataset(X, Y, batch=32).repeat()
    trainer.fit(data, steps=2, progress=False)
    before = model.get_weights()
    model.layers[0].trainable = False
    trainer.fit(data, steps=4, progress=False)
    moved = [not np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert moved == [False, False, True, True]
    model.layers[0].trainable = True
    trainer.fit(data, steps=5, progress=False)
    assert not np.array_equal(before[0], model.get_weights()[0])

    model = dense_model()
    model.layers[0].bias.trainable = False
    patterns = {".*kernel": keras.optimizers.SGD(0.1), ".*": keras.optimizers.SGD(0.1)}
    trainer = Trainer(model, patterns, {"error": mse()})
    trainer.fit(data, steps=1, progress=False)
    model.layers[0].bias.trainable = True
    with pytest.raises(ValueError, match="were not built for. With several optimizers by pattern"):
        trainer.fit(data, steps=2, progress=False)


def test_exclusion_from_weight_decay_is_kept():
    model, oracle = dense_model(), dense_model()
    for each, by_trainer in ((model, True), (oracle, False)):
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        if by_trainer:
            train(each, dataset(X, Y, batch=8), optimizer, epochs=2)
        else:
            each.compile(optimizer, loss="mse")
            each.fit(dataset(X, Y, batch=8), epochs=2, verbose=0, shuffle=False)
    assert_same_weights(model, oracle)


def test_transform_gradients_comes_after_clipping():
    class Signed(Trainer):
        def transform_gradients(self, gradients, variables):
            return [tf.sign(gradient) for gradient in gradients]

    model = linear_model()
    before = weights(model)
    trainer = Signed(model, keras.optimizers.SGD(0.1), {"error": mse()}, clip_norm=1e-3)
    trainer.fit(dataset(X, Y, batch=32).repeat(), steps=1, progress=False)
    np.testing.assert_allclose(np.abs(before[0] - weights(model)[0]), 0.1, atol=1e-6)


def test_update_metrics_and_log_in_a_hook_of_ones_own():
    class Own(Trainer):
        def compute_losses(self, batch, training):
            x, y = batch
            outputs = self.model(x, training=training)
            self.update_metrics(y, outputs)
            self.log("largest", tf.reduce_max(y))
            return {"error": tf.square(outputs - y)[:, 0]}

    model = linear_model()
    trainer = Own(model, keras.optimizers.SGD(0.0), metrics={"mae": keras.metrics.MeanAbsoluteError()})
    history = trainer.fit(dataset(X, Y, batch=8), epochs=1, progress=False).history
    assert history["mae"] == pytest.approx([np.mean(np.abs(model(X).numpy() - Y))], rel=1e-5)
    assert history["largest"] == pytest.approx([np.mean([Y[i : i + 8].max() for i in range(0, 32, 8)])], rel=1e-5)


def test_a_debugging_look_leaves_everything_as_it_was():
    looked, oracle = dense_model(), dense_model()
    one, two = (Trainer(m, keras.optimizers.Adam(0.05), {"error": mse()}, ema_decay=0.9) for m in (looked, oracle))
    results = one.fast_dev_run(dataset(X, Y, batch=8), dataset(X, Y, batch=8))
    assert results["loss"] > 0
    before, after = one.overfit(dataset(X, Y, batch=8), batches=1, steps=300)["error"]
    assert after < 0.05 * before, "eight examples can be learnt by heart"
    for trainer in (one, two):
        trainer.fit(dataset(X, Y, batch=8), epochs=2, progress=False)
    assert_identical_weights(looked, oracle)
    for left, right in zip(one.main.averages, two.main.averages, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())


class Pulled(Trainer):
    """Two losses, for combiners; the second one is moved by dropout, too."""

    def compute_losses(self, batch, training):
        x, y = batch
        outputs = self.model(x, training=training)
        self.update_metrics(y, outputs)
        return {"error": tf.square(outputs - y)[:, 0], "size": tf.abs(outputs)[:, 0] + 0.1}


def half_precision():
    """Gradients that are too large for the first loss scale, so that it falls; dropout; statistics."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=1)]
    with_policy = [keras.layers.Dense(1, dtype="mixed_float16"), keras.layers.Rescaling(100.0, dtype="float32")]
    return keras.Sequential([keras.Input((3,)), *layers, *with_policy])


LOOKED_AT = {
    "uncertainty": {"combiner": losses.Uncertainty},
    "dwa": {"combiner": losses.DynamicWeightAverage, "accumulation_steps": 2},
    "float16": {"model": half_precision},
}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_looks_before_and_amid_training_change_nothing_that_a_checkpoint_holds(name):
    options = dict(LOOKED_AT[name])
    model, combiner = options.pop("model", dense_model), options.pop("combiner", lambda: None)
    data, state = dataset(X, Y, batch=8), {}
    for looks in (False, True):
        trainer = Pulled(
            model(),
            keras.optimizers.Adam(0.05),
            metrics={"mae": keras.metrics.MeanAbsoluteError()},
            combiner=combiner(),
            loss_weights={"error": 1.0, "size": 0.5},
            ema_decay=0.9,
            **options,
        )
        for epochs in (2, 4):
            if looks:
                trainer.fast_dev_run(dataset(X, 1000 * Y, batch=8))
                trainer.overfit(dataset(X, 1000 * Y, batch=8), steps=4)
            trainer.fit(data, epochs=epochs, progress=False)
        trainer.loss_weights["size"] = 0.25
        if looks:
            trainer.overfit(data, steps=4)
            assert trainer.loss_weights["size"] == 0.25
        variables = persistence.tracked_state(trainer, trainer.sources[id(data)])
        state[looks] = {key: v.numpy() for key, v in variables.items() if key != "iterator"}
        state[looks] |= {"skips": trainer.calls.skips.state(), "step": trainer.host_step, "epoch": trainer.epoch}
    assert state[True].keys() == state[False].keys()
    for key, value in state[False].items():
        np.testing.assert_equal(state[True][key], value, err_msg=key)
    if name == "float16":
        assert state[False]["skips"]["total"] > 0 and trainer.loss_scale.value() < 2.0**15, "the scale stood still"


def test_an_error_in_a_look_changes_nothing_either():
    class Breaking(Trainer):
        on_nonfinite = "raise"

    trainer = Breaking(dense_model(), keras.optimizers.Adam(0.05), {"error": mse()})
    x = X.copy()
    x[-1] = np.nan
    with pytest.raises(FloatingPointError, match="The update of step 3 is not finite"):
        trainer.overfit(dataset(x, Y, batch=8), batches=4)
    assert (trainer.host_step, trainer.calls.skipped, len(trainer.sources)) == (0, 0, 0)
    trainer.fit(dataset(X, Y, batch=8), epochs=1, progress=False)
    oracle = train(dense_model(), dataset(X, Y, batch=8), keras.optimizers.Adam(0.05), epochs=1)
    assert_identical_weights(trainer.model, oracle.model)


def test_warm_start_reports_what_matched(tmp_path):
    def model(units):
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, name="body"), keras.layers.Dense(units, name=f"head{units}")]
        )

    source = model(1)
    Trainer(source, "sgd", {"e": mse()}).fit(dataset(X, Y, batch=8), epochs=1, workdir=tmp_path, progress=False)
    target = model(2)
    report = Trainer(target, "sgd", {"e": mse()}).warm_start(tmp_path)
    np.testing.assert_array_equal(target.layers[0].kernel.numpy(), source.layers[0].kernel.numpy())
    assert len(report.matched) == 2 and len(report.missing) == 2 and len(report.unused) == 2
    assert "2 weights taken over" in str(report) and "head2/kernel" in str(report)
    with pytest.raises(FileNotFoundError, match="Give a .keras file, or the work directory"):
        Trainer(target, "sgd", {"e": mse()}).warm_start(tmp_path / "nothing")


def test_the_summary_names_what_happens(capsys):
    trainer = Trainer(
        dense_model(), "adam", {"error": mse(), "size": mse()}, loss_weights={"error": 1, "size": 0.5}, clip_norm=2.0
    )
    trainer.summary()
    text = capsys.readouterr().out
    for part in ("21 trainable parameters", "size: MeanSquaredError, weight 0.5", "global norm of 2", "Adam.apply"):
        assert part in text


def test_the_final_the_best_and_the_averaged_weights_are_exported(tmp_path):
    model = linear_model()
    seen = []
    trainer = Trainer(model, keras.optimizers.SGD(0.2), {"error": mse()}, ema_decay=0.9)
    data = dataset(X, Y, batch=32)
    spy = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append((logs["val_loss"], model.get_weights()))
    )
    trainer.fit(
        data.repeat(), steps=6, eval_dataset=data, eval_every=2, workdir=tmp_path, callbacks=[spy], progress=False
    )
    other = linear_model(seed=9)
    other.load_weights(tmp_path / "best.weights.h5")
    best = min(seen, key=lambda pair: pair[0])[1]
    np.testing.assert_array_equal(other.get_weights()[0], best[0])
    other.load_weights(tmp_path / "averaged.weights.h5")
    np.testing.assert_array_equal(other.get_weights()[0], trainer.main.averages[0].numpy())
    other.load_weights(tmp_path / "model.weights.h5")
    assert_identical_weights(other, model)
