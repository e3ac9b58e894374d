"""Several workers and replicas."""
