"""Combiners inside the trainer: when losses have gradients of their own, what is shared, what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import losses
from tests.trainer.tools import assert_identical_weights, assert_same_weights, dataset, read_events, regression, train
from tests.trainer.tools import weights as weights_of
from trainer import Trainer

X, Y = regression(24)
RATE = 0.05
PAIR = {"square": keras.losses.MeanSquaredError(), "absolute": keras.losses.MeanAbsoluteError()}


def count_backward(x, counter):
    """The identity, whose gradient counts how often it is taken."""

    @tf.custom_gradient
    def identity(x):
        def gradient(upstream):
            with tf.control_dependencies([counter.assign_add(1)]):
                return tf.identity(upstream)

        return tf.identity(x), gradient

    return identity(x)


class Conflicting(Trainer):
    """A trunk, and two heads that want opposite things of it."""

    passes = None

    def compute_losses(self, batch, training):
        x, y = batch
        features = self.model.get_layer("trunk")(x)
        if self.passes is not None:
            features = count_backward(features, self.passes)
        features = self.share(features)
        first, second = (self.model.get_layer(name)(features) for name in ("first", "second"))
        return {"first": tf.square(first - y)[:, 0], "second": (tf.square(second + 3.0 * y)[:, 0], self.mask(x))}

    @staticmethod
    def mask(x):
        return tf.cast(x[:, 0] > 0, tf.float32)


class Unshared(Conflicting):
    def share(self, tensor):
        return tensor


def trunk_and_heads():
    keras.utils.set_random_seed(4)
    inputs = keras.Input((3,))
    trunk = keras.layers.Dense(5, activation="tanh", name="trunk")(inputs)
    return keras.Model(inputs, [keras.layers.Dense(1, name=name)(trunk) for name in ("first", "second")])


def gradients_by_hand(model, static):
    """(dL/dh, dL/dv) of each loss, eager: lists of arrays."""
    with tf.GradientTape(persistent=True) as tape:
        h = model.get_layer("trunk")(X)
        tape.watch(h)
        first, second = (model.get_layer(name)(h) for name in ("first", "second"))
        mask = Conflicting.mask(tf.constant(X))
        pair = [
            static[0] * tf.reduce_mean(tf.square(first - Y)),
            static[1] * tf.reduce_sum(tf.square(second + 3 * Y)[:, 0] * mask) / tf.reduce_sum(mask),
        ]
    variables = [v.value for v in model.trainable_variables]
    rows = [tape.gradient(loss, variables, unconnected_gradients="zero") for loss in pair]
    return [tape.gradient(loss, h).numpy() for loss in pair], [[g.numpy() for g in row] for row in rows]


def min_norm(rows):
    """The weights of the shortest convex combination of two vectors, in closed form."""
    a, b = (np.concatenate([np.ravel(part) for part in row]).astype("float64") for row in rows)
    first = np.clip((b @ b - a @ b) / ((a - b) @ (a - b)), 0, 1)
    return np.array([first, 1 - first])


def mgda_by_hand(model, steps, place, heads="weighted", static=(1.0, 1.0)):
    """SGD on the shortest combination, where gradients are compared at the features or the trunk's variables."""
    for _ in range(steps):
        at_features, rows = gradients_by_hand(model, static)
        shared = [v.path.startswith("trunk") for v in model.trainable_variables]
        trunk = [[g for g, is_shared in zip(row, shared, strict=True) if is_shared] for row in rows]
        chosen = min_norm({"features": at_features, "trunk": trunk, "all": rows}[place])
        for index, variable in enumerate(model.trainable_variables):
            used = np.ones(2) if heads == "own" and not shared[index] else chosen
            variable.assign(variable - RATE * (used[0] * rows[0][index] + used[1] * rows[1][index]))
    return model


def mgda(trainer_class=Conflicting, steps=4, batch=24, attributes=None, **options):
    model = trunk_and_heads()
    cls = type("Made", (trainer_class,), attributes or {})
    trainer = cls(model, keras.optimizers.SGD(RATE), combiner=losses.MGDA(), **options)
    trainer.fit(dataset(X, Y, batch=batch).repeat(), steps=steps, progress=False)
    return trainer


@pytest.mark.parametrize("heads", ["weighted", "own"])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch": 8, "accumulation_steps": 3}, {"jit_compile": True}, {"run_eagerly": True}],
    ids=["plain", "accumulation", "xla", "eager"],
)
def test_gradients_are_compared_at_the_shared_features(options, heads):
    expected = mgda_by_hand(trunk_and_heads(), 4, "features", heads, (1.0, 0.2))
    static = {"loss_weights": {"first": 1.0, "second": 0.2}}
    trainer = mgda(attributes={"head_gradients": heads}, **static, **options)
    assert_same_weights(trainer.model, expected, 2e-6)
    elsewhere = mgda_by_hand(trunk_and_heads(), 4, "all", heads, (1.0, 0.2))
    assert np.abs(weights_of(trainer.model)[0] - weights_of(elsewhere)[0]).max() > 1e-4


