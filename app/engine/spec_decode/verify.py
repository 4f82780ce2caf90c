"""Which draft tokens stay: all before the first that is not the token sampled in its place."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.to_device import to_device
from app.kernels.rows import RowColumns


def keep_accepted(
    columns: RowColumns,
    rows: torch.Tensor,
    num_drafts: NDArray[np.int64],
    targets: torch.Tensor,
    token_ids: torch.Tensor,
) -> torch.Tensor:
    """Take the sampled tokens into the rows, whose counts go back by the drafts that are rejected.

    rows int64 [N], each with `num_drafts[i]` drafts behind its known tokens; targets int64 [L] and token_ids [L], one
    row's num_drafts[i] + 1 behind the other's: the place in `flat_token_ids`, and the token, after the known ones and
    after each draft. Returns int64 [N], how many tokens each row got. What is sampled behind a rejected draft is
    written too, and overwritten by the next drafts or tokens.
    """
    drafts, places = _send_places(num_drafts, token_ids.device)
    exists = torch.arange(places.shape[1], device=token_ids.device) < drafts[:, None]
    matches = exists & (columns.flat_token_ids[targets[places]] == token_ids[places])
    accepted = matches.long().cumprod(dim=1).sum(dim=1)
    columns.flat_token_ids.index_copy_(0, targets, token_ids.int())
    take_back(columns, rows, drafts - accepted)
    return accepted + 1


def take_back(columns: RowColumns, rows: torch.Tensor, num_rejected: torch.Tensor) -> None:
    """Rows [N] were counted with so many drafts [N] that are none of their tokens."""
    rejected = num_rejected.int()
    columns.num_computed[rows] -= rejected
    columns.num_tokens[rows] -= rejected


def write_drafts(columns: RowColumns, rows: torch.Tensor, drafts: torch.Tensor) -> None:
    """drafts [N, P] behind the known tokens of rows int64 [N], as far as these have room."""
    positions = columns.num_tokens[rows].long()[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
    write_tokens(columns, rows, positions, drafts)


def write_tokens(columns: RowColumns, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
    """token_ids [N, P] at positions int64 [N, P] of rows int64 [N]; those past a row's end are dropped."""
    spare = len(columns.flat_token_ids) - 1
    places = torch.where(positions < columns.width, rows[:, None] * columns.width + positions, spare)
    columns.flat_token_ids[places] = token_ids.int()


def _send_places(num_drafts: NDArray[np.int64], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`num_drafts` [N], and [N, P] the logits row of each row's drafts; past its drafts any."""
    each = num_drafts + 1
    places = (np.cumsum(each) - each)[:, None] + np.arange(max(1, int(num_drafts.max())))
    sent = to_device(np.column_stack((num_drafts, np.minimum(places, int(each.sum()) - 1))), device)
    return sent[:, 0], sent[:, 1:]
