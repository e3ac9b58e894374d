"""The stages of one update after the backward pass, each a small pure function, in the order in which they run.

all_reduce → divide → combine → finite check → clip → optimizer.apply → average. All are traced.
"""

import tensorflow as tf


def to_dense(gradient, shape=None):
    """A dense gradient. With `shape`, the variable's, that is known in the graph, too.

    Of a Dense layer on [batch, time, features] with an unknown batch TensorFlow knows only a part of it.
    """
    gradient = tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
    if shape is not None and not gradient.shape.is_fully_defined():
        gradient.set_shape(shape)
    return gradient


def deduplicate(gradient):
    """Sums rows of `IndexedSlices` that name the same index; norms and optimizers take each row for itself."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def scale_gradient(gradient, factor):
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def weigh(gradients, factors):
    """Σ_k factor_k · g_k of dense or sparse gradients, dense."""
    parts = [to_dense(scale_gradient(gradient, factor)) for gradient, factor in zip(gradients, factors, strict=True)]
    return parts[0] if len(parts) == 1 else tf.add_n(parts)


def fill_missing(gradients, sources):
    """Dense gradients, zeros where a source is not reached."""
    return [tf.zeros_like(x) if g is None else to_dense(g) for g, x in zip(gradients, sources, strict=True)]


def factors(divisors, loss_scale=None):
    """[groups]: what turns the summed gradients of each group into means. A group without elements gives 0.

    Args:
        divisors: [groups] scalars Σ w over the whole update.
        loss_scale: what the losses were multiplied by, or None.
    """
    return [tf.math.divide_no_nan(1.0, each if loss_scale is None else each * loss_scale) for each in divisors]


def divide(gradients, divisors, loss_scale=None):
    """Turns summed gradients of each group into means: one factor per group.

    Args:
        gradients: [groups][variables], gradients of Σ w·l (times the loss scale).
        divisors: as for `factors`.
        loss_scale: as for `factors`.
    """
    pairs = zip(gradients, factors(divisors, loss_scale), strict=True)
    return [[scale_gradient(gradient, factor) for gradient in group] for group, factor in pairs]


def unscale(gradients, loss_scale):
    """Takes the loss scale out of gradients that are means already."""
    if loss_scale is None:
        return gradients
    factor = 1.0 / loss_scale
    return [[scale_gradient(gradient, factor) for gradient in group] for group in gradients]


def combine(gradients, weights=None, shared=None):
    """Σ_k weight_k · g_k per variable; without weights the plain sum of the groups.

    `weights` are K numbers or a [K] tensor. With `shared`, [bool] of the variables, those that are not shared get the
    plain sum.
    """
    if weights is None and len(gradients) == 1:
        return list(gradients[0])
    combined = []
    for index, parts in enumerate(zip(*gradients, strict=True)):
        parts = [to_dense(part) for part in parts]
        if weights is None or (shared is not None and not shared[index]):
            combined.append(tf.add_n(parts))
        else:
            combined.append(weighted_sum(parts, weights))
    return combined


def weighted_sum(parts, weights):
    """Σ_k weight_k · part_k of dense tensors; with float64 weights in float64, where large terms may cancel."""
    dtype = parts[0].dtype
    if tf.is_tensor(weights) and weights.dtype == tf.float64 and dtype != tf.float64:
        rows = tf.cast(tf.reshape(tf.stack(parts), [len(parts), -1]), tf.float64)
        return tf.cast(tf.reshape(tf.matmul(weights[tf.newaxis], rows), tf.shape(parts[0])), dtype)
    weights = tf.unstack(weights) if tf.is_tensor(weights) else weights
    return tf.add_n([part * tf.cast(weight, dtype) for part, weight in zip(parts, weights, strict=True)])


def global_norm(gradients, exact=False):
    """The norm of all gradients together, a float32 scalar; of half precision from squares in float32.

    Squares in float32 overflow from gradients of 1.8e19 on. If `exact`, the norm is then computed again in float64.
    """
    if any(gradient.dtype != tf.float32 for gradient in gradients):
        widest = tf.float64 if any(gradient.dtype == tf.float64 for gradient in gradients) else tf.float32
        gradients = [tf.cast(to_dense(gradient), widest) for gradient in gradients]
    quick = tf.cast(tf.linalg.global_norm(gradients), tf.float32)
    if not exact:
        return quick

    def again():
        return tf.cast(tf.linalg.global_norm([tf.cast(to_dense(each), tf.float64) for each in gradients]), tf.float32)

    return tf.cond(tf.math.is_finite(quick), lambda: quick, again)


def clip(gradients, norm, clip_norm):
    """Gradients whose global norm is at most `clip_norm`; `norm` is the norm they have."""
    factor = clip_norm / tf.maximum(norm, clip_norm)
    return [scale_gradient(gradient, factor) for gradient in gradients]


def average(averages, variables, decay):
    """Moves the exponential averages towards the variables."""
    for mean, variable in zip(averages, variables, strict=True):
        mean.assign_sub((1.0 - decay) * (mean - variable))
