"""Steps and epochs as lifetime totals, and data that end before them."""

import keras
import numpy as np
import pytest

from looptape import Trainer
from tests.trainer.tools import (
    assert_identical_weights,
    dataset,
    dense_model,
    mse,
    regression,
    weights,
)

X, Y = regression(32)


def make(model=None, **options):
    return Trainer(dense_model() if model is None else model, keras.optimizers.Adam(0.01), {"error": mse()}, **options)


def test_steps_are_a_lifetime_total_and_the_data_go_on_where_they_stopped():
    two_calls, one_call = make(), make()
    data = dataset(X, Y, batch=4)  # 8 batches, all different
    two_calls.fit(data, steps=3, progress=False)
    two_calls.fit(data, steps=7, progress=False)
    one_call.fit(dataset(X, Y, batch=4), steps=7, progress=False)
    assert two_calls._engine.counters.step == int(two_calls.step) == 7
    assert_identical_weights(two_calls.model, one_call.model)


def test_epochs_are_a_lifetime_total():
    trainer = make()
    data = dataset(X, Y, batch=8)
    assert len(trainer.fit(data, epochs=2, progress=False).epoch) == 2
    history = trainer.fit(data, epochs=3, progress=False)
    assert history.epoch == [2] and trainer._engine.counters.step == 12


def test_nothing_left_to_do_is_said(caplog):
    trainer = make()
    data = dataset(X, Y, batch=8).repeat()
    made = trainer.fit(data, steps=2, progress=False).history
    before = weights(trainer.model)
    with caplog.at_level("WARNING", logger="absl"):
        history = trainer.fit(data, steps=2, progress=False)
    assert "Nothing to do: 2 steps are already done and you asked for steps=2" in caplog.text
    assert history.history == made and list(made["loss"]) == made["error"]
    np.testing.assert_array_equal(before[0], weights(trainer.model)[0])


def test_a_dataset_that_is_too_short_is_refused_before_the_first_step():
    trainer = make()
    before = weights(trainer.model)
    with pytest.raises(ValueError, match=r"ends at step 4, before steps=5\. Repeat it \(`dataset.repeat\(\)`"):
        trainer.fit(dataset(X, Y, batch=8), steps=5, progress=False)
    np.testing.assert_array_equal(before[0], weights(trainer.model)[0])


def test_a_dataset_of_unknown_length_that_is_too_short_stops_where_it_ends():
    data = dataset(X, Y, batch=8).filter(lambda x, y: True)
    with pytest.raises(ValueError, match="ends at step 4, before steps=5"):
        make().fit(data, steps=5, progress=False)


def test_epochs_over_a_dataset_of_unknown_length():
    known, unknown = make(), make()
    known.fit(dataset(X, Y, batch=8), epochs=3, progress=False)
    unknown.fit(dataset(X, Y, batch=8).filter(lambda x, y: True), epochs=3, progress=False)
    assert known._engine.counters.step == unknown._engine.counters.step == 12
    assert_identical_weights(known.model, unknown.model)


def test_an_empty_dataset():
    with pytest.raises(ValueError, match="The dataset is empty"):
        make().fit(dataset(X, Y, batch=8).take(0), epochs=1, progress=False)
    with pytest.raises(ValueError, match="The dataset is empty"):
        make().fit(dataset(X, Y, batch=8).filter(lambda x, y: False), epochs=1, progress=False)


@pytest.mark.parametrize("arguments", [{}, {"steps": 3, "epochs": 1}])
def test_exactly_one_of_steps_and_epochs(arguments):
    with pytest.raises(ValueError, match="exactly one of `steps` and `epochs`"):
        make().fit(dataset(X, Y, batch=8), **arguments)
