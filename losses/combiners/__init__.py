"""How K named losses become one update: fourteen combiners with one interface, `Combiner`."""

from losses.combiners.base import Combiner
from losses.combiners.direction import MGDA, CAGrad, ConFIG, PCGrad
from losses.combiners.gradient_statistics import GradientBalance, GradNorm
from losses.combiners.history import DynamicWeightAverage, ReLoBRaLo
from losses.combiners.learned import FAMO, Uncertainty
from losses.combiners.names import combiner_from_name
from losses.combiners.value import GeometricMean, LogSum, RandomWeights, WeightedSum

__all__ = [
    "CAGrad",
    "Combiner",
    "ConFIG",
    "DynamicWeightAverage",
    "FAMO",
    "GeometricMean",
    "GradNorm",
    "GradientBalance",
    "LogSum",
    "MGDA",
    "PCGrad",
    "RandomWeights",
    "ReLoBRaLo",
    "Uncertainty",
    "WeightedSum",
    "combiner_from_name",
]
