"""The lock of a work directory, against a second process and a second thread."""

import subprocess
import sys
import threading

import pytest

from looptape.trainer.checkpoints import lock

HOLD = """
import sys
from looptape.trainer.checkpoints import lock
with lock.hold(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_named_and_its_death_frees_the_lock(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        message = f"is in use by process {other.pid} on .*use another `workdir`"
        with pytest.raises(RuntimeError, match=message), lock.hold(tmp_path):
            pass
    finally:
        other.kill()
        other.communicate()
    with lock.hold(tmp_path):
        pass


def test_one_thread_may_nest_it_and_another_may_not(tmp_path):
    refused = []

    def try_it():
        try:
            with lock.hold(tmp_path):
                pass
        except RuntimeError as error:
            refused.append(error)

    with lock.hold(tmp_path), lock.hold(tmp_path):
        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
    assert len(refused) == 1
    try_it()
    assert len(refused) == 1


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    with (
        pytest.raises(ValueError, match=r"cannot be used: No such file.*choose a directory"),
        lock.hold(tmp_path / "no"),
    ):
        pass
