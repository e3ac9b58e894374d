"""Files that are cut, flipped, gone or half written; a disk that is full; what is kept."""

import os
import shutil
import subprocess
import sys
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.checkpoints import __main__ as listing
from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.checkpoints import trainer_state
from tests.reliability.tools import Reborn, copied, fails_from, shuffled
from tests.trainer.tools import dense_model, mse, read_events, regression

X, Y = regression(24)
DATA, INDEX, MANIFEST, ARRAYS = "state.data-00000-of-00001", "state.index", "manifest.json", "arrays.npz"


def make():
    return Trainer(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()})


def fit(trainer, workdir, steps, **options):
    return trainer.fit(shuffled(X, Y, 4), steps=steps, workdir=workdir, progress=False, **options)


class Holds(keras.callbacks.Callback):
    """Has arrays to be kept, as EarlyStopping has: then a checkpoint has a file more."""

    best_weights = None

    def on_train_batch_end(self, batch, logs=None):
        self.best_weights = [np.arange(100.0)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(a trainer that can be made as new, a directory with checkpoints of steps 2, 4 and 6, weights at step 8)."""
    reborn = Reborn(make(), shuffled(X, Y, 4))
    workdir = str(tmp_path_factory.mktemp("saved") / "run")
    fit(reborn.reset(), workdir, 6, checkpoint_every=2, callbacks=[Holds()])
    trainer = reborn.reset()
    fit(trainer, str(tmp_path_factory.mktemp("whole") / "run"), 8)
    return reborn, workdir, [w.numpy() for w in trainer.model.variables]


def _truncate(path, share=0.5):
    os.truncate(path, int(os.path.getsize(path) * share))


def _flip(path, share=0.5):
    with open(path, "r+b") as file:
        file.seek(int(os.path.getsize(path) * share))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def _zero(path):
    with open(path, "r+b") as file:
        file.write(bytes(os.path.getsize(path)))


def _garbage(path):
    with open(path, "wb") as file:
        file.write(b"garbage")


DAMAGES = {
    f"{name} {kind}": (name, action)
    for name in (DATA, INDEX, MANIFEST, ARRAYS)
    for kind, action in {
        "truncated": _truncate,
        "empty": lambda path: os.truncate(path, 0),
        "flipped": _flip,
        "zeroed": _zero,
        "removed": os.remove,
    }.items()
}
DAMAGES["manifest.json garbage"] = MANIFEST, _garbage


def test_every_file_of_a_checkpoint_is_damaged_here(saved):
    _, workdir, _ = saved
    assert set(os.listdir(f"{workdir}/checkpoints/step-0000000006")) == {name for name, _ in DAMAGES.values()}


@pytest.fixture
def restoring(monkeypatch):
    """[seconds of every restore]."""
    restore, seconds = trainer_state.restore, []

    def timed(*arguments):
        start = time.perf_counter()
        found = restore(*arguments)
        seconds.append(time.perf_counter() - start)
        return found

    monkeypatch.setattr(trainer_state, "restore", timed)
    return seconds


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(damage, saved, restoring):
    reborn, workdir, expected = saved
    name, action = DAMAGES[damage]
    workdir = copied(workdir, damage.replace(" ", "-"))
    action(os.path.join(workdir, "checkpoints", "step-0000000006", name))
    trainer = reborn.reset()
    with pytest.warns(UserWarning, match=r"step-0000000006 is damaged .*; it was moved to .*damaged-step-0000000006"):
        fit(trainer, workdir, 8, callbacks=[Holds()])
    [seconds] = restoring
    print(f"restored in {seconds:.2f} s")
    assert seconds < 5, "a second on a machine that has time"
    for variable, value in zip(trainer.model.variables, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert sorted(os.listdir(f"{workdir}/checkpoints")) == [
        "damaged-step-0000000006",
        "step-0000000002",
        "step-0000000004",
        "step-0000000008",
    ]


@pytest.mark.parametrize("again", [False, True])
def test_everything_is_on_the_disk_before_the_name_is(again, tmp_path, monkeypatch):
    """A rename may reach the disk before the contents that nobody flushed. With `again` a checkpoint is replaced."""
    done, fsync, rename = [], os.fsync, os.rename

    def noting_fsync(descriptor):
        done.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def noting_rename(source, target):
        done.append(("rename", os.path.basename(source), os.path.basename(target)))
        rename(source, target)

    store = checkpoints.Store(str(tmp_path / "checkpoints"))
    state = {"weights": tf.Variable([1.0, 2.0])}
    if again:
        store.save(3, state, {}, {"best": np.ones(2)})
    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    assert store.save(3, state, {}, {"best": np.ones(2)})
    final, temporary = "step-0000000003", f".writing-0000000003-{os.getpid()}"
    files = {("flush", name) for name in os.listdir(store.path(3))}
    assert len(files) == 4 and set(done[:4]) == files, "first the files"
    replaced = [("rename", final, f".replaced-{final}")] if again else []
    rest = [("flush", temporary), *replaced, ("rename", temporary, final), ("flush", "checkpoints")]
    assert done[4:] == rest, "then their directory, the name, and the directory of the name"


def test_nothing_but_damage_is_never_a_new_run(saved):
    reborn, workdir, _ = saved
    workdir = copied(workdir, "all-damaged")
    for step in (2, 4, 6):
        _truncate(os.path.join(workdir, "checkpoints", f"step-{step:010d}", DATA))
    for _ in range(2):  # also at the second attempt, when all are set aside already
        with warnings.catch_warnings(), pytest.raises(RuntimeError, match="Every checkpoint in .* is damaged"):
            warnings.simplefilter("ignore")
            fit(reborn.reset(), workdir, 8)


def test_leftovers_of_a_killed_save_are_removed_and_a_replaced_one_is_put_back(saved):
    reborn, workdir, expected = saved
    workdir = copied(workdir, "leftovers")
    directory = os.path.join(workdir, "checkpoints")
    shutil.copytree(f"{directory}/step-0000000002", f"{directory}/.writing-0000000007-123")
    os.rename(f"{directory}/step-0000000006", f"{directory}/.replaced-step-0000000006")
    trainer = reborn.reset()
    fit(trainer, workdir, 8)
    np.testing.assert_array_equal(trainer.model.variables[0].numpy(), expected[0])
    assert not [name for name in os.listdir(directory) if name.startswith(".")]


def test_the_newest_and_the_best_are_kept(tmp_path):
    trainer, values = make(), iter([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])

    def evaluate(*_, **__):
        return {"loss": next(values)}

    trainer.evaluate = evaluate
    fit(
        trainer,
        tmp_path,
        6,
        eval_dataset=(X, Y),
        eval_every=1,
        checkpoint_every=1,
        keep_checkpoints=2,
        keep_best="loss",
    )
    store = checkpoints.Store(tmp_path / "checkpoints")
    assert store.names() == [f"step-{step:010d}" for step in (2, 5, 6)] and store.best() == "step-0000000002"


def test_the_best_is_saved_also_when_nothing_else_is_due(tmp_path):
    trainer, values = make(), iter([0.3, 0.5, 0.4, 0.2])
    trainer.evaluate = lambda *_, **__: {"loss": 1.0, "accuracy": next(values)}
    fit(trainer, tmp_path, 4, eval_dataset=(X, Y), eval_every=1, keep_best="-accuracy")
    assert checkpoints.Store(tmp_path / "checkpoints").names() == [f"step-{step:010d}" for step in (1, 2, 4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_best": "loss"}, "`keep_best` is 'loss' without `eval_dataset`"),
        (
            {"keep_best": "los", "eval_dataset": (X, Y)},
            r"`keep_best` is 'los'; the evaluation gives \['error', 'loss'\]",
        ),
        ({"keep_checkpoints": 0}, "`keep_checkpoints` is 0; it must be at least 1"),
        ({"checkpoint_every_seconds": 0}, "`checkpoint_every_seconds` is 0; it must be a positive number or None"),
    ],
)
def test_wrong_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(make(), tmp_path, 1, **options)


def test_by_seconds(tmp_path, monkeypatch):
    """A clock that goes 10 seconds per look: every update is late."""
    now = iter(range(0, 10**9, 10))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    trainer = make()
    seen = []
    noting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    fit(trainer, tmp_path, 4, checkpoint_every_seconds=5.0, keep_checkpoints=9, callbacks=[noting])
    assert checkpoints.Store(tmp_path / "checkpoints").names() == [f"step-{step:010d}" for step in (1, 2, 3, 4)]
    shutil.rmtree(tmp_path)
    fit(make(), tmp_path, 4, checkpoint_every_seconds=None, callbacks=[noting])
    assert checkpoints.Store(tmp_path / "checkpoints").names() == ["step-0000000004"]


def test_what_is_there_is_printed(saved, capsys):
    _, workdir, _ = saved
    workdir = copied(workdir, "printed")
    _truncate(os.path.join(workdir, "checkpoints", "step-0000000004", DATA))
    before = sorted(os.listdir(f"{workdir}/checkpoints"))
    assert listing.main([workdir]) == 0
    text = capsys.readouterr().out
    assert "3 checkpoints in" in text and "step-0000000004  DAMAGED: state.data" in text
    assert "step-0000000006  good" in text and "step-0000000006 holds:" in text
    parameters = 3 * 4 + 4 + 4 * 1 + 1
    assert f"model            4 × {parameters} values" in text and "iterator         1 × OwnedIterator" in text
    assert sorted(os.listdir(f"{workdir}/checkpoints")) == before, "looking changes nothing"
    assert listing.main([f"{workdir}/nowhere"]) == 2 and "has no checkpoints" in capsys.readouterr().err


FULL_DISK = """
import os, sys, warnings
import keras, numpy as np, tensorflow as tf
from tests.reliability.test_damage import make, fit
from looptape.trainer.checkpoints import store as checkpoints
workdir = sys.argv[1]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    filler = os.path.join(workdir, "filler")

    class Fills(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if 5 <= trainer._engine.counters.step < 45:  # also what a checkpoint that failed has given back
                file = os.open(filler, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                try:
                    while True:
                        os.write(file, bytes(4096))
                except OSError:
                    os.close(file)
            if trainer._engine.counters.step == 45:
                os.remove(filler)

    trainer = make()
    fit(trainer, workdir, 50, checkpoint_every=2, log_every=1, callbacks=[Fills()], keep_checkpoints=2)
texts = [str(w.message) for w in caught if w.category is UserWarning]
print("step", trainer._engine.counters.step)
print("checkpoint warnings", sum("The checkpoint of step" in t for t in texts))
print("event warnings", sum("Event files" in t for t in texts))
print("others", [t for t in texts if "The checkpoint of step" not in t and "Event files" not in t])
store = checkpoints.Store(os.path.join(workdir, "checkpoints"))
print("kept", store.names(), [checkpoints.verify(os.path.join(store.directory, n)) for n in store.names()])
"""


def test_a_full_disk_costs_checkpoints_and_rows_but_not_the_run(tmp_path):
    """A tmpfs of 1 MB in a mount namespace of its own.

    Full for 40 rows: the first few still go into the last page of the event file, which is there already.
    """
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    script = f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}" && exec "{sys.executable}" -c "$0" "{tmp_path}"'
    command = ["unshare", "--mount", "sh", "-c", script, FULL_DISK]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = done.stdout.splitlines()
    assert "step 50" in lines, done.stderr[-3000:]
    assert "checkpoint warnings 1" in lines and "others []" in lines, lines
    assert "event warnings 1" in lines, lines
    assert "kept ['step-0000000048', 'step-0000000050'] [None, None]" in lines, lines


class Lost(keras.callbacks.Callback):
    """Reports in the update after a step that another worker is gone, as TensorFlow does."""

    def __init__(self, trainer, step):
        super().__init__()
        self._trainer, self._step = trainer, step

    def on_train_batch_begin(self, batch, logs=None):
        if self._trainer._engine.counters.step == self._step:
            raise tf.errors.UnavailableError(None, None, "peer is down")


@pytest.mark.parametrize(("broken_from", "named"), [(99, 4), (4, 2), (2, None)])
def test_only_a_checkpoint_that_was_written_is_one_to_go_on_from(broken_from, named, tmp_path, monkeypatch):
    """What a run says when it has lost a worker."""
    fails_from(broken_from, monkeypatch)
    trainer, named_steps = make(), []

    class Two(type(trainer._engine.workers)):
        """One worker that believes to be the first of two."""

        count = 2
        on_one_cpu_each = False  # so that gradients do not travel by connections to the other

        def lost(self, error, step, resumes_at):
            named_steps.append(resumes_at)
            return RuntimeError("lost")

    trainer._engine.workers = Two()
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="lost"):
        warnings.simplefilter("ignore")
        fit(trainer, tmp_path, 9, checkpoint_every=2, callbacks=[Lost(trainer, 5)])
    assert named_steps == [named]
    assert checkpoints.Store(tmp_path / "checkpoints").names() == [f"step-{s:010d}" for s in (2, 4) if s < broken_from]


def test_a_full_disk_is_not_tried_again_after_every_call(tmp_path, monkeypatch):
    """A clock that jumps by the seconds between two checkpoints at step 3, and stands still otherwise."""
    fails_from(0, monkeypatch)
    trainer, attempts = make(), []
    monkeypatch.setattr("time.monotonic", lambda: 1000.0 * (trainer._engine.counters.step >= 3))
    write = checkpoints.Store.write
    monkeypatch.setattr(
        checkpoints.Store, "write", lambda store, taken: attempts.append(taken.step) or write(store, taken)
    )
    noting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    with pytest.warns(UserWarning, match="The checkpoint of step [36] could not be written"):
        fit(trainer, tmp_path, 6, checkpoint_every_seconds=1000.0, callbacks=[noting])
    assert attempts == [3, 6], "by the clock, and at the end"


def test_event_files_that_cannot_be_written_do_not_stop_a_run(tmp_path):
    """A file stands where the directory of the run should be."""
    (tmp_path / "train").write_text("in the way")
    trainer = make()
    with pytest.warns(UserWarning, match="Event files in .*train could not be written") as caught:
        fit(trainer, tmp_path, 4, log_every=1)
    about = [str(warning.message) for warning in caught if "Event files" in str(warning.message)]
    assert trainer._engine.counters.step == 4 and len(about) == 1
    assert checkpoints.Store(tmp_path / "checkpoints").names() == ["step-0000000004"]


def test_a_cut_event_file_is_read_up_to_the_cut(saved):
    reborn, workdir, _ = saved
    workdir = copied(workdir, "cut-events")
    [name] = os.listdir(f"{workdir}/train")
    path = os.path.join(workdir, "train", name)
    os.truncate(path, os.path.getsize(path) - 3)
    with tf.device("CPU:0"):
        fit(reborn.reset(), workdir, 8, log_every=2)
    assert [step for step, _ in read_events(f"{workdir}/train")][-1] == 8
