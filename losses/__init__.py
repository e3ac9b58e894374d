"""Named losses, schedules of their weights, and combiners that make one update of them.

A loss is called as `loss(targets, outputs)` and gives one value per example or element; options are set by
calling it with keywords only, as in `huber(delta=2.0)`. Any `keras.losses.Loss` works beside them.
"""

from losses.classification import (
    binary_cross_entropy,
    binary_focal,
    categorical_cross_entropy,
    categorical_focal,
    categorical_hinge,
    hinge,
    sparse_categorical_cross_entropy,
)
from losses.combiners import (
    FAMO,
    MGDA,
    CAGrad,
    Combiner,
    ConFIG,
    DynamicWeightAverage,
    GeometricMean,
    GradientBalance,
    GradNorm,
    LogSum,
    PCGrad,
    RandomWeights,
    ReLoBRaLo,
    Uncertainty,
    WeightedSum,
    combiner_from_name,
)
from losses.contrastive import info_nce, triplet
from losses.distributions import (
    bernoulli_negative_log_likelihood,
    gaussian_kl,
    gaussian_negative_log_likelihood,
    standard_normal_kl,
)
from losses.reduction import summed
from losses.regression import absolute_error, huber, log_cosh, quantile, squared_error
from losses.regularization import activity, temporal_smoothness
from losses.schedules import (
    Constant,
    CosineRamp,
    CyclicalKL,
    DisabledAfter,
    EnabledFrom,
    KLWarmup,
    LinearRamp,
    Piecewise,
    Schedule,
    SigmoidRamp,
)
from losses.sequences import ctc, masked_cross_entropy, masked_squared_error

__all__ = [
    "CAGrad",
    "Combiner",
    "ConFIG",
    "Constant",
    "CosineRamp",
    "CyclicalKL",
    "DisabledAfter",
    "DynamicWeightAverage",
    "EnabledFrom",
    "FAMO",
    "GeometricMean",
    "GradNorm",
    "GradientBalance",
    "KLWarmup",
    "LinearRamp",
    "LogSum",
    "MGDA",
    "PCGrad",
    "Piecewise",
    "RandomWeights",
    "ReLoBRaLo",
    "Schedule",
    "SigmoidRamp",
    "Uncertainty",
    "WeightedSum",
    "absolute_error",
    "activity",
    "bernoulli_negative_log_likelihood",
    "binary_cross_entropy",
    "binary_focal",
    "categorical_cross_entropy",
    "categorical_focal",
    "categorical_hinge",
    "combiner_from_name",
    "ctc",
    "gaussian_kl",
    "gaussian_negative_log_likelihood",
    "hinge",
    "huber",
    "info_nce",
    "log_cosh",
    "masked_cross_entropy",
    "masked_squared_error",
    "quantile",
    "sparse_categorical_cross_entropy",
    "squared_error",
    "standard_normal_kl",
    "summed",
    "temporal_smoothness",
    "triplet",
]
