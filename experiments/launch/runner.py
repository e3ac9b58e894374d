"""Launches an experiment: flags → `build(config)` → `Trainer.fit` → a table of results.

An experiment is one file::

    @dataclasses.dataclass(frozen=True)
    class Config(launch.Config):
        length: int = launch.option(100, "time steps of a sequence", least=2)

    def build(config):
        ...
        trainer = Trainer(model, launch.optimizer(config), losses, **launch.trainer_options(config))
        return launch.Experiment(trainer, dataset, eval_dataset, goals=[launch.Goal("error", below=0.01)])

    if __name__ == "__main__":
        launch.main(Config, build)
"""

import contextlib
import dataclasses
import os
import sys
import tempfile

import tensorflow as tf
from absl import logging

from looptape import _quiet
from looptape.experiments.cluster import joining
from looptape.experiments.launch import factories, flags, results_table, verify_resume, warm_start
from looptape.experiments.launch.config import Config
from looptape.experiments.launch.factories import optimizer, trainer_options
from looptape.experiments.launch.options import Refused, option
from looptape.experiments.launch.results_table import Goal
from looptape.experiments.launch.workdir import Workdir, checkpointed_step
from looptape.experiments.records import profile
from looptape.trainer import Trainer
from looptape.trainer.distribution import workers
from looptape.trainer.step.forward.loss_weights import WrongLossNames

__all__ = ["Config", "Experiment", "Goal", "Refused", "main", "option", "optimizer", "run", "trainer_options"]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The return value of `build(config)`.

    Args:
        trainer: the trainer, made with `trainer_options(config)`.
        dataset: endless training batches.
        eval_dataset: held-out batches, {name: held-out batches}, or None.
        goals: expected results, which the closing table compares with the actual ones.
        callbacks: Keras callbacks.

    >>> import keras
    >>> def build(config):
    ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    ...     trainer = Trainer(model, optimizer(config), {"error": "mse"}, **trainer_options(config))
    ...     data = tf.data.Dataset.from_tensors((tf.ones([8, 1]), tf.ones([8, 1]))).repeat()
    ...     return Experiment(trainer, data, data.take(1), goals=(Goal("error", below=0.1),))
    >>> build(Config(steps=2)).goals[0].name
    'error'
    """

    trainer: Trainer
    dataset: tf.data.Dataset
    eval_dataset: tf.data.Dataset | dict[str, tf.data.Dataset] | None = None
    goals: tuple = ()
    callbacks: tuple = ()


def main(config_class, build):
    """Runs the calling module as an experiment: parses its flags, trains, and exits the process."""
    if not (isinstance(config_class, type) and issubclass(config_class, Config)):
        raise TypeError(
            f"`launch.main` got {config_class!r} as the config; it must be a class that inherits from launch.Config. "
            "Write `class Config(launch.Config):` and `launch.main(Config, build)`."
        )
    if not callable(build):
        raise TypeError(
            f"`launch.main` got {build!r} as `build`; it must be a function from a config to a launch.Experiment. "
            "Write `launch.main(Config, build)`."
        )
    module = sys.modules[sys._getframe(1).f_globals["__name__"]]  # a config may come from another file
    name = experiment_name(module)
    doc = module.__doc__ or ""
    flags.run(lambda config: _main(config, build, name, doc, module), config_class, name, doc)


def run(config, build, *, name="experiment", doc="", show=True):
    """Runs an experiment in this process, or resumes it from its workdir. Returns {name: result} of the evaluation.

    Args:
        config: the experiment's config.
        build: `build(config) -> Experiment`, called once in the scope of the strategy.
        name: name of the experiment, for the workdir and the table.
        doc: the experiment's docstring; the table quotes the paragraph that begins with "Expect".
        show: whether to print the progress and the closing table.

    >>> from looptape.experiments import adding_problem
    >>> config = adding_problem.Config(steps=1, length=4, eval_examples=10, jit_compile=False, probe_every=0)
    >>> sorted(run(config, adding_problem.build, show=False))
    ['error', 'loss']
    """
    with contextlib.ExitStack() as stack:
        if config.fast_dev_run:
            config = _shortened(config, stack.enter_context(tempfile.TemporaryDirectory()))
        joined = joining.join() if config.strategy == factories.MULTI_WORKER else None
        factories.prepare_process(config)
        strategy = joined or factories.make_strategy(config)
        together = workers.of(strategy)
        joining.check_flags(together, config)
        _quiet.settle()
        show = show and together.is_chief
        loggers = factories.make_loggers(config)
        workdir = Workdir(config, name) if config.workdir else None
        with strategy.scope():
            experiment = limited(_checked(build(config)), config)
        if config.init_from and not (workdir and workdir.resuming):
            taken = warm_start.warm_start(experiment, config.init_from)
            if show:
                print(taken, file=sys.stderr)
        writes = workdir is not None and together.is_chief
        with workdir.session(experiment.eval_dataset is not None) if writes else contextlib.nullcontext():
            outcome = _fit(config, experiment, loggers, workdir.changed if workdir else {}, show)
        if writes:
            workdir.write_results(outcome)
    if show:
        print(results_table.table(config, name, doc, experiment.goals, outcome), flush=True)
    return outcome.results


def experiment_name(module):
    """Returns the name of an experiment's module, also if it runs as a program."""
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        return spec.name.rpartition(".")[2]
    return os.path.splitext(os.path.basename(module.__file__))[0]


