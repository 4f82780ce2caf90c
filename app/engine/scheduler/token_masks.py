"""The masks of a step message: which tokens the grammars of its rows allow next, and after each of their drafts.

Only rows whose every token is known are in a step message that samples them (I2), so their matchers are up to date, and
the drafts that came back with their tokens are those on the device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.scheduler.row_table import RowTable
from app.records.step import ProposedDrafts, TokenMasks
from app.structured.masks import fill_masks, mask_drafts
from app.structured.matcher import Matcher


def token_masks(
    table: RowTable, sampled: NDArray[np.int32], num_drafts: NDArray[np.int32] | None = None
) -> TokenMasks | None:
    """Masks for the rows `sampled` [N], in their order; None when no grammar has anything to say. `num_drafts` [N]:
    further logits that rows have."""
    users = np.flatnonzero(table.has_grammar[sampled])
    if not users.size:
        return None
    drafts = np.zeros_like(sampled) if num_drafts is None else num_drafts
    firsts = users + (np.cumsum(drafts) - drafts)[users]
    ready: dict[int, NDArray[np.int32]] = {}  # index -> words
    matchers: dict[int, Matcher] = {}  # of those that are still to be made
    for first, row, count in zip(firsts.tolist(), sampled[users].tolist(), drafts[users].tolist(), strict=True):
        matcher, made = table.request_at(row).matcher, table.draft_masks.pop(row, None)
        if matcher is None or not matcher.is_active:
            continue
        if made is None or made.words is None:
            assert count == 0, "drafts that no grammar has seen"
            matchers[first] = matcher
        else:
            ready.update(zip(range(first, first + count + 1), made.words, strict=False))
    if matchers:
        ready.update(zip(matchers, fill_masks(list(matchers.values())), strict=True))
    if not ready:
        return None
    indices = sorted(ready)
    return TokenMasks(np.array(indices, np.int32), np.stack([ready[index] for index in indices]))


def take_drafts(
    table: RowTable, sampled: NDArray[np.int32], generations: NDArray[np.int64], proposed: ProposedDrafts
) -> None:
    """Note the drafts that came back with a step whose rows `sampled` [N] belonged to `generations` [N], as far as
    their grammars allow them and they are worth their time."""
    rows = sampled[proposed.indices]
    here = np.flatnonzero((table.generation[rows] == generations[proposed.indices]) & table.may_draft[rows])
    wanted: list[tuple[Matcher, list[int]]] = []
    for index in here.tolist():
        matcher = table.request_at(int(rows[index])).matcher
        assert matcher is not None, "drafts of a row without a grammar"
        most = int(table.most_drafts[rows[index]])
        wanted.append((matcher, proposed.token_ids[index, :most].tolist()))
    for row, masks in zip(rows[here].tolist(), mask_drafts(wanted), strict=True):
        if masks is not None:
            table.draft_masks[row] = masks
            table.num_drafts[row] = masks.num_drafts
