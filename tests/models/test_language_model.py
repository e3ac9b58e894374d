"""The language model: carried states, causality, prompts and samples."""

import keras
import numpy as np
import pytest

from looptape.models import (
    LanguageModel,
)

TOKENS = np.random.default_rng(0).integers(0, 7, (3, 8)).astype(np.int32)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_a_language_model_carries_its_state_from_batch_to_batch(cell):
    model = LanguageModel(7, 6, 2, cell=cell, batch_size=3)
    plain = LanguageModel(7, 6, 2, cell=cell)
    plain.set_weights(model.get_weights())
    parts = [np.asarray(model(TOKENS[:, :5])), np.asarray(model(TOKENS[:, 5:]))]
    whole = np.asarray(plain(TOKENS))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-6)
    model.reset_states()
    np.testing.assert_allclose(model(TOKENS[:, :5]), parts[0], atol=1e-6)
    assert not np.allclose(plain(TOKENS[:, 5:]), parts[1])  # without the state it is another answer


def test_a_language_model_sees_no_later_token():
    model = LanguageModel(7, 6)
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 7
    one, other = np.asarray(model(TOKENS)), np.asarray(model(changed))
    np.testing.assert_array_equal(one[:, :5], other[:, :5])
    assert not np.allclose(one[:, 5], other[:, 5])


def test_a_language_model_continues_a_prompt():
    model = LanguageModel(7, 6, 2)
    tokens = model.sample(TOKENS[:, :3], 4, temperature=1e-6).numpy()
    text = TOKENS[:, :3]
    for index in range(4):  # as cold as that it takes the likeliest token: what one pass over all of it would take
        likeliest = np.argmax(np.asarray(model(text))[:, -1], axis=-1)
        np.testing.assert_array_equal(tokens[:, index], likeliest)
        text = np.concatenate([text, likeliest[:, np.newaxis].astype(np.int32)], axis=1)


def test_samples_follow_the_seed_and_leave_carried_states_alone():
    model = LanguageModel(50, 6, batch_size=3)
    model(TOKENS)
    before = [np.array(state) for layer in model.recurrent for state in keras.tree.flatten(layer.states)]
    draws = [model.sample([[1, 2]], 12, seed=seed).numpy() for seed in (0, 0, 1)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])
    after = [np.array(state) for layer in model.recurrent for state in keras.tree.flatten(layer.states)]
    np.testing.assert_array_equal(before, after)
    assert any(np.any(state != 0) for state in before)


def test_an_unknown_cell_is_refused():
    with pytest.raises(ValueError, match=r"`cell` is 'lstn'; it must be one of \['lstm', 'gru', 'rnn'\]"):
        LanguageModel(7, cell="lstn")
