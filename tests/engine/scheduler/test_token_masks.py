"""Drafts of rows with a grammar, as the host takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.engine.scheduler import token_masks as module
from app.engine.scheduler.row_table import RowTable
from app.engine.scheduler.token_masks import take_drafts, token_masks
from app.records.step import ProposedDrafts
from app.structured.masks import DraftMasks


def test_rows_with_a_grammar_verify_no_more_drafts_than_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row has drafts that are wrong, the second one's grammar ends first, the third may have all."""

    def mask_drafts(wanted: list[tuple[Any, list[int]]]) -> list[DraftMasks]:
        counts = [min(matcher.left, len(drafts)) for matcher, drafts in wanted]
        return [DraftMasks(count, np.arange(count + 1, dtype=np.int32)[:, None]) for count in counts]

    monkeypatch.setattr(module, "mask_drafts", mask_drafts)
    rows, table = np.arange(4, dtype=np.int32), RowTable(4)
    table.generation[:] = generations = np.arange(1, 5)
    table.may_draft[:] = table.has_grammar[:] = True
    table.most_drafts[:] = [1, 4, 4, 0]
    table.requests[:] = [request(left) for left in (9, 2, 9, 9)]
    take_drafts(table, rows, generations, ProposedDrafts(rows, np.arange(12, dtype=np.int32).reshape(4, 3)))
    assert table.num_drafts.tolist() == [1, 2, 3, 0]
    masks = token_masks(table, rows, table.num_drafts)
    assert masks is not None
    assert masks.words[:, 0].tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 0]


def request(left: int) -> Any:
    """Stands for one whose grammar allows so many further tokens."""
    return SimpleNamespace(matcher=SimpleNamespace(is_active=True, left=left))