def test_features_on_two_devices(two_devices):
    with two_devices.scope():
        model, optimizer = trunk_and_heads(), keras.optimizers.SGD(RATE)
    trainer = Conflicting(model, optimizer, combiner=losses.MGDA(), strategy=two_devices)
    trainer.fit(dataset(X, Y, batch=24).repeat(), steps=3, progress=False)
    assert_same_weights(model, mgda_by_hand(trunk_and_heads(), 3, "features"), 2e-6)


def test_a_layer_can_be_shared_by_its_name():
    model = trunk_and_heads()
    pair = {"first": keras.losses.MeanSquaredError(), "second": keras.losses.MeanSquaredError()}
    by_name = Trainer(model, keras.optimizers.SGD(RATE), pair, combiner=losses.MGDA())
    by_name.shared_features = "trunk"
    targets = {"first": Y, "second": -3 * Y}
    inner = model.get_layer("trunk").call
    model.output_names = ["first", "second"]
    data = tf.data.Dataset.from_tensor_slices((X, targets)).batch(24).repeat()
    by_name.fit(data, steps=3, progress=False)
    assert model.get_layer("trunk").call == inner, "the layer is left as it was"
    marked = Conflicting(trunk_and_heads(), keras.optimizers.SGD(RATE), combiner=losses.MGDA())
    marked.mask = lambda x: tf.ones_like(x[:, 0])
    marked.fit(dataset(X, Y, batch=24).repeat(), steps=3, progress=False)
    assert_same_weights(model, marked.model)


def test_shared_features_need_one_backward_pass_through_the_trunk():
    for cls, expected in ((Conflicting, 1), (Unshared, 2)):
        passes = tf.Variable(0, trainable=False)
        mgda(cls, steps=5, attributes={"passes": passes})
        assert int(passes) == 5 * expected, cls


@pytest.mark.parametrize("heads", ["weighted", "own"])
@pytest.mark.parametrize("shared", ["trunk", "trunk/kernel"])
def test_gradients_are_compared_at_the_shared_variables(heads, shared):
    trainer = mgda(Unshared, attributes={"shared_variables": [shared], "head_gradients": heads})
    expected = trunk_and_heads()
    if shared == "trunk":
        assert_same_weights(trainer.model, mgda_by_hand(expected, 4, "trunk", heads), 2e-6)
    else:
        whole = mgda_by_hand(expected, 4, "trunk", heads)
        assert np.abs(weights_of(trainer.model)[0] - weights_of(whole)[0]).max() > 1e-6
    by_layer = trunk_and_heads()
    entry = [by_layer.get_layer("trunk")] if shared == "trunk" else [by_layer.get_layer("trunk").kernel]
    again = Unshared(by_layer, keras.optimizers.SGD(RATE), combiner=losses.MGDA())
    again.shared_variables, again.head_gradients = entry, heads
    again.fit(dataset(X, Y, batch=24).repeat(), steps=4, progress=False)
    assert_identical_weights(by_layer, trainer.model)


