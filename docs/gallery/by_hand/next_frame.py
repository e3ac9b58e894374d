"""The same model with `compile` and `fit`."""

import keras


def compiled(script):
    model = script.make_model()
    model.compile(keras.optimizers.Adam(5e-3), keras.losses.BinaryCrossentropy(from_logits=True))
    return model
