"""SIGTERM and Ctrl-C: saved, exited, resumed to the same bits; and one process per work directory."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.faults import victim
from looptape import Trainer
from looptape.trainer.checkpoints import lock
from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.loop import signals
from tests.reliability.tools import REPOSITORY, fails_from, process, shuffled
from tests.trainer.tools import assert_identical_weights, dense_model, mse, read_events, regression

X, Y = regression(24)


@pytest.fixture(autouse=True)
def handled():
    """A program that a shell started in the background ignores Ctrl-C, and the trainer lets it: not here."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, kept)


def make(**options):
    return Trainer(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()}, **options)


class Sends(keras.callbacks.Callback):
    """Sends this process a signal after some updates, or in the middle of an evaluation."""

    def __init__(self, trainer, number, step):
        super().__init__()
        self._trainer, self._number, self._step = trainer, number, step

    def on_train_batch_end(self, batch, logs=None):
        if self._trainer._engine.counters.step == self._step:
            os.kill(os.getpid(), self._number)


def steps_of(workdir):
    return [int(name.removeprefix("step-")) for name in checkpoints.Store(f"{workdir}/checkpoints").names()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_this_very_step_and_the_run_goes_on_from_it(number, tmp_path):
    whole = make()
    whole.fit(shuffled(X, Y, 4), steps=9, log_every=4, workdir=tmp_path / "whole", progress=False)
    stopped = make()
    handlers = signal.getsignal(number)
    with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt) as caught:
        sends = Sends(stopped, number, 5)
        stopped.fit(
            shuffled(X, Y, 4), steps=9, log_every=4, workdir=tmp_path / "run", callbacks=[sends], progress=False
        )
    if number == signal.SIGTERM:
        assert caught.value.code == 143
    assert signal.getsignal(number) == handlers, "the handlers of before are back"
    assert steps_of(tmp_path / "run") == [5]
    assert not os.path.exists(tmp_path / "run" / "model.keras"), "the run is not finished"
    resumed = make()
    resumed.fit(shuffled(X, Y, 4), steps=9, log_every=4, workdir=tmp_path / "run", progress=False)
    assert_identical_weights(whole.model, resumed.model)
    assert [step for step, _ in read_events(tmp_path / "run" / "train")] == [
        step for step, _ in read_events(tmp_path / "whole" / "train")
    ]


@pytest.mark.parametrize("full", [False, True])
def test_what_is_said_about_the_checkpoint_is_true(full, tmp_path, monkeypatch, capsys):
    if full:
        fails_from(0, monkeypatch)
    trainer = make()
    warned = pytest.warns(UserWarning, match="step 3 could not be written .* Older checkpoints are intact")
    with pytest.raises(SystemExit), warned if full else contextlib.nullcontext():
        trainer.fit(shuffled(X, Y, 4), steps=9, workdir=tmp_path, callbacks=[Sends(trainer, signal.SIGTERM, 3)])
    said = "SIGTERM: stopped at step 3, checkpoint NOT written" if full else "stopped at step 3, checkpoint written"
    assert said in capsys.readouterr().err
    assert steps_of(tmp_path) == ([] if full else [3])


