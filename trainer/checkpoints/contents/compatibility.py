"""Checks that a checkpoint fits the trainer that restores it: layers, losses, optimizers, data, options, versions."""

import inspect
import json
import os
import warnings
import weakref
from importlib import metadata

import keras
import tensorflow as tf
from absl import logging

from looptape.trainer.checkpoints.contents import computations, descriptions, state_names
from looptape.trainer.data import pipeline
from looptape.trainer.data.source import has_clock
from looptape.trainer.variables import all_layers

_ARGUMENTS = ("accumulation_steps", "clip_norm", "ema_decay", "jit_compile")
_OPTIONS = ("recurrent", "bptt_window", "bptt_updates", "bptt_begins", "timestep_actions", "head_gradients", "on_spike")
_LATER = ("spike_threshold", "shared_variables", "communication_dtype")  # not in checkpoints of earlier versions
_HOOKS = (
    "compute_losses",
    "train_step",
    "eval_step",
    "call_model",
    "transform_gradients",
    "transform_timestep_gradient",
)
_HOOKS_OF: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # {trainer: {hook: description}}


def environment():
    """Everything besides the state that the bits depend on."""
    threads = tf.config.threading
    return {
        **{name: metadata.version(name) for name in ("tensorflow", "keras", "numpy")},
        "threads": [threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads()],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "deterministic": not has_clock(),
    }


def compare_environment(before, path):
    now = environment()
    changed = [f"{name}: {before.get(name)} → {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        warnings.warn(
            f"The checkpoint {path} was written in another environment ({'; '.join(changed)}). Training resumes from "
            "it, but the result will not be the same bit for bit.",
            stacklevel=2,
        )


def compare_order(manifest, state, path):
    """Refuses a model whose layers come in another order: of equal shapes they would be taken for each other."""
    if "format" not in manifest:
        return
    before = [name for name in manifest["contents"] if name.startswith("model/")]
    now = [name for name in state if name.startswith("model/")]
    if before != now and sorted(before) == sorted(now):
        moved = [f"{new} in place of {old}" for old, new in zip(before, now, strict=True) if old != new]
        raise ValueError(
            f"The checkpoint {path} was made with the model's variables in another order. Now there is "
            f"{', '.join(moved)}. Put the layers back in their order, or use another workdir and `warm_start` for the "
            "weights."
        )


def describe_layers(model):
    """{stable name: [class, {option: value}]} of the innermost layers, as JSON gives it back.

    With what each layer and model computes, see `computations`; the model itself is `model`.
    """
    names, found = state_names.Names([model]), {}
    for layer in all_layers(model):
        if getattr(layer, "_layers", ()):
            name = "model" if layer is model else names.layer(layer)
            found[name] = [type(layer).__name__, computations.describe(layer, names)]
            continue
        try:
            with warnings.catch_warnings():  # Keras warns of lambdas, which cannot be loaded everywhere
                warnings.simplefilter("ignore")
                config = layer.get_config()
        except Exception:  # a custom layer may not have any
            config = {}
        left_out = ("name", "trainable", "dtype", "batch_shape", "build_config")
        options = {k: v for k, v in config.items() if k not in left_out and not k.endswith("initializer")}
        options = {k: computations.described_function(getattr(layer, k, None)) or v for k, v in options.items()}
        found[names.layer(layer)] = [type(layer).__name__, options | computations.describe(layer, names)]
    return json.loads(json.dumps(found, default=lambda value: type(value).__name__))


def compare_layers(before, model, path):
    """Warns of layers with other options than in the checkpoint: they restore, but compute something else."""
    changed = []
    for name, (kind, options) in describe_layers(model).items():
        old_kind, old = before.get(name, (kind, options))
        if old_kind != kind:
            changed.append(f"{name}: {old_kind} → {kind}")
        else:
            known = [k for k in options if k in old or k not in computations.KINDS]
            changed += [f"{name}.{k}: {old.get(k)} → {options[k]}" for k in known if old.get(k) != options[k]]
    if changed:
        warnings.warn(
            f"The checkpoint {path} was made with other layers ({'; '.join(sorted(changed))}). Its weights are "
            "restored; from now on the model computes something else with them.",
            stacklevel=2,
        )


