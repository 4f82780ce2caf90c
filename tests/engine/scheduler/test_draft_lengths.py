"""How many drafts steps bring, where nobody says: judged by a machine whose times and drafts are known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.engine.scheduler.draft_costs import ENOUGH, DraftCosts
from app.engine.scheduler.draft_lengths import MeasuredDraftLengths
from app.engine.scheduler.in_flight import InFlightStep
from tests.engine.core_driver import assert_idle, make_core, make_request, run
from tests.engine.fake_executor import FakeExecutor, expected_tokens

COUNTS = (1, 2, 3, 5, 7)
Share = Callable[[int], float]  # step -> how often a draft is right


class Machine:
    """Rows that decode, of which each draft is right with `share`, on a device that takes `base_s` and `token_s`."""

    def __init__(
        self, num_rows: int, token_s: float, shares: list[Share], base_s: float = 5.0, most_tokens: int = 1 << 20
    ) -> None:
        self.rows, self.token_s, self.base_s, self.shares = np.arange(num_rows), token_s, base_s, shares
        table: Any = SimpleNamespace(
            generation=np.arange(num_rows) + 1, may_draft=np.ones(num_rows, np.bool_), num_rows=num_rows
        )
        self.lengths = MeasuredDraftLengths(COUNTS, table, most_tokens)
        self.generations, self.rng = table.generation, random.Random(num_rows)
        self.drafts, self.chosen = 0, list[int]()

    def run(self, num_steps: int) -> float:
        """Tokens a second."""
        seconds, tokens = 0.0, 0
        for _ in range(num_steps):
            verified, proposed = self.drafts, self.lengths.choose(self.rows)
            self.drafts = proposed
            self.chosen.append(proposed)
            usual_s = self.base_s + self.token_s * len(self.rows) * (1 + max(verified, proposed))
            accepted = np.array([self.accepted(row, verified) for row in self.rows.tolist()], np.int32)
            self.lengths.observe(self.step(verified, proposed), accepted if verified else None, usual_s * self.noise())
            seconds, tokens = seconds + usual_s, tokens + int((accepted + 1).sum())
        return tokens / seconds

    def noise(self) -> float:
        """Up to 5 %, and at times a stop."""
        return 3.0 if self.rng.random() < 0.01 else 1 + 0.05 * self.rng.random()

    def accepted(self, row: int, drafts: int) -> int:
        share = self.shares[row % len(self.shares)](len(self.chosen))
        return next((place for place in range(drafts) if self.rng.random() >= share), drafts)

    def step(self, verified: int, proposed: int) -> InFlightStep:
        count = len(self.rows)
        tokens, all_sample = np.full(count, 1 + verified, np.int32), np.ones(count, np.bool_)
        drafts = np.full(count, verified, np.int32) if verified else None
        rows, total = self.rows.astype(np.int32), count * (1 + verified)
        return InFlightStep(1, rows, tokens, all_sample, self.generations, total, total, drafts, proposed)

    def best(self, step: int = 0) -> tuple[float, int]:
        """Tokens a second of the best number, and the number."""
        found = []
        for drafts in (0, *COUNTS):
            tokens = sum(
                sum(self.shares[row % len(self.shares)](step) ** place for place in range(drafts + 1))
                for row in self.rows.tolist()
            )
            time_s = self.base_s + self.token_s * len(self.rows) * (1 + drafts)
            found.append((tokens / time_s, drafts))
        return max(found)


def steadily(share: float) -> Share:
    return lambda _: share


@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
@pytest.mark.parametrize("shares", [[0.0], [0.3], [0.8], [0.98], [0.05, 0.95]])
def test_steps_are_as_fast_as_the_best_number_makes_them(num_rows: int, shares: list[float]) -> None:
    """And, where none is best, hardly slower than without drafts: after the first steps, in which all are tried."""
    machine = Machine(num_rows, 0.04, [steadily(share) for share in shares])
    machine.run(60)
    speed, (best, number) = machine.run(600 if num_rows < 64 else 300), machine.best()
    assert speed > (0.985 if number == 0 else 0.93) * best, (speed / best, number, Counter(machine.chosen))


def test_the_number_follows_what_is_right_now() -> None:
    """Drafts become right, after long having been wrong, and wrong again."""
    machine = Machine(4, 0.3, [lambda step: 0.95 if 1000 <= step < 1600 else 0.02])
    machine.run(900)
    assert max(machine.chosen[-100:]) <= 1
    machine.run(600)
    assert min(machine.chosen[-100:]) >= 5
    machine.run(600)
    assert max(machine.chosen[-100:]) <= 1


def test_a_first_step_that_was_slow_is_tried_again() -> None:
    costs = DraftCosts((0, 2), 8)
    assert costs.estimate(4) is None
    costs.observe(4, 0, 1.0)
    costs.observe(4, 1, 50.0)  # its kernels were compiled
    found = costs.estimate(4)
    assert found is not None
    assert found[1] == pytest.approx(1.01)
    for _ in range(ENOUGH):
        costs.observe(4, 1, 3.0)
    found = costs.estimate(4)
    assert found is not None
    assert found.tolist() == [1.0, 3.0]


def test_times_of_few_rows_are_not_those_of_many() -> None:
    """Steps without drafts were measured at 8 rows, those with three at 15: at 12 each takes what 12 rows take."""
    costs = DraftCosts((0, 3), 32)

    def takes(rows: int, index: int) -> float:
        return 1.0 + 0.5 * rows * (1 + 0.6 * index)

    for rows, index in [(4, 0), (4, 1), (8, 0), (15, 1)] * (ENOUGH + 1):
        costs.observe(rows, index, takes(rows, index))
    found = costs.estimate(12)
    assert found is not None
    assert found.tolist() == pytest.approx([takes(12, 0), takes(12, 1)], rel=0.02)


def test_what_all_numbers_cost_moves_with_the_one_that_is_measured() -> None:
    costs = DraftCosts((0, 2), 8)
    for _ in range(ENOUGH):
        costs.observe(4, 0, 1.0)
        costs.observe(4, 1, 1.5)
    for _ in range(60):
        costs.observe(4, 1, 2.5)  # contexts have grown
    found = costs.estimate(4)
    assert found is not None
    assert found[1] == pytest.approx(2.5, rel=0.02)
    assert 1.4 < found[0] < 2.0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("quality", [0.0, 1.0])
def test_tokens_are_the_same_whatever_is_chosen(quality: float, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts, without, and from one to the other."""
    prompts = {f"{number}": [5 + number, 6, 7, 8] for number in range(3)}
    core = make_core(
        num_draft_tokens=7, draft_quality=quality, late=late, num_blocks=400, speculative_config={"method": "ngram"}
    )
    monkeypatch.setattr(FakeExecutor, "time_of", lambda _, step: 1.0 + 0.05 * step.num_tokens)
    results = run(core, [make_request(name, prompt, max_tokens=300) for name, prompt in prompts.items()])
    assert results.tokens == {name: expected_tokens(prompt, 7, 300) for name, prompt in prompts.items()}
    assert_idle(core)
    executor: Any = core.executor
    proposed = Counter(step.num_proposed for step in executor.step_messages)
    assert len(proposed) >= 2
    assert proposed.most_common(1)[0][0] == (7 if quality else 0)


def test_no_step_is_to_verify_more_drafts_than_it_has_tokens_for() -> None:
    """Or a few rows would have seven, the others none, in a step that no graph serves."""
    machine = Machine(16, 0.001, [lambda _: 0.9], most_tokens=16 * (1 + 3))
    machine.run(200)
    assert max(machine.chosen) == 3
    crowded = Machine(16, 0.001, [lambda _: 0.9], most_tokens=31)
    crowded.run(200)
    assert max(crowded.chosen) == 0
