"""Event files as the trainer writes them, made without trainer and tensorflow, with known values."""

import pathlib

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from looptape.dashboard import metadata


class RunWriter:
    """Writes one run; counts rows as the trainer does. Wall times follow from the steps: no clock is read."""

    def __init__(self, directory, index=0):
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"events.out.tfevents.{1_000_000_000 + index}.test"
        self._file = open(self.path, "wb")  # noqa: SIM115 (closed by `close`)
        self._records = RecordWriter(self._file)
        self._counts = {}
        self._index = index
        self._records.write(event_pb2.Event(file_version="brain.Event:2", wall_time=1e9).SerializeToString())

    def write(self, step, values):
        """Writes `Summary.Value`s as one event."""
        event = event_pb2.Event(step=step, wall_time=1e9 + 1e6 * self._index + step)
        event.summary.CopyFrom(summary_pb2.Summary(value=values))
        self._records.write(event.SerializeToString())

    def row(self, step, layer, quantities, valid=None, shares=None, **extra):
        """Writes one probed update of one layer: {quantity: [time]}, {loss: [time]} and the running count."""
        self._counts[layer] = self._counts.get(layer, 0) + 1
        values = [metadata.vector_summary(layer, name, row, valid, **extra) for name, row in quantities.items()]
        values += [metadata.loss_share_summary(layer, loss, row, valid) for loss, row in (shares or {}).items()]
        values.append(metadata.rows_summary(layer, self._counts[layer]))
        self.write(step, values)

    def flush(self):
        self._file.flush()

    def close(self):
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()


def state_rows(rows, time, *, decay, drift=0.0, seed=0):
    """Returns [rows, time] norms that shrink by `decay` decades per time step back from the end.

    `drift` is how much that changes from the first row to the last, so that training can mend or spoil it.
    """
    noise = np.random.default_rng(seed)
    progress = np.linspace(0, 1, rows)[:, None]
    back = np.arange(time)[::-1]
    level = -0.5 - 0.8 * progress + 0.08 * noise.standard_normal((rows, 1))
    ripple = 0.05 * noise.standard_normal((rows, time))
    return (10 ** (level - (decay + drift * progress) * back + ripple)).astype(np.float32)
