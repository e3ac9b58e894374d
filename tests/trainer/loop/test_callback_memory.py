"""Callbacks after a kill and a resume: memory is kept, options are those they were made with."""

import collections
import csv
import dataclasses
import enum
import json
import random
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.loop import callback_memory
from tests.reliability.tools import Killed, Killer
from tests.trainer.tools import dataset, linear_model, mse, regression

X, Y = regression(24)


class Diary(keras.callbacks.Callback):
    """Lists, private counters, and options that look like counters."""

    def __init__(self, stop_at, label="first"):
        super().__init__()
        self.stop_at, self._label = stop_at, label
        self.begun, self._count, self.best = [], 0, {"epoch": None}
        self.recent = collections.deque(maxlen=3)

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self._count += 1
        self.recent.append(float(logs["val_loss"]))
        self.best["epoch"] = epoch
        if self._count >= self.stop_at:
            self.model.stop_training = True


def fit(trainer, workdir, callbacks, steps=20):
    options = {"eval_dataset": dataset(X, Y, batch=24), "eval_every": 4, "checkpoint_every": 6, "progress": False}
    return trainer.fit(dataset(X, Y, batch=4).repeat(), steps=steps, workdir=workdir, callbacks=callbacks, **options)


def make():
    return Trainer(linear_model(), keras.optimizers.SGD(0.01), {"error": mse()})


def lines(path):
    with open(path) as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(whole run, resumed run) as (history, diary, rows of the CSV file).

    Killed twice: at 17, after a row that comes again, for the checkpoint is of 12; at 19, for 18 is inside an epoch.
    """
    found = []
    for killed in (False, True):
        directory = tmp_path_factory.mktemp("killed" if killed else "whole")
        for step in (17, 19) if killed else ():
            trainer, logger = make(), keras.callbacks.CSVLogger(directory / "log.csv")
            with pytest.raises(Killed):
                fit(trainer, directory, [Diary(60, "old"), Diary(50, "old"), logger, Killer(trainer, step)])
            logger.csv_file.close()  # a real kill would
        diary, logger = Diary(100), keras.callbacks.CSVLogger(directory / "log.csv")
        history = fit(make(), directory, [Diary(100), diary, logger])
        found.append((history, diary, lines(directory / "log.csv")))
    return found


def test_lists_and_private_counters_are_kept_and_epochs_begin_once(runs):
    for _, diary, _ in runs:
        assert diary.begun == [0, 1, 2, 3, 4] and diary._count == 5 and diary.best == {"epoch": 4}
    assert list(runs[0][1].recent) == pytest.approx(list(runs[1][1].recent))
    assert isinstance(runs[1][1].recent, collections.deque)


def test_options_are_those_of_the_constructor(runs):
    assert runs[1][1].stop_at == 100 and runs[1][1]._label == "first"


def test_history_and_csv_have_the_whole(runs):
    (whole, _, expected), (resumed, _, rows) = runs
    assert resumed.epoch == whole.epoch == [0, 1, 2, 3, 4]
    assert resumed.history.keys() == whole.history.keys()
    for name, values in whole.history.items():
        assert resumed.history[name] == pytest.approx(values, rel=1e-6)
    assert [row["epoch"] for row in rows] == [row["epoch"] for row in expected] == list("01234")
    assert float(rows[2]["loss"]) == pytest.approx(float(expected[2]["loss"]), rel=1e-6)


def test_nothing_to_do_gives_the_history_of_the_checkpoint(tmp_path):
    history = fit(make(), tmp_path, [], steps=8).history
    assert fit(make(), tmp_path, [], steps=8).history == history != {}


def test_a_callback_more_or_less_leaves_the_others_their_memory(tmp_path):
    fit(make(), tmp_path, [keras.callbacks.TerminateOnNaN(), Diary(100)], steps=8)
    diary = Diary(100)
    fit(make(), tmp_path, [diary], steps=12)
    assert diary.begun == [0, 1, 2]


def test_a_second_fit_of_one_callback_object_is_kept_whole(tmp_path):
    trainer, diary = make(), Diary(100)
    fit(trainer, tmp_path, [diary], steps=8)
    fit(trainer, tmp_path, [diary], steps=12)
    resumed = Diary(100)
    fit(make(), tmp_path, [resumed], steps=16)
    assert resumed.begun == [0, 1, 2, 3]


@dataclasses.dataclass
class Record:
    epoch: int
    values: list = dataclasses.field(default_factory=list)


class Best:
    """An object of one's own, with a member that no checkpoint can hold."""

    def __init__(self):
        self.value, self.lock = 0.0, threading.Lock()


