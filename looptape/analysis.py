"""Plots of gradients over time steps, and the data of finished runs."""

from looptape.dashboard.run_data import RunData, together
from looptape.trainer.analysis import plots

__all__ = ["RunData", "plots", "together"]
