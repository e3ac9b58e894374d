"""Loggers get all that TensorBoard gets, and no row twice after a resume."""

import csv
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import looptape
from looptape import loggers
from looptape.trainer.loggers import interface
from looptape.trainer.loggers.services import Service
from looptape.trainer.summaries import event_writer
from tests.trainer.tools import dataset, linear_model, mse, read_events, regression

X, Y = regression(16)
DATA = dataset(X, Y, batch=8).repeat()


class Notes(loggers.Logger):
    def __init__(self):
        self.seen, self.opened, self.closed = [], [], 0

    def open(self, workdir, step):
        self.opened.append((workdir, step))

    def write(self, run, step, values):
        self.seen.append((run, step, values))

    def close(self):
        self.closed += 1


def fit(steps, workdir, given, **options):
    trainer = looptape.Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    held_out = dataset(X, Y, batch=8)
    options = {"log_every": 2, "eval_dataset": held_out, "eval_every": 4, "progress": False, **options}
    trainer.fit(DATA, steps=steps, workdir=workdir, loggers=given, **options)
    return trainer


def written(workdir):
    """{(run, step, tag): value} of the event files' scalars."""
    return {
        (run, step, tag): float(value)
        for run in ("train", "eval")
        for step, values in read_events(workdir / run)
        for tag, value in values.items()
        if np.asarray(value).dtype == np.float32 and np.ndim(value) == 0
    }


def test_a_logger_gets_every_scalar_that_tensorboard_gets(tmp_path):
    notes = Notes()
    fit(8, tmp_path, notes)
    found = {(run, step, tag): value for run, step, values in notes.seen for tag, value in values.items()}
    expected = written(tmp_path)
    assert found.keys() == expected.keys() and ("eval", 4, "loss/error") in found
    np.testing.assert_allclose([found[key] for key in expected], list(expected.values()), rtol=1e-6)
    assert (notes.opened, notes.closed) == ([(str(tmp_path), 0)], 1)


def test_vectors_pictures_and_texts_arrive_as_plain_values(tmp_path):
    notes, rng = Notes(), np.random.default_rng(0)
    model = keras.Sequential([keras.Input((4, 2)), keras.layers.GRU(2, name="gru"), keras.layers.Dense(1)])
    trainer = looptape.Trainer(model, "sgd", {"error": mse()}, probe_every=1)
    x = rng.normal(size=(4, 4, 2)).astype("float32")
    trainer.fit(tf.data.Dataset.from_tensors((x, x[:, 0, :1])).repeat(), steps=1, loggers=[notes], progress=False)
    values = {tag: value for _, _, each in notes.seen for tag, value in each.items()}
    np.testing.assert_array_equal(values["timestep/gru/state"], trainer._engine.timesteps.latest["gru"]["state"])
    assert tf.io.decode_png(values["timestep/gru/heatmap"].png).shape[-1] == 3
    assert isinstance(values["timestep/gru/horizon"], float)
    output = interface.Output("train", lambda: None, interface.Guarded([notes]))
    output.write(3, [event_writer.text("note", "**bold**")])
    assert notes.seen[-1] == ("train", 3, {"note": "**bold**"})


def rows(path):
    with open(path, newline="") as file:
        found = [(row["run"], int(row["step"]), row["tag"], float(row["value"])) for row in csv.DictReader(file)]
    return {(run, step, tag): value for run, step, tag, value in found}, len(found)


