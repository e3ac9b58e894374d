"""Numbers that go wrong: skipped, raised or gone back from; and what is found out about them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.debug import nonfinite_report
from looptape.trainer.step.nonfinite import NonFiniteUpdates
from tests.reliability.tools import shuffled
from tests.trainer.tools import assert_identical_weights, dense_model, mse, read_events, regression

X, Y = regression(24)


def batches(*bad, count=12, example=2):
    """Batches of 4, of which some have a NaN in one example."""
    x = np.concatenate([X, X]).copy()
    for index in bad:
        x[4 * index + example, 1] = np.nan
    y = np.concatenate([Y, Y])
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4).take(count)


def make(trainer_class=Trainer, model=None, losses=None, **attributes):
    model = dense_model() if model is None else model
    trainer = trainer_class(model, keras.optimizers.Adam(0.01), {"error": mse()} if losses is None else losses)
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


def failure(trainer, data, **options):
    with pytest.raises(NonFiniteUpdates) as caught:
        trainer.fit(data, steps=12, progress=False, **options)
    return str(caught.value)


def test_raise_stops_at_the_first_and_names_the_data(tmp_path):
    trainer = make(on_nonfinite="raise")
    message = failure(trainer, batches(5), workdir=tmp_path)
    assert "The update of step 5 is not finite: loss/error became nan. It was not applied" in message
    assert "the data themselves are not finite: batch[0] at example 2, position 1" in message
    assert "loss/error is not finite at example 2" in message
    kept = checkpoints.Store(tmp_path / "nonfinite-0000000005")
    assert kept.names() == ["step-0000000005"]
    with np.load(tmp_path / "nonfinite-0000000005" / "step-0000000005" / "arrays.npz") as arrays:
        np.testing.assert_array_equal(arrays["0:0"], next(iter(batches(5).skip(5)))[0])
    oracle = make()
    oracle.fit(batches(), steps=5, progress=False)
    assert_identical_weights(trainer.model, oracle.model)


def test_raise_finds_the_batch_again_in_shuffled_data_without_a_workdir():
    x = X.copy()
    x[17, 0] = np.inf
    message = failure(make(on_nonfinite="raise"), shuffled(x, Y, 4))
    order = [row for batch in shuffled(x, Y, 4).take(6) for row in batch[0].numpy()]
    place = next(index for index, row in enumerate(order) if np.isinf(row).any())
    assert f"The update of step {place // 4} is not finite" in message
    assert f"the data themselves are not finite: batch[0] at example {place % 4}, position 0" in message


def test_skip_goes_on_and_stops_after_several_in_a_row(tmp_path):
    trainer = make(max_skipped=3)
    trainer.fit(batches(2, 3, 6), steps=12, progress=False)
    assert (
        trainer._engine.counters.skips.total == 3
        and trainer._engine.counters.step == 12
        and int(trainer.optimizer.iterations) == 9
    )
    message = failure(make(max_skipped=3), batches(2, 4, 5, 6, example=1), workdir=tmp_path)
    assert "3 updates in a row were not finite, from step 4 on: loss/error became nan" in message
    assert "batch[0] at example 1" in message and f"kept in {tmp_path}/nonfinite-0000000006" in message


def test_an_update_after_a_skipped_one_is_not_traced_again():
    trainer = make()
    trainer.fit(batches(2, 5), steps=12, progress=False)
    assert trainer._engine.calls.traces == 1


class Explodes(Trainer):
    """Weights that are finite, but so large that no update is: nothing but going back helps."""

    def compute_losses(self, batch, training):
        x, y, bad = batch
        error = tf.square(self.model(x, training=training) - y)[:, 0]
        return {"error": error * (1.0 + bad * 1e18)}


def test_restore_goes_back_and_on_with_the_data_that_come_then(tmp_path):
    """Steps 0-3 good, checkpoint at 4, batches 5-7 bad: back to step 4, on with batch 8. The oracle never saw 4-7."""
    x, y = np.concatenate([X, X, X]), np.concatenate([Y, Y, Y])
    bad = np.zeros([18, 4], np.float32)
    bad[5:8] = np.nan
    rows = (x.reshape(18, 4, 3), y.reshape(18, 4, 1), bad)
    trainer = make(Explodes, on_nonfinite="restore", max_skipped=3)
    data = tf.data.Dataset.from_tensor_slices(rows)
    trainer.fit(data, steps=10, checkpoint_every=4, log_every=1, workdir=tmp_path, progress=False)
    oracle = make(Explodes)
    kept = [*range(4), *range(8, 14)]
    oracle.fit(tf.data.Dataset.from_tensor_slices(tuple(r[kept] for r in rows)), steps=10, progress=False)
    assert trainer._engine.counters.step == 10 and trainer._engine.counters.restores == 1
    assert_identical_weights(trainer.model, oracle.model)
    assert [step for step, _ in read_events(tmp_path / "train") if step] == list(range(1, 11))


def test_restore_gives_up_after_so_many_times(tmp_path):
    bad = np.zeros([18, 4], np.float32)
    bad[3:] = np.nan
    rows = (np.concatenate([X] * 3).reshape(18, 4, 3), np.concatenate([Y] * 3).reshape(18, 4, 1), bad)
    trainer = make(Explodes, on_nonfinite="restore", max_skipped=2, max_restores=2)
    data = tf.data.Dataset.from_tensor_slices(rows)
    message = failure(trainer, data, checkpoint_every=2, workdir=tmp_path)
    assert trainer._engine.counters.restores == 2 and "2 updates in a row were not finite" in message


def test_a_wrong_policy():
    with pytest.raises(ValueError, match="`on_nonfinite` is 'ignore'; it must be one of skip, raise, restore"):
        make(on_nonfinite="ignore").fit(batches(), steps=1, progress=False)


@keras.saving.register_keras_serializable("tests")
class Logarithm(keras.layers.Layer):
    def call(self, inputs):
        return keras.ops.log(inputs)


def test_a_layer_and_its_operation_are_named():
    """Finite data, a logarithm of 0 in the middle, and one more layer that spreads it."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), Logarithm(name="logarithm"), keras.layers.Dense(1)])
    x = np.abs(X) + 1.0
    x[6, 2] = 0.0
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(4)
    message = failure(make(model=model, on_nonfinite="raise"), data.repeat())
    assert "The update of step 1 is not finite" in message
    assert "loss/error is not finite at example 2: it began in the operation Log of layer" in message
    assert "logarithm" in message and "data themselves" not in message


