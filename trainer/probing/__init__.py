"""Gradients of every time step of a loop, from the ordinary backward pass."""

from trainer.probing.errors import ProbeError
from trainer.probing.host import Presented, missing_capacity, present, present_examples
from trainer.probing.loop import recurrent_loop
from trainer.probing.probes import probe
from trainer.probing.report import add, scalars, totals, vectors
from trainer.probing.session import ProbeSession
from trainer.probing.shares import shares

__all__ = [
    "Presented",
    "ProbeError",
    "ProbeSession",
    "add",
    "missing_capacity",
    "present",
    "present_examples",
    "probe",
    "recurrent_loop",
    "scalars",
    "shares",
    "totals",
    "vectors",
]
