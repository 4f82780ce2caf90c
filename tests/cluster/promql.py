"""Metrics that a PromQL expression asks for, by a parser of the language; and those that Manta exposes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser

from app.telemetry.metrics import METRICS

CHILDREN = ("expr", "lhs", "rhs", "args", "param", "vector_selector")


def metrics_in(expression: str) -> set[str]:
    """Names of the metrics in it. ValueError where it is no PromQL, or a selector names none."""
    return set(_names(promql_parser.parse(expression)))


def _names(node: Any) -> Iterator[str]:
    if isinstance(node, promql_parser.VectorSelector):
        if not node.name:
            raise ValueError(f"a selector without a metric: {node}")
        yield node.name
    for name in CHILDREN:
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child]:
            if each is not None and not isinstance(each, str | float):
                yield from _names(each)


def exposed() -> dict[str, set[str]]:
    """Series names of Manta, each with its labels beside those of the replica."""
    series: dict[str, set[str]] = {}
    for metric in METRICS:
        labels = set(metric.labels)
        if metric.kind == "histogram":
            ends = {"_bucket": labels | {"le"}, "_sum": labels, "_count": labels}
            series |= {metric.name + end: wanted for end, wanted in ends.items()}
        else:
            series[metric.name] = labels
    return series
