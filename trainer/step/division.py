"""Batches that are divided further when an update does not fit into memory."""

import contextlib

import tensorflow as tf

from looptape.trainer.variables import raw

AUTO = "auto"


class OutOfMemory(Exception):
    """An update did not fit into memory, and nothing of it was written: it can be made again. Internal.

    Args:
        error: what TensorFlow raised.
    """

    def __init__(self, error):
        super().__init__(str(error))
        self.error = error
        self.parts = None  # the update's batch, where it is at hand


class Division:
    """Into how many micro-batches each batch is divided, with `accumulation_steps="auto"`; else it does nothing.

    The number itself is `counters.divisions`, which checkpoints hold.

    Args:
        owner: the engine.
    """

    def __init__(self, owner):
        self._owner = owner
        self.auto = owner.trainer.accumulation_steps == AUTO
        # True from the first write of an update to the last: memory that ends in between leaves half an update.
        self._writing = owner.make_variable(False, "writing") if self.auto else None

    @property
    def count(self):
        return self._owner.counters.divisions if self.auto else 1

    def further(self, rows, error):
        """Divides by two more. Raises TensorFlow's error if the micro-batches have one row already.

        Args:
            rows: of a batch.
            error: from TensorFlow.
        """
        if self.count >= rows:
            error.add_note(
                f"The batch of {rows} examples was divided into {self.count} micro-batches, and even these do not fit "
                "into memory. Use a smaller model, shorter sequences, or `recurrent_memory='sqrt'`."
            )
            raise error
        self._owner.counters.divide(min(2 * self.count, rows))

    @contextlib.contextmanager
    def write(self):
        """A context for everything that an update writes. Traced or eager."""
        if not self.auto:
            yield
            return
        # Of a variable as it is, TensorFlow would wait for the handle only.
        with tf.control_dependencies([tf.identity(self._writing.assign(True))]):
            yield

    @contextlib.contextmanager
    def written(self):
        """A context for what comes after all that an update writes. Traced or eager."""
        if not self.auto:
            yield
            return
        owner, variables = self._owner, list(self._owner.forward_state.variables())
        for minimizer in owner.minimizers.values():
            variables += [*minimizer.trained, *minimizer.optimizer.variables, *(minimizer.pipeline.averages or ())]
        # A variable is read after it is written: the only way to wait for kernels that return nothing.
        with tf.control_dependencies([tf.convert_to_tensor(raw(variable)) for variable in variables]):
            done = tf.identity(self._writing.assign(False))
        with tf.control_dependencies([done]):
            yield

    def ran_out(self, error):
        """The error to raise for TensorFlow's: `OutOfMemory` if the update can be repeated."""
        if not self.auto:
            return error
        if bool(self._writing.numpy()):
            self._writing.assign(False)
            return RuntimeError(
                f"Memory ran out while the update of step {self._owner.counters.step} was being written, so that a "
                f"part of the weights is new and a part is old ({error.message.splitlines()[0]}). Do not use this "
                "trainer any further: start again from the latest checkpoint, with smaller batches."
            )
        return OutOfMemory(error)
