"""A feature of the worker from outside of the tree: one file and one line of the table, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.worker.features import WORKER_FEATURES
from app.worker.graphs.static_step import StepKey
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, Run, decode_statically, greedy

FILE = """
from app.worker.rows.worker_feature import WorkerFeature

class Diary(WorkerFeature):
    reads_layers = (1,)

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

    def inputs(self, view):
        self.seen.append(("inputs", view.rows["rows"].tolist()))

    def hidden(self, view, hidden):
        self.seen.append(("hidden", hidden.last.shape[0], sorted(hidden.inputs_of)))

    def after(self, step, results):
        self.seen.append(("after", results.sampled_token_ids.shape[0]))

    def weights_leave(self):
        self.seen.append(("weights_leave",))

    def weights_change(self, whole):
        self.seen.append(("weights_change", whole))

    def weights_return(self):
        self.seen.append(("weights_return",))

    def settle(self):
        self.seen.append(("settle",))

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
    monkeypatch.setitem(WORKER_FEATURES._table, "diary", "diary_feature:create")
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
        ("before", 1), ("enter", 0, 5), ("inputs", [0]), ("hidden", 4, [1]), ("after", 0), ("report", 1),
        ("before", 2), ("inputs", [0]), ("hidden", 1, [1]), ("after", 1), ("report", 2),
        ("before", 3), ("inputs", [0]), ("hidden", 1, [1]), ("after", 1), ("report", 3),
        ("before", 4), ("leave", 0), ("report", 4), ("close",),
    ]  # fmt: skip


def test_a_feature_is_told_when_memory_goes_and_comes_back(diary: list[tuple[Any, ...]]) -> None:
    """Weights that were dropped come back with the update that brings their contents, not with their memory."""
    worker = Driver(str(tiny_model("llama")), num_blocks=8).worker

    def told(call: Callable[..., Any], *arguments: Any) -> list[Any]:
        diary.clear()
        call(*arguments)
        return [entry[0] for entry in diary]

    for level, returns in ((1, ["weights_return"]), (2, [])):
        assert told(worker.sleep, level) == ["settle", "weights_leave"]
        assert told(worker.wake_up, ["weights"]) == ["settle", *returns]
        assert told(worker.wake_up, ["kv_cache"]) == ["settle", "connect"]
    assert told(worker.begin_update, True) == ["settle", "weights_change"]
    assert told(worker.load_directory, "") == ["settle"]
    assert told(worker.finish_update, True)[:2] == ["settle", "weights_return"]
    assert told(worker.sleep, 1) == ["settle", "weights_leave"]
    assert told(worker.wake_up, ["weights"]) == ["settle", "weights_return"]
    assert told(worker.capture_next) == ["settle"]


ADAPTER = """
import torch
from app.layers.layer import Layer
from app.worker.rows.worker_feature import WorkerFeature

class Shift(WorkerFeature):
    part = "shift"

    def __init__(self, inputs):
        self.by = inputs.declare("shift", torch.float32)
        self.now = None

    def enter(self, row, request):
        self.by.set(row, float(request.spec.choice_index))

    def takes_part(self, rows):
        return bool(self.by.values[rows].any())

    def inputs(self, view):
        self.now = view.of_tokens("shift")

    def hidden(self, view, hidden):
        self.now = None

class Shifted(Layer):
    def __init__(self, inner, feature):
        super().__init__()
        self.inner, self.feature = inner, feature

    def forward(self, input_ids):
        x, by = self.inner(input_ids), self.feature.now
        return x if by is None else x + by[:, None] * x.roll(1, -1)

def create(context):
    feature, decoder = Shift(context.state.inputs), context.forward.model.model
    decoder.embed_tokens = Shifted(decoder.embed_tokens, feature)
    return feature
"""


def test_a_feature_that_feeds_layers_is_in_static_steps_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that does more for some rows: rows beside them get what they get alone, and steps without such rows are
    not those with them."""
    (tmp_path / "shift_feature.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(str(tmp_path))
    prompts = [[5, 9, 200, 7, 3], [44, 8, 100], [17] * 20, [5, 9, 200, 7, 3]]

    def runs() -> list[Run]:
        return [Run(p, greedy(6 + 2 * i), choice_index=i % 3) for i, p in enumerate(prompts)]

    base = [run.tokens for run in Driver(str(tiny_model("llama")), num_blocks=32).run(runs())]
    monkeypatch.setitem(WORKER_FEATURES._table, "shift", "shift_feature:create")
    driver = Driver(str(tiny_model("llama")), num_blocks=32)
    expected = [driver.run([run])[0].tokens for run in runs()]
    assert [ours == plain for ours, plain in zip(expected, base, strict=True)] == [True, False, False, True]
    step = decode_statically(driver.worker, [1, 4])
    seen, forward = set(), step.forward
    monkeypatch.setattr(step, "forward", lambda key: (seen.add(key), forward(key)))
    assert [run.tokens for run in driver.run(runs())] == expected
    assert seen == {StepKey(4, frozenset({"shift"})), StepKey(1)}
