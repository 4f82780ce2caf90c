"""Every figure has a line of METRICS, and every line that reads something finds it."""

from __future__ import annotations

from dataclasses import fields
from string import digits

import pytest

from app.records.stats import EngineStats, RequestTimings, StepStats
from app.telemetry.figures import Figures
from app.telemetry.metrics import METRICS
from tests.rooms import FILES

SOURCES = {(source, name): metric for metric in METRICS for _, source, name in metric.sources}


def test_totals_grow_and_gauges_change() -> None:
    figures = Figures()
    assert set(figures.values().values()) == {0}
    figures.add("preemptions")
    figures.take({"preemptions": 2, "expert_imbalance": 1.5})
    figures.take({"expert_imbalance": 1.25})
    assert (figures.values()["preemptions"], figures.values()["expert_imbalance"]) == (3, 1.25)


def test_an_undeclared_figure_is_an_error() -> None:
    with pytest.raises(KeyError):
        Figures().add("no_such_figure")
    with pytest.raises(KeyError):
        Figures().take({"no_such_figure": 1.0})


def test_lines_read_what_the_records_have() -> None:
    """`step` also finds what a step measured, by names that whoever measures it writes."""
    of_steps = {field.name for field in fields(StepStats)}
    for source, name in SOURCES:
        if source == "stats":
            assert hasattr(EngineStats, name), name
        elif source == "request":
            assert hasattr(RequestTimings, name), name
        else:
            assert source in ("figures", "step"), source
            assert name in of_steps or is_written(name), name


def is_written(name: str) -> bool:
    """True if a file other than the table of metrics has the name as a text, or its stem before a number."""
    texts = (f'"{name}"', f'"{name.rstrip(digits)}{{')
    return any(text in path.read_text() for path in FILES if path.name != "metrics.py" for text in texts)


def test_a_figure_is_of_one_kind() -> None:
    for (source, name), metric in SOURCES.items():
        kinds = {other.kind for other in METRICS for _, *place in other.sources if place == [source, name]}
        assert len(kinds) == 1, (name, metric.name)
        assert "histogram" not in kinds or source in ("step", "request")
