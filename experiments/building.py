"""From options to what TensorFlow and the trainer take: optimizer, schedule, combiner, devices, precision."""

import ast
import re

import keras
import tensorflow as tf

import losses

OPTIMIZERS = ("adam", "adamw", "nadam", "lion", "rmsprop", "adagrad", "sgd", "momentum")
SCHEDULES = ("constant", "cosine", "exponential")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
MULTI_WORKER = "multi_worker"
_COSINE_END = 0.01  # of the peak
_DECAY, _DECAY_STEPS = 0.9, 1000


def optimizer(config):
    """A new optimizer as the flags say.

    >>> from experiments import launch
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
    """A number, or a Keras schedule where the rate changes with the step."""
    if config.learning_rate_schedule == "constant" and not config.warmup_steps:
        return config.learning_rate
    return WarmupSchedule(config.learning_rate, config.warmup_steps, config.learning_rate_schedule, config.steps)


@keras.saving.register_keras_serializable(package="looptape")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Rises in a straight line to the peak, then stays there or goes down.

    Args:
        peak: the highest learning rate.
        warmup_steps: updates over which it rises: the first of n has peak/n, the last has the peak.
        shape: what comes afterwards: "constant", half a "cosine", or "exponential", a tenth less every 1,000 updates.
        steps: the update at which the cosine has come down to a hundredth of the peak.
    """

    def __init__(self, peak, warmup_steps, shape, steps):
        self.peak, self.warmup_steps, self.shape, self.steps = peak, warmup_steps, shape, steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        rate = tf.constant(self.peak, tf.float32)
        if self.shape == "cosine":
            length = max(self.steps - self.warmup_steps, 1)
            done = tf.clip_by_value((step - self.warmup_steps) / length, 0.0, 1.0)
            rate *= _COSINE_END + (1 - _COSINE_END) * 0.5 * (1 + tf.cos(3.14159265 * done))
        if self.shape == "exponential":
            rate *= _DECAY ** (tf.maximum(step - self.warmup_steps, 0.0) / _DECAY_STEPS)
        if self.warmup_steps:
            rate = tf.where(step < self.warmup_steps, self.peak * (step + 1) / self.warmup_steps, rate)
        return rate

    def get_config(self):
        names = ("peak", "warmup_steps", "shape", "steps")
        return {name: getattr(self, name) for name in names}


def trainer_options(config, loss_weights=None, combiner_args=None):
    """The trainer's keyword arguments that the common flags decide.

    >>> from experiments import launch
    >>> trainer_options(launch.Config(accumulation_steps=4))["accumulation_steps"]
    4

    Args:
        config: the experiment's config.
        loss_weights: the experiment's own {name: number or schedule}; `--loss_weights` replaces those it names.
        combiner_args: the experiment's own arguments of any combiner but the plain sum, which has none;
            `--combiner_args` replaces those it names.
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
        "jit_compile": config.jit_compile and not config.run_eagerly,
        "run_eagerly": config.run_eagerly,
    }


def pairs(text):
    """{name: value} of "name=0.1,other=1". Values are Python literals where they can be, text otherwise.

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


def check_combiner(name):
    return losses.combiner_from_name(name)


def make_combiner(name, arguments, own=None):
    """The combiner of `--combiner` and `--combiner_args`, or None for the trainer's own sum.

    >>> make_combiner("gradnorm", "alpha=1", {"alpha": 2.0, "warmup_steps": 5}).warmup_steps
    5
    """
    arguments = pairs(arguments)
    if not arguments and isinstance(losses.combiner_from_name(name), losses.WeightedSum):
        return None
    return losses.combiner_from_name(name, **{**(own or {}), **arguments})


def replica_count(text):
    """None, "all", or the number of devices of one process that `--strategy` asks for."""
    kind, colon, count = text.partition(":")
    if text in ("none", MULTI_WORKER):
        return None
    if kind != "mirrored" or (colon and not (count.isdigit() and int(count) >= 1)):
        raise ValueError(
            "it must be none, mirrored, or mirrored:N with N at least 1, or multi_worker. Use e.g. mirrored:2."
        )
    return int(count) if colon else "all"


def make_strategy(config):
    """The `tf.distribute` strategy of `--strategy` within one process. Before TensorFlow uses any device."""
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
    """(from, to) of "20-30", or None for an empty text."""
    if not text:
        return None
    first, dash, last = text.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        raise ValueError("it must be from-to, two steps of which the first is at least 1. Use e.g. 20-30.")
    return int(first), int(last)


def check_together(config):
    """What a flag cannot know alone."""
    if config.profile and not config.workdir and not config.fast_dev_run:
        raise ValueError("`profile` is set without `workdir`; the profile has to be written somewhere. Set both.")
    if config.evaluate_averaged and config.ema_decay is None:
        raise ValueError("`evaluate_averaged` is set without `ema_decay`. Set e.g. ema_decay to 0.999.")
    if config.combiner_args:
        make_combiner(config.combiner, config.combiner_args)
    for name, value in pairs(config.loss_weights).items():
        if not isinstance(value, int | float):
            raise ValueError(f"`loss_weights` gives {name!r} the weight {value!r}; it must be a number.")


def prepare_process(config):
    """Sets what holds for the whole process: logical devices, determinism, precision, seeds."""
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
            f"`strategy` asks for {count} devices, but TensorFlow is running already with fewer. Start a new process."
        ) from error
