"""Tells the other pipeline stages what they must hear of a step that may have brought drafts: how many tokens each row
got, which, and its new drafts. The first stage embeds these; all of them need the count, for positions and slots.

Of each row a window of its token ids travels, as long as the longest case: the new tokens, then the drafts. It begins
with the first new token, so the stages need not agree on how many were accepted to know where it goes.
"""

from __future__ import annotations

import torch

from app.kernels.drafts.reference import take_back, write_tokens
from app.kernels.rows import RowColumns


def width_of(num_draft_tokens: int) -> int:
    """Numbers that travel for a row."""
    return 2 + 2 * num_draft_tokens


def pack(columns: RowColumns, rows: torch.Tensor, num_new: torch.Tensor, num_draft_tokens: int) -> torch.Tensor:
    """Rows int64 [N] that got `num_new` [N] tokens, and their new drafts: int32 [N, width]."""
    positions = _window(columns, columns.num_tokens[rows] - num_new, num_draft_tokens)
    places = rows[:, None] * columns.width + positions.clamp(max=columns.width - 1)
    return torch.cat((num_new.int()[:, None], columns.flat_token_ids[places]), dim=1)


def unpack(
    columns: RowColumns, rows: torch.Tensor, num_drafts: torch.Tensor, packed: torch.Tensor, num_draft_tokens: int
) -> None:
    """Into the same rows of a stage that has counted `num_drafts` [N] drafts and one token more for each."""
    first = columns.num_tokens[rows] - num_drafts - 1
    write_tokens(columns, rows, _window(columns, first, num_draft_tokens), packed[:, 1:])
    take_back(columns, rows, num_drafts + 1 - packed[:, 0])


def _window(columns: RowColumns, first: torch.Tensor, num_draft_tokens: int) -> torch.Tensor:
    """Positions int64 [N, width - 1] from `first` [N] on."""
    return first.long()[:, None] + torch.arange(width_of(num_draft_tokens) - 1, device=first.device)
