"""Records the series of one replica's metrics, and carries them to the process that writes the page."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from app.telemetry.metrics import METRICS, TOKENS, Scope


class Histogram(msgspec.Struct, array_like=True):
    """Counts per bucket (not cumulative; the last is above all bounds), with sum and count."""

    bounds: list[float]
    counts: list[int]
    sum: float = 0.0
    count: int = 0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.count += 1

    def observe_many(self, values: NDArray[np.float64]) -> None:
        """Count each of `values` [any length]."""
        if not values.size:
            return
        buckets = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [old + int(new) for old, new in zip(self.counts, buckets, strict=True)]
        self.sum += float(values.sum())
        self.count += int(values.size)


class Snapshot(msgspec.Struct):
    """All series of one replica, as they travel; inner keys are the values of the metric's own labels."""

    labels: dict[str, str]
    values: dict[str, dict[tuple[str, ...], float]]
    histograms: dict[str, dict[tuple[str, ...], Histogram]]


@dataclass(slots=True)
class MetricsRecorder:
    """The metrics of one replica. Each series has one writing thread; an undeclared name is a KeyError."""

    labels: dict[str, str]
    scope: Scope = "engine"  # which families this replica exposes
    max_tokens: int = 1 << 20  # largest bucket of the token counts
    _values: dict[str, dict[tuple[str, ...], float]] = field(default_factory=dict)
    _histograms: dict[str, dict[tuple[str, ...], Histogram]] = field(default_factory=dict)
    _bounds: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Series whose labels are known start at zero: `increase` does not see what a series is born with, so the first
        requests that a dead replica loses, or that fail, would raise no alert."""
        for metric in METRICS:
            if self.scope not in metric.scopes:
                continue
            if metric.kind == "histogram":
                cut = self.max_tokens if metric.buckets is TOKENS else float("inf")
                self._bounds[metric.name] = [bound for bound in metric.buckets if bound <= cut]
                self._histograms[metric.name] = {}
                if not metric.labels:
                    self.histogram(metric.name)
            else:
                self._values[metric.name] = dict.fromkeys(metric.known_series, 0.0)
        self.set("process_start_time_seconds", psutil.Process().create_time())

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Count a value in a histogram."""
        self.histogram(name, *labels).observe(value)

    def increment(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """Add to a counter."""
        series = self._values[name]
        series[labels] = series.get(labels, 0.0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge, or a counter that is counted elsewhere."""
        self._values[name][labels] = value

    def replace(self, name: str, series: Mapping[tuple[str, ...], float]) -> None:
        """Set all series of a metric that is counted elsewhere; others end."""
        self._values[name] = dict(series)

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The histogram itself, for a loop that observes often."""
        series = self._histograms[name]
        found = series.get(labels)
        if found is None:
            bounds = self._bounds[name]
            found = series[labels] = Histogram(bounds, [0] * (len(bounds) + 1))
        return found

    def series(self) -> Snapshot:
        """All series as they are; they go on changing."""
        return Snapshot(self.labels, self._values, self._histograms)

    def snapshot(self) -> bytes:
        """All series, for `render` in another process."""
        return msgspec.msgpack.encode(self.series())


def decode_snapshot(data: bytes) -> Snapshot:
    """Read a snapshot from its bytes."""
    return msgspec.msgpack.decode(data, type=Snapshot)
