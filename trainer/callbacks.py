"""Keras callbacks in our loop."""

import inspect

import keras
import numpy as np

_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class CallbackBridge:
    """Calls Keras callbacks at the places where `keras.Model.fit` would.

    An epoch is a pass over the data when training by epochs, and what lies between two evaluations when training by
    steps.

    Args:
        callbacks: Keras callbacks.
        trainer: the trainer.
        steps: lifetime total of updates, or None.
        epochs: lifetime total of epochs, or None.
    """

    def __init__(self, callbacks, trainer, steps, epochs):
        self._trainer = trainer
        self.history = keras.callbacks.History()
        callbacks = [check_callback(callback) for callback in callbacks]
        # Callbacks look for the optimizer on the model (ReduceLROnPlateau, LearningRateScheduler).
        if getattr(trainer.model, "optimizer", None) is None:
            trainer.model.optimizer = trainer.optimizer
        trainer.model.stop_training = False
        self._list = keras.callbacks.CallbackList(
            [*callbacks, self.history],
            add_history=False,
            add_progbar=False,
            model=trainer.model,
            epochs=epochs or 1,
            steps=steps,
            verbose=0,
        )
        self.every_update = any(_sees_batches(callback) for callback in callbacks)
        # A callback with `remembers = False` is about this session only, not part of the run's state.
        self._callbacks = [callback for callback in callbacks if getattr(callback, "remembers", True)]
        self._validation, self._last_logs, self._batch = {}, None, 0

    @property
    def stopped(self):
        return bool(getattr(self._trainer.model, "stop_training", False))

    def train_begin(self):
        self._list.on_train_begin()

    def train_end(self):
        self._list.on_train_end(self._last_logs)

    def state(self):
        """What the callbacks remember, as JSON can hold it: counters, best values, cool-downs."""
        return [
            {
                "type": type(callback).__name__,
                "values": {
                    name: value
                    for name, value in map(_plain, vars(callback).items())
                    if _kept(name, value) and name not in _options(callback)
                },
            }
            for callback in self._callbacks
        ]

    def restore(self, state):
        """Gives the callbacks back what they remembered. After `train_begin`, which resets them."""
        for callback, kept in zip(self._callbacks, state, strict=False):
            if kept["type"] == type(callback).__name__:
                vars(callback).update(kept["values"])

    def shared_state(self):
        """What the bridge itself remembers: the latest evaluation, the place in the epoch, whether to stop."""
        return {"validation": self._validation, "batch": self._batch, "stopped": self.stopped}

    def restore_shared(self, state):
        self._validation, self._batch = state["validation"], state["batch"]
        self._trainer.model.stop_training = state["stopped"]

    def best_weights(self):
        """[arrays or None] of callbacks that hold weights to put back at the end (EarlyStopping)."""
        return [getattr(callback, "best_weights", None) for callback in self._callbacks]

    def restore_best_weights(self, weights):
        for callback, arrays in zip(self._callbacks, weights, strict=False):
            if arrays is not None and hasattr(callback, "best_weights"):
                callback.best_weights = arrays

    def epoch_begin(self, resumed=False):
        self._list.on_epoch_begin(self._trainer.rounds)
        self._batch = self._batch if resumed else 0

    def epoch_end(self, logs):
        self._last_logs = {**logs, **self._validation}
        self._list.on_epoch_end(self._trainer.rounds, self._last_logs)
        self._trainer.rounds += 1

    def evaluated(self, results):
        self._list.on_test_begin()
        self._validation = {f"val_{name}": value for name, value in results.items()}
        self._list.on_test_end(results)

    def batch_begin(self):
        if self.every_update:
            self._list.on_train_batch_begin(self._batch)

    def batch_end(self, logs):
        self._list.on_train_batch_end(self._batch, logs)
        self._batch += 1


def check_callback(callback):
    """A Keras callback that makes sense in this loop."""
    if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError(f"{callback!r} is not a callback; it must be a keras.callbacks.Callback.")
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise ValueError(
            "BackupAndRestore repeats the epoch it was interrupted in, and knows neither the data's position nor "
            "dropout's. Pass `workdir` to `fit` instead: a run that is started again goes on exactly where it stopped."
        )
    return callback


def _plain(item):
    name, value = item
    return name, value.item() if isinstance(value, np.generic) else value


def _kept(name, value):
    return not name.startswith("_") and (value is None or isinstance(value, bool | int | float | str))


def _options(callback):
    """Names of what Keras's own callbacks were made with: not memory, and `min_delta` changes its sign in use."""
    classes = [cls for cls in type(callback).__mro__ if cls.__module__.startswith("keras.") and "__init__" in vars(cls)]
    return {name for cls in classes for name in inspect.signature(cls.__init__).parameters}


def _sees_batches(callback):
    """Whether a callback has a hook of its own for single updates."""
    for hook in _BATCH_HOOKS:
        own = getattr(callback, hook)
        if getattr(own, "__func__", own) is not getattr(keras.callbacks.Callback, hook):
            return True
    return False
