"""The names for an experiment file: `Config`, `option`, `Experiment`, `Goal`, `main`."""

from looptape.experiments.launch.config import Config
from looptape.experiments.launch.factories import optimizer, trainer_options
from looptape.experiments.launch.options import Refused, option
from looptape.experiments.launch.results_table import Goal
from looptape.experiments.launch.runner import Experiment, main, run

__all__ = ["Config", "Experiment", "Goal", "Refused", "main", "option", "optimizer", "run", "trainer_options"]
