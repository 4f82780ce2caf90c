"""How many drafts each row verifies, where a step takes as long as it has tokens: by a machine that is known."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.engine.scheduler.draft_lengths import DraftLengths, MeasuredDraftLengths
from app.engine.scheduler.in_flight import InFlightStep
from app.engine.scheduler.row_draft_lengths import RowDraftLengths, create_lengths, worth

COUNTS = (1, 2, 3, 5, 7)


class Machine:
    """Rows that decode for ever, of each of which a draft is right with its share."""

    def __init__(self, shares: list[float], token_s: float, most_tokens: int = 1 << 20) -> None:
        count = len(shares)
        self.rows, self.shares, self.token_s = np.arange(count), shares, token_s
        self.table: Any = SimpleNamespace(
            generation=np.arange(count) + 1,
            may_draft=np.ones(count, np.bool_),
            most_drafts=np.full(count, 32, np.int32),
        )
        self.lengths = RowDraftLengths(COUNTS, self.table, most_tokens)
        self.drafts = np.zeros(count, np.int32)
        self.rng, self.most_in_step = random.Random(count), 0

    def takes(self, tokens: int, proposed: int) -> float:
        return 2.7 + self.token_s * tokens + proposed * (0.5 + 0.02 * len(self.rows))

    def run(self, num_steps: int) -> tuple[float, np.ndarray]:
        """Tokens a second, over those without drafts; and the drafts that each row verified in a step."""
        seconds, tokens, verified = 0.0, 0, np.zeros(len(self.rows))
        count, ones = len(self.rows), np.ones(len(self.rows), np.bool_)
        for number in range(num_steps):
            drafts, proposed = self.drafts, self.lengths.choose(self.rows)
            accepted = np.array([self.accepted(row, int(drafts[row])) for row in self.rows.tolist()], np.int32)
            total = count + int(drafts.sum())
            step_s = self.takes(total, proposed)
            step = InFlightStep(
                number, self.rows.astype(np.int32), 1 + drafts, ones, self.table.generation, total, total,
                drafts if drafts.any() else None, proposed,
            )  # fmt: skip
            self.lengths.observe(step, accepted if drafts.any() else None, step_s * (1 + 0.05 * self.rng.random()))
            self.drafts = np.minimum(self.table.most_drafts, proposed).astype(np.int32)
            seconds, tokens, verified = (
                seconds + step_s,
                tokens + total - int((drafts - accepted).sum()),
                verified + drafts,
            )
            self.most_in_step = max(self.most_in_step, total)
        return tokens / seconds / (count / self.takes(count, 0)), verified / num_steps

    def accepted(self, row: int, drafts: int) -> int:
        return next((place for place in range(drafts) if self.rng.random() >= self.shares[row]), drafts)


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
def test_wrong_drafts_cost_next_to_nothing(num_rows: int) -> None:
    machine = Machine([0.05] * num_rows, 0.13)
    machine.run(60)
    assert machine.run(1000)[0] > 0.98


@pytest.mark.parametrize(("num_rows", "least"), [(1, 2.0), (4, 1.4), (16, 1.1)])
def test_right_drafts_pay(num_rows: int, least: float) -> None:
    machine = Machine([0.95] * num_rows, 0.13)
    machine.run(200)
    assert machine.run(600)[0] > least


def test_rows_whose_drafts_are_wrong_verify_fewer() -> None:
    machine = Machine([0.02, 0.97, 0.97, 0.97], 0.3)
    machine.run(200)
    speed, verified = machine.run(600)
    assert speed > 1.1
    assert verified[0] < 0.5 < 2.0 < verified[1:].min()


def test_drafts_come_back_once_they_are_right() -> None:
    machine = Machine([0.02], 0.13)
    machine.run(400)
    machine.shares[0] = 0.95
    machine.run(400)
    assert machine.run(200)[0] > 1.7


def test_no_step_is_to_verify_more_tokens_than_it_may() -> None:
    machine = Machine([0.99] * 8, 0.001, most_tokens=20)
    machine.run(300)
    assert machine.most_in_step <= 20


def test_drafts_are_verified_that_bring_more_than_their_time() -> None:
    survivals = np.array([[0.9, 0.8, 0.7], [0.3, 0.2, 0.1]])
    speed, kept = worth(survivals, 2, step_s=1.0, token_s=0.2)
    assert kept.tolist() == [3, 0]
    assert speed == pytest.approx((2 + 2.4) / (1.0 + 0.2 * 3))


def test_an_engine_has_the_kind_that_fits_its_device() -> None:
    table: Any = SimpleNamespace(generation=np.zeros(4, np.int64))
    assert create_lengths((), table, 64, by_cost=True, by_row=True) is None
    assert type(create_lengths((3,), table, 64, by_cost=False, by_row=True)) is DraftLengths
    assert type(create_lengths(COUNTS, table, 64, by_cost=True, by_row=True)) is RowDraftLengths
    assert type(create_lengths(COUNTS, table, 64, by_cost=True, by_row=False)) is MeasuredDraftLengths
