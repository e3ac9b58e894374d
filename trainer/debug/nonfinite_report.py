"""Explains a non-finite update: re-runs it eagerly and checks every operation.

Nothing of an update that is not finite was written, so weights, statistics and dropout seeds are still those that it
began with, and the same micro-batches give the same numbers again. `tf.debugging.enable_check_numerics` would stop at
the first infinity, also where the model masks it; here each bad value is followed to the losses and gradients, and
only the operation that theirs began with is named.
"""

import os

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_callbacks  # what TensorFlow's own numerics checks are made of

from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.checkpoints import trainer_state
from looptape.trainer.debug import dry_run
from looptape.trainer.debug.layer_calls import LayerCalls
from looptape.trainer.step.forward.forward_state import ForwardScope
from looptape.trainer.variables import path_of, raw

# Examples that are run one by one, where a loss or a gradient has no value of its own for each.
_SINGLE_RUNS = 64


def examine(trainer, source, parts, workdir=None):
    """Explains a non-finite update in a few lines. With `workdir`, keeps batch, state and report there."""
    step = trainer.counters.step - 1
    kept = None if workdir is None else os.path.join(workdir, f"nonfinite-{step:010d}")
    if kept is not None and not trainer.workers.is_chief:
        kept = None
    if kept is not None:
        _keep(trainer, source, parts, kept, step)
    try:
        with dry_run.undone(trainer):
            lines = [line for index, part in enumerate(parts) for line in _examine_part(trainer, part, index, parts)]
    except Exception as error:  # a model that does not run eagerly: its error must not hide the one to explain
        lines = [f"The update could not be run eagerly to look into it ({type(error).__name__}: {error})."]
    lines = lines or ["Run eagerly, the same update is finite: it depends on XLA, on several devices, or on chance."]
    report = "\n".join(f"  {line}" for line in lines)
    if kept is not None:
        try:
            with open(os.path.join(kept, "report.txt"), "w") as file:
                file.write(report + "\n")
        except OSError:
            kept = None
    return report if kept is None else f"{report}\n  The batch and the state are kept in {kept}."


def _keep(trainer, source, parts, directory, step):
    arrays = {
        f"{index}:{position}": np.asarray(leaf)
        for index, part in enumerate(parts)
        for position, leaf in enumerate(tf.nest.flatten(part))
        if isinstance(leaf, tf.Tensor)
    }
    state = {name: item for name, item in trainer_state.tracked_state(trainer, source).items() if name != "iterator"}
    trainer.whole_copies.take()
    checkpoints.Store(directory).save(step, state, {"position": source.position}, arrays, urgent=True)


def _examine_part(trainer, part, index, parts):
    place = f"micro-batch {index} of {len(parts)}: " if len(parts) > 1 else ""
    lines = [place + line for line in _bad_variables(trainer) + _bad_inputs(part)]
    with LayerCalls() as layers, _Detective(layers) as detective:
        losses = named_losses(trainer, part)
        lines += [place + line for line in _bad_losses(losses, detective)]
        if not lines or not any("loss/" in line for line in lines):
            lines += [place + line for line in _bad_gradients(trainer, part, detective)]
    return lines


def _bad_variables(trainer):
    bad = [v for v in trainer.model.variables if not _finite(raw(v))]
    return [f"the variable {getattr(v, 'path', v.name)} is not finite itself" for v in bad]


def _bad_inputs(part):
    """Which of the data are not finite, and where."""
    return [
        f"the data themselves are not finite: {name} at {where(value.numpy())}"
        for name, value in _named(part)
        if isinstance(value, tf.Tensor) and not _finite(value)
    ]


def _named(part, name="batch"):
    """(name, leaf) of every tensor in a batch, e.g. `batch[0]` or `batch['x']`."""
    if isinstance(part, dict):
        pairs = [(f"{name}[{key!r}]", value) for key, value in part.items()]
    elif isinstance(part, tuple | list):
        pairs = [(f"{name}[{index}]", value) for index, value in enumerate(part)]
    else:
        return [(name, part)]
    return [leaf for key, value in pairs for leaf in _named(value, key)]


def where(array):
    """The examples and time steps of an array [batch, …] at which something is not finite, in words."""
    bad = ~np.isfinite(array)
    if not array.ndim:
        return "every example"
    examples = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
    words = f"example{'s' if len(examples) > 1 else ''} {_some(examples)}"
    if array.ndim >= 2 and array.shape[1] > 1:
        index = np.flatnonzero(np.moveaxis(bad, 1, 0).reshape(bad.shape[1], -1).any(axis=1))
        axis = "time step" if array.ndim >= 3 else "position"
        words += f", {axis}{'s' if len(index) > 1 else ''} {_some(index)}"
    return words


def _some(numbers, most=10):
    shown = ", ".join(str(int(n)) for n in numbers[:most])
    return shown + (f", … ({len(numbers)} in all)" if len(numbers) > most else "")


