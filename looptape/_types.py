"""Types for type checkers. Keras publishes no annotations, so its own types would be `Any`."""

from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:

    class History(keras.callbacks.History):
        """The return value of `Trainer.fit`: Keras's own `History`, with types that a checker can read."""

        epoch: list[int]
        history: dict[str, list[float]]
        params: dict[str, Any]
else:
    History = keras.callbacks.History
