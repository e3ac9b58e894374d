"""The commit, the versions and the machine of a run."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys

_PACKAGES = ("looptape", "tensorflow", "keras", "tensorboard", "numpy", "absl-py")


def environment():
    """{name: value} of a session that begins now, for `environment.json`."""
    here = os.path.dirname(os.path.abspath(__file__))
    changes = _git(here, "status", "--porcelain", "--untracked-files=no")
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": _git(here, "rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
    }


def changed_versions(before, now):
    """["tensorflow 2.21.0 → 2.22.0", …]: what decides the bits of a result and is not the same."""
    pairs = {name: (before.get(name), now[name]) for name in ("commit", "python", "cpus")}
    known = before.get("versions", {})
    pairs.update({name: (known.get(name), version) for name, version in now["versions"].items()})
    return [f"{name} {old} → {new}" for name, (old, new) in pairs.items() if old != new]


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(directory, *arguments):
    """The output of a git command, or None without git or outside a repository."""
    try:
        command = ["git", "-C", directory, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
