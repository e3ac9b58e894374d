"""The trainer keeps its machinery in one private object: a subclass may use any name."""

import ast
from pathlib import Path

import keras
import pytest

from looptape import Trainer
from looptape.trainer.counters import Counters
from looptape.trainer.engine import Engine
from looptape.trainer.settings import Public
from tests.trainer.tools import assert_identical_weights, dataset, dense_model, mse, regression

X, Y = regression(24)
# The names that were attributes of the trainer itself in 0.1.
FORMER = [
    "aborting",
    "best_loss",
    "calls",
    "collecting_logs",
    "end_update",
    "epoch",
    "evaluation",
    "forward_state",
    "given_learning_rates",
    "hook",
    "host_step",
    "inspection",
    "ledger",
    "loss_scale",
    "main",
    "make_variable",
    "minimizers",
    "overrides",
    "prepare",
    "probe_capacity",
    "probing",
    "read",
    "read_state",
    "replicas",
    "restored_arrays",
    "restores",
    "rounds",
    "sources",
    "state",
    "take_batch",
    "timesteps",
    "tracing",
    "trainable_variables",
    "trainer",
    "whole_copies",
    "workers",
    "_trained",
    "_traced",
    "_minimizer_for",
    "_make_minimizer",
]


def settings():
    """Names of the trainer's settings; the engine has the first of them for each step."""
    return {"accumulation_steps"} | {name for name, value in vars(Engine).items() if isinstance(value, Public)}


def internal_names():
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    names = {*vars(trainer._engine), *vars(Engine), *Counters.__dataclass_fields__, *FORMER}
    return sorted(name for name in names - settings() - {"build"} if not name.startswith("__"))


def train(kind, workdir):
    model = dense_model()
    options = {"ema_decay": 0.9, "clip_norm": 1.0, "accumulation_steps": 2, "probe_every": 2, "health_every": 2}
    losses = {"error": mse(), "size": keras.losses.MeanAbsoluteError()}
    trainer = kind(model, keras.optimizers.Adam(0.05), losses, **options)
    data = dataset(X, Y, batch=8).repeat()
    trainer.fit(data, steps=3, workdir=workdir, eval_dataset=(X, Y), checkpoint_every=2, progress=False)
    trainer.fast_dev_run(data)
    trainer.fit(data, steps=5, workdir=workdir, progress=False)
    return trainer, trainer.evaluate((X, Y), averaged=True)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_subclass_may_use_every_name_that_the_trainer_uses_inside(when, tmp_path):
    names = internal_names()
    assert {"calls", "epoch", "sources", "state", "ledger", "timesteps", "workers"} <= set(names)

    class Occupied(Trainer):
        def __init__(self, *arguments, **options):
            if when == "before":
                self.occupy()
            super().__init__(*arguments, **options)
            if when == "after":
                self.occupy()

        def occupy(self):
            for name in names:
                setattr(self, name, f"the user's {name}")

    plain, expected = train(Trainer, tmp_path / "plain")
    occupied, found = train(Occupied, tmp_path / "occupied")
    assert found == expected
    assert_identical_weights(plain.model, occupied.model)
    assert all(getattr(occupied, name) == f"the user's {name}" for name in names)


def test_the_trainer_itself_has_only_settings_hooks_and_methods():
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    assert set(vars(trainer)) <= settings() | {"_engine"}


TRAINER = Path(__file__).resolve().parents[2] / "trainer"
# The engine's attributes that one other module replaces; all others are the engine's own.
WRITTEN = {
    "mode": "step/train_function.py",
    "workdir": "checkpoints/run_files.py",
    "restored_arrays": "checkpoints/trainer_state.py",
    "given_frozen": "loop/fit_loop.py",
    "given_learning_rates": "loop/fit_loop.py",
    "loggers": "loop/fit_loop.py",
    "latest_history": "loop/callbacks.py",
    "batch_feed": "debug/on_batch.py",
    "counters": "debug/dry_run.py",  # copies for the time of a dry run
    "health_log": "debug/dry_run.py",
    "timesteps": "debug/dry_run.py",
}


ENGINE = {"trainer", "owner", "engine", "_trainer", "_owner", "_engine"}


def written():
    """Yields (module, [names of "a.b.c"]) of every attribute that a module assigns, also as in `a.b.c += 1`."""
    for path in sorted(TRAINER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                yield path.relative_to(TRAINER).as_posix(), ast.unparse(node).split(".")


def test_no_two_modules_write_one_attribute_of_the_engine():
    for module, names in written():
        if module != "engine.py" and len(names) > 1 and names[-2] in ENGINE:
            assert WRITTEN.get(names[-1]) == module, f"{module} writes {'.'.join(names)}"


def test_nobody_writes_attributes_of_the_parts_of_the_engine():
    """They have methods for it: `trainer.counters.end_pass()`. The model is Keras's, which callbacks write on, too."""
    parts = {*vars(Trainer(dense_model(), "sgd", {"error": mse()})._engine)} - {"trainer", "_base"}
    assert {"counters", "steering", "evaluation", "calls", "carrying", "health_log"} <= parts
    for module, names in written():
        own = names[0] == "self" and len(names) == 2
        holder = set(names[:-1]) - {"self"}
        nested = holder & ENGINE and names[-2] not in ENGINE and names[-2] != "model"
        assert own or not (nested or holder & parts), f"{module} writes {'.'.join(names)}"
