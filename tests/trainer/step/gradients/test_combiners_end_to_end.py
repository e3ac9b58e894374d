"""Every exported combiner through `Trainer.fit`: against a loop by hand, in half precision, with a loss absent."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses
from tests.losses.combiners.representative import every_combiner as each
from tests.trainer.tools import dataset, weights

RATE = 0.05
RNG = np.random.default_rng(4)
X = RNG.normal(size=(16, 3)).astype("float32")
# Two targets that pull one output apart, so that direction methods have something to do.
TARGETS = np.stack([X[:, 0] + 1.0, -X[:, 0] - 2.0], axis=1).astype("float32")
every_combiner = pytest.mark.parametrize("cls", each())


class Pulled(Trainer):
    """Two losses of one output; the batch has the weights of the second one's elements as a third column."""

    def compute_losses(self, batch, training):
        output = tf.cast(self.model(batch[0], training=training)[:, 0], tf.float32)
        targets = batch[1]
        return {
            "square": tf.square(output - targets[:, 0]),
            "absolute": (tf.abs(output - targets[:, 1]), targets[:, 2]),
        }


def data(second=1.0, batch=16):
    """Batches in which every element of the second loss has this weight, without end."""
    return dataset(X, np.column_stack([TARGETS, np.full(16, second, "float32")]), batch=batch).repeat()


def model_of(policy="float32"):
    """The same weights whatever the policy; the outputs are float32."""
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(4, activation="tanh", dtype=policy), keras.layers.Dense(1, dtype=policy)]
    return keras.Sequential([keras.Input((3,)), *layers])


def eager_to_move(cls):
    """A combiner whose weights move in each update, as far as it can be told to."""
    wanted = {"update_every": 1, "window": 1, "learning_rate": 0.1}
    return cls(**{name: value for name, value in wanted.items() if name in cls.arguments()})


def test_the_weighted_sum_is_a_loop_by_hand_bit_for_bit():
    expected = model_of()
    optimizer = keras.optimizers.SGD(RATE)
    optimizer.build(expected.trainable_variables)

    @tf.function
    def update(x, targets):
        with tf.GradientTape() as tape:
            output = expected(x, training=True)[:, 0]
            square = tf.reduce_mean(tf.square(output - targets[:, 0]))
            values, element_weights = tf.abs(output - targets[:, 1]), targets[:, 2]
            absolute = tf.reduce_sum(values * element_weights) / tf.reduce_sum(element_weights)
            total = 0.7 * square + 0.3 * absolute
        variables = expected.trainable_variables
        optimizer.apply(tape.gradient(total, variables), variables)

    for x, targets in data(0.6, batch=8).take(7):
        update(x, targets)
    model = model_of()
    static = {"square": 0.7, "absolute": 0.3}
    run = Pulled(model, keras.optimizers.SGD(RATE), combiner=losses.WeightedSum(), loss_weights=static)
    run.fit(data(0.6, batch=8), steps=7, progress=False)
    for left, right, start in zip(weights(model), weights(expected), weights(model_of()), strict=True):
        np.testing.assert_array_equal(left, right)
        assert (left != start).any()


@pytest.mark.long
@every_combiner
def test_half_precision_comes_near_to_float32(cls, monkeypatch):
    monkeypatch.setattr(
        "looptape.trainer.optim.loss_scale.INITIAL", 2.0**4
    )  # the first updates are applied, not skipped
    results = {}
    for policy in ("float32", "mixed_float16"):
        run = Pulled(model_of(policy), keras.optimizers.SGD(RATE), combiner=eager_to_move(cls))
        run.fit(data(), steps=2, progress=False)
        assert run._engine.counters.skips.total == 0 and int(run.optimizer.iterations) == 2
        assert run._engine.loss_scale.active == (policy == "mixed_float16")
        results[policy] = weights(run.model)
    moved = 0.0
    for full, half, start in zip(results["float32"], results["mixed_float16"], weights(model_of()), strict=True):
        np.testing.assert_allclose(half, full, atol=5e-4, rtol=0)
        moved = max(moved, np.abs(full - start).max())
    assert moved > 0.02, "what hardly moves is near in any case"


