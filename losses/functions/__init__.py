"""The loss functions, one file for each family."""
