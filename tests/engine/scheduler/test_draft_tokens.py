"""Steps that bring several tokens a row: the host's half of it. Tokens are those of plain decoding, fewer steps do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.engine.scheduler.in_flight import InFlightStep
from app.engine.scheduler.sampled_tokens import SampledTokens
from app.records.stats import RequestTimings, StepStats
from app.records.step import ModelRunnerOutput
from app.records.thinking_budget import ThinkingBudget
from tests.engine.core_driver import assert_idle, make_core, make_request, run
from tests.engine.fake_executor import FakeExecutor, expected_tokens

PROMPT = [5, 6, 7, 8, 9, 10]
ANSWER = expected_tokens(PROMPT, 7, 24)


class Recorder:
    """Keeps what the engine measured."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def record_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def record_finished(self, timings: RequestTimings) -> None:
        """Not looked at here."""

    def record_phases(self, schedule_s: float, wait_s: float, update_s: float) -> None:
        """Nobody asks."""


@pytest.mark.parametrize(("quality", "most_steps"), [(1.0, 6), (0.0, 30)])
@pytest.mark.parametrize("late", [False, True])
def test_right_drafts_save_steps_and_wrong_ones_change_nothing(quality: float, most_steps: int, late: bool) -> None:
    core = make_core(num_draft_tokens=4, draft_quality=quality, late=late)
    results = run(core, [make_request("r", PROMPT, max_tokens=24, logprobs=0)])
    assert results.tokens["r"] == ANSWER
    assert core.stats().steps_total - 1 - late <= most_steps
    assert core.stats().figures["generation_tokens"] == 24
    final, figures = results.final["r"], core.stats().figures
    assert (final.num_right_drafts, final.num_wrong_drafts) == (
        figures.get("accepted_tokens", 0), figures["draft_tokens"] - figures.get("accepted_tokens", 0)
    )  # fmt: skip
    assert final.num_right_drafts > 10 if quality else final.num_wrong_drafts > 10
    assert_idle(core)


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_end_in_the_midst_of_a_step(cut: int) -> None:
    """Tokens past a stop token, the model's end token or max_tokens are dropped, their logprobs too."""
    token = ANSWER[cut - 1]
    assert token not in ANSWER[: cut - 1]
    ends: list[tuple[dict[str, Any], str, int | None]] = [
        ({"stop_token_ids": [token]}, "stop", token),
        ({"ignore_eos": False}, "stop", None),
        ({"max_tokens": cut, "ignore_eos": True}, "length", None),
    ]
    for params, reason, stop_reason in ends:
        for logprobs in (None, 0):
            core = make_core(num_draft_tokens=5, eos=token)
            wishes = {"max_tokens": 24, "ignore_eos": "ignore_eos" not in params, "logprobs": logprobs, **params}
            results = run(core, [make_request("r", PROMPT, **wishes)])
            final = results.final["r"]
            assert (results.tokens["r"], final.finish_reason) == (ANSWER[:cut], reason)
            assert final.stop_reason == stop_reason
            assert len(final.logprobs or []) == (0 if logprobs is None else len(final.new_token_ids))
            assert core.stats().figures["generation_tokens"] == cut
            assert_idle(core)


def test_blocks_of_accepted_drafts_are_found_again() -> None:
    core = make_core(num_draft_tokens=3, draft_quality=0.7)
    run(core, [make_request("first", PROMPT, max_tokens=20)])
    results = run(core, [make_request("second", PROMPT + ANSWER[:20], max_tokens=4)])
    assert results.tokens["second"] == expected_tokens(PROMPT + ANSWER[:20], 7, 4)
    assert results.final["second"].num_cached_tokens >= len(PROMPT) + 20 - 4 - 4


def test_drafts_take_nothing_from_prompts() -> None:
    """Neither tokens of the step nor blocks: a prompt that came is computed as soon as without drafts."""
    core = make_core(num_draft_tokens=4, max_num_batched_tokens=8, max_num_seqs=4, num_blocks=20)
    for number in range(3):
        core.add_request(make_request(f"{number}", PROMPT, max_tokens=30, choice_index=number))
    for _ in range(6):
        core.step()
    executor = core.executor
    assert isinstance(executor, FakeExecutor)
    assert executor.step_messages[-1].num_tokens == 8
    core.add_request(make_request("new", [20, 21, 22, 23, 24], max_tokens=2))
    core.step()
    entered = next(step for step in reversed(executor.step_messages) if step.new_requests)
    assert entered.num_draft_tokens is None
    assert entered.num_scheduled_tokens.tolist() == [1, 1, 1, 5]


def test_rows_that_may_not_draft_are_left_with_none() -> None:
    """A thinking budget counts on exact lengths: steps of such rows alone say that nobody wants any, so that the
    workers need no room for them; beside others, prompts too, nothing changes."""
    core = make_core(num_draft_tokens=4, max_inflight_steps=1)
    thinks = (ThinkingBudget(9, (), (3,)),)
    core.add_request(replace(make_request("thinks", PROMPT, max_tokens=20), asks=thinks))
    for _ in range(4):
        core.step()
    executor = core.executor
    assert isinstance(executor, FakeExecutor)
    assert [step.num_proposed for step in executor.step_messages] == [0] * 4
    assert all(step.num_draft_tokens is None for step in executor.step_messages)
    core.add_request(make_request("drafts", PROMPT, max_tokens=20, choice_index=1))
    for _ in range(2):
        core.step()
    entered, verified = executor.step_messages[-2:]
    assert [one.spec.request_id for one in entered.new_requests] == ["drafts"]
    assert entered.num_proposed == verified.num_proposed == 4
    assert verified.num_draft_tokens is not None
    assert sorted(verified.num_draft_tokens.tolist()) == [0, 4]


def test_intervals_are_those_between_tokens() -> None:
    recorder = Recorder()
    core = make_core(num_draft_tokens=4, recorder=recorder, max_inflight_steps=1)
    times = iter(np.arange(1.0, 1e3).tolist())
    core.scheduler._output_updater._clock = lambda: next(times)
    run(core, [make_request("r", PROMPT, max_tokens=11)])
    intervals = [interval for step in recorder.steps for interval in np.asarray(step.itl_s).tolist()]
    assert intervals == [pytest.approx(0.2)] * 10


def test_an_output_that_breaks_the_rules_is_noticed() -> None:
    rows, samples = np.arange(2, dtype=np.int32), np.array([True, False])
    step = InFlightStep(9, rows, rows + 4, samples, rows.astype(np.int64) + 1, 9, 9, np.array([3, 0], np.int32))
    tokens = np.array([1, 2, 3, 4], np.int32)
    rejected = step.rejected(ModelRunnerOutput(9, tokens, np.array([4], np.int32)))
    assert rejected is not None
    assert rejected.tolist() == [0, 0]
    for num_each, complaint in ((None, "does not say"), ([5], "nobody asked"), ([0], "nobody asked")):
        counts = None if num_each is None else np.array(num_each, np.int32)
        with pytest.raises(AssertionError, match=complaint):
            step.rejected(ModelRunnerOutput(9, tokens, counts))
    with pytest.raises(AssertionError, match="step 9: 4 tokens for 1 rows"):
        SampledTokens.of(step, ModelRunnerOutput(9, tokens, np.array([3], np.int32)))
