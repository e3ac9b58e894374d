"""What a person sees: a bar on a terminal, plain lines elsewhere."""

import os
import pty
import re
import time

import keras
import pytest
import tensorflow as tf

from looptape.trainer import Trainer
from looptape.trainer.loop import progress_bar
from looptape.trainer.loop.progress_bar import Progress
from tests.trainer.tools import dataset, dense_model, mse, regression


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
    assert read().startswith("\r[····") and bar.due(1) in (True, False)
    bar.due(50)
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
    assert max(map(len, read().split("\r"))) <= 39


def test_the_numbers_have_their_place_on_80_columns(terminal, monkeypatch):
    stream, read = terminal
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress_bar.time, "monotonic", iter([0.0, 0.0, 0.0] + [3600.0] * 9).__next__)
    bar = Progress(20_000, 0, stream=stream)
    bar.due(0)
    bar.due(12_000)
    bar.update(12_000, {"loss": 0.0001234, "examples/s": 123456.0})
    shown = read().split("\r")[-1].rstrip()
    assert len(shown) <= 79 and shown.startswith("[█") and "·]" in shown
    assert shown.endswith("step 12,000/20,000  ETA 40:00 min  loss 0.0001234  examples/s 123,456")


def test_the_eta_comes_from_recent_steps(terminal, monkeypatch):
    """A minute of compiling, then 10 steps per second, later 100: the ETA follows the present speed."""
    stream, read = terminal
    clock = {"now": 0.0}
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: clock["now"])
    bar = Progress(10_000, 0, stream=stream)
    assert "compiling …" in read()

    def shown_after(seconds, step):
        clock["now"] += seconds
        assert bar.due(step) or seconds < 0.2
        bar.update(step, {})
        return read()

    assert "step 4/10,000  compiling …" in shown_after(60, 4)
    assert "ETA 16:39 min" in shown_after(1, 14)  # 9,986 steps at 10 per second
    shown_after(10, 1014)
    shown_after(20, 3014)
    assert "ETA 1:00 min" in shown_after(10, 4014)  # 5,986 steps at 100 per second, without the first seconds


def test_elsewhere_there_are_plain_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "_LINE_INTERVAL_SECONDS", 0.0)
    x, y = regression(32)
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    data = dataset(x, y, batch=8)
    trainer.fit(data.repeat(), steps=20, eval_dataset=data, eval_every=10)
    shown = capsys.readouterr().err
    assert "step 10/20" in shown and "evaluation at step 10: loss" in shown and "20 updates in" in shown
    assert "\r" not in shown
    assert shown.count("step 20/20") == 1


def test_silence(caplog, capsys):
    x, y = regression(32)
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    with caplog.at_level("INFO", logger="absl"):
        trainer.fit(dataset(x, y, batch=8).repeat(), steps=20, progress=False)
    assert caplog.text == "" and capsys.readouterr() == ("", "")


def test_named_losses_metrics_and_the_epoch_are_shown(capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "_LINE_INTERVAL_SECONDS", 0.0)
    x, y = regression(32)
    losses = {"error": mse(), "size": lambda y, outputs: abs(outputs)}
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), losses, metrics={"mae": "mae"})
    history = trainer.fit(dataset(x, y, batch=8), epochs=2).history
    last = next(line for line in reversed(capsys.readouterr().err.splitlines()) if line.startswith("step 8/8"))
    shown = dict(re.findall(r"(\w+) ([\d./]+)", last))
    assert shown["epoch"] == "2/2"
    for name in ("loss", "error", "size", "mae"):
        assert float(shown[name]) == pytest.approx(history[name][-1], rel=1e-3)


def test_a_single_loss_is_shown_once(capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "_LINE_INTERVAL_SECONDS", 0.0)
    x, y = regression(32)
    Trainer(dense_model(), "sgd", {"error": mse()}).fit(dataset(x, y, batch=8).repeat(), steps=3)
    shown = capsys.readouterr().err
    assert "loss " in shown and "error " not in shown and "epoch" not in shown


@pytest.mark.parametrize("name", ["loss", "error"])
def test_a_single_loss_is_shown_once_whatever_its_name(name, capsys):
    trainer = Trainer(dense_model(), "sgd", {name: mse()})
    trainer.fit(dataset(*regression(16), batch=8), epochs=1)
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step 2/2")]
    assert re.search(r" loss [\d.]+ ", line) and " error " not in line, line


@pytest.mark.parametrize("kind", ["dataset", "function"])
def test_advice_on_slow_input_fits_where_the_batches_come_from(kind, capsys, monkeypatch):
    x, y = regression(16)

    def slow(*batch):
        time.sleep(0.15)
        return batch

    def episodes():
        for _ in range(8):
            yield slow(x, y)

    shapes = [tf.float32, tf.float32]
    data = tf.data.Dataset.from_tensors((x, y)).repeat(8).map(lambda *batch: tf.py_function(slow, batch, shapes))
    data = data.map(lambda a, b: (tf.ensure_shape(a, x.shape), tf.ensure_shape(b, y.shape)))
    trainer = Trainer(dense_model(), "sgd", {"error": mse()})
    trainer.fit(data if kind == "dataset" else episodes, steps=8, log_every=1)
    [advice] = [line for line in capsys.readouterr().err.splitlines() if "waiting for data" in line]
    assert ("`dataset.cache()`" in advice) == (kind == "dataset")
    assert ("environments side by side" in advice) == (kind == "function")
