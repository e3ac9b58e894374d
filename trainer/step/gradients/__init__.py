"""Gradients up to the optimizer: the stages of an update, the combination of losses, a user's own stages."""
