import numpy as np
import pytest
import tensorflow as tf

from looptape import losses
from looptape.losses.convention import LossFunction, loss_function


def test_options_make_a_new_loss_and_leave_the_old_one():
    wide = losses.huber(delta=2.0)
    zero, four = tf.zeros([1]), tf.constant([4.0])
    np.testing.assert_allclose(wide(zero, four), [6.0])
    np.testing.assert_allclose(losses.huber(zero, four), [3.5])
    np.testing.assert_allclose(losses.huber(zero, four, delta=2.0), [6.0])
    np.testing.assert_allclose(wide(delta=1.0)(zero, four), [3.5])


def test_equal_options_are_equal():
    assert losses.huber(delta=2.0) == losses.huber(delta=2.0) != losses.huber
    assert hash(losses.huber(delta=1.0)) == hash(losses.huber)
    assert losses.huber() == losses.huber != losses.squared_error
    assert repr(losses.huber(delta=2.0)) == "huber(delta=2.0)"
    assert losses.huber.__name__ == "huber"


def test_options_property_is_a_copy():
    loss = losses.quantile(level=0.9)
    loss.options["level"] = 0.1
    assert loss.options == {"level": 0.9}


def test_unknown_option_suggests_the_nearest():
    with pytest.raises(TypeError, match=r"'delt' is not an option of `huber`; did you mean 'delta'\?.*\['delta'\]"):
        losses.huber(delt=2.0)


@pytest.mark.parametrize("arguments", [(1.0,), (1.0, 2.0, 3.0)])
def test_wrong_number_of_positional_arguments(arguments):
    with pytest.raises(TypeError, match=f"got {len(arguments)} positional.*targets and outputs"):
        losses.huber(*arguments)


def test_options_are_checked_when_set():
    seen = []
    loss = loss_function(lambda targets, outputs, *, a=1, b=2: outputs, check=lambda **all_: seen.append(all_))
    loss(a=5)
    assert seen == [{"a": 5, "b": 2}]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.huber(delta=0.0), "`delta` is 0.0; it must be above 0"),
        (lambda: losses.quantile(level=1.0), "`level` is 1.0; it must be between 0 and 1"),
        (lambda: losses.binary_focal(gamma=-1.0), "`gamma` is -1.0; it must be at least 0"),
        (lambda: losses.binary_focal(alpha=1.5), "`alpha` is 1.5"),
        (lambda: losses.categorical_cross_entropy(label_smoothing=1.0), "`label_smoothing` is 1.0"),
        (lambda: losses.binary_cross_entropy(from_logits="no"), "`from_logits` is 'no'"),
        (lambda: losses.ctc(blank=-1), "`blank` is -1"),
        (lambda: losses.standard_normal_kl(free_bits=-0.1), "`free_bits` is -0.1"),
        (lambda: losses.info_nce(temperature=0.0), "`temperature` is 0.0"),
        (lambda: losses.triplet(margin=0.0), "`margin` is 0.0"),
        (lambda: losses.triplet(distance="cosine"), "`distance` is 'cosine'; it must be one of"),
        (lambda: losses.activity(power=3), "`power` is 3; it must be 1 or 2"),
        (lambda: losses.temporal_smoothness(order=0), "`order` is 0; it must be 1 or 2"),
    ],
)
def test_options_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


REGRESSION = ["squared_error", "absolute_error", "huber", "log_cosh", "quantile"]


@pytest.mark.parametrize("name", REGRESSION + ["binary_cross_entropy", "binary_focal", "hinge"])
@pytest.mark.parametrize(
    ("targets", "outputs", "values"),
    [([4], [4], [4]), ([4], [4, 1], [4]), ([4, 1], [4], [4]), ([4, 3], [4, 3], [4]),
     ([4, 5], [4, 5, 1], [4, 5]), ([4, 5, 2], [4, 5, 2], [4, 5])],
)  # fmt: skip
def test_shapes(name, targets, outputs, values):
    loss = getattr(losses, name)
    assert loss(tf.ones(targets), tf.ones(outputs)).shape == values


@pytest.mark.parametrize("name", REGRESSION)
def test_shapes_that_would_broadcast_are_refused(name):
    with pytest.raises(ValueError, match=rf"`{name}` got targets of shape \(4, 3\) and outputs of shape \(4, 1\)"):
        getattr(losses, name)(tf.ones([4, 3]), tf.ones([4, 1]))


def test_unknown_rank_is_refused():
    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)])
    def traced(targets, outputs):
        return losses.squared_error(targets, outputs)

    with pytest.raises(ValueError, match="rank must be known"):
        traced(tf.ones([2]), tf.ones([2]))


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_precision_outputs_are_computed_in_float32(dtype):
    value = losses.squared_error(tf.zeros([1], dtype), tf.constant([300.0], dtype))  # 90,000 is beyond float16
    assert value.dtype == tf.float32
    np.testing.assert_allclose(value, [9e4], rtol=1e-2)


def test_integer_targets_work():
    np.testing.assert_allclose(losses.squared_error(tf.constant([3]), tf.constant([1.0])), [4.0])


@pytest.mark.parametrize("name", [n for n in losses.__all__ if isinstance(getattr(losses, n), LossFunction)])
def test_plain_loss_functions_are_callables_without_state(name):
    loss = getattr(losses, name)
    assert callable(loss) and not hasattr(loss, "call")  # `call` would look like a `keras.losses.Loss`