class TwoLosses(Trainer):
    def compute_losses(self, batch, training):
        x, y = batch
        prediction = self.model(x, training=training)
        ratio = tf.math.xlogy(1.0, tf.abs(y[:, 0]))
        return {"error": tf.square(prediction - y)[:, 0], "ratio": ratio + 0.0 * prediction[:, 0]}


def test_the_loss_term_is_named():
    y = Y.copy()
    y[9] = 0.0
    trainer = make(TwoLosses, on_nonfinite="raise")
    message = failure(trainer, tf.data.Dataset.from_tensor_slices((X, y)).batch(4).repeat())
    assert "The update of step 2 is not finite: loss/ratio became -inf" in message
    assert "loss/ratio is not finite at example 1: it began in the operation Xlogy" in message
    assert "loss/error is not finite" not in message


def test_a_gradient_alone_is_named_with_its_examples():
    """sqrt(0): the loss is finite, its gradient is not."""

    class Root(Trainer):
        def compute_losses(self, batch, training):
            x, y = batch
            return {"root": tf.sqrt(tf.reduce_sum(tf.square(self.model(x, training=training)), axis=1))}

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False, name="linear")])
    x = X.copy()
    x[7] = 0.0
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(4).repeat()
    message = failure(make(Root, model=model, on_nonfinite="raise"), data)
    assert "The update of step 1 is not finite: the gradient norm became" in message
    assert "every loss is finite, but not the gradient of" in message and "kernel" in message
    assert "it is not finite for example 3" in message


@pytest.mark.parametrize("go_backwards", [False, True])
def test_the_time_step_of_a_recurrent_layer_is_named(go_backwards):
    """Finite data; the cell divides by its input, which is 0 for one example at time step 3."""

    class Reciprocal(keras.layers.SimpleRNNCell):
        def call(self, inputs, states, training=False):
            output, states = super().call(1.0 / inputs, states, training=training)
            return output, states

    keras.utils.set_random_seed(0)
    rnn = keras.layers.RNN(Reciprocal(2, activation="linear", name="reciprocal"), go_backwards=go_backwards)
    model = keras.Sequential([keras.Input((6, 2)), rnn, keras.layers.Dense(1)])
    x = np.random.default_rng(0).uniform(1, 2, size=(24, 6, 2)).astype("float32")
    x[5, 3, 1] = 0.0
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(4).repeat()
    message = failure(make(model=model, on_nonfinite="raise"), data)
    assert "loss/error is not finite at example 1: it began in the operation RealDiv of layer" in message
    # Backwards, the input at time step 3 of 6 is the third that the cell sees.
    assert "reciprocal, time step 3" in message


def test_where():
    values = np.zeros([5, 4, 2])
    values[1, 3, 0] = values[4, 2, 1] = np.inf
    assert nonfinite_report.where(values) == "examples 1, 4, time steps 2, 3"
    assert nonfinite_report.where(values[1]) == "example 3, position 0"
    assert nonfinite_report.where(np.array(np.nan)) == "every example"


def test_a_model_that_does_not_run_eagerly_keeps_its_first_error():
    class TracedOnly(Trainer):
        def compute_losses(self, batch, training):
            if tf.executing_eagerly():
                raise ValueError("only traced")
            return super().compute_losses(batch, training)

    message = failure(make(TracedOnly, on_nonfinite="raise"), batches(1))
    assert "The update of step 1 is not finite: loss/error became nan" in message
    assert "could not be run eagerly to look into it (ValueError: only traced)" in message