def state(combiner):
    """{name: its numbers} of the state that has one number per loss."""
    return {v.path if hasattr(v, "path") else v.name: v.numpy() for v in combiner.variables if v.shape.rank == 1}


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@every_combiner
def test_a_loss_that_is_absent_for_an_update_keeps_its_state(cls, accumulation_steps):
    batch = 16 // accumulation_steps
    options = {"combiner": eager_to_move(cls), "accumulation_steps": accumulation_steps}
    run = Pulled(model_of(), keras.optimizers.SGD(RATE), **options)
    run.fit(data(batch=batch), steps=2, progress=False)
    before, kernel = state(run.combiner), weights(run.model)[0]
    run.fit(data(0.0, batch=batch), steps=3, progress=False)
    absent, after = state(run.combiner), weights(run.model)[0]
    assert run._engine.counters.skips.total == 0 and np.isfinite(after).all() and (after != kernel).any(), (
        "the update was not made"
    )
    for name, numbers in before.items():
        np.testing.assert_array_equal(absent[name][1], numbers[1], name)
    run.fit(data(batch=batch), steps=4, progress=False)
    present = state(run.combiner)
    moves = any(present[name][1] != absent[name][1] for name in present)
    assert moves or not before or cls is losses.GradDrop, "a state that stands still in any case would prove nothing"


class Extra(Pulled):
    """A third loss, and a factor of the second one."""

    factor = 1.0

    def compute_losses(self, batch, training):
        named = super().compute_losses(batch, training)
        values, element_weights = named["absolute"]
        named["absolute"] = self.factor * values, element_weights
        named["extra"] = tf.square(tf.cast(self.model(batch[0], training=training)[:, 0], tf.float32) - 9.0)
        return named


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (losses.MGDA, {}),
        (losses.MGDA, {"accumulation_steps": 2}),
        (losses.MGDA, {"shared": True}),
        (losses.GeometricMean, {}),
        (losses.GradNorm, {"accumulation_steps": 2}),
    ],
)
def test_a_loss_at_a_weight_of_0_takes_no_part(cls, options):
    """As a run without it. The shortest combination with a gradient of 0 is 0: nothing would be trained."""
    found, options = [], dict(options)
    shared = options.pop("shared", False)
    for kind, static in ((Pulled, {}), (Extra, {"extra": losses.EnabledFrom(100)})):
        static = {"square": 1.0, "absolute": 0.5, **static}
        run = kind(model_of(), keras.optimizers.SGD(RATE), combiner=eager_to_move(cls), loss_weights=static, **options)
        run.shared_features = run.model.layers[0].name if shared else None
        run.fit(data(batch=16 // options.get("accumulation_steps", 1)), steps=3, progress=False)
        found.append(weights(run.model))
    for left, right, start in zip(*found, weights(model_of()), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
        assert (left != start).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: losses.NTKBalance(update_every=1, moving_average=0.0),
        lambda: losses.STCH(mu=1.0),
        lambda: losses.MGDA("loss"),
    ],
    ids=["ntk_balance", "stch", "mgda"],
)
def test_a_static_weight_is_a_factor_of_the_loss(make):
    """For methods that compare gradients with losses, or losses with each other."""
    found = []
    for factor, static in ((0.1, 1.0), (1.0, 0.1)):
        run = Extra(
            model_of(),
            keras.optimizers.SGD(RATE),
            combiner=make(),
            loss_weights={"square": 1.0, "absolute": static, "extra": 1.0},
        )
        run.factor = factor
        run.fit(data(), steps=3, progress=False)
        found.append(weights(run.model))
    for left, right, start in zip(*found, weights(model_of()), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
        assert (left != start).any()
