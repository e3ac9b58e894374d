"""Data of which each worker makes only its own rows."""
