"""Actions on the gradient of recurrent layers at each time step, for `Trainer(timestep_actions=…)`.

Trainer(model, optimizer, losses, timestep_actions=[timesteps.ClipNorm(1.0)])
"""

from looptape.trainer.recurrent.actions import Action, ClipNorm, Cut, Detach, Moment, Normalize, Scale
from looptape.trainer.recurrent.omega import Omega, omega
from looptape.trainer.recurrent.row_begins import Flags, Lengths, Mask

__all__ = [
    "Action",
    "ClipNorm",
    "Cut",
    "Detach",
    "Flags",
    "Lengths",
    "Mask",
    "Moment",
    "Normalize",
    "Omega",
    "Scale",
    "omega",
]
