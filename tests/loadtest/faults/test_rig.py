"""The short form of the rig: two classes of faults, once each, against a real deployment of two replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.faults import results
from loadtest.faults.__main__ import Series
from loadtest.faults.judge import NEVER
from loadtest.faults.table import FAULTS

pytestmark = pytest.mark.timeout(300)


def test_two_classes_of_faults(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    with Series(out, "test", num_tokens=40) as series:
        runs = {name: series.run(FAULTS[name], 0) for name in ("router_killed", "engine_killed")}
    for name, run in runs.items():
        assert run.findings == [], name
        assert not any(run.outcomes.get(kind) for kind in NEVER), (name, run.errors)
        assert run.whole_s is not None
        assert sum(run.outcomes.values()) == 21
    assert runs["router_killed"].outcomes == {"ok": 21}, runs["router_killed"].errors
    assert set(runs["router_killed"].probes) == {"ok"}
    assert results.read(out) == list(runs.values())
