"""Gradients of every time step of a loop, from the ordinary backward pass."""

from looptape.trainer.probing.errors import ProbeError
from looptape.trainer.probing.probe_calls import probe
from looptape.trainer.probing.quantities import shares
from looptape.trainer.probing.report import (
    Presented,
    add,
    missing_capacity,
    present,
    present_examples,
    scalars,
    totals,
    vectors,
)
from looptape.trainer.probing.session import ProbeSession
from looptape.trainer.recurrent.loops.recurrent_loop import recurrent_loop

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
