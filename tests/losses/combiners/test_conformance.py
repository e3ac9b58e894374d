"""What must hold for every combiner that `losses` exports. A new one is tested by being exported."""

import functools
import inspect
import re
import time

import numpy as np
import pytest
import tensorflow as tf

from looptape import losses
from tests.losses.combiners import representative

CLASSES = [
    value
    for value in (getattr(losses, name) for name in losses.__all__)
    if inspect.isclass(value) and issubclass(value, losses.Combiner) and value is not losses.Combiner
]
SHORT = {"update_every": 1, "window": 2}  # so that something happens in a few updates
RANDOM = {"random_weights", "pcgrad", "gradvac", "momentum_config"}  # their draws, or turns, belong to positions
NO_MEMORY = {"weighted_sum", "log_sum", "geometric_mean", "stch", "mgda", "cagrad", "config", "upgrad", "dualproj"}
NO_MEMORY |= {"fairgrad", "nash_mtl", "imtl_g", "aligned_mtl", "db_mtl", "graddrop"}  # of coefficients
ALWAYS_ONE = {"graddrop"}  # it changes the gradients, see test_rewriting
every_combiner = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.name)
stateful = pytest.mark.parametrize("cls", [c for c in CLASSES if c is not losses.WeightedSum], ids=lambda c: c.name)

each_kind = pytest.mark.parametrize("cls", representative.every_combiner())  # a trace each: the others are long

NAMES = ("error", "penalty", "divergence")
RNG = np.random.default_rng(7)
LOSSES = np.exp(RNG.normal(size=(20, 3))).astype("float32")
AFTER = (LOSSES * np.exp(0.3 * RNG.normal(size=(20, 3)))).astype("float32")
SIZES = np.array([1.0, 10.0, 0.1], "float32")[:, None, None]
GRADIENTS = RNG.normal(size=(20, 3, 2, 4)).astype("float32") * SIZES
DATA = (LOSSES, AFTER, GRADIENTS)


def made(cls, names=NAMES, **arguments):
    """A new, built combiner."""
    short = {name: value for name, value in SHORT.items() if name in cls.arguments()}
    combiner = cls(**{**short, **arguments})
    combiner.build(names)
    return combiner


def one_update(combiner, values, after, gradients, present):
    """What the trainer does, in its order. Returns the coefficients and the total."""
    measured = combiner.measure([[g] for g in tf.unstack(gradients)]) if combiner.gradients_every else None
    coefficients = combiner.coefficients(values, present, measured)
    total = combiner.total(values, coefficients, present=present)
    combiner.advance(values, present, measured)
    if combiner.needs_losses_after:
        combiner.advance_after(values, after, present)
    return coefficients, total


class Machine:
    """A combiner, its update (traced for many uses, eager for few), and its state at the start."""

    def __init__(self, combiner, jit=False, traced=True):
        self.combiner, self.traces = combiner, 0
        self.start = self.state()
        self.step = tf.function(self.update, autograph=False, jit_compile=jit) if traced else self.update

    def update(self, *batch):
        self.traces += 1
        return one_update(self.combiner, *batch)

    def state(self):
        return [variable.numpy() for variable in self.combiner.variables]

    def named(self):
        return {variable.name: variable.numpy() for variable in self.combiner.variables}

    def run(self, updates, state=None, data=DATA, present=None, order=slice(None)):
        """The coefficients of some updates, from a given state on (the present one if left out)."""
        if state is not None:
            for variable, value in zip(self.combiner.variables, state, strict=True):
                variable.assign(value)
        count = len(self.combiner.names)
        mask = tf.constant([True] * count if present is None else present)
        seen = []
        for t in updates:
            coefficients, total = self.step(*(tf.constant(x[t][order]) for x in data), mask)
            assert np.isfinite(float(total)), (t, coefficients)
            seen.append(coefficients.numpy())
        return np.array(seen)

    def timed_run(self, updates):
        """The seconds each update takes."""
        times = [time.perf_counter()]
        for t in updates:
            self.run([t])
            times.append(time.perf_counter())
        return np.diff(times)


@functools.cache
def cached(cls):
    return Machine(made(cls))


