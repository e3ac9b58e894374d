"""Launches an experiment, from its flags to the closing table. `looptape.launch` exports the public names."""

_PUBLIC = ("Config", "Experiment", "Goal", "Refused", "main", "option", "optimizer", "run", "trainer_options")


def __getattr__(name):
    """Keeps `from experiments import launch` working, the import of version 0.1."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_PUBLIC)}")
    from looptape import launch

    return getattr(launch, name)
