"""Looptape's trainer: custom training loops for Keras 3 on TensorFlow."""

from looptape._checkout import one_package
from looptape.trainer.probing import probe
from looptape.trainer.trainer import Trainer

one_package(__name__)

__all__ = ["Trainer", "probe"]
