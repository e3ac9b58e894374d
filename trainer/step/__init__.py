"""One traced update: micro-batches, losses, gradients, the stages up to the optimizer."""
