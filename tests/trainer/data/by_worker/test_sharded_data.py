"""Pipelines that each worker shards for itself; how they train and resume is in `test_source`."""

import pytest

import looptape
from looptape import Trainer
from tests.trainer.tools import linear_model


def test_sharded_data_are_given_by_a_function_and_for_steps():
    with pytest.raises(TypeError, match=r"`function` is 3; it must be a function \(rank, workers\) → tf.data.Dataset"):
        looptape.ShardedData(3)
    trainer = Trainer(linear_model(), "sgd", {"error": "mse"})
    with pytest.raises(TypeError, match="returned list for worker 0 of 1; it must return a tf.data.Dataset"):
        trainer.fit(looptape.ShardedData(lambda rank, workers: [1]), steps=1)
    with pytest.raises(ValueError, match="`epochs` is given with a `ShardedData`.*Give `steps`"):
        trainer.fit(looptape.ShardedData(lambda rank, workers: [1]), epochs=1)
