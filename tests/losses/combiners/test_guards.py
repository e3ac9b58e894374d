"""The guards one by one, `validate` and the errors, on combiners with known weights."""

import numpy as np
import pytest
import tensorflow as tf

from looptape import losses
from looptape.losses.combiners.base import Combiner
from looptape.losses.combiners.names import exported

VALUES = [(4.0, 1.0), (2.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.25, 1.0), (8.0, 2.0)]


def coefficients(combiner, values=VALUES, present=None):
    combiner.build(["first", "second"])
    seen = []
    for value in values:
        seen.append(combiner.coefficients(tf.constant(value), present, None).numpy())
        combiner.advance(tf.constant(value), present, None)
    return np.array(seen)


INVERSE = 1 / np.array(VALUES)  # what LogSum proposes


def test_no_guards():
    np.testing.assert_allclose(coefficients(losses.LogSum()), INVERSE)


def test_update_every_holds_the_weights():
    expected = INVERSE[[0, 0, 2, 2, 4, 4]]
    np.testing.assert_allclose(coefficients(losses.LogSum(update_every=2)), expected)


def test_moving_average():
    expected, weights = [], np.ones(2)
    for proposed in INVERSE:
        weights = 0.8 * weights + 0.2 * proposed
        expected.append(weights)
    np.testing.assert_allclose(coefficients(losses.LogSum(moving_average=0.8)), expected, rtol=1e-5)


def test_clip():
    np.testing.assert_allclose(coefficients(losses.LogSum(clip=(0.5, 2))), np.clip(INVERSE, 0.5, 2))


def test_normalize():
    expected = 2 * INVERSE / INVERSE.sum(1, keepdims=True)
    np.testing.assert_allclose(coefficients(losses.LogSum(normalize=True)), expected, rtol=1e-6)


def test_normalize_over_the_present_losses_only():
    combiner = losses.LogSum(normalize=True)
    combiner.build(["a", "b", "c"])
    seen = combiner.coefficients(tf.constant([4.0, 1.0, 9.0]), tf.constant([True, True, False]), None)
    np.testing.assert_allclose(seen, (0.4, 1.6, 1.0), rtol=1e-6)


def test_warmup_then_average_from_one():
    seen = coefficients(losses.LogSum(warmup_steps=2, moving_average=0.5))
    np.testing.assert_allclose(seen[:2], 1.0)
    np.testing.assert_allclose(seen[3], 0.5 * (0.5 + 0.5 * INVERSE[2]) + 0.5 * INVERSE[3], rtol=1e-6)


def test_order_of_the_guards():
    """Normalised, then averaged, then clipped."""
    seen = coefficients(losses.LogSum(normalize=True, moving_average=0.5, clip=(0.8, 1.5)), VALUES[:1])
    np.testing.assert_allclose(seen[0], np.clip(0.5 + 0.5 * np.array([0.4, 1.6]), 0.8, 1.5), rtol=1e-6)


def test_learned_weights_stand_still_in_the_warmup():
    combiner = losses.Uncertainty(warmup_steps=3, learning_rate=0.1)
    coefficients(combiner, VALUES[:3])
    np.testing.assert_array_equal(combiner.log_variance, (0.0, 0.0))
    combiner.advance(tf.constant(VALUES[3]), None, None)
    assert (combiner.log_variance.numpy() != 0).any()


def test_famo_logits_stand_still_in_the_warmup():
    combiner = losses.FAMO(warmup_steps=2)
    combiner.build(["first", "second"])
    for update in range(3):
        before, after = tf.constant([4.0, 1.0]), tf.constant([2.0, 1.0])
        combiner.advance(before, None, None)
        combiner.advance_after(before, after, None)
        assert (combiner.logits.numpy() != 0).any() == (update == 2)


def test_losses_are_observed_in_the_warmup():
    combiner = losses.ReLoBRaLo(warmup_steps=2, alpha=0.0)
    combiner.build(["first", "second"])
    combiner.advance(tf.constant([4.0, 1.0]), None, None)
    combiner.advance(tf.constant([2.0, 1.0]), None, None)
    ratios = np.exp([0.5, 1.0])
    seen = combiner.coefficients(tf.constant([1.0, 1.0]), None, None)
    np.testing.assert_allclose(seen, 2 * ratios / ratios.sum(), rtol=1e-5)


@pytest.mark.parametrize("cls", [losses.GradNorm, losses.GradientBalance])
def test_statistics_are_wanted_every_so_many_updates(cls):
    combiner = cls(update_every=3)
    combiner.build(["first", "second"])
    assert combiner.gradients_every == 3 and combiner.needs == "weights"
    measured = combiner.measure([[tf.constant([[3.0, 0.0]])], [tf.constant([[0.0, 1.0]])]])
    changed = []
    for update in range(7):
        before = combiner.balance.numpy()
        assert bool(combiner.due()) == (update % 3 == 0)
        combiner.advance(tf.ones([2]), None, measured)
        changed.append((before != combiner.balance.numpy()).any())
    assert changed == [True, False, False, True, False, False, True]
    combiner.advance(tf.ones([2]), None, None)  # nothing measured: nothing learnt


