"""Pipelines that do not resume exactly are named before the first step; the others are not."""

import gc
import time
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import looptape
from looptape import Trainer
from looptape.trainer.data.resumability import loose_ends
from looptape.trainer.data.source import Source, open_source
from looptape.trainer.distribution import workers
from tests.trainer.tools import assert_identical_weights, dense_model, linear_model, mse, regression

X, Y = regression(24)
POLICY = tf.data.experimental.ExternalStatePolicy


def with_options(dataset, **values):
    options = tf.data.Options()
    for name, value in values.items():
        setattr(options, name, value)
    return dataset.with_options(options)


def pairs():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def same(x, y):
    return x, y


def few(x, y):
    return tf.data.Dataset.from_tensors((x, y)).repeat(2)


def noisy(x, y):
    return x + tf.random.normal([3]), y


def noisy_at_times(x, y):
    return tf.cond(y[0] > 0, lambda: x + tf.random.normal([3]), lambda: x), y


def through_python(x, y):
    return tf.ensure_shape(tf.numpy_function(lambda a: a, [x], tf.float32), [3]), y


INEXACT = {
    "map": (lambda: pairs().map(same, 2, deterministic=False), "ParallelMapDataset with `deterministic=False`"),
    "interleave": (
        lambda: pairs().interleave(few, cycle_length=2, num_parallel_calls=2, deterministic=False),
        "ParallelInterleaveDatasetV4 with `deterministic=False`",
    ),
    "map inside of flat_map": (
        lambda: pairs().flat_map(lambda x, y: few(x, y).map(same, 2, deterministic=False)),
        "ParallelMapDatasetV2 with `deterministic=False`",
    ),
    "map before others": (
        lambda: pairs().map(same, 2, deterministic=False).shuffle(4, seed=1).repeat(2).prefetch(1),
        "ParallelMapDataset with `deterministic=False`",
    ),
    "options, map": (
        lambda: with_options(pairs().map(same, 2), deterministic=False),
        "ParallelMapDataset does not keep the order, as `deterministic` is False",
    ),
    "options, interleave": (
        lambda: with_options(pairs().interleave(few, cycle_length=2, num_parallel_calls=2), deterministic=False),
        "ParallelInterleaveDatasetV4 does not keep the order, as `deterministic` is False",
    ),
    "ignored randomness": (
        lambda: with_options(pairs().map(noisy), experimental_external_state_policy=POLICY.IGNORE),
        "the state of RandomStandardNormal is not saved",
    ),
    "ignored randomness in a branch": (
        lambda: with_options(pairs().map(noisy_at_times), experimental_external_state_policy=POLICY.IGNORE),
        "the state of RandomStandardNormal is not saved",
    ),
    "randomness that warns on another channel": (
        lambda: with_options(pairs().map(noisy), experimental_external_state_policy=POLICY.WARN),
        "the state of RandomStandardNormal is not saved",
    ),
    "ignored Python": (
        lambda: with_options(pairs().map(through_python), experimental_external_state_policy=POLICY.IGNORE),
        "the state of PyFunc is not saved",
    ),
}

EXACT = {
    "plain": pairs,
    "parallel": lambda: pairs().map(same, 2).interleave(few, cycle_length=2, num_parallel_calls=2),
    "said so": lambda: with_options(pairs().map(same, 2, deterministic=True), deterministic=False),
    "nothing parallel": lambda: with_options(pairs().map(same), deterministic=False),
    "nothing to ignore": lambda: with_options(
        pairs().shuffle(9, seed=1), experimental_external_state_policy=POLICY.IGNORE
    ),
    "stateless": lambda: with_options(
        pairs().map(lambda x, y: (x + tf.random.stateless_normal([3], [1, 2]), y)),
        experimental_external_state_policy=POLICY.IGNORE,
    ),
}


@pytest.mark.parametrize("kind", INEXACT)
def test_what_a_resumed_run_would_see_otherwise_is_named_before_the_first_step(kind, tmp_path):
    make, named = INEXACT[kind]
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    dataset = make().batch(4)
    with warnings.catch_warnings(), pytest.raises(UserWarning) as caught:
        warnings.simplefilter("error", UserWarning)
        trainer.fit(dataset, steps=2, workdir=tmp_path, progress=False)
    assert "A resumed run will not get the same batches" in str(caught.value) and named in str(caught.value)
    assert trainer._engine.counters.step == 0
    with warnings.catch_warnings():  # said once: the second attempt trains
        warnings.simplefilter("error", UserWarning)
        trainer.fit(dataset, steps=2, workdir=tmp_path, progress=False)
    assert trainer._engine.counters.step == 2


