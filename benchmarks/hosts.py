"""Hosts with addresses of their own on this machine: network namespaces on a bridge. Needs root and `ip`."""

import contextlib
import os
import shutil
import subprocess

_NAME = f"lt{os.getpid() % 10_000}"


def available():
    """Whether this process may make hosts."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def ip(*words):
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def hosts(count, rate=None):
    """[(namespace, address)] of hosts that reach each other over a bridge.

    Args:
        count: of hosts.
        rate: what each host sends and receives at most, as `tc` has it ("1gbit"), or None. Needs `tc`.
    """
    made = [(f"{_NAME}h{number}", f"10.213.7.{number + 1}") for number in range(count)]
    try:
        ip("link", "add", _NAME, "type", "bridge")
        ip("link", "set", _NAME, "up")
        for number, (name, address) in enumerate(made):
            outside = f"{_NAME}v{number}"
            ip("netns", "add", name)
            ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", outside, "master", _NAME, "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                ip("-n", name, "link", "set", link, "up")
            if rate:
                shaping = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                subprocess.run(["tc", "qdisc", "add", "dev", outside, *shaping], check=True)
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *shaping], check=True)
        yield made
    finally:
        for number, (name, _) in enumerate(made):
            # The system removes a namespace's own links some time after the namespace.
            subprocess.run(["ip", "link", "del", f"{_NAME}v{number}"], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", _NAME], check=False, stderr=subprocess.DEVNULL)
