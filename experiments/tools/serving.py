"""`looptape export`: exports a finished run as a SavedModel, which TensorFlow can serve without Looptape."""

import os

_WEIGHTS = {"final": None, "averaged": "averaged.weights.h5", "best": "best.weights.h5"}


def export(workdir, directory, weights="final"):
    """Exports the model of a finished run as a SavedModel with the endpoint `serve`.

    Args:
        workdir: work directory of the run, which has a `model.keras`.
        directory: directory to create; it must not exist.
        weights: "final", "averaged" (of a run with `ema_decay`) or "best" (of a run with evaluations).
    """
    if weights not in _WEIGHTS:
        raise ValueError(f"`weights` is {weights!r}; it must be one of {', '.join(_WEIGHTS)}.")
    source = os.path.join(workdir, "model.keras")
    if not os.path.exists(source):
        raise ValueError(
            f"There is no file {source!r}: the run is not finished, or Keras cannot save its model. Let it "
            "finish, or call `trainer.model.export(directory)` in the program that trains."
        )
    own = None if _WEIGHTS[weights] is None else os.path.join(workdir, _WEIGHTS[weights])
    if own is not None and not os.path.exists(own):
        raise ValueError(f"There is no file {own!r}; the run kept no {weights} weights. Use --weights=final.")
    if os.path.exists(directory):
        raise ValueError(f"{directory!r} exists already. Choose a directory that does not, or delete it.")
    import keras

    from looptape import models  # noqa: F401 registers the layers of ours that the file may name

    model = keras.models.load_model(source, compile=False)
    if own is not None:
        model.load_weights(own)
    model.export(directory, verbose=False)
