"""Metrics that a PromQL expression asks for, by a parser of the language; and those that Manta exposes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser
from promql_parser import VectorSelector

from app.telemetry.metrics import METRICS

CHILDREN = ("expr", "lhs", "rhs", "args", "param", "vector_selector")


def metrics_in(expression: str) -> set[str]:
    """Names of the metrics in it. ValueError where it is no PromQL, or a selector names none."""
    selectors = [node for node in _nodes(promql_parser.parse(expression)) if isinstance(node, VectorSelector)]
    if not all(selector.name for selector in selectors):
        raise ValueError(f"a selector without a metric: {expression}")
    return {selector.name for selector in selectors}


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in CHILDREN:
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child]:
            if each is not None and not isinstance(each, str | float):
                yield from _nodes(each)


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


def labels_in(expression: str) -> set[str]:
    """Labels that it selects or groups by, but for `le`."""
    return {label for node in _nodes(promql_parser.parse(expression)) for label in _labels(node)} - {"le", "__name__"}


def _labels(node: Any) -> Iterator[str]:
    if isinstance(node, VectorSelector):
        yield from (matcher.name for matcher in node.matchers.matchers)
    elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        yield from node.modifier.labels
