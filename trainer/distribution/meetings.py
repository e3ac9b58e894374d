"""Where this process waits for other workers: each collective call is a meeting, and all have them in one order.

A worker that waits at its 70th meeting waits for those that have not come to theirs. Heartbeats carry the number, so
that a process that lives but hangs (in a data function, a file system, a lock) can be told from one that waits itself.
"""

import contextlib
import time


class Meetings:
    """Counts the collective calls of this process, from one thread, and tells any thread whether it waits."""

    def __init__(self):
        self.count = 0
        self._since: float | None = None

    @contextlib.contextmanager
    def one_more(self):
        """Context in which this process waits for the others."""
        self.count += 1
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def waited(self):
        """Seconds that this process has waited for the others, or 0."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


class Progress:
    """What another worker has told of itself, and since when it has done nothing.

    It does something if it comes to further meetings or uses the processor: it may compile, write or compute for long.
    """

    _IDLE = 0.02  # of the processor, which the threads of an idle process take
    _NOISE_SECONDS = 0.5

    def __init__(self, now):
        self.count, self._cpu, self._when = -1, 0.0, now

    def note(self, count, cpu, now):
        """Notes the number of meetings and the seconds of processor time that it has told."""
        used = cpu - self._cpu
        if count != self.count or used > self._NOISE_SECONDS + self._IDLE * (now - self._when):
            self.count, self._cpu, self._when = count, cpu, now

    def excuse(self, now):
        """Begins to measure anew: this process has slept, and could not hear of any work."""
        self._when = now

    def idle(self, now):
        """Seconds without a new meeting or work."""
        return now - self._when


own = Meetings()  # of this process
