"""`RecurrentCore`: which recurrent layers of a model run on Looptape's own loops, and how.

`choose` is the one place that decides.
"""

import contextlib
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from looptape.trainer.recurrent import active, internals
from looptape.trainer.recurrent.hoisted import standard
from looptape.trainer.recurrent.hoisted.compilation import CompiledShapes
from looptape.trainer.recurrent.layers import find_layers, layout_of, run_by
from looptape.trainer.recurrent.loops.cells import run_cell
from looptape.trainer.recurrent.loops.memory import check_memory
from looptape.trainer.recurrent.loops.recurrent_loop import Options

LOOPS = ("auto", "adjoint", "keras")


def check_loops(value):
    """`value` if it names a way to run recurrent layers, else an error."""
    if value not in LOOPS:
        raise ValueError(
            f"`recurrent` is {value!r}; it must be one of {list(LOOPS)}. Use 'auto' to let Looptape choose, "
            "'keras' for Keras's own loops."
        )
    return value


class Choice(NamedTuple):
    """How a layer runs."""

    way: str  # "hoisted", "adjoint" or "keras"
    reason: str | None = None  # why "keras"


def choose(layer, loops, act, memory, anew=None):
    """The `Choice` for a layer, as far as it is known before the layer is called.

    Args:
        layer: a `keras.layers.RNN`.
        loops: see `RecurrentCore`.
        act, memory: an action on its gradient and a bound on its memory, or None. Keras's loop has neither.
        anew: sequences that begin inside its input, or None; only `AdjointLoop` knows them.
    """
    asked = act is not None or memory is not None or anew is not None
    own_loop = getattr(layer, "runs_recurrent_loop", False)
    if type(layer).inner_loop not in internals.KNOWN_LOOPS and not own_loop:
        return Choice("keras", f"{type(layer).__name__} has an `inner_loop` of its own")
    if getattr(layer, "use_cudnn", None) is True:
        return Choice("keras", "use_cudnn=True")
    if loops == "keras" and not asked:
        return Choice("keras", "recurrent='keras'")
    if layer.unroll and not asked:
        return Choice("keras", "unroll=True")
    if loops == "auto" and not asked and hasattr(layer, "use_cudnn") and tf.config.list_logical_devices("GPU"):
        return Choice("keras", "cuDNN is used on a GPU")
    if loops == "auto" and anew is None and standard.applies(layer) is None:
        return Choice("hoisted")
    return Choice("adjoint")


class RecurrentCore:
    """Runs the recurrent layers of a model in training.

    Args:
        model: whose layers. They may be made later.
        loops: "auto": standard LSTM, GRU and SimpleRNN layers in the hoisted form, other cells on `AdjointLoop`, unless
            Keras's is faster (cuDNN on a GPU, unrolled loops); "adjoint": all on `AdjointLoop`, whose results have the
            bits of Keras's; "keras": on Keras's.
        memory: bound on the states that are kept, see `memory.check_memory`.
        act_of: function of a layer's name that gives its action on λ_t (`AdjointLoop`'s `act`), or None.
        moment_of: function that gives `(name, t) -> Moment` for actions of `probe`, or None.
        is_named: function of a layer's name: whether an action is for that very layer.

    Attributes: `reasons`, {layer: why it runs on Keras's loop}, and `ran`, names of the layers and loops that an update
    came to. Both grow while an update is traced.
    """

    def __init__(self, model, *, loops="auto", memory=None, act_of=None, moment_of=None, is_named=None):
        self._model = model
        self._loops = check_loops(loops)
        self._memory = check_memory(memory, "recurrent_memory")
        self._act_of = act_of or (lambda name: None)
        self.moment_of = moment_of
        self._is_named = is_named or (lambda name: False)
        self.reasons: dict = {}
        self.ran: set = set()
        self._shapes: dict = {}  # layer -> `CompiledShapes`

    @contextlib.contextmanager
    def running(self):
        """Runs the layers while this lasts. Enter it below the tape that will be asked, in the same graph."""
        layers = find_layers(self._model) if isinstance(self._model, keras.Layer) else {}
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        with run_by(_Entry(self, layers, graph), layers.values()):
            yield

    def describe(self):
        """{layer: None, or why it runs on Keras's loop}, as far as it is known by now."""
        layers = find_layers(self._model) if isinstance(self._model, keras.Layer) else {}
        return {name: self.reasons.get(name) or self.choice(name, layer).reason for name, layer in layers.items()}

    def choice(self, name, layer, anew=None):
        """The `Choice` for a layer; an error if it cannot do what it is asked for."""
        found = choose(layer, self._loops, self._act_of(name), self._memory, anew)
        if found.way == "keras":
            self.refuse(name, found.reason)
        return found

    def refuse(self, name, reason):
        """Raises an error if an action or a bound on memory is asked of a layer that Keras has to run."""
        what = "an action on its gradient" if self._act_of(name) is not None else "`recurrent_memory`"
        if self._act_of(name) is not None or self._memory is not None:
            raise ValueError(
                f"The layer {name!r} cannot have {what}, because it runs on Keras's own loop: {reason}. Change that, "
                f"or leave {what} out."
            )

    def leave_inside(self, name):
        """Leaves a layer that is part of another one's cell to Keras: what is asked of all layers is not for it."""
        self.reasons[name] = "it runs inside the time step of another recurrent layer"
        if self._is_named(name):
            raise ValueError(
                f"The layer {name!r} cannot have an action on its gradient, because {self.reasons[name]}. Give the "
                f"action to that layer instead of {{{name!r}: …}}."
            )

    def check(self, owner):
        """Raises if something was asked of recurrent layers that the update, which was traced, never comes to.

        Args:
            owner: the engine.
        """
        layers = self.describe()
        owner.steering.check_layers(layers)
        if owner.run_eagerly:  # nothing ran yet
            return
        owner.steering.check_ran(self.ran)
        asked = {"recurrent_memory": self._memory, "bptt_updates": owner.bptt_updates}
        asked = [f"`{name}` is {value!r}" for name, value in asked.items() if value]
        if asked and not any(name in self.ran for name in layers):
            raise ValueError(
                f"{' and '.join(asked)}, and the update of this trainer runs no recurrent layer that it could be for; "
                f"those of the model are {list(layers)}. Leave it out; in a `train_step` of your own let "
                "`self.minimize(batch)` take the gradients."
            )
        for name in layers if owner.overrides("train_step") else ():
            if name not in self.ran:
                self.reasons.setdefault(name, "`train_step` takes its gradients by itself")

    def options(self, name):
        """(act, memory) of a layer."""
        return self._act_of(name), self._memory

    def shapes(self, name):
        """The shapes that a hoisted layer is compiled for."""
        return self._shapes.setdefault(name, CompiledShapes(name))


