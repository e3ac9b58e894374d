"""Variables of Keras and TensorFlow: their paths, their raw form, and values for a while."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.variables import is_seed, path_of, raw, temporary_values


def test_paths_and_raw_variables_of_both_kinds():
    layer = keras.layers.Dense(2, name="dense")
    layer.build([None, 3])
    plain = tf.Variable([1.0], name="plain")
    assert path_of(layer.kernel) == "dense/kernel" and path_of(plain) == "plain"
    assert raw(layer.kernel) is layer.kernel.value and raw(plain) is plain


def test_the_state_of_a_seed_generator_is_known_by_its_shape_too():
    assert is_seed(keras.layers.Dropout(0.5).seed_generator.state)
    assert not is_seed(keras.Variable(np.zeros(3), name="seed_generator_state"))


@pytest.mark.parametrize("failing", [False, True])
def test_values_for_a_while_are_put_back(failing):
    first, second = keras.Variable([1.0, 2.0]), tf.Variable(3)
    try:
        with temporary_values([(first, tf.constant([5.0, 6.0])), (second, 7)]):
            assert first.numpy().tolist() == [5.0, 6.0] and second.numpy() == 7
            if failing:
                raise KeyError
    except KeyError:
        assert failing
    assert first.numpy().tolist() == [1.0, 2.0] and second.numpy() == 3
