"""The masks of a step message: which tokens the grammars of its rows allow next.

Only rows whose every token is known are in a step message that samples them (I2), so their matchers are up to date.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.scheduler.row_table import RowTable
from app.engine.step import TokenMasks
from app.engine.structured.masks import fill_masks


def token_masks(
    table: RowTable, sampled: NDArray[np.int32], num_drafts: NDArray[np.int32] | None = None
) -> TokenMasks | None:
    """Masks for the rows `sampled` [N], in their order; None when no grammar has anything to say. `num_drafts` [N]:
    further logits that rows have; those with a grammar have none."""
    users = np.flatnonzero(table.has_grammar[sampled])
    if not users.size:
        return None
    places = users if num_drafts is None else users + (np.cumsum(num_drafts) - num_drafts)[users]
    matchers = {}
    for index, row in zip(places.tolist(), sampled[users].tolist(), strict=True):
        matcher = table.request_at(row).matcher
        if matcher is not None and matcher.is_active:
            matchers[index] = matcher
    if not matchers:
        return None
    return TokenMasks(np.array(list(matchers), np.int32), fill_masks(list(matchers.values())))