def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(tmp_path, monkeypatch):
    """It is made anew when the run resumes: EarlyStopping sees as many evaluations as without the signal."""

    monkeypatch.setattr("looptape.trainer.evaluation.evaluation._SECONDS_PER_CALL", 0.0)  # one batch per call

    class Signals(Trainer):
        at = None

        def eval_step(self, batch):
            def seen(step):
                if int(step) == self.at:
                    self.at = None
                    os.kill(os.getpid(), signal.SIGTERM)
                return np.float32(0)

            zero = tf.ensure_shape(tf.numpy_function(seen, [self.step], tf.float32), [])
            return {name: loss + zero for name, loss in self.compute_losses(batch, False).items()}

    evaluations = []

    def fit(trainer, workdir):
        noting = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: evaluations.append(epoch))
        options = {"eval_every": 3, "callbacks": [noting], "workdir": workdir, "progress": False}
        many = tf.data.Dataset.from_tensor_slices((X, Y)).batch(1).repeat(10)
        trainer.fit(shuffled(X, Y, 4), steps=8, eval_dataset=many, **options)

    def trainer(at=None):
        made = Signals(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()})
        made.at = at
        return made

    fit(trainer(), tmp_path / "whole")
    assert evaluations == [0, 1, 2]
    for at, steps in ((6, [6]), (8, [6, 8])):
        with pytest.raises(SystemExit):
            fit(trainer(at), tmp_path / f"run-{at}")
        assert steps_of(tmp_path / f"run-{at}")[-1:] == steps[-1:]
        assert 8 not in [step for step, _ in read_events(tmp_path / f"run-{at}" / "eval")]
        fit(trainer(), tmp_path / f"run-{at}")
        left, right = (read_events(tmp_path / run / "eval") for run in ("whole", f"run-{at}"))
        assert [step for step, _ in left] == [step for step, _ in right] == [3, 6, 8]
        for (_, a), (_, b) in zip(left, right, strict=True):
            assert a["loss/error"] == b["loss/error"]
    assert evaluations == [0, 1, 2] * 3


def test_a_signal_in_the_second_of_several_evaluation_sets(tmp_path, monkeypatch):
    """After the resume all sets have the rows, the callbacks and the best checkpoint of a run without the signal."""
    monkeypatch.setattr("looptape.trainer.evaluation.evaluation._SECONDS_PER_CALL", 0.0)  # one batch per call

    class Signals(Trainer):
        at = None

        def eval_step(self, batch):
            def seen(step, first):
                if int(step) == self.at and first > 50:  # the set "noisy"
                    self.at = None
                    os.kill(os.getpid(), signal.SIGTERM)
                return np.float32(0)

            zero = tf.ensure_shape(tf.numpy_function(seen, [self.step, batch[0][0, 0]], tf.float32), [])
            return {name: loss + zero for name, loss in self.compute_losses(batch, False).items()}

    rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(1).repeat(8)
    sets = {"clean": rows, "noisy": rows.map(lambda x, y: (x + 100.0, y))}

    def fit(workdir, at=None):
        made = Signals(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()})
        made.at, logs = at, []
        noting = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, seen: logs.append(dict(seen)))
        options = {"eval_every": 3, "callbacks": [noting], "keep_best": "noisy_loss", "keep_checkpoints": 1}
        try:
            made.fit(shuffled(X, Y, 4), steps=8, eval_dataset=sets, workdir=workdir, progress=False, **options)
        except SystemExit:
            assert at is not None
        return logs, made.model

    whole, expected = fit(tmp_path / "whole")
    first, _ = fit(tmp_path / "parts", at=6)
    second, model = fit(tmp_path / "parts")
    assert len(first) == 1 and [*first, *second] == whole and "val_noisy_loss" in whole[0]
    assert_identical_weights(expected, model)
    assert steps_of(tmp_path / "whole") == steps_of(tmp_path / "parts")
    left, right = (read_events(tmp_path / run / "eval") for run in ("whole", "parts"))
    assert [step for step, _ in left] == [step for step, _ in right] == [3, 6, 8]
    assert [{tag: float(value) for tag, value in row.items()} for _, row in left] == [
        {tag: float(value) for tag, value in row.items()} for _, row in right
    ]
    assert {"clean/loss/error", "noisy/loss/error"} <= set(left[0][1])


def test_a_handler_of_ones_own_stays(tmp_path):
    seen = []
    kept = signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        trainer = make()
        sends = Sends(trainer, signal.SIGTERM, 2)
        trainer.fit(shuffled(X, Y, 4), steps=4, workdir=tmp_path, callbacks=[sends], progress=False)
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert seen == ["mine"] and trainer._engine.counters.step == 4