def machine(cls):
    """One that is traced once for all tests, at its start."""
    shared = cached(cls)
    shared.run([], shared.start)
    return shared


def test_all_are_here():
    assert len(CLASSES) >= 28


@every_combiner
def test_names_and_needs(cls):
    assert re.fullmatch("[a-z]+(_[a-z]+)*", cls.name)
    assert [c.name for c in CLASSES].count(cls.name) == 1
    assert cls.needs in ("weights", "losses", "gradients")
    assert losses.combiner_from_name(cls.name).get_config() == cls().get_config()
    assert (cls().gradients_every == 1) or cls.needs != "gradients"


@every_combiner
def test_build_is_idempotent(cls):
    combiner = made(cls)
    before = [id(variable) for variable in combiner.variables]
    combiner.build(NAMES)
    assert [id(variable) for variable in combiner.variables] == before
    with pytest.raises(ValueError, match="was built for the losses.*Make a new combiner"):
        combiner.build(["other", "names", "altogether"])


@every_combiner
def test_too_few_losses(cls):
    few = NAMES[: cls.minimum_losses - 1]
    message = rf"given {len(few)} loss.*at least {cls.minimum_losses}.*For one loss use one of .*FAMO.*WeightedSum"
    with pytest.raises(ValueError, match=message):
        cls().build(few)


@every_combiner
def test_repeated_names(cls):
    with pytest.raises(ValueError, match="unique"):
        cls().build(["a", "a", "b"])


@every_combiner
def test_config_round_trip(cls):
    config = cls().get_config()
    assert set(config) == set(cls.arguments())
    copy = cls.from_config(config)
    assert type(copy) is cls and copy.get_config() == config
    changed = {name: 5 for name in ("warmup_steps", "seed", "window") if name in config}
    assert cls.from_config({**config, **changed}).get_config() == {**config, **changed}


@every_combiner
def test_variables_are_named_and_not_trained(cls):
    combiner = made(cls)
    for variable in combiner.variables:
        assert variable.dtype in (tf.float32, tf.int64, tf.bool) and not variable.trainable
    names = [variable.name for variable in combiner.variables]
    assert len(set(names)) == len(names)


@every_combiner
def test_coefficients_are_finite(cls):
    """In float64 where those of opposed gradients cancel; a combiner in turns only chooses a loss."""
    seen = machine(cls).run(range(6))
    exact = cls.needs == "gradients" and cls.minimum_losses == 2
    assert seen.dtype == (np.float64 if exact else np.float32) and seen.shape == (6, 3)
    assert np.isfinite(seen).all()


@every_combiner
@pytest.mark.parametrize("scale", [0.0, 1e-10, 1e-3, 1e10, 1e15])
def test_finite_at_any_scale(cls, scale):
    scaled = (
        LOSSES * np.float32(max(scale, 1e-10)),
        AFTER * np.float32(max(scale, 1e-10)),
        GRADIENTS * np.float32(scale),
    )
    shared = machine(cls)
    assert np.isfinite(shared.run(range(4), data=scaled)).all()
    assert all(np.isfinite(value.astype("float64")).all() for value in shared.state())


@every_combiner
def test_zero_and_negative_losses_do_not_poison_the_state(cls):
    rows = [[0.0, 1.0, 2.0], [0.0, 1.0, 0.0], [-1.0, 1.0, 0.0], [0.5, 1e-30, 2.0], [0.5, 1e15, 2.0], [0.5, 1.0, 2.0]]
    values = np.array(rows, "float32")
    shared = machine(cls)
    assert np.isfinite(shared.run(range(6), data=(values, values[::-1], GRADIENTS))).all()
    assert all(np.isfinite(value.astype("float64")).all() for value in shared.state())


