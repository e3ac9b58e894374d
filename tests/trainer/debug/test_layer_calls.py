"""Which layer is being called, and at which time step, against the order in which a cell sees its inputs."""

import keras
import numpy as np
import pytest

from looptape.trainer.debug.layer_calls import LayerCalls


class Noting(keras.layers.Layer):
    """A cell that notes where it is and what it sees."""

    def __init__(self, **options):
        super().__init__(**options)
        self.state_size = self.output_size = 1
        self.places, self.calls = [], None

    def call(self, inputs, states):
        if self.calls is not None:
            self.places.append((*self.calls.place(), float(inputs[0, 0])))
        return inputs, [inputs]


@pytest.mark.parametrize("go_backwards", [False, True])
@pytest.mark.parametrize("unroll", [False, True])
def test_a_cell_is_at_the_time_step_of_its_input(unroll, go_backwards):
    cell = Noting(name="noting")
    layer = keras.layers.RNN(cell, unroll=unroll, go_backwards=go_backwards, name="loop")
    x = np.arange(4, dtype="float32").reshape(1, 4, 1)
    layer(x)
    with LayerCalls() as cell.calls:
        assert cell.calls.place() is None
        layer(x)
    order = [3, 2, 1, 0] if go_backwards else [0, 1, 2, 3]
    assert [seen for _, _, seen in cell.places[-4:]] == order
    assert [t for _, t, _ in cell.places[-4:]] == order
    assert {path for path, _, _ in cell.places} == {cell.path}


def test_layers_inside_layers_are_named_and_calls_are_only_followed_inside():
    original, places = keras.layers.Layer.__call__, []

    class Inner(keras.layers.Layer):
        def call(self, inputs):
            places.append(calls.place())
            return inputs

    model = keras.Sequential([Inner(name="first"), keras.Sequential([Inner(name="second")], name="nested")])
    calls = LayerCalls()
    with calls:
        model(np.ones([2, 5, 3], "float32"))
    assert [(path.rpartition("/")[2], t) for path, t in places[-2:]] == [("first", None), ("second", None)]
    assert keras.layers.Layer.__call__ is original and calls.place() is None
