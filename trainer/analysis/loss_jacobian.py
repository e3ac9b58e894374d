"""The loss Jacobian: the gradient of the loss of every time step, in chunks that fit into a memory limit.

A chunk of C time steps is one call of a traced function: a forward pass, then one backward pass for all C adjoints. The
tape differentiates the parts of the model around recurrent layers, vectorised over the chunk; the layers themselves are
differentiated by `looptape.trainer.analysis.adjoints`.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from looptape.trainer.analysis import adjoints, memory
from looptape.trainer.analysis.recorder import Recorder
from looptape.trainer.analysis.time_losses import StepLosses
from looptape.trainer.step.gradients import missing_gradients
from looptape.trainer.variables import path_of, raw, traced

# A cell that deviates by more than this when time steps are put together does not treat them alike.
_FOLD_TOLERANCE = 1e-4


class Request(NamedTuple):
    """The targets of the backward passes."""

    variables: Any  # trainable variables to compute gradients for
    norms: bool = False  # credit: norms of the states' adjoints
    input_norms: bool = False
    window: Any = None  # truncate the way back, see `adjoints.Loop.back`


class Passes:
    """Runs chunks of time steps of one batch through a trainer's model.

    Args:
        owner: the trainer.
        batch: a batch of the dataset; arrays are converted.
        request: the quantities to compute.
        reduce: traced function of the [C, *shape] gradients of each variable; returns what to keep of them.

    Attributes: `length`, the number of time steps; `losses`, [time]; `valid`, {layer: [time]}, whether any example is
    valid; `left_out`, layers that the tape differentiates; `needs`, the memory needed.
    """

    def __init__(self, owner, batch, request, reduce=None):
        self._owner, self._request = owner, request
        self._reduce = reduce or (lambda rows: rows)
        self._batch = owner.take_batch(batch)
        self._left_out = set()
        self._function = traced(self._chunk)
        self.needs = self._plan()

    def _plan(self):
        """Traces a forward pass to find the number of time steps, the recordable layers and the memory needed."""
        noted = {}

        def forward(batch):
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
                losses, loops, skipped = self._forward(batch, tape)
            noted.update(length=losses.length(loops), loops=loops, skipped=skipped)
            errors = [loop.fold_error() for loop in loops]
            return losses.total(noted["length"]), errors, [loop.valid_times() for loop in loops]

        while True:
            function = traced(forward).get_concrete_function(self._batch)
            self.losses, errors, valid = function(*tf.nest.flatten(self._batch, expand_composites=True))
            strange = {
                loop.label
                for loop, error in zip(noted["loops"], errors, strict=True)
                if not float(error) <= _FOLD_TOLERANCE
            }
            if not strange or not np.all(np.isfinite(self.losses)):
                break
            self._left_out |= strange
        self.length, self.left_out = noted["length"], self._left_out | noted["skipped"]
        self.valid = {loop.name: own.numpy() for loop, own in zip(noted["loops"], valid, strict=True)}
        return memory.estimate(function.graph, noted["loops"], self._request)

    def _forward(self, batch, tape):
        tape.watch([raw(variable) for variable in self._owner.trainable_variables])
        recorder = Recorder(self._owner.model, tape, self._left_out)
        with recorder:
            losses = StepLosses(self._owner).run(batch)
        return losses, recorder.loops, recorder.skipped

    def run(self, time_steps, size):
        """Yields (first, last, result of `_chunk`) in NumPy for each chunk of at most `size` time steps."""
        time_steps = np.asarray(time_steps, np.int32)
        for first in range(0, len(time_steps), size):
            own = time_steps[first : first + size]
            # The last chunk is filled up: a second trace would cost more than it saves.
            padded = np.pad(own, [0, min(size, len(time_steps)) - len(own)], mode="edge")
            found = self._function(self._batch, tf.one_hot(padded, self.length, dtype=self.losses.dtype))
            count = len(own)
            yield first, first + count, tf.nest.map_structure(lambda x, count=count: x.numpy()[:count], found)

    def whole(self):
        """Returns the result of `_chunk` for the loss of the whole batch, without the time axis."""
        found = self._function(self._batch, tf.ones([1, self.length], self.losses.dtype))
        return tf.nest.map_structure(lambda x: x.numpy()[0], found)

    def _chunk(self, batch, seeds):
        """Returns ({position of variable: rows}, {layer: norms}, {layer: norms of inputs}) for seeds [C, time]."""
        request = self._request
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            losses, loops, _ = self._forward(batch, tape)
            total = losses.total(self.length)
        ledger = _Ledger(tape, [raw(variable) for variable in request.variables], loops)
        ledger.pass_on([total], [seeds], len(loops))
        states, inputs = {}, {}
        for index in reversed(range(len(loops))):
            found = self._loop_back(ledger, loops[index], index, seeds.shape[0])
            if found is not None and request.norms:
                states[loops[index].name] = found.state_norms * tf.cast(losses.examples, tf.float64)
            if found is not None and request.input_norms:
                inputs[loops[index].name] = found.input_norms * tf.cast(losses.examples, tf.float64)
        self._check_reached(ledger, batch)
        rows = []
        for variable in map(raw, request.variables):
            own = ledger.of(variable)
            zeros = lambda v=variable: tf.zeros([seeds.shape[0], *v.shape], v.dtype)  # noqa: E731
            rows.append(self._reduce(zeros() if own is None else own))
        return rows, states, inputs

    def _loop_back(self, ledger, loop, index, count):
        arriving, final = ledger.of(loop.outputs), [ledger.of(state) for state in loop.final]
        if arriving is None and all(gradient is None for gradient in final):
            return None
        if arriving is None:
            arriving = tf.zeros([count, *loop.outputs.shape], loop.outputs.dtype)
        wanted = {id(raw(variable)): k for k, variable in enumerate(loop.variables)}
        chosen = [wanted[id(raw(v))] for v in self._request.variables if id(raw(v)) in wanted]
        below = ledger.is_connected([loop.inputs, *loop.initial], index)
        found = loop.back(
            arriving,
            final,
            inputs=below,
            weights=chosen,
            norms=self._request.norms,
            input_norms=self._request.input_norms,
            window=self._request.window,
        )
        for k, rows in zip(chosen, found.weights, strict=True):
            ledger.add(raw(loop.variables[k]), rows)
        if below:
            ledger.pass_on([loop.inputs, *loop.initial], [found.inputs, *found.initial], index)
        return found

    def _check_reached(self, ledger, batch):
        dead = [variable for variable in self._request.variables if ledger.of(raw(variable)) is None]
        if dead and self._owner.on_none_gradient == "error":
            again = lambda: StepLosses(self._owner).run(batch).terms  # noqa: E731
            raise RuntimeError(missing_gradients.explain(dead, again, "error"))


class _Ledger:
    """Collects the adjoints [C, ...] of each source."""

    def __init__(self, tape, variables, loops):
        self._tape, self._variables, self._loops = tape, variables, loops
        self._sums = {}

    def of(self, source):
        return self._sums.get(id(source))

    def add(self, source, rows):
        present = self._sums.get(id(source))
        self._sums[id(source)] = rows if present is None else present + rows

    def pass_on(self, targets, seeds, index):
        """Propagates the adjoints of targets to the variables and to the loops before number `index`."""
        sources = self._sources(index)
        if not sources:
            return
        found = adjoints.vector_jacobian(self._tape, targets, sources, seeds)
        for source, rows in zip(sources, found, strict=True):
            if rows is not None:
                self.add(source, rows)

    def is_connected(self, targets, index):
        """Returns whether the targets depend on any source. The operations it creates are unused and pruned."""
        sources = self._sources(index)
        return bool(sources) and any(found is not None for found in self._tape.gradient(targets, sources))

    def _sources(self, index):
        below = [source for loop in self._loops[:index] for source in (loop.outputs, *loop.final)]
        return self._variables + below


def loss_jacobian(owner, batch, variables, time_steps, norms_only, memory_limit_bytes):
    """{variable path: array}; see `Trainer.loss_jacobian`."""
    chosen = choose_variables(owner, batch, variables)
    passes = Passes(owner, batch, Request(list(chosen.values())), row_norms if norms_only else None)
    steps = choose_time_steps(time_steps, passes.length)
    shapes = [() if norms_only else tuple(variable.shape) for variable in chosen.values()]
    dtypes = [np.float32 if norms_only else raw(variable).dtype.as_numpy_dtype for variable in chosen.values()]
    result_bytes = sum(len(steps) * int(np.prod(s)) * np.dtype(d).itemsize for s, d in zip(shapes, dtypes, strict=True))
    size = memory.chunk_size(passes.needs, len(steps), result_bytes, memory_limit_bytes)
    pairs = zip(chosen, shapes, dtypes, strict=True)
    result = {path: np.empty([len(steps), *shape], dtype) for path, shape, dtype in pairs}
    for first, last, (rows, _, _) in passes.run(steps, size):
        for array, own in zip(result.values(), rows, strict=True):
            array[first:last] = own
    return result


def row_norms(rows):
    """Returns [C] norms of [C, ...], with squares in float64: those of a vanished gradient underflow float32."""
    squares = tf.square(tf.cast(rows, tf.float64))
    return tf.cast(tf.sqrt(tf.reduce_sum(squares, axis=list(range(1, rows.shape.rank)))), tf.float32)


def choose_variables(owner, batch, wanted):
    """Returns {path: variable}: all trainable variables, or those requested by path or as objects."""
    owner.take_batch(batch)
    known = {}
    for variable in owner.trainable_variables:
        path, count = path_of(variable), 2
        while path in known:
            path, count = f"{path_of(variable)}_{count}", count + 1
        known[path] = variable
    if not known:
        raise ValueError(
            "The model has no trainable variables, so there is nothing to differentiate with respect to. "
            "Set `trainable = True` on its layers."
        )
    if wanted is None:
        return known
    chosen = {}
    for item in [wanted] if isinstance(wanted, str) or hasattr(wanted, "shape") else wanted:
        matches = [p for p, v in known.items() if v is item or raw(v) is item or (isinstance(item, str) and p == item)]
        if not matches:
            shown = item if isinstance(item, str) else path_of(item) if hasattr(item, "name") else item
            raise ValueError(
                f"`variables` asks for {shown!r}, which is not a trainable variable of the model; those are "
                f"{list(known)}. Give paths of these, or the variables themselves."
            )
        chosen[matches[0]] = known[matches[0]]
    if not chosen:
        raise ValueError("`variables` is empty; at least one is needed. Leave it out for all of them.")
    return chosen


def choose_time_steps(wanted, length):
    """Returns a list of time steps, by default all. Negative ones count from the end."""
    if wanted is None:
        return list(range(length))
    steps = [int(t) for t in np.atleast_1d(np.asarray(wanted)).ravel()]
    wrong = [t for t in steps if not -length <= t < length]
    if wrong or not steps:
        raise ValueError(
            f"`time_steps` is {wanted!r}; there are {length} time steps, so they must lie between 0 and {length - 1} "
            f"(or count from the end), and there must be at least one. Leave it out for all of them."
        )
    return [t % length for t in steps]
