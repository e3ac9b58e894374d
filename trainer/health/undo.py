"""Undoes an update of an overridden `train_step`.

A `minimize` whose own update is a spike aborts the call, but those before it have been applied by then, and
`train_step` may have moved seeds and metrics of its own. To repeat or skip the update, the state from before is needed.
"""

import tensorflow as tf

from looptape.trainer.variables import traced


class Undo:
    """Keeps the state from before the latest update, where it may have to be undone.

    Reading a variable copies nothing yet: TensorFlow copies when the update writes.

    Args:
        owner: the trainer.
    """

    def __init__(self, owner):
        self._owner = owner
        self.forget()

    @property
    def wanted(self):
        """Whether an update can be a spike after a part of it was written."""
        return self._owner.on_spike != "ignore" and self._owner.overrides("train_step")

    def forget(self):
        """Makes the next `take` look for the variables anew."""
        self._variables = self._read = self._values = None

    def take(self):
        """Before an update. On the host, after `prepare`."""
        if not self.wanted:
            return
        if self._variables is None:
            self._variables = variables = self._owner.device_state()
            self._read = traced(lambda: [tf.identity(variable) for variable in variables])
        self._owner.whole_copies.take()
        self._values = self._read()

    def give(self):
        """Puts the state back, if it was taken."""
        if self._values is None:
            return
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)
        self._owner.whole_copies.give()
