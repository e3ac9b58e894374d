"""Custom training loops for Keras 3 on TensorFlow: the one name to import.

    from looptape import Trainer, probe

Every name is imported on first use, so that programs without TensorFlow (TensorBoard's tab, the launchers) start
quickly.
"""

TYPE_CHECKING = False  # type checkers take it for True; importing it from `typing` would take most of the start-up

if TYPE_CHECKING:
    from looptape import analysis, errors, launch, loggers, losses, models, timesteps
    from looptape.dashboard.run_data import read
    from looptape.errors import ProbeError, Refused, WorkerLost
    from looptape.experiments.cluster.joining import joined
    from looptape.trainer.data.by_worker.indexed_data import IndexedData
    from looptape.trainer.data.by_worker.sharded_data import ShardedData
    from looptape.trainer.optim.warmup_schedule import WarmupSchedule
    from looptape.trainer.probing import probe
    from looptape.trainer.recurrent.loops.recurrent_loop import recurrent_loop
    from looptape.trainer.step.gradients.own_stages import Stage
    from looptape.trainer.trainer import Trainer

    __version__: str

__all__ = [
    "IndexedData",
    "ShardedData",
    "ProbeError",
    "Refused",
    "Stage",
    "Trainer",
    "WarmupSchedule",
    "WorkerLost",
    "analysis",
    "errors",
    "joined",
    "launch",
    "loggers",
    "losses",
    "models",
    "probe",
    "read",
    "recurrent_loop",
    "timesteps",
]

_MODULES = ("analysis", "errors", "launch", "loggers", "losses", "models", "timesteps")
_PARTS = ("absl", "keras", "looptape", "numpy", "tensorboard", "tensorflow")
_FROM = {
    "IndexedData": "looptape.trainer.data.by_worker.indexed_data",
    "ShardedData": "looptape.trainer.data.by_worker.sharded_data",
    "ProbeError": "looptape.errors",
    "Refused": "looptape.errors",
    "Stage": "looptape.trainer.step.gradients.own_stages",
    "Trainer": "looptape.trainer.trainer",
    "WarmupSchedule": "looptape.trainer.optim.warmup_schedule",
    "WorkerLost": "looptape.errors",
    "joined": "looptape.experiments.cluster.joining",
    "probe": "looptape.trainer.probing",
    "read": "looptape.dashboard.run_data",
    "recurrent_loop": "looptape.trainer.recurrent.loops.recurrent_loop",
}


def _imported(name):
    """Imports a module. Explains in the error if the installation is incomplete."""
    import importlib

    from looptape import _quiet

    _quiet.import_unless_told()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _PARTS:
            raise
        raise ImportError(
            f"Looptape is not fully installed in {__path__[0]}: there is no module {error.name!r}, which {name} needs. "
            "Reinstall it with `pip install --force-reinstall looptape`.",
            name=error.name,
        ) from error


def _check_versions():
    import keras
    import tensorflow as tf

    from looptape import _versions

    _versions.warn_of_untried(tf.__version__, keras.__version__)


def _get(name):
    if name in _MODULES:
        return _imported(f"looptape.{name}")
    if name in _FROM:
        value = getattr(_imported(_FROM[name]), name)
        if name == "Trainer":
            _check_versions()
    elif name == "__version__":
        from importlib import metadata

        value = metadata.version("looptape")
    else:
        raise AttributeError(f"module 'looptape' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # with it a checker would take any name for one of ours
    __getattr__ = _get


def __dir__():
    return sorted({*globals(), *__all__, "__version__"})
