"""What a run ran on, and what of it decides the bits of a result."""

import subprocess
from importlib import metadata

from looptape.experiments.records import versions


def test_a_session_names_commit_versions_and_machine():
    found = versions.environment()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    assert found["commit"] == (commit or None)
    assert found["versions"]["keras"] == metadata.version("keras") and found["cpus"] >= 1
    assert versions.changed_versions(found, {**found, "started": "later", "command": ["other"]}) == []


def test_what_changed_is_named():
    before = versions.environment()
    now = {**before, "python": "3.99", "versions": {**before["versions"], "keras": "9.0"}}
    keras = before["versions"]["keras"]
    assert versions.changed_versions(before, now) == [f"python {before['python']} → 3.99", f"keras {keras} → 9.0"]
    assert f"keras None → {keras}" in versions.changed_versions({**before, "versions": {}}, before)


def test_outside_a_repository_there_is_no_commit(tmp_path):
    assert versions._git(str(tmp_path), "rev-parse", "HEAD") is None
    assert versions._version("no-such-package") is None
