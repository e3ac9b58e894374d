"""Imports TensorFlow without its harmless lines about missing GPUs and oneDNN, which look like errors."""

import contextlib
import os
import re
import sys
import tempfile

# What TensorFlow 2.21 says on a machine without a GPU, or with a processor that oneDNN likes, past
# TF_CPP_MIN_LOG_LEVEL.
_HARMLESS = re.compile(
    r"cudart_stub\.cc|cuda_platform\.cc|cuda_executor\.cc|absl::InitializeLog|cuInit|TF-TRT|oneDNN custom operations"
    r"|cpu_feature_guard\.cc|To enable the following instructions|oneDNN supports DT_"
)

# An experiment by its module, under its long or its short name; sub-packages hold programs that start others.
_EXPERIMENT = re.compile(r"(looptape\.)?experiments\.(?!launch$|cluster$|tools$)\w+$")


def launched(arguments):
    """Returns whether the interpreter was started as `python -m looptape.experiments.<name>`.

    >>> launched(["python", "-m", "looptape.experiments.vae"]), launched(["python", "-m", "looptape.experiments"])
    (True, False)
    """
    if "-m" not in arguments:
        return False
    module = arguments[arguments.index("-m") + 1 :][:1]
    return bool(module) and _EXPERIMENT.match(module[0]) is not None


def is_harmless(line):
    """Returns whether a line from TensorFlow only looks like an error."""
    return not line.strip() or _HARMLESS.search(line) is not None


def import_unless_told():
    """Imports TensorFlow quietly, unless it is already imported or TF_CPP_MIN_LOG_LEVEL is set."""
    if "tensorflow" not in sys.modules and "TF_CPP_MIN_LOG_LEVEL" not in os.environ:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # errors only, also later and in child processes
        import_tensorflow()


def import_tensorflow():
    """Imports TensorFlow and lists its devices. Shows its stderr output, except for known harmless lines."""
    global _line_expected
    with _without_harmless_lines():
        import tensorflow as tf

        tf.config.list_physical_devices()
        _line_expected = True


def settle():
    """Drops the line that oneDNN logs once per process, at the first transposition of booleans or integers.

    The line says that the processor lacks AVX-512, even if it has it. Call this after the devices are configured,
    because it runs an operation. It acts once, and only if Looptape imported TensorFlow.
    """
    global _line_expected
    if not _line_expected:
        return
    _line_expected = False
    with _without_harmless_lines():
        import tensorflow as tf

        with tf.init_scope(), tf.device("CPU:0"):
            tf.transpose(tf.constant([[True, False]]))


_line_expected = False


@contextlib.contextmanager
def _without_harmless_lines():
    """Holds back the output to stderr and shows it afterwards, except for harmless lines."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (AttributeError, OSError):  # a process without stderr
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                if not is_harmless(line):
                    print(line, file=sys.stderr)
