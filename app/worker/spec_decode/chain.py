"""Drafts token by token with a model that reads the target's hidden states: EAGLE, EAGLE-3, multi-token prediction.

Its first pass goes over the step's own tokens: for each position it reads the token after it, which is known by now,
and what the target's layers made of the position, and keeps keys and values for it. So whatever a request has computed,
its drafter has, too, at the latest when it is asked (late_keys.py). Each further pass reads the draft of the pass
before and that pass's features, one position on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Self

import torch

from app.distributed.parallel_groups import RankGroup
from app.layers.attention_layer import AttentionLayer
from app.layers.context import ForwardContext, HiddenStates
from app.models.drafters.base import Drafter, shifted
from app.records.step import SchedulerOutput
from app.worker.rows.step_inputs import StepInputs
from app.worker.spec_decode.base import Proposal, Proposer, ProposerContext
from app.worker.spec_decode.draws import DraftSampler
from app.worker.spec_decode.late_keys import LateKeys
from app.worker.spec_decode.passes import DraftPasses
from app.worker.spec_decode.weights import own_group


class ChainProposer(Proposer):
    """The proposer of a `Drafter`; `drafter` None: of a stage that does not sample."""

    is_capturable = True

    def __init__(
        self,
        num_draft_tokens: int,
        reads_layers: tuple[int, ...],
        drafter: Drafter | None,
        inputs: StepInputs,
        group: RankGroup | None = None,
        target_layers: Sequence[AttentionLayer] = (),
    ) -> None:
        """`group`: of ranks that draft each for itself, of which the first one's drafts count."""
        self.num_draft_tokens = num_draft_tokens
        self.reads_layers = reads_layers
        self._drafter = drafter
        self.models = () if drafter is None else (drafter,)
        self._inputs = inputs
        self._group = group
        self._late = LateKeys(self._keep, self.attention_layers, target_layers)

    @classmethod
    def of(cls, context: ProposerContext, reads_layers: tuple[int, ...], load: Callable[[], Drafter]) -> Self:
        """The proposer of this rank, whose drafter is loaded where the engine samples."""
        drafter = load() if context.is_last else None
        if drafter is not None:
            shifted(drafter, len(context.model.attention_layers))
        count = context.wanted.most_drafts
        return cls(count, reads_layers, drafter, context.inputs, own_group(context), context.model.attention_layers)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The drafter's."""
        return () if self._drafter is None else self._drafter.attention_layers

    @cached_property
    def _sampler(self) -> DraftSampler:
        assert self._drafter is not None
        target, token_ids = self._drafter.target.info, self._drafter.token_ids
        device = next(self._drafter.parameters()).device
        return DraftSampler(self._inputs, device, target.vocab_size, token_ids)

    def propose(self, proposal: Proposal) -> torch.Tensor:
        """See Proposer."""
        drafter, step = self._drafter, proposal.view.tensors
        assert drafter is not None, "only the last stage proposes"
        following = proposal.columns.flat_token_ids[step.targets]
        if not len(proposal.rows) or not proposal.num_drafts:
            self._late.add(following, proposal.hidden, proposal.ctx)
            return no_drafts(proposal)
        self._late.settle()
        features = drafter.advance(following, drafter.start(proposal.hidden), proposal.ctx)
        features, at = features[proposal.ends], positions_behind(proposal, 2)
        draw, passes = self._sampler.of(proposal), DraftPasses(proposal)
        drafts: list[torch.Tensor] = []
        for number in range(proposal.num_drafts):
            if number:
                features = drafter.advance(drafts[-1], features, passes.context(number))
            drafts.append(draw(drafter.raw_logits(features), at[number]))
        return agreed(torch.stack(drafts, dim=1), self._group)

    def _keep(self, following: torch.Tensor, hidden: HiddenStates, ctx: ForwardContext) -> None:
        assert self._drafter is not None
        self._drafter.keep(following, self._drafter.start(hidden), ctx)

    def before(self, step: SchedulerOutput) -> None:
        """See WorkerFeature."""
        self._late.settle_before(step)

    def settle(self) -> None:
        """See WorkerFeature."""
        self._late.settle()

    def connect(self, kv_caches: list[torch.Tensor]) -> None:
        """See WorkerFeature."""
        self._late.forget()


def no_drafts(proposal: Proposal) -> torch.Tensor:
    """Int64 [N, num_drafts] of a proposal without rows, or without drafts."""
    return proposal.rows.new_empty(len(proposal.rows), proposal.num_drafts)


def positions_behind(proposal: Proposal, ahead: int) -> torch.Tensor:
    """Int64 [num_drafts, N]: of each draft, the first of which lies `ahead` behind its row's last token of the step."""
    ends = proposal.view.tensors.positions[proposal.ends]
    return ends + torch.arange(ahead, ahead + proposal.num_drafts, device=ends.device)[:, None]


def agreed(drafts: torch.Tensor, group: RankGroup | None) -> torch.Tensor:
    """The drafts of the group's first rank, so that no rank verifies other ones."""
    if group is None or group.size == 1:
        return drafts
    return group.all_reduce(drafts if group.rank == 0 else torch.zeros_like(drafts))
