"""The drafter `medusa`: heads that guess from one hidden state, each for itself. They keep nothing of a token."""

from __future__ import annotations

from functools import partial
from typing import Self

import torch

from app.loading.loader import load_drafter
from app.models.drafters.medusa import MedusaDrafter, count_heads
from app.worker.spec_decode.base import Proposal, Proposer, ProposerContext
from app.worker.spec_decode.chain import agreed, no_drafts
from app.worker.spec_decode.draws import DraftSampler
from app.worker.spec_decode.weights import DrafterSource, own_group, target_of


class MedusaProposer(Proposer):
    """`drafter` None: of a stage that does not sample."""

    is_capturable = True

    def __init__(self, num_draft_tokens: int, drafter: MedusaDrafter | None, context: ProposerContext) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._drafter, self._group = drafter, own_group(context)
        self.models = () if drafter is None else (drafter,)
        token_ids = None if drafter is None else drafter.token_map
        self._sampler = DraftSampler(context.inputs, context.build.device, context.info.vocab_size, token_ids)

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        source, drafter = DrafterSource.of(context), None
        count = context.wanted.num_speculative_tokens
        if count is None:
            count = max(1, min(context.wanted.most_drafts, count_heads(source.info, source.names)))
        if context.is_last:
            kind = partial(MedusaDrafter, target=target_of(context), names=source.names, num_tokens=count)
            drafter = load_drafter(kind, source.info, source.build, source.form)
        return cls(count, drafter, context)

    def propose(self, proposal: Proposal) -> torch.Tensor:
        """See Proposer."""
        drafter = self._drafter
        assert drafter is not None, "only the last stage proposes"
        if not proposal.num_drafts:
            return no_drafts(proposal)
        hidden, draw = proposal.hidden.last[proposal.ends], self._sampler.of(proposal)
        known = proposal.columns.num_tokens[proposal.rows].long()
        drafts = [draw(drafter.logits(hidden, number), known + number) for number in range(proposal.num_drafts)]
        return agreed(torch.stack(drafts, dim=1), self._group)
