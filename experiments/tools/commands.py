"""Commands with absl flags, and commands for the user to paste. Imports no TensorFlow."""

import os
import shutil
import signal
import sys

from absl import app


def tensorboard():
    """Returns the TensorBoard command that works here: its name, or its path next to this interpreter."""
    if shutil.which("tensorboard"):
        return "tensorboard"
    beside = os.path.join(os.path.dirname(sys.executable), "tensorboard")
    near = os.path.relpath(beside)
    return beside if near.startswith("..") else near


def launch(name, arguments, description, define, main):
    """Runs a command of Looptape. Does not return.

    Args:
        name: of the command, as `--help` shows it.
        arguments: the command line without the program's name.
        description: text that `--help` shows above the flags.
        define: function that defines the flags.
        main: function that absl runs.
    """
    sys.argv = [f"looptape {name}", *arguments]
    sys.modules["__main__"].__doc__ = description
    define()
    # By an exception, so that the command ends its runs, which write a checkpoint, before it ends itself.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
