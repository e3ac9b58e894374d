"""The summary names the losses, the stages and the logs of a trainer."""

from looptape.trainer import Trainer
from tests.trainer.tools import (
    dense_model,
    mse,
)


def test_the_summary_names_what_happens(capsys):
    trainer = Trainer(
        dense_model(), "adam", {"error": mse(), "size": mse()}, loss_weights={"error": 1, "size": 0.5}, clip_norm=2.0
    )
    trainer.summary()
    text = capsys.readouterr().out
    for part in ("21 trainable parameters", "size: MeanSquaredError, weight 0.5", "global norm of 2", "Adam.apply"):
        assert part in text
