"""Selects the actions on each recurrent layer's gradient, as one function for its backward loop."""

import contextlib
import difflib

import numpy as np
import tensorflow as tf

from looptape.trainer.recurrent import active, internals
from looptape.trainer.recurrent.actions import Action, Cut, Moment, checked
from looptape.trainer.variables import OWN_CALL


class LayerState(str):
    """The name of a layer; `state` says which of its states is meant: 0 is the hidden one, 1 an LSTM's cell."""

    state: int = 0


class Steering:
    """The actions of a trainer.

    Args:
        actions: a sequence of actions for every recurrent layer, or {layer: sequence}.
        hook: `(layer, t, gradient) -> gradient`, called after the actions for each state; or None.
        window: cut the gradient every so many time steps, before all other actions; or None.
    """

    def __init__(self, actions=(), hook=None, window=None):
        self._actions = check_actions(actions)
        self._hook = hook
        self._window = () if window is None else (Cut(every=window),)
        self._eager = False  # whether the forward pass that is about to run is not traced
        self.step = np.int64(0)
        self.units = 1.0
        self.is_paused = False
        self.needs_units = bool(self)
        self._seen = set()  # names of the layers that were run

    def __bool__(self):
        return bool(self._actions or self._hook or self._window)

    def begin_forward(self):
        """Notes whether the forward pass that is about to run is traced. Called by whoever runs it."""
        self._eager = tf.executing_eagerly()

    def set(self, step, units):
        """Sets the number of updates made and the units of the limits for the backward passes that follow."""
        self.step, self.units = step, units

    def now(self):
        """(step, units) of the backward pass that is computed."""
        if not self._eager or tf.executing_eagerly() or internals.in_xla():
            return self.step, self.units
        # An eager update traces a loop, also backwards, before `set` is called. The values are read when it runs.
        read = tf.numpy_function(
            lambda: (np.int64(self.step), np.float32(self.units)), [], [tf.int64, tf.float32], name=OWN_CALL
        )
        return [tf.ensure_shape(value, []) for value in read]

    @contextlib.contextmanager
    def paused(self):
        """A context in which nothing acts: for those who want to know the gradient as it is."""
        kept, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = kept

    @contextlib.contextmanager
    def cutting(self, window):
        """A context in which layers that are run have their gradient cut every `window` time steps; None: nowhere."""
        kept, self._window = self._window, () if window is None else (Cut(every=window),)
        try:
            yield
        finally:
            self._window = kept

    def check_layers(self, names):
        """Raises if nothing could be acted on, or actions are given for a layer that there is not.

        Args:
            names: the recurrent layers of the model; named `recurrent_loop`s that were run count as well.
        """
        names = {*names, *self._seen}
        if self and not names:
            raise ValueError(
                "`timestep_actions`, `bptt_window` or `transform_timestep_gradient` are given, and the model has no "
                "recurrent layer that they could act on. Leave them out, or give a loop of your own a name: "
                "`recurrent_loop(…, name=…)`."
            )
        for name in self._actions if isinstance(self._actions, dict) else ():
            if name not in names:
                near = difflib.get_close_matches(name, list(names), 1)
                hint = f"Did you mean {near[0]!r}?" if near else "Name one of them."
                raise ValueError(
                    f"`timestep_actions` are given for the layer {name!r}; the recurrent layers are {sorted(names)}. "
                    f"{hint}"
                )

    def names(self, layer):
        """Whether actions are given for this very layer."""
        return isinstance(self._actions, dict) and layer in self._actions

    def check_ran(self, ran):
        """Raises if the update never came to a loop that it is to act on.

        Args:
            ran: names of the loops that the update came to, while it was traced.
        """
        named = self._actions if isinstance(self._actions, dict) else {}
        unused = [name for name in named if name not in ran]
        if unused or (self and not ran):
            what = f"The actions on {unused}" if unused else "`timestep_actions`, `bptt_window` or the hook"
            raise ValueError(
                f"{what} would never act: the update of this trainer runs {sorted(ran) or 'no recurrent layer'}, and "
                "only what `compute_losses` runs is steered. In a `train_step` of your own let `self.minimize(batch)` "
                "take the gradients, not a tape; or leave the actions out."
            )

    def on(self, layer):
        """The actions on one layer, in order."""
        own = self._actions.get(layer, ()) if isinstance(self._actions, dict) else self._actions
        return (*self._window, *own)

    def act_for(self, layer):
        """The `Act` for the backward loop of a layer, or None if nothing acts on it."""
        self._seen.add(layer)
        actions = self.on(layer)
        if self.is_paused or not (actions or self._hook is not None):
            return None
        return Act(self, layer, actions)

    def moments(self):
        """`(layer, t) -> Moment` for an action in a user's own loop, to be asked in the backward pass.

        It gives None while nothing may act.
        """
        self.needs_units = True
        return lambda layer, t: None if self.is_paused else Moment(t, *self.now(), layer)

    def hooked(self, layer, t, gradients):
        """Gradients by the hook, which sees those of an example's own loss, as the logs do."""
        if self._hook is None:
            return gradients
        found = []
        for number, gradient in enumerate(gradients):
            name = LayerState(layer)
            name.state = number
            # Wide, as actions compute: times its units a float16 gradient would lose what a loss scale kept.
            wide = tf.cast(gradient, tf.float64 if gradient.dtype == tf.float64 else tf.float32)
            units = tf.cast(self.now()[1], wide.dtype)
            new = self._hook(name, t, wide * units)
            if new is None:
                raise ValueError(
                    f"`transform_timestep_gradient` returned None for the gradient of layer {layer!r}; it must return "
                    "a gradient of the same shape. End it with `return gradient`."
                )
            new = tf.convert_to_tensor(new)
            if new.dtype != wide.dtype or not new.shape.is_compatible_with(gradient.shape):
                raise ValueError(
                    f"`transform_timestep_gradient` returned {new.shape} {new.dtype.name} for a gradient "
                    f"{gradient.shape} {wide.dtype.name} of layer {layer!r}; shape and type must stay. Cast the "
                    "result, or keep the batch axis."
                )
            found.append(tf.cast(tf.math.divide_no_nan(new, units), gradient.dtype))
        return found


