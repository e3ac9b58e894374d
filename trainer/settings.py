"""Settings of a `Trainer`: attributes that people read and set, and the moment from which each of them is frozen."""

# Read when the trainer is made.
_MADE = (
    *("model", "strategy", "step", "loss_weights", "recurrent", "recurrent_memory", "timestep_actions"),
    *("bptt_window", "bptt_updates", "bptt_begins", "freeze"),
)
# Read when the first trace of the update begins.
_TRACED = (
    *("optimizer", "losses", "combiner", "metrics", "accumulation_steps", "clip_norm", "ema_decay", "jit_compile"),
    *("stages", "on_spike", "spike_threshold", "spike_window", "communication", "communication_dtype"),
)
# Read during that trace; a trace that failed because of them can be tried again with others.
_SETTLED = ("shared_features", "shared_variables", "head_gradients", "health_parts", "bptt_compare_every")
# Read at any time.
_FREE = ("probe_every", "health_every", "steps_per_call", "run_eagerly")


class Public:
    """An attribute that lies on the trainer, where people read it and set it."""

    def __set_name__(self, owner, name):
        self._name = name

    def __get__(self, engine, _=None):
        return getattr(engine.trainer, self._name)


class FrozenSettings:
    """The settings that the traced update was made from. Raises an error for attributes that were set too late.

    Args:
        trainer: the trainer, with its settings.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._traced = False
        self._known: dict = {}
        _refuse_hidden(trainer)
        self._freeze(_MADE)

    def begin_trace(self):
        """Freezes what the update is traced with."""
        self.check()
        self._traced = True
        self._freeze(_TRACED)

    def end_trace(self):
        """Freezes what the trace read; after it succeeded."""
        self._freeze((*_SETTLED, "probe_layers"))

    def renew(self, name):
        """Takes the present value of a setting, which the trainer itself replaced."""
        self._known[name] = _copy(getattr(self._trainer, name))

    def differs(self, name):
        """Whether a setting is frozen and has another value now."""
        return name in self._known and not _same(self._known[name], getattr(self._trainer, name))

    def check(self):
        """Raises an error if a frozen setting has another value now."""
        changed = [name for name in (*_MADE, *_TRACED, *_SETTLED) if self.differs(name)]
        if changed:
            moment = "the update had been traced" if self._traced else "the trainer had been made"
            raise ValueError(
                f"{', '.join(f'`trainer.{name}`' for name in changed)} was set after {moment}, which would have no "
                "effect. Make a new Trainer with it; an attribute of your own needs another name. These may change at "
                "any time: a loss's weight (`trainer.loss_weights['error'] = 2.0`), the optimizer's `learning_rate` "
                "and `trainable` of layers."
            )

    def _freeze(self, names):
        for name in names:
            if name not in self._known:
                self.renew(name)


def _refuse_hidden(trainer):
    """Refuses a subclass with a method or an attribute of the name of a setting, which the constructor has replaced."""
    classes = type(trainer).__mro__
    own = {name for cls in classes if cls.__module__.startswith("looptape.") for name in vars(cls)}
    replaced = {*_MADE, *_TRACED, *_SETTLED, *_FREE} - own
    for cls in classes:
        hidden = sorted(replaced & vars(cls).keys())
        if hidden:
            raise TypeError(
                f"{cls.__name__}.{hidden[0]} has the name of a setting of `Trainer`, which takes its place in every "
                "instance. Give it another name; to set the setting, pass it to the constructor."
            )


def _copy(value):
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value


def _same(old, new):
    """Whether two values are equal. Compares variables and other objects by identity: their `==` may be a tensor."""
    if old is new:
        return True
    if isinstance(old, dict) and isinstance(new, dict):
        return list(old) == list(new) and all(_same(old[key], new[key]) for key in old)
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    plain = str | int | float
    return isinstance(old, plain) and isinstance(new, plain) and old == new
