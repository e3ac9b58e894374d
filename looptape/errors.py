"""Errors that a program may want to catch."""

from looptape.experiments.launch.options import Refused
from looptape.trainer.distribution.workers import WorkerLost
from looptape.trainer.loop.signals import Terminated
from looptape.trainer.probing.errors import ProbeError
from looptape.trainer.recurrent.hoisted.adjoint_pass import SecondDerivativeError
from looptape.trainer.step.forward.loss_weights import WrongLossNames
from looptape.trainer.step.nonfinite import NonFiniteUpdates

__all__ = [
    "NonFiniteUpdates",
    "ProbeError",
    "Refused",
    "SecondDerivativeError",
    "Terminated",
    "WorkerLost",
    "WrongLossNames",
]
