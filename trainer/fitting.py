"""The host's loop: runs the traced update up to whatever is due next, and does what is due."""

import math
import os
import time

import keras
from absl import logging

from trainer import arguments, layout, persistence, rows, weights
from trainer.callbacks import CallbackBridge
from trainer.datasets import as_dataset
from trainer.progress import Progress
from trainer.sources import Source, check_totals
from trainer.writer import EventWriter, drop_later_events

# The longest call: signals, the bar and the clock are served between calls.
_SECONDS_PER_CALL = 0.5
# The share of waiting for data from which on a hint is given.
_SLOW_INPUT = 0.3


class Fitting:
    """One `fit`: see `Trainer.fit` for the arguments."""

    def __init__(
        self,
        trainer,
        dataset,
        *,
        steps,
        epochs,
        eval_dataset,
        eval_every,
        log_every,
        checkpoint_every,
        workdir,
        callbacks,
        batch_size,
        eval_steps,
        progress,
        evaluate_averaged,
    ):
        self._trainer = trainer
        self._steps, self._epochs = check_totals(steps, epochs)
        self._eval_dataset = eval_dataset
        self._eval_every = _interval("eval_every", eval_every)
        if self._eval_every and eval_dataset is None:
            raise ValueError("`eval_every` is given without `eval_dataset`; there is nothing to evaluate. Pass both.")
        self._log_every = _interval("log_every", log_every)
        self._checkpoint_every = _interval("checkpoint_every", checkpoint_every)
        self._workdir = None if workdir is None else _check_workdir(workdir)
        self._show = progress
        self._given_callbacks = callbacks
        self._source = trainer.sources.get(id(dataset))
        if self._source is None:
            made = as_dataset(dataset, batch_size, training=True, repeat=steps is not None)
            self._source = trainer.sources[id(dataset)] = Source(dataset, made)
        self._eval_options = {"averaged": evaluate_averaged, "steps": eval_steps, "batch_size": batch_size}
        self._last_logged = self._last_evaluated = self._last_saved = None

    def run(self):
        trainer, source = self._trainer, self._source
        trainer.prepare(source.iterator)
        resumed = self._open_workdir()
        if self._finished():
            return self._nothing_to_do()
        self._check_length()
        if self._workdir is not None:
            layout.write_once(self._train_writer, os.path.join(self._workdir, "train"), trainer)
        self._callbacks = CallbackBridge(self._given_callbacks, trainer, self._steps, self._epochs)
        self._timesteps = trainer.timesteps
        self._progress = Progress(self._total_steps(), trainer.host_step, self._show)
        self._log_window, self._epoch_window = trainer.ledger.window(), trainer.ledger.window()
        if resumed:
            self._progress.message(f"resumed at step {trainer.host_step:,} from {self._store.directory}")
            persistence.restore_windows(trainer, self._log_window, self._epoch_window)
        self._window_start, self._waited = time.monotonic(), 0.0
        try:
            self._callbacks.train_begin()
            if resumed:
                persistence.restore_callbacks(trainer, self._callbacks)
            self._begin_epoch(reset=not resumed)
            while not self._finished() and not self._callbacks.stopped:
                self._advance()
            self._finish()
        finally:
            self._close()
        return self._callbacks.history

    # ---- The loop.

    def _advance(self):
        """Runs to the next step at which something is due, and does it."""
        trainer, source = self._trainer, self._source
        begin, count = trainer.host_step, self._updates_to_run()
        self._callbacks.batch_begin(begin)
        if count == 0:
            ended, reports = trainer.calls.run_probed(source.iterator)
        else:
            started, reports = time.monotonic(), None
            ended = trainer.calls.run(source.iterator, count)
            self._measure(trainer.host_step - begin, time.monotonic() - started)
        done = trainer.host_step - begin
        source.advance(done * trainer.accumulation_steps)
        ended = ended or source.remaining() == 0
        if self._callbacks.every_update and done:
            self._callbacks.batch_end(begin, self._logs(self._epoch_so_far()))
        step = trainer.host_step
        if reports is not None:
            self._timesteps.write(self._train_writer, step, reports)
        if done and self._due(self._log_every, step):
            self._log(step)
        if self._progress.due():
            self._progress.update(step, self._progress_values())
        if ended:
            self._pass_ended()
        if done and self._eval_every and self._due(self._eval_every, step):
            self._evaluate(step)
            if self._steps is not None:
                self._end_epoch()
        if done and self._due(self._checkpoint_every, step):
            self._save(step)

    def _updates_to_run(self):
        """Updates until something is due; 0 if the next one is to be probed."""
        trainer = self._trainer
        step = trainer.host_step
        stops = [interval - step % interval for interval in self._intervals() if interval]
        if trainer.probe_every:
            stops.append(trainer.probe_every - 1 - step % trainer.probe_every)
        if self._steps is not None:
            stops.append(self._steps - step)
        remaining = self._source.remaining()
        if remaining is not None:
            stops.append(max(math.ceil(remaining / trainer.accumulation_steps), 1))
        if self._callbacks.every_update:
            stops.append(1)
        if trainer.steps_per_call != "auto":
            stops.append(trainer.steps_per_call)
        elif trainer.calls.updates_per_second is None:
            stops.append(4)
        else:
            stops.append(max(int(trainer.calls.updates_per_second * _SECONDS_PER_CALL), 1))
        return min(stops)

    def _intervals(self):
        return (self._log_every, self._eval_every, self._checkpoint_every)

    def _due(self, interval, step):
        return bool(interval) and step % interval == 0

    def _measure(self, done, seconds):
        if done and seconds > 0:
            rate = done / seconds
            known = self._trainer.calls.updates_per_second
            # The first call includes what TensorFlow does once; a slow call must shorten the next at once.
            self._trainer.calls.updates_per_second = rate if known is None or rate < known else 0.5 * (known + rate)

    def _finished(self):
        if self._steps is not None:
            return self._trainer.host_step >= self._steps
        return self._trainer.epoch >= self._epochs

    def _pass_ended(self):
        trainer, source = self._trainer, self._source
        if source.position == 0 and source.length is None and not trainer.host_step:
            raise ValueError("The dataset is empty: it has no batch. Check the files or the filter it is made from.")
        if self._steps is not None:
            if not self._finished():
                raise ValueError(self._too_short(trainer.host_step))
            return
        trainer.epoch += 1
        source.restart()
        if self._eval_dataset is not None and not self._eval_every:
            self._evaluate(trainer.host_step)
        self._end_epoch()

    # ---- What is due.

    def _log(self, step):
        trainer = self._trainer
        self._collect()
        now = time.monotonic()
        values = rows.train_scalars(trainer, self._log_window, now - self._window_start)
        if self._train_writer is not None:
            self._train_writer.scalars(step, values)
        self._waited += self._log_window.seconds_waited
        self._log_window.clear()
        self._window_start = now
        self._last_logged = step

    def _collect(self):
        window = self._trainer.ledger.take()
        self._log_window.add(window)
        self._epoch_window.add(window)

    def _epoch_so_far(self):
        self._collect()
        return self._epoch_window

    def _logs(self, window):
        return rows.callback_logs(self._trainer, window)

    def _progress_values(self):
        window = self._epoch_so_far()
        values = {name: value for name, value in self._logs(window).items() if name == "loss"}
        rate = self._trainer.calls.updates_per_second
        if rate is not None and window.updates:
            values["examples/s"] = rate * window.examples / window.updates
        return values

    def _evaluate(self, step):
        if self._last_evaluated == step:
            return
        trainer = self._trainer
        results = trainer.evaluate(self._eval_dataset, **self._eval_options)
        self._last_evaluated = step
        self._callbacks.evaluated(results)
        if self._workdir is not None and results["loss"] < trainer.best_loss:
            trainer.best_loss = results["loss"]
            weights.export_best(trainer, self._workdir)
        if self._eval_writer is not None:
            self._eval_writer.scalars(step, rows.eval_scalars(trainer, results))
            self._eval_writer.flush()
        self._progress.message(f"step {step:,}: " + "  ".join(f"{name} {value:.4g}" for name, value in results.items()))

    def _begin_epoch(self, reset=True):
        if reset:
            for metric in self._trainer.metrics.values():
                metric.reset_state()
            self._epoch_window.clear()
            self._trainer.ledger.take()
        self._epoch_open = True
        self._callbacks.epoch_begin()

    def _end_epoch(self):
        self._callbacks.epoch_end(self._logs(self._epoch_so_far()))
        self._epoch_open = False
        if not self._finished() and not self._callbacks.stopped:
            self._begin_epoch()

    def _finish(self):
        step = self._trainer.host_step
        if self._last_logged != step:
            self._log(step)
        if self._eval_dataset is not None:
            self._evaluate(step)
        if self._epoch_open:
            self._end_epoch()
        self._progress.close(step, self._progress_values())
        self._hint_at_slow_input()
        # First the callbacks: EarlyStopping puts the best weights back at this point.
        self._callbacks.train_end()
        if self._workdir is not None:
            self._last_saved = None
            self._save(step)
            weights.export(self._trainer, self._workdir)

    def _hint_at_slow_input(self):
        share = self._waited / self._progress.seconds if self._progress.seconds else 0.0
        if share > _SLOW_INPUT and self._progress.seconds > 1.0:
            self._progress.message(
                f"{share:.0%} of the time was spent waiting for data: the input is the bottleneck. Cache what fits "
                "into memory (`dataset.cache()`), map with `num_parallel_calls=tf.data.AUTOTUNE`, end with "
                "`.prefetch(tf.data.AUTOTUNE)`."
            )

    # ---- Files.

    def _open_workdir(self):
        self._train_writer = self._eval_writer = self._store = None
        if self._workdir is None:
            return False
        self._store = persistence.open_store(self._workdir)
        self._source.checkpointable()  # warns before the first step
        resumed = persistence.restore(self._trainer, self._source, self._store)
        resume_step = self._trainer.host_step
        runs = [os.path.join(self._workdir, run) for run in ("train", "eval")]
        if resumed or not resume_step:
            # Also without a checkpoint: a run that was killed before its first one left rows that come again.
            for run in runs:
                drop_later_events(run, resume_step)
        if resumed and self._trainer.probe_every:
            self._trainer.timesteps.resume(runs[0], self._trainer.timesteps.rows)
        self._train_writer, self._eval_writer = (EventWriter(run, resume_step) for run in runs)
        return resumed

    def _save(self, step):
        if self._store is None or self._last_saved == step:
            return
        self._collect()
        self._train_writer.flush()
        persistence.save(
            self._trainer, self._source, self._store, self._log_window, self._epoch_window, self._callbacks
        )
        self._last_saved = step

    def _close(self):
        for writer in (self._train_writer, self._eval_writer):
            if writer is not None:
                writer.close()

    # ---- Words.

    def _total_steps(self):
        if self._steps is not None:
            return self._steps
        if self._source.length is None:
            return None
        trainer = self._trainer
        passes = self._epochs - trainer.epoch - 1
        per_pass = math.ceil(self._source.length / trainer.accumulation_steps)
        return trainer.host_step + math.ceil(self._source.remaining() / trainer.accumulation_steps) + passes * per_pass

    def _nothing_to_do(self):
        done = f"{self._trainer.host_step} steps" if self._steps is not None else f"{self._trainer.epoch} epochs"
        asked = f"steps={self._steps}" if self._steps is not None else f"epochs={self._epochs}"
        logging.warning(
            "Nothing to do: %s are made already and %s was asked for. Steps and epochs are totals over the trainer's "
            "lifetime; ask for more.",
            done,
            asked,
        )
        self._close()
        history = keras.callbacks.History()
        history.set_model(self._trainer.model)
        history.on_train_begin()
        return history

    def _check_length(self):
        """A finite dataset that cannot give the steps asked for is refused before the first one."""
        remaining = self._source.remaining()
        if self._steps is None or remaining is None:
            return
        available = self._trainer.host_step + math.ceil(remaining / self._trainer.accumulation_steps)
        if available < self._steps:
            raise ValueError(self._too_short(available))

    def _too_short(self, available):
        return (
            f"The dataset ends at step {available}, before steps={self._steps}. Repeat it (`dataset.repeat()`, after "
            "shuffling and before batching if the last batch may be filled up), or train by `epochs`."
        )


def _interval(name, value):
    return None if value is None else arguments.check_integer(name, value, 1, "Use None for never.")


def _check_workdir(workdir):
    workdir = os.fspath(workdir)
    try:
        os.makedirs(workdir, exist_ok=True)
        if not os.access(workdir, os.W_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        raise ValueError(
            f"`workdir` {workdir!r} cannot be used: {error}. Choose a directory that this user may write to."
        ) from error
    return workdir