@pytest.mark.parametrize("cls", [losses.WeightedSum, losses.LogSum])
def test_no_gradients_are_wanted(cls):
    combiner = cls()
    combiner.build(["first", "second"])
    assert combiner.gradients_every == 0 and not bool(combiner.due())


def test_direction_methods_want_gradients_each_update():
    combiner = losses.MGDA()
    combiner.build(["first", "second"])
    assert combiner.gradients_every == 1 and bool(combiner.due())


def test_gradient_balance_averages_per_measurement_and_clips():
    combiner = losses.GradientBalance("norm", moving_average=0.5, update_every=1, clip=(0.5, 2.0))
    combiner.build(["first", "second"])
    measured = combiner.measure([[tf.constant([9.0])], [tf.constant([1.0])]])
    combiner.advance(tf.ones([2]), None, measured)
    np.testing.assert_allclose(combiner.balance, np.clip([0.5 + 0.5 * 5 / 9, 0.5 + 0.5 * 5], 0.5, 2), rtol=1e-6)
    np.testing.assert_allclose(combiner.coefficients(None, None, None), combiner.balance)


def test_gradient_balance_without_its_reference_keeps_the_weights():
    combiner = losses.GradientBalance("mean_mean", "second", update_every=1)
    combiner.build(["first", "second"])
    rows = [[tf.constant([[9.0]])], [tf.constant([[1.0]])]]
    combiner.advance(tf.ones([2]), None, combiner.measure(rows))
    before = combiner.balance.numpy()
    assert before[0] != 1 and before[1] == 1
    combiner.advance(tf.ones([2]), tf.constant([True, False]), combiner.measure(rows))
    np.testing.assert_allclose(combiner.balance, before, rtol=1e-6)
    combiner.advance(tf.ones([2]), None, combiner.measure([rows[0], [None]]))
    np.testing.assert_allclose(combiner.balance, before, rtol=1e-6)


def test_total_has_the_static_weights_and_leaves_the_absent_out():
    combiner = losses.WeightedSum()
    combiner.build(["a", "b", "c"])
    values, ones = tf.constant([2.0, 3.0, np.nan]), tf.ones([3])
    present = tf.constant([True, True, False])
    np.testing.assert_allclose(combiner.total(values, ones, tf.constant([1.0, 10.0, 5.0]), present), 32.0)
    logs = losses.LogSum()
    logs.build(["a", "b", "c"])
    expected = np.log(2) + 10 * np.log(3)
    np.testing.assert_allclose(logs.total(values, ones, tf.constant([1.0, 10.0, 5.0]), present), expected, rtol=1e-6)
    means = losses.GeometricMean()
    means.build(["a", "b", "c"])
    np.testing.assert_allclose(means.total(values, ones, None, present), np.sqrt(6), rtol=1e-6)
    learned = losses.Uncertainty()
    learned.build(["a", "b", "c"])
    learned.log_variance.assign([0.2, 0.4, 8.0])
    expected = 2 + 3 + 0.5 * 0.6
    np.testing.assert_allclose(learned.total(values, ones, None, present), expected, rtol=1e-6)


def test_static_weights_are_in_the_total_of_the_geometric_mean():
    """Losses (4, 1): mean 2, coefficients (1/4, 1); with static weights (2, 4) it is 2 · 1/4 · 4 + 4 · 1 · 1 = 6."""
    combiner = losses.GeometricMean()
    combiner.build(["a", "b", "c"])
    values, present, static = (
        tf.constant([4.0, 1.0, 9.0]),
        tf.constant([True, True, False]),
        tf.constant([2.0, 4.0, 8.0]),
    )
    coefficients = combiner.coefficients(values, present, None)
    assert float(combiner.total(values, coefficients, static, present)) == pytest.approx(6.0)
    assert float(combiner.total(values, coefficients, None, present)) == pytest.approx(2.0)


@pytest.mark.parametrize("cls", [losses.LogSum, losses.GeometricMean, losses.FAMO])
def test_validate_names_the_losses_that_are_not_positive(cls):
    combiner = cls()
    combiner.build(["error", "penalty"])
    combiner.validate([1.0, 2.0])
    combiner.validate([1.0, -2.0], present=[True, False])
    combiner.validate([1.0, float("nan")])
    with pytest.raises(
        ValueError,
        match=r"takes logarithms.*\{'penalty': -2.0\}; it must be given.*above zero.*without logarithms: .*WeightedSum",
    ):
        combiner.validate([1.0, -2.0])
    with pytest.raises(ValueError, match="'error': 0.0"):
        combiner.validate([0.0, 2.0])


def test_validate_lets_famo_go_down_to_its_minimum():
    combiner = losses.FAMO(minimum={"error": -5.0})
    combiner.build(["error", "penalty"])
    combiner.validate([-2.0, 1.0])
    with pytest.raises(ValueError, match=r"\{'error': -5.0\}.*above `minimum`, which is \{'error': -5.0\}"):
        combiner.validate([-5.0, 1.0])