@pytest.mark.parametrize("probe_every", [0, 2])
@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 3, "batch": 8}, {"run_eagerly": True}], ids=str)
def test_weights_move_by_gradients_that_are_measured_now_and_then(options, probe_every):
    """Norm balance, measured in updates 0, 3 and 6 for those after them, against a loop of its own."""
    expected, balance = trunk_and_heads(), np.ones(2)
    for update in range(8):
        _, rows = gradients_by_hand(expected, (1.0, 1.0))
        for index, variable in enumerate(expected.trainable_variables):
            variable.assign(variable - RATE * (balance[0] * rows[0][index] + balance[1] * rows[1][index]))
        if update % 3 == 0:
            norms = np.array([np.sqrt(sum(np.sum(np.square(g, dtype="float64")) for g in row)) for row in rows])
            balance = norms.mean() / norms
    combiner = losses.GradientBalance("norm", update_every=3, moving_average=0.0, clip=None)
    model = trunk_and_heads()
    batch = options.get("batch", 24)
    options = {name: value for name, value in options.items() if name != "batch"}
    trainer = Unshared(model, keras.optimizers.SGD(RATE), combiner=combiner, probe_every=probe_every, **options)
    trainer.fit(dataset(X, Y, batch=batch).repeat(), steps=8, progress=False)
    assert_same_weights(model, expected, 3e-6)
    np.testing.assert_allclose(combiner.balance, balance, rtol=1e-4)
    assert trainer.calls.traces <= 2


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_each_loss_has_a_backward_pass_of_its_own_only_when_it_is_measured(accumulation_steps):
    passes = tf.Variable(0, trainable=False)
    cls = type("Counted", (Unshared,), {"passes": passes})
    # One mask for both: a second divisor would need a second backward pass under accumulation in any case.
    cls.mask = staticmethod(lambda x: tf.ones_like(x[:, 0]))
    model = trunk_and_heads()
    trainer = cls(
        model,
        keras.optimizers.SGD(RATE),
        combiner=losses.GradNorm(update_every=5),
        accumulation_steps=accumulation_steps,
    )
    trainer.compute_losses = type(trainer).compute_losses.__get__(trainer)
    trainer.fit(dataset(X, Y, batch=24 // accumulation_steps).repeat(), steps=10, progress=False)
    groups = len(trainer.main._micros[False, False][0].groups)
    assert int(passes) == accumulation_steps * (2 * 2 + 8 * groups)


def test_measuring_now_and_then_on_two_devices(two_devices):
    def run(strategy):
        with strategy.scope() if strategy else tf.init_scope():
            model, optimizer = trunk_and_heads(), keras.optimizers.SGD(RATE)
        combiner = losses.GradNorm(update_every=2, learning_rate=0.1)
        Unshared(model, optimizer, combiner=combiner, strategy=strategy).fit(
            dataset(X, Y, batch=24).repeat(), steps=5, progress=False
        )
        return model, combiner

    (one, alone), (two, together) = run(None), run(two_devices)
    assert_same_weights(one, two, 2e-6)
    np.testing.assert_allclose(alone.balance, together.balance, rtol=1e-5)
    assert np.abs(alone.balance.numpy() - 1).max() > 0.05


def test_a_run_that_measures_now_and_then_is_resumed_bit_for_bit(tmp_path):
    def run(steps, workdir):
        combiner = losses.GradientBalance(update_every=4)
        trainer = Unshared(trunk_and_heads(), keras.optimizers.Adam(0.01), combiner=combiner)
        trainer.fit(dataset(X, Y, batch=8).repeat(), steps=steps, workdir=workdir, progress=False)
        return trainer.model

    run(6, tmp_path / "two")
    assert_identical_weights(run(12, tmp_path / "one"), run(12, tmp_path / "two"))


# ---- Diagnostics.


def test_diagnostics_of_a_direction_method_by_value(tmp_path):
    model = trunk_and_heads()
    trainer = Unshared(
        model,
        keras.optimizers.SGD(0.0),
        combiner=losses.MGDA(),
        loss_weights={"first": 1.0, "second": 0.5},
        probe_every=1,
    )
    trainer.fit(dataset(X, Y, batch=24).repeat(), steps=1, workdir=tmp_path, progress=False)
    values = {tag: value for _, row in read_events(tmp_path / "train") for tag, value in row.items()}
    _, rows = gradients_by_hand(model, (1.0, 0.5))
    a, b = (np.concatenate([np.ravel(g) for g in row]).astype("float64") for row in rows)
    chosen = min_norm(rows)
    update, mean = chosen[0] * a + chosen[1] * b, (a + b) / 2
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    expected = {
        "gradient_norm/first": chosen[0] * np.linalg.norm(a),
        "gradient_norm/second": chosen[1] * np.linalg.norm(b),
        "gradient_cosine/first-second": cosine,
        "gradient_cosine/update-mean": update @ mean / np.linalg.norm(update) / np.linalg.norm(mean),
        "gradient_conflict/rate": float(cosine < 0),
        "loss_weight/first": chosen[0],
        "loss_weight/second": 0.5 * chosen[1],
    }
    for tag, value in expected.items():
        assert values[tag] == pytest.approx(value, rel=1e-3), tag
    assert expected["gradient_cosine/update-mean"] < 0.999


class Three(Trainer):
    """Three losses of one weight vector with the gradients given: two pairs of three oppose each other."""

    def compute_losses(self, batch, training):
        kernel = self.model.trainable_variables[0]
        ways = {"a": [1.0, 0.0], "b": [-1.0, 0.5], "c": [0.0, -1.0]}
        return {
            name: tf.reduce_sum(kernel[:, 0] * tf.constant(way)) + 0.0 * batch[0][0, 0] for name, way in ways.items()
        }


def test_the_conflict_rate_counts_pairs(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    trainer = Three(model, keras.optimizers.SGD(0.1), probe_every=1)
    trainer.fit(dataset(X[:, :2], Y, batch=24).repeat(), steps=1, workdir=tmp_path, progress=False)
    values = {tag: value for _, row in read_events(tmp_path / "train") for tag, value in row.items()}
    assert values["gradient_conflict/rate"] == pytest.approx(2 / 3)
    assert values["gradient_cosine/a-b"] == pytest.approx(-1 / np.sqrt(1.25), rel=1e-5)
    assert values["gradient_cosine/a-c"] == pytest.approx(0.0, abs=1e-6)


# ---- What is refused.


class Sinking(Trainer):
    """A loss that is negative from the third update on."""

    def compute_losses(self, batch, training):
        error = tf.reduce_mean(tf.square(self.model(batch[0]) - batch[1]))
        return {"error": error, "bonus": tf.where(self.step < 2, error, error - 1000.0)}


@pytest.mark.parametrize("cls", [losses.LogSum, losses.GeometricMean, losses.FAMO])
@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"run_eagerly": True}], ids=str)
def test_losses_that_are_not_positive_are_refused_where_logarithms_are_taken(cls, options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    data = dataset(X, Y, batch=8).repeat()
    trainer = Sinking(model, keras.optimizers.SGD(0.3), combiner=cls(), **options)
    trainer.fit(data, steps=2, progress=False)
    before, updates = weights_of(model), int(trainer.combiner.updates)
    with pytest.raises(ValueError, match=r"takes logarithms.*'bonus': -.*above zero.*WeightedSum") as caught:
        trainer.fit(data, steps=3, progress=False)
    assert "'error'" not in str(caught.value)
    for left, right in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(left, right)  # nothing was applied
    assert int(trainer.combiner.updates) == updates == 2


def test_the_same_losses_are_no_problem_for_others():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    train(model, dataset(X, Y, batch=8).repeat(), trainer_class=Sinking, steps=4, combiner=losses.ReLoBRaLo())


@pytest.mark.parametrize("cls", [losses.LogSum, losses.PCGrad, losses.GradNorm])
def test_one_loss_for_a_method_that_needs_two(cls):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"given 1 loss.*\['error'\].*at least 2.*WeightedSum"):
        train(model, dataset(X, Y, batch=8), epochs=1, combiner=cls())


