"""Parts the suite by the seconds that each test took when they were last measured (`tests/seconds.json`).

`make test` runs the short part: tests of at most `LONGEST_S`, and of each file the quickest, where that takes at most
`QUICKEST_S`; of the Makefile's two suites of processes, where each file starts servers of its own, one file of each
folder, and of the files that a suite names one by one also one: that with the quickest.
`make test-full` runs the rest, but for what is left of a grid (the variants of one test function) once those that a
seed chose have taken `GRID_S`: that is for `make acceptance`. A test without a measurement is quick. `pytest --seconds
FILE` measures: the file keeps what took at least `NOTED_S`, as the others need no line. A fixture's seconds do not
count: whoever comes first pays them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = Path(__file__).parent / "seconds.json"
LONGEST_S = 0.1
QUICKEST_S = 0.9
NOTED_S = 0.2
GRID_S = 4.0
FEWEST = 2  # variants of a grid that run, however long they take
PARTS = ("short", "rest", "grids")


def measured() -> dict[str, float]:
    """Seconds by node id, of the tests that took `NOTED_S` or more."""
    seconds: dict[str, float] = json.loads(SECONDS.read_text())
    return seconds


def suites() -> dict[str, list[str]]:
    """Files and folders of the Makefile's suites of processes, by suite."""
    lists = re.findall(r"^(SERVERS|WORKERS) \S?= \$\(addprefix tests/,(.*)\)$", (ROOT / "Makefile").read_text(), re.M)
    found: dict[str, list[str]] = {}
    for name, words in lists:
        found.setdefault(name, []).extend(f"tests/{word}" for word in words.split())
    return found


def parts(
    names: Collection[str], seconds: Mapping[str, float], suites: Iterable[Sequence[str]], seed: int = 0
) -> dict[str, str]:
    """The part of each test, by node id; `suites` holds the files and folders of each suite of processes."""
    short = short_part(names, seconds, tuple(suites))
    left = left_of_grids([name for name in names if name not in short], seconds, seed)
    return {name: "short" if name in short else "grids" if name in left else "rest" for name in names}


def short_part(names: Collection[str], seconds: Mapping[str, float], suites: Iterable[Sequence[str]] = ()) -> set[str]:
    """Node ids of the short part."""
    # A file's place is the file; a folder of processes is one, and so are the files that a suite of them names.
    places = {
        entry: f"files of {entries[0]}" if entry.endswith(".py") else entry for entries in suites for entry in entries
    }
    quickest: dict[str, str] = {}  # by place
    for name in names:
        place = _place(name, places)
        if place not in quickest or seconds.get(name, 0.0) < seconds.get(quickest[place], 0.0):
            quickest[place] = name
    files = {_file(name) for name in quickest.values()}
    quick = {name for name in names if seconds.get(name, 0.0) <= LONGEST_S and _file(name) in files}
    of_processes = set(places.values())
    return quick | {
        name for place, name in quickest.items() if place in of_processes or seconds.get(name, 0.0) <= QUICKEST_S
    }


def left_of_grids(names: Iterable[str], seconds: Mapping[str, float], seed: int) -> set[str]:
    """Node ids of variants that no sample of their grid holds."""
    grids: dict[str, list[str]] = {}
    for name in sorted(names):
        grids.setdefault(name.partition("[")[0], []).append(name)
    left: set[str] = set()
    for function, variants in grids.items():
        random.Random(f"{seed} {function}").shuffle(variants)
        spent_s = 0.0
        for index, name in enumerate(variants):
            spent_s += seconds.get(name, 0.0)
            if index >= FEWEST and spent_s > GRID_S:
                left.add(name)
    return left


def _file(name: str) -> str:
    return name.partition("::")[0]


def _place(name: str, places: Mapping[str, str]) -> str:
    file = _file(name)
    return next((place for entry, place in places.items() if file == entry or file.startswith(f"{entry}/")), file)


class Stopwatch:
    """Adds up the seconds of each test's call, as pytest reports them to the process that runs or leads the suite."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, name: str, when: str, seconds: float) -> None:
        """Takes one phase's report; set-up and teardown do not count."""
        if when == "call":
            self._seconds[name] = seconds

    def write(self, path: Path) -> None:
        """Writes what took long into a file, over what was there of these tests."""
        kept = json.loads(path.read_text()) if path.exists() else {}
        kept = {name: took for name, took in kept.items() if name not in self._seconds}
        kept |= {name: round(took, 1) for name, took in self._seconds.items() if took >= NOTED_S}
        path.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")
