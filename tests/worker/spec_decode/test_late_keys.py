"""Keys of steps without drafts wait, and are there when drafts are asked for or anybody else may read them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.engine.scheduler.draft_lengths import DraftLengths
from app.engine.scheduler.row_table import IntArray
from app.kernels.attention import AttentionMetadata
from app.layers.attention import Attention
from app.layers.context import ForwardContext, HiddenStates
from app.records.step import SchedulerOutput
from app.worker.spec_decode import late_keys
from app.worker.spec_decode.late_keys import LateKeys
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.spec_decode.mtp_checkpoints import with_layer_behind
from tests.worker.spec_decode.test_chain import (
    COUNT,
    MADE,
    MAX_TOKENS,
    SHAPE,
    assert_drafts,
    config_of,
    prompts,
    run_greedy,
)

own_waits = LateKeys._waits
WANTED = 3  # the layer whose input is read


class Now(DraftLengths):
    """Drafts in two steps of five."""

    def __init__(self) -> None:
        super().__init__(COUNT)
        self._num_steps = 0

    def choose(self, rows: IntArray) -> int:
        self._num_steps += 1
        return COUNT if self._num_steps % 5 >= 3 else 0

    def is_due(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("name", "waits"), [("eagle3", True), ("eagle", True), ("glm4_moe", True), ("deepseek_v3", False)]
)
def test_drafts_after_steps_without_are_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, waits: bool
) -> None:
    """Requests come and go meanwhile, as there are fewer rows than prompts. Latent attention does not wait."""
    asked: list[bool] = []
    monkeypatch.setattr(LateKeys, "_waits", lambda *args: asked.append(own_waits(*args)) or asked[-1])
    drafting: dict[str, Any] = {"num_speculative_tokens": COUNT}
    if name in MADE:
        model = tiny_model("llama", **SHAPE)
        target = hf_model(model)
        reference = MADE[name][1](tmp_path, target)
        drafting |= {"method": name, "model": str(tmp_path)}
    else:
        model, target, reference = with_layer_behind(name, tmp_path)
        drafting |= {"method": "mtp"}
    config = config_of(model, drafting, max_num_seqs=2)
    answers, spy = run_greedy(config, lengths=Now())
    assert answers == [hf_greedy(target, prompt, MAX_TOKENS) for prompt in prompts()]
    assert_drafts(spy, reference, COUNT)
    assert asked
    assert any(asked) == waits
    assert not all(asked), "steps that verify drafts are to be among them"


class Plan:
    """Stands for what a backend computes once a step."""


class Keeper:
    """Stands for a drafter of one layer, the second that attends; counts what it is to keep."""

    def __init__(self, window: int | None = None) -> None:
        layer: Any = Attention.__new__(Attention)
        torch.nn.Module.__init__(layer)
        layer.layer_index, layer.sliding_window = 1, window
        self.passes: list[tuple[list[int], list[int], list[int], list[int]]] = []
        self.late = LateKeys(self.keep, [layer], [])
        self.plans: list[weakref.ref[Any]] = []
        self._next = 0

    def keep(self, following: torch.Tensor, hidden: HiddenStates, ctx: ForwardContext) -> None:
        assert torch.equal(hidden.last[:, 0], hidden.inputs_of[WANTED][:, 0] - 0.5)
        read = hidden.last[:, 0].int().tolist()
        self.passes.append(
            (following.tolist(), read, ctx.positions.tolist(), ctx.attention[1].slot_mapping.tolist()),
        )

    def step(self, count: int, drafted: bool = False, **features: torch.Tensor) -> list[int]:
        """Returns the numbers of its tokens, which all that is said of them tells."""
        numbers = list(range(self._next, self._next + count))
        self._next += count
        at = torch.tensor(numbers)
        none = torch.empty(0, dtype=torch.int32)
        rows = np.zeros(1, np.int64) if drafted else None
        metas = [
            AttentionMetadata(none, none, none, at + shift, 1, 1, count, plan=Plan(), drafted=rows)
            for shift in (0, 1000)
        ]
        self.plans += [weakref.ref(meta.plan) for meta in metas]
        read = at[:, None].expand(-1, 2).float()
        ctx = ForwardContext(at + 2, metas, [], inputs=features, memo={0: metas}, wanted=frozenset({WANTED}))
        self.late.add(at + 1, HiddenStates(read, {WANTED: read + 0.5}), ctx)
        return numbers

    def again(self, count: int) -> None:
        """The last tokens were wrong: the next step writes the same slots."""
        self._next -= count


def of(numbers: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    at = np.array(numbers)
    return (at + 1).tolist(), numbers, (at + 2).tolist(), (at + 1000).tolist()


def message(**diffs: Any) -> SchedulerOutput:
    none = np.empty(0, np.int32)
    return SchedulerOutput(2, none, none, np.empty(0, np.bool_), **diffs)


@pytest.mark.parametrize("diff", [{"freed_rows": [1]}, {"new_requests": [object()]}, {"transfers": object()}])
def test_several_steps_are_one_pass(diff: dict[str, Any]) -> None:
    keeper = Keeper()
    numbers = keeper.step(3) + keeper.step(2)
    keeper.late.settle_before(message())
    assert not keeper.passes
    keeper.late.settle_before(message(**diff))
    assert keeper.passes == [of(numbers)]
    keeper.late.settle()
    assert len(keeper.passes) == 1


def test_no_more_tokens_wait_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_keys, "MOST_TOKENS", 8)
    monkeypatch.setattr(late_keys, "MOST_OF_STEP", 5)
    keeper = Keeper()
    first = keeper.step(5) + keeper.step(3)
    assert not keeper.passes
    second = keeper.step(1)
    assert keeper.passes == [of(first)]
    large = keeper.step(6)
    assert keeper.passes == [of(first), of(second), of(large)]
    keeper.late.settle()
    assert len(keeper.passes) == 3


@pytest.mark.parametrize("wrong", [2, 5])
def test_slots_of_wrong_drafts_are_last_those_of_the_next_step(wrong: int) -> None:
    """The next step may wait, and no pass has a slot twice."""
    keeper = Keeper()
    before, verified = keeper.step(2), keeper.step(6, drafted=True)
    assert keeper.passes == [of(before), of(verified)]
    keeper.again(wrong)
    behind = keeper.step(1) + keeper.step(6)
    assert len(keeper.passes) == 2
    keeper.late.settle()
    assert keeper.passes[2:] == [of(behind)]


def test_a_step_that_may_not_wait_comes_after_those_that_do() -> None:
    keeper = Keeper()
    first, pictures = keeper.step(3), keeper.step(2, pictures=torch.empty(0))
    assert keeper.passes == [of(first), of(pictures)]


def test_plans_of_steps_that_wait_are_not_held() -> None:
    keeper = Keeper()
    numbers = keeper.step(3) + keeper.step(2)
    gc.collect()
    assert [plan() for plan in keeper.plans] == [None] * 4
    keeper.late.settle()
    assert keeper.passes == [of(numbers)]


def test_nothing_waits_whose_slots_may_be_another_request_s() -> None:
    keeper = Keeper(window=8)
    assert keeper.passes == [of(keeper.step(2))]


def test_what_waits_is_forgotten_with_the_cache() -> None:
    keeper = Keeper()
    keeper.step(2)
    keeper.late.forget()
    keeper.late.settle()
    assert not keeper.passes
