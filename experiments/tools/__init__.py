"""Programs around a run: sweeps, comparisons, lists, reproduction, new experiments, serving."""
