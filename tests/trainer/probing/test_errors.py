"""No silent zeros: what cannot be probed says so by name, with what to do. Without probing the same code runs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.probing import ProbeError, ProbeSession, probe, recurrent_loop

FEATURES = 3


def make_inputs():
    return tf.constant(np.random.default_rng(0).normal(size=[2, 4, FEATURES]).astype("float32"))


def make_layer(**options):
    layer = keras.layers.GRU(3, name="recurrent", **options)
    layer.build((None, None, FEATURES))
    return layer


def differentiate(session, forward, mode="eager"):
    """Runs a forward pass in a session and reports."""

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with session() as active:
                value = tf.reduce_sum(forward(x))
        return active.report(tape.gradient(value, active.sources))

    if mode != "eager":
        run = tf.function(run, jit_compile=mode == "xla", autograph=False)
    return run(make_inputs())


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_recomputed_gradients(mode):
    layer = make_layer()
    recomputed = tf.recompute_grad(lambda x: layer(x))
    assert recomputed(make_inputs()).shape == (2, 3)
    message = r"The layer 'recurrent' is inside `tf.recompute_grad`.*Take it out of the recomputed part"
    with pytest.raises(ProbeError, match=message):
        differentiate(lambda: ProbeSession(layer), recomputed, mode)
    with pytest.raises(ProbeError, match=r"`probe\('x', ...\)` is inside `tf.recompute_grad`"):
        differentiate(ProbeSession, tf.recompute_grad(lambda x: probe("x", x, 0)), mode)


def test_keras_rematerialization():
    with keras.RematScope(mode="full"):
        layer = make_layer()
    with pytest.raises(ProbeError, match="The layer 'recurrent' is inside `tf.recompute_grad`"):
        differentiate(lambda: ProbeSession(layer), layer)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("traced_before", [False, True])
def test_nested_functions(mode, traced_before):
    layer = make_layer()
    function = tf.function(lambda x: layer(x))
    if traced_before:
        function(make_inputs())
    message = (
        r"weights of \['recurrent'\] were used, but their time steps were not seen.*Call the undecorated function"
        if traced_before
        else "The layer 'recurrent' is inside a nested `tf.function`.*Call the undecorated function"
    )
    with pytest.raises(ProbeError, match=message):
        differentiate(lambda: ProbeSession(layer), function, mode)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_probe_in_a_nested_function(mode):
    with pytest.raises(ProbeError, match=r"`probe\('x', ...\)` is inside a nested `tf.function`"):
        differentiate(ProbeSession, tf.function(lambda x: probe("x", x, 0)), mode)


@pytest.mark.parametrize("place", ["direct", "loop"])
def test_probe_in_a_function_that_was_traced_before(place):
    function = tf.function(lambda x: probe("x", 2 * x, 0))
    function(make_inputs())

    def forward(x):
        if place == "direct":
            return function(x)
        return tf.while_loop(lambda t, _: t < 2, lambda t, x: (t + 1, function(x)), (tf.constant(0), x))[1]

    with pytest.raises(ProbeError, match=r"The probes \['x'\] are in a `tf.function` that was traced before"):
        differentiate(ProbeSession, forward, "graph")


def test_a_layer_that_is_not_used_is_no_error():
    used, unused = make_layer(), keras.layers.LSTM(2, name="unused", kernel_regularizer="l2")
    unused.build((None, None, FEATURES))
    assert list(differentiate(lambda: ProbeSession([used, unused]), used)) == ["recurrent"]


def test_cudnn_has_no_time_steps():
    with pytest.raises(ProbeError, match="The layer 'recurrent' has use_cudnn=True.*use_cudnn='auto'"):
        ProbeSession(make_layer(use_cudnn=True))
    ProbeSession(make_layer(use_cudnn="auto"))


def test_a_layer_with_a_loop_of_its_own():
    class Own(keras.layers.RNN):
        def inner_loop(self, sequences, initial_state, mask, training=False):
            return super().inner_loop(sequences, initial_state, mask, training)

    with pytest.raises(ProbeError, match=r"The layer 'own' \(Own\) has an `inner_loop` of its own"):
        ProbeSession(Own(keras.layers.GRUCell(2), name="own"))


@pytest.mark.parametrize("kind", ["loop", "branch"])
def test_a_layer_inside_a_loop_or_a_branch(kind):
    layer = make_layer(return_sequences=True)

    def forward(x):
        if kind == "branch":
            return tf.cond(tf.reduce_sum(x) > 0, lambda: layer(x), lambda: x)
        return tf.while_loop(lambda t, _: t < 2, lambda t, x: (t + 1, layer(x)), (tf.constant(0), x))[1]

    with pytest.raises(ProbeError, match=f"The layer 'recurrent' runs inside a {kind}.*would be summed over"):
        differentiate(lambda: ProbeSession(layer), forward, "graph")


def test_a_named_loop_inside_a_loop():
    def inner(x):
        return recurrent_loop(lambda t, x, s: (x + s[0], [x + s[0]]), x, [tf.zeros([2, FEATURES])], name="inner")[0]

    def forward(x):
        return tf.while_loop(lambda t, _: t < 2, lambda t, x: (t + 1, inner(x)), (tf.constant(0), x))[1]

    with pytest.raises(
        ProbeError, match=r"The loop 'inner' runs inside a loop.*probe\(name, tensor, \(outer, inner\)\)"
    ):
        differentiate(ProbeSession, forward, "graph")


def test_a_loop_that_xla_cannot_differentiate():
    def forward(x):
        return tf.while_loop(lambda t, _: t < 3, lambda t, x: (t + 1, probe("x", 2 * x, t)), (tf.constant(0), x))[1]

    def session():
        return ProbeSession(per_example=True)

    assert "x" in differentiate(session, forward, "graph")
    with pytest.raises(ProbeError, match=r"`probe\('x', ...\)` is in a loop without a bound.*maximum_iterations"):
        differentiate(session, forward, "xla")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_no_gradient_at_all(mode):
    layer = make_layer()
    message = "No gradient reaches the time steps of 'recurrent'.*no influence on the loss.*stop_gradient"
    with pytest.raises(ProbeError, match=message):
        differentiate(lambda: ProbeSession(layer), lambda x: tf.stop_gradient(layer(x)) + tf.reduce_sum(x), mode)
    with pytest.raises(ProbeError, match="No gradient reaches the time steps of 'x'"):
        differentiate(ProbeSession, lambda x: [probe("x", 2 * x, 0), x][1], mode)


def test_a_tape_that_watches_nothing_must_be_given():
    layer = make_layer()

    def run(**options):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            session = ProbeSession(layer, **{k: tape for k in options})
            tape.watch(layer.trainable_variables[0].value)
            with session:
                value = tf.reduce_sum(layer(make_inputs()))
        return session.report(tape.gradient(value, session.sources))

    traced = tf.function(run, autograph=False)
    with pytest.raises(ProbeError, match="pass `tape=` to the session"):
        tf.function(lambda: _unwatched(layer), autograph=False)()
    assert np.all(traced(tape=True)["recurrent"]["state"] > 0)


def _unwatched(layer):
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        session = ProbeSession(layer)
        with session:
            value = tf.reduce_sum(layer(make_inputs()))
    return session.report(tape.gradient(value, session.sources))


def test_time_steps_that_no_loss_depends_on_are_zero_if_others_have_a_gradient():
    def forward(x):
        states = [probe("x", 2.0 * x, t) for t in range(3)]
        return states[1]

    report = differentiate(ProbeSession, forward)
    assert np.all(report["x"]["state"][:, 1] > 0) and np.all(report["x"]["state"][:, ::2] == 0)


def test_names_must_not_collide():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"`probe\('recurrent', ...\)` has the name of a probed layer"):
        differentiate(lambda: ProbeSession(layer), lambda x: probe("recurrent", layer(x), 0))
    with pytest.raises(
        ValueError, match=r"`probe\('x', ...\)` was called with batched=True and 1 time indices, and again"
    ):
        differentiate(ProbeSession, lambda x: probe("x", probe("x", x, 0), 1, batched=False))


def test_arguments():
    with pytest.raises(ValueError, match="`weights` is 'some'; it must be True, False or 'full'"):
        ProbeSession(weights="some")
    layer = make_layer()
    with tf.GradientTape() as tape, ProbeSession(layer) as session:
        value = tf.reduce_sum(layer(make_inputs()))
    gradients = tape.gradient(value, session.sources)
    with pytest.raises(ValueError, match=r"`gradients` has 1 entries; `sources` has"):
        session.report(gradients[:1])
    with pytest.raises(ValueError, match="weights='full'"):
        session.sum_check(gradients, [], [])
