"""Loggers beside TensorBoard: files of rows, MLflow, Weights & Biases."""
