"""The short form of the rig: two classes of faults, once each, against a real deployment of two replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.faults import results
from loadtest.faults.judge import NEVER
from loadtest.faults.series import Series
from loadtest.faults.table import FAULTS

pytestmark = pytest.mark.timeout(300)


def test_two_classes_of_faults(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    with Series(out, "test", num_tokens=40) as series:
        runs = {name: series.run(FAULTS[name], 0) for name in ("router_killed", "engine_killed")}
    for name, run in runs.items():
        assert (run.outcomes, run.findings) == ({"ok": 21}, []), (name, run.errors)
        assert set(run.probes) == {"ok"}, (name, run.errors)
        assert run.whole_s is not None
    assert results.read(out) == list(runs.values())


def one_run(name: str, out: Path) -> results.Run:
    if FAULTS[name].obstacle():
        pytest.skip(FAULTS[name].obstacle())
    with Series(out, "test", num_tokens=300) as series:
        return series.run(FAULTS[name], 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_down_20s", "gcs_down_75s"])
def test_a_gcs_with_redis_may_be_gone(name: str, tmp_path: Path) -> None:
    """docs/running.md: nobody notices, and no process ends."""
    run = one_run(name, tmp_path / "runs.jsonl")
    assert (set(run.outcomes), set(run.probes), run.findings) == ({"ok"}, {"ok"}, []), run.errors


@pytest.mark.slow
def test_a_gcs_without_redis_is_a_fuse_of_a_minute(tmp_path: Path) -> None:
    """docs/running.md: requests are served for a minute, then nothing is."""
    run = one_run("gcs_killed", tmp_path / "runs.jsonl")
    assert run.served_s is not None
    assert 50 < run.served_s < 75
    assert not any(run.outcomes.get(kind) for kind in NEVER), run.errors
