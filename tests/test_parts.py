"""The parts of the suite: each test is in one of them; most files have one in the short part."""

from __future__ import annotations

import json
from pathlib import Path

from tests.parts import FEWEST, GRID_S, Stopwatch, left_of_grids, measured, parts, short_part

NAMES = ["a.py::quick", "a.py::slow", "b.py::slow", "b.py::slower", "c.py::new"]
SECONDS = {"a.py::slow": 0.9, "b.py::slow": 0.8, "b.py::slower": 0.85, "gone.py::test": 1.0}


def test_long_tests_are_the_rest_but_each_file_keeps_its_quickest() -> None:
    assert short_part(NAMES, SECONDS) == {"a.py::quick", "b.py::slow", "c.py::new"}
    assert short_part(NAMES, {**SECONDS, "b.py::slow": 8.0, "b.py::slower": 8.5}) == {"a.py::quick", "c.py::new"}


def test_a_folder_of_processes_keeps_the_file_with_its_quickest() -> None:
    names = ["e2e/a.py::x", "e2e/a.py::y", "e2e/b.py::x", "e2e/b.py::y", "f.py::x"]
    seconds = {"e2e/a.py::x": 3.0, "e2e/a.py::y": 4.0, "e2e/b.py::x": 2.0}
    assert short_part(names, seconds, [["e2e"]]) == {"e2e/b.py::y", "f.py::x"}


def test_of_the_files_that_a_suite_of_processes_names_one_runs() -> None:
    names = ["e2e/a.py::x", "f.py::x", "g.py::x", "g.py::y", "h.py::x"]
    seconds = {"f.py::x": 3.0, "g.py::x": 2.0}
    assert short_part(names, seconds, [["e2e", "f.py", "g.py"]]) == {"e2e/a.py::x", "g.py::y", "h.py::x"}


def test_of_a_grid_runs_what_a_seed_chooses() -> None:
    grid = {f"a.py::grid[{i}]": GRID_S / 4 for i in range(10)}
    long = {f"a.py::long[{i}]": 9.0 for i in range(5)}
    left = left_of_grids([*grid, *long, "a.py::one"], {**grid, **long, "a.py::one": 60.0}, seed=0)
    assert len(left & grid.keys()) == 6
    assert len(left & long.keys()) == 5 - FEWEST
    assert "a.py::one" not in left
    assert left != left_of_grids([*grid, *long], {**grid, **long}, seed=1)


def test_each_test_is_in_one_part() -> None:
    names = [*NAMES, *(f"d.py::grid[{i}]" for i in range(4)), "d.py::quick"]
    found = parts(names, {**SECONDS, **{f"d.py::grid[{i}]": 3.0 for i in range(4)}}, ())
    assert [list(found.values()).count(part) for part in ("short", "rest", "grids")] == [4, 4, 2]


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
