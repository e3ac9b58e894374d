"""The host's loop: runs the traced update until the next log row, evaluation or checkpoint is due."""

import os
import time

import keras

from looptape.trainer import arguments
from looptape.trainer.checkpoints import export, trainer_state
from looptape.trainer.checkpoints.contents import compatibility
from looptape.trainer.checkpoints.run_files import Session, check_workdir
from looptape.trainer.data.source import check_passes, check_totals, open_source
from looptape.trainer.distribution.agreement import Agreement
from looptape.trainer.distribution.workers import is_loss
from looptape.trainer.evaluation.best import Best
from looptape.trainer.evaluation.evaluation import check_sets
from looptape.trainer.evaluation.truncation_bias import TruncationBias
from looptape.trainer.health.spikes import SpikedUpdate
from looptape.trainer.loggers.interface import Guarded, Output, check_loggers
from looptape.trainer.loop import closing, recovery, signals
from looptape.trainer.loop.callbacks import CallbackBridge
from looptape.trainer.loop.schedule import Agenda
from looptape.trainer.loop.stop_condition import Totals
from looptape.trainer.step.division import OutOfMemory
from looptape.trainer.step.nonfinite import NonFiniteUpdates
from looptape.trainer.summaries import chart_layout, scalars


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
        loggers,
    ):
        self._trainer = trainer
        self._steps, self._epochs = check_totals(steps, epochs)
        self._eval_dataset = eval_dataset
        keep = arguments.check_integer("keep_checkpoints", keep_checkpoints, 1, "The newest one is always kept.")
        self._best = Best(keep_best, eval_dataset is not None)
        self._workdir = check_workdir(workdir, checkpoint_every)
        self._show = progress and trainer.workers.is_chief
        self._given_callbacks = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else callbacks or ()
        opened = trainer.sources, dataset, batch_size, steps is not None, trainer.workers, trainer.in_windows
        self._source = open_source(*opened)
        check_passes(epochs, self._source)
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
        check_sets(eval_dataset, eval_steps)
        self._eval_options = {"averaged": evaluate_averaged, "steps": eval_steps, "batch_size": batch_size}
        self._totals = Totals(trainer, self._source, self._steps, self._epochs)
        self._files = Session(trainer, self._source, self._workdir, keep)
        loggers = check_loggers(loggers, self._workdir)
        self._loggers = trainer.loggers = Guarded(loggers if trainer.workers.is_chief else [])
        self._train_rows = Output("train", lambda: self._files.train, self._loggers)
        self._eval_rows = Output("eval", lambda: self._files.eval, self._loggers)
        self._last_logged = self._last_evaluated = self._callbacks = None
        self._chores = []  # what is still to be done after the latest update, by name
        self._epoch_open = self._complete = False
        self._agreement, self._bias = Agreement(trainer, self._source), TruncationBias(trainer)

    def run(self):
        """Trains. A signal that comes meanwhile ends the process, after a checkpoint."""
        recovery.prepare(self._trainer, self._source)
        # Several workers make TensorFlow take SIGTERM for itself and ignore it.
        watch = signals.Watch(self._workdir is not None or self._trainer.workers.count > 1)
        workers = self._trainer.workers
        try:
            with watch:
                return self._run(watch)
        except Exception as error:
            if workers.count > 1 and is_loss(error):
                raise workers.lost(error, self._trainer.counters.step, self._files.last_saved) from error
            if workers.count > 1:
                error.add_note(f"This was {workers.name}, after step {self._trainer.counters.step:,}.")
            raise
        finally:
            self._loggers.close()
            if self._callbacks is not None:
                self._callbacks.give_back()
            self._files.close()
            if watch.received is not None:
                signals.leave(watch.received)

    def _run(self, watch):
        trainer, source = self._trainer, self._source
        self._agreement.check_settings(self._totals.asked, self._agenda.intervals)
        trainer.prepare(*source.for_trace())
        trainer.given_learning_rates = compatibility.learning_rates(trainer)
        if trainer.given_frozen is None:
            trainer.given_frozen = compatibility.frozen(trainer.model)
        resumed = self._files.open()
        if self._totals.nothing_left(resumed):
            self._files.export_if_due()
            return self._totals.nothing_to_do(resumed)
        self._totals.check_length()
        self._loggers.open(self._workdir, trainer.counters.step)
        self._agreement.check_own_rows()
        if self._files.train is not None:
            chart_layout.write_once(self._files.train, os.path.join(self._workdir, "train"), trainer)
        self._callbacks = CallbackBridge(self._given_callbacks, trainer, self._steps, self._epochs)
        self._progress = closing.open_progress(self._totals.last_step(), trainer.counters.step, self._show)
        self._log_window, self._epoch_window = trainer.ledger.window(), trainer.ledger.window()
        self._window_start, self._waited = time.monotonic(), 0.0
        self._callbacks.train_begin(trainer.counters.rounds if resumed else None)
        if resumed:
            self._progress.message(f"resumed at step {trainer.counters.step:,} from {self._files.store.directory}")
            compatibility.settle_weights(trainer)
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
            self._progress.message(f"{watch.received.name}: stopped at step {trainer.counters.step:,}{written}")
            trainer.workers.meet()
        return self._callbacks.history

    def _resume(self, host):
        """Goes on in the middle of everything."""
        loop = host["loop"]
        trainer_state.restore_callbacks(self._trainer, host, self._callbacks)
        trainer_state.restore_windows(loop["windows"], self._log_window, self._epoch_window)
        if not self._best.restore(loop["best"], loop.get("best_by")):
            self._trainer.counters.forget_best()
        self._last_logged, self._last_evaluated = loop["last_logged"], loop["last_evaluated"]
        self._chores = list(loop["chores"])
        if loop["epoch_open"]:
            self._begin_epoch(resumed=True)
        elif not self._totals.reached() and not self._callbacks.stopped:
            self._begin_epoch()

    def _loop_state(self):
        """Arguments for `_resume`."""
        self._collect()
        return {
            "windows": trainer_state.windows_state(self._log_window, self._epoch_window),
            "best": self._best.state(),
            "best_by": self._best.name,
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
        if self._trainer.workers.count > 1:
            updates = self._agenda.updates_to_run(self._callbacks.every_update)
            self._agreement.decide(watch, self._callbacks.stopped, updates, self._time_to_save())
        return not self._callbacks.stopped and watch.received is None

    def _check(self, watch):
        """Raises `Stopped` if a signal came, to any of the workers."""
        watch.note(self._trainer.workers.largest(watch.number))
        watch.check()

    def _advance(self, watch):
        """Runs to the next step at which something is due, and does it."""
        trainer, source = self._trainer, self._source
        trainer.media.aim(self._agenda.next_log(self._totals.last_step()))
        begin, count = trainer.counters.step, self._agreement.updates
        count = self._agenda.updates_to_run(self._callbacks.every_update) if count is None else count
        self._callbacks.batch_begin()
        try:
            ended, reports = self._update(count)
        except NonFiniteUpdates as error:
            self._rescue(error)
            return
        self._agreement.check_first_batch()
        done, ended = trainer.counters.step - begin, ended or source.remaining() == 0
        if self._callbacks.every_update and done:
            self._callbacks.batch_end(scalars.callback_logs(self._trainer, self._epoch_so_far()))
        if reports is not None:
            trainer.timesteps.write(self._train_rows, trainer.counters.step, reports[0])
            trainer.health_log.write(self._train_rows, trainer.counters.step, reports[1])
        if self._progress.due(trainer.counters.step):
            shown = closing.progress_values(trainer, self._epoch_so_far(), self._epochs)
            self._progress.update(trainer.counters.step, shown)
        self._chores = self._agenda.chores(done, ended, self._save_due(), self._best.wanted)
        self._do_chores(watch)

    def _update(self, count):
        """Runs `count` updates, or one that is looked at. Returns (whether the data ended, its reports or None)."""
        trainer, begin, started = self._trainer, self._trainer.counters.step, time.monotonic()
        ended, reports, spike, short, each = False, None, None, None, trainer.accumulation_steps
        if trainer.outdated:
            trainer.prepare(*self._source.for_trace())  # a callback froze or unfroze layers
            self._callbacks.lend_optimizer()

        observed = (False, False) if count else self._agenda.observed()

        def run(iterator, count=count):
            if count:
                return trainer.calls.run(iterator, count), None
            iterator = self._bias.before(iterator, self._agenda.compared(), self._train_rows)
            return trainer.calls.run_observed(iterator, *observed)

        recovery.hold_batches(trainer, self._source)
        try:
            ended, reports = run(self._source.iterator)
        except SpikedUpdate as found:
            spike = found
        except OutOfMemory as found:
            short = found
        finally:
            self._source.advance((trainer.counters.step - begin) * each)
        if count:
            trainer.calls.note_speed(trainer.counters.step - begin, time.monotonic() - started)
        self._files.poll()
        if short is not None:
            self._files.wait()
            _, reports = recovery.repeat(trainer, self._source, short, lambda iterator: run(iterator, min(count, 1)))
        if spike is not None:
            self._files.wait()  # it may be the checkpoint that the batches are fetched from once more
            reports = recovery.handle_spike(trainer, self._source, self._train_rows, spike, observed)
        return ended, reports

    def _do_chores(self, watch):
        """Runs the pending chores. An evaluation that a signal interrupts is repeated when the run resumes."""
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
        """Restores a good checkpoint if settings and files allow it; otherwise diagnoses the update and raises."""
        self._files.wait()
        host = recovery.go_back(self._trainer, self._source, self._files, self._train_rows, error)
        if host is None:
            raise recovery.explain(self._trainer, self._source, self._workdir, error) from None
        self._loggers.open(self._workdir, self._trainer.counters.step)
        epoch_open = self._epoch_open
        self._trainer.ledger.take()
        self._resume({**host, "loop": {**host["loop"], "epoch_open": False, "chores": []}})
        self._epoch_open = epoch_open
        self._window_start = time.monotonic()
        # The same step again, but with the data from here on: a run that is killed now does not go back once more.
        self._save(urgent=True)

    def _pass_ended(self):
        trainer, source = self._trainer, self._source
        if source.position == 0 and source.length is None and not trainer.counters.step:
            raise ValueError("The dataset is empty: it has no batch. Check the files or the filter it is made from.")
        if self._steps is not None:
            if not self._totals.reached():
                raise ValueError(self._totals.too_short(trainer.counters.step))
            return
        trainer.counters.end_pass()
        source.restart()

    # ---- What is due.

    def _log(self):
        trainer, step = self._trainer, self._trainer.counters.step
        self._collect()
        now = time.monotonic()
        values = scalars.train_scalars(trainer, self._log_window, now - self._window_start)
        trainer.health_log.history.add_scalars(step, values)
        self._train_rows.scalars(step, values)
        self._train_rows.write(step, trainer.media.take(step))
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

    def _evaluate(self, watch):
        trainer, step = self._trainer, self._trainer.counters.step
        if self._last_evaluated == step:
            return
        with trainer.evaluation.interrupted_by(lambda: self._check(watch)):
            results = trainer.trainer.evaluate(self._eval_dataset, **self._eval_options)
        self._last_evaluated = step
        self._callbacks.evaluated(results)
        score = self._best.see(step, results)
        if self._workdir is not None and trainer.counters.improves(score) and trainer.workers.is_chief:
            export.export_best(trainer, self._workdir, self._eval_options["averaged"])
        tags = trainer.evaluation.tags
        values = {tags.get(name, name): value for name, value in results.items()}
        # With the latest horizons: TensorBoard's HParams tab takes its metrics from this run alone.
        self._eval_rows.scalars(step, values | trainer.timesteps.horizons)
        if self._files.eval is not None:
            self._files.eval.flush()
        self._progress.evaluated(step, results)

    def _begin_epoch(self, resumed=False):
        if not resumed:
            for metric in self._trainer.metrics.values():
                metric.reset_state()
            self._epoch_window.clear()
            self._trainer.ledger.take()
            self._callbacks.epoch_begin()
        self._epoch_open = True

    def _end_epoch(self):
        self._callbacks.epoch_end(scalars.callback_logs(self._trainer, self._epoch_so_far()))
        self._epoch_open = False
        if not self._totals.reached() and not self._callbacks.stopped:
            self._begin_epoch()

    def _finish(self, watch):
        step = self._trainer.counters.step
        if self._last_logged != step:
            self._log()
        if self._eval_dataset is not None:
            self._evaluate(watch)
        if self._epoch_open:
            self._end_epoch()
        self._progress.close(step, closing.progress_values(self._trainer, self._epoch_so_far(), self._epochs))
        self._progress.remark_on_waiting(self._waited, self._source.in_python)
        spikes = sum(spike.action == "skip" for spike in self._trainer.health_log.spikes)
        self._progress.remark_on_skips(self._trainer.counters.skips.total - spikes, step)
        closing.write_verdicts(self._trainer, self._train_rows)
        # First the callbacks: EarlyStopping puts the best weights back at this point.
        self._callbacks.train_end()
        self._complete = True
        if self._workdir is not None:
            self._save(urgent=True)
            if self._trainer.workers.is_chief:
                export.export(self._trainer, self._workdir)

    # ---- Files.

    def _save_if_due(self):
        """Saves after an evaluation with `keep_best` if it is the best so far, or if a checkpoint is due anyway."""
        if self._save_due() or self._best.score(self._trainer.counters.step, new=True) is not None:
            self._save()

    def _save_due(self):
        by_time = self._agreement.time_to_save
        by_time = self._time_to_save() if by_time is None else by_time
        return self._workdir is not None and self._agenda.save_due(by_time)

    def _time_to_save(self):
        return self._agenda.time_to_save(self._files.saved_at)

    def _save(self, urgent=False):
        """Writes a checkpoint beside the training; if `urgent`, now. Returns whether it is on the disk then."""
        score = self._best.score(self._trainer.counters.step)
        return self._files.save(self._loop_state(), self._callbacks, score=score, urgent=urgent)
