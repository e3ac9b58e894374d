"""Turns flags into objects for TensorFlow and the trainer: optimizer, schedule, combiner, devices, precision."""

import ast
import difflib
import re

import keras
import tensorflow as tf

from looptape import loggers, losses, timesteps
from looptape.experiments.launch.options import Refused, run_values
from looptape.trainer.optim.warmup_schedule import SHAPES, WarmupSchedule

OPTIMIZERS = ("adam", "adamw", "nadam", "lion", "rmsprop", "adagrad", "sgd", "momentum")
SCHEDULES = SHAPES
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
MULTI_WORKER = "multi_worker"


def optimizer(config):
    """Makes the optimizer that the flags ask for.

    >>> from looptape import launch
    >>> type(optimizer(launch.Config(optimizer="sgd", learning_rate=0.5))).__name__
    'SGD'
    """
    classes = {
        "adam": keras.optimizers.Adam,
        "adamw": keras.optimizers.AdamW,
        "nadam": keras.optimizers.Nadam,
        "lion": keras.optimizers.Lion,
        "rmsprop": keras.optimizers.RMSprop,
        "adagrad": keras.optimizers.Adagrad,
        "sgd": keras.optimizers.SGD,
    }
    rate = learning_rate(config)
    if config.optimizer == "momentum":
        return keras.optimizers.SGD(rate, momentum=0.9)
    return classes[config.optimizer](rate)


def learning_rate(config):
    """Returns a number, or a Keras schedule if the rate changes with the step."""
    if config.learning_rate_schedule == "constant" and not config.warmup_steps:
        return config.learning_rate
    steps = max(config.steps, config.warmup_steps + 1)
    return WarmupSchedule(config.learning_rate, config.warmup_steps, config.learning_rate_schedule, steps)


def trainer_options(config, loss_weights=None, combiner_args=None):
    """Returns the keyword arguments of `Trainer` that the common flags set.

    >>> from looptape import launch
    >>> trainer_options(launch.Config(accumulation_steps=4))["accumulation_steps"]
    4

    Args:
        config: the experiment's config.
        loss_weights: the experiment's own {name: number or schedule}; `--loss_weights` overrides those it names.
        combiner_args: the experiment's own combiner arguments, ignored for the plain sum, which has none;
            `--combiner_args` overrides those it names.
    """
    weights = dict(loss_weights or {})
    weights.update({name: float(value) for name, value in pairs(config.loss_weights).items()})
    return {
        "loss_weights": weights or None,
        "combiner": make_combiner(config.combiner, config.combiner_args, combiner_args),
        "accumulation_steps": config.accumulation_steps,
        "clip_norm": config.clip_norm,
        "ema_decay": config.ema_decay,
        "probe_every": config.probe_every,
        "timestep_actions": _actions(config),
        "bptt_window": config.bptt_window,
        "recurrent": config.recurrent,
        "recurrent_memory": config.recurrent_memory,
        "health_every": config.health_every,
        "health": config.health if config.health_every else (),
        "jit_compile": config.jit_compile and not config.run_eagerly,
        "run_eagerly": config.run_eagerly,
    }


def _actions(config):
    """The actions on time steps that flags name: first those on the carried gradient, the clip last."""
    makers = {
        "timestep_cut": lambda every: timesteps.Cut(every=every),
        "timestep_detach": lambda probability: timesteps.Detach(probability, seed=config.seed),
        "timestep_scale": timesteps.Scale,
        "timestep_normalize": timesteps.Normalize,
        "timestep_clip": timesteps.ClipNorm,
    }
    values = {name: getattr(config, name) for name in makers}
    return [makers[name](value) for name, value in values.items() if value is not None]


def wrong_loss_weight(text, error):
    """Returns an error message if `--loss_weights` names an unknown loss, else None.

    Args:
        text: the flag's value.
        error: the `WrongLossNames` that the trainer raised.
    """
    wrong = [name for name in pairs(text) if name in error.unknown]
    if not wrong:
        return None
    near = difflib.get_close_matches(wrong[0], error.losses, n=1, cutoff=0.5)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"`loss_weights` names {wrong[0]!r}, which is not a loss;{hint} The losses are {', '.join(error.losses)}."