def test_validate_allows_all_where_no_logarithms_are_taken():
    combiner = losses.ReLoBRaLo()
    combiner.build(["error", "penalty"])
    combiner.validate([0.0, -2.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.LogSum(update_every=0), "`update_every` is 0; it must be at least 1"),
        (lambda: losses.LogSum(warmup_steps=-1), "`warmup_steps` is -1; it must be at least 0"),
        (lambda: losses.LogSum(moving_average=1.0), r"`moving_average` is 1.0; it must be in \[0, 1\)"),
        (lambda: losses.LogSum(clip=(2, 1)), r"`clip` is \(2, 1\); it must be \(low, high\)"),
        (lambda: losses.LogSum(epsilon=0), "`epsilon` is 0; it must be above 0"),
        (lambda: losses.RandomWeights(seed=-1), "`seed` is -1"),
        (lambda: losses.Uncertainty(learning_rate=0), "`learning_rate` is 0"),
        (lambda: losses.FAMO(learning_rate=0), "`learning_rate` is 0"),
        (lambda: losses.FAMO(decay=-1), "`decay` is -1"),
        (lambda: losses.FAMO(epsilon=0), "`epsilon` is 0"),
        (lambda: losses.DynamicWeightAverage(window=0), "`window` is 0"),
        (lambda: losses.DynamicWeightAverage(temperature=0), "`temperature` is 0"),
        (lambda: losses.ReLoBRaLo(alpha=2), r"`alpha` is 2; it must be in \[0, 1\]"),
        (lambda: losses.ReLoBRaLo(expected_rho=2), "`expected_rho` is 2"),
        (lambda: losses.ReLoBRaLo(temperature=0), "`temperature` is 0"),
        (lambda: losses.GradNorm(alpha=-1), "`alpha` is -1"),
        (lambda: losses.GradNorm(learning_rate=0), "`learning_rate` is 0"),
        (lambda: losses.GradientBalance("median"), "`statistic` is 'median'; it must be one of"),
        (lambda: losses.PCGrad(seed=-1), "`seed` is -1"),
        (lambda: losses.CAGrad(c=-1), "`c` is -1"),
        (lambda: losses.FAMO(minimum="x"), "`minimum` is 'x'; it must be a finite number, or a dict"),
        (lambda: losses.FAMO(minimum={"a": "x"}), "`minimum` is {'a': 'x'}; it must be a finite number"),
        (lambda: losses.FAMO(minimum=np.nan), "`minimum` is nan; it must be a finite number"),
        (lambda: losses.CAGrad(rescale="cubic"), "`rescale` is 'cubic'; it must be one of"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


COUNTS = {"update_every": 1, "warmup_steps": 0, "seed": 0, "window": 1}


@pytest.mark.parametrize("value", [2.5, 2.0, True, "2", None], ids=repr)
@pytest.mark.parametrize("cls", exported(), ids=lambda cls: cls.name)
def test_what_counts_updates_or_is_a_seed_is_a_whole_number(cls, value):
    for name in set(COUNTS) & set(cls.arguments()):
        message = f"`{name}` is {value!r}; it must be a whole number, at least {COUNTS[name]}"
        with pytest.raises(ValueError, match=message):
            cls(**{name: value})
        kept = cls(**{name: np.int64(3)}).get_config()[name]
        assert kept == 3 and type(kept) is int


def test_one_name_is_not_its_letters():
    combiner = losses.Uncertainty(classification="digit")
    combiner.build(["digit", "box"])
    np.testing.assert_array_equal(combiner.coefficients(None, None, None), [1.0, 0.5])
    assert losses.Uncertainty.from_config(combiner.get_config()).classification == ("digit",)


@pytest.mark.parametrize(
    ("combiner", "message"),
    [
        (losses.Uncertainty(classification=["c"]), r"`classification` names \['c'\].*\['a', 'b'\]"),
        (losses.FAMO(minimum={"c": 1.0}), r"`minimum` names \['c'\].*\['a', 'b'\]"),
        (losses.GradientBalance(reference="c"), r"`reference` is 'c'.*\['a', 'b'\]"),
    ],
)
def test_names_that_are_no_losses(combiner, message):
    for _ in range(2):  # a failed build leaves nothing behind
        with pytest.raises(ValueError, match=message):
            combiner.build(["a", "b"])


def test_only_famo_uses_losses_after_the_update():
    combiner = losses.LogSum()
    combiner.build(["a", "b"])
    with pytest.raises(NotImplementedError, match="LogSum does not use"):
        combiner.advance_after(None, None, None)


def test_a_combiner_of_ones_own_needs_only_a_rule():
    class Largest(Combiner):
        """All weight on the largest loss."""

        name, needs = "largest", "losses"

        def propose(self, losses, present, measured):
            return tf.one_hot(tf.argmax(losses), len(self.names))

    np.testing.assert_array_equal(coefficients(Largest(), [(1.0, 2.0), (4.0, 3.0)]), [[0, 1], [1, 0]])
    assert Largest(clip=(0.0, 0.5)).get_config()["clip"] == (0.0, 0.5)