class Act:
    """All actions on one layer, as its backward loop calls them; see `adjoint_loop.AdjointLoop`."""

    def __init__(self, steering, layer, actions):
        self._steering, self._layer = steering, layer
        self._first = [action for action in actions if action.carried]
        self._then = [action for action in actions if not action.carried]

    @property
    def carried(self):
        """`(t, gradients, sender) -> gradients` of what time step `sender` sent back; None if nothing acts on that."""
        return self._on_carried if self._first else None

    def _on_carried(self, t, gradients, sender):
        return list(gradients) if self._steering.is_paused else self._run(self._first, t, gradients, sender)

    def __call__(self, t, gradients, valid=None):
        """λ_t as it travels on."""
        if self._steering.is_paused:
            return list(gradients)
        return self._steering.hooked(self._layer, t, self._run(self._then, t, gradients))

    def _run(self, actions, t, gradients, sender=None):
        moment = Moment(t, *self._steering.now(), self._layer, sender)
        for action in actions:
            gradients = action(gradients, moment)
        return list(gradients)


class _Lent:
    """What `Act` asks of a `Steering`, for actions that were given to one loop."""

    def __init__(self):
        self._moment_of = active.moment_of() or (lambda layer, t: Moment(t, np.int64(0), 1.0, layer))

    @property
    def is_paused(self):
        return self._moment_of("", 0) is None

    def now(self):
        moment = self._moment_of("", 0)
        return moment.step, moment.units

    def hooked(self, layer, t, gradients):
        return gradients


class _CheckedFunction:
    """A user's `act`, whose results are looked at."""

    def __init__(self, function):
        self._function = function
        self.carried = getattr(function, "carried", None) and self._on_carried

    def _on_carried(self, t, gradients, sender):
        return checked("`act.carried`", self._function.carried(t, gradients, sender), gradients)

    def __call__(self, t, gradients, valid=None):
        return checked("`act`", self._function(t, gradients, valid), gradients)


def act_on_loop(given, name):
    """The `act` of a loop, from an action, a list of them, or a function; see `adjoint_loop.AdjointLoop`."""
    if isinstance(given, Act):
        return given
    if isinstance(given, Action | list | tuple):
        return Act(_Lent(), name or "recurrent_loop", check_actions(given))
    if not callable(given) or isinstance(given, type):
        raise TypeError(
            f"`act` is {given!r}; it must be an action such as looptape.timesteps.ClipNorm(1.0), a list of them, or a "
            "function `(t, gradients, valid) -> gradients`. Leave it out for none."
        )
    return _CheckedFunction(given)


def check_actions(actions):
    """A tuple of actions, or {layer: tuple of actions}."""
    if isinstance(actions, dict):
        for name, own in actions.items():
            if isinstance(own, dict):
                raise TypeError(
                    f"`timestep_actions` has {own!r} for the layer {name!r}; it must be an action or a list of them. "
                    "For one of its states give the action `state`: ClipNorm(1.0, state='cell')."
                )
        return {name: check_actions(own) for name, own in actions.items()}
    listed = actions if isinstance(actions, list | tuple) else [actions]
    for action in listed:
        if not callable(action) or not hasattr(action, "carried") or isinstance(action, type):
            raise TypeError(
                f"`timestep_actions` has {action!r}; each must be an action such as looptape.timesteps.ClipNorm(1.0). "
                "For a function of your own override `Trainer.transform_timestep_gradient`."
            )
    return tuple(listed)
