"""Forward passes only: evaluation, prediction, named sets of data, and the best result so far."""
