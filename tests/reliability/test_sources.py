"""Pipelines that do not go on exactly after a resume are named before the first step; the others are not."""

import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.tools import dense_model, mse, regression
from trainer import Trainer
from trainer.sources import Source, loose_ends

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
    assert trainer.host_step == 0
    with warnings.catch_warnings():  # said once: the second attempt trains
        warnings.simplefilter("error", UserWarning)
        trainer.fit(dataset, steps=2, workdir=tmp_path, progress=False)
    assert trainer.host_step == 2


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
