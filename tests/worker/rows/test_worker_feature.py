"""The worker calls a feature for what it overrides, in the order of the table, and for nothing else."""

from __future__ import annotations

from typing import Any

from app.engine.row_feature import RowFeature, RowFeatures
from app.engine.step import SchedulerOutput

CALLS: list[tuple[str, str]] = []


class Noted(RowFeature):
    def __init__(self, name: str) -> None:
        self.name = name

    def before(self, step: SchedulerOutput) -> None:
        CALLS.append((self.name, "before"))


class WithInputs(Noted):
    def inputs(self, batch: Any) -> None:
        CALLS.append((self.name, "inputs"))


def test_only_what_is_overridden_is_called_in_order() -> None:
    CALLS.clear()
    features = RowFeatures([Noted("a"), WithInputs("b"), RowFeature()])
    step: Any = None
    features.before(step)
    features.inputs(step)
    features.report(step)
    assert CALLS == [("a", "before"), ("b", "before"), ("b", "inputs")]
    assert features.gives_inputs
    assert not RowFeatures([Noted("a")]).gives_inputs
