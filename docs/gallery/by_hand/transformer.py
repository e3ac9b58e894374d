"""The same model with `compile` and `fit`."""

import keras


def compiled(script):
    model = script.make_model()
    schedule = keras.optimizers.schedules.CosineDecay(0.0, script.STEPS, warmup_target=3e-3, warmup_steps=50)
    model.compile(
        keras.optimizers.Adam(schedule, global_clipnorm=1.0),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
    )
    return model
