"""Makes the pictures of the README and the guides from real runs.

    make demo && python docs/make_pictures.py runs/demo

Takes the newest heat map of a work directory's time-step gradients, as TensorBoard's image tab shows it.
"""

import sys
from pathlib import Path

from tensorboard.compat.proto import event_pb2

PICTURES = Path(__file__).resolve().parent / "pictures"


def newest_heatmap(workdir):
    """The PNG of the last heat map in a run's event files."""
    import tensorflow as tf

    found = None
    for path in sorted(Path(workdir, "train").glob("events*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            for value in event_pb2.Event.FromString(record).summary.value:
                if value.tag.endswith("/heatmap"):
                    found = tf.make_ndarray(value.tensor)[2]
    if found is None:
        raise SystemExit(f"There is no heat map in {workdir}. Train with --probe_every=20 first.")
    return found


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "heatmap.png").write_bytes(newest_heatmap(sys.argv[1]))
