"""Parts the suite by the seconds that each test took when they were last measured (`tests/seconds.json`).

`make test` runs the short part: tests of at most `LONGEST_S`, and of each file at least the quickest. `make test-full`
runs the rest. A test without a measurement is in the short part. `pytest --seconds FILE` measures: the file keeps what
took at least `NOTED_S`, as the others need no line. A fixture's seconds do not count: whoever comes first pays them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

SECONDS = Path(__file__).parent / "seconds.json"
LONGEST_S = 0.5
NOTED_S = 0.5
PARTS = ("short", "rest")


def measured() -> dict[str, float]:
    """Seconds by node id, of the tests that took `NOTED_S` or more."""
    seconds: dict[str, float] = json.loads(SECONDS.read_text())
    return seconds


def short_part(names: Iterable[str], seconds: Mapping[str, float], longest_s: float = LONGEST_S) -> set[str]:
    """Node ids of the short part of a suite."""
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(name.partition("::")[0], []).append(name)
    quickest = {min(tests, key=lambda name: seconds.get(name, 0.0)) for tests in files.values()}
    return quickest | {name for tests in files.values() for name in tests if seconds.get(name, 0.0) <= longest_s}


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
