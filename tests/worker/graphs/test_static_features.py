"""Features and proposers in steps over static tensors: they are given there what ordinary steps give them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from app.backends import PROPOSERS
from app.worker.features import WORKER_FEATURES
from app.worker.graphs.static_step import StepKey
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, Run, decode_statically, greedy

FILE = """
import torch
from app.worker.rows.worker_feature import WorkerFeature
from app.worker.spec_decode.base import Proposer

class Ages(WorkerFeature):
    part = "ages"

    def __init__(self, inputs):
        self.of_row = inputs.declare("age", torch.int64, idle=1)
        self.tokens = []

    def enter(self, row, request):
        self.of_row.set(row, request.spec.choice_index)

    def takes_part(self, rows):
        return bool(self.of_row.values[rows].any())

    def inputs(self, view):
        view.layer_inputs["ages"] = view.of_tokens("age") + view.tensors.positions

    def after(self, step, results):
        self.tokens.append(results.sampled_token_ids)

class Reader(Proposer):
    num_draft_tokens = 2

    def __init__(self, inputs, is_capturable):
        self.is_capturable = is_capturable
        self.salts = inputs.declare("salt", torch.int64, idle=9, for_layers=True)
        self.seen = []

    @classmethod
    def create(cls, context):
        return MADE.setdefault("reader", cls(context.inputs, CAPTURABLE))

    def enter(self, row, request):
        self.salts.set(row, 100 + request.spec.choice_index)

    def propose(self, proposal):
        columns, view, ends = proposal.columns, proposal.view, proposal.ends
        known, ages = columns.num_tokens[proposal.rows].long(), view.layer_inputs.get("ages")
        assert (known >= 1).all()
        self.seen.append({
            "rows": proposal.rows.tolist(),
            "salts": view.rows["salt"][: len(proposal.rows)].tolist(),
            "age": None if ages is None else (ages[ends] - view.tensors.positions[ends]).tolist(),
            "layers": sorted(proposal.ctx.inputs),
        })
        return torch.stack((known % 331, known % 97), dim=1)

def ages(context):
    return MADE.setdefault("ages", Ages(context.state.inputs))


MADE = {}
CAPTURABLE = True
"""
ASKED = {"method": "reader", "num_speculative_tokens": 2}
PROMPTS = [[5, 9, 200, 7, 3], [44, 8, 100]]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "aged_features.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "aged_features", raising=False)
    monkeypatch.setitem(WORKER_FEATURES._table, "ages", "aged_features:ages")
    return importlib.import_module("aged_features")


@pytest.mark.parametrize("is_capturable", [True, False])
def test_a_proposer_sees_what_features_bring_and_lines_of_its_own(
    module: Any, monkeypatch: pytest.MonkeyPatch, is_capturable: bool
) -> None:
    """Where it is captured with the step, and where it follows it; in steps with the feature's part and without."""
    monkeypatch.setitem(PROPOSERS._table, "reader", "aged_features:Reader")
    module.CAPTURABLE = is_capturable
    driver = Driver(str(tiny_model("llama")), num_blocks=16, speculative_config=ASKED)
    proposer = module.MADE["reader"]

    def seen(index: int) -> list[dict[str, Any]]:
        proposer.seen.clear()
        driver.run([Run(PROMPTS[0], greedy(4), choice_index=index), Run(PROMPTS[1], greedy(4), choice_index=2 * index)])
        return [{name: told[name] for name in ("salts", "age", "layers")} for told in proposer.seen]

    ordinary = [seen(7), seen(0)]
    decode_statically(driver.worker, [2])
    assert [seen(7), seen(0)] == ordinary
    for steps, salts, age in zip(ordinary, ([107, 114], [100, 100]), ([7, 14], None), strict=True):
        assert len(steps) == 4
        for step in steps:
            assert step["salts"] == salts
            assert step["age"] == age
            assert step["layers"] == ([] if age is None else ["ages"])


def test_a_step_that_is_all_padding_may_look_for_newest_tokens(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is captured: before the first request, when row 0 has had none either."""
    monkeypatch.setitem(PROPOSERS._table, "reader", "aged_features:Reader")
    driver = Driver(str(tiny_model("llama")), num_blocks=16, speculative_config=ASKED)
    step = decode_statically(driver.worker, [4])
    module.MADE["reader"].seen.clear()
    with torch.inference_mode():
        step.inputs.pad_all()
        for key in (StepKey(4, drafts=2), StepKey(4, frozenset({"ages"}), 2), StepKey(4)):
            step.forward(key)
            step.sample(step.sample_key(key))
    assert [(seen["rows"], seen["salts"], seen["age"]) for seen in module.MADE["reader"].seen] == [
        ([0] * 4, [9] * 4, None), ([0] * 4, [9] * 4, [1] * 4), ([0] * 4, [9] * 4, None),
    ]  # fmt: skip


def test_results_of_static_steps_are_the_devices(module: Any) -> None:
    """A feature that reads them would else read host memory that a copy is under way to."""
    driver = Driver(str(tiny_model("llama")), num_blocks=16)
    expected = driver.run([Run(PROMPTS[0], greedy(6))])[0].tokens
    step, tokens = decode_statically(driver.worker, [1]), module.MADE["ages"].tokens
    tokens.clear()
    assert driver.run([Run(PROMPTS[0], greedy(6))])[0].tokens == expected
    assert [found.data_ptr() for found in tokens[1:]] == [step.token_ids.data_ptr()] * 5