def refused(match, attributes, cls=Unshared, combiner=None, **options):
    made = type("Made", (cls,), attributes)
    combiner = losses.MGDA() if combiner is None else combiner
    with pytest.raises(ValueError, match=match):
        train(trunk_and_heads(), dataset(X, Y, batch=24), trainer_class=made, epochs=1, combiner=combiner, **options)


def test_shared_variables_that_do_not_exist():
    refused(r"`shared_variables` has 'trunc'.*Use some of \['trunk/kernel'", {"shared_variables": ["trunc"]})


def test_a_shared_variable_that_no_loss_reaches():
    class First(Unshared):
        on_none_gradient = "ignore"

        def compute_losses(self, batch, training):
            found = super().compute_losses(batch, training)
            return {"first": found["first"], "again": found["first"] + 1.0}

    refused(
        r"No loss reaches.*\['second/kernel', 'second/bias'\].*Use some of", {"shared_variables": ["second"]}, First
    )


def test_a_shared_layer_that_does_not_exist():
    refused(r"`shared_features` is 'trunc'.*Use one of \['first'", {"shared_features": "trunc"})


def test_options_of_sharing_that_do_not_go_together():
    refused("`head_gradients` is 'mine'.*one of", {"head_gradients": "mine"})
    refused("Both `shared_features` and", {"shared_features": "trunk", "shared_variables": ["trunk"]})
    refused("LogSum uses no gradients of single losses", {"head_gradients": "own"}, combiner=losses.LogSum())
    refused("measures the gradients of weights.*`shared_variables`", {}, Conflicting, losses.GradientBalance())


def test_features_inside_a_loop_are_refused():
    class Looped(Conflicting):
        def compute_losses(self, batch, training):
            x, y = batch
            shared = tf.while_loop(lambda i, _: i < 1, lambda i, h: (i + 1, self.share(2.0 * h)), (0, x))[1]
            outputs = self.model(shared)
            return {"first": tf.square(outputs[0] - y), "second": tf.square(outputs[1] + y)}

    refused("inside a loop or a branch", {}, Looped)


def test_famo_on_several_devices_is_refused(two_devices):
    with two_devices.scope():
        model, optimizer = trunk_and_heads(), keras.optimizers.SGD(RATE)
    trainer = Unshared(model, optimizer, combiner=losses.FAMO(), strategy=two_devices)
    with pytest.raises(ValueError, match="FAMO evaluates the losses a second time.*several replicas. Use one device"):
        trainer.fit(dataset(X, Y, batch=24), epochs=1, progress=False)
