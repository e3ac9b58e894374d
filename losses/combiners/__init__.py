"""Twenty-eight combiners, which turn K named losses into one update, with one interface: `Combiner`."""

from looptape.losses.combiners.base import Combiner
from looptape.losses.combiners.by_gradient.bargaining import FairGrad, NashMTL
from looptape.losses.combiners.by_gradient.cone import PCD, DualProj, UPGrad
from looptape.losses.combiners.by_gradient.hull import MGDA, CAGrad
from looptape.losses.combiners.by_gradient.inverse import IMTLG, AlignedMTL, ConFIG
from looptape.losses.combiners.by_gradient.norms import GradientBalance, GradNorm, NTKBalance
from looptape.losses.combiners.by_gradient.rewriting import DBMTL, GradDrop, MomentumConFIG
from looptape.losses.combiners.by_gradient.surgery import GradVac, PCGrad
from looptape.losses.combiners.by_value.history import DynamicWeightAverage, ReLoBRaLo, SoftAdapt
from looptape.losses.combiners.by_value.learned import FAMO, Uncertainty
from looptape.losses.combiners.by_value.tchebycheff import STCH
from looptape.losses.combiners.by_value.value import GeometricMean, LogSum, RandomWeights, WeightedSum
from looptape.losses.combiners.names import combiner_from_name

__all__ = [
    "AlignedMTL",
    "CAGrad",
    "Combiner",
    "ConFIG",
    "DBMTL",
    "DualProj",
    "DynamicWeightAverage",
    "FAMO",
    "FairGrad",
    "GeometricMean",
    "GradDrop",
    "GradNorm",
    "GradVac",
    "GradientBalance",
    "IMTLG",
    "LogSum",
    "MGDA",
    "MomentumConFIG",
    "NTKBalance",
    "NashMTL",
    "PCD",
    "PCGrad",
    "RandomWeights",
    "ReLoBRaLo",
    "STCH",
    "SoftAdapt",
    "UPGrad",
    "Uncertainty",
    "WeightedSum",
    "combiner_from_name",
]
