"""The Prometheus text exposition of what several replicas recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from app.telemetry.metrics import METRICS, Metric
from app.telemetry.metrics_recorder import Histogram, Snapshot


class _Collected(Collector):
    """Sums what several replicas counted, as a collector of Prometheus' client library."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterable[Family]:
        """A family for each metric that has series."""
        for metric in METRICS:
            family = Family(metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name,
                            metric.help, metric.kind)  # fmt: skip
            for snapshot in self._snapshots:
                _add_series(family, metric, snapshot)
            if family.samples:
                yield family


def render(snapshots: Iterable[Snapshot]) -> str:
    """The Prometheus text exposition (format 0.0.4) of several replicas together."""
    return generate_latest(_Collected(list(snapshots))).decode()


def _add_series(family: Family, metric: Metric, snapshot: Snapshot) -> None:
    def labels(values: tuple[str, ...]) -> dict[str, str]:
        return {**snapshot.labels, **dict(zip(metric.labels, values, strict=True))}

    for values, value in snapshot.values.get(metric.name, {}).items():
        family.add_sample(metric.name, labels(values), value)
    for values, histogram in snapshot.histograms.get(metric.name, {}).items():
        _add_histogram(family, metric.name, labels(values), histogram)


def _add_histogram(family: Family, name: str, labels: dict[str, str], histogram: Histogram) -> None:
    for bound, total in cumulative(histogram):
        family.add_sample(f"{name}_bucket", {**labels, "le": bound}, total)
    family.add_sample(f"{name}_sum", labels, histogram.sum)
    family.add_sample(f"{name}_count", labels, histogram.count)


def cumulative(histogram: Histogram) -> list[tuple[str, int]]:
    """The label `le` of each bucket, with the number of values up to it."""
    bounds = [floatToGoString(bound) for bound in (*histogram.bounds, math.inf)]  # type: ignore[no-untyped-call]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
