"""Keras callbacks in our loop."""

import keras

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
        callbacks = list(callbacks)
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
        self._validation = {}

    @property
    def stopped(self):
        return bool(getattr(self._trainer.model, "stop_training", False))

    def train_begin(self):
        self._list.on_train_begin()

    def train_end(self):
        self._list.on_train_end(self._last_logs if hasattr(self, "_last_logs") else None)

    def epoch_begin(self):
        self._list.on_epoch_begin(self._trainer.rounds)
        self._batch = 0

    def epoch_end(self, logs):
        self._last_logs = {**logs, **self._validation}
        self._list.on_epoch_end(self._trainer.rounds, self._last_logs)
        self._trainer.rounds += 1

    def evaluated(self, results):
        self._list.on_test_begin()
        self._validation = {f"val_{name}": value for name, value in results.items()}
        self._list.on_test_end(results)

    def batch_begin(self, step):
        if self.every_update:
            self._list.on_train_batch_begin(self._batch)

    def batch_end(self, step, logs):
        self._list.on_train_batch_end(self._batch, logs)
        self._batch += 1


def _sees_batches(callback):
    """Whether a callback has a hook of its own for single updates."""
    for hook in _BATCH_HOOKS:
        own = getattr(callback, hook)
        if getattr(own, "__func__", own) is not getattr(keras.callbacks.Callback, hook):
            return True
    return False
