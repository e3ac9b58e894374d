"""Commands that can be typed as they are printed. Without TensorFlow, for programs that only start others."""

import os
import shutil
import sys


def tensorboard():
    """The command as it can be typed here: by its name, or by the path beside this interpreter."""
    if shutil.which("tensorboard"):
        return "tensorboard"
    beside = os.path.join(os.path.dirname(sys.executable), "tensorboard")
    near = os.path.relpath(beside)
    return beside if near.startswith("..") else near