@pytest.mark.parametrize("kind", EXACT)
def test_nothing_is_said_about_a_pipeline_that_goes_on_exactly(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert Source(None, EXACT[kind]().batch(4)).checkpointable()


def test_large_arrays_are_not_copied_for_it(monkeypatch):
    """Ten seconds for a gigabyte otherwise; only an interleave over them stays unknown then."""
    monkeypatch.setattr(tf.raw_ops, "DatasetToGraphV2", lambda **_: pytest.fail("copies the data"))
    large = tf.data.Dataset.from_tensor_slices(np.zeros([3000, 1000], "float32"))
    assert "ParallelMapDataset" in loose_ends(large.map(lambda x: x, 2, deterministic=False))[0]
    few = lambda x: tf.data.Dataset.from_tensors(x)  # noqa: E731
    assert loose_ends(large.interleave(few, num_parallel_calls=2, deterministic=False)) == []


def test_without_a_fixed_order_what_gets_ready_late_comes_late():
    """Why there is a warning: the order hangs on the clock."""

    def wait(x):
        time.sleep(0.5 if x == 0 else 0.0)
        return x

    def slow_first(x):
        return tf.numpy_function(wait, [x], tf.int64)

    free = tf.data.Dataset.range(6).map(slow_first, 2, deterministic=False)
    kept = tf.data.Dataset.range(6).map(slow_first, 2, deterministic=True)
    assert [int(x) for x in kept] == list(range(6)) != [int(x) for x in free]


def recorder(seen):
    class Recording(Trainer):
        def compute_losses(self, batch, training):
            x, y = batch
            if training:
                tf.py_function(lambda x: seen.append(x.numpy()[:, 0].tolist()), [x], [])
            return {"error": tf.square(self.model(x) - y)[:, 0]}

    return Recording(linear_model(1), keras.optimizers.SGD(0.0))


def torch_tensor(array):
    return pytest.importorskip("torch").from_numpy(array)


def test_the_same_arrays_in_another_tuple_continue():
    """Four calls with new tuples of the same arrays: one copy of them, and each pass has an order of its own."""
    x, y, seen = np.arange(8, dtype="float32")[:, None], np.zeros([8, 1], "float32"), []
    trainer = recorder(seen)
    for call in range(1, 5):
        trainer.fit((x, y), steps=3 * call, batch_size=4, progress=False)
    assert len(trainer._engine.sources) == 1
    passes = [sum(seen[2 * i : 2 * i + 2], []) for i in range(6)]
    assert all(sorted(each) == list(range(8)) for each in passes)
    assert len({tuple(each) for each in passes}) > 4


def test_other_arrays_in_every_call_do_not_pile_up():
    trainer, alive = recorder([]), []
    for call in range(1, 7):
        x, y = np.full([8, 1], float(call), "float32"), np.zeros([8, 1], "float32")
        trainer.fit((x, y), steps=call, batch_size=4, progress=False)
        alive.append(weakref.ref(list(trainer._engine.sources.values())[-1]))
    gc.collect()
    assert [ref() is not None for ref in alive] == [False] * 4 + [True] * 2


def test_other_datasets_and_functions_in_every_call_do_not_pile_up():
    trainer = Trainer(linear_model(), "sgd", {"error": "mse"})
    kept = tf.data.Dataset.from_tensor_slices((np.ones((4, 3), "float32"), np.ones((4, 1), "float32"))).batch(4)
    kept = kept.repeat()
    for steps in range(1, 8):
        data = [kept, kept.take(1), lambda: iter(kept.take(1))][steps % 3]
        trainer.fit(data, steps=steps, progress=False)
    assert len(trainer._engine.sources) == 4
    assert any(source.data is kept for source in trainer._engine.sources.values()), "among the latest"


def test_another_batch_size_of_the_same_arrays_holds():
    x, y, seen = np.arange(8, dtype="float32")[:, None], np.zeros([8, 1], "float32"), []
    trainer = recorder(seen)
    trainer.fit((x, y), steps=1, batch_size=4, progress=False)
    trainer.fit((x, y), steps=2, batch_size=2, progress=False)
    trainer.fit((x, y), epochs=1, batch_size=8, progress=False)
    assert [len(batch) for batch in seen] == [4, 2, 8]


@pytest.mark.parametrize("kind", [np.asarray, torch_tensor])
def test_arrays_that_were_written_to_are_read_again(kind):
    """As `keras.Model.fit` does: a buffer of examples that is filled anew between two calls."""
    x, y, seen = np.zeros([200_000, 1], "float32"), np.zeros([200_000, 1], "float32"), []
    trainer, arrays = recorder(seen), (kind(x), kind(y))
    trainer.fit(arrays, steps=1, batch_size=200_000, progress=False)
    x[7] = 5.0
    trainer.fit(arrays, steps=2, batch_size=200_000, progress=False)
    assert [sum(batch) for batch in seen] == [0.0, 5.0]
    assert len(trainer._engine.sources) == 2


def test_a_batch_size_of_0_is_refused():
    with pytest.raises(ValueError, match="`batch_size` is 0; it must be at least 1"):
        recorder([]).fit((np.ones([8, 1]), np.ones([8, 1])), steps=1, batch_size=0)


# ---- Pipelines that shard themselves.


def test_sharded_data_train_alone_and_resume(tmp_path):
    x, y = regression()
    seen = []

    def shard(rank, workers):
        seen.append((rank, workers))
        return tf.data.Dataset.from_tensor_slices((x, y)).shard(workers, rank).shuffle(32, seed=1).batch(5)

    def run(steps, workdir):
        trainer = Trainer(linear_model(), keras.optimizers.Adam(0.01), {"error": "mse"})
        trainer.fit(looptape.ShardedData(shard), steps=steps, workdir=workdir, progress=False)
        return trainer.model

    whole = run(17, tmp_path / "whole")
    run(9, tmp_path / "parts")
    assert_identical_weights(whole, run(17, tmp_path / "parts"))
    assert set(seen) == {(0, 1)}


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda data: data.shuffle(32).batch(5), "a shuffle has no seed"),
        (lambda data: data.map(lambda x: x + tf.random.normal([3])).batch(5), "RandomStandardNormal has a state"),
        (lambda data: data.map(tf.abs, 2, deterministic=False).batch(5), "with `deterministic=False`"),
        (lambda data: data.shuffle(32, seed=1).batch(5), None),
    ],
)
def test_pipelines_of_sharded_data_that_give_other_batches_after_a_resume_are_named(make, told):
    tf.random.set_seed(None)
    data = looptape.ShardedData(lambda rank, workers: make(tf.data.Dataset.from_tensor_slices(regression()[0])))
    source = open_source({}, data, 32, True, workers.Alone())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not source.checkpointable() and not source.checkpointable()
    messages = [str(each.message) for each in caught]
    assert len(messages) == bool(told) and all("`ShardedData` and will not get" in m and told in m for m in messages)


