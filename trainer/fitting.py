"""The host's loop: runs the traced update up to whatever is due next, and does what is due."""

import os
import time

import keras
import tensorflow as tf
from absl import logging

from trainer import arguments, layout, persistence, rescue, rows, signals, weights
from trainer.agenda import Agenda
from trainer.callbacks import CallbackBridge
from trainer.datasets import as_dataset
from trainer.evaluation import check_finite
from trainer.progress import Progress
from trainer.session import Session, check_workdir
from trainer.skips import NonFiniteUpdates
from trainer.sources import Source, check_totals
from trainer.totals import Totals
from trainer.workers import LOST

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
        checkpoint_every_seconds,
        keep_checkpoints,
        keep_best,
    ):
        self._trainer = trainer
        self._steps, self._epochs = check_totals(steps, epochs)
        self._eval_dataset = eval_dataset
        keep = arguments.check_integer("keep_checkpoints", keep_checkpoints, 1, "The newest one is always kept.")
        self._best = rescue.Best(keep_best, eval_dataset is not None)
        self._workdir = None if workdir is None else check_workdir(workdir)
        self._show = progress and trainer.workers.is_chief
        self._given_callbacks = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else callbacks
        self._source = trainer.sources.get(id(dataset))
        if self._source is None:
            made = as_dataset(dataset, batch_size, training=True, repeat=steps is not None)
            self._source = trainer.sources[id(dataset)] = Source(dataset, made)
        if epochs is not None and self._source.infinite:
            raise ValueError(
                f"`fit` is to make {epochs} passes over an infinite dataset: the first would never end. Train by "
                "`steps`, or leave out `repeat()`."
            )
        self._agenda = Agenda(
            trainer,
            self._source,
            steps=self._steps,
            log_every=log_every,
            eval_every=eval_every,
            checkpoint_every=checkpoint_every,
            save_seconds=checkpoint_every_seconds,
            evaluating=eval_dataset is not None,
        )
        if isinstance(eval_dataset, tf.data.Dataset):
            check_finite(eval_dataset, eval_steps, "evaluate in `fit`")
        self._eval_options = {"averaged": evaluate_averaged, "steps": eval_steps, "batch_size": batch_size}
        self._totals = Totals(trainer, self._source, self._steps, self._epochs)
        self._files = Session(trainer, self._source, self._workdir, keep)
        self._last_logged = self._last_evaluated = None
        self._chores = []  # what is still to be done after the latest update, by name
        self._epoch_open = self._complete = False
        self._agreed = None  # (updates of the next call, whether a checkpoint is due by the clock), with other workers

    def run(self):
        """Trains. A signal that comes meanwhile ends the process, after a checkpoint."""
        rescue.prepare(self._trainer, self._source)
        # Several workers make TensorFlow take SIGTERM for itself and ignore it.
        watch = signals.Watch(self._workdir is not None or self._trainer.workers.count > 1)
        workers = self._trainer.workers
        try:
            with watch:
                return self._run(watch)
        except LOST as error:
            if workers.count == 1:
                raise
            raise workers.lost(error, self._trainer.host_step, self._files.last_saved) from error
        except Exception as error:
            if workers.count > 1:
                error.add_note(f"This was {workers.name}, after step {self._trainer.host_step:,}.")
            raise
        finally:
            self._files.close()
            if watch.received is not None:
                signals.leave(watch.received)

    def _run(self, watch):
        trainer, source = self._trainer, self._source
        trainer.workers.check_same(
            **{
                name: getattr(trainer, name) for name in ("accumulation_steps", "clip_norm", "ema_decay", "probe_every")
            },
            shape_of_the_batches=source.dataset.element_spec,
            steps_or_epochs=self._totals.asked,
            intervals=self._agenda.intervals,
        )
        trainer.prepare(source.iterator)
        trainer.given_learning_rates = persistence.learning_rates(trainer)
        resumed = self._files.open()
        if self._totals.nothing_left(resumed):
            return self._totals.nothing_to_do()
        self._totals.check_length()
        if trainer.workers.count > 1:
            trainer.workers.check_same(data=source.peek())
        if self._files.train is not None:
            layout.write_once(self._files.train, os.path.join(self._workdir, "train"), trainer)
        self._callbacks = CallbackBridge(self._given_callbacks, trainer, self._steps, self._epochs)
        self._timesteps = trainer.timesteps
        self._progress = Progress(self._totals.last_step(), trainer.host_step, self._show)
        self._log_window, self._epoch_window = trainer.ledger.window(), trainer.ledger.window()
        self._window_start, self._waited = time.monotonic(), 0.0
        self._callbacks.train_begin()
        if resumed:
            self._progress.message(f"resumed at step {trainer.host_step:,} from {self._files.store.directory}")
            for name, (given, restored) in trainer.loss_weights.replaced().items():
                logging.warning(
                    "The weight of loss %r was given as %g; the checkpoint's, %g, goes on. Set "
                    "`trainer.loss_weights[%r]` in a callback's `on_train_begin` to change it.",
                    *(name, given, restored, name),
                )
            self._resume(resumed)
        else:
            self._begin_epoch()
        try:
            self._do_chores(watch)
            while not self._totals.reached() and self._go_on(watch):
                self._advance(watch)
            self._check(watch)
            self._finish(watch)
            trainer.workers.meet()
        except signals.Stopped:
            # Also where nothing is left but an evaluation: it is made when the run is started again.
            saved = self._save(urgent=True)
            written = f", checkpoint {'written' if saved else 'NOT written'}" if self._workdir is not None else ""
            self._progress.message(f"{watch.received.name}: stopped at step {trainer.host_step:,}{written}")
            trainer.workers.meet()
        return self._callbacks.history

    def _resume(self, host):
        """Goes on in the middle of everything."""
        loop = host["loop"]
        persistence.restore_callbacks(self._trainer, host, self._callbacks)
        persistence.restore_windows(loop["windows"], self._log_window, self._epoch_window)
        self._best.restore(loop["best"])
        self._last_logged, self._last_evaluated = loop["last_logged"], loop["last_evaluated"]
        self._chores = list(loop["chores"])
        if loop["epoch_open"]:
            self._begin_epoch(resumed=True)
        elif not self._totals.reached() and not self._callbacks.stopped:
            self._begin_epoch()

    def _loop_state(self):
        """What `_resume` needs."""
        self._collect()
        return {
            "windows": persistence.windows_state(self._log_window, self._epoch_window),
            "best": self._best.state(),
            "last_logged": self._last_logged,
            "last_evaluated": self._last_evaluated,
            "chores": [chore for chore in self._chores if chore != "save"],
            "epoch_open": self._epoch_open,
            "complete": self._complete,
            "asked": self._totals.asked,
        }

    # ---- The loop.

    def _go_on(self, watch):
        """Whether to make another call. Several workers decide together what depends on clocks and signals."""
        workers = self._trainer.workers
        if workers.count > 1:
            workers.beat(self._trainer.host_step)
            rows = workers.share([watch.number, self._callbacks.stopped, self._updates_to_run(), self._time_to_save()])
            watch.note(rows[:, 0].max())
            self._trainer.model.stop_training = bool(rows[:, 1].any())
            self._agreed = int(rows[0, 2]), bool(rows[0, 3])
        return not self._callbacks.stopped and watch.received is None

    def _check(self, watch):
        """Raises `Stopped` if a signal came, to any of the workers."""
        watch.note(self._trainer.workers.largest(watch.number))
        watch.check()

    def _advance(self, watch):
        """Runs to the next step at which something is due, and does it."""
        trainer, source = self._trainer, self._source
        begin, count = trainer.host_step, self._agreed[0] if self._agreed else self._updates_to_run()
        self._callbacks.batch_begin()
        try:
            ended, reports = self._update(count)
        except NonFiniteUpdates as error:
            source.advance((trainer.host_step - begin) * trainer.accumulation_steps)
            self._rescue(error)
            return
        done = trainer.host_step - begin
        source.advance(done * trainer.accumulation_steps)
        ended = ended or source.remaining() == 0
        if self._callbacks.every_update and done:
            self._callbacks.batch_end(self._logs(self._epoch_so_far()))
        if reports is not None:
            self._timesteps.write(self._files.train, trainer.host_step, reports)
        if self._progress.due():
            self._progress.update(trainer.host_step, self._progress_values())
        self._chores = self._agenda.chores(done, ended, self._save_due(), self._best.wanted)
        self._do_chores(watch)

    def _update(self, count):
        """Runs `count` updates, or a probed one. Returns (whether the data ended, the probes' reports or None)."""
        calls, begin, started = self._trainer.calls, self._trainer.host_step, time.monotonic()
        if count == 0:
            return calls.run_probed(self._source.iterator)
        ended = calls.run(self._source.iterator, count)
        self._agenda.measure(self._trainer.host_step - begin, time.monotonic() - started)
        return ended, None

    def _do_chores(self, watch):
        """Does what is due. An evaluation may be stopped by a signal: then it is due when the run is started again."""
        while self._chores:
            {
                "log": self._log,
                "pass_ended": self._pass_ended,
                "evaluate": lambda: self._evaluate(watch),
                "end_epoch": self._end_epoch,
                "save": self._save_if_due,
            }[self._chores[0]]()
            self._chores.pop(0)

    def _rescue(self, error):
        """Goes back to a good checkpoint if that is wanted and possible; else finds out what is wrong, and raises."""
        host = rescue.go_back(self._trainer, self._source, self._files, error)
        if host is None:
            raise rescue.explain(self._trainer, self._source, self._workdir, error) from None
        epoch_open = self._epoch_open
        self._trainer.ledger.take()
        self._resume({**host, "loop": {**host["loop"], "epoch_open": False, "chores": []}})
        self._epoch_open = epoch_open
        self._window_start = time.monotonic()
        # The same step again, but with the data from here on: a run that is killed now does not go back once more.
        self._save()

    def _updates_to_run(self):
        return self._agenda.updates_to_run(self._callbacks.every_update)

    def _pass_ended(self):
        trainer, source = self._trainer, self._source
        if source.position == 0 and source.length is None and not trainer.host_step:
            raise ValueError("The dataset is empty: it has no batch. Check the files or the filter it is made from.")
        if self._steps is not None:
            if not self._totals.reached():
                raise ValueError(self._totals.too_short(trainer.host_step))
            return
        trainer.epoch += 1
        source.restart()

    # ---- What is due.

    def _log(self):
        trainer, step = self._trainer, self._trainer.host_step
        self._collect()
        now = time.monotonic()
        values = rows.train_scalars(trainer, self._log_window, now - self._window_start)
        if self._files.train is not None:
            self._files.train.scalars(step, values)
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

    def _evaluate(self, watch):
        trainer, step = self._trainer, self._trainer.host_step
        if self._last_evaluated == step:
            return
        trainer.evaluation.between_calls = lambda: self._check(watch)
        try:
            results = trainer.evaluate(self._eval_dataset, **self._eval_options)
        finally:
            trainer.evaluation.between_calls = None
        self._last_evaluated = step
        self._callbacks.evaluated(results)
        self._best.see(step, results)
        if self._workdir is not None and results["loss"] < trainer.best_loss:
            trainer.best_loss = results["loss"]
            if trainer.workers.is_chief:
                weights.export_best(trainer, self._workdir)
        if self._files.eval is not None:
            self._files.eval.scalars(step, rows.eval_scalars(trainer, results))
            self._files.eval.flush()
        self._progress.message(f"step {step:,}: " + "  ".join(f"{name} {value:.4g}" for name, value in results.items()))

    def _begin_epoch(self, resumed=False):
        if not resumed:
            for metric in self._trainer.metrics.values():
                metric.reset_state()
            self._epoch_window.clear()
            self._trainer.ledger.take()
        self._epoch_open = True
        self._callbacks.epoch_begin(resumed)

    def _end_epoch(self):
        self._callbacks.epoch_end(self._logs(self._epoch_so_far()))
        self._epoch_open = False
        if not self._totals.reached() and not self._callbacks.stopped:
            self._begin_epoch()

    def _finish(self, watch):
        step = self._trainer.host_step
        if self._last_logged != step:
            self._log()
        if self._eval_dataset is not None:
            self._evaluate(watch)
        if self._epoch_open:
            self._end_epoch()
        self._progress.close(step, self._progress_values())
        self._hint_at_slow_input()
        self._mention_skips()
        # First the callbacks: EarlyStopping puts the best weights back at this point.
        self._callbacks.train_end()
        self._complete = True
        if self._workdir is not None:
            self._save(urgent=True)
            if self._trainer.workers.is_chief:
                weights.export(self._trainer, self._workdir)

    def _hint_at_slow_input(self):
        share = self._waited / self._progress.seconds if self._progress.seconds else 0.0
        if share > _SLOW_INPUT and self._progress.seconds > 1.0:
            self._progress.message(
                f"{share:.0%} of the time was spent waiting for data: the input is the bottleneck. Cache what fits "
                "into memory (`dataset.cache()`), map with `num_parallel_calls=tf.data.AUTOTUNE`, end with "
                "`.prefetch(tf.data.AUTOTUNE)`."
            )

    def _mention_skips(self):
        skipped = self._trainer.calls.skipped
        if skipped:
            self._progress.message(
                f"{skipped:,} of {self._trainer.host_step:,} updates were skipped: a loss or a gradient was not finite."
            )

    # ---- Files.

    def _save_if_due(self):
        """After an evaluation that is to be kept if it is the best: only if it is, or if a checkpoint is due anyway."""
        if self._save_due() or self._best.score(self._trainer.host_step, new=True) is not None:
            self._save()

    def _save_due(self):
        by_time = self._agreed[1] if self._agreed else self._time_to_save()
        return self._workdir is not None and self._agenda.save_due(by_time)

    def _time_to_save(self):
        return self._agenda.time_to_save(self._files.saved_at)

    def _save(self, urgent=False):
        """Writes a checkpoint. Returns whether it is on the disk."""
        score = self._best.score(self._trainer.host_step)
        return self._files.save(self._loop_state(), self._callbacks, score=score, urgent=urgent)
