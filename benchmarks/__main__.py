"""Runs every benchmark, one after another, and puts their tables into benchmarks/README.md.

python -m benchmarks [name …]

Each runs in a process of its own. The n-th table that one prints replaces what stands in the README between
`<!-- name n -->` and `<!-- end -->`; the text around it is written by hand. One that needs what is not installed
(Orbit, Lightning, Chromium) says so, and its table stays.
"""

import datetime
import pathlib
import re
import subprocess
import sys
import time

from benchmarks import measure

PAGE = pathlib.Path(__file__).with_name("README.md")
NAMES = (
    "overhead",
    "peers",
    "recurrent",
    "steering",
    "accumulation",
    "probing",
    "linear",
    "probe_every",
    "health",
    "jacobian",
    "combiners",
    "distribution",
    "communication",
    "network",
    "input",
    "dashboard",
    "faults.cost",
)


def tables(text):
    """The Markdown tables in a text.

    >>> tables("a\\n| x |\\n|---|\\n| 1 |\\nb")
    ['| x |\\n|---|\\n| 1 |']
    """
    return ["\n".join(lines.strip().split("\n")) for lines in re.findall(r"(?:^\|.*\n?)+", text, re.M)]


def replaced(page, name, number, table):
    """The page with a table put between its marks; an error if the page has no place for it."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} {number} -->\n).*?(<!-- end -->)", re.S)
    if not pattern.search(page):
        raise ValueError(f"{PAGE.name} has no place `<!-- {name} {number} -->` … `<!-- end -->`. Add one.")
    return pattern.sub(lambda match: f"{match[1]}{table}\n{match[2]}", page)


def measured(name):
    """The tables that a benchmark printed."""
    print(f"\n## {name}\n", flush=True)
    start = time.perf_counter()
    run = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], stdout=subprocess.PIPE, text=True, check=False)
    print(run.stdout)
    print(f"({time.perf_counter() - start:.0f} s)", flush=True)
    if run.returncode:
        raise SystemExit(f"benchmarks.{name} ended with {run.returncode}.")
    return tables(run.stdout)


def main(names):
    start = time.perf_counter()
    for name in names or NAMES:
        found = measured(name)
        page, today = PAGE.read_text(), datetime.date.today().isoformat()
        for number, table in enumerate(found, 1):
            page = replaced(page, name, number, f"{table}\n\n*Measured on {today}.*")
        PAGE.write_text(page if names else replaced(page, "machine", 1, f"{today}, {measure.machine()}"))
    minutes = (time.perf_counter() - start) / 60
    if not names:
        PAGE.write_text(replaced(PAGE.read_text(), "minutes", 1, f"All of them took {minutes:.0f} minutes."))
    print(f"\nAll in {minutes:.1f} minutes; the tables are in {PAGE.name}.")


if __name__ == "__main__":
    main(sys.argv[1:])
