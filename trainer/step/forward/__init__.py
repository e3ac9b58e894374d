"""The forward pass of a micro-batch: named losses, their weights, and the state that the pass moves."""
