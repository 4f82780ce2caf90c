"""Drafts the newest token again and again: right where a model loops."""

from __future__ import annotations

from typing import Self

import torch

from app.worker.spec_decode.base import Proposal, Proposer, ProposerContext


class LoopDrafter(Proposer):
    """Its work is the device's alone, so that a GPU captures it with the step."""

    is_capturable = True

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        return cls(context.wanted.num_speculative_tokens)

    def propose(self, proposal: Proposal) -> torch.Tensor:
        """See Proposer."""
        columns, rows = proposal.columns, proposal.rows
        newest = columns.flat_token_ids[rows * columns.width + columns.num_tokens[rows] - 1]
        return newest[:, None].expand(-1, self.num_draft_tokens)
