"""What a person sees: a bar on a terminal, plain lines elsewhere."""

import os
import pty
import re

import keras
import pytest

from tests.trainer.tools import dataset, dense_model, mse, regression
from trainer import Trainer, progress
from trainer.progress import Progress


@pytest.fixture
def terminal():
    """(a stream that is a terminal, a function that reads what was written to it)."""
    reader, writer = pty.openpty()
    os.set_blocking(reader, False)
    stream = os.fdopen(writer, "w")

    def read():
        text = b""
        while True:
            try:
                text += os.read(reader, 65536)
            except (BlockingIOError, OSError):
                return text.decode()

    yield stream, read
    stream.close()
    os.close(reader)


def test_a_terminal_gets_a_bar_with_eta_loss_and_throughput(terminal):
    stream, read = terminal
    bar = Progress(200, 0, stream=stream)
    bar.update(50, {"loss": 0.25, "examples/s": 1234.0})
    shown = read()
    assert shown.startswith("\r[██████·") and shown.count("█") == 6 and shown.count("·") == 18
    assert "step 50/200" in shown and "loss 0.25" in shown and "examples/s 1,234" in shown
    assert re.search(r"ETA \d+ s", shown)
    bar.message("a word in between")
    bar.update(200, {"loss": 0.125})
    bar.close(200, {})
    rest = read()
    assert "a word in between\r\n" in rest and "step 200/200" in rest and "ETA" not in rest.split("step 200/200")[-1]
    assert re.search(r"200 updates in \d+ s \([\d,.]+ per second\)", rest)


def test_a_narrow_terminal_is_not_wrapped(terminal, monkeypatch):
    stream, read = terminal
    monkeypatch.setenv("COLUMNS", "40")
    Progress(200, 0, stream=stream).update(50, {"loss": 0.25, "examples/s": 1234.0})
    assert len(read().lstrip("\r")) <= 39


def test_the_numbers_have_their_place_on_80_columns(terminal, monkeypatch):
    stream, read = terminal
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress.time, "monotonic", iter([0.0] + [3600.0] * 9).__next__)
    Progress(20_000, 0, stream=stream).update(12_000, {"loss": 0.0001234, "examples/s": 123456.0})
    shown = read().lstrip("\r").rstrip()
    assert len(shown) <= 79 and shown.startswith("[█") and "·]" in shown
    assert shown.endswith("step 12,000/20,000  ETA 40:00 min  loss 0.0001234  examples/s 123,456")


def test_elsewhere_there_are_plain_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_INTERVAL_SECONDS", 0.0)
    x, y = regression(32)
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    data = dataset(x, y, batch=8)
    trainer.fit(data.repeat(), steps=20, eval_dataset=data, eval_every=10)
    shown = capsys.readouterr().err
    assert "step 10/20" in shown and "step 10: loss" in shown and "20 updates in" in shown
    assert "\r" not in shown
    assert shown.count("step 20/20") == 1


def test_silence(caplog, capsys):
    x, y = regression(32)
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    with caplog.at_level("INFO", logger="absl"):
        trainer.fit(dataset(x, y, batch=8).repeat(), steps=20, progress=False)
    assert caplog.text == "" and capsys.readouterr() == ("", "")
