"""A per-row feature from outside of the tree: one file and one line of the table, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from app.engine.worker.features import ROW_FEATURES
from tests.engine.worker_driver import Driver, Run, greedy
from tests.tiny_models import tiny_model

FILE = """
from app.engine.row_feature import RowFeature

class Diary(RowFeature):
    def __init__(self):
        self.seen = []

    def connect(self, kv_caches):
        self.seen.append(("connect", len(kv_caches)))

    def before(self, step):
        self.seen.append(("before", step.step_id))

    def leave(self, row):
        self.seen.append(("leave", row))

    def enter(self, row, request):
        self.seen.append(("enter", row, request.num_prompt_tokens))

    def inputs(self, batch):
        self.seen.append(("inputs", batch.rows.tolist()))

    def after(self, batch, hidden, results):
        self.seen.append(("after", hidden.shape[0], results.sampled_token_ids.shape[0]))

    def report(self, output):
        self.seen.append(("report", output.step_id))

    def close(self):
        self.seen.append(("close",))

DIARY = Diary()

def create(context):
    return DIARY if context.forward.link.is_last else None
"""


@pytest.fixture
def diary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    (tmp_path / "diary_feature.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(ROW_FEATURES._table, "diary", "diary_feature:create")
    monkeypatch.delitem(sys.modules, "diary_feature", raising=False)
    import diary_feature  # type: ignore[import-not-found]

    seen: list[tuple[Any, ...]] = diary_feature.DIARY.seen
    return seen


def test_a_feature_is_told_of_rows_and_steps_in_order(diary: list[tuple[Any, ...]]) -> None:
    driver = Driver(str(tiny_model("llama")), num_blocks=8, chunk=4)
    assert diary[0] == ("connect", 2)
    diary.clear()
    driver.run([Run([5, 9, 200, 7, 3], greedy(2))])
    driver.worker.shutdown()
    assert diary == [
        ("before", 1), ("enter", 0, 5), ("inputs", [0]), ("after", 4, 0), ("report", 1),
        ("before", 2), ("inputs", [0]), ("after", 1, 1), ("report", 2),
        ("before", 3), ("inputs", [0]), ("after", 1, 1), ("report", 3),
        ("before", 4), ("leave", 0), ("report", 4), ("close",),
    ]  # fmt: skip


def test_a_feature_that_feeds_layers_rules_static_decodes_out(
    diary: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs would leave its inputs out: a start says that it goes without them, and why."""
    monkeypatch.setattr("app.engine.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    runner = Driver(str(tiny_model("llama")), num_blocks=8).worker._runner
    assert runner is not None
    assert runner._decode is None
    assert runner._features.gives_inputs
