"""Who of those that wait begins in a step, looked at before anybody enters a row."""

from __future__ import annotations

import pytest

from app.engine.core import EngineCore
from app.engine.scheduler.starts import MAX_PASSED_OVER, Start
from app.engine.scheduler.step_plan import StepPlan, TokenBudget
from tests.engine.core_driver import make_core, make_request


def starts(core: EngineCore, num_tokens: int, last_returned: int = 0) -> list[Start]:
    plan = StepPlan(TokenBudget(num_tokens))
    plan.budget.open_prefills(crowded=False)
    return list(core.scheduler._starts.of_step(plan, last_returned))


def names(found: list[Start]) -> list[str]:
    return [start.request.request_id for start in found]


def test_a_first_chunk_is_what_the_budget_leaves() -> None:
    core = make_core()
    core.add_request(make_request("a", [*range(100)]))
    (start,) = starts(core, 30)
    assert (start.num_computed, start.remaining, start.chunk, start.room) == (0, 100, 30, 30)
    assert not start.waits
    assert not start.hit.num_blocks


@pytest.mark.parametrize(("num_before", "begins"), [(MAX_PASSED_OVER - 1, True), (MAX_PASSED_OVER, False)])
def test_one_whose_blocks_are_being_computed_is_passed_by_a_few(num_before: int, begins: bool) -> None:
    core = make_core(num_blocks=1000, max_num_batched_tokens=64, max_inflight_steps=1)
    core.add_request(make_request("first", [1] * 400))
    core.step()
    for number in range(num_before):
        core.add_request(make_request(f"same{number}", [1] * 400))
    core.add_request(make_request("other", [2] * 8))
    assert names(starts(core, 64)) == (["other"] if begins else [])


def test_nobody_passes_one_whose_tokens_are_still_coming() -> None:
    core = make_core()
    for name in ("a", "b"):
        core.add_request(make_request(name, [1] * 8))
    core.scheduler.requests["a"].resume_after_step = 5
    assert starts(core, 64, last_returned=4) == []
    assert names(starts(core, 64, last_returned=5)) == ["a", "b"]


def test_where_no_token_is_left_nobody_begins() -> None:
    core = make_core()
    core.add_request(make_request("a", [1] * 8))
    assert starts(core, 0) == []
