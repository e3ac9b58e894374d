"""Two devices of one machine against one: the same weights, metrics, skips and reports, whatever the trainer does."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import losses
from looptape.losses.combiners.names import exported
from looptape.trainer import Trainer
from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.data import batches
from looptape.trainer.optim import loss_scale
from tests.distribution.cases import (
    CASES,
    MASK,
    REPLICATED,
    UPDATES,
    Counted,
    Two,
    X,
    Y,
    batched,
    made,
    normalized,
    shuffled,
    small_model,
)
from tests.trainer.tools import assert_identical_weights, assert_same_weights, dataset, mse, read_events


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == "dwa" else name for name in REPLICATED]
)
def test_two_devices_equal_one(name, two_devices):
    """Batches of 13, 13 and 10: none of the first divides by 2, and the last one of a pass is short."""
    one, two = (made(strategy, **CASES[name]) for strategy in (None, two_devices))
    passes = -(-UPDATES // -(-3 // CASES[name].get("accumulation_steps", 1)))
    evaluated = {"eval_dataset": batched(13)} if name == "sgd" else {}
    first, second = (t.fit(batched(13), epochs=passes, progress=False, **evaluated).history for t in (one, two))
    assert one._engine.counters.step == two._engine.counters.step >= UPDATES and two._engine.counters.skips.total == 0
    assert two.optimizer.iterations.numpy() == one.optimizer.iterations.numpy() == one._engine.counters.step
    assert_same_weights(one.model, two.model)
    _assert_equal_copies(two, two_devices)
    for mean, other in zip(*(t._engine.main.pipeline.averages or [] for t in (one, two)), strict=True):
        np.testing.assert_allclose(mean.numpy(), other.numpy(), atol=1e-6)
    for key, values in first.items():
        np.testing.assert_allclose(second[key], values, rtol=2e-5, err_msg=key)
    assert first["count"][-1] == 36
    if evaluated:
        assert first["val_count"][-1] == two.evaluate(batched(13))["count"] == 36
        np.testing.assert_allclose(one.predict(X[:7]), two.predict(X[:7]), atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("cls", exported())
def test_every_combiner_on_two_devices_equals_one(cls, two_devices):
    """Weights and the combiner's own state, with two micro-batches per update, of which the last is missing."""
    one, two = (made(strategy, combiner=cls, accumulation_steps=2) for strategy in (None, two_devices))
    for trainer in (one, two):
        trainer.fit(batched(13), epochs=10, progress=False)
    assert_same_weights(one.model, two.model, 2e-6)
    for ours, theirs in zip(one.combiner.variables, two.combiner.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-5, atol=2e-6, err_msg=ours.name)


def test_famo_sees_the_same_masks_again_on_each_device(two_devices):
    """Weights that stand still: only another dropout mask or share of the data could change a loss."""
    trainer = made(two_devices, combiner=losses.FAMO, model=normalized, optimizer=lambda: keras.optimizers.SGD(0.0))
    trainer.fit(batched(13), epochs=2, progress=False)
    assert trainer.combiner.updates.numpy() == 6
    np.testing.assert_allclose(trainer.combiner.logits.numpy(), 0.0, atol=1e-5)


def _assert_equal_copies(trainer, strategy):
    for variable in (*trainer.model.variables, *trainer.optimizer.variables):
        copies = [v.numpy() for v in strategy.experimental_local_results(variable.value)]
        np.testing.assert_array_equal(copies[0], copies[1], err_msg=variable.path)


def test_an_empty_replica_and_a_short_accumulation_change_nothing(two_devices):
    """Batches of 12, 12, 12 and 1. The second device has nothing of the last one, neither has of the missing two."""
    data = dataset(*(np.concatenate([a, a[:1]]) for a in (X, Y, MASK)), batch=12)

    def run(strategy):
        trainer = made(strategy, accumulation_steps=3)
        return trainer, trainer.fit(data, epochs=20, progress=False).history

    (one, first), (two, second) = run(None), run(two_devices)
    assert two._engine.counters.step == 40 and two._engine.counters.skips.total == 0
    assert_same_weights(one.model, two.model)
    for key, values in first.items():
        np.testing.assert_allclose(second[key], values, rtol=2e-5, err_msg=key)


