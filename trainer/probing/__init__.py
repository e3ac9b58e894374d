"""Gradients of every time step of a loop, from the ordinary backward pass."""

from trainer.probing.errors import ProbeError
from trainer.probing.loop import recurrent_loop
from trainer.probing.probes import probe
from trainer.probing.session import ProbeSession

__all__ = ["ProbeError", "ProbeSession", "probe", "recurrent_loop"]
