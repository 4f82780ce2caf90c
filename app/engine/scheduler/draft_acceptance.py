"""Measures how often drafts are right: by their place behind the known tokens, and by request.

Both are of drafts before which all were right. A request's own share moves with its last steps, from all requests'
where it has had few; what it does to the shares by place is reckoned in odds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.scheduler.in_flight import InFlightStep
from app.engine.scheduler.row_table import IntArray, RowTable

FloatArray = NDArray[np.float64]

FIRST_GUESS = 0.7  # so that drafts are tried
KEPT, KEPT_OF_ROW = 0.98, 0.9  # of what was counted before a step
KEPT_WITHOUT = 0.99  # of a row that has no drafts where others have: it is tried again
FEW = 4.0  # drafts, which tell of a request as much as all requests' share does
EDGE = 1e-3  # no share is nearer to 0 or 1


class DraftAcceptance:
    """Counts that fade, [places] of all requests and [rows]."""

    def __init__(self, table: RowTable, most: int) -> None:
        """`most`: drafts that a row may have in a step."""
        self._table = table
        self._tried: FloatArray = np.zeros(most)
        self._right: FloatArray = np.zeros(most)
        num_rows = len(table.generation)
        self._generation = np.zeros(num_rows, np.int64)  # of the request that a row's counts are of
        self._row_tried: FloatArray = np.zeros(num_rows)
        self._row_right: FloatArray = np.zeros(num_rows)

    def observe(self, step: InFlightStep, accepted: NDArray[np.int32]) -> None:
        """Take in that `accepted` [R] drafts of the step's rows were right."""
        drafts = step.num_draft_tokens
        assert drafts is not None
        tried = np.minimum(accepted + 1, drafts)
        places = np.arange(len(self._tried))[:, None]
        self._tried *= KEPT
        self._right *= KEPT
        self._tried += (tried > places).sum(axis=1)
        self._right += (accepted > places).sum(axis=1)
        here = self._table.generation[step.rows] == step.generations
        without = step.rows[here & (drafts == 0)]
        self._row_tried[without] *= KEPT_WITHOUT
        self._row_right[without] *= KEPT_WITHOUT
        here &= drafts > 0
        rows = step.rows[here].astype(np.intp)
        self._begin(rows)
        self._row_tried[rows] = KEPT_OF_ROW * self._row_tried[rows] + tried[here]
        self._row_right[rows] = KEPT_OF_ROW * self._row_right[rows] + accepted[here]

    def survivals(self, rows: IntArray) -> FloatArray:
        """Returns how likely each draft of those of the rows that may have some is to be kept, [rows, places]."""
        drafting = rows[self._table.may_draft[rows]]
        self._begin(drafting)
        share = self._shares()
        usual = (self._right.sum() + FEW * FIRST_GUESS) / (self._tried.sum() + FEW)
        own = (self._row_right[drafting] + FEW * usual) / (self._row_tried[drafting] + FEW)
        factor = _odds(own) / _odds(usual)
        odds = factor[:, None] * _odds(share)
        found: FloatArray = np.cumprod(odds / (1.0 + odds), axis=1, dtype=np.float64)
        return found

    def _shares(self) -> FloatArray:
        """[places] from a guess on, which each place hands on to the next."""
        found, guess = np.empty_like(self._tried), FIRST_GUESS
        for place, (right, tried) in enumerate(zip(self._right.tolist(), self._tried.tolist(), strict=True)):
            found[place] = guess = (right + FEW * guess) / (tried + FEW)
        return found

    def _begin(self, rows: IntArray) -> None:
        """Drop what was counted of requests that have left these rows."""
        left = rows[self._generation[rows] != self._table.generation[rows]]
        self._generation[left] = self._table.generation[left]
        self._row_tried[left] = self._row_right[left] = 0.0


def _odds(share: FloatArray) -> FloatArray:
    clipped = np.clip(share, EDGE, 1.0 - EDGE)
    odds: FloatArray = clipped / (1.0 - clipped)
    return odds