class _Entry:
    """A core while it is entered."""

    def __init__(self, core, layers, graph):
        self._core, self._graph = core, graph
        self._names = {id(layer): name for name, layer in layers.items()}

    def run_layer(self, call, record=None):
        """See `layers.run_by`; `record` is that of a probe session. None also if Keras runs the layer."""
        name = self._names.get(id(call.layer))
        if name is None:
            return None
        if active.in_time_step():
            self._core.leave_inside(name)
            return None
        self._core.ran.add(name)
        options = self.options(call.layer)
        way, reason = self._core.choice(name, call.layer, call.anew)
        if way != "keras" and tf.executing_eagerly() and not any((options.act, options.memory, call.anew)):
            way, reason = "keras", "the update runs eagerly"
        if way == "keras":
            options.note(reason)
            return None
        if way == "hoisted" and not (record is not None and tf.executing_eagerly()):
            bounded, stride = standard.stride_of(call, options.memory)
            if bounded:
                wanted = options.tracked is None or options.tracked(call.sequences)
                how = {"stride": stride, "wanted": wanted, "act": options.act, "compiled": self._core.shapes(name)}
                return standard.inner_loop(*call[:5], record=record, **how)
        return run_call(call, record, options)

    def action(self, name):
        """The action on the gradient of a loop of this name."""
        self._core.ran.add(name)
        return self._core.options(name)[0]

    @property
    def moment_of(self):
        """When an action of `probe` acts; see `Steering.moments`."""
        return self._core.moment_of and self._core.moment_of()

    def options(self, layer) -> Any:
        """`Options` for a layer."""
        name = self._names.get(id(layer))
        if name is None:
            return Options()
        act, memory = self._core.options(name)
        # A tape in this very graph knows which gradients it wants; one further out may want any.
        here = self._graph is not None and tf.compat.v1.get_default_graph() is self._graph

        def note(reason):
            self._core.refuse(name, reason)
            self._core.reasons[name] = reason

        return Options(act, memory, internals.is_tracked if here else None, note)


def run_call(call, record, options):
    """A layer on `AdjointLoop`."""
    layer, *given = call[:5]
    return run_cell(layer.cell, *given, layout_of(layer), record, options, call.anew)


def run_probed(call, record):
    """Runs a layer for a probe session: as the core around it would, with a report."""
    for runner in active.runners():
        if isinstance(runner, _Entry):
            found = runner.run_layer(call, record)
            if found is not None:
                return found
    return run_call(call, record, Options())
