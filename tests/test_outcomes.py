"""`pytest --outcomes`: each case once, with its worst outcome."""

from __future__ import annotations

from types import SimpleNamespace

from tests.outcomes import outcomes_of


def report(case: str, when: str, outcome: str) -> SimpleNamespace:
    return SimpleNamespace(nodeid=f"tests/test_a.py::{case}", when=when, outcome=outcome, duration=0.25)


def test_each_case_has_its_worst_outcome() -> None:
    whole = [report("good", when, "passed") for when in ("setup", "call", "teardown")]
    late = [report("late[x::y]", "call", "passed"), report("late[x::y]", "teardown", "failed")]
    stats = {
        "passed": [*whole, late[0]],
        "error": [late[1], report("early", "setup", "failed")],
        "skipped": [report("absent", "setup", "skipped")],
        "warnings": [SimpleNamespace(nodeid="tests/test_a.py::good", message="no outcome")],
    }
    assert outcomes_of(stats) == {
        "tests/test_a.py": {
            "counts": {"failed": 2, "passed": 1, "skipped": 1},
            "seconds": 1.75,
            "cases": {"good": "passed", "late[x::y]": "failed", "early": "failed", "absent": "skipped"},
        }
    }