@pytest.fixture
def slow_end(monkeypatch):
    """Ending an iterator takes a second, as with TensorFlow's tuning thread asleep; a list of the ends."""
    ended, make = [], tf.raw_ops.MakeIterator

    def slow(**arguments):
        time.sleep(1.0)
        make(**arguments)
        ended.append(arguments["iterator"])

    monkeypatch.setattr(tf.raw_ops, "MakeIterator", slow)
    return ended


def seconds(function):
    started = time.monotonic()
    function()
    return time.monotonic() - started


def wait_for(condition, limit=20.0):
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_training_does_not_wait_for_the_end_of_an_iterator(slow_end):
    source = Source(None, pairs().batch(4).repeat())
    assert seconds(source.close) < 0.8
    assert wait_for(lambda: slow_end)


def test_an_evaluation_does_not_wait_for_the_end_of_its_iterator(slow_end):
    trainer = Trainer(linear_model(), "sgd", {"error": "mse"})
    trainer.evaluate((X, Y))  # traces
    assert wait_for(lambda: slow_end)
    assert seconds(lambda: trainer.evaluate((X, Y))) < 0.8
    assert wait_for(lambda: len(slow_end) == 2)


def test_a_process_that_exits_leaves_iterators_alone_unless_they_run_python(slow_end):
    plain = Source(None, pairs().batch(4).repeat())
    python = Source(None, pairs().map(through_python).batch(4).repeat())
    assert seconds(lambda: plain.close(exiting=True)) < 0.8
    assert not slow_end
    assert seconds(lambda: python.close(exiting=True)) >= 1.0  # its prefetching must be over
    assert len(slow_end) == 1
