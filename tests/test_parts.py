"""The two parts of the suite: each test is in one of them, and each file in the short one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.parts import Stopwatch, measured, short_part

NAMES = ["a.py::quick", "a.py::slow", "b.py::slow", "b.py::slower", "c.py::new"]
SECONDS = {"a.py::slow": 9.0, "b.py::slow": 8.0, "b.py::slower": 8.5, "gone.py::test": 1.0}


def test_long_tests_are_the_rest_but_each_file_keeps_its_quickest() -> None:
    assert short_part(NAMES, SECONDS) == {"a.py::quick", "b.py::slow", "c.py::new"}
    assert short_part(NAMES, SECONDS, longest_s=8.2) == {"a.py::quick", "b.py::slow", "c.py::new"}
    assert short_part(NAMES, SECONDS, longest_s=9.0) == set(NAMES)


def test_a_measurement_replaces_the_one_before_and_leaves_out_what_is_quick(tmp_path: Path) -> None:
    path = tmp_path / "seconds.json"
    path.write_text(json.dumps({"a.py::x": 3.0, "a.py::y": 4.0, "b.py::z": 5.0}))
    watch = Stopwatch()
    for name, when, seconds in (("a.py::x", "setup", 7.0), ("a.py::x", "call", 2.04), ("a.py::y", "call", 0.01)):
        watch.add(name, when, seconds)
    watch.write(path)
    assert json.loads(path.read_text()) == {"a.py::x": 2.0, "b.py::z": 5.0}


def test_what_was_measured_is_there() -> None:
    """Or a file was moved without its measurements, and its long tests are in the short part unseen."""
    root = Path(__file__).resolve().parent.parent
    assert (
        sorted({name.partition("::")[0] for name in measured() if not (root / name.partition("::")[0]).exists()}) == []
    )
