"""Data: adapters to `tf.data`, the source with its position, batches."""