def pairs(text):
    """Parses "name=0.1,other=1" into {name: value}. Values are Python literals if possible, otherwise text.

    >>> pairs("alpha=1.5,statistic=max")
    {'alpha': 1.5, 'statistic': 'max'}
    >>> pairs("clip=(0.1, 10),alpha=1")
    {'clip': (0.1, 10), 'alpha': 1}
    """
    found = {}
    # Commas inside brackets belong to a value.
    for part in filter(None, (part.strip() for part in re.split(r",(?![^(\[{]*[)\]}])", text))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not value:
            raise ValueError(f"{part!r} is not of the form name=value. Use e.g. error=1,penalty=0.1.")
        if name in found:
            raise ValueError(f"{name!r} is given twice. Keep one of them.")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


LOGGERS = {"csv": loggers.CSV, "jsonl": loggers.JSONLines, "mlflow": loggers.MLflow, "wandb": loggers.WandB}


def logger_names(text):
    """Parses "csv,jsonl" into ["csv", "jsonl"]."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in LOGGERS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a logger. Use some of {', '.join(LOGGERS)}, separated by commas.")
    return names


def make_loggers(config):
    """Makes the loggers that the flags name. They receive the flags as the configuration.

    Refuses those whose package is missing, and files without a work directory.
    """
    try:
        made = [LOGGERS[name](config=run_values(config)) for name in logger_names(config.loggers)]
    except ImportError as error:
        raise Refused(f"`loggers` is {config.loggers!r}. {error}") from error
    for logger in made:
        try:
            logger.check(config.workdir)
        except ValueError:
            raise Refused(
                f"`loggers` is {config.loggers!r}, but there is no work directory for its file. Set --workdir."
            ) from None
    return made


def check_combiner(name):
    return losses.combiner_from_name(name)


def make_combiner(name, arguments, own=None):
    """Makes the combiner of `--combiner` and `--combiner_args`, or returns None for the trainer's own sum.

    >>> make_combiner("gradnorm", "alpha=1", {"alpha": 2.0, "warmup_steps": 5}).warmup_steps
    5
    """
    arguments = pairs(arguments)
    if not arguments and isinstance(losses.combiner_from_name(name), losses.WeightedSum):
        return None
    return losses.combiner_from_name(name, **{**(own or {}), **arguments})


def replica_count(text):
    """Returns the number of devices per process that `--strategy` asks for, or "all", or None."""
    kind, colon, count = text.partition(":")
    if text in ("none", MULTI_WORKER):
        return None
    if kind != "mirrored" or (colon and not (count.isdigit() and int(count) >= 1)):
        raise ValueError(
            "it must be none, mirrored, or mirrored:N with N at least 1, or multi_worker. Use e.g. mirrored:2."
        )
    return int(count) if colon else "all"


def make_strategy(config):
    """Makes the `tf.distribute` strategy of `--strategy` for one process. Call it before TensorFlow uses any device."""
    count = replica_count(config.strategy)
    if count is None:
        return tf.distribute.get_strategy()
    gpus = tf.config.list_physical_devices("GPU")
    if count == "all":
        return tf.distribute.MirroredStrategy()
    if len(gpus) >= count:
        return tf.distribute.MirroredStrategy([f"GPU:{index}" for index in range(count)])
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)])


def step_range(text):
    """Parses "20-30" into (20, 30); empty text gives None."""
    if not text:
        return None
    first, dash, last = text.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        raise ValueError("it must be from-to, two steps, the first at least 1. Use e.g. 20-30.")
    return int(first), int(last)


def check_together(config):
    """Checks flags that depend on each other."""
    if config.profile and not config.workdir and not config.fast_dev_run:
        raise ValueError("`profile` is set without `workdir`; the profile needs a directory. Set both.")
    if config.evaluate_averaged and config.ema_decay is None:
        raise ValueError("`evaluate_averaged` is set without `ema_decay`. Set e.g. ema_decay to 0.999.")
    if config.combiner_args:
        make_combiner(config.combiner, config.combiner_args)
    for name, value in pairs(config.loss_weights).items():
        if not isinstance(value, int | float):
            raise ValueError(f"`loss_weights` gives {name!r} the weight {value!r}; it must be a number.")


def prepare_process(config):
    """Applies the process-wide settings: logical devices, determinism, precision, seeds."""
    count = replica_count(config.strategy)
    if isinstance(count, int) and len(tf.config.list_physical_devices("GPU")) < count:
        _split_cpu(count)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.config.set_dtype_policy(config.precision)
    keras.utils.set_random_seed(config.seed)


def _split_cpu(count):
    cpu = tf.config.list_physical_devices("CPU")[0]
    present = tf.config.get_logical_device_configuration(cpu)
    if present is not None and len(present) >= count:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:
        raise RuntimeError(
            f"`strategy` asks for {count} devices, but TensorFlow already runs with fewer. Start a new process."
        ) from error
