"""Adam, AdamW and SGD with one operation per variable, by TensorFlow's own kernels.

Keras writes an optimizer's step as some fifteen small operations per variable, each a pass over memory; that is half
of a small update. TensorFlow has a kernel for the same formula. Only `update_step` is replaced, and only while an
update is traced: clipping, weight decay, constraints, averages and the slots stay Keras's own, and so do checkpoints.

What is private to Keras (the names of the slots, how they are found) is used here only.
"""

import contextlib

import keras
import tensorflow as tf

from looptape.trainer.variables import raw


def apply(optimizer, gradients, variables):
    """`optimizer.apply` with fused steps where there are kernels for them. Traced or eager, outside replicas.

    Of a fused step, only what writes waits for the control dependencies in force: the rest may run beside the check
    that they stand for.
    """
    with contextlib.ExitStack() as stack:
        for one in getattr(optimizer, "values", lambda: [optimizer])():
            stack.enter_context(_replaced_step(one))
        optimizer.apply(gradients, variables)


@contextlib.contextmanager
def _replaced_step(optimizer):
    # A subclass has its own idea of a step, and so has whoever put another function there.
    make = _STEPS.get(type(optimizer))
    kernel = None if make is None or "update_step" in vars(optimizer) else make(optimizer)
    if kernel is None:
        yield
        return
    ordinary = optimizer.update_step

    def step(gradient, variable, learning_rate):
        # In float64 Keras's constants are rounded to float32, which a kernel would not repeat.
        if not isinstance(gradient, tf.IndexedSlices) and raw(variable).dtype == tf.float32:
            kernel(tf.cast(gradient, tf.float32), variable, learning_rate)
        else:
            ordinary(gradient, variable, learning_rate)

    vars(optimizer)["update_step"] = step
    try:
        yield
    finally:
        del vars(optimizer)["update_step"]


def _adam(optimizer):
    """Adam by three kernels. There is one for the whole step, but its 1 − 0.999 is a difference of float32 numbers,
    1.3e-5 off what Keras takes: weights would leave those of Keras by 1e-6 within ten steps.
    """
    if optimizer.amsgrad:
        return None
    with tf.control_dependencies(None):
        step = tf.cast(raw(optimizer.iterations) + 1, tf.float32)
        powers = [tf.pow(beta, step) for beta in (optimizer.beta_1, optimizer.beta_2)]
        correction = tf.sqrt(1 - powers[1]), 1 - powers[0]

    @_once
    def corrected(learning_rate):
        with tf.control_dependencies(None):
            return tf.cast(learning_rate, tf.float32) * correction[0] / correction[1]

    def kernel(gradient, variable, learning_rate):
        index = optimizer._get_variable_index(variable)
        momentum, velocity = raw(optimizer._momentums[index]), raw(optimizer._velocities[index])
        with tf.control_dependencies(None):
            square = tf.square(gradient)
        rate = corrected(learning_rate)
        _approach(momentum, gradient, 1 - optimizer.beta_1)
        _approach(velocity, square, 1 - optimizer.beta_2)
        # `update_slots=False` leaves the accumulator alone: variable −= rate · momentum / (√velocity + ε).
        tf.raw_ops.ResourceApplyAdagradV2(
            var=raw(variable).handle,
            accum=velocity.handle,
            lr=rate,
            epsilon=tf.constant(optimizer.epsilon),
            grad=momentum.read_value(),
            update_slots=False,
        )

    return kernel


def _once(make):
    """A function of the learning rate that is computed once for all variables: Keras hands the same object to each."""
    known: dict = {}

    def value(learning_rate):
        if id(learning_rate) not in known:
            known[id(learning_rate)] = learning_rate, make(learning_rate)
        return known[id(learning_rate)][1]

    return value


def _approach(variable, target, share):
    """variable += share · (target − variable)."""
    with tf.control_dependencies(None):
        difference = variable.read_value() - target
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=tf.constant(share), delta=difference)


def _sgd(optimizer):
    rate = _once(lambda learning_rate: tf.cast(learning_rate, tf.float32))

    def plain(gradient, variable, learning_rate):
        tf.raw_ops.ResourceApplyGradientDescent(var=raw(variable).handle, alpha=rate(learning_rate), delta=gradient)

    def with_momentum(gradient, variable, learning_rate):
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=raw(variable).handle,
            accum=raw(optimizer.momentums[optimizer._get_variable_index(variable)]).handle,
            lr=rate(learning_rate),
            grad=gradient,
            momentum=tf.constant(optimizer.momentum),
            use_nesterov=optimizer.nesterov,
        )

    return with_momentum if optimizer.momentum else plain


_STEPS = {keras.optimizers.Adam: _adam, keras.optimizers.AdamW: _adam, keras.optimizers.SGD: _sgd}
