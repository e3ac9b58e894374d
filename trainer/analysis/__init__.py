"""Examines the time steps of a batch: gradients, loss Jacobian, credit matrix, truncation, plots."""
