"""The worker calls a feature for what it overrides, in the order of the table, and for nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.records.step import SchedulerOutput
from app.worker.rows.worker_feature import NO_PARTS, WorkerFeature, WorkerFeatures

CALLS: list[tuple[str, str]] = []


class Noted(WorkerFeature):
    def __init__(self, name: str) -> None:
        self.name = name

    def before(self, step: SchedulerOutput) -> None:
        CALLS.append((self.name, "before"))


class WithInputs(Noted):
    def inputs(self, view: Any) -> None:
        CALLS.append((self.name, "inputs"))


class Optional(WithInputs):
    part = "extra"

    def takes_part(self, rows: Any) -> bool:
        return bool(rows.any())


def test_only_what_is_overridden_is_called_in_order() -> None:
    CALLS.clear()
    features = WorkerFeatures([Noted("a"), WithInputs("b"), WorkerFeature()])
    step: Any = None
    features.before(step)
    features.inputs(step, NO_PARTS)
    features.report(step)
    assert CALLS == [("a", "before"), ("b", "before"), ("b", "inputs")]


def test_optional_parts_follow_the_rows() -> None:
    """A step without such a row does not have the part, so it does not pay for it."""
    CALLS.clear()
    features = WorkerFeatures([WithInputs("a"), Optional("b")])
    view: Any = None
    assert features.parts == ["extra"]
    for rows in (np.array([0, 0]), np.array([0, 3])):
        features.inputs(view, features.parts_of(rows))
    assert CALLS == [("a", "inputs"), ("a", "inputs"), ("b", "inputs")]


class Reads(Noted):
    def hidden(self, view: Any, hidden: Any) -> None:
        CALLS.append((self.name, "hidden"))


class ReadsForSome(Reads, Optional):
    """It has its part in steps with such rows alone."""


class ReadsEnds(Reads):
    def reads_all(self, rows: Any) -> bool:
        return False


def test_who_takes_hidden_states_reads_those_of_all_tokens_unless_it_says_otherwise() -> None:
    """A feature that knows nothing of `reads_all` indexes them by tokens."""
    none, some = np.array([0, 0]), np.array([0, 3])
    for feature, expected in (
        (Reads("a"), (True, True)),
        (ReadsForSome("b"), (False, True)),
        (ReadsEnds("c"), (False, False)),
        (WithInputs("d"), (False, False)),
    ):
        features = WorkerFeatures([feature])
        assert (features.read_all(none), features.read_all(some)) == expected, feature.name
