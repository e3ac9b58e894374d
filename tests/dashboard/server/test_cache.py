"""The cache's three bounds: version, bytes, age."""

from looptape.dashboard.server import cache


def test_a_newer_version_replaces_the_older_one():
    kept = cache.BoundedCache(100)
    kept.put("a", 1, "old", 10)
    assert kept.get("a", 1) == "old" and kept.get("a", 2) is None
    kept.put("a", 2, "new", 10)
    assert kept.get("a", 2) == "new" and kept.get("a", 1) is None


def test_the_value_used_longest_ago_goes_first():
    kept = cache.BoundedCache(100)
    for name in "abc":
        kept.put(name, 1, name, 40)
        kept.get("a", 1)
    assert [kept.get(name, 1) for name in "abc"] == ["a", None, "c"]
    kept.put("large", 1, "large", 1000)
    assert [kept.get(name, 1) for name in ("a", "c", "large")] == [None, None, None]


def test_what_nobody_uses_is_dropped(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(cache.time, "monotonic", lambda: now[0])
    kept = cache.BoundedCache(100, max_secs=60)
    kept.put("a", 1, "a", 1)
    kept.put("b", 1, "b", 1)
    now[0] = 50
    assert kept.get("b", 1) == "b"
    now[0] = 70
    kept.evict()
    assert kept.get("a", 1) is None and kept.get("b", 1) == "b"
