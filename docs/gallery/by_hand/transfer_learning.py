"""The same two phases with `compile` and `fit`."""

import keras


def compile_for(model, learning_rate):
    model.compile(
        keras.optimizers.Adam(learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )


def compiled(script):
    model = script.make_model()
    compile_for(model, 1e-2)
    model.fit(script.make_data().repeat(), steps_per_epoch=script.STEPS // 2, shuffle=False, verbose=0)
    script.base.trainable = True
    compile_for(model, 1e-4)
    return model
