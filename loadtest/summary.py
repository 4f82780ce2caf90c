"""Answers of one load level -> figures, over a window that leaves out the warm-up.

Latencies are those of the requests that began in the window, wherever they ended; rates count what happened inside
it (requests that ended, chunks that came), so neither the ramp nor the drain colours them. Percentiles are numpy's
linear ones, as in vLLM's benchmark. Goodput is the rate of requests that met every limit of `Goals`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from loadtest.record import AnswerRecord

PERCENTILES = (50, 90, 99)
METRICS: dict[str, Callable[[AnswerRecord], Iterable[float | None]]] = {
    "ttft": lambda record: [record.ttft_s],
    "tpot": lambda record: [record.tpot_s],
    "itl": lambda record: record.gaps_s,
    "e2e": lambda record: [record.e2e_s],
}


@dataclass(slots=True, frozen=True)
class Goals:
    """Most milliseconds that a good request takes; a metric without a limit is always good."""

    limits_ms: dict[str, float] = field(default_factory=dict)  # by "ttft", "tpot", "e2e"

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Goals:
        """From `metric:milliseconds`, as `ttft:200`; ValueError names the text that is wrong."""
        limits: dict[str, float] = {}
        for text in texts:
            metric, _, limit = text.partition(":")
            try:
                limits[metric] = float(limit)
            except ValueError:
                limits[metric] = 0.0
            if metric not in ("ttft", "tpot", "e2e") or limits[metric] <= 0:
                raise ValueError(f"{text!r} is not ttft:MS, tpot:MS or e2e:MS with a positive number of milliseconds")
        return cls(limits)

    def met_by(self, record: AnswerRecord) -> bool:
        """Whether the answer is whole and within every limit; as in vLLM, an answer of one token has a TPOT of 0."""
        if record.error is not None or record.ttft_s is None:
            return False
        times_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2e": record.e2e_s or 0.0}
        return all(1e3 * times_s[metric] <= limit for metric, limit in self.limits_ms.items())


@dataclass(slots=True, frozen=True)
class LatencySummary:
    """One metric in milliseconds; zeros when it has no sample."""

    num_samples: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> LatencySummary:
        """The distribution of samples in seconds."""
        if not samples_s:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        samples_ms = 1e3 * np.asarray(samples_s)
        p50, p90, p99 = np.percentile(samples_ms, PERCENTILES)
        return cls(len(samples_s), float(samples_ms.mean()), float(p50), float(p90), float(p99))


@dataclass(slots=True, frozen=True)
class LevelSummary:
    """One load level. Rates are per second of the window."""

    window_s: float
    num_requests: int  # begun in the window
    num_failed: int  # in the whole run of the level, outside of the window too
    errors: dict[str, int]  # message -> number
    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    mean_running: float  # requests in flight
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    latency: dict[str, LatencySummary]  # by metric
    by_kind: dict[str, dict[str, LatencySummary]]  # kind of user -> metric
    timeline: list[TimelinePoint]


@dataclass(slots=True, frozen=True)
class TimelinePoint:
    """One slice of the window: what came in it, and the TTFT of the requests that began in it."""

    begin_s: float  # since the begin of the window
    output_tokens_per_s: float
    num_begun: int
    ttft_p50_ms: float
    ttft_p99_ms: float


def summarize(records: Sequence[AnswerRecord], warmup_s: float, window_s: float, goals: Goals) -> LevelSummary:
    """The figures of a level whose first request began `warmup_s` before the window; ValueError without any record."""
    if not records:
        raise ValueError("no request was made")
    begin = min(record.begin for record in records) + warmup_s
    end = begin + window_s
    good = [record for record in records if record.error is None]
    begun = [record for record in good if begin <= record.begin < end]
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    overlap_s = [min(r.begin + r.total_s, end) - max(r.begin, begin) for r in records]
    kinds = sorted({record.kind for record in begun})
    return LevelSummary(
        window_s=window_s,
        num_requests=sum(begin <= record.begin < end for record in records),
        num_failed=sum(errors.values()),
        errors=errors,
        requests_per_s=sum(begin <= record.begin + record.total_s < end for record in good) / window_s,
        output_tokens_per_s=_tokens_between(good, begin, end) / window_s,
        goodput_per_s=sum(goals.met_by(record) for record in begun) / window_s,
        mean_running=sum(max(0.0, overlap) for overlap in overlap_s) / window_s,
        prompt_tokens=sum(record.num_prompt_tokens for record in begun),
        cached_tokens=sum(record.num_cached_tokens for record in begun),
        output_tokens=sum(record.num_output_tokens for record in begun),
        latency=_latencies(begun),
        by_kind={kind: _latencies([record for record in begun if record.kind == kind]) for kind in kinds},
        timeline=_timeline(good, begin, window_s),
    )


def _latencies(records: Sequence[AnswerRecord]) -> dict[str, LatencySummary]:
    return {
        name: LatencySummary.of([time_s for record in records for time_s in times_of(record) if time_s is not None])
        for name, times_of in METRICS.items()
    }


def _tokens_between(records: Sequence[AnswerRecord], begin: float, end: float) -> float:
    """Output tokens that came in [begin, end); a chunk of an answer holds the same share of its tokens as any other."""
    total = 0.0
    for record in records:
        if record.ttft_s is None or record.begin >= end or record.begin + record.total_s < begin:
            continue
        times = record.chunk_times()
        total += record.num_output_tokens * sum(begin <= time < end for time in times) / len(times)
    return total


def _timeline(
    records: Sequence[AnswerRecord], begin: float, window_s: float, num_slices: int = 30
) -> list[TimelinePoint]:
    slice_s = window_s / num_slices
    points = []
    for i in range(num_slices):
        start = begin + i * slice_s
        begun = [r.ttft_s for r in records if start <= r.begin < start + slice_s and r.ttft_s is not None]
        ttft = LatencySummary.of(begun)
        tokens_per_s = _tokens_between(records, start, start + slice_s) / slice_s
        points.append(TimelinePoint(i * slice_s, tokens_per_s, len(begun), ttft.p50_ms, ttft.p99_ms))
    return points