def test_outside_the_main_thread_nothing_is_touched(tmp_path):
    before, trainer, during = signal.getsignal(signal.SIGTERM), make(), []
    noting = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: during.append(signal.getsignal(signal.SIGTERM)))
    options = {"workdir": tmp_path, "callbacks": [noting], "progress": False}
    thread = threading.Thread(target=lambda: trainer.fit(shuffled(X, Y, 4), steps=2, **options))
    thread.start()
    thread.join()
    assert during == [before] and trainer._engine.counters.step == 2


def test_the_second_interrupt_is_pythons_own_or_the_systems():
    with signals.Watch() as watch:
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.received == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@contextlib.contextmanager
def running(*arguments, **options):
    """A process that is gone afterwards, however the test ends."""
    run = process(*arguments, **options)
    try:
        yield run
    finally:
        run.kill()
        run.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_process_that_is_told_to_end(number, code, tmp_path):
    """A real one: its exit code, one more checkpoint; then it ends as if never stopped.

    After Ctrl-C Python ends itself by SIGINT, for which a shell says 130.
    """
    with running("benchmarks.faults.victim", tmp_path / "run", 10**6) as run:
        assert any(line.startswith("training") for line in run.stdout)
        with pytest.raises(RuntimeError, match=rf"is in use by process {run.pid} on .* use another `workdir`"):
            make().fit(shuffled(X, Y, 4), steps=1, workdir=tmp_path / "run", progress=False)
        run.send_signal(number)
        assert run.wait(timeout=120) == code, run.stderr.read()[-2000:]
    step = steps_of(tmp_path / "run")[-1]
    assert checkpoints.verify(checkpoints.Store(f"{tmp_path}/run/checkpoints").path(step)) is None
    with lock.hold(tmp_path / "run"):
        pass  # the lock went with the process
    resumed, whole = (victim.make_trainer(half=True, probe_every=0) for _ in range(2))
    assert step < 10**5
    victim.fit(resumed, tmp_path / "run", step + 5)
    victim.fit(whole, tmp_path / "whole", step + 5)
    assert victim.digest(resumed) == victim.digest(whole)


PLAIN_SCRIPT = """
import atexit, gc, sys
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 0))  # runs after those that are registered later
from looptape import Trainer
import keras, numpy as np
x = np.ones((8, 2), "float32")
trainer = Trainer(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), "sgd", {"error": "mse"})
begun = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch == 3 and print("training", flush=True))
trainer.fit((x, x[:, :1]), epochs=10**9, callbacks=[begun], progress=False, workdir=sys.argv[1] or None)
"""


@pytest.mark.parametrize("what", ["fit", "fit with a workdir"])
def test_ctrl_c_in_a_plain_script_ends_without_a_traceback(what, tmp_path):
    with running("-c", PLAIN_SCRIPT, "" if what == "fit" else tmp_path / "run") as run:
        assert "training\n" in run.stdout
        run.send_signal(signal.SIGINT)
        left, said = run.communicate(timeout=60)
    assert run.returncode == -signal.SIGINT and "Traceback" not in said, said
    assert "frozen True" in left  # Python's last collection, of a second or more, has nothing to do
    assert ("Interrupted. Pass `workdir`" if what == "fit" else "Interrupted.\n") in said


LONG = ("evaluate", "predict", "fast_dev_run", "overfit", "find_learning_rate", "train_on_batch")


