"""The calling convention of all loss functions here, and their shared helpers.

Every loss is called as `loss(targets, outputs)` and returns one value per example or per element; the caller
reduces. Calling a loss with keywords only returns a loss with those options:

    losses={"error": squared_error}
    losses={"error": huber(delta=2.0)}

Losses that know which elements count (masked sequences) return the pair `(values, weights)` instead.
"""

import difflib
import functools
import inspect
import numbers

import tensorflow as tf


class LossFunction:
    """An immutable loss with its options. The decorator `loss_function` creates it; users call it.

    Half-precision outputs are cast to float32 first. Losses with equal options compare equal.

    >>> loss = loss_function(lambda targets, outputs, *, scale=1.0: scale * (targets - outputs))
    >>> loss(scale=2.0)(tf.constant([3.0]), tf.constant([1.0])).numpy().tolist()
    [4.0]
    """

    def __init__(self, function, options, check):
        functools.update_wrapper(self, function)
        self._options = dict(options)
        self._check = check

    def __call__(self, *arguments, **options):
        merged = {**self._options, **self._known(options)}
        if options and self._check is not None:
            self._check(**merged)
        if not arguments:
            return LossFunction(self.__wrapped__, merged, self._check)
        if len(arguments) != 2:
            raise TypeError(
                f"`{self.__name__}` got {len(arguments)} positional argument(s); it must be called with "
                f"targets and outputs, or with options as keywords: {self.options}."
            )
        targets, outputs = arguments
        return self.__wrapped__(targets, tf.nest.map_structure(as_float, outputs), **merged)

    @property
    def options(self):
        """A copy of all options, defaults included."""
        parameters = inspect.signature(self.__wrapped__).parameters.values()
        return {p.name: self._options.get(p.name, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}

    def __repr__(self):
        return f"{self.__name__}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"

    def __eq__(self, other):
        same = isinstance(other, LossFunction) and self.__wrapped__ is other.__wrapped__
        return same and self.options == other.options

    def __hash__(self):
        return hash((self.__wrapped__, repr(self)))

    def _known(self, options):
        for name in options:
            if name not in self.options:
                near = difflib.get_close_matches(name, self.options, n=1)
                hint = f" did you mean {near[0]!r}?" if near else ""
                raise TypeError(
                    f"{name!r} is not an option of `{self.__name__}`;{hint} it must be one of "
                    f"{list(self.options)}. Correct or remove it."
                )
        return options


def loss_function(function=None, *, check=None):
    """Decorator that turns `function(targets, outputs, *, options)` into a `LossFunction`.

    Whenever an option is set, `check` receives all options by name and raises if they are invalid.
    """
    if function is None:
        return functools.partial(loss_function, check=check)
    parameters = inspect.signature(function).parameters.values()
    return LossFunction(function, {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}, check)


def as_float(tensor):
    """Returns the tensor, cast to float32 if it is in half precision."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor


def aligned(targets, outputs, name):
    """Returns targets and outputs with equal rank, at least two, and the dtype of the outputs.

    [batch] becomes [batch, 1]. If the ranks differ by one, the lower one gets a last axis of 1, so that the
    mean over the last axis leaves one value per element. Any other shapes that would broadcast raise an error.

    >>> [tuple(x.shape) for x in aligned(tf.zeros([5]), tf.zeros([5, 1]), "squared_error")]
    [(5, 1), (5, 1)]
    """
    outputs = tf.convert_to_tensor(outputs)
    targets = tf.cast(targets, outputs.dtype)
    shapes = f"targets of shape {targets.shape} and outputs of shape {outputs.shape}"
    if targets.shape.rank is None or outputs.shape.rank is None:
        raise ValueError(f"`{name}` got {shapes}; their rank must be known. Use `tf.ensure_shape` on them.")
    if targets.shape.rank == outputs.shape.rank - 1:
        targets = targets[..., tf.newaxis]
    elif outputs.shape.rank == targets.shape.rank - 1:
        outputs = outputs[..., tf.newaxis]
    if outputs.shape.rank == 1:
        targets, outputs = targets[..., tf.newaxis], outputs[..., tf.newaxis]
    if not targets.shape.is_compatible_with(outputs.shape):
        raise ValueError(f"`{name}` got {shapes}; they must be equal. Reshape the targets, or the model's output.")
    return targets, outputs


def require(condition, received, needed, advice):
    """Raises a three-part error unless the condition holds: what was received, what is needed, what to do."""
    if not condition:
        raise ValueError(f"{received}; it must be {needed}. {advice}")


def whole(name, value, least, advice):
    """Returns the value as an int. Raises if it is not a whole number (or is a bool), or is below `least`.

    >>> whole("window", 3, 1, "Use the number of updates in an epoch.")
    3
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(is_whole, f"`{name}` is {value!r}", f"a whole number, at least {least}", advice)
    require(value >= least, f"`{name}` is {value}", f"at least {least}", advice)
    return int(value)
