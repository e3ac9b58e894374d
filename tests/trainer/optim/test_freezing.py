"""`Trainer(freeze={step: layers})`: equal to phases by hand, one trace each, and exact after a resume."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Stage, Trainer
from tests.trainer.tools import assert_identical_weights, mse, regression

X, Y = regression(24)
# The first layers in turn, then one that was trained before stands still again.
PHASES = {0: ["block_[12]"], 3: "block_1", 5: (), 7: "block_2"}
FROZEN = [(0, {"block_1", "block_2"}), (3, {"block_1"}), (5, set()), (7, {"block_2"})]


def model():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(4, "tanh", name=f"block_{index}") for index in (1, 2)]
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1, name="head")], name="net")


def data():
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(24, seed=1).batch(4).repeat()


def by_pattern():
    return {"net/block_.*": keras.optimizers.Adam(0.01), ".*": keras.optimizers.SGD(0.1)}


def momentum():
    def init(variables):
        return [tf.zeros_like(variable) for variable in variables]

    def apply(gradients, state, variables, step):
        state = [0.9 * old + gradient for old, gradient in zip(state, gradients, strict=True)]
        return state, state

    return Stage("momentum", init, apply)


OPTIONS = {
    "adam": lambda: {"optimizer": keras.optimizers.Adam(0.01)},
    "averaged": lambda: {"optimizer": keras.optimizers.Adam(0.01), "ema_decay": 0.9},
    "by pattern": lambda: {"optimizer": by_pattern()},
    "accumulated": lambda: {"optimizer": keras.optimizers.Adam(0.01), "accumulation_steps": {0: 1, 4: 2}},
}


def make(options=OPTIONS["adam"], freeze=PHASES):
    return Trainer(model(), losses={"error": mse()}, freeze=freeze, **options())


class Moved(keras.callbacks.Callback):
    """Which layers each update changes."""

    def __init__(self):
        super().__init__()
        self.seen, self.before = [], None

    def on_train_batch_begin(self, batch, logs=None):
        self.before = {layer.name: layer.kernel.numpy() for layer in self.model.layers}

    def on_train_batch_end(self, batch, logs=None):
        changed = {
            name for name, old in self.before.items() if (self.model.get_layer(name).kernel.numpy() != old).any()
        }
        self.seen.append(changed)


def test_each_update_trains_the_layers_of_its_phase():
    moved = Moved()
    make().fit(data(), steps=9, callbacks=[moved], progress=False)
    layers = {"block_1", "block_2", "head"}
    expected = [layers - [frozen for begin, frozen in FROZEN if begin <= step][-1] for step in range(9)]
    assert moved.seen == expected


def test_it_equals_layers_that_are_frozen_by_hand_between_fits():
    scheduled, by_hand, stream = make(), make(freeze=None), data()
    scheduled.fit(data(), steps=9, progress=False)
    for (_, frozen), end in zip(FROZEN, (3, 5, 7, 9), strict=True):
        for layer in by_hand.model.layers:
            layer.trainable = layer.name not in frozen
        by_hand.fit(stream, steps=end, progress=False)
    assert_identical_weights(scheduled.model, by_hand.model)
    assert scheduled._engine.calls.traces == 4, "one for each phase"


@pytest.mark.parametrize(
    "options, stop",
    [("adam", 3), *(pytest.param(*case, marks=pytest.mark.long) for case in [("adam", 2), *((n, 8) for n in OPTIONS)])],
)
def test_a_resume_is_exact_before_at_and_after_a_change(options, stop, tmp_path, caplog):
    options = OPTIONS[options]
    whole, first, second = make(options), make(options), make(options)
    whole.fit(data(), steps=9, progress=False)
    first.fit(data(), steps=stop, workdir=tmp_path, progress=False)
    second.fit(data(), steps=9, workdir=tmp_path, progress=False)
    assert_identical_weights(whole.model, second.model)
    assert "other settings" not in caplog.text
    if whole.ema_decay:
        for trainer in (whole, second):
            with trainer.averaged_weights():
                trainer.kept = trainer.model.get_weights()
        for left, right in zip(whole.kept, second.kept, strict=True):
            np.testing.assert_array_equal(left, right)


class Listed(Trainer):
    """Passes the variables that are trained now, as a list, and another one in each trace."""

    own = None
    label = "all"

    def train_step(self, batch):
        variables = self.model.trainable_variables
        self.minimize(batch, variables=variables, optimizer=self.own, name=self.label)
        return {}


def listed(label="all", own=False, freeze=PHASES, **options):
    trainer = Listed(model(), keras.optimizers.Adam(0.01), {"error": mse()}, freeze=freeze, **options)
    trainer.label, trainer.own = label, keras.optimizers.Adam(0.01) if own else None
    return trainer


@pytest.mark.parametrize("label, own", [("all", False), pytest.param("", False, marks=pytest.mark.long), ("all", True)])
def test_variables_that_a_step_lists_follow_the_phases(label, own):
    """Also those of an optimizer that the program keeps: the same object learns of the variables that join."""
    plain, trainer = make(), listed(label, own)
    kept = trainer.own
    plain.fit(data(), steps=9, progress=False)
    trainer.fit(data(), steps=9, progress=False)
    assert_identical_weights(plain.model, trainer.model)
    assert trainer._engine.minimizers[label].optimizer is (kept or trainer.optimizer)
    if own:
        assert int(kept.iterations) == 9 and len(kept.variables) == 2 + 2 * len(trainer.model.variables)


def test_variables_that_a_step_lists_follow_what_is_frozen_between_fits_and_in_callbacks():
    class Unfreeze(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.get_layer("block_1").trainable = batch >= 3

    plain, trainer = make(freeze=None), listed(freeze=None)
    for each in (plain, trainer):
        stream = data()
        each.fit(stream, steps=2, progress=False)
        each.model.get_layer("block_1").trainable = False
        each.fit(stream, steps=8, callbacks=[Unfreeze()], progress=False)
    assert_identical_weights(plain.model, trainer.model)


@pytest.mark.parametrize("stop", [8, pytest.param(4, marks=pytest.mark.long)])
def test_a_resume_of_listed_variables_is_exact(stop, tmp_path):
    """Step 8 freezes a layer that the first phase freezes, too, and that has slots from the phases between."""
    whole, first, second = (listed(own=True, freeze={0: "block_1", 3: (), 6: "block_1"}) for _ in range(3))
    whole.fit(data(), steps=10, progress=False)
    first.fit(data(), steps=stop, workdir=tmp_path, progress=False)
    second.fit(data(), steps=10, workdir=tmp_path, progress=False)
    assert_identical_weights(whole.model, second.model)


def test_layers_of_the_program_that_the_schedule_does_not_name_stay_as_they_are():
    frozen = model()
    frozen.get_layer("head").trainable = False
    trainer = Trainer(frozen, "sgd", {"error": mse()}, freeze={0: "block_1", 1: ()})
    assert [layer.trainable for layer in frozen.layers] == [False, True, False]
    before = [layer.kernel.numpy() for layer in frozen.layers]
    trainer.fit(data(), steps=2, progress=False)
    changed = [(layer.kernel.numpy() != old).any() for layer, old in zip(frozen.layers, before, strict=True)]
    assert changed == [True, True, False]


def test_phases_are_checked_without_touching_what_the_program_froze():
    """A layer inside a named one stays frozen: the check unfreezes and freezes all of them."""
    inner = keras.layers.Dense(2, name="inner")
    encoder = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2, name="outer")], name="enc")
    nested = keras.Sequential([keras.Input((3,)), encoder, keras.layers.Dense(1, name="head")])
    inner.trainable = False
    Trainer(nested, "sgd", {"error": mse()}, freeze={0: (), 3: "enc", 5: "head"})
    assert [inner.trainable, encoder.trainable, nested.get_layer("head").trainable] == [False, True, True]
    assert {v.path for v in nested.trainable_variables} == {v.path for v in nested.variables if "inner" not in v.path}


def test_a_name_alone_freezes_for_good_and_nested_models_as_a_whole():
    keras.utils.set_random_seed(0)
    encoder = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()], name="enc"
    )
    nested = keras.Sequential([keras.Input((3,)), encoder, keras.layers.Dense(1)])
    before = [array.copy() for array in encoder.get_weights()]
    Trainer(nested, "sgd", {"error": mse()}, freeze="enc").fit(data(), steps=3, progress=False)
    for old, new in zip(before, encoder.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)  # the moving statistics, too


def counting():
    """Counts updates, and those of each variable in the rows of one tensor."""

    def init(variables):
        return {"updates": tf.zeros([]), "each": tf.zeros([len(variables)])}

    def apply(gradients, state, variables, step):
        return gradients, {name: value + 1.0 for name, value in state.items()}

    return Stage("counting", init, apply)


def test_stages_keep_their_state_where_layers_are_frozen_and_unfrozen(tmp_path):
    """Momentum as a stage equals Keras's, and counts do not begin anew; both also after a resume in a later phase."""

    def made(momentum_of_keras=0.0, stages=()):
        optimizer = keras.optimizers.SGD(0.1, momentum_of_keras)
        return Trainer(model(), optimizer, losses={"error": mse()}, freeze=PHASES, stages=stages)

    by_keras, whole = made(0.9), made(stages=[momentum(), counting()])
    by_keras.fit(data(), steps=9, progress=False)
    whole.fit(data(), steps=9, progress=False)
    for one, other in zip(whole.model.get_weights(), by_keras.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for stop in (4, 9):
        parts = made(stages=[momentum(), counting()])
        parts.fit(data(), steps=stop, workdir=tmp_path, progress=False)
    assert_identical_weights(whole.model, parts.model)
    for trainer in (whole, parts):
        state = dict(trainer._engine.main.pipeline.own_stages.named_variables())
        assert state["counting/updates"].numpy() == 9.0
        assert sorted(state["counting/each"].numpy()) == [4, 4, 4, 4, 9, 9]  # 9 of the head; see `FROZEN`


def test_bad_input():
    for freeze, message in (
        ({5: "head"}, "a schedule is {first step: names of layers}, its steps are integers and begin with 0"),
        ({0: "head", -1: ()}, "its steps are integers and begin with 0"),
        ("decoder", "`freeze` has 'decoder', which is no layer of the model; its layers are"),
        ({0: "("}, r"which is not a regular expression"),
        (".*", r"`freeze` leaves nothing to train from step 0 on: \['\.\*'\] are all layers with trainable weights"),
        ({0: (), 2: ["block_.*", "head"]}, "`freeze` leaves nothing to train from step 2 on"),
    ):
        with pytest.raises(ValueError, match=message):
            make(freeze=freeze)
    with pytest.raises(TypeError, match="`freeze` has 3; it must be the name of a layer"):
        make(freeze=[3])
    for freeze in (3, {0: b"head"}):
        with pytest.raises(TypeError, match="it must be the name of a layer, a regular expression of names, or a list"):
            make(freeze=freeze)
    unbuilt = keras.Sequential()
    with pytest.raises(ValueError, match=r"its layers are none so far, because it is not built \(call it on a batch"):
        Trainer(unbuilt, "sgd", {"error": mse()}, freeze="head")
    with pytest.raises(ValueError, match="`trainer.freeze` was set after the trainer had been made"):
        trainer = make()
        trainer.freeze = None
        trainer.fit(data(), steps=1, progress=False)