def named_losses(trainer, part, compute_losses=None):
    """{name: values as the hook returned them} of a micro-batch, in training mode and with the present state.

    `compute_losses` is the trainer's hook unless given.
    """
    compute_losses = compute_losses or trainer.hook("compute_losses")
    regularized = [v for v in trainer.trainable_variables if getattr(v, "regularizer", None) is not None]
    mapped = [*regularized, *trainer.forward_state.variables()]
    scope = ForwardScope(mapped, [trainer.read(variable) for variable in mapped])
    with scope, trainer.collecting_logs():
        found = dict(compute_losses(part, True))
        extra = list(getattr(trainer.model, "losses", ()))
    if extra:
        found["regularization"] = tf.add_n([tf.cast(tf.reduce_sum(loss), tf.float32) for loss in extra])
    return {name: tf.convert_to_tensor(loss[0] if isinstance(loss, tuple) else loss) for name, loss in found.items()}


def _bad_losses(losses, detective):
    lines = []
    for name, loss in losses.items():
        if _finite(loss):
            continue
        at = f" at {_loss_place(loss.numpy())}" if loss.shape.rank else ""
        lines.append(f"loss/{name} is not finite{at}{detective.origin(loss)}")
    return lines


def _loss_place(values):
    """As `where`; a loss [batch, time] has a value per time step."""
    return where(values[:, :, None] if values.ndim == 2 else values)


def _bad_gradients(trainer, part, detective):
    """The first gradients that are not finite, and the examples that make them so."""
    minimizer = next(iter(trainer.minimizers.values()))
    bad = _gradients(trainer, minimizer, part)
    if not bad:
        return []
    name, gradient = bad[0]
    lines = [f"every loss is finite, but not the gradient of {name}{detective.origin(gradient)}"]
    if len(bad) > 1:
        lines.append(f"{len(bad)} gradients in all: {', '.join(name for name, _ in bad[:6])}")
    examples = _guilty_examples(trainer, minimizer, part)
    if examples:
        lines.append(f"it is not finite for example{'s' if len(examples) > 1 else ''} {_some(examples)}")
    return lines


def _gradients(trainer, minimizer, part):
    """[(path, gradient)] of a micro-batch that are not finite."""
    result = minimizer.run_micro(part, trainer.read_state(), trainer.step.value(), trainer.loss_scale.value())
    variables = minimizer.trained
    found = []
    for group in result.gradients:
        for variable, gradient in zip(variables, group, strict=True):
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            if values is not None and not _finite(values):
                found.append((path_of(variable), values))
    return found


def _guilty_examples(trainer, minimizer, part):
    leaves = [leaf for leaf in tf.nest.flatten(part) if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
    count = min(int(leaves[0].shape[0]), _SINGLE_RUNS) if leaves else 0
    guilty = []
    for index in range(count):
        single = tf.nest.map_structure(lambda x, i=index: x[i : i + 1] if x.shape.rank else x, part)
        try:
            if _gradients(trainer, minimizer, single):
                guilty.append(index)
        except (tf.errors.OpError, ValueError):
            return []  # a model for one batch size only (a stateful layer)
    return guilty


def _finite(tensor):
    tensor = tf.convert_to_tensor(tensor)
    return not tensor.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(tensor)))


class _Detective:
    """A context that checks every eager operation and finds the one that produced a bad value."""

    def __init__(self, layers):
        self._layers = layers
        self._origins = {}  # {id: words about the operation that the bad values of this tensor began with}
        self._places = {}  # {id: (layer, time step) in which a tensor was made}
        self._busy = False

    def __enter__(self):
        op_callbacks.add_op_callback(self._look)
        return self

    def __exit__(self, *_):
        op_callbacks.remove_op_callback(self._look)

    def origin(self, tensor):
        """Where the bad values of a tensor began, as the end of a sentence."""
        words = self._origins.get(_identity(tensor))
        return f": it began {words}" if words else ""

    def _look(self, kind, inputs, attributes, outputs, op_name=None, graph=None):
        if self._busy or graph is not None:
            return None
        self._busy = True
        try:
            self._trace(str(kind.decode() if isinstance(kind, bytes) else kind), inputs, outputs)
        finally:
            self._busy = False
        return None

    def _trace(self, kind, inputs, outputs):
        place = self._layers.place()
        for output in outputs:
            if not isinstance(output, tf.Tensor) or not output.dtype.is_floating:
                continue
            if place is not None:
                self._places[_identity(output)] = place
            if _array_is_finite(output):
                continue
            known = [self._origins[_identity(i)] for i in inputs if _identity(i) in self._origins]
            if known:
                self._origins[_identity(output)] = known[0]
                continue
            came_in = any(isinstance(i, tf.Tensor) and not _array_is_finite(i) for i in inputs)
            words = "with values that came in, first used by" if came_in else "in the operation"
            self._origins[_identity(output)] = f"{words} {kind}{self._where(inputs, place)}"

    def _where(self, inputs, place):
        """Of an operation: its layer, and its time step in a loop. Backward passes are known by what they read."""
        backward = place is None
        places = [self._places[_identity(i)] for i in inputs if _identity(i) in self._places] if backward else [place]
        if not places:
            return ""
        layer, time_step = places[0]
        at = "" if time_step is None else f", time step {time_step}"
        return f" of {'the backward pass of ' if backward else ''}layer {layer}{at}"


def _identity(tensor):
    # TensorFlow's own number of an eager tensor is never used twice, unlike Python's.
    return getattr(tensor, "_id", None) or id(tensor)


def _array_is_finite(tensor):
    if not tensor.dtype.is_floating:
        return True
    array = tensor.numpy()
    return bool(np.isfinite(array.astype(np.float32) if array.dtype not in (np.float32, np.float64) else array).all())
