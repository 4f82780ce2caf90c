"""Overload in simulated time: who is served, and in time, over the real admission and schedulers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest import overload
from loadtest.modelled_app import SLOWNESS
from loadtest.overload_served import HOSTILE_PROMPTS, MAX_NUM_SEQS, MAX_TOKENS, PROMPTS
from loadtest.simulation.fairness import Outcome, jain, max_min
from loadtest.simulation.overload import OverloadedFleet, Setting
from loadtest.simulation.speeds import Speeds

LENGTH_S = 15.0


def outcome(**setting: object) -> Outcome:
    own = Setting(num_replicas=1, max_num_seqs=16, length_s=LENGTH_S, **setting)  # type: ignore[arg-type]
    return Outcome.of(OverloadedFleet(own).run(), own.deadline_s, 3.0, LENGTH_S)


def test_three_times_too_much_and_a_hostile_tenant() -> None:
    """Goodput stays, tenants get the same, and who is let in is served in time; without it, nobody is."""
    peak = max(outcome(load=load, hostile_share=0.2).goodput for load in (1.0, 1.2))
    found = outcome(load=3.0, hostile_share=0.5)
    assert found.goodput > 0.9 * peak
    assert found.fairness() > 0.95
    assert found.in_time > 0.97
    bare = outcome(load=3.0, hostile_share=0.5, is_guarded=False)
    assert bare.in_time < 0.5
    assert bare.fairness() < 0.8


def test_a_tenant_that_sends_nearly_everything_is_let_in_only_where_its_turn_comes_in_time() -> None:
    """Others come and go, and its queue runs off the more slowly."""
    found = [outcome(load=3.0, hostile_share=0.8, seed=seed) for seed in (0, 2)]
    assert sum(one.num_admitted * (1 - one.in_time) for one in found) / sum(one.num_admitted for one in found) < 0.02
    assert min(one.fairness() for one in found) > 0.95


def test_engines_so_slow_that_a_turn_takes_seconds() -> None:
    """A few rows, answers of seconds: a tenant's queue fills before it is known how fast it runs off."""
    setting = Setting(
        *(3.0, 0.5), max_num_seqs=MAX_NUM_SEQS, deadline_s=15.0, length_s=40.0, prompts=PROMPTS,
        hostile_prompts=HOSTILE_PROMPTS, max_tokens=MAX_TOKENS,
    )  # fmt: skip
    speeds = Speeds().slowed(SLOWNESS)
    found = [
        Outcome.of(OverloadedFleet(replace(setting, hostile_share=share), speeds).run(), 15.0, 40.0 / 6, 40.0)
        for share in (0.2, 0.5, 0.8)
    ]
    assert sum(one.num_admitted * (1 - one.in_time) for one in found) / sum(one.num_admitted for one in found) < 0.01
    assert min(one.fairness() for one in found) > 0.9  # of some 30 requests of each


def test_without_overload_nobody_is_refused() -> None:
    requests = OverloadedFleet(Setting(load=0.6, hostile_share=0.2, num_replicas=1, length_s=8.0)).run()
    assert all(one.admitted_s is not None and one.num_attempts == 1 and not one.is_late for one in requests)


def test_the_indices_are_those_of_their_definitions() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert max_min({"a": 1.0, "b": 10.0, "c": 4.0}, 9.0) == {"a": 1.0, "c": 4.0, "b": 4.0}
    assert max_min({"a": 1.0, "b": 2.0}, 9.0) == {"a": 1.0, "b": 2.0}


def test_it_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "_simulated", lambda setting: {
        **{"load": setting.load, "hostile_share": setting.hostile_share, "is_guarded": setting.is_guarded},
        **{"num_requests": 1, "num_admitted": 1, "in_time": 1.0, "goodput": 10.0 * setting.load, "jain": 1.0},
    })  # fmt: skip
    rows = overload.main(["--out", str(tmp_path / "o")])
    assert [row["of_peak"] for row in rows[:3]] == pytest.approx([2 / 3, 5 / 6, 1.0])
    assert json.loads((tmp_path / "o.json").read_text())["rows"] == rows
    assert capsys.readouterr().out.count("\n") == len(rows) + 2
