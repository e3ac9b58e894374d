"""The rules that turn rows into sentences."""
