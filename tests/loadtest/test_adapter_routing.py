"""The comparison of routers on adapters: its requests, and its table."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from loadtest.adapter_routing import NUM_ADAPTERS, Outcome, main, markdown, zipf_jobs


def test_requests_choose_adapters_by_zipfs_law() -> None:
    jobs = zipf_jobs(4000, 1)
    assert jobs == zipf_jobs(4000, 1)
    counts = Counter(adapter for adapter, _ in jobs)
    assert set(counts) == set(range(NUM_ADAPTERS))
    assert 1.5 < counts[0] / counts[1] < 2.7
    assert 6 < counts[0] / counts[9] < 15
    assert len({prompt for _, prompt in jobs}) == len(jobs)


def test_a_line_for_each_router() -> None:
    figures: dict[str, Any] = {"requests": 3, "failed": 0, "loads": 7.0, "replicas_each": 1.25, "max_mean_load": 1.5}
    times = {"ttft_p50_ms": 10.2, "ttft_p90_ms": 20.0, "ttft_p99_ms": 30.9, "wall_s": 1.0, "load_average": 2.0}
    assert "| mine | 7 | 1.2 | 1.50 | 10 / 20 / 31 | 0 |" in markdown([Outcome("mine", **figures, **times)])


def test_unknown_routers_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--routers", "prefix_aware,magic"])
    assert "unknown routers ['magic']" in capsys.readouterr().err