def lines(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    flat = [(each["run"], each["step"], tag, value) for each in found for tag, value in each["values"].items()]
    return {(run, step, tag): value for run, step, tag, value in flat}, len(flat)


@pytest.mark.parametrize("kind, name, read", [("CSV", "metrics.csv", rows), ("JSONLines", "metrics.jsonl", lines)])
def test_a_file_of_rows_has_no_row_twice_after_a_kill(kind, name, read, tmp_path):
    """Rows after the last checkpoint, and a line that is cut off, as a killed process leaves them."""
    fit(8, tmp_path / "whole", [getattr(loggers, kind)()])
    expected, count = read(tmp_path / "whole" / name)
    assert count == len(expected) and expected.keys() == written(tmp_path / "whole").keys()
    fit(4, tmp_path / "parts", [getattr(loggers, kind)()])
    path = tmp_path / "parts" / name
    late = {"CSV": "train,6,loss/error,9.0\ntrain,7,lo", "JSONLines": '{"run": "train", "step": 6, "values": {}}\n{"ru'}
    with open(path, "a") as file:
        file.write(late[kind])
    fit(8, tmp_path / "parts", [getattr(loggers, kind)()])
    found, count = read(path)
    assert count == len(found) and found.keys() == expected.keys()
    for key, value in expected.items():
        if "throughput" not in key[2]:
            assert found[key] == value, key


@pytest.mark.parametrize("kind, read", [("CSV", rows), ("JSONLines", lines)])
def test_rows_of_the_very_step_of_the_checkpoint_that_come_again_are_written_once(kind, read, tmp_path):
    """The last row of a run that was killed before its closing checkpoint."""
    path = tmp_path / "rows"
    for _ in range(2):
        logger = getattr(loggers, kind)(path)
        logger.open(None, 4)
        logger.write("train", 4, {"loss/error": 0.5})
        logger.write("eval", 4, {"loss/error": 0.25})
        logger.write("train", 5, {"loss/error": 0.125})
        logger.close()
    found, count = read(path)
    assert count == 3
    assert found == {
        ("train", 4, "loss/error"): 0.5,
        ("eval", 4, "loss/error"): 0.25,
        ("train", 5, "loss/error"): 0.125,
    }


class Watched(looptape.Trainer):
    on_spike = "record"

    def compute_losses(self, batch, training):
        outputs = self.model(batch[0], training=training)
        self.log_histogram("outputs", outputs)
        self.log_text("note", "**bold**")
        return {"error": tf.square(outputs - batch[1])[:, 0]}


def watched(workdir, given, steps=6):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.GRU(2, name="gru"), keras.layers.Dense(1, name="readout")]
    model = keras.Sequential([keras.Input((4, 2)), *layers], name="net")
    trainer = Watched(model, "sgd", probe_every=2, health_every=2, health=("histograms",))
    x = np.random.default_rng(0).normal(size=(4, 4, 2)).astype("float32")
    data = tf.data.Dataset.from_tensors((x, x[:, 0, :1])).repeat()
    trainer.fit(data, steps=steps, log_every=2, workdir=workdir, loggers=given, progress=False)
    return trainer


class Keeping(Service):
    """A service that keeps what it is sent."""

    name, package = "keeping", "json"

    def __init__(self, config=None):
        super().__init__(config)
        self.rows, self.begun, self.settings = [], [], None

    def _begin(self, known):
        self.begun.append(known)
        return known or "a"

    def _configure(self, values):
        self.settings = values

    def _send(self, step, values):
        self.rows += [(step, tag) for tag in values]


def test_everything_in_the_event_files_reaches_every_logger_at_every_step(tmp_path):
    """Health rows name their tags once; time steps, health, scalars and media of a step come in calls of their own."""
    notes, service = Notes(), Keeping()
    watched(tmp_path, [notes, service])
    events = {(step, tag) for step, values in read_events(tmp_path / "train") for tag in values}
    layout = {tag for _, tag in events if tag.startswith("custom_scalars") or tag.endswith("/rows")}
    expected = {(step, tag) for step, tag in events if tag not in layout and not tag.startswith("health/")}
    found = [(step, tag) for _, step, values in notes.seen for tag in values]
    assert len(found) == len(set(found))
    plain = {(step, tag) for step, tag in found if not tag.startswith("health/")}
    assert plain == expected and (6, "optimizer/update_ratio/largest") in plain and (6, "verdicts") in plain
    assert {(2, "outputs"), (6, "outputs"), (4, "note"), (4, "variables/gradient/net/readout/kernel")} <= plain
    assert sorted(service.rows) == sorted((step, f"train/{tag}") for step, tag in found)


def test_health_rows_and_histograms_arrive_as_plain_values(tmp_path):
    notes = Notes()
    trainer = watched(tmp_path, [notes])
    latest = {tag: value for _, step, values in notes.seen if step == 6 for tag, value in values.items()}
    expected = trainer.variable_health()
    for name in ("net/readout/kernel", "net/readout/bias"):
        found = latest[f"health/ratio/{name}"]
        assert found == pytest.approx(expected[""]["ratio"][name], rel=5e-3), "bfloat16 in the file"
    assert latest["outputs"].buckets[:, 2].sum() == 4, "elements of the output"
    assert latest["variables/gradient/net/readout/kernel"].buckets.shape == (30, 3)


def test_a_row_that_was_being_sent_when_the_process_died_is_neither_lost_nor_sent_twice(tmp_path):
    class Killed(BaseException):
        pass

    class Dying(Keeping):
        def __init__(self, arrives):
            super().__init__()
            self.arrives = arrives

        def _send(self, step, values):
            if step == 4:
                if self.arrives:
                    super()._send(step, values)
                raise Killed
            super()._send(step, values)

    for arrives in (True, False):
        workdir = tmp_path / str(arrives)
        workdir.mkdir()
        first = Dying(arrives)
        first.open(str(workdir), 0)
        first.write("train", 2, {"loss": 1.0})
        with pytest.raises(Killed):
            first.write("train", 4, {"loss": 0.5})

        class Again(Keeping):
            def _arrived(self, tag, step, first=first):
                return (step, tag) in first.rows

        again = Again()
        again.open(str(workdir), 2)
        for step, value in ((4, 0.5), (6, 0.25)):
            again.write("train", step, {"loss": value})
        again.close()
        assert [step for step, _ in first.rows + again.rows] == [2, 4, 6]
        assert again.begun == ["a"]