def test_batch_normalization_merges_the_statistics_by_examples(two_devices):
    """Each device normalizes by its own share; the moving statistics are those of both, weighted by their examples."""
    with two_devices.scope():
        keras.utils.set_random_seed(1)
        layer = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
        trainer = Trainer(model, keras.optimizers.SGD(0.1), {"error": mse()}, strategy=two_devices)
    x = X[:13, 0]
    trainer.fit(dataset(x, Y[:13, :1], batch=12), epochs=1, progress=False)  # 6 + 6, then 1 + none
    mean, variance = np.zeros(3), np.ones(3)
    for shares in ([x[:6], x[6:12]], [x[12:]]):
        count = sum(map(len, shares))
        mean = 0.5 * mean + 0.5 * sum(len(share) * share.mean(0) for share in shares) / count
        variance = 0.5 * variance + 0.5 * sum(len(share) * share.var(0) for share in shares) / count
    np.testing.assert_allclose(layer.moving_mean, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, variance, rtol=1e-5)
    _assert_equal_copies(trainer, two_devices)


@pytest.mark.long
def test_synchronized_batch_normalization_equals_one_device(two_devices):
    def model():
        return small_model(lambda: keras.layers.BatchNormalization(synchronized=True, momentum=0.5))

    one, two = (made(strategy, model=model) for strategy in (None, two_devices))
    for trainer in (one, two):
        trainer.fit(batched(12).repeat(), steps=UPDATES, progress=False)
    assert_same_weights(one.model, two.model)
    for left, right in zip(one.model.non_trainable_variables, two.model.non_trainable_variables, strict=True):
        np.testing.assert_allclose(left, right, atol=2e-6)


def test_a_nan_on_the_second_device_only_changes_nothing_anywhere(two_devices):
    trainer = made(two_devices, model=normalized, optimizer=lambda: keras.optimizers.Adam(0.01))
    data = batched(12)
    trainer.fit(data, epochs=1, progress=False)

    def state():
        variables = [*trainer.model.variables, *trainer.optimizer.variables, *trainer.metrics["count"].variables]
        return [v.numpy() for variable in variables for v in two_devices.experimental_local_results(variable.value)]

    before, bad = state(), X[:12].copy()
    bad[11] = np.nan
    for metric in trainer.metrics.values():
        metric.reset_state()
    trainer.fit(dataset(bad, Y[:12], MASK[:12], batch=12).repeat(), steps=4, progress=False)
    assert (
        trainer._engine.counters.skips.total,
        trainer._engine.counters.step,
        trainer.optimizer.iterations.numpy(),
    ) == (1, 4, 3)
    for old, new in zip(before[:-2], state()[:-2], strict=True):
        np.testing.assert_array_equal(old, new)
    trainer.fit(data, epochs=2, progress=False)  # and on it goes
    assert trainer._engine.counters.skips.total == 1 and trainer._engine.counters.step == 7


def half_precision():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, 3))
    hidden = keras.layers.Dense(4, "tanh", dtype="mixed_float16")(keras.layers.Flatten()(inputs))
    outputs = keras.layers.Dense(2, dtype="mixed_float16")(hidden)
    return keras.Model(inputs, keras.layers.Rescaling(4.0, dtype="float32")(outputs))


