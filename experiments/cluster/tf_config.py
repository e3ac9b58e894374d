"""`TF_CONFIG`: tells each process of a cluster where the others are. A scheduler or `looptape cluster` sets it.

{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}
"""

import json

_HELP = (
    "`looptape cluster --workers=2 -- <command>` sets it on one machine, a scheduler on several; "
    "docs/scale-out.md has examples."
)


def make(addresses, index):
    """Returns the `TF_CONFIG` of one worker.

    >>> make(["a:1", "b:1"], 1)
    '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    """
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}})


def check(text):
    """Returns (number of workers, rank of this one) from a `TF_CONFIG`. Raises a `ValueError` if it is invalid."""
    if not text:
        raise ValueError(f"TF_CONFIG is not set, so this process does not know the other workers. {_HELP}")
    try:
        content = json.loads(text)
        cluster, task = content["cluster"], content["task"]
        kind, index = task["type"], task["index"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"TF_CONFIG is {_short(text)}, which cannot be read ({type(error).__name__}: {error}); it must be like "
            f"{make(['host0:2222', 'host1:2222'], 0)}. {_HELP}"
        ) from None
    tasks = []
    for each in ("chief", "worker"):
        addresses = cluster.get(each, []) if isinstance(cluster, dict) else None
        if not isinstance(addresses, list) or not all(map(_is_address, addresses)):
            raise ValueError(
                f"TF_CONFIG has {addresses!r} as the addresses of {each!r}; it must be a list of 'host:port'. {_HELP}"
            )
        tasks += [(each, position) for position in range(len(addresses))]
    unknown = sorted(set(cluster) - {"chief", "worker"})
    if unknown:
        raise ValueError(
            f"TF_CONFIG has tasks of the kinds {unknown}; only 'worker' (and one 'chief') are allowed. Leave them out."
        )
    chiefs = cluster.get("chief", [])
    if len(chiefs) > 1:
        raise ValueError(f"TF_CONFIG has {len(chiefs)} chiefs: {chiefs}; only one is allowed. Make the others workers.")
    addresses = [*chiefs, *cluster.get("worker", [])]
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"TF_CONFIG has an address twice: {addresses}. Give each worker its own port.")
    if (kind, index) not in tasks:
        raise ValueError(
            f"TF_CONFIG says that this is {kind!r} number {index!r}, but the cluster has {len(tasks)} tasks: {tasks}. "
            "Number the workers from 0."
        )
    return len(tasks), tasks.index((kind, index))


def _is_address(text):
    """Whether a text is host:port.

    >>> [_is_address(text) for text in ("a:80", "a:0", "a:70000", "a:²", ":80", "a")]
    [True, False, False, False, False, False]
    """
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    return bool(host and colon and port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536)


def _short(text):
    return repr(text if len(text) <= 200 else text[:200] + "…")
