"""Combiners that need the gradients of the individual losses, in every update or periodically."""
