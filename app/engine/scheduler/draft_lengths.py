"""Decides how many drafts the rows of a step are left with, which their next step verifies.

A number that is given stays as it is. Else it is the one by which steps bring the most tokens a second, as far as their
times (`draft_costs`) and the drafts that were right (`draft_acceptance`) tell: none at all, too. It is held for a few
steps, as many as it takes to see what they cost. While there are no drafts, nothing tells how many would be right: now
and then some are tried, so seldom that it costs next to nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.engine.scheduler.draft_acceptance import DraftAcceptance
from app.engine.scheduler.draft_costs import DraftCosts, FloatArray
from app.engine.scheduler.in_flight import InFlightStep
from app.engine.scheduler.row_table import IntArray, RowTable

HELD = 4  # steps
MARGIN = 1.01  # by which more drafts must be better
MOST_LOST = 0.004  # of the time, to try drafts where there are none
LEAST_WAIT, MOST_WAIT = 64, 4096  # steps
FORGET_AFTER = 256  # steps, what another number costs


class DraftLengths:
    """A number that is given."""

    def __init__(self, count: int) -> None:
        self.choice = count

    def choose(self, rows: IntArray) -> int:
        """The drafts that rows are to have after their next step, in which `rows` decode."""
        return self.choice

    def is_due(self) -> bool:
        """True if a further step of the same rows, without drafts, needs a choice."""
        return False

    def observe(self, step: InFlightStep, accepted: NDArray[np.int32] | None, step_time_s: float) -> None:
        """A step returned, `accepted` [R] drafts of whose rows were right (None: it had none)."""


class HeldDraftLengths(DraftLengths):
    """A number that is held for some steps, while about as many rows decode."""

    def __init__(self) -> None:
        super().__init__(0)
        self._held = 0  # further steps
        self._num_rows = 0  # as a power of two
        self._wait = LEAST_WAIT  # further steps without drafts

    def choose(self, rows: IntArray) -> int:
        """See DraftLengths."""
        if not len(rows):
            return self.choice
        self._held -= 1
        if self._held < 0 or len(rows).bit_length() != self._num_rows:
            self._num_rows, self._held = len(rows).bit_length(), HELD - 1
            self.choice = self._best(rows)
        return self.choice

    def is_due(self) -> bool:
        """See DraftLengths."""
        self._wait -= 1
        return self._wait <= 0

    @abstractmethod
    def _best(self, rows: IntArray) -> int:
        """The drafts by which a step of these rows brings the most tokens a second."""

    def _try(self, slower: float) -> bool:
        """True if the steps without drafts have been enough to pay for trying the fewest, by which a step takes so much
        longer (0.1: a tenth)."""
        self._wait -= HELD
        if self._wait > 0:
            return False
        self._wait = waits(slower)
        return True


class MeasuredDraftLengths(HeldDraftLengths):
    """A number that follows the cost, the same for all rows: as captured steps have places for."""

    def __init__(self, counts: Sequence[int], table: RowTable, most_tokens: int) -> None:
        """`counts`: those to choose from beside none, ascending; a step has at most so many tokens."""
        super().__init__()
        self._counts = (0, *counts)
        self._places, self._most_tokens = 1 + np.array(self._counts), most_tokens
        self._costs = DraftCosts(self._counts, len(table.generation))
        self._acceptance = DraftAcceptance(table, counts[-1])
        self._index = 0
        self._age = 0  # steps since one was forgotten
        self._forgotten = 1  # the next, as an index

    def observe(self, step: InFlightStep, accepted: NDArray[np.int32] | None, step_time_s: float) -> None:
        """See DraftLengths."""
        verified = 0 if step.num_draft_tokens is None else int(step.num_draft_tokens.max())
        if step.num_tokens == step.num_decode_tokens and verified == step.num_proposed:
            self._costs.observe(len(step.rows), self._counts.index(verified), step_time_s)
        if accepted is not None:
            self._acceptance.observe(step, accepted)

    def _best(self, rows: IntArray) -> int:
        times = self._costs.estimate(len(rows))
        if times is None:
            self._index, self._wait = 0, HELD
            return 0
        self._forget(len(rows), times)
        fits = len(rows) * self._places <= self._most_tokens  # where they do not, some rows would have none
        kept = np.cumsum(self._acceptance.survivals(rows).sum(axis=0))
        tokens = len(rows) + np.concatenate(([0.0], kept))[np.array(self._counts)]
        speeds = np.where(fits, tokens / times, 0.0)
        best = 0
        for index in range(1, len(speeds)):
            best = index if speeds[index] > MARGIN * speeds[best] else best
        if best:
            self._index, self._wait = best, LEAST_WAIT
            return self._counts[best]
        self._index = 0
        if not fits[1] or not self._try(self._slower(times, 1)):
            return 0
        self._index = 1
        return self._counts[1]

    def _forget(self, num_rows: int, times: FloatArray) -> None:
        """Have one number after the other measured anew, once enough steps pay for it."""
        self._age += HELD
        if self._age < max(FORGET_AFTER, HELD * self._slower(times, self._forgotten) / MOST_LOST):
            return
        self._costs.forget(num_rows, self._forgotten)
        self._age, self._forgotten = 0, self._forgotten % (len(self._counts) - 1) + 1

    def _slower(self, times: FloatArray, index: int) -> float:
        """Says by how much of its time a step is slower with this number."""
        usual = min(float(times[self._index]), float(times.max(where=np.isfinite(times), initial=0.0)))
        return float(times[index]) / usual - 1.0


def waits(slower: float) -> int:
    """Returns the steps without drafts that pay for some by which a step takes so much longer (0.1: a tenth)."""
    return int(min(max(LEAST_WAIT, HELD * slower / MOST_LOST), MOST_WAIT))
