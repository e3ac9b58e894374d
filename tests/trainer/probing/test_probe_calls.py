"""`probe` in every kind of loop, against values known beforehand; and the cases A, B and C of the design notes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.probing import ProbeError, ProbeSession, missing_capacity, present, present_examples, probe

# The loss is the sum of the last state of x ← 2·x: its gradient at step t is 2^(T-1-t).
STEPS = 3


def python_loop(x, steps):
    for t in range(int(tf.get_static_value(steps))):
        x = probe("x", 2.0 * x, t)
    return x


def while_loop(x, steps):
    def body(t, x):
        return t + 1, probe("x", 2.0 * x, t)

    return tf.while_loop(lambda t, _: t < steps, body, (tf.constant(0), x), maximum_iterations=steps)[1]


def autograph_for(x, steps):
    for t in tf.range(steps):
        x = probe("x", 2.0 * x, t)
    return x


def autograph_while(x, steps):
    t = tf.constant(0)
    while t < steps:
        tf.autograph.experimental.set_loop_options(maximum_iterations=steps)
        x = probe("x", 2.0 * x, t)
        t += 1
    return x


def tf_scan(x, steps):
    return tf.scan(lambda x, t: probe("x", 2.0 * x, t), tf.range(steps), initializer=x)[-1]


def keras_scan(x, steps):
    def step(x, t):
        x = probe("x", 2.0 * x, t)
        return x, x

    return keras.ops.scan(step, x, tf.range(steps))[0]


def branch_in_loop(x, steps):
    for t in tf.range(steps):
        if t < 100:  # noqa: SIM108
            x = probe("x", 2.0 * x, t)
        else:
            x = probe("x", 5.0 * x, t)
    return x


LOOPS = [python_loop, while_loop, autograph_for, autograph_while, tf_scan, keras_scan, branch_in_loop]
CONVERTED = {
    loop: loop if loop is python_loop else tf.autograph.experimental.do_not_convert(tf.autograph.to_graph(loop))
    for loop in LOOPS
}


def measured(forward, inputs, mode="graph", loss=tf.reduce_sum, per_example=False, shapes=None, **options):
    """Totals and gradient of the inputs of a probed pass."""

    def run(*inputs):
        session = ProbeSession(per_example=per_example, **options)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            with session:
                outputs = forward(*inputs)
            value = loss(outputs)
        gradients = tape.gradient(value, [*inputs, *session.sources])
        own, rest = gradients[: len(inputs)], gradients[len(inputs) :]
        if shapes is not None:
            shapes.update(session.shapes)
        return own, session.report(rest) if per_example else session.totals(rest)

    if mode != "eager":
        run = tf.function(run, jit_compile=mode == "xla", autograph=False)
    return run(*inputs)


def vectors_of(forward, inputs, **options):
    shapes = {}
    _, totals = measured(forward, inputs, shapes=shapes, **options)
    return present(totals, shapes)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_5_powers_of_two_in_every_loop(loop, mode):
    if mode == "xla" and loop is keras_scan:
        pytest.skip("XLA cannot differentiate it, probe or not: it sets no bound on its iterations")
    x, shapes = tf.constant([[1.0, 0.0], [2.0, 3.0]]), {}
    forward = CONVERTED[loop] if mode != "eager" else loop
    (gradient,), totals = measured(lambda x: forward(x, tf.constant(STEPS)), [x], mode, shapes=shapes)
    np.testing.assert_array_equal(gradient, np.full([2, 2], 2.0**STEPS))
    found = present(totals, shapes).vectors
    assert list(found) == ["x"] and list(found["x"]) == ["state"]
    np.testing.assert_allclose(found["x"]["state"], np.sqrt(2) * np.array([4.0, 2.0, 1.0]), rtol=1e-6)


def test_without_a_session_it_is_the_very_argument():
    x = tf.constant(1.0)
    assert probe("x", x, 0) is x

    @tf.function(autograph=False)
    def traced(x):
        assert probe("x", x, 3) is x
        return x

    assert [op.type for op in traced.get_concrete_function(x).graph.get_operations()] == ["Placeholder", "Identity"]


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_lengths_that_only_the_graph_knows(mode):
    def run(x, steps):
        session = ProbeSession(capacity={"x": 8})
        with tf.GradientTape() as tape:
            with session:
                y = CONVERTED[autograph_for](x, steps)
            value = tf.reduce_sum(y)
        return session.totals(tape.gradient(value, session.sources)), y

    function = tf.function(run, jit_compile=mode == "xla", autograph=False)
    if mode == "xla":
        for steps in (2, 5):  # XLA compiles each length
            sums, _ = tf.function(run, jit_compile=True, autograph=False)(tf.ones([1, 1]), steps)
            assert present(sums, {"x": (8,)}).vectors["x"]["state"].shape == (steps,)
        return
    for steps in (2, 5, 8):
        sums, _ = function(tf.ones([1, 1]), tf.constant(steps))
        found = present(sums, {"x": (8,)}).vectors["x"]["state"]
        np.testing.assert_array_equal(found, 2.0 ** np.arange(steps)[::-1])
    assert function.experimental_get_tracing_count() == 1


def test_capacity_grows_to_what_was_needed():
    shapes = {}

    def forward(x):
        return CONVERTED[autograph_for](x, tf.constant(40))

    _, totals = measured(forward, [tf.ones([1, 1])], shapes=shapes, capacity={"x": 16})
    found = present(totals, shapes)
    np.testing.assert_array_equal(found.vectors["x"]["state"], 2.0 ** np.arange(39, 23, -1))
    missing = missing_capacity(totals, shapes)
    assert missing == {"x": 64}
    _, totals = measured(forward, [tf.ones([1, 1])], shapes=shapes, capacity=missing)
    assert missing_capacity(totals, shapes) == {}
    np.testing.assert_array_equal(present(totals, shapes).vectors["x"]["state"], 2.0 ** np.arange(40)[::-1])


def nested(x, outer, inner):
    for i in tf.range(outer):
        for j in tf.range(inner):
            x = probe("x", 2.0 * x, (i, j))
    return x


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_nested_loops_report_flattened_in_order(mode):
    forward = tf.autograph.to_graph(nested)
    found = vectors_of(lambda x: forward(x, tf.constant(3), tf.constant(2)), [tf.ones([1, 1])], mode=mode)
    assert found.shapes == {"x": (3, 2)}
    np.testing.assert_array_equal(found.vectors["x"]["state"], 2.0 ** np.arange(6)[::-1])
    if mode == "graph":
        shapes = {}
        _, totals = measured(
            lambda x: forward(x, tf.constant(3), tf.constant(2)),
            [tf.ones([1, 1])],
            shapes=shapes,
            capacity={"x": (2, 2)},
        )
        assert missing_capacity(totals, shapes) == {"x": (4, 2)}


def test_nested_loops_in_python():
    def forward(x):
        for i in range(3):
            for j in range(i + 1):
                x = probe("x", 2.0 * x, (i, j))
        return x

    found = vectors_of(forward, [tf.ones([1, 1])], mode="eager")
    assert found.shapes == {"x": (3, 3)}
    nan = np.nan
    np.testing.assert_array_equal(found.vectors["x"]["state"], [32, nan, nan, 16, 8, nan, 4, 2, 1])


def test_one_index_for_nested_loops_is_an_error():
    def summed(x):
        for _ in tf.range(3):
            for j in tf.range(2):
                x = probe("x", 2.0 * x, j)
        return x

    with pytest.raises(
        ProbeError, match=r"`probe\('x', ...\)` was reached 3 times at t=0 in 1 pass.*tuple, outer index"
    ):
        vectors_of(tf.autograph.to_graph(summed), [tf.ones([1, 1])])

    def in_python(x):
        for _ in range(2):
            x = probe("x", 2.0 * x, 0)
        return x

    with pytest.raises(ValueError, match=r"called twice at t=0.*outer index first"):
        vectors_of(in_python, [tf.ones([1, 1])], mode="eager")


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_states_inputs_and_weights_in_one_loop(mode):
    """Against G_t, λ_t and g_t of a linear loop written out by hand."""
    generator = np.random.default_rng(0)
    w, xs = generator.normal(size=[2, 2]).astype("float32"), generator.normal(size=[4, 3, 2]).astype("float32")

    def forward(w, xs):
        def body(t, h):
            weight = probe("weight", w, t, batched=False)
            now = probe("input", tf.gather(xs, t), t)
            return t + 1, probe("state", now + h @ weight, t)

        return tf.while_loop(lambda t, _: t < 4, body, (tf.constant(0), tf.zeros([3, 2])), maximum_iterations=4)[1]

    shapes = {}
    (gradient, _), totals = measured(
        forward, [tf.constant(w), tf.constant(xs)], mode, lambda h: tf.reduce_sum(h**2), shapes=shapes
    )
    h = [np.zeros([3, 2])]
    for t in range(4):
        h.append(xs[t] + h[-1] @ w)
    adjoint, expected, steps = 2 * h[-1], [], []
    for t in range(3, -1, -1):
        expected.insert(0, np.mean(np.linalg.norm(adjoint, axis=1)))
        steps.insert(0, h[t].T @ adjoint)
        adjoint = adjoint @ w.T
    found = present(totals, shapes).vectors
    np.testing.assert_allclose(found["state"]["state"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["input"]["state"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["weight"]["weight"], [np.linalg.norm(step) for step in steps], rtol=1e-5)
    np.testing.assert_allclose(gradient, np.sum(steps, axis=0), rtol=1e-4)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_each_example_and_all_of_the_gradient_on_request(mode):
    x, shapes = tf.constant([[1.0, 0.0], [2.0, 3.0], [0.0, 1.0]]), {}
    forward = CONVERTED[while_loop] if mode == "graph" else while_loop

    def loss(y):
        return tf.reduce_sum(y * tf.constant([[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]]))

    _, report = measured(lambda x: forward(x, STEPS), [x], mode, loss, True, shapes, full=True, capacity={"x": 4})
    found, _ = present_examples(report, shapes)
    np.testing.assert_array_equal(found["x"]["state"], [[4, 2, 1], [20, 10, 5], [0, 0, 0]])
    assert found["x"]["state_gradient/0"].shape == (3, 3, 2)
    np.testing.assert_array_equal(found["x"]["state_gradient/0"][1], [[12, 16], [6, 8], [3, 4]])


def test_an_unknown_batch_size_in_a_graph_loop_must_be_told():
    def run(x, **options):
        session = ProbeSession(per_example=True, **options)
        with tf.GradientTape() as tape:
            with session:
                y = while_loop(x, 3)
            value = tf.reduce_sum(y)
        return session.report(tape.gradient(value, session.sources))["x"]["state"]

    signature = [tf.TensorSpec([None, 2], tf.float32)]
    with pytest.raises(ProbeError, match=r"`probe\('x', ...\)` has to report each example.*batch=tf.shape"):
        tf.function(run, autograph=False, input_signature=signature)(tf.ones([2, 2]))
    told = tf.function(lambda x: run(x, batch=tf.shape(x)[0]), autograph=False, input_signature=signature)
    assert told(tf.ones([3, 2])).shape == (3, 512)


def test_under_nested_tapes():
    """A loss of a second derivative, as in physics-informed networks: y = x⁸ by three squarings, loss = dy/dx =
    8·x⁷.
    """

    def forward(x):
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = x
            for t in range(3):
                y = probe("y", y * y, t)
        return inner.gradient(y, x)

    x = tf.constant([[1.2]])
    (gradient,), totals = measured(forward, [x], "graph", shapes={})
    assert gradient.numpy() == pytest.approx(56 * 1.2**6, rel=1e-5)
    found = present(totals, {"y": (3,)}).vectors["y"]["state"]
    # With y1 = x², y2 = y1², y3 = y2²: loss = 2x·2y1·2y2, of which y1 = y, and y2 = y1² are varied in turn.
    expected = [2 * 1.2 * 2 * 2 * 3 * 1.2**4, 2 * 1.2 * 2 * 1.2**2 * 2, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_tiny_gradients_are_not_zero():
    def forward(x):
        for t in tf.range(100):
            x = probe("x", 0.25 * x, t)
        return x

    found = vectors_of(tf.autograph.to_graph(forward), [tf.ones([1, 1])]).vectors["x"]["state"]
    exponents = -2.0 * np.arange(99, -1, -1)
    visible = exponents > -126  # denormal numbers are flushed
    np.testing.assert_allclose(found[visible], 2.0 ** exponents[visible], rtol=1e-6)


# The cases of the design notes.


def test_case_a1_weights_and_losses_of_each_step():
    w, x = tf.constant(0.8), tf.constant(1.5)

    def forward(w):
        state, losses = x, []
        for t in range(5):
            state = probe("state", probe("w", w, t, batched=False) * state + 1.0, t, batched=False)
            losses.append(state**2)
        return tf.stack(losses)

    with tf.GradientTape(persistent=True) as tape:
        tape.watch(w)
        session = ProbeSession()
        with session:
            losses = forward(w)
        total = tf.reduce_sum(losses)
        each = tf.unstack(losses)
    np.testing.assert_allclose(losses, [4.84, 7.6176, 10.29127, 12.71921, 14.84654], rtol=1e-6)
    rows = [tape.gradient(loss, [w, *session.sources]) for loss in each]
    np.testing.assert_allclose([row[0] for row in rows], [6.6, 18.768, 35.15968, 54.15222, 74.28816], rtol=1e-6)
    found = present(session.totals(tape.gradient(total, session.sources)), session.shapes).vectors
    assert np.sum(found["w"]["weight"]) == pytest.approx(188.9681, rel=1e-6)
    # Oracle 11: the loss of step s has no gradient at later states.
    credit = [present(session.totals(row[1:]), session.shapes).vectors["state"]["weight"] for row in rows]
    assert np.all(np.triu(credit, 1) == 0) and np.all(np.tril(credit)[np.tril_indices(5)] > 0)


def test_case_a2_jacobian_of_a_matrix():
    w = tf.constant([[0.3, 0.1], [0.2, 0.4]])

    @tf.function(autograph=False)
    def run(w):
        session = ProbeSession(full=True, capacity={"w": 4})
        with tf.GradientTape() as tape:
            tape.watch(w)
            with session:

                def body(t, x, losses):
                    x = tf.linalg.matvec(probe("w", w, t, batched=False), x)
                    return t + 1, x, losses.write(t, tf.reduce_sum(x**2))

                start = (tf.constant(0), tf.constant([1.0, -1.0]), tf.TensorArray(tf.float32, 4))
                *_, losses = tf.while_loop(lambda t, *_: t < 4, body, start, maximum_iterations=4)
            losses = losses.stack()
            total = tf.reduce_sum(losses)
        whole, *rest = tape.gradient(total, [w, *session.sources])
        return losses, whole, session.report(rest)["w"]["weight_gradient"]

    losses, whole, steps = run(w)
    np.testing.assert_allclose(losses, [0.08, 0.0032, 1.28e-4, 5.12e-6], rtol=1e-5)
    np.testing.assert_allclose(whole, [[0.4244, -0.4244], [-0.4436448, 0.4436448]], rtol=1e-5)
    assert steps.shape == (4, 2, 2)
    np.testing.assert_allclose(np.sum(steps, axis=0), whole, rtol=1e-5)


def cube_in_python(x):
    y = tf.ones_like(x)
    for t in range(3):
        y = probe("y", y * x, t, batched=False)
    return y


def cube_in_graph(x):
    y = tf.ones_like(x)
    for t in tf.range(3):
        y = probe("y", y * x, t, batched=False)
    return y


def cube_in_nested_loops(x):
    y = tf.ones_like(x)
    for i in tf.range(3):
        for j in tf.range(1):
            y = probe("y", y * x, (i, j), batched=False)
    return y


@pytest.mark.parametrize("cube", [cube_in_python, cube_in_graph, cube_in_nested_loops], ids=lambda f: f.__name__)
def test_case_b_cubes(cube):
    forward = cube if cube is cube_in_python else tf.autograph.to_graph(cube)
    shapes = {}
    (gradient,), totals = measured(forward, [tf.constant(2.0)], shapes=shapes, loss=tf.identity)
    assert gradient == 12.0
    np.testing.assert_array_equal(present(totals, shapes).vectors["y"]["weight"], [4.0, 2.0, 1.0])


def test_case_b_two_outputs():
    def forward(x, y):
        a, b = tf.constant(1.0), tf.constant(0.0)
        for t in tf.range(2):
            a = probe("a", a * x, t, batched=False)
            b = probe("b", b + a * y, t, batched=False)
        return b

    shapes = {}
    gradients, totals = measured(
        tf.autograph.to_graph(forward), [tf.constant(2.0), tf.constant(3.0)], shapes=shapes, loss=tf.identity
    )
    assert [float(g) for g in gradients] == [15.0, 6.0]
    found = present(totals, shapes).vectors
    np.testing.assert_array_equal(found["a"]["weight"], [9.0, 3.0])
    np.testing.assert_array_equal(found["b"]["weight"], [1.0, 1.0])


def test_case_c_loops_and_arrays():
    x, y = tf.constant([1.0, 2.0, 3.0]), tf.constant([4.0, 5.0, 6.0])

    def stacked(x):
        products = tf.TensorArray(tf.float32, 3)
        for t in tf.range(3):
            products = products.write(t, probe("term", x[t], t, batched=False) * y[t])
        return products.stack()

    shapes = {}
    (gradient,), totals = measured(tf.autograph.to_graph(stacked), [x], shapes=shapes)
    np.testing.assert_array_equal(gradient, [4.0, 5.0, 6.0])
    np.testing.assert_array_equal(present(totals, shapes).vectors["term"]["weight"], [4.0, 5.0, 6.0])

    def overwritten(x):
        result = tf.constant(0.0)
        for t in tf.range(3):
            result = probe("term", x[t], t, batched=False) * y[t]
        return result

    (gradient,), totals = measured(tf.autograph.to_graph(overwritten), [x])
    np.testing.assert_array_equal(gradient, [0.0, 0.0, 6.0])
    np.testing.assert_array_equal(present(totals, shapes).vectors["term"]["weight"], [0.0, 0.0, 6.0])


def test_case_c_only_the_branch_taken_reports():
    def forward(x):
        for t in tf.range(4):
            if t % 2 == 0:  # noqa: SIM108
                x = probe("even", 2.0 * x, t)
            else:
                x = 3.0 * x
        return x

    shapes = {}
    (gradient,), totals = measured(tf.autograph.to_graph(forward), [tf.ones([1, 1])], shapes=shapes)
    assert gradient == 36.0
    np.testing.assert_array_equal(present(totals, shapes).vectors["even"]["state"], [18.0, np.nan, 3.0])
