"""Logging: running sums, scalars, event files, time-step vectors, heat maps."""