def test_the_loss_scale_falls_until_updates_are_finite_and_these_equal_one_device(two_devices):
    """The scale itself does not: devices sum up gradients before they are divided, so it has to fall further."""
    trained = []
    for strategy in (None, two_devices):
        trainer = made(strategy, model=half_precision, optimizer=lambda: keras.optimizers.SGD(0.001))
        before = [weight.numpy() for weight in trainer.model.trainable_variables]
        data = batched(36).repeat()  # the same in each update, so that a skipped one only comes later
        while trainer.optimizer.iterations.numpy() < 20 and trainer._engine.counters.step < 60:
            missing = 20 - int(trainer.optimizer.iterations.numpy())
            trainer.fit(data, steps=trainer._engine.counters.step + missing, progress=False)
        scale, skipped = trainer._engine.loss_scale.value().numpy(), trainer._engine.counters.skips.total
        assert 1 <= skipped <= 15, "the first scale was not too large, or none was small enough"
        assert (trainer._engine.counters.step, scale) == (20 + skipped, loss_scale.INITIAL / 2.0**skipped)
        trained.append(trainer)
    one, two = trained
    pairs = zip(before, one.model.trainable_variables, strict=True)
    assert all(np.abs(weight.numpy() - old).max() > 0.002 for old, weight in pairs)
    assert_same_weights(one.model, two.model, 1e-4)  # the steps of float16 are 2e-4 below 0.5
    _assert_equal_copies(two, two_devices)


def test_early_stopping_stops_at_the_same_step_and_restores_the_best_weights(two_devices):
    """Held-out targets of a third: the loss on them falls while the outputs grow, and rises when they have passed."""
    found = []
    for strategy in (None, two_devices):
        trainer, seen = made(strategy, optimizer=lambda: keras.optimizers.Adam(0.02)), []
        spy = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda _, logs, trainer=trainer, seen=seen: seen.append(
                (logs["val_loss"], trainer.model.get_weights())
            )
        )
        stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True)
        held_out = dataset(X, Y / 3.0, MASK, batch=13)
        trainer.fit(batched(13), epochs=60, eval_dataset=held_out, callbacks=[spy, stop], progress=False)
        best = min(range(len(seen)), key=lambda index: seen[index][0])
        assert 0 < best == len(seen) - 3, "the loss has a minimum, and it stops two epochs after it"
        for weight, kept in zip(trainer.model.get_weights(), seen[best][1], strict=True):
            np.testing.assert_array_equal(weight, kept)
        found.append((trainer, [value for value, _ in seen]))
    (one, first), (two, second) = found
    assert one._engine.counters.step == two._engine.counters.step == 3 * len(first)
    np.testing.assert_allclose(first, second, rtol=2e-5)
    assert_same_weights(one.model, two.model)
    _assert_equal_copies(two, two_devices)


def _with_nan_in_the_last_row(*bad, count=14):
    """Batches of 12; of the bad ones the second device has a NaN."""
    x = np.concatenate([X] * 5)[: 12 * count].copy()
    for index in bad:
        x[12 * index + 11, 2, 1] = np.nan
    return dataset(x, *(np.concatenate([array] * 5)[: 12 * count] for array in (Y, MASK)), batch=12)


def test_raise_stops_both_devices_at_the_first_and_names_the_data(two_devices):
    trainer = made(two_devices)
    trainer.on_nonfinite = "raise"
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(_with_nan_in_the_last_row(5), steps=10, progress=False)
    assert "The update of step 5 is not finite: loss/" in str(caught.value)
    assert "the data themselves are not finite: batch[0] at example 11, time step 2" in str(caught.value)
    oracle = made(None)
    oracle.fit(_with_nan_in_the_last_row(), steps=5, progress=False)
    assert_same_weights(trainer.model, oracle.model)
    _assert_equal_copies(trainer, two_devices)


def test_restore_goes_back_on_both_devices_and_on_with_the_data_that_come_then(two_devices, tmp_path):
    """Checkpoint at step 4, batches 5-7 bad: back to step 4, on with batch 8. The oracle never saw batches 4-7."""
    trainer = made(two_devices, optimizer=lambda: keras.optimizers.Adam(0.003))
    trainer.on_nonfinite, trainer.max_skipped = "restore", 3
    data = _with_nan_in_the_last_row(5, 6, 7)
    trainer.fit(data, steps=10, checkpoint_every=4, workdir=tmp_path, progress=False)
    oracle, good = made(None, optimizer=lambda: keras.optimizers.Adam(0.003)), _with_nan_in_the_last_row()
    oracle.fit(good.take(4).concatenate(good.skip(8)), steps=10, progress=False)
    assert (trainer._engine.counters.step, trainer._engine.counters.restores, trainer.optimizer.iterations.numpy()) == (
        10,
        1,
        10,
    )
    assert_same_weights(trainer.model, oracle.model)
    _assert_equal_copies(trainer, two_devices)


