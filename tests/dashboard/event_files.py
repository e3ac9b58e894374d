"""Event files as the trainer writes them, made without a trainer, with known values."""

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dashboard import metadata


class RunWriter:
    """Writes one run. `row` counts, so that the honesty line has its total."""

    def __init__(self, directory):
        self._writer = EventFileWriter(str(directory), max_queue_size=1000, flush_secs=3600)
        self._counts = {}

    def write(self, step, values):
        """Writes `Summary.Value`s as one event. The wall time is the step: files are the same every time."""
        event = event_pb2.Event(step=step, wall_time=1e9 + step, summary=summary_pb2.Summary(value=values))
        self._writer.add_event(event)

    def row(self, step, layer, quantities, valid=None, shares=None, **extra):
        """Writes one probed update of one layer: {quantity: [time]}, {loss: [time]} and the running count."""
        self._counts[layer] = self._counts.get(layer, 0) + 1
        values = [
            metadata.vector_summary(layer, quantity, row, valid, **extra)
            for quantity, row in quantities.items()
        ]
        values += [
            metadata.loss_share_summary(layer, loss, row, valid) for loss, row in (shares or {}).items()
        ]
        values.append(metadata.rows_summary(layer, self._counts[layer]))
        self.write(step, values)

    def flush(self):
        self._writer.flush()

    def close(self):
        self._writer.close()

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


def large_run(directory, rows, time, layers, seed=0):
    """Writes `rows` rows of `time` steps of the state gradient for each of `layers`."""
    data = {
        layer: state_rows(rows, time, decay=0.02, drift=-0.01, seed=seed + i)
        for i, layer in enumerate(layers)
    }
    with RunWriter(directory) as writer:
        for index in range(rows):
            for layer in layers:
                writer.row(10 * (index + 1), layer, {"state": data[layer][index]})
    return data
