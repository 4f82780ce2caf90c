"""Thousands of random lives of an engine: no dead engine, exact tokens, no leaked block (I1, I2, I6, I7)."""

from __future__ import annotations

import pytest

from tests.engine.scheduler.random_run import RandomRun


def play(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the seed of a run that fails; and makes sure that pools were full."""
    num_preemptions = 0
    for seed in seeds:
        try:
            core = RandomRun(seed, monkeypatch, num_stages=1 + seed % 4).play()
        except Exception as error:
            raise AssertionError(f"the run of seed {seed} failed: {type(error).__name__}: {error}") from error
        num_preemptions += core.stats().preemptions_total
    assert num_preemptions > len(seeds)


def test_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    play(range(60), monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_ten_thousand(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play(range(first, first + 1000), monkeypatch)