class Masks(Trainer):
    """Shows which elements dropout kept, as the sum over a share weighted by powers of two."""

    def compute_losses(self, batch, training):
        x, _, _ = batch
        kept = tf.cast(self.model.layers[1](x, training=training) > 0, tf.float32)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group if training else 0
        bits = tf.reduce_sum(kept * tf.reshape(2.0 ** tf.range(15, dtype=tf.float32), [5, 3]), axis=[1, 2])
        for index in range(2):
            mine = tf.cast(tf.equal(replica, index), tf.float32)
            self.log(f"mask{index}", 2.0 * mine * bits[0])  # the mean over two equal shares
        return {"error": tf.square(self.model(x, training=training)[:, 0])}


def dropped():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, 3))
    kept = keras.layers.Dropout(0.5, seed=3)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(kept)))


def test_dropout_differs_between_devices_and_is_reproducible(two_devices):
    def run():
        with two_devices.scope():
            trainer = Masks(dropped(), keras.optimizers.SGD(0.01), strategy=two_devices)
        data = dataset(np.ones_like(X[:4]), Y[:4], MASK[:4], batch=4).repeat()
        history = keras.callbacks.History()
        trainer.fit(data, steps=6, eval_dataset=data.take(1), eval_every=1, progress=False, callbacks=[history])
        return np.array([history.history["mask0"], history.history["mask1"]])

    first, again = run(), run()
    np.testing.assert_array_equal(first, again)
    assert (first[0] != first[1]).all()  # 15 elements: equal by chance once in 32,768
    assert all(len(set(row)) == 6 for row in first)  # and each update has its own


def recurrent():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, 3))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.LSTM(4, name="lstm")(inputs)))


@pytest.mark.long
def test_probes_report_the_examples_of_all_devices(two_devices, tmp_path):
    """Batches of 13 and 1: the vectors in the event file, and the values of each example."""
    data = dataset(X[:14], Y[:14], MASK[:14], batch=13).repeat()
    one, two = (made(strategy, model=recurrent, probe_every=1) for strategy in (None, two_devices))
    rows = []
    for name, trainer in (("one", one), ("two", two)):
        trainer.fit(data, steps=4, workdir=tmp_path / name, progress=False)
        rows.append([values for _, values in read_events(tmp_path / name / "train") if "timestep/lstm/state" in values])
    assert len(rows[0]) == 4
    for left, right in zip(*rows, strict=True):
        for tag in ("state", "hidden", "cell", "input", "gain", "loss_share/masked"):
            name = f"timestep/lstm/{tag}"
            np.testing.assert_allclose(left[name], right[name], rtol=1e-4, atol=1e-6, err_msg=tag)
        for name in (n for n in left if n.startswith(("optimizer/gradient_norm", "optimizer/gradient_cosine"))):
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-6), name
    batch = (X[:7], Y[:7], MASK[:7])
    left, right = (t.timestep_gradients(batch, per_example=True)["lstm"]["state"] for t in (one, two))
    assert left.shape == (7, 5)
    np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_holds_the_same_pieces_for_any_number_of_devices(two_devices, tmp_path):
    """Nothing twice: each replica's trace captures its own part of a variable that all of them share."""
    for name, strategy in (("one", None), ("two", two_devices)):
        trainer = made(strategy, ema_decay=0.9)
        trainer.fit(shuffled(), steps=1, workdir=tmp_path / name, progress=False)
    one, two = (
        checkpoints.Store(str(tmp_path / name / "checkpoints")).newest()[1]["contents"] for name in ("one", "two")
    )
    assert sorted(one) == sorted(two)
    assert not [piece for piece in two if piece.startswith(checkpoints.OUTSIDE)]


