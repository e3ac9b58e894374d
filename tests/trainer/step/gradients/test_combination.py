"""Combiners inside the trainer: when losses have gradients of their own, diagnostics, what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses
from tests.trainer.step.gradients.trunk import (
    RATE,
    Conflicting,
    Unshared,
    X,
    Y,
    gradients_by_hand,
    mgda,
    min_norm,
    trunk_and_heads,
)
from tests.trainer.tools import assert_identical_weights, assert_same_weights, dataset, read_events, train
from tests.trainer.tools import weights as weights_of


@pytest.mark.parametrize("probe_every", [0, 2])
@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 3, "batch": 8}, {"run_eagerly": True}], ids=str)
def test_weights_move_by_gradients_that_are_measured_now_and_then(options, probe_every):
    """Norm balance, measured in updates 0, 3 and 6 for those after them, against a loop of its own."""
    expected, balance = trunk_and_heads(), np.ones(2)
    for update in range(8):
        _, rows = gradients_by_hand(expected, (1.0, 1.0))
        for index, variable in enumerate(expected.trainable_variables):
            variable.assign(variable - RATE * (balance[0] * rows[0][index] + balance[1] * rows[1][index]))
        if update % 3 == 0:
            norms = np.array([np.sqrt(sum(np.sum(np.square(g, dtype="float64")) for g in row)) for row in rows])
            balance = norms.mean() / norms
    combiner = losses.GradientBalance("norm", update_every=3, moving_average=0.0, clip=None)
    model = trunk_and_heads()
    batch = options.get("batch", 24)
    options = {name: value for name, value in options.items() if name != "batch"}
    trainer = Unshared(model, keras.optimizers.SGD(RATE), combiner=combiner, probe_every=probe_every, **options)
    trainer.fit(dataset(X, Y, batch=batch).repeat(), steps=8, progress=False)
    assert_same_weights(model, expected, 3e-6)
    np.testing.assert_allclose(combiner.balance, balance, rtol=1e-4)
    assert trainer._engine.calls.traces <= 2


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_each_loss_has_a_backward_pass_of_its_own_only_when_it_is_measured(accumulation_steps):
    passes = tf.Variable(0, trainable=False)
    cls = type("Counted", (Unshared,), {"passes": passes})
    # One mask for both: a second divisor would need a second backward pass under accumulation in any case.
    cls.mask = staticmethod(lambda x: tf.ones_like(x[:, 0]))
    model = trunk_and_heads()
    trainer = cls(
        model,
        keras.optimizers.SGD(RATE),
        combiner=losses.GradNorm(update_every=5),
        accumulation_steps=accumulation_steps,
    )
    trainer.compute_losses = type(trainer).compute_losses.__get__(trainer)
    trainer.fit(dataset(X, Y, batch=24 // accumulation_steps).repeat(), steps=10, progress=False)
    groups = len(trainer._engine.main._plans[False, False, False].losses.groups)
    assert int(passes) == accumulation_steps * (2 * 2 + 8 * groups)


def test_measuring_now_and_then_on_two_devices(two_devices):
    def run(strategy):
        with strategy.scope() if strategy else tf.init_scope():
            model, optimizer = trunk_and_heads(), keras.optimizers.SGD(RATE)
        combiner = losses.GradNorm(update_every=2, learning_rate=0.1)
        Unshared(model, optimizer, combiner=combiner, strategy=strategy).fit(
            dataset(X, Y, batch=24).repeat(), steps=5, progress=False
        )
        return model, combiner

    (one, alone), (two, together) = run(None), run(two_devices)
    assert_same_weights(one, two, 2e-6)
    np.testing.assert_allclose(alone.balance, together.balance, rtol=1e-5)
    assert np.abs(alone.balance.numpy() - 1).max() > 0.05


def test_a_run_that_measures_now_and_then_is_resumed_bit_for_bit(tmp_path):
    def run(steps, workdir):
        combiner = losses.GradientBalance(update_every=4)
        trainer = Unshared(trunk_and_heads(), keras.optimizers.Adam(0.01), combiner=combiner)
        trainer.fit(dataset(X, Y, batch=8).repeat(), steps=steps, workdir=workdir, progress=False)
        return trainer.model

    run(6, tmp_path / "two")
    assert_identical_weights(run(12, tmp_path / "one"), run(12, tmp_path / "two"))


# ---- Diagnostics.


def test_diagnostics_of_a_direction_method_by_value(tmp_path):
    model = trunk_and_heads()
    trainer = Unshared(
        model,
        keras.optimizers.SGD(0.0),
        combiner=losses.MGDA(),
        loss_weights={"first": 1.0, "second": 0.5},
        probe_every=1,
    )
    trainer.fit(dataset(X, Y, batch=24).repeat(), steps=1, workdir=tmp_path, progress=False)
    values = {tag: value for _, row in read_events(tmp_path / "train") for tag, value in row.items()}
    _, rows = gradients_by_hand(model, (1.0, 0.5))
    a, b = (np.concatenate([np.ravel(g) for g in row]).astype("float64") for row in rows)
    chosen = min_norm(rows)
    update, mean = chosen[0] * a + chosen[1] * b, (a + b) / 2
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    expected = {
        "optimizer/gradient_norm/first": chosen[0] * np.linalg.norm(a),
        "optimizer/gradient_norm/second": chosen[1] * np.linalg.norm(b),
        "optimizer/gradient_cosine/first-second": cosine,
        "optimizer/gradient_cosine/update-mean": update @ mean / np.linalg.norm(update) / np.linalg.norm(mean),
        "optimizer/gradient_conflict/rate": float(cosine < 0),
        "loss_weight/first": chosen[0],
        "loss_weight/second": 0.5 * chosen[1],
    }
    for tag, value in expected.items():
        assert values[tag] == pytest.approx(value, rel=1e-3), tag
    assert expected["optimizer/gradient_cosine/update-mean"] < 0.999


def test_a_probed_update_with_shared_features(tmp_path):
    """Cosines are those of all variables, although the forward pass is cut at the features; the weights are as ever."""
    model = trunk_and_heads()
    _, rows = gradients_by_hand(model, (1.0, 1.0))
    a, b = (np.concatenate([np.ravel(g) for g in row]).astype("float64") for row in rows)
    trainer = Conflicting(model, keras.optimizers.SGD(RATE), combiner=losses.MGDA(), probe_every=1)
    trainer.fit(dataset(X, Y, batch=24).repeat(), steps=1, workdir=tmp_path, progress=False)
    values = {tag: value for _, row in read_events(tmp_path / "train") for tag, value in row.items()}
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert values["optimizer/gradient_cosine/first-second"] == pytest.approx(cosine, rel=1e-4)
    assert_identical_weights(mgda(steps=1).model, model)


class Three(Trainer):
    """Three losses of one weight vector with the gradients given: two pairs of three oppose each other."""

    def compute_losses(self, batch, training):
        kernel = self.model.trainable_variables[0]
        ways = {"a": [1.0, 0.0], "b": [-1.0, 0.5], "c": [0.0, -1.0]}
        return {
            name: tf.reduce_sum(kernel[:, 0] * tf.constant(way)) + 0.0 * batch[0][0, 0] for name, way in ways.items()
        }


def test_the_conflict_rate_counts_pairs(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    trainer = Three(model, keras.optimizers.SGD(0.1), probe_every=1)
    trainer.fit(dataset(X[:, :2], Y, batch=24).repeat(), steps=1, workdir=tmp_path, progress=False)
    values = {tag: value for _, row in read_events(tmp_path / "train") for tag, value in row.items()}
    assert values["optimizer/gradient_conflict/rate"] == pytest.approx(2 / 3)
    assert values["optimizer/gradient_cosine/a-b"] == pytest.approx(-1 / np.sqrt(1.25), rel=1e-5)
    assert values["optimizer/gradient_cosine/a-c"] == pytest.approx(0.0, abs=1e-6)


# ---- What is refused.


class Sinking(Trainer):
    """A loss that is negative from the third update on."""

    def compute_losses(self, batch, training):
        error = tf.reduce_mean(tf.square(self.model(batch[0]) - batch[1]))
        return {"error": error, "bonus": tf.where(self.step < 2, error, error - 1000.0)}


@pytest.mark.parametrize("cls", [losses.LogSum, losses.GeometricMean, losses.FAMO])
@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"run_eagerly": True}], ids=str)
def test_losses_that_are_not_positive_are_refused_where_logarithms_are_taken(cls, options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    data = dataset(X, Y, batch=8).repeat()
    trainer = Sinking(model, keras.optimizers.SGD(0.3), combiner=cls(), **options)
    trainer.fit(data, steps=2, progress=False)
    before, updates = weights_of(model), int(trainer.combiner.updates)
    with pytest.raises(ValueError, match=r"takes logarithms.*'bonus': -.*above zero.*WeightedSum") as caught:
        trainer.fit(data, steps=3, progress=False)
    assert "'error'" not in str(caught.value)
    for left, right in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(left, right)  # nothing was applied
    assert int(trainer.combiner.updates) == updates == 2


@pytest.mark.parametrize("cls", [losses.LogSum, losses.FAMO])
def test_a_loss_that_is_nan_is_skipped_and_not_refused(cls):
    """TensorFlow optimizes `not (x <= 0)` to `x > 0`, which NaN is not."""

    class Failing(Trainer):
        def compute_losses(self, batch, training):
            error = tf.reduce_mean(tf.square(self.model(batch[0]) - batch[1]))
            return {"error": error, "other": tf.where(tf.equal(self.step, 1), np.nan, 2.0 * error)}

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    trainer = Failing(model, keras.optimizers.SGD(0.01), combiner=cls())
    trainer.fit(dataset(X, Y, batch=8).repeat(), steps=4, progress=False)
    assert trainer._engine.counters.skips.total == 1 and int(trainer.combiner.updates) == 3


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_famo_leaves_out_micro_batches_past_the_end_of_the_data(run_eagerly):
    """24 examples as 10, 10 and 4: the last update has one micro-batch, whose second one would be a mean of nothing."""

    class Scalar(Trainer):
        def compute_losses(self, batch, training):
            error = tf.reduce_mean(tf.square(self.model(batch[0]) - batch[1]))
            return {"error": error, "other": 2.0 * tf.sqrt(error)}

    def run(batch, **options):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        trainer = Scalar(model, keras.optimizers.SGD(0.01), combiner=losses.FAMO(), **options)
        trainer.fit(dataset(X[:24], Y[:24], batch=batch), epochs=1, progress=False)
        return trainer

    accumulated = run(10, accumulation_steps=2, run_eagerly=run_eagerly)
    assert accumulated._engine.counters.skips.total == 0 and accumulated._engine.counters.step == 2
    assert np.isfinite(accumulated.combiner.logits.numpy()).all()


def test_a_checkpoint_is_not_taken_up_by_other_losses_or_another_combiner(tmp_path):
    """Both are restored by the order of the losses, so that the shapes fit whatever the names are."""

    class Named(Trainer):
        order = ("a", "b")

        def compute_losses(self, batch, training):
            error = tf.square(self.model(batch[0]) - batch[1])[:, 0]
            return {name: error + 1.0 for name in self.order}

    def run(steps, order=("a", "b"), combiner=None):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        weights = {"a": 1.0, "b": 7.0}
        trainer = Named(model, keras.optimizers.SGD(0.01), loss_weights=weights, combiner=combiner)
        trainer.order = order
        trainer.fit(dataset(X, Y, batch=8).repeat(), steps=steps, workdir=tmp_path, progress=False)
        return trainer

    run(2, combiner="uncertainty")
    with pytest.raises(ValueError, match=r"made with the losses \['a', 'b'\], in this order; now .*\['b', 'a'\]"):
        run(4, order=("b", "a"), combiner="uncertainty")
    with pytest.raises(ValueError, match="made with the combiner Uncertainty, this trainer has FAMO"):
        run(4, combiner="famo")
    assert run(4, combiner="uncertainty").combiner.updates.numpy() == 4


def test_a_combiner_by_its_name_and_what_is_none():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    pair = {"square": "mse", "absolute": "mae"}
    assert isinstance(Trainer(model, "sgd", pair, combiner="pcgrad").combiner, losses.PCGrad)
    with pytest.raises(ValueError, match="'pcgard' is not a combiner; did you mean 'pcgrad'"):
        Trainer(model, "sgd", pair, combiner="pcgard")
    with pytest.raises(TypeError, match="`combiner` is the class PCGrad; .*by calling its class"):
        Trainer(model, "sgd", pair, combiner=losses.PCGrad)
    with pytest.raises(TypeError, match="`combiner` is a int; "):
        Trainer(model, "sgd", pair, combiner=3)


def test_the_same_losses_are_no_problem_for_others():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    train(model, dataset(X, Y, batch=8).repeat(), trainer_class=Sinking, steps=4, combiner=losses.ReLoBRaLo())


@pytest.mark.parametrize("cls", [losses.LogSum, losses.PCGrad, losses.GradNorm])
def test_one_loss_for_a_method_that_needs_two(cls):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"given 1 loss.*\['error'\].*at least 2.*WeightedSum"):
        train(model, dataset(X, Y, batch=8), epochs=1, combiner=cls())


@pytest.mark.parametrize(
    ("combiner", "options", "words"),
    [
        (None, {}, "losses, one backward pass\n"),
        (losses.PCGrad(), {}, "one backward pass for each loss\n"),
        (losses.GradNorm(update_every=5), {}, "one backward pass, one for each loss in every 5. update\n"),
        (losses.LogSum(), {}, "losses, one backward pass\n"),
        (losses.LogSum(), {"accumulation_steps": 2}, "one backward pass for each loss\n"),
    ],
)
def test_the_summary_says_how_many_backward_passes_there_are(combiner, options, words, capsys):
    Unshared(trunk_and_heads(), "sgd", combiner=combiner, **options).summary()
    assert words in capsys.readouterr().out
