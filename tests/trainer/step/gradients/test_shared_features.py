"""Gradients compared at shared features or variables, against a loop by hand; and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses
from looptape.losses.combiners.names import exported
from tests.trainer.step.gradients.trunk import RATE, Conflicting, Unshared, X, Y, mgda, mgda_by_hand, trunk_and_heads
from tests.trainer.tools import assert_identical_weights, assert_same_weights, dataset, train
from tests.trainer.tools import weights as weights_of


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
    refused("needs the gradients of weights.*`shared_variables`", {}, Conflicting, losses.GradientBalance())
    turns = losses.MomentumConFIG()
    refused("MomentumConFIG averages the gradients of all weights", {"shared_variables": ["trunk"]}, combiner=turns)


REFUSED = {"gradient_balance", "graddrop", "db_mtl", "momentum_config"}
QUICK = REFUSED | {"famo", "geometric_mean", "gradnorm", "mgda", "cagrad"}  # others take these ways, too


@pytest.mark.parametrize(
    "cls", [pytest.param(cls, marks=[] if cls.name in QUICK else pytest.mark.long, id=cls.name) for cls in exported()]
)
def test_every_combiner_at_shared_features(cls):
    """An update of one batch equals that of its two micro-batches; or it is refused."""
    wanted = {"update_every": 1, "window": 1, "learning_rate": 0.1}
    arguments = {name: value for name, value in wanted.items() if name in cls.arguments()}
    models = []
    for accumulation_steps in (1, 2):
        model = trunk_and_heads()
        run = Conflicting(model, keras.optimizers.SGD(RATE), combiner=cls(**arguments), steps_per_call=2)
        run.accumulation_steps = accumulation_steps
        models.append(model)
        data = dataset(X, Y, batch=24 // accumulation_steps).repeat()
        if cls.name in REFUSED:
            with pytest.raises(ValueError, match=f"{cls.__name__} needs the gradients of weights.*`shared_variables`"):
                run.fit(data, steps=2, progress=False)
            return
        run.fit(data, steps=2, progress=False)
    assert_same_weights(*models, 2e-6)
    assert np.abs(weights_of(models[0])[0] - weights_of(trunk_and_heads())[0]).max() > 1e-4


def test_features_inside_a_loop_are_refused():
    class Looped(Conflicting):
        def compute_losses(self, batch, training):
            x, y = batch
            shared = tf.while_loop(lambda i, _: i < 1, lambda i, h: (i + 1, self.share(2.0 * h)), (0, x))[1]
            outputs = self.model(shared)
            return {"first": tf.square(outputs[0] - y), "second": tf.square(outputs[1] + y)}

    refused("inside a loop or a branch", {}, Looped)
