"""Proposes what followed the newest tokens where they stood before: no model, only the tokens of the row itself.

Of the longest n-gram in [min, max] that ends the known tokens and stood there before, the latest place counts. What
followed it is copied token by token, drafts too where it reaches them, so that a loop goes on. All is tensors of one
shape: nothing waits for the device, and a step may be captured with it. A row without a match repeats its newest token.
"""

from __future__ import annotations

from typing import Self

import torch

from app.kernels.drafts import CONTINUE_NGRAMS
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
        drafts = CONTINUE_NGRAMS.on(proposal.rows.device)
        return drafts(proposal.columns, proposal.rows, self._shortest, self._longest, proposal.num_drafts)
