"""An engine's figures as `LLM.get_metrics()` tells them: vLLM's names and classes, of what an engine counts alone.

Counters are named without `_total`, as there; acceptance by position is one Vector. Histograms are a server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.records.stats import EngineStats
from app.telemetry.metrics import METRICS
from app.telemetry.metrics import Metric as Declared


@dataclass(slots=True, frozen=True)
class Metric:
    """Base of what is told."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: int = 0


@dataclass(slots=True, frozen=True)
class Gauge(Metric):
    """A number as it is now."""

    value: float = 0.0


@dataclass(slots=True, frozen=True)
class Vector(Metric):
    """Numbers that only grow, by position."""

    values: tuple[int, ...] = ()


def metrics_of(stats: EngineStats, num_positions: int = 0) -> list[Metric]:
    """All that `stats` tells; `num_positions`: drafts of a request in a step."""
    return [told for declared in METRICS for told in _told(declared, stats, num_positions)]


def _told(declared: Declared, stats: EngineStats, num_positions: int) -> list[Metric]:
    found = {
        labels: stats.figures.get(name, 0) if source == "figures" else getattr(stats, name)
        for labels, source, name in declared.sources
        if source in ("figures", "stats")
    }
    name = declared.name.removesuffix("_total")
    if declared.labels == ("position",):
        return [Vector(name, {}, tuple(int(value) for value in list(found.values())[:num_positions]))]
    if declared.kind == "counter":
        return [Counter(name, _named(declared, labels), int(value)) for labels, value in found.items()]
    return [Gauge(name, _named(declared, labels), float(value)) for labels, value in found.items()]


def _named(declared: Declared, labels: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(declared.labels, labels, strict=True))
