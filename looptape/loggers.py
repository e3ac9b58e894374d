"""Loggers for `fit(loggers=[…])`, in addition to TensorBoard."""

from looptape.trainer.loggers.interface import Audio, Histogram, Logger, Picture
from looptape.trainer.loggers.row_files import CSV, JSONLines
from looptape.trainer.loggers.services import MLflow, WandB

__all__ = ["Audio", "CSV", "Histogram", "JSONLines", "Logger", "MLflow", "Picture", "WandB"]
