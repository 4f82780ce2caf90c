"""The figures of a level, against values worked out by hand and against numpy on the raw samples."""

from __future__ import annotations

import random

import numpy as np
import pytest

from loadtest.record import AnswerRecord
from loadtest.summary import Goals, LatencySummary, summarize


def _answer(begin: float, ttft_s: float = 1.0, gaps: int = 4, gap_s: float = 0.5, kind: str = "chat") -> AnswerRecord:
    total_s = ttft_s + gaps * gap_s
    return AnswerRecord(kind, begin, ttft_s, [gap_s] * gaps, total_s, 10, 5, gaps + 1)


def test_window_by_hand() -> None:
    # Window: 102 to 112. The first answer begins the run; only its last two chunks come in the window.
    records = [_answer(100.0), _answer(103.0), _answer(104.0, kind="bursty"), _answer(111.0), _answer(113.0)]
    summary = summarize(records, warmup_s=2.0, window_s=10.0, goals=Goals())
    assert summary.num_requests == 3  # those that began at 103, 104 and 111
    assert summary.requests_per_s == pytest.approx(3 / 10)  # ended at 103, 106 and 107; 114 and 116 are outside
    # chunks: 100 -> 102.0, 102.5, 103.0; 103 and 104 -> five each; 111 -> none before 112; 113 -> none
    assert summary.output_tokens_per_s == pytest.approx((3 + 5 + 5) / 10)
    assert summary.mean_running == pytest.approx((1 + 3 + 3 + 1) / 10)
    assert summary.latency["ttft"] == LatencySummary(3, 1000.0, 1000.0, 1000.0, 1000.0)
    assert summary.latency["e2e"].p50_ms == pytest.approx(3000)
    assert summary.latency["itl"].num_samples == 12
    assert {kind: latencies["ttft"].num_samples for kind, latencies in summary.by_kind.items()} == {
        "chat": 2,
        "bursty": 1,
    }
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (30, 15, 15)
    assert sum(point.num_begun for point in summary.timeline) == 3
    tokens = sum(point.output_tokens_per_s for point in summary.timeline) * 10 / len(summary.timeline)
    assert tokens == pytest.approx(13)


def test_percentiles_are_numpys() -> None:
    rng = random.Random(1)
    records = [
        _answer(rng.uniform(0, 9), rng.uniform(0.1, 2), rng.randint(0, 9), rng.uniform(0.01, 0.1)) for _ in range(300)
    ]
    records[0].begin = 0.0
    latency = summarize(records, 0.0, 100.0, Goals()).latency
    ttft = [1e3 * record.ttft_s for record in records if record.ttft_s is not None]
    itl = [1e3 * gap for record in records for gap in record.gaps_s]
    tpot = [1e3 * record.tpot_s for record in records if record.tpot_s is not None]
    for name, samples in {"ttft": ttft, "itl": itl, "tpot": tpot}.items():
        assert latency[name].num_samples == len(samples)
        assert latency[name].mean_ms == pytest.approx(np.mean(samples))
        assert latency[name].p90_ms == pytest.approx(np.percentile(samples, 90))
        assert latency[name].p99_ms == pytest.approx(np.percentile(samples, 99))


def test_failures_are_counted_wherever_they_happen() -> None:
    records = [
        _answer(0.0),
        _answer(3.0),
        AnswerRecord("chat", 0.5, error="cut"),
        AnswerRecord("chat", 4.0, error="cut"),
    ]
    summary = summarize(records, 1.0, 10.0, Goals())
    assert (summary.num_failed, summary.errors) == (2, {"cut": 2})
    assert summary.num_requests == 2
    assert summary.latency["ttft"].num_samples == 1


def test_no_answer_at_all() -> None:
    with pytest.raises(ValueError, match="no request"):
        summarize([], 0.0, 1.0, Goals())
    summary = summarize([AnswerRecord("chat", 0.0, error="refused")], 0.0, 1.0, Goals())
    assert summary.latency["ttft"].num_samples == 0


def test_goodput() -> None:
    goals = Goals.parse(["ttft:500", "tpot:100", "e2e:2000"])
    assert goals.met_by(_answer(0, 0.5, 10, 0.1))
    assert not goals.met_by(_answer(0, 0.51, 10, 0.1))
    assert not goals.met_by(_answer(0, 0.5, 10, 0.11))
    assert not goals.met_by(_answer(0, 0.5, 16, 0.1))
    assert goals.met_by(_answer(0, 0.5, 0))  # one token: no TPOT
    assert not goals.met_by(AnswerRecord("chat", 0.0, ttft_s=0.1, error="cut"))
    assert not goals.met_by(AnswerRecord("chat", 0.0))
    records = [_answer(0, 0.1, 2, 0.01), _answer(1, 0.9, 2, 0.01), _answer(2, 0.2, 2, 0.01)]
    assert summarize(records, 0.0, 10.0, goals).goodput_per_s == pytest.approx(0.2)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:-1", "itl:5", ":5"])
def test_goals_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="ttft:MS"):
        Goals.parse([text])
