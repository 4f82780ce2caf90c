"""Carries what an engine counts, from the place that counts it to the line of METRICS that shows it.

A figure is a number with a name. Lines of METRICS read `figures.<name>`; the scheduler, the workers (in the outputs of
their steps) and the KV connector report figures by these names, and nothing in between knows any of them. What routing
and scaling decide on has fields of its own instead (records/stats.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from app.telemetry.metrics import METRICS

SOURCE = "figures"
_KINDS = {name: metric.kind for metric in METRICS for _, source, name in metric.sources if source == SOURCE}


class Figures:
    """All declared figures of one engine, 0 at first; an undeclared name is a KeyError. One thread writes."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[str, float] = dict.fromkeys(_KINDS, 0)

    def add(self, name: str, amount: float = 1) -> None:
        """Count on."""
        self._values[name] += amount

    def take(self, reported: Mapping[str, float]) -> None:
        """Take in what somebody reports now and then: totals by what they grew, gauges as they are."""
        for name, value in reported.items():
            self._values[name] = value + self._values[name] if _KINDS[name] == "counter" else value

    def values(self) -> dict[str, float]:
        """Returns all of them as of now; callable from any thread."""
        return dict(self._values)
