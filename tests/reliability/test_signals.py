"""SIGTERM and Ctrl-C: saved, exited, resumed to the same bits; and one process per work directory."""

import contextlib
import fcntl
import os
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.faults import victim
from tests.reliability.tools import fails_from, process, shuffled
from tests.trainer.tools import assert_identical_weights, dense_model, mse, read_events, regression
from trainer import Trainer, checkpoints, locking, signals

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
        if self._trainer.host_step == self._step:
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
    """It is made anew when the run goes on: EarlyStopping sees as many evaluations as without the signal."""

    monkeypatch.setattr("trainer.evaluation._SECONDS_PER_CALL", 0.0)  # one batch per call

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


def test_a_handler_of_ones_own_stays(tmp_path):
    seen = []
    kept = signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        trainer = make()
        sends = Sends(trainer, signal.SIGTERM, 2)
        trainer.fit(shuffled(X, Y, 4), steps=4, workdir=tmp_path, callbacks=[sends], progress=False)
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert seen == ["mine"] and trainer.host_step == 4


def test_outside_the_main_thread_nothing_is_touched(tmp_path):
    before, trainer, during = signal.getsignal(signal.SIGTERM), make(), []
    noting = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: during.append(signal.getsignal(signal.SIGTERM)))
    options = {"workdir": tmp_path, "callbacks": [noting], "progress": False}
    thread = threading.Thread(target=lambda: trainer.fit(shuffled(X, Y, 4), steps=2, **options))
    thread.start()
    thread.join()
    assert during == [before] and trainer.host_step == 2


def test_the_second_interrupt_is_pythons_own_or_the_systems():
    with signals.Watch() as watch:
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.received == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_process_that_is_told_to_end(tmp_path):
    """A real one: exit code 143, within a second and a call, one more checkpoint; then it ends as if never stopped."""
    run = process("benchmarks.faults.victim", tmp_path / "run", 10**6)
    try:
        assert any(line.startswith("training") for line in run.stdout)
        with pytest.raises(RuntimeError, match=rf"is in use by process {run.pid} on .* use another `workdir`"):
            make().fit(shuffled(X, Y, 4), steps=1, workdir=tmp_path / "run", progress=False)
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=120) == 143, run.stderr.read()[-2000:]
    finally:
        run.kill()
        run.communicate()
    step = steps_of(tmp_path / "run")[-1]
    assert checkpoints.verify(checkpoints.Store(f"{tmp_path}/run/checkpoints").path(step)) is None
    with locking.hold(tmp_path / "run"):
        pass  # the lock went with the process
    resumed, whole = (victim.make_trainer(half=True, probe_every=0) for _ in range(2))
    assert step < 10**5
    resumed.probe_every = whole.probe_every = 0
    victim.fit(resumed, tmp_path / "run", step + 5)
    victim.fit(whole, tmp_path / "whole", step + 5)
    assert victim.digest(resumed) == victim.digest(whole)


def test_one_process_at_a_time(tmp_path):
    with locking.hold(tmp_path), locking.hold(tmp_path):  # nested in one thread, as the launcher does
        with open(tmp_path / locking.FILE) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused = []

        def other_thread():
            try:
                with locking.hold(tmp_path):
                    pass
            except RuntimeError as error:
                refused.append(str(error))

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert len(refused) == 1 and f"in use by process {os.getpid()}" in refused[0]
    start = time.monotonic()
    with locking.hold(tmp_path):
        assert time.monotonic() - start < 60