def describe_settings(trainer, source):
    """{what: value} of a trainer and its data, as JSON gives it back."""
    found = {f"`{name}`": getattr(trainer, name) for name in _ARGUMENTS}
    if isinstance(trainer.trainer.accumulation_steps, dict):  # not the number of the present step
        found["`accumulation_steps`"] = trainer.trainer.accumulation_steps
    found |= {f"`{name}`": descriptions.describe(getattr(trainer.trainer, name)) for name in _OPTIONS}
    found |= {f"loss {name!r}": descriptions.describe(loss) for name, loss in trainer.losses.items()}
    found |= {f"metric {name!r}": descriptions.describe(metric) for name, metric in trainer.metrics.items()}
    weights = {name: trainer.loss_weights[name] for name in trainer.loss_weights}
    found |= {f"weight of {name!r}": descriptions.describe(w) for name, w in weights.items() if callable(w)}
    found |= note_hooks(trainer)
    phases = trainer.freezing.phases
    found |= {"stages": [stage.name for stage in trainer.stages]}
    found |= {f"`{name}`": descriptions.describe(getattr(trainer.trainer, name)) for name in _LATER}
    found |= {f"stage {stage.name!r}": descriptions.describe([stage.init, stage.apply]) for stage in trainer.stages}
    found |= {"frozen layers": frozen(trainer.model)} if phases is None else {"`freeze`": phases}
    if source.description is not None:
        found["data"] = source.description
    return json.loads(json.dumps({"trainer": found, "data": source.describe()}, default=str))


def note_hooks(trainer):
    """{hook: its description} as it was when this was first called: attributes it reads may change on the host."""
    own = trainer.trainer
    if own not in _HOOKS_OF:
        library = [cls for cls in type(own).__mro__ if cls.__module__.startswith("looptape.")]
        known = {name for cls in library for name in (*vars(cls), *getattr(cls, "__annotations__", ()))} | {"self"}
        known |= set(inspect.signature(library[0].__init__).parameters)
        values = {name: getattr(own, name) for cls in type(own).__mro__ for name in vars(cls)} | vars(own)
        values = {name: value for name, value in values.items() if name not in known and not callable(value)}
        hooks = [name for name in _HOOKS if trainer.overrides(name)]
        _HOOKS_OF[own] = {f"`{name}`": descriptions.describe_hook(type(own), name, values) for name in hooks}
    return _HOOKS_OF[own]


def frozen(model):
    """Stable names of the innermost layers that have weights and are frozen."""
    return sorted(name for name, layer in _leaves(model).items() if not layer.trainable)


def _leaves(model):
    names = state_names.Names([model])
    leaves = [layer for layer in all_layers(model) if not getattr(layer, "_layers", ())]
    return {names.layer(layer): layer for layer in leaves if layer.weights}


def restore_frozen(host, trainer):
    """Freezes and unfreezes layers as they were when the checkpoint was made.

    Only if the program built them as it did then, so that a callback must have changed them: who freezes other layers
    before a resume means it, and `compare_settings` names the difference.
    """
    then = (host.get("settings") or {}).get("trainer", {}).get("frozen layers")
    if then is None or host.get("given_frozen") != trainer.given_frozen or then == frozen(trainer.model):
        return
    leaves = _leaves(trainer.model)
    for container in all_layers(trainer.model):  # a frozen one hides what is trainable inside it
        inner = [name for name, leaf in leaves.items() if any(leaf is each for each in all_layers(container))]
        if not container.trainable and any(name not in then for name in inner):
            container.trainable = True
    for name, leaf in leaves.items():
        if leaf.trainable == (name in then):
            leaf.trainable = name not in then


def compare_settings(before, trainer, source, path):
    """Names the settings that differ from the checkpoint's. Data of another kind are refused.

    Args:
        before: from `describe_settings`; None for a checkpoint without it.
        trainer: the trainer.
        source: the data.
        path: of the checkpoint.
    """
    if before is None:
        return
    now = describe_settings(trainer, source)
    names = list(dict.fromkeys([*before["trainer"], *now["trainer"]]))
    later = [f"`{name}`" for name in _LATER] + [f"stage {stage.name!r}" for stage in trainer.stages]
    names = [name for name in names if name in before["trainer"] or name not in later]
    values = [(name, before["trainer"].get(name), now["trainer"].get(name)) for name in names]
    changed = [f"{name}: {old} → {new}" for name, old, new in values if old != new]
    if pipeline.same_operations(before["data"], now["data"]):
        changed += pipeline.changes(before["data"], now["data"])
    elif source.checkpointable():
        raise ValueError(other_data(before, source, path))
    else:
        changed.append(f"data: {pipeline.operations(before['data'])} → {pipeline.operations(now['data'])}")
    if changed:
        logging.warning(
            "The run resumes from %s with other settings: %s. The new ones apply from now on; "
            "the result equals neither a run with the old nor with the new settings.",
            *(path, "; ".join(changed)),
        )


def other_data(before, source, path):
    """The text of the error for a checkpoint that holds a position in different data."""
    known = f": {pipeline.operations(before['data'])}" if before else ""
    return (
        f"The checkpoint {path} holds a position in other data{known}; now they are "
        f"{pipeline.operations(source.describe())}. Pass the data in the same form as before, and "
        "`steps` or `epochs` as before; or use another workdir and `warm_start` for the weights."
    )


def compare_run(saved, own, path):
    """Warns of a checkpoint that another run wrote."""
    if saved is not None and saved != own:
        logging.warning(
            "The checkpoint %s was written by another run (%s; this work directory belongs to %s). Its state is "
            "restored; if it was copied by mistake, remove it.",
            *(path, saved, own),
        )


