"""Variables of Keras and TensorFlow: making them while tracing, finding them in layers, naming them."""

import contextlib
import functools

import keras
import tensorflow as tf
from keras.src.random import seed_generator

OWN_CALL = "looptape_call"  # the name of Looptape's own operations that call Python


@contextlib.contextmanager
def creating_variables(strategy=None):
    """A context for making variables while a `tf.function` is traced: eager, and without a second trace.

    A function that sees variables being made traces itself once more, to be sure that it makes none then.
    """

    def without_lifting(next_creator, **arguments):
        return next_creator(**{**arguments, "experimental_enable_variable_lifting": False})

    scope = contextlib.nullcontext() if strategy is None else strategy.scope()
    with tf.init_scope(), scope, tf.variable_creator_scope(without_lifting):
        yield


def traced(function, **options):
    """A `tf.function` without AutoGraph. TensorFlow's warning about frequent traces counts it by itself."""
    return tf.function(functools.partial(function), autograph=False, **options)


def all_layers(model):
    """Every layer inside a model, the model included, each once."""
    seen, queue = {}, [model]
    while queue:
        layer = queue.pop()
        if id(layer) in seen or not isinstance(layer, keras.layers.Layer):
            continue
        seen[id(layer)] = layer
        # `_layers` is where Keras tracks sub-layers of any layer; only containers have the public `layers`.
        queue += list(getattr(layer, "_layers", ())) + list(getattr(layer, "layers", ()) or ())
    return list(seen.values())


def recurrent_states(model):
    """States of stateful recurrent layers: in none of Keras's lists of variables."""
    return [
        state
        for layer in all_layers(model)
        if getattr(layer, "stateful", False)
        for state in tf.nest.flatten(getattr(layer, "states", None))
        if isinstance(state, keras.Variable)
    ]


def make_global_seed():
    """Makes the seed generator of `keras.random` calls without a seed: made inside a trace it would be lost with it.

    Keras has no public function for that which would not draw a number as well.
    """
    seed_generator.global_seed_generator()


def is_seed(variable):
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.name == "seed_generator_state" and tuple(variable.shape) == (2,)


def raw(variable):
    """The `tf.Variable` behind a Keras variable, or the variable itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def path_of(variable):
    """The path of a Keras variable, or the name of a `tf.Variable`: what errors and reports call it."""
    return getattr(variable, "path", None) or variable.name.split(":")[0]


def own_variable(strategy, value, name):
    """A variable of the trainer's own: equal on all replicas, not watched by tapes."""
    with creating_variables(strategy):
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        variable = tf.Variable(value, trainable=False, name=name, aggregation=aggregation)
    variable.is_looptapes_own = True
    return variable


def is_own(variable):
    """Whether a variable was made by `own_variable`."""
    return getattr(variable, "is_looptapes_own", False)


def whole(variable):
    """The variable that all replicas share, of which a replica's trace captures its own part."""
    # TensorFlow keeps it at the handle, and versions before at the variable; it has no public function for it.
    holders = (variable, getattr(variable, "handle", None))
    containers = (getattr(holder, "_distributed_container", None) for holder in holders)
    return next((container() for container in containers if container is not None), variable)


@contextlib.contextmanager
def temporary_values(pairs):
    """A context in which the variables of (variable, value) pairs have these values. Eager."""
    pairs = [(raw(variable), value) for variable, value in pairs]
    kept = [tf.identity(variable) for variable, _ in pairs]
    for variable, value in pairs:
        variable.assign(value)
    try:
        yield
    finally:
        for (variable, _), value in zip(pairs, kept, strict=True):
            variable.assign(value)
