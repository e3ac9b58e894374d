"""Which combiners stand for the others in tests that take seconds for each; the others are `long`."""

import pytest

from looptape.losses.combiners.names import exported

# Those that differ from each of these only in their K x K part, which has tests of its own.
ALIKE = {"aligned_mtl", "dualproj", "fairgrad", "gradvac", "imtl_g", "nash_mtl", "pcd", "upgrad"}  # mgda
ALIKE |= {"ntk_balance"}  # gradnorm
ALIKE |= {"softadapt", "stch"}  # relobralo


def every_combiner(pick=lambda cls: cls, without=()):
    """Parameters for `pytest.mark.parametrize`: all combiners, those that are alike marked as long."""
    chosen = [cls for cls in exported() if cls.name not in without]
    marks = [[pytest.mark.long] if cls.name in ALIKE else [] for cls in chosen]
    return [pytest.param(pick(cls), marks=m, id=cls.name) for cls, m in zip(chosen, marks, strict=True)]
