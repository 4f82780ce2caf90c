"""Keeps the draft tokens before the first that is not the token sampled in its place.

Rows below 0 pad a step over static tensors: they are read as row 0, and nothing of them is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from app.kernels.rows import RowColumns
from app.platforms.to_device import to_device


@dataclass(slots=True, frozen=True)
class LogitsPlaces:
    """Says where N rows have their logits among L: one for the token after the known ones, then one after each
    draft."""

    num_drafts: torch.Tensor  # int64 [N]
    drafts: torch.Tensor  # int64 [N, P] those before each of a row's drafts; past its drafts any

    @classmethod
    def of(cls, num_drafts: NDArray[np.int64], device: torch.device) -> LogitsPlaces:
        """One row's logits behind the other's."""
        each = num_drafts + 1
        places = (np.cumsum(each) - each)[:, None] + np.arange(max(1, int(num_drafts.max())))
        sent = to_device(np.column_stack((num_drafts, np.minimum(places, int(each.sum()) - 1))), device)
        return cls(sent[:, 0], sent[:, 1:])


def keep_accepted(
    columns: RowColumns, rows: torch.Tensor, places: LogitsPlaces, targets: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Take the sampled tokens into the rows, whose counts go back by the drafts that are rejected.

    rows int64 [N], with drafts behind their known tokens; targets int64 [L] and token_ids [L]: the place in
    `flat_token_ids`, and the token, that each of the logits gave. Returns int64 [N], how many tokens each row got. What
    is sampled behind a rejected draft is written too, and overwritten by the next drafts or tokens.
    """
    exists = torch.arange(places.drafts.shape[1], device=token_ids.device) < places.num_drafts[:, None]
    matches = exists & (columns.flat_token_ids[targets[places.drafts]] == token_ids[places.drafts])
    accepted = matches.long().cumprod(dim=1).sum(dim=1)
    columns.flat_token_ids.index_copy_(0, targets, token_ids.int())
    take_back(columns, rows, places.num_drafts - accepted)
    return accepted + 1


def take_back(columns: RowColumns, rows: torch.Tensor, num_rejected: torch.Tensor) -> None:
    """Rows [N] were counted with so many drafts [N] that are none of their tokens."""
    rejected = torch.where(rows >= 0, num_rejected, 0).int()
    rows = rows.clamp(min=0)
    columns.num_computed.index_add_(0, rows, rejected, alpha=-1)  # what pads adds 0, whatever else is row 0
    columns.num_tokens.index_add_(0, rows, rejected, alpha=-1)


def write_drafts(columns: RowColumns, rows: torch.Tensor, drafts: torch.Tensor) -> None:
    """drafts [N, P] behind the known tokens of rows int64 [N], as far as these have room."""
    known = columns.num_tokens[rows.clamp(min=0)].long()
    positions = known[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
    write_tokens(columns, rows, positions, drafts)


def write_tokens(columns: RowColumns, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
    """token_ids [N, P] at positions int64 [N, P] of rows int64 [N]; those past a row's end are dropped."""
    spare = len(columns.flat_token_ids) - 1
    exists = (rows >= 0)[:, None] & (positions < columns.width)
    places = torch.where(exists, rows[:, None] * columns.width + positions, spare)
    columns.flat_token_ids[places] = token_ids.int()
