"""Checkpoints that are written while training continues: what they hold, who waits for them, what goes wrong."""

import os
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.checkpoints import lock
from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.checkpoints.contents import snapshot
from tests.reliability.tools import shuffled
from tests.trainer.tools import dense_model, mse, regression

X, Y = regression(24)


def make():
    return Trainer(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()})


def fit(trainer, workdir, steps, **options):
    return trainer.fit(shuffled(X, Y, 4), steps=steps, workdir=workdir, progress=False, **options)


def names(workdir):
    return [int(name.removeprefix("step-")) for name in checkpoints.Store(f"{workdir}/checkpoints").names()]


def held(taken):
    """{name: array} of a snapshot's variables."""
    return {name: item._serialize_to_tensors()["VARIABLE_VALUE"].numpy() for name, item in taken.tensors.items()}


def _updates(variables, optimizer, jit_compile):
    table, weights = variables

    @tf.function(jit_compile=jit_compile)
    def update():
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [0, 2, 2])
            loss = tf.reduce_sum(tf.square(rows @ weights))
        optimizer.apply(tape.gradient(loss, variables), variables)

    return update


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_snapshot_does_not_change_with_the_variables(jit_compile):
    """Dense and sparse updates, plain and by XLA, and assignments, all of which may write in place."""
    optimizer = keras.optimizers.Adam(0.1)
    variables = [keras.Variable(np.ones([4, 3], "float32")), keras.Variable(np.ones([3, 2], "float32"))]
    optimizer.build(variables)
    update = _updates(variables, optimizer, jit_compile)
    update()  # sparse access changes how TensorFlow keeps a variable
    state = {str(i): v.value for i, v in enumerate([*variables, *optimizer.variables])}
    before = {name: np.array(variable.numpy()) for name, variable in state.items()}
    taken = snapshot.take(1, state, {}, {})
    update()
    for variable in state.values():
        variable.assign_add(tf.ones_like(variable))
    state["0"].scatter_update(tf.IndexedSlices(tf.fill([1, 3], 9.0), [1]))
    for name, array in held(taken).items():
        np.testing.assert_array_equal(array, before[name])
        assert (state[name].numpy() != array).any()


def test_the_iterator_of_a_snapshot_stays_where_it_was(tmp_path):
    iterator = iter(tf.data.Dataset.range(100).shuffle(10, seed=1))
    first = [int(next(iterator)) for _ in range(5)]
    taken = snapshot.take(0, {"iterator": iterator}, {"iterator": "Iterator"}, {})
    rest = [int(n) for n in iterator]
    assert checkpoints.Store(str(tmp_path)).write(taken) is None
    again = iter(tf.data.Dataset.range(100).shuffle(10, seed=1))
    tf.train.Checkpoint(iterator=again).read(checkpoints.prefix(str(tmp_path / "step-0000000000"))).assert_consumed()
    assert [int(n) for n in again] == rest and sorted(first + rest) == list(range(100))


def test_training_continues_while_a_checkpoint_is_written_and_the_file_holds_the_step_it_was_taken_at(
    tmp_path, monkeypatch
):
    trainer, later, write = make(), threading.Event(), checkpoints.Store.write
    seen = {}

    def slow(store, taken):
        assert later.wait(60), "the write of step 3 waits for step 6"
        return write(store, taken)

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step = trainer._engine.counters.step
            seen[step] = [np.array(v.numpy()) for v in trainer.model.variables]
            if step == 6:
                assert names(tmp_path) == [] and threading.active_count() > 1
                later.set()

    monkeypatch.setattr(checkpoints.Store, "write", slow)
    fit(trainer, tmp_path, 7, checkpoint_every=3, callbacks=[Notes()])
    assert names(tmp_path) == [3, 6, 7], "the end waits for all of them"
    with lock.hold(tmp_path):  # given back
        pass
    for step in (3, 6, 7):
        stored = checkpoints.values(f"{tmp_path}/checkpoints/step-{step:010d}")
        weights = [array for name, array in stored.items() if name.startswith("model/")]
        for found, expected in zip(weights, seen[step], strict=True):
            np.testing.assert_array_equal(found, expected)


def test_an_error_in_the_thread_reaches_the_training(tmp_path, monkeypatch):
    trainer = make()

    def broken(store, taken):
        raise RuntimeError(f"the thread failed at step {taken.step}")

    monkeypatch.setattr(checkpoints.Store, "write", broken)
    with pytest.raises(RuntimeError, match="the thread failed at step 2"):
        fit(trainer, tmp_path, 50, checkpoint_every=2)
    assert trainer._engine.counters.step <= 4, "at the next save at the latest"
    monkeypatch.undo()
    fit(trainer, tmp_path, 6)
    assert names(tmp_path) == [6], "the directory is free and the trainer usable"


def test_an_error_of_the_training_is_not_replaced_by_one_of_the_thread(tmp_path, monkeypatch):
    trainer, failed = make(), threading.Event()

    def broken(store, taken):
        failed.wait(60)
        raise RuntimeError("of the thread")

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if trainer._engine.counters.step == 3:
                failed.set()
                raise KeyError("of the training")

    monkeypatch.setattr(checkpoints.Store, "write", broken)
    with pytest.raises(KeyError, match="of the training"), pytest.warns(UserWarning, match="of the thread"):
        fit(trainer, tmp_path, 9, checkpoint_every=2, callbacks=[Fails()])


def test_the_best_checkpoint_is_kept_however_slow_the_disk(tmp_path, monkeypatch):
    """The same names remain as with a disk that answers at once."""
    write = checkpoints.Store.write

    def slow(store, taken):
        threading.Event().wait(0.05)
        return write(store, taken)

    options = {"eval_dataset": (X, -Y), "eval_every": 2, "checkpoint_every": 2, "keep_best": "loss"}
    fit(make(), tmp_path / "fast", 8, keep_checkpoints=1, **options)
    monkeypatch.setattr(checkpoints.Store, "write", slow)
    fit(make(), tmp_path / "slow", 8, keep_checkpoints=1, **options)
    assert names(tmp_path / "slow") == names(tmp_path / "fast") == [2, 8]
    assert not [name for name in os.listdir(tmp_path / "slow" / "checkpoints") if name.startswith(".")]