def test_without_a_work_directory_the_next_fit_continues_the_run_of_the_service():
    trainer = looptape.Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    service = Keeping({"learning_rate": 0.1})
    for steps in (4, 6):
        trainer.fit(DATA, steps=steps, log_every=2, loggers=service, progress=False)
    assert service.begun == [None, "a"]
    assert [step for step, tag in service.rows if tag == "train/loss/error"] == [2, 4, 6]
    service.open(None, 0)  # another trainer, which begins
    assert service.begun[-1] is None


def test_the_configuration_goes_to_every_logger_once(tmp_path):
    config = {"learning_rate": 0.1, "cell": "lstm, small", "layers": 2, "notes": "two\nlines"}
    own, service = Notes(), Keeping(config)
    own.config = config
    for steps in (4, 8):
        files = [loggers.CSV(config=config), loggers.JSONLines(config=config)]
        given = [*files, own, service] if steps == 4 else files
        fit(steps, tmp_path, given)
    assert own.seen[0] == ("config", 0, config) and service.settings == config
    with open(tmp_path / "metrics.csv", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["run"] == "config"]
    assert {row["tag"]: row["value"] for row in found} == {
        **{"learning_rate": "0.1", "cell": "lstm, small"},
        **{"layers": "2", "notes": "two lines"},
    }
    assert len(found) == 4
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["values"] for row in written if row["run"] == "config"] == [config]
    assert {row["step"] for row in written if row["run"] == "train"} == {2, 4, 6, 8}


def test_numbers_that_are_not_finite_and_vectors_in_json_lines(tmp_path):
    logger = loggers.JSONLines(tmp_path / "sub" / "rows.jsonl")
    logger.open(None, 0)
    values = {"a": float("nan"), "b": np.array([1.0, -np.inf]), "c": "text", "d": loggers.Picture(b"")}
    logger.write("train", 1, values)
    logger.close()
    [line] = (tmp_path / "sub" / "rows.jsonl").read_text().splitlines()
    assert json.loads(line)["values"] == {"a": "NaN", "b": [1.0, "-Infinity"], "c": "text"}


def test_a_logger_that_fails_does_not_stop_the_training(tmp_path):
    class Broken(loggers.Logger):
        def write(self, run, step, values):
            raise OSError("no space left")

    notes = Notes()
    with pytest.warns(UserWarning, match="The logger Broken failed in `write`: OSError: no space left. Training cont"):
        trainer = fit(8, tmp_path, [Broken(), notes])
    assert int(trainer.step) == 8 and notes.seen
    with pytest.warns(
        UserWarning, match=r"The logger Logger has no .*`write\(run, step, values\)`. Write one. Training c"
    ):
        fit(2, None, loggers.Logger(), eval_every=None)


@pytest.mark.parametrize("kind", [loggers.CSV, loggers.JSONLines])
def test_a_file_without_a_work_directory_is_refused_before_the_first_step(kind):
    trainer = looptape.Trainer(linear_model(), "sgd", {"error": mse()})
    with pytest.raises(
        ValueError, match=rf"^{kind.__name__}\(\) writes into the work directory, and there is none. Pass"
    ):
        trainer.fit(DATA, steps=2, loggers=kind(), progress=False)
    assert int(trainer.step) == 0


def test_what_is_not_a_logger_is_refused():
    with pytest.raises(TypeError, match="`loggers` has the class CSV; each must be a looptape.loggers.Logger"):
        fit(2, None, [loggers.CSV])
    with pytest.raises(TypeError, match="`loggers` has 'csv'; each must be"):
        fit(2, None, ["csv"])
    with pytest.raises(TypeError, match="`loggers` is 'csv'; each must be"):
        fit(2, None, "csv")
    with pytest.raises(ValueError, match=r"`loggers` has the same logger twice \(Notes, Notes\); every row would come"):
        fit(2, None, [Notes()] * 2)
    assert interface.check_loggers(None) == []


@pytest.mark.parametrize("kind", [loggers.CSV, loggers.JSONLines])
@pytest.mark.parametrize("content", ["name,age\nann,3\n", "a note"])
def test_a_file_of_somebody_else_is_not_replaced(kind, content, tmp_path):
    path = tmp_path / "people"
    path.write_text(content)
    with pytest.warns(UserWarning, match=rf"people' is not a file that {kind.__name__} wrote: it begins with '"):
        fit(2, None, [kind(path)], eval_every=None)
    assert path.read_text() == content


@pytest.mark.parametrize("kind, package", [("MLflow", "mlflow"), ("WandB", "wandb")])
def test_a_missing_package_is_named(kind, package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}, which is not installed"):
        getattr(loggers, kind)()
