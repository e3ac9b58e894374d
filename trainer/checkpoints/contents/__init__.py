"""The contents of a checkpoint: names of its pieces, state beside the model, copies, and whether they fit."""
