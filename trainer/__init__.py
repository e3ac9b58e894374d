"""Looptape's trainer: custom training loops for Keras 3 on TensorFlow."""

from trainer.probing import probe
from trainer.trainer import Trainer

__all__ = ["Trainer", "probe"]
