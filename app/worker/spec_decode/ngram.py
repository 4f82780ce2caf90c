"""Proposes what followed the newest tokens where they stood before: no model, only the tokens of the row itself.

Of the longest n-gram in [min, max] that ends the known tokens and stood there before, the latest place counts. What
followed it is copied token by token, drafts too where it reaches them, so that a loop goes on. All is tensors of one
shape: nothing waits for the device, and a step may be captured with it. A row without a match repeats its newest token.
"""

from __future__ import annotations

from typing import Self

import torch

from app.kernels.rows import RowColumns
from app.worker.spec_decode.base import Proposal, Proposer, ProposerContext


class NgramProposer(Proposer):
    """The drafter `ngram`."""

    is_capturable = True

    def __init__(self, num_draft_tokens: int, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest
        self.num_draft_tokens = num_draft_tokens
        self._shortest, self._longest = shortest, longest

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        wanted = context.wanted
        # A match needs a token before it and one after it, so longer ones than the context are none.
        longest = min(wanted.prompt_lookup_max, context.build.max_model_len)
        return cls(wanted.most_drafts, min(wanted.prompt_lookup_min, longest), longest)

    def propose(self, proposal: Proposal) -> torch.Tensor:
        """See Proposer."""
        if not proposal.num_drafts:
            return proposal.rows[:, None][:, :0]
        token_ids, known = history(proposal.columns, proposal.rows)
        first = find_continuation(token_ids, known, self._shortest, self._longest)
        ahead = torch.arange(proposal.num_drafts, device=known.device)
        return token_ids.gather(1, first[:, None] + ahead % (known - first)[:, None])


def find_continuation(token_ids: torch.Tensor, known: torch.Tensor, shortest: int, longest: int) -> torch.Tensor:
    """token_ids int [N, W], of which the first `known` int64 [N] of each row count, at least one -> int64 [N], where
    what followed the match begins; the newest token's place where nothing matched. `longest` must be at most W."""
    width = token_ids.shape[1]
    places = torch.arange(1, width + 1, device=token_ids.device)  # behind each token
    matches = places < known[:, None]
    first = known - 1
    for length in range(1, longest + 1):
        newest = (known - length)[:, None]
        wanted = token_ids.gather(1, newest.clamp(min=0))
        matches[:, length - 1 :] &= token_ids[:, : width - length + 1] == wanted
        matches[:, : length - 1] = False  # would begin before the row does
        if length >= shortest:
            latest = torch.where(matches, places, 0).amax(dim=1)
            first = torch.where(latest > 0, latest, first)
    return first


def history(columns: RowColumns, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' token ids [N, W], and how many of each are known, int64 [N]."""
    every = columns.flat_token_ids[: len(columns.num_tokens) * columns.width].view(-1, columns.width)
    return every.index_select(0, rows), columns.num_tokens.index_select(0, rows).long()
