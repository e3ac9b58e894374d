"""Sorting: its data against NumPy, its model, and that a small one learns it and says so."""

import numpy as np
import pytest

from looptape import launch
from looptape.experiments.sorting import NORMS, Config, build, sequences


def test_targets_are_the_digits_in_order():
    drawn, targets = (value.numpy() for value in sequences(300, 7, 5, [1, 2]))
    np.testing.assert_array_equal(np.sort(drawn, axis=1), targets)
    assert set(np.unique(drawn)) == set(range(5))


@pytest.mark.parametrize("norm", NORMS)
def test_a_model_of_nothing_knows_nothing(norm):
    experiment = build(Config(length=4, digits=6, units=8, heads=2, layers=1, norm=norm, eval_examples=10))
    model = experiment.trainer.model
    assert model(np.zeros([2, 4], "int32")).shape == (2, 4, 6)
    for weight in model.get_layer("logits").weights:
        weight.assign(np.zeros(weight.shape, "float32"))
    result = experiment.trainer.evaluate(experiment.eval_dataset)["cross_entropy"]
    assert result == pytest.approx(experiment.goals[0].baseline, rel=1e-5)


def test_a_small_one_learns_it_and_shows_its_health():
    made = []
    config = Config(length=4, digits=6, units=16, heads=2, layers=1, steps=120, warmup_steps=10, learning_rate=1e-2)
    results = launch.run(config, lambda config: made.append(build(config)) or made[0], show=False)
    assert results["accuracy"] > 0.6 and results["cross_entropy"] < 1.0
    trainer = made[0].trainer
    drawn, targets = (value.numpy() for value in sequences(200, 4, 6, [7, 7]))
    right = (trainer.model(drawn).numpy().argmax(axis=-1) == targets).mean()
    assert right == pytest.approx(results["accuracy"], abs=0.1)
    health = trainer.variable_health()[""]
    assert health["positions"]["attention_0"].shape == (4,) and set(health["dead"]) == {"hidden_0"}
    assert [finding.word for finding in trainer.diagnose()] == ["healthy", "healthy"], "layers and positions"
