"""Thousands of random lives of an engine: no dead engine, exact tokens, no leaked block (I1, I2, I6, I7)."""

from __future__ import annotations

import pytest

from app.engine.core import EngineCore
from tests.engine.scheduler.random_run import RandomRun


def play(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the seed of a run that fails; and makes sure that pools were full, and drafts right and wrong."""
    num_preemptions = num_drafts = num_accepted = 0
    for seed in seeds:
        try:
            run = RandomRun(seed, monkeypatch, num_stages=1 + seed % 4)
            core = run.play()
        except Exception as error:
            raise AssertionError(f"the run of seed {seed} failed: {type(error).__name__}: {error}") from error
        num_preemptions += core.stats().figures["preemptions"]
        num_drafts, num_accepted = num_drafts + run.device.num_drafts, num_accepted + run.device.num_accepted
    assert num_preemptions > len(seeds)
    assert len(seeds) < num_accepted < num_drafts - len(seeds)


def walked(core: EngineCore) -> tuple[int, int, int, int, int]:
    """What `stats` reports, by asking every request."""
    scheduler, usual = core.scheduler, round(core.scheduler._statistics.output_lengths.average)
    requests, rows = scheduler.requests.values(), scheduler.rows
    running = [request for request in requests if request.row >= 0]
    behind = [min(rows.num_tokens[r.row], rows.limit[r.row]) - rows.num_computed[r.row] for r in running]
    unknown = [r.num_tokens - scheduler.kv.num_known_tokens(r) for r in requests if r.row < 0]
    rest = [min(r.max_total_tokens - r.num_tokens, max(1, usual - r.num_output_tokens)) for r in requests]
    num_paused = sum(request.paused for request in requests)
    return len(running), len(requests) - len(running), num_paused, sum(unknown) + sum(behind), sum(rest)


def test_the_statistics_are_those_of_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(core: EngineCore) -> None:
        core.scheduler.waiting.load.refresh(len(core.scheduler.waiting))
        stats = core.stats()
        outstanding = (stats.outstanding_prefill_tokens, stats.outstanding_decode_tokens)
        assert (stats.num_running, stats.num_waiting, stats.num_paused, *outstanding) == walked(core)
        assert core.scheduler.waiting.load.to_compute == int(core.scheduler.waiting.load._columns[0].sum())

    for seed in range(20):
        RandomRun(seed, monkeypatch, each_step=compare).play()


def test_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    play(range(60), monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_ten_thousand(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play(range(first, first + 1000), monkeypatch)


def play_with_deaths(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine may be lost at any step: another one goes on with the same tokens, drafts and grammars too."""
    num_kills = 0
    for seed in seeds:
        run = RandomRun(seed, monkeypatch, num_stages=1 + seed % 4, has_kills=True)
        try:
            run.play()
        except Exception as error:
            raise AssertionError(f"the run of seed {seed} failed: {type(error).__name__}: {error}") from error
        num_kills += run.num_kills
    assert num_kills > len(seeds) / 2


def test_a_sample_with_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    play_with_deaths(range(40), monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_ten_thousand_with_deaths(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play_with_deaths(range(first, first + 1000), monkeypatch)
