"""Combiners that need only the loss values: one backward pass per update."""
