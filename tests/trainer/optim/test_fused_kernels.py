"""The fused steps of optimizers against Keras's own, on the same gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.optim import fused_kernels
from looptape.trainer.optim.optimizer_groups import OptimizerGroup


class Slower(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate / 2)


ADAM, SGD = "ResourceApplyAdagradV2", "ResourceApplyGradientDescent"
MOMENTUM = "ResourceApplyKerasMomentum"
CASES = {
    "adam": (lambda: keras.optimizers.Adam(0.05, beta_1=0.8, beta_2=0.95, epsilon=1e-5), ADAM),
    "adam with a schedule": (
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
        ADAM,
    ),
    "adam, own clipping and averages": (
        lambda: keras.optimizers.Adam(0.1, clipnorm=0.5, use_ema=True, ema_momentum=0.5),
        ADAM,
    ),
    "adamw": (lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1), ADAM),
    "amsgrad": (lambda: keras.optimizers.Adam(0.05, amsgrad=True), None),
    "sgd": (lambda: keras.optimizers.SGD(0.3), SGD),
    "momentum": (lambda: keras.optimizers.SGD(0.3, momentum=0.7), MOMENTUM),
    "nesterov": (lambda: keras.optimizers.SGD(0.3, momentum=0.7, nesterov=True), MOMENTUM),
    "subclass": (lambda: Slower(0.3), None),
    "rmsprop": (lambda: keras.optimizers.RMSprop(0.05), None),
    "by pattern": (
        lambda: OptimizerGroup({"second": keras.optimizers.Adam(0.1), ".*": keras.optimizers.SGD(0.1)}),
        ADAM,
    ),
}


def make_variables(dtype="float32"):
    rng = np.random.default_rng(0)
    constraint = keras.constraints.NonNeg()
    return [
        keras.Variable(rng.normal(size=(5, 3)), dtype=dtype, name="first"),
        keras.Variable(rng.normal(size=(4,)), dtype=dtype, name="second"),
        _constrained(keras.Variable(rng.normal(size=(4,)), dtype=dtype, name="third"), constraint),
    ]


def _constrained(variable, constraint):
    variable.constraint = constraint
    return variable


def run(make, apply, sparse=False, dtype="float32", steps=6):
    """(all variables of the optimizer and the model after a few steps, the operations of the graph)."""
    variables, optimizer = make_variables(dtype), make()
    optimizer.build(variables)
    rng = np.random.default_rng(1)
    gradients = [[rng.normal(size=v.shape).astype(dtype) for v in variables] for _ in range(steps)]

    @tf.function(autograph=False)
    def step(*gradients):
        gradients = list(gradients)
        if sparse:
            gradients[0] = tf.IndexedSlices(gradients[0][:2], tf.constant([3, 1]), tf.constant([5, 3]))
        apply(optimizer, gradients, variables)

    for own in gradients:
        step(*[tf.constant(gradient) for gradient in own])
    assert step.experimental_get_tracing_count() == 1
    kinds = {operation.type for operation in step.get_concrete_function(*gradients[0]).graph.get_operations()}
    return [keras.ops.convert_to_numpy(v) for v in [*variables, *optimizer.variables]], kinds


def by_keras(optimizer, gradients, variables):
    optimizer.apply(gradients, variables)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_fused_step_is_kerass_step(name, sparse):
    make, kernel = CASES[name]
    expected, plain = run(make, by_keras, sparse)
    got, kinds = run(make, fused_kernels.apply, sparse)
    assert not plain & {ADAM, SGD, MOMENTUM}
    assert kinds & {ADAM, SGD, MOMENTUM} >= ({kernel} if kernel else set())
    assert kernel or not kinds & {ADAM, SGD, MOMENTUM}
    for own, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_types_of_variables_are_left_to_keras(dtype):
    make = CASES["adam"][0]
    expected, _ = run(make, by_keras, dtype=dtype)
    got, kinds = run(make, fused_kernels.apply, dtype=dtype)
    assert not kinds & {ADAM, SGD, MOMENTUM}
    for own, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(own, other)


def test_the_optimizer_is_left_as_it_was():
    variables, optimizer = make_variables(), keras.optimizers.Adam(0.1)
    optimizer.build(variables)
    fused_kernels.apply(optimizer, [tf.ones(v.shape) for v in variables], variables)
    assert "update_step" not in vars(optimizer)
    with pytest.raises(ValueError, match="[Uu]nknown variable"):
        fused_kernels.apply(optimizer, [tf.ones([1])], [keras.Variable(np.zeros(1, np.float32))])
    assert "update_step" not in vars(optimizer)


def test_a_step_someone_put_on_the_optimizer_is_respected():
    variables, optimizer = make_variables()[:1], keras.optimizers.SGD(0.1)
    optimizer.build(variables)
    seen = []
    vars(optimizer)["update_step"] = lambda gradient, variable, rate: seen.append(variable)
    fused_kernels.apply(optimizer, [tf.ones(variables[0].shape)], variables)
    assert len(seen) == 1 and "update_step" in vars(optimizer)
