"""The thirteen oracles of the design notes, over layers × (eager, graph, XLA) × (mask, none)."""

import numpy as np
import pytest

from tests.trainer.probing import tools
from tests.trainer.probing.tools import BATCH, LAYERS, MODES, TIME

# Compiling takes most of the time: these kinds stand for the others in the quick tests.
COMPILED = ("lstm", "own_cell")
TABLE = [
    pytest.param(kind, mode, masked, marks=[pytest.mark.long] if mode == "xla" and kind not in COMPILED else [])
    for kind in LAYERS
    for mode in MODES
    for masked in (False, True)
]
table = pytest.mark.parametrize(("kind", "mode", "masked"), TABLE)


def report_of(run, index=None):
    """The report of the layer, or of inner cell `index` of a stack."""
    names = list(run.report)
    return {k: v.numpy() for k, v in run.report[names[0] if len(names) == 1 else names[1 + index]].items()}


def in_input_time(run, values):
    return values[::-1] if run.layer.go_backwards else values


def as_reported(run, by_iteration):
    """[time, batch] by iteration → [batch, time] in input time, times the number of examples, NaN where masked."""
    values = in_input_time(run, by_iteration).T * BATCH
    return values if run.mask is None else np.where(run.mask, values, np.nan)


@table
def test_values_and_training_gradients_are_untouched(kind, mode, masked):
    run = tools.run(kind, mode, masked)
    for plain, probed in zip([*run.plain[:2], *run.plain[2]], [*run.probed[:2], *run.probed[2]], strict=True):
        if mode == "xla":
            np.testing.assert_allclose(probed, plain, rtol=1e-12, atol=1e-14)
        else:
            np.testing.assert_array_equal(probed, plain)


@table
def test_1_weight_gradients_of_the_steps_sum_to_the_whole(kind, mode, masked):
    run = tools.run(kind, mode, masked)
    assert len(run.sum_check) == len(run.layer.trainable_variables)
    for path, error in run.sum_check.items():
        assert error < 1e-14, path


@table
def test_2_everything_equals_an_unrolled_copy(kind, mode, masked):
    run = tools.run(kind, mode, masked)
    opinions, inputs = tools.opinion(kind, masked)
    for index, opinion in enumerate(opinions):
        report = report_of(run, index)
        expected = {
            "state": tools.norms(opinion.states),
            "hidden": tools.norms(opinion.states[:1]),
            "recurrent": tools.norms(opinion.recurrent),
            "external": tools.norms([opinion.external]),
        }
        if len(opinion.states) == 2:
            expected["cell"] = tools.norms(opinion.states[1:])
        if index == 0:
            expected["input"] = tools.norms([inputs])
        for name, values in expected.items():
            np.testing.assert_allclose(report[name], as_reported(run, values), rtol=1e-6, err_msg=name)
        for j, state in enumerate(opinion.states):
            full = np.moveaxis(report[f"state_gradient/{j}"], 0, 1)
            valid = np.ones([TIME, BATCH], bool) if run.mask is None else run.mask.T
            np.testing.assert_allclose(full[valid], in_input_time(run, state)[valid] * BATCH, rtol=1e-5, atol=1e-9)
        for path, steps in opinion.weights.items():
            name = path.split("/")[-1]
            np.testing.assert_allclose(
                report[f"weight_gradient/{name}"], in_input_time(run, steps), rtol=1e-5, atol=1e-9
            )
            squares = np.sum(np.square(steps), axis=tuple(range(1, steps.ndim)))
            np.testing.assert_allclose(report[f"weight/{name}"], in_input_time(run, np.sqrt(squares)), rtol=1e-6)


@table
def test_3_state_gradient_is_external_plus_recurrent(kind, mode, masked):
    """As vectors, of which norms alone cannot tell. e_t and r_t come from the second opinion."""
    run = tools.run(kind, mode, masked)
    if masked:
        pytest.skip("a masked time step passes a gradient on that is neither")
    opinions, _ = tools.opinion(kind, masked)
    for index, opinion in enumerate(opinions):
        report = report_of(run, index)
        for j, sent in enumerate(opinion.recurrent):
            expected = np.concatenate([sent[1:], np.zeros_like(sent[:1])])
            expected = (expected + opinion.external if j == 0 else expected) * BATCH
            found = np.moveaxis(report[f"state_gradient/{j}"], 0, 1)
            np.testing.assert_allclose(found, in_input_time(run, expected), rtol=1e-5, atol=1e-9)


@table
def test_10_projections_of_the_steps_on_the_whole_sum_to_one(kind, mode, masked):
    run = tools.run(kind, mode, masked)
    report = report_of(run, 0)
    for variable, whole in zip(run.layer.trainable_variables, run.probed[2], strict=True):
        if "stack" in kind and "lstm" not in variable.path:
            continue
        steps = report[f"weight_gradient/{variable.name}"]
        shares = np.sum(steps * whole.numpy(), axis=tuple(range(1, steps.ndim))) / np.sum(np.square(whole))
        assert np.sum(shares) == pytest.approx(1.0, abs=1e-5)


@table
def test_12_the_first_step_uses_no_recurrent_kernel_after_a_zero_state(kind, mode, masked):
    run = tools.run(kind, mode, masked)
    if kind in ("own_cell", "stack"):
        pytest.skip("its weights are used otherwise at the first step, too")
    steps = in_input_time(run, report_of(run)["weight/recurrent_kernel"])
    assert steps[0] == 0 and np.all(steps[1:] > 0)
