"""The drafter `mlp_speculator`: a chain of small stages over one hidden state. It keeps nothing of a token."""

from __future__ import annotations

from functools import partial
from typing import Self

import torch

from app.loading.loader import load_drafter
from app.models.drafters.mlp_speculator import MLPSpeculator, count_stages
from app.worker.spec_decode.base import Proposal, Proposer, ProposerContext
from app.worker.spec_decode.chain import agreed, no_drafts
from app.worker.spec_decode.draws import DraftSampler
from app.worker.spec_decode.weights import DrafterSource, own_group, target_of


class MLPSpeculatorProposer(Proposer):
    """`drafter` None: of a stage that does not sample."""

    is_capturable = True

    def __init__(self, num_draft_tokens: int, drafter: MLPSpeculator | None, context: ProposerContext) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._drafter, self._group = drafter, own_group(context)
        self.models = () if drafter is None else (drafter,)
        self._sampler = DraftSampler(context.inputs, context.build.device, context.info.vocab_size)

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        source, drafter = DrafterSource.of(context), None
        count = context.wanted.num_speculative_tokens
        if count is None:
            count = max(1, min(context.wanted.most_drafts, count_stages(source.info)))
        if context.is_last:
            kind = partial(MLPSpeculator, target=target_of(context), num_tokens=count)
            drafter = load_drafter(kind, source.info, source.build, source.form)
        return cls(count, drafter, context)

    def propose(self, proposal: Proposal) -> torch.Tensor:
        """See Proposer."""
        drafter, columns = self._drafter, proposal.columns
        assert drafter is not None, "only the last stage proposes"
        if not proposal.num_drafts:
            return no_drafts(proposal)
        draw, known = self._sampler.of(proposal), columns.num_tokens[proposal.rows].long()
        tokens = [columns.flat_token_ids[proposal.rows * columns.width + known - 1].long()]
        state = drafter.start(proposal.hidden.last[proposal.ends])
        for number in range(proposal.num_drafts):
            state = drafter.advance(state, tokens[-1], number)
            tokens.append(draw(drafter.logits(state, number), known + number))
        return agreed(torch.stack(tokens[1:], dim=1), self._group)
