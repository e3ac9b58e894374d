"""Checkpoints: the store on disk, what they hold, and the files of a run."""

from looptape.trainer.checkpoints.store import Store, describe, load, prefix, read_manifest, verify

__all__ = ["Store", "describe", "load", "prefix", "read_manifest", "verify"]
