"""A cache bounded by bytes and by age, safe to use from several threads."""

import collections
import threading
import time


class BoundedCache:
    """Keeps what was used last. One version per key: a newer version replaces the older one.

    A value used within `max_secs` stays while all values together fit into `max_bytes`. Age is looked at
    whenever the cache is used, so a dashboard that keeps polling also frees what nobody looks at.
    """

    def __init__(self, max_bytes, max_secs=float("inf")):
        self._max_bytes = max_bytes
        self._max_secs = max_secs
        self._entries = collections.OrderedDict()  # key: (version, value, bytes, when used)
        self._lock = threading.Lock()

    def get(self, key, version):
        """Returns the value, or None if it is not there in this version."""
        with self._lock:
            self._evict()
            entry = self._entries.get(key)
            if entry is None or entry[0] != version:
                return None
            self._entries[key] = (*entry[:3], time.monotonic())
            self._entries.move_to_end(key)
            return entry[1]

    def put(self, key, version, value, size):
        with self._lock:
            self._entries[key] = (version, value, size, time.monotonic())
            self._entries.move_to_end(key)
            self._evict()

    def evict(self):
        with self._lock:
            self._evict()

    def _evict(self):
        oldest = time.monotonic() - self._max_secs
        total = sum(size for _, _, size, _ in self._entries.values())
        while self._entries:
            _, _, size, used = next(iter(self._entries.values()))
            if total <= self._max_bytes and used >= oldest:
                break
            total -= size
            self._entries.popitem(last=False)
