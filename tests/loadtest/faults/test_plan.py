"""The order of a series' runs, what a stopped one goes on with, and jobs that make them side by side."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.faults import jobs, results
from loadtest.faults.__main__ import main
from loadtest.faults.fault import Fault
from loadtest.faults.jobs import Jobs
from loadtest.faults.plan import Plan
from loadtest.faults.table import FAULTS
from tests.limits import AT_ONCE_S, pause
from tests.loadtest.faults.test_results import make_run

CHOSEN = [FAULTS[name] for name in ("engine_killed", "router_killed", "rank_killed", "gcs_killed")]


def taken(plan: Plan, num_jobs: int) -> list[list[tuple[str, int]]]:
    """What each of the jobs gets, in turns."""
    runs: list[list[tuple[str, int]]] = [[] for _ in range(num_jobs)]
    shapes: list[Fault | None] = [None] * num_jobs
    while len(plan):
        for number in range(num_jobs):
            fault = shapes[number]
            if (task := plan.take(fault.shape if fault else None)) is not None:
                shapes[number] = task.fault
                runs[number].append((task.fault.name, task.seed))
    return runs


def test_every_run_is_made_once_and_shapes_stay_together() -> None:
    runs = taken(Plan(CHOSEN, [], 4), num_jobs=3)
    everything = [run for own in runs for run in own]
    assert sorted(everything) == sorted((fault.name, seed) for fault in CHOSEN for seed in range(4))
    for own in runs:
        shapes = [FAULTS[name].shape.name for name, _ in own]
        changes = sum(a != b for a, b in pairwise(shapes))
        assert changes == len(set(shapes)) - 1, "a deployment was started twice"
    assert all(own[0][0] == "gcs_killed" for own in runs[:1]), "the longest begin first"


@pytest.mark.parametrize(("done", "expected"), [([], [0, 1, 2]), ([0, 2], [1]), ([5, 7], [0]), ([0, 1, 2, 3], [])])
def test_a_stopped_series_goes_on_with_moments_of_its_own(done: list[int], expected: list[int]) -> None:
    """Runs of another machine, whose seeds may be any, count too."""
    plan = Plan(CHOSEN[:1], [make_run("engine_killed", "a", seed=seed) for seed in done], 3)
    assert sorted(seed for _, seed in taken(plan, 1)[0]) == expected


def test_runs_are_appended_as_they_end_and_a_job_that_dies_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Real processes with a Series that strikes nothing; one of its faults ends the process, one cannot be made."""
    out = tmp_path / "runs.jsonl"
    results.append(out, make_run("engine_killed", "series", seed=0))
    results.append(out, make_run("engine_killed", "another", seed=1))
    monkeypatch.setattr(jobs, "_work", fake_work)
    chosen = ["engine_killed", "router_killed", "controller_killed", "worker_killed"]
    code = main([*chosen, "--runs", "2", "--jobs", "3", "--label", "series", "--out", str(out)])
    made = sorted((run.fault, run.seed) for run in results.read(out) if run.commit == "series")
    assert made == [("engine_killed", 0), ("engine_killed", 1), ("router_killed", 0), ("router_killed", 1)]
    assert code == 1
    shown = capfd.readouterr().out
    assert "controller_killed 0: not made: no deployment" in shown
    assert "the job's process has ended" in shown


def fake_work(connection: jobs.Connection, label: str, num_tokens: int) -> None:
    while True:
        try:
            name, seed = connection.recv()
        except EOFError:
            return
        if name == "worker_killed" and seed == 1:
            connection.close()
            pause(AT_ONCE_S)  # a process lives on for a while after its connection
            raise SystemExit(3)
        refused = name in ("controller_killed", "worker_killed")
        connection.send("no deployment" if refused else make_run(name, label, seed=seed))


def test_jobs_end_with_the_block() -> None:
    with Jobs(2, "nothing", 40) as started:
        processes = [job._process for job in started._jobs]
        assert all(process.is_alive() for process in processes)
    assert not any(process.is_alive() for process in processes)


def test_a_job_that_ends_its_deployment_is_not_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes would be left running."""
    monkeypatch.setattr(jobs, "_work", end_slowly)
    job = jobs.Job(str(tmp_path / "ended"), 1)
    job.begin(None)
    job.end()
    assert (tmp_path / "ended").exists()


def end_slowly(connection: jobs.Connection, label: str, num_tokens: int) -> None:
    with pytest.raises(EOFError):
        connection.recv()
    Path(label).touch()