Point = collections.namedtuple("Point", "x y")


class Kind(enum.Enum):
    OLD = 1
    NEW = 2


class Collector(keras.callbacks.Callback):
    """Memory of every kind, changed at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.counter, self.lists = collections.Counter(), collections.defaultdict(list)
        self.point, self.points, self.records, self.best, self.kind = Point(0, 0), [], [], Best(), Kind.OLD
        self.average = [np.zeros(5000, "float32")]
        self.random, self.numpy, self.legacy = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
        self.variable, self.metric = tf.Variable(0.0), keras.metrics.Mean()
        self.frozen, self.raw, self.complex, self.tensor = frozenset(), b"", 0j, tf.constant(0.0)
        self.layer = keras.layers.Dense(1)
        self.layer.build([None, 2])

    def on_epoch_end(self, epoch, logs=None):
        self.counter["epochs"] += 1
        self.lists["epochs"].append(epoch)
        self.point = Point(epoch, 1)
        self.points.append(self.point)
        self.records.append(Record(epoch, [epoch]))
        self.best.value += 1.0
        self.kind = Kind.NEW
        self.average = [self.average[0] + epoch]
        self.drawn = self.random.random(), self.numpy.random(), self.legacy.rand()
        self.variable.assign_add(1.0)
        self.metric.update_state(epoch)
        self.frozen, self.raw = self.frozen | {epoch}, self.raw + b"x"
        self.complex, self.tensor = self.complex + 1j, self.tensor + 1.0
        self.layer.bias.assign_add([1.0])

    def seen(self):
        found = {name: value for name, value in vars(self).items() if name not in ("model", "_model", "params")}
        found |= {"best": self.best.value, "average": self.average[0].tolist(), "layer": self.layer.bias.numpy().item()}
        found |= {
            "variable": self.variable.numpy(),
            "metric": float(self.metric.result()),
            "tensor": float(self.tensor),
        }
        return {name: value for name, value in found.items() if name not in ("random", "numpy", "legacy")}


def test_memory_of_every_kind_comes_back(tmp_path):
    whole, resumed = Collector(), Collector()
    fit(make(), tmp_path / "whole", [whole], steps=16)
    fit(make(), tmp_path / "cut", [Collector()], steps=8)
    fit(make(), tmp_path / "cut", [resumed], steps=16)
    assert resumed.seen() == whole.seen() and resumed.counter["epochs"] == 4
    assert isinstance(resumed.counter, collections.Counter) and resumed.lists["new"] == []
    assert resumed.best.lock is not None


def test_what_cannot_be_kept_is_named_once(tmp_path):
    class Opening(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.lock = threading.Lock()

    message = r"Opening changes `lock` \(lock\), which a checkpoint cannot hold"
    with pytest.warns(UserWarning, match=message) as found:
        fit(make(), tmp_path, [Opening()], steps=16)
    assert sum("checkpoint cannot hold" in str(each.message) for each in found) == 1


VALUES = [
    *(None, True, 3, 0.1, "text", [1, [2.5]], (1, "a"), {3, 4}, {"a": 1, 2: [None]}),
    collections.deque([1, 2]),
    np.float32(0.5),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back_as_they_were(value):
    found = callback_memory.decode(json.loads(json.dumps(callback_memory.encode(value))))
    assert found == value and (type(found) is type(value) or isinstance(value, np.generic))


def test_arrays_come_back_and_objects_are_left_out():
    array = np.array([[1.5, 2.0]], np.float32)
    found = callback_memory.decode(json.loads(json.dumps(callback_memory.encode(array))))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == np.float32
    with pytest.raises(TypeError, match="object cannot be kept"):
        callback_memory.encode([object()])
