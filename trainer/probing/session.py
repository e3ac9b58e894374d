"""`ProbeSession`: while it is active, loops report the gradient of every time step.

session = ProbeSession(model)
with tf.GradientTape() as tape:
    with session:
        outputs = model(x, training=True)
    loss = ...
gradients = tape.gradient(loss, variables + session.sources)
report = session.report(gradients[len(variables):], examples)
"""

import contextlib

import tensorflow as tf

from looptape.trainer.probing import errors, probe_calls, quantities, reading, report, taps
from looptape.trainer.probing.records import LoopRecord
from looptape.trainer.probing.stepped_record import StepRecord
from looptape.trainer.recurrent import active, internals
from looptape.trainer.recurrent.core import run_probed
from looptape.trainer.recurrent.layers import describe_cells, find_layers, layout_of, run_by, select_layers
from looptape.trainer.recurrent.loops.recurrent_loop import is_stepped


class ProbeSession:
    """Probes every recurrent Keras layer found in `layers`, and every `probe` call, from entering to leaving
    it.

    The forward values, the training gradients and all that the layers move are the same bits as without it
    (1e-6 with XLA). One session for each trace; entered once.

    Args:
        layers: a model, a layer or a list of them. Every `keras.layers.RNN` inside is probed.
        weights: True for the norms of the weights' gradients, "full" to keep the gradients themselves (time ×
            the size of the weights), False for none.
        inputs: report the gradients of the layers' inputs. For a layer on raw data, whose update does without
            them, they are what probing costs most for.
        full: keep λ_t itself, as `state_gradient/<state>`.
        per_example: norms per example also for `probe` in graph loops, where they cost. Keras layers always
            have them.
        capacity: {name: number of time steps, or a tuple in nested loops} for `probe` in graph loops.
        batch: number of examples of this batch, a scalar tensor; only needed for `per_example` or `full` in
            graph loops over tensors whose batch size is unknown.
        tape: the tape to use, if it watches nothing by itself (`watch_accessed_variables=False`).
        only: names or patterns of the layers to probe; None for all that are found.
    """

    def __init__(
        self,
        layers=(),
        *,
        weights=True,
        inputs=True,
        full=False,
        per_example=False,
        capacity=None,
        batch=None,
        tape=None,
        only=None,
    ):
        if weights not in (True, False, "full"):
            raise ValueError(f"`weights` is {weights!r}; it must be True, False or 'full'.")
        self._weights = {True: "norms", False: None, "full": "full"}[weights]
        self._inputs, self._full, self._per_example, self._batch = inputs, full, per_example, batch
        self._capacity = dict(capacity or {})
        self._tape = tape
        self._layers = select_layers(find_layers(layers), only)
        for name, layer in self._layers.items():
            errors.check_layer(layer, name)
        self._names = {id(layer): name for name, layer in self._layers.items()}
        self._reached = {}  # id(layer) -> number of calls
        self._loops, self._probes = {}, {}
        self._stack = self._watcher = self._graph = self._root = self._start = None

    def __enter__(self):
        if self._root is not None:
            raise RuntimeError("A `ProbeSession` can be entered once. Make a new one for each trace.")
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._start = 0 if self._graph is None else len(self._graph.get_operations())
        self._root = self._make_root()
        with contextlib.ExitStack() as stack:
            stack.enter_context(active.activated(self))
            stack.enter_context(run_by(self, self._layers.values()))
            self._watcher = stack.enter_context(internals.watch_variables())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._stack.__exit__(*exception)
        if exception[0] is None:
            read = {id(variable) for variable in self._watcher.watched_variables()}
            errors.check_reached(self._layers, self._reached, read)
            errors.check_silent(self._graph, self._start)
            errors.check_differentiable(self._graph, self._probes.values())

    def _make_root(self):
        if self._tape is None:
            return tf.identity(taps.watched_zero())
        root = tf.zeros([])
        self._tape.watch(root)
        return root

    # Called from inside the forward pass.

    def probes(self, layer):
        """Whether a layer that is called now is to be probed."""
        return id(layer) in self._names and not active.is_discovering()

    def run_layer(self, call):
        """Runs a recurrent layer and probes it; see `layers.run_by`."""
        layer = call.layer
        if not self.probes(layer):
            return None
        return run_probed(call, self.open_layer(layer))

    def open_layer(self, layer):
        """A `LoopRecord` for one call of a Keras layer."""
        self._reached[id(layer)] = count = self._reached.get(id(layer), 0) + 1
        name = self._names[id(layer)]
        errors.refuse_loop(f"The layer {name!r}", errors.check_place(f"The layer {name!r}", self._graph))
        return self._add_loop(
            name if count == 1 else f"{name}_call_{count}",
            layout_of(layer),
            variables=getattr(layer.cell, "trainable_variables", ()),
            cells=describe_cells(layer.cell),
            stateful=active.carries(layer),
        )

    def open_loop(self, name, layout):
        """A `LoopRecord` for one run of a `recurrent_loop`."""
        errors.refuse_loop(f"The loop {name!r}", errors.check_place(f"The loop {name!r}", self._graph))
        return self._add_loop(self.free_name(name), layout)

    def _add_loop(self, name, layout, **options):
        kind = StepRecord if is_stepped(layout) else LoopRecord
        options |= {"weights": self._weights, "inputs": self._inputs}
        self._loops[name] = record = kind(self, self._root, name, layout, **options)
        return record

    def free_name(self, name):
        """`name`, or with the number of the call behind it if that is taken."""
        taken, count, candidate = {*self.layers, *self._loops}, 1, name
        while candidate in taken:
            count += 1
            candidate = f"{name}_call_{count}"
        return candidate

    def probe(self, name, tensor, t, batched):
        """Implements `probe` while this session is active. `t` is a tuple."""
        kinds = errors.check_place(f"`probe({name!r}, ...)`", self._graph)
        record = self._open_probe(name, t, batched)
        known = tuple(_known(index) for index in t)
        if not kinds and None not in known:
            return record.tap_once(tensor, known, self._root)
        self._make_tables(record, tensor)
        return record.tap_row(tensor, t)

    def prepare(self, name, tensor, t, batched):
        """Makes the tables of a `probe` met in a trial run: inside the loop that follows, tapes may be blind."""
        errors.check_place(f"`probe({name!r}, ...)`", self._graph)
        self._make_tables(self._open_probe(name, t, batched), tensor)

    def _open_probe(self, name, t, batched):
        if name not in self._probes:
            if self.free_name(name) != name:
                raise ValueError(f"`probe({name!r}, ...)` has the name of a probed layer. Give it another name.")
            self._probes[name] = probe_calls.ProbeRecord(name, batched, len(t), self._capacity_of(name, len(t)))
        self._probes[name].check(batched, len(t))
        return self._probes[name]

    def _make_tables(self, record, tensor):
        with self._graph.as_default():
            record.make_tables(tensor, self._root, self._per_example, self._full, self._batch)

    def _capacity_of(self, name, depth):
        capacity = self._capacity.get(name, probe_calls.DEFAULT_CAPACITY.get(depth, 8))
        return tuple(capacity) if isinstance(capacity, (tuple, list)) else (capacity,) * depth

    # After the forward pass.

    @property
    def sources(self):
        """Tensors to differentiate with respect to, beside the variables. Their gradients go to the methods
        below.
        """
        return [source for record in self._records() for source in _sources_of(record).values()]

    @property
    def layers(self):
        """Names of what will be reported, known after the forward pass."""
        names = []
        for record in self._loops.values():
            inner = [group.name for group in record.groups]
            labels = [label for label, _ in record.probes.values()]
            names += [record.name, *(inner if len(inner) > 1 else ()), *labels]
        return names + list(self._probes)

    @property
    def shapes(self):
        """{name: shape} that the vectors of `probe` calls are flattened from; it may exceed what was
        visited.
        """
        return {name: record.shape for name, record in self._probes.items()}

    @property
    def backward(self):
        """Names of the layers that read their sequence from its end. They report in input time all the same."""
        found = set()
        for record in self._loops.values():
            if record.layout.go_backwards:
                labels = [label for label, _ in record.probes.values()]
                found |= {record.name, *(group.name for group in record.groups), *labels}
        return found

    @property
    def cells(self):
        """{name: class of the cell} of the layers that were called, for advice."""
        named = {name: type(getattr(layer, "cell", layer)).__name__ for name, layer in self._layers.items()}
        return {name: named[name.split("_call_")[0]] for name in self._loops if name.split("_call_")[0] in named}

    def report(self, gradients, examples=1.0, scale=1.0):
        """Per-example values, `{layer: {quantity: tensor}}`; see `trainer.probing.report`. Eager or traced.

        Args:
            gradients: of `sources`, in that order. From a persistent tape it can be those of each loss in
                turn.
            examples: number of examples in the whole update; norms per example are multiplied by it.
            scale: what the gradients are too large by, such as a loss scale.
        """
        factor = tf.cast(examples, tf.float32) / scale
        found = {}
        for record, own in self._split(gradients):
            if isinstance(record, LoopRecord):
                found |= reading.read_loop(record, own, factor, scale, self._full)
            else:
                found[record.name] = reading.read_probe(record, own, factor, scale, self._full)
        return found

    def totals(self, gradients, examples=1.0, scale=1.0):
        """Sums over the examples, to be added over micro-batches and replicas; see
        `trainer.probing.report`.
        """
        factor = tf.cast(examples, tf.float32) / scale
        found = {}
        for record, own in self._split(gradients):
            if isinstance(record, LoopRecord):
                found |= report.totals(reading.read_loop(record, own, factor, scale, False))
            else:
                found[record.name] = reading.read_table(record, own, factor, scale)
        return found

    def products(self, gradients):
        """{layer: [losses, losses, time]}: inner products of the losses' state gradients, for
        `trainer.probing.quantities`.

        They add up over micro-batches and replicas. `probe` in graph loops has them with `full=True` only.

        Args:
            gradients: a list, for each loss the gradients of `sources`, from a persistent tape.
        """
        found = {}
        for parts in zip(*[self._split(own) for own in gradients], strict=True):
            record, own = parts[0][0], [gradient for _, gradient in parts]
            if isinstance(record, LoopRecord):
                found |= quantities.loop_products(record, own)
            else:
                whole = [reading.whole_gradient(record, gradient) for gradient in own]
                if record.batched and any(gradient is not None for gradient in whole):
                    found[record.name] = quantities.tensor_products(whole)
        return found

    def sum_check(self, gradients, variables, variable_gradients):
        """{variable path: ‖Σ_t G_t − dL/dW‖ / ‖dL/dW‖}: whether the time steps account for the whole
        gradient.

        Needs `weights="full"`. Around 1e-6 in float32; larger if a weight is used outside the loops as well,
        for example by a regularizer.

        Args:
            gradients: of `sources`.
            variables, variable_gradients: Keras variables and their gradients from the same backward pass.
        """
        if self._weights != "full":
            raise ValueError("The sum check needs all of G_t. Use `ProbeSession(..., weights='full')`.")
        found = [(record, own) for record, own in self._split(gradients) if isinstance(record, LoopRecord)]
        return reading.check_sums(found, variables, variable_gradients)

    def _records(self):
        return [*self._loops.values(), *self._probes.values()]

    def _split(self, gradients):
        gradients = list(gradients)
        if len(gradients) != len(self.sources):
            raise ValueError(f"`gradients` has {len(gradients)} entries; `sources` has {len(self.sources)}.")
        for record in self._records():
            keys = list(_sources_of(record))
            own, gradients = gradients[: len(keys)], gradients[len(keys) :]
            yield record, dict(zip(keys, own, strict=True))


def _sources_of(record):
    return record.sources if isinstance(record, LoopRecord) else {**record.visits, **record.sources}


def _known(index):
    """A time index as a Python integer, or None if only the graph knows it."""
    value = tf.get_static_value(index) if tf.is_tensor(index) else index
    return None if value is None else int(value)
