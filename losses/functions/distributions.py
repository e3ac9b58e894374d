"""Terms of an evidence lower bound: divergences and likelihoods [batch], summed over all other axes.

A diagonal Gaussian is the pair `(mean, log_variance)`, or one tensor with both side by side on the last axis.
"""

import math

import tensorflow as tf

from looptape.losses.convention import aligned, loss_function, require


def check_free_bits(free_bits):
    require(free_bits >= 0, f"`free_bits` is {free_bits}", "at least 0", "Use 0 for the plain divergence.")


@loss_function(check=check_free_bits)
def standard_normal_kl(targets, outputs, *, free_bits=0.0):
    """KL(N(mean, variance) || N(0, I)) of the outputs' Gaussian, in nats; targets are ignored.

    Each latent dimension counts for at least `free_bits` nats; below that it has no gradient.

    >>> standard_normal_kl(None, (tf.constant([[1.0, 0.0]]), tf.zeros([1, 2]))).numpy().tolist()
    [0.5]
    """
    mean, log_variance = gaussian(outputs, "standard_normal_kl")
    log_variance = fitted(log_variance, mean, "standard_normal_kl")
    return summed_kl(mean, log_variance, tf.zeros_like(mean), tf.zeros_like(mean), free_bits)


@loss_function(check=check_free_bits)
def gaussian_kl(targets, outputs, *, free_bits=0.0):
    """KL(outputs || targets) of two diagonal Gaussians, in nats. The targets are the prior.

    >>> one, zero = tf.ones([1, 2]), tf.zeros([1, 2])
    >>> gaussian_kl((zero, zero), (one, zero)).numpy().tolist()
    [1.0]
    """
    mean, log_variance = gaussian(outputs, "gaussian_kl")
    prior = (tf.cast(part, mean.dtype) for part in gaussian(targets, "gaussian_kl"))
    log_variance, *prior = (fitted(part, mean, "gaussian_kl") for part in (log_variance, *prior))
    return summed_kl(mean, log_variance, *prior, free_bits)


@loss_function
def gaussian_negative_log_likelihood(targets, outputs):
    """-log N(targets | mean, variance), the reconstruction term for real-valued data; outputs are the Gaussian.

    The log-variance must broadcast to the shape of the mean: the same shape, size 1 in some axes, or one number.

    >>> outputs = (tf.constant([[1.0]]), tf.constant([[0.0]]))
    >>> gaussian_negative_log_likelihood(tf.constant([[1.0]]), outputs).numpy().round(4)
    array([0.9189], dtype=float32)
    """
    mean, log_variance = gaussian(outputs, "gaussian_negative_log_likelihood")
    targets, mean = aligned(targets, mean, "gaussian_negative_log_likelihood")
    log_variance = like(log_variance, mean, "gaussian_negative_log_likelihood")
    values = squared_over_variance(targets - mean, log_variance) + log_variance + math.log(2.0 * math.pi)
    return per_example(0.5 * values)


@loss_function
def bernoulli_negative_log_likelihood(targets, outputs):
    """-log p(targets) of Bernoulli variables whose logits are the outputs: the reconstruction term for data in [0, 1].

    >>> bernoulli_negative_log_likelihood(tf.constant([[1.0, 0.0]]), tf.zeros([1, 2])).numpy().round(4)
    array([1.3863], dtype=float32)
    """
    targets, outputs = aligned(targets, outputs, "bernoulli_negative_log_likelihood")
    return per_example(tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=outputs))


def summed_kl(mean, log_variance, prior_mean, prior_log_variance, free_bits):
    """KL [batch] of diagonal Gaussians; each dimension counts for at least `free_bits`."""
    difference = squared_over_variance(mean - prior_mean, prior_log_variance)
    ratio = log_variance - prior_log_variance
    # expm1(r) - r is never negative by rounding the way exp(r) - 1 - r is.
    values = 0.5 * (difference + tf.math.expm1(ratio) - ratio)
    return per_example(tf.maximum(values, free_bits) if free_bits else values)


def squared_over_variance(difference, log_variance):
    """difference^2 / variance without overflow: 1 / variance exceeds float32 from a log-variance of -89 down.

    A difference of 0 gives 0 for any variance. Log-variances below -170 are treated as -170.

    >>> squared_over_variance(tf.constant([0.0, 1e-20]), tf.constant([-1e3, -92.0])).numpy().round(3).tolist()
    [0.0, 0.9020000100135803]
    """
    return tf.square(difference * tf.exp(tf.minimum(-0.5 * log_variance, 85.0)))


def gaussian(value, name):
    """Returns mean and log-variance from a pair, or from the two halves of one tensor's last axis."""
    if isinstance(value, tuple | list):
        require(
            len(value) == 2,
            f"`{name}` got {len(value)} tensors",
            "a pair (mean, log_variance)",
            "Return both.",
        )
        return value
    last = value.shape[-1]
    require(
        last is not None and last % 2 == 0,
        f"`{name}` got one tensor of shape {value.shape}",
        "a pair (mean, log_variance), or a tensor with both halves on its last axis",
        "Make the layer twice as wide as the latent.",
    )
    return tf.split(value, 2, axis=-1)


def like(log_variance, mean, name):
    """Returns the log-variance with the rank of the mean, so that it never broadcasts across examples.

    >>> like(tf.zeros([5]), tf.zeros([5, 1]), "gaussian_negative_log_likelihood").shape.as_list()
    [5, 1]
    """
    given = log_variance.shape
    if given.rank == mean.shape.rank - 1 and given.rank:
        log_variance = log_variance[..., tf.newaxis]
    elif given.rank == mean.shape.rank + 1 and given[-1] == 1:
        log_variance = tf.squeeze(log_variance, -1)
    shape = log_variance.shape
    fits = shape.rank == mean.shape.rank and all(
        v in (None, 1) or m is None or v == m for v, m in zip(shape, mean.shape, strict=True)
    )
    require(
        fits or shape.rank == 0,
        f"`{name}` got a mean of shape {mean.shape} and a log-variance of shape {given}",
        "equal shapes, or a log-variance of size 1 in the axes where it is shared",
        "Correct the layer that makes the log-variance, or transpose its output.",
    )
    return log_variance


def fitted(part, mean, name):
    """Returns a log-variance or a part of a prior in a shape that broadcasts to the mean's, never beyond it.

    It may be [features], the same for all examples. [batch] with a mean [batch, 1] would broadcast to [batch, batch].

    >>> fitted(tf.zeros([5]), tf.zeros([5, 1]), "gaussian_kl").shape.as_list()
    [5, 1]
    """
    given, wanted = part.shape, mean.shape
    if given.rank == wanted.rank - 1 and wanted[-1] == 1:
        part = part[..., tf.newaxis]
    elif given.rank == wanted.rank + 1 and given[-1] == 1:
        part = tf.squeeze(part, -1)
    shape = part.shape.as_list()
    last = wanted.as_list()[wanted.rank - len(shape) :]
    unknown = len(shape) == wanted.rank  # an axis of unknown size is the same axis, then
    pairs = zip(shape, last, strict=False)
    fits = len(shape) <= wanted.rank and all(v in (1, m) or (unknown and None in (v, m)) for v, m in pairs)
    require(
        fits,
        f"`{name}` got a mean of shape {wanted} with a log-variance or prior of shape {given}",
        "equal shapes, or sizes of 1 in the axes where it is shared",
        "Reshape it to the axes of the mean.",
    )
    return part


def per_example(values):
    """Sums over all axes but the first."""
    return tf.reduce_sum(values, axis=list(range(1, values.shape.rank)))
