"""Errors that a program may want to catch."""

from looptape.experiments.launch.options import Refused
from looptape.trainer.distribution.workers import WorkerLost
from looptape.trainer.probing.errors import ProbeError

__all__ = ["ProbeError", "Refused", "WorkerLost"]