@every_combiner
def test_coefficients_are_pure_and_advance_counts_one(cls):
    shared = machine(cls)
    shared.run(range(3))
    combiner, before = shared.combiner, shared.state()
    measured = combiner.measure([[tf.constant(g)] for g in GRADIENTS[3]])
    first = combiner.coefficients(tf.constant(LOSSES[3]), None, measured)
    np.testing.assert_array_equal(first, combiner.coefficients(tf.constant(LOSSES[3]), None, measured))
    for old, new in zip(before, shared.state(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert not combiner.variables or int(combiner.updates) == 3


@each_kind
def test_advance_takes_the_coefficients_that_were_used(cls):
    """The trainer hands them over, so that they are not computed twice; the state moves in the same way."""
    combiner, other = made(cls), made(cls)
    for t in range(3):
        values, present = tf.constant(LOSSES[t]), tf.constant([True, t != 1, True])
        measured = combiner.measure([[tf.constant(g)] for g in GRADIENTS[t]]) if combiner.gradients_every else None
        combiner.advance(values, present, measured, combiner.coefficients(values, present, measured))
        other.advance(values, present, measured)
    for left, right in zip(combiner.variables, other.variables, strict=True):
        np.testing.assert_array_equal(left, right)


@every_combiner
def test_coefficients_from_state_do_not_need_losses_or_presence(cls):
    if cls.needs != "weights":
        pytest.skip("needs more than its state")
    shared = machine(cls)
    shared.run(range(3))
    alone = shared.combiner.coefficients(None, None, None)
    full = shared.combiner.coefficients(tf.constant(LOSSES[3]), tf.constant([True, False, True]), None)
    np.testing.assert_array_equal(alone, full)


@each_kind
def test_xla_equals_plain_and_compiles_once(cls):
    """An index that depends on data makes XLA compile at every call without a retrace: the time tells."""
    plain, compiled = machine(cls), Machine(made(cls), jit=True)
    first, *others = compiled.timed_run(range(6))
    assert min(others) < 0.3 * first
    plain.run(range(6))
    for a, b in zip(plain.state(), compiled.state(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    again = compiled.run(range(6), compiled.start)
    np.testing.assert_allclose(again, plain.run(range(6), plain.start), rtol=2e-5, atol=1e-6)


@each_kind
def test_eager_equals_traced(cls):
    combiner, found = made(cls), []
    for t in range(3):
        found.append(one_update(combiner, *(tf.constant(x[t]) for x in DATA), tf.ones([3], tf.bool))[0])
    np.testing.assert_allclose(found, machine(cls).run(range(3)), rtol=1e-5, atol=1e-6)


@every_combiner
def test_no_retrace(cls):
    shared = machine(cls)
    shared.run(range(3))
    shared.combiner.freeze()
    shared.run(range(3))
    shared.combiner.unfreeze()
    shared.run(range(3), present=[True, False, True])
    assert shared.traces == 1


@every_combiner
@pytest.mark.parametrize("absent", [0, 1, 2])
def test_an_absent_loss_keeps_its_state(cls, absent):
    shared = machine(cls)
    shared.run(range(3))
    before = shared.named()
    values, after, gradients = (np.copy(x) for x in DATA)
    values[:, absent] = after[:, absent] = np.nan  # 0 / 0: what an empty mean may be
    gradients[:, absent] = 0
    seen = shared.run((3, 4, 5), data=(values, after, gradients), present=np.arange(3) != absent)
    assert np.isfinite(seen).all()
    if cls.needs != "weights":
        np.testing.assert_array_equal(seen[:, absent], before["weights:0"][absent])
    moved = not before
    for name, new in shared.named().items():
        old = before[name]
        assert np.isfinite(new.astype("float64")).all()
        if old.shape == (3,):
            np.testing.assert_array_equal(old[absent], new[absent], name)
            moved |= bool((old != new).any())
    assert (
        moved or cls.in_turns or cls.name in ALWAYS_ONE or (cls is losses.GradientBalance and absent == 0)
    )  # its reference


@every_combiner
def test_when_all_are_absent_only_the_counter_moves(cls):
    shared = machine(cls)
    shared.run(range(3))
    before = shared.named()
    assert np.isfinite(shared.run([3], present=[False] * 3)).all()
    for name, new in shared.named().items():
        if "updates" not in name:
            np.testing.assert_array_equal(before[name], new, name)


@each_kind
def test_the_others_are_weighted_as_if_the_absent_loss_did_not_exist(cls):
    if cls.needs == "weights":
        pytest.skip("coefficients from state alone do not know who is absent")
    seen = machine(cls).run(range(4), present=[True, False, True])[:, [0, 2]]
    two = Machine(made(cls, [NAMES[0], NAMES[2]]), traced=False).run(range(4), order=[0, 2])
    np.testing.assert_allclose(seen, two, rtol=1e-4, atol=1e-6)


@every_combiner
def test_one_loss_is_the_plain_sum(cls):
    if cls.minimum_losses > 1:
        pytest.skip("needs two losses")
    np.testing.assert_allclose(Machine(made(cls, NAMES[:1]), traced=False).run(range(4), order=[0]), 1.0, rtol=1e-6)


@each_kind
def test_order_of_losses_does_not_matter(cls):
    if cls.name in RANDOM:
        pytest.skip("random by position")
    order = [2, 0, 1]
    reference = {name: NAMES[0] for name in ("goal", "reference") if name in cls.arguments() and cls.name != "stch"}
    turned = Machine(made(cls, [NAMES[k] for k in order], **reference), traced=False).run(range(4), order=order)
    np.testing.assert_allclose(machine(cls).run(range(4))[:, order], turned, rtol=1e-4, atol=1e-6)


@each_kind
def test_restart_is_bit_equal(cls):
    """2N updates = N, saved, restored into a new one, N."""
    whole = machine(cls)
    whole.run(range(10))
    saved = whole.state()
    expected = whole.run(range(10, 20))
    fresh = cls.from_config(whole.combiner.get_config())
    fresh.build(NAMES)
    resumed = Machine(fresh)
    np.testing.assert_array_equal(resumed.run(range(10, 20), saved), expected)
    for a, b in zip(whole.state(), resumed.state(), strict=True):
        np.testing.assert_array_equal(a, b)


@every_combiner
def test_a_restart_that_forgets_goes_on_differently(cls):
    whole = machine(cls)
    whole.run(range(10))
    expected = whole.run(range(10, 20))
    forgotten = whole.run(range(10, 20), whole.start)
    assert (expected != forgotten).any() == (cls.name not in NO_MEMORY)


@stateful
def test_freeze_holds_the_last_coefficients(cls):
    if cls.in_turns or cls.name in ALWAYS_ONE:
        pytest.skip("has no coefficients to hold")
    shared = machine(cls)
    last = shared.run(range(4))[-1]
    shared.combiner.freeze()
    before = shared.named()
    last = last.astype("float32")  # as the state has them
    np.testing.assert_array_equal(shared.run(range(4, 8)), np.tile(last, (4, 1)))
    for name, new in shared.named().items():
        if "updates" not in name:
            np.testing.assert_array_equal(new, before[name], name)
    shared.combiner.unfreeze()
    assert (shared.run(range(8, 16))[-1] != last).any()


@each_kind
def test_warmup_is_the_plain_sum(cls):
    if cls is losses.WeightedSum:
        pytest.skip("is the plain sum")
    warm = Machine(made(cls, warmup_steps=3), traced=False)
    np.testing.assert_array_equal(warm.run(range(3)), np.ones((3, 3)))
    moved = (warm.run(range(3, 8))[-1] != 1).any() and (machine(cls).run(range(5)) != 1).any()
    assert moved == (cls.name not in ALWAYS_ONE)


@each_kind
def test_can_be_built_in_a_first_trace(cls):
    short = {name: value for name, value in SHORT.items() if name in cls.arguments()}
    combiner = cls(**short)

    @tf.function(autograph=False)
    def traced(values, gradients):
        combiner.build(NAMES)
        return combiner.coefficients(values, None, combiner.measure([[g] for g in tf.unstack(gradients)]))

    seen = traced(tf.constant(LOSSES[0]), tf.constant(GRADIENTS[0]))
    np.testing.assert_allclose(seen, machine(cls).run([0])[0], rtol=1e-5, atol=1e-6)
    assert all(isinstance(variable, tf.Variable) for variable in combiner.variables)


@stateful
def test_a_checkpoint_restores_it(cls, tmp_path):
    shared = machine(cls)
    shared.run(range(5))
    path = tf.train.Checkpoint(state=shared.combiner.variables).write(str(tmp_path / "state"))
    expected = shared.run(range(5, 9))
    shared.run([], shared.start)
    tf.train.Checkpoint(state=shared.combiner.variables).read(path).assert_consumed()
    np.testing.assert_array_equal(shared.run(range(5, 9)), expected)
