"""The drafters `dflash` and `dspark`: all drafts of a row from one pass over a block of masks behind its tokens.

For each token that the target has computed the drafter's layers keep keys and values, made of what the target's layers
read. A block's own lie behind them for the one pass, where the target's next tokens will have theirs. Its places all
see the whole block: each is to attention a request of its own with one query, whose keys end where the block does (and
so does a window of the layer's), or, in layers where it sees none behind it, with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Self

import torch

from app.layers.attention_layer import AttentionLayer
from app.layers.context import ForwardContext
from app.loading.loader import load_drafter
from app.models.drafters.base import shifted
from app.models.drafters.block import BlockDrafter, BlockForm
from app.records.worker_info import WorkerInfo
from app.worker.spec_decode.base import Proposal, Proposer, ProposerContext
from app.worker.spec_decode.chain import agreed, no_drafts, positions_behind
from app.worker.spec_decode.draws import DraftSampler
from app.worker.spec_decode.passes import DraftPasses
from app.worker.spec_decode.weights import DrafterSource, own_group, target_of


class BlockProposer(Proposer):
    """`drafter` None: of a stage that does not sample."""

    is_capturable = True

    def __init__(self, form: BlockForm, drafter: BlockDrafter | None, context: ProposerContext) -> None:
        wanted = context.wanted
        self.num_draft_tokens = wanted.num_speculative_tokens or min(wanted.most_drafts, form.most_drafts)
        self.reads_layers = form.reads_layers
        self._form, self._drafter, self._group = form, drafter, own_group(context)
        self.models = () if drafter is None else (drafter,)
        token_ids = None if drafter is None else drafter.token_ids
        self._sampler = DraftSampler(context.inputs, context.build.device, context.info.vocab_size, token_ids)

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        source, target, drafter = DrafterSource.of(context), target_of(context), None
        form = BlockForm.of(source.info, context.info)
        count = context.wanted.num_speculative_tokens or 1
        target.expect("num_speculative_tokens, at most those of its block", min(form.most_drafts, count), count)
        if context.is_last:
            kind = partial(BlockDrafter, target=target, names=source.names)
            drafter = load_drafter(kind, source.info, source.build, source.form)
            shifted(drafter, len(context.model.attention_layers))
        return cls(form, drafter, context)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The drafter's."""
        return () if self._drafter is None else self._drafter.attention_layers

    def propose(self, proposal: Proposal) -> torch.Tensor:
        """See Proposer."""
        drafter, form, step = self._drafter, self._form, proposal.view.tensors
        assert drafter is not None, "only the last stage proposes"
        drafter.keep(proposal.hidden, proposal.ctx)
        count, num_rows = proposal.num_drafts, len(proposal.rows)
        if not num_rows or not count:
            return no_drafts(proposal)
        newest = proposal.columns.flat_token_ids[step.targets[proposal.ends]].long()
        at, width = positions_behind(proposal, 2), count + (not form.tells_next)
        block = torch.full((num_rows, width), form.mask, device=newest.device)
        block[:, 0] = newest
        features = drafter(block.view(-1), self._context(DraftPasses(proposal, width)), width)
        features = features.view(num_rows, width, -1)[:, width - count :]
        logits = drafter.raw_logits(features.reshape(num_rows * count, -1)).view(num_rows, count, -1)
        draw, last = self._sampler.of(proposal), newest
        drafts: list[torch.Tensor] = []
        for number in range(count):
            own = logits[:, number]
            if drafter.link is not None:
                own = drafter.link(own, features[:, number], last)
            last = draw(own, at[number])
            drafts.append(last)
        return agreed(torch.stack(drafts, dim=1), self._group)

    def _context(self, passes: DraftPasses) -> ForwardContext:
        causal = self._form.is_causal
        if len({*causal}) == 1:
            return passes.context(1, sees_block=not causal[0])
        whole, before = (passes.context(1, sees_block=sees) for sees in (True, False))
        attention = [*whole.attention]
        for layer, is_causal in zip(self.attention_layers, causal, strict=True):
            if is_causal:
                attention[layer.layer_index] = before.attention[layer.layer_index]
        return replace(whole, attention=attention)

    def report_start(self, info: WorkerInfo) -> WorkerInfo:
        """A block may take one place more than it has drafts."""
        info = super().report_start(info)
        return replace(info, num_draft_slots=info.num_draft_slots + (not self._form.tells_next))