@pytest.mark.parametrize("method", LONG)
def test_ctrl_c_has_no_traceback_in_other_long_methods(method, monkeypatch):
    """It stays a `KeyboardInterrupt`, for programs that catch it."""

    class Interrupted(Trainer):
        def call_model(self, inputs, training):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    trainer = Interrupted(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()})
    with pytest.raises(KeyboardInterrupt) as caught:
        getattr(trainer, method)(X if method == "predict" else (X, Y))
    assert caught.value.last_words == "Interrupted." and sys.excepthook is not sys.__excepthook__


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_experiment_that_is_told_to_end(number, code, tmp_path):
    flags = {"steps": 10**6, "checkpoint_every": 5, "jit_compile": False, "probe_every": 0, "length": 4, "units": 2}
    arguments = [f"--{name}={str(value).lower()}" for name, value in flags.items()]
    # Its words go into a file: a pipe that nobody reads fills up.
    with (
        open(tmp_path / "said", "w") as said,
        running("experiments.adding_problem", f"--workdir={tmp_path}/run", *arguments, stdout=said, stderr=said) as run,
    ):
        await_checkpoint(tmp_path / "run", run)
        run.send_signal(number)
        assert run.wait(timeout=120) == code
    text = (tmp_path / "said").read_text()
    step = steps_of(tmp_path / "run")[-1]
    assert f"{number.name}: stopped at step {step:,}, checkpoint written" in text
    again = f"interrupted. Start again to resume from the checkpoint of step {step:,}."
    assert (again in text) == (number == signal.SIGINT) and "Traceback" not in text


def await_checkpoint(workdir, run):
    deadline = time.monotonic() + 120
    while not steps_of(workdir):
        assert run.poll() is None and time.monotonic() < deadline, "it made no checkpoint"
        time.sleep(0.05)


# The save at the signal takes a minute in its last part, when all files are there under another name.
SLOW_SAVE = """
import sys, time
import keras
from tests.reliability.test_signals import X, Y, make
from tests.reliability.tools import shuffled
from looptape.trainer.checkpoints import store as checkpoints
options = {"workdir": sys.argv[1], "progress": False}
make().fit(shuffled(X, Y, 4), steps=4, **options)

def slow(path):
    print("saving", flush=True)
    time.sleep(60)

checkpoints._flush = slow
begun = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: print("training", flush=True))
make().fit(shuffled(X, Y, 4), steps=10**9, callbacks=[begun], **options)
"""


def test_the_second_interrupt_ends_at_once_also_in_the_middle_of_a_save(tmp_path):
    with running("-c", SLOW_SAVE, tmp_path / "run") as run:
        assert "training\n" in run.stdout
        run.send_signal(signal.SIGINT)
        assert "saving\n" in run.stdout
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=30) == -signal.SIGINT
    left = os.listdir(tmp_path / "run" / "checkpoints")
    assert sorted(name[:9] for name in left) == [".writing-", "step-0000"] and steps_of(tmp_path / "run") == [4]
    trainer = make()
    trainer.fit(shuffled(X, Y, 4), steps=6, workdir=tmp_path / "run", progress=False)
    assert (
        steps_of(tmp_path / "run") == [4, 6] == [int(n[5:]) for n in sorted(os.listdir(tmp_path / "run/checkpoints"))]
    )


def test_one_process_at_a_time(tmp_path):
    with lock.hold(tmp_path), lock.hold(tmp_path):  # nested in one thread, as the launcher does
        with open(tmp_path / lock.FILE) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused = []

        def other_thread():
            try:
                with lock.hold(tmp_path):
                    pass
            except RuntimeError as error:
                refused.append(str(error))

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert len(refused) == 1 and f"in use by process {os.getpid()}" in refused[0]
    start = time.monotonic()
    with lock.hold(tmp_path):
        assert time.monotonic() - start < 60


FORKS = """
import os, signal, sys, time
from looptape.trainer.checkpoints import lock
with lock.hold(sys.argv[1]):
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    print(child, flush=True)
    time.sleep(600)
"""


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_parent(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    child = int(parent.stdout.readline())
    try:
        with pytest.raises(RuntimeError, match=f"in use by process {parent.pid}"), lock.hold(tmp_path):
            pass  # the parent still has it, although its child closed the file
        parent.kill()
        parent.wait()
        os.kill(child, 0)  # alive
        with lock.hold(tmp_path):
            pass
    finally:
        parent.kill()
        os.kill(child, signal.SIGKILL)
        parent.communicate()
