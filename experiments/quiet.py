"""Imports TensorFlow without the lines about missing GPUs and oneDNN, which look like errors and are none."""

import os
import re
import sys
import tempfile

# What TensorFlow 2.21 says on a machine without a GPU, or with a processor that oneDNN likes, past
# TF_CPP_MIN_LOG_LEVEL.
_HARMLESS = re.compile(
    r"cudart_stub\.cc|cuda_platform\.cc|cuda_executor\.cc|absl::InitializeLog|cuInit|TF-TRT|oneDNN custom operations"
)

_WITHOUT = ("experiments.sweep", "experiments.cluster", "experiments.ray_cluster")  # they start other programs


def launched(arguments):
    """Whether the interpreter was started as `python -m experiments.<name>`.

    >>> launched(["python", "-m", "experiments.adding_problem"]), launched(["python", "-m", "experiments"])
    (True, False)
    """
    if "-m" not in arguments:
        return False
    module = arguments[arguments.index("-m") + 1 :][:1]
    return bool(module) and module[0].startswith("experiments.") and module[0] not in _WITHOUT


def import_tensorflow():
    """Imports TensorFlow and asks it for its devices; what it says on the way is shown unless it is known."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                if line.strip() and not _HARMLESS.search(line):
                    print(line, file=sys.stderr)