def _main(config, build, name, doc, module):
    if config.print_config:
        print("\n".join(flags.flag_lines(config)))
        return
    if config.verify_resume:
        sys.exit(verify_resume.verify(config, module))
    # Lines of TensorFlow's that tell a user nothing: about each save, each strategy and each collective.
    chatty = ("functional_saver.py", "mirrored_strategy.py", "cross_device_ops.py", "collective_all_reduce_strategy.py")
    for handler in (logging.get_absl_handler(), *tf.get_logger().handlers):
        handler.addFilter(lambda record: record.filename not in chatty or record.levelname != "INFO")
    try:
        _run(config, build, name, doc)
    except Refused as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except WrongLossNames as error:
        wrong = factories.wrong_loss_weight(config.loss_weights, error)
        if wrong is None:  # the experiment's own weights are wrong, which is for its author to see
            raise
        print(f"{name}: {wrong}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        step = checkpointed_step(config.workdir) if config.workdir else None
        again = (
            "There is no checkpoint" if step is None else f"Start again to resume from the checkpoint of step {step:,}"
        )
        print(f"\n{name}: interrupted. {again}.", file=sys.stderr)
        sys.exit(130)


def _run(config, build, name, doc):
    if config.strategy != factories.MULTI_WORKER:
        run(config, build, name=name, doc=doc)
        return
    try:
        run(config, build, name=name, doc=doc)
        joining.leave()
    except BaseException as error:
        joining.leave(error, name)


def _fit(config, experiment, loggers, changed, show):
    trainer = experiment.trainer
    callbacks = [*experiment.callbacks, *warm_start.overrides(config, experiment, changed)]
    callbacks += verify_resume.callbacks(trainer)
    if config.profile:
        callbacks.append(profile.Profile(trainer, *factories.step_range(config.profile), config.workdir))
    clock = results_table.Clock(trainer)
    history = trainer.fit(
        experiment.dataset,
        steps=config.steps,
        eval_dataset=experiment.eval_dataset,
        eval_every=config.eval_every if experiment.eval_dataset is not None else None,
        log_every=config.log_every,
        checkpoint_every=config.checkpoint_every,
        checkpoint_every_seconds=config.checkpoint_every_seconds,
        keep_checkpoints=config.keep_checkpoints,
        workdir=config.workdir,
        callbacks=[*callbacks, clock],
        progress=show,
        evaluate_averaged=config.evaluate_averaged,
        loggers=loggers,
    )
    return results_table.outcome(config, experiment, history, clock)


def _checked(experiment):
    if isinstance(experiment, Experiment):
        return experiment
    raise TypeError(
        f"`build` returned a {type(experiment).__name__}; it must return launch.Experiment(trainer, dataset, …)."
    )


def _shortened(config, directory):
    """Returns the config of `--fast_dev_run`: four updates with two evaluations, checkpoints and probes."""
    return dataclasses.replace(
        config,
        workdir=directory,
        steps=4,
        log_every=1,
        eval_every=2,
        checkpoint_every=2,
        probe_every=2 if config.probe_every else 0,
        health_every=2 if config.health_every else 0,
        limit_eval_batches=min(config.limit_eval_batches or 2, 2),
        profile="2-3" if config.profile else "",
    )


def limited(experiment, config):
    """Returns the experiment with datasets limited by `--overfit_batches` and `--limit_eval_batches`."""
    dataset, eval_dataset = experiment.dataset, experiment.eval_dataset
    if config.overfit_batches:
        few = dataset.take(config.overfit_batches)
        dataset, eval_dataset = few.cache().repeat(), few if eval_dataset is not None else None
    if config.limit_eval_batches and eval_dataset is not None:
        cut = lambda dataset: dataset.take(config.limit_eval_batches)  # noqa: E731
        is_several = isinstance(eval_dataset, dict)
        eval_dataset = {name: cut(each) for name, each in eval_dataset.items()} if is_several else cut(eval_dataset)
    return dataclasses.replace(experiment, dataset=dataset, eval_dataset=eval_dataset)
