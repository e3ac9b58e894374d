"""The host's loop of `fit`: schedule, callbacks, signals, recovery."""