@pytest.mark.long
def test_resume_on_the_same_and_on_another_number_of_devices(two_devices, tmp_path):
    """Bit for bit from two to two; within 1e-6 from two to one and back. Off the accumulation boundary of a pass."""
    options = {"optimizer": lambda: keras.optimizers.Adam(0.003), "accumulation_steps": 2, "ema_decay": 0.9}

    def run(strategy, steps, workdir):
        trainer = made(strategy, **options)
        trainer.fit(shuffled(), steps=steps, workdir=tmp_path / workdir, progress=False, log_every=40)
        return trainer

    whole = run(two_devices, 40, "whole")
    run(two_devices, 15, "both")
    shutil.copytree(tmp_path / "both", tmp_path / "fewer")
    again = run(two_devices, 40, "both")
    assert again._engine.counters.step == 40
    assert_identical_weights(whole.model, again.model)
    for left, right in zip(whole.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(left, right)
    fewer = run(None, 40, "fewer")
    run(None, 15, "more")
    more = run(two_devices, 40, "more")
    rows = [dict(read_events(tmp_path / name / "train"))[40] for name in ("both", "fewer", "more")]
    for trainer, row in zip((fewer, more), rows[1:], strict=True):
        assert_same_weights(whole.model, trainer.model)
        for name in ("metrics/mae", "metrics/count", "loss/masked", "metrics/spread"):
            assert row[name] == pytest.approx(rows[0][name], rel=1e-5), name
    assert rows[0]["metrics/count"] == 25 * 26


def test_rows_of_ragged_and_sparse_parts_are_divided_too():
    ragged = tf.ragged.constant([[1, 2], [], [3], [4, 5, 6], [7]])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2], [3, 0], [0, 0], [0, 5]])
    batch = {"ragged": ragged, "sparse": sparse, "dense": tf.range(5), "scalar": tf.constant(9)}
    shares = [batches.slice_for_replica(batch, replica, 2) for replica in range(2)]
    assert [share["ragged"].to_list() for share in shares] == [[[1, 2], [], [3]], [[4, 5, 6], [7]]]
    assert [tf.sparse.to_dense(s["sparse"]).numpy().tolist() for s in shares] == [
        [[1, 0], [0, 2], [3, 0]],
        [[0, 0], [0, 5]],
    ]
    assert [share["dense"].numpy().tolist() for share in shares] == [[0, 1, 2], [3, 4]]
    assert [int(share["scalar"]) for share in shares] == [9, 9]


# ---- What is refused, and what it says.


def test_a_strategy_that_comes_after_the_variables_is_refused(two_devices):
    model, optimizer = small_model(), keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match="variables of the model .* were not made in the scope .*Make the strategy fi"):
        Two(model, optimizer, strategy=two_devices)
    with two_devices.scope():
        shared = small_model()
    with pytest.raises(ValueError, match="variables of the optimizer .* were not made in the scope"):
        Two(shared, optimizer, strategy=two_devices)
    with pytest.raises(ValueError, match="variables of the model .*pass the same strategy to the Trainer"):
        Two(shared, optimizer)
    Two(shared, "sgd", strategy=two_devices)  # a name: made where it belongs


def test_what_cannot_be_divided_is_refused(two_devices):
    with two_devices.scope():
        metrics = {"count": Counted("int32")}
        trainer = Two(small_model(), "sgd", metrics=metrics, strategy=two_devices)
    with pytest.raises(ValueError, match="The metric 'count' keeps .* as int32; .*float32"):
        trainer.fit(batched(4), epochs=1, progress=False)
    data = tf.data.Dataset.from_tensors((X[:8], Y[:8], MASK[:5])).repeat()
    with pytest.raises(ValueError, match=r"The parts of a batch have \[5, 8\] rows; it is divided among 2 replicas"):
        made(two_devices).fit(data, steps=1, progress=False)
