"""Decides how many drafts each row of a step verifies, where a step takes as long as it has tokens, as on a CPU.

Those count that are likely enough to be right to be worth their time: a row whose drafts were wrong has fewer of them
than others, or none. As many are proposed for all as make the steps bring the most tokens a second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.engine.scheduler.draft_acceptance import DraftAcceptance
from app.engine.scheduler.draft_lengths import HELD, MARGIN, DraftLengths, HeldDraftLengths, MeasuredDraftLengths, waits
from app.engine.scheduler.in_flight import InFlightStep
from app.engine.scheduler.row_table import IntArray, RowTable
from app.engine.scheduler.token_costs import FloatArray, TokenCosts

# The gain over no drafts that counts for nothing where many requests decode: those whose drafts are right end first,
# and the others go on in steps of fewer tokens, which take longer for each.
UNEVEN = 0.1


class RowDraftLengths(HeldDraftLengths):
    """Numbers that follow the cost of tokens."""

    def __init__(self, counts: Sequence[int], table: RowTable, most_tokens: int) -> None:
        """`counts`: those to choose from beside none, ascending; a step has at most so many tokens."""
        super().__init__()
        self._counts, self._table, self._most_tokens = counts, table, most_tokens
        self._costs = TokenCosts()
        self._acceptance = DraftAcceptance(table, counts[-1])
        self._power = 1  # of two: requests that decode
        self._wait = HELD  # one request's first try costs little

    def observe(self, step: InFlightStep, accepted: NDArray[np.int32] | None, step_time_s: float) -> None:
        """See DraftLengths."""
        if step.num_tokens == step.num_decode_tokens:
            self._costs.observe(len(step.rows), step.num_tokens, step.num_proposed, step_time_s)
        if accepted is not None:
            self._acceptance.observe(step, accepted)

    def _best(self, rows: IntArray) -> int:
        count, costs = len(rows), self._costs
        alone_s, survivals = costs.step_s(count, count, 0), self._acceptance.survivals(rows)
        if not alone_s:
            return 0
        best, speed = 0, (MARGIN + UNEVEN * (1.0 - 1.0 / count)) * count / alone_s
        kept: IntArray = np.zeros(len(survivals), np.intp)
        for number in self._counts:
            proposing_s = costs.step_s(count, count, number)
            found, own = worth(survivals[:, :number], count, proposing_s, costs.token_s)
            if found > speed and count + int(own.sum()) <= self._most_tokens:
                best, speed, kept = number, found, own
        slower, power = costs.step_s(count, 2 * count, 1) / alone_s - 1.0, count.bit_length()
        if best or power > self._power:  # more requests than before pay for their own try first
            self._wait = waits(slower)
        self._power, self._wait = power, min(self._wait, waits(slower))
        if not best and count * 2 <= self._most_tokens and self._try(slower):
            best, kept = self._counts[0], np.ones_like(kept)
        self._table.most_drafts[rows[self._table.may_draft[rows]]] = kept
        return best


def worth(survivals: FloatArray, num_rows: int, step_s: float, token_s: float) -> tuple[float, IntArray]:
    """Returns the tokens a second of a step that takes `step_s` and `token_s` more for each draft, once those alone are
    verified that are worth it, and how many of each row [rows] that is; `survivals` [rows, places]: how likely each is
    to be kept."""
    speed, kept = num_rows / step_s, np.zeros(survivals.shape, np.bool_)
    for _ in range(2):  # what all the better ones bring, others must bring, too
        kept = survivals > token_s * speed
        tokens = num_rows + float(survivals.sum(where=kept))
        speed = max(speed, tokens / (step_s + token_s * float(kept.sum())))
    return speed, kept.sum(axis=1)


def create_lengths(
    counts: Sequence[int], table: RowTable, most_tokens: int, *, by_cost: bool, by_row: bool
) -> DraftLengths | None:
    """Chooses for an engine whose rows may have so many drafts in a step, ascending; None: nobody proposes any."""
    if not counts:
        return None
    if not by_cost:
        return DraftLengths(counts[-1])
    return (RowDraftLengths if by_row else MeasuredDraftLengths)(counts, table, most_tokens)
