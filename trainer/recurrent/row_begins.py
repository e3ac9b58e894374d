"""Where the sequences of a batch begin, row by row, for `Trainer(bptt_begins=…)`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

EACH_BATCH, NEVER = "batch", "never"


@dataclasses.dataclass(frozen=True)
class RowBegins:
    """Reads from a batch which of its rows begin a new sequence.

    Args:
        where: the name of an entry of a dict batch, or a function of the batch that returns the tensor.
    """

    where: str | Callable

    def __post_init__(self):
        if not isinstance(self.where, str) and not callable(self.where):
            raise TypeError(
                f"`where` of {type(self).__name__} is {self.where!r}; it must be the name of an entry of the batch or "
                f"a function of the batch. Use e.g. {type(self).__name__}('{self.example}')."
            )

    example = "begins"

    def read(self, batch):
        """The tensor that the batch has about its rows."""
        if not isinstance(self.where, str):
            return tf.convert_to_tensor(self.where(batch))
        if not isinstance(batch, dict) or self.where not in batch:
            has = sorted(batch) if isinstance(batch, dict) else f"no names: it is a {type(batch).__name__}"
            raise ValueError(
                f"`bptt_begins` is {self}, and a batch has {has}. Name an entry of the batch, or give a function of it."
            )
        return tf.convert_to_tensor(batch[self.where])

    def find(self, batch, rows, time, ended):
        """(where sequences begin [batch] or [batch, time], which rows have ended with this batch [batch]).

        Args:
            batch: of tensors.
            rows, time: their numbers; the rows are an integer.
            ended: which rows had ended with the batch before: all of them, at first.
        """
        raise TypeError(f"{type(self).__name__} has no `find`. Override it.")

    def checked(self, tensor, shapes):
        """`tensor`, if it has one of the shapes."""
        if not any(tensor.shape.is_compatible_with(shape) for shape in shapes):
            raise ValueError(
                f"`bptt_begins` is {self}, which has the shape {tensor.shape}; it must be "
                f"{' or '.join(str(list(shape)) for shape in shapes)}: [batch] or [batch, time]."
            )
        return tensor


@dataclasses.dataclass(frozen=True)
class Flags(RowBegins):
    """A flag, true where a sequence begins: [batch], at the first time step of the batch, or [batch, time].

    A flag at a masked time step does nothing: set it at the first valid one.

    >>> begins = Flags("begins")
    """

    def find(self, batch, rows, time, ended):
        flags = tf.cast(self.checked(self.read(batch), ([rows], [rows, None])), tf.bool)
        first = ended if flags.shape.rank == 1 else tf.pad(ended[:, tf.newaxis], [[0, 0], [0, time - 1]])
        return flags | first, tf.zeros([rows], tf.bool)


@dataclasses.dataclass(frozen=True)
class Lengths(RowBegins):
    """The number of valid time steps of each row, [batch]: a row shorter than the batch ends its sequence.

    The next batch then starts a new sequence in that row. A row that fills the batch continues in the next one.

    >>> begins = Lengths("length")
    """

    example = "length"

    def find(self, batch, rows, time, ended):
        lengths = self.checked(self.read(batch), ([rows],))
        return ended, tf.cast(lengths, tf.int32) < time


@dataclasses.dataclass(frozen=True)
class Mask(RowBegins):
    """The mask, true at valid time steps, [batch, time]: a valid one after an invalid one begins a sequence.

    >>> begins = Mask("mask")
    """

    example = "mask"

    def find(self, batch, rows, time, ended):
        valid = tf.cast(self.checked(self.read(batch), ([rows, None],)), tf.bool)
        before = tf.concat([~ended[:, tf.newaxis], valid[:, :-1]], axis=1)
        return valid & ~before, ~valid[:, -1]


def check_begins(value) -> Any:
    """`value` if it says where sequences begin, else an error."""
    if isinstance(value, RowBegins) or value in (EACH_BATCH, NEVER):
        return value
    raise ValueError(
        f"`bptt_begins` is {value!r}; it must be {EACH_BATCH!r} (each batch begins new sequences), {NEVER!r} (rows "
        "continue in the next batch) or looptape.timesteps.Flags, Lengths or Mask, which read it from the batch."
    )
