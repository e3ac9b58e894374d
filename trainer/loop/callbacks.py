"""Keras callbacks in our loop."""

import keras

from looptape.trainer.loop import callback_memory
from looptape.trainer.optim.optimizer_groups import OptimizerGroup

_ONE_RATE = keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler
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
        self.history = trainer.latest_history = keras.callbacks.History()
        callbacks = [callbacks] if isinstance(callbacks, str | type) or callable(callbacks) else callbacks
        callbacks = [check_callback(callback) for callback in callbacks]
        _refuse_one_rate(callbacks, trainer.optimizer)
        # Callbacks look for the optimizer on the model (ReduceLROnPlateau, LearningRateScheduler), where there may be
        # one that it was compiled with, or that of another trainer: until `give_back`.
        self._former_optimizer = getattr(trainer.model, "optimizer", None)
        self.lend_optimizer()
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

    def train_begin(self, resumed_epoch=None):
        """Begins; `resumed_epoch` is that of a resumed run, None for a new one."""
        with callback_memory.Appending(self._callbacks, resumed_epoch):
            self._list.on_train_begin()
        for callback in self._callbacks:
            callback_memory.note(callback)

    def train_end(self):
        self._list.on_train_end(self._last_logs)
        self.give_back()

    def lend_optimizer(self):
        """Gives the model the trainer's optimizer; again where unfreezing has made a new one."""
        self._trainer.model.optimizer = self._trainer.optimizer

    def give_back(self):
        """Gives the model the optimizer back that it had before, if any."""
        if self._former_optimizer is not None:
            self._trainer.model.optimizer = self._former_optimizer

    def state(self, arrays):
        """The state of the callbacks as JSON; large arrays go into the dict `arrays`."""
        return [{"type": type(c).__name__, "memory": callback_memory.remembered(c, arrays)} for c in self._callbacks]

    def restore(self, state, arrays):
        """Gives the callbacks back what they remembered. After `train_begin`, which resets them."""
        for callback, kept in zip(self._matched(state), state, strict=True):
            if callback is not None and "memory" in kept:
                callback_memory.restore(callback, kept["memory"], arrays)
            elif callback is not None:
                vars(callback).update(kept["values"])  # a checkpoint of 0.1

    def _matched(self, state):
        """[callback or None] for each entry: the first of its type that is not taken yet."""
        left, found = list(self._callbacks), []
        for kept in state:
            found.append(next((callback for callback in left if type(callback).__name__ == kept["type"]), None))
            left = [callback for callback in left if callback is not found[-1]]
        return found

    def shared_state(self):
        """The state of the bridge: the latest evaluation, the place in the epoch, the history, the stop."""
        history = callback_memory.encode([self.history.history, self.history.epoch])
        return {"validation": self._validation, "batch": self._batch, "stopped": self.stopped, "history": history}

    def restore_shared(self, state):
        self._validation, self._batch = state["validation"], state["batch"]
        self._trainer.model.stop_training = state["stopped"]
        restore_history(self.history, state)

    def best_weights(self):
        """[arrays or None] of callbacks that hold weights to put back at the end (EarlyStopping)."""
        return [getattr(callback, "best_weights", None) for callback in self._callbacks]

    def restore_best_weights(self, state, weights):
        """Gives the callbacks of `state` their best weights back; [arrays or None], in its order."""
        for callback, arrays in zip(self._matched(state), weights, strict=True):
            if arrays is not None and hasattr(callback, "best_weights"):
                callback.best_weights = arrays

    def epoch_begin(self):
        self._list.on_epoch_begin(self._trainer.counters.rounds)
        self._batch = 0

    def epoch_end(self, logs):
        self._last_logs = {**logs, **self._validation}
        self._list.on_epoch_end(self._trainer.counters.rounds, self._last_logs)
        self._trainer.counters.end_round()

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


def restore_history(history, state):
    """Gives a `History` what `CallbackBridge.shared_state` holds of it."""
    if "history" in state:
        history.history, history.epoch = callback_memory.decode(state["history"])


def _refuse_one_rate(callbacks, optimizer):
    """Refuses callbacks that set one learning rate where each optimizer has its own: now, not when they do it."""
    for callback in callbacks:
        if isinstance(callback, _ONE_RATE) and isinstance(optimizer, OptimizerGroup):
            optimizer.refuse_one_rate(f"{type(callback).__name__} sets one learning rate")


def check_callback(callback):
    """A Keras callback that makes sense in this loop."""
    if not isinstance(callback, keras.callbacks.Callback):
        given = f"the class {callback.__name__}" if isinstance(callback, type) else repr(callback)
        raise TypeError(
            f"A callback is {given}; it must be a keras.callbacks.Callback. Make one by calling its class, as in "
            "callbacks=[keras.callbacks.EarlyStopping('val_loss')]."
        )
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise ValueError(
            "BackupAndRestore repeats the epoch it was interrupted in, and knows neither the data's position nor "
            "dropout's. Pass `workdir` to `fit` instead: a restarted run resumes exactly where it stopped."
        )
    return callback


def _sees_batches(callback):
    """Whether a callback has a hook of its own for single updates."""
    for hook in _BATCH_HOOKS:
        own = getattr(callback, hook)
        if getattr(own, "__func__", own) is not getattr(keras.callbacks.Callback, hook):
            return True
    return False
