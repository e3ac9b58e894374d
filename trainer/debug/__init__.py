"""Explains what went wrong: reports of non-finite updates, dry runs, the summary."""
