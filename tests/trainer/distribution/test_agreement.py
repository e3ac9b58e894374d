"""What workers compare, here with the answers of the others made up."""

import types
import warnings

import numpy as np
import pytest

from looptape.trainer.distribution import workers
from looptape.trainer.distribution.agreement import Agreement


class Others(workers.Alone):
    """Worker 0 of as many as there are answers."""

    def __init__(self, *answers):
        self.count, self._answers = len(answers) + 1, answers

    def share(self, numbers):
        return np.array([numbers, *([answer] for answer in self._answers)], np.int64)


def agreement(others, checksum, **source):
    calls = types.SimpleNamespace(checksum=checksum)
    source = types.SimpleNamespace(**{"own_rows": True, "sharded": True, **source})
    return Agreement(types.SimpleNamespace(workers=others, calls=calls), source)


def test_pipelines_that_do_not_shard_cause_a_warning():
    made = agreement(Others(7, 7), 7)
    with pytest.warns(UserWarning, match="All 3 workers got the same first batch from their `ShardedData`"):
        made.check_first_batch()
    made.check_first_batch()  # said once


@pytest.mark.parametrize(
    "others, source", [(Others(7, 8), {}), (Others(8), {}), (Others(7), {"sharded": False}), (workers.Alone(), {})]
)
def test_parts_that_differ_or_rows_by_index_cause_none(others, source):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreement(others, 7, **source).check_first_batch()


@pytest.mark.parametrize("available, other, ends", [(True, 1, False), (False, 0, True)])
def test_data_of_all_workers_end_together(available, other, ends):
    made = workers.Workers.__new__(workers.Workers)
    made.share = Others(other).share
    assert made.all_have(available) is not ends


@pytest.mark.parametrize("available, other", [(True, 0), (False, 1)])
def test_data_that_end_on_some_workers_only_are_refused_on_all(available, other):
    made = workers.Workers.__new__(workers.Workers)
    made.share, made.name = Others(other).share, "worker 0 of 2 (a:1)"
    match = r"The workers differ in the number of batches: .* \(this is worker 0 of 2 \(a:1\)\). All must be started"
    with pytest.raises(ValueError, match=match):
        made.all_have(available)