def learning_rates(trainer):
    """[learning rate as it is now] of every optimizer; for a schedule, its class and options."""
    return [_rate(optimizer) for optimizer in _each_optimizer(trainer)]


def _rate(optimizer):
    rate = getattr(optimizer, "_learning_rate", None)  # the public one computes a schedule's value of the step
    if not callable(rate) or hasattr(rate, "assign"):
        return float(tf.convert_to_tensor(rate))
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return descriptions.describe(rate)
    options = {name: value for name, value in rate.get_config().items() if name != "name"}
    return f"{type(rate).__name__} {descriptions.describe(options)}"


def _each_optimizer(trainer):
    for minimizer in trainer.minimizers.values():
        group = minimizer.optimizer
        yield from group.values() if hasattr(group, "values") else [group]


def describe_optimizers(trainer):
    """[[class, config without the learning rate]] of every optimizer, as JSON gives it back."""
    found = []
    for optimizer in _each_optimizer(trainer):
        config = {k: v for k, v in optimizer.get_config().items() if k not in ("name", "learning_rate")}
        found.append([type(optimizer).__name__, config])
    return json.loads(json.dumps(found, default=str))


def describe_losses(trainer):
    """[[names of the losses, class of the combiner, its arguments]] of every minimizer, as JSON gives it back."""
    found = []
    for minimizer in trainer.minimizers.values():
        combiner = minimizer.combiner
        options = {name: getattr(combiner, name, None) for name in combiner.arguments()}
        found.append([minimizer.names, type(combiner).__name__, options])
    return json.loads(json.dumps(found, default=str))


def compare_losses(before, now, path):
    """Refuses other losses, another order of them, and another combiner; warns of other options.

    Loss weights are restored by name, but a combiner's state is vectors with one entry for each loss, in their order.
    """
    for (old_names, old_kind, old), (names, kind, new) in zip(before, now, strict=False):
        if old_names != names:
            raise ValueError(
                f"The checkpoint {path} was made with the losses {old_names}, in this order; now they are {names}. "
                "Return the same ones in the same order, or use another workdir and `warm_start` for the weights."
            )
        if old_kind != kind:
            raise ValueError(
                f"The checkpoint {path} was made with the combiner {old_kind}, this trainer has {kind}. Use the same "
                "one, or another workdir and `warm_start` for the weights."
            )
        changed = [f"{name}: {old.get(name)} → {new[name]}" for name in new if old.get(name) != new[name]]
        if changed:
            logging.warning("The options of %s differ from the checkpoint's: %s. The new ones apply.", kind, changed)


def compare_optimizers(host, trainer, path):
    """Refuses optimizers of other classes, whose slots of one name may mean something else; warns of other options.

    Also warns of a learning rate or a schedule that was given otherwise.
    """
    before, now = host["optimizers"], describe_optimizers(trainer)
    if [kind for kind, _ in before] != [kind for kind, _ in now]:
        raise ValueError(
            f"The checkpoint {path} was made with {[kind for kind, _ in before]}, this trainer has "
            f"{[kind for kind, _ in now]}. Use the same optimizer, or another workdir and `warm_start` for the weights."
        )
    for (kind, old), (_, new) in zip(before, now, strict=True):
        changed = [f"{name}: {old.get(name)} → {new[name]}" for name in new if old.get(name) != new[name]]
        if changed:
            logging.warning("The options of %s differ from the checkpoint's: %s. The new ones apply.", kind, changed)
    for old, new in zip(host["given_learning_rates"], trainer.given_learning_rates, strict=True):
        if isinstance(old, str) and isinstance(new, str) and old != new:
            logging.warning("The learning-rate schedule changed: %s → %s. The new one applies from now on.", old, new)
        elif old != new and isinstance(old, float) and isinstance(new, float):
            logging.warning(
                "The learning rate was given as %g when the checkpoint was made, and as %g now; keeping the "
                "checkpoint's value. To change it, set `trainer.optimizer.learning_rate` in a callback's "
                "`on_train_begin`.",
                old,
                new,
            )


def settle_weights(trainer):
    """Names the loss weights for which the checkpoint has another value than the program gives.

    Those of the constructor keep the checkpoint's value, which a callback may have set. Nothing but the program sets
    those of `minimize`: the new ones apply.
    """
    for minimizer in trainer.minimizers.values():
        weights = minimizer.weights
        replaced = {} if weights is trainer.loss_weights else weights.replaced()
        for name, (given, restored) in replaced.items():
            weights[name] = given
            logging.warning(
                "The weight of loss %r in minimize(name=%r) was %g when the checkpoint was made, and is %g now. The "
                "new one applies.",
                *(name, minimizer.name, restored, given),
            )
    for name, (given, restored) in trainer.loss_weights.replaced().items():
        logging.warning(
            "The weight of loss %r was given as %g; keeping the checkpoint's value, %g. Set "
            "`trainer.loss_weights[%r]` in a callback's `on_train_begin` to change it.",
            *(name, given, restored, name),
        )
