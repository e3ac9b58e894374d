"""The summary names the losses, the stages and the logs of a trainer."""

import keras
import pytest

from looptape.trainer import Trainer
from tests.trainer.tools import dataset, dense_model, mse, regression


def test_the_summary_names_what_happens(capsys):
    trainer = Trainer(
        dense_model(), "adam", {"error": mse(), "size": mse()}, loss_weights={"error": 1, "size": 0.5}, clip_norm=2.0
    )
    trainer.summary()
    text = capsys.readouterr().out
    for part in ("21 trainable parameters", "size: MeanSquaredError, weight 0.5", "global norm of 2", "Adam.apply"):
        assert part in text


def summary(capsys, trainer):
    capsys.readouterr()
    trainer.summary()
    return capsys.readouterr().out


class Settings(Trainer):
    max_skipped = 7


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("skip", "finite check (an update that fails is skipped; 7 in a row stop the run)"),
        ("raise", "finite check (an update that fails is not applied and stops the run)"),
        ("restore", "an update that fails is skipped; 7 in a row return the run to its last good checkpoint)"),
    ],
)
def test_the_finite_check_does_what_the_summary_says(policy, expected, capsys):
    trainer = Settings(dense_model(), "adam", {"error": mse()})
    trainer.on_nonfinite = policy
    text = summary(capsys, trainer)
    assert expected in text and "spike" not in text and "float16" not in text


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("record", "an update is recorded, then applied"),
        ("skip", "an update is skipped"),
        ("raise", "an update is not applied and stops the run"),
        ("restore", "the run returns to its last checkpoint"),
    ],
)
def test_the_guard_of_spikes_is_listed(policy, expected, capsys):
    trainer = Trainer(dense_model(), "adam", {"error": mse()})
    trainer.on_spike, trainer.spike_threshold, trainer.spike_window = policy, 8.0, 50
    text = summary(capsys, trainer)
    assert f"spike guard (above 8 deviations from the median of 50 updates {expected})" in text
    assert text.index("finite check") < text.index("spike guard") < text.index("Adam.apply")


def test_the_number_of_micro_batches_is_that_of_the_next_update(capsys):
    trainer = Trainer(dense_model(), "sgd", {"error": mse()}, accumulation_steps={0: 1, 2: 4})
    assert "1. 1 micro-batch(es)" in summary(capsys, trainer)
    for steps, expected in ((1, 1), (4, 4)):
        trainer.fit(dataset(*regression(), batch=4).repeat(), steps=steps, progress=False)
        assert f"1. {expected} micro-batch(es)" in summary(capsys, trainer)


def test_loss_scaling_is_listed_before_fit(capsys):
    layers = [keras.Input((3,)), keras.layers.Dense(1, dtype="mixed_float16")]
    trainer = Trainer(keras.Sequential(layers), "sgd", {"error": mse()})
    assert "loss scaling for float16" in summary(capsys, trainer)
