"""The drafter `draft_model`: a language model of its own, smaller than the target and of the same vocabulary.

Its keys and values lie in the same blocks as the target's, so a request that finds its prefix, is preempted or moves on
has both. Its first pass goes over the step's own tokens and, behind them, each row's newest; a pass for each further
draft follows. Without the newest the pass would tell nothing, and in a pass of its own it would cost as much again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Self

import torch

from app.checkpoints.model_info import ModelInfo
from app.errors import ConfigError
from app.kernels.attention import AttentionMetadata
from app.kernels.drafts.reference import slots_of, tables_of
from app.layers.attention_layer import AttentionLayer
from app.layers.context import ForwardContext
from app.loading.loader import load_drafter
from app.models.base import EngineModel
from app.models.decoder import CausalLM
from app.models.drafters.base import shifted
from app.models.implementation import causal_model, runs_natively
from app.worker.rows.step_inputs import StepInputs
from app.worker.spec_decode.base import Proposal, Proposer, ProposerContext
from app.worker.spec_decode.chain import agreed, no_drafts, positions_behind
from app.worker.spec_decode.draws import DraftSampler
from app.worker.spec_decode.passes import DraftPasses
from app.worker.spec_decode.weights import DrafterSource, own_group, target_of


class DraftModelProposer(Proposer):
    """`model` None: of a stage that does not sample."""

    is_capturable = True

    def __init__(self, model: EngineModel | None, context: ProposerContext) -> None:
        self.num_draft_tokens = context.wanted.most_drafts
        self._model = model
        self.models = () if model is None else (model,)
        self._inputs: StepInputs = context.inputs
        self._device, self._vocab_size = context.build.device, context.info.vocab_size
        self._group = own_group(context)

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        source, model = DrafterSource.of(context), None
        check_fit(source.info, context)
        if context.is_last:
            model = load_drafter(causal_model(source.info), source.info, source.build, source.form)
            check_positions(model, source.build.max_model_len)
            shifted(model, len(context.model.attention_layers))
        return cls(model, context)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The model's."""
        return () if self._model is None else self._model.attention_layers

    @cached_property
    def _sampler(self) -> DraftSampler:
        return DraftSampler(self._inputs, self._device, self._vocab_size)

    def propose(self, proposal: Proposal) -> torch.Tensor:
        """See Proposer."""
        model = self._model
        assert model is not None, "only the last stage proposes"
        token_ids, ctx = with_newest(proposal)
        hidden = model(token_ids, ctx)
        if not len(proposal.rows) or not proposal.num_drafts:
            return no_drafts(proposal)
        newest = proposal.ends + 1 + row_of_end(proposal)
        at = positions_behind(proposal, 2)
        draw = self._sampler.of(proposal)
        passes = DraftPasses(proposal, longest=model.longest_at_once(len(proposal.rows)))
        drafts: list[torch.Tensor] = []
        hidden = hidden[newest]
        for number in range(proposal.num_drafts):
            if number:
                hidden = model(drafts[-1], passes.context(number + 1))
            drafts.append(draw(model.raw_logits(hidden), at[number]))
        return agreed(torch.stack(drafts, dim=1), self._group)


def row_of_end(proposal: Proposal) -> torch.Tensor:
    """int64 [N] which of the step's R rows each of the proposal's rows is."""
    if proposal.view.host is None:
        return torch.arange(len(proposal.rows), device=proposal.rows.device)
    return proposal.view.row_of_token[proposal.ends]


def with_newest(proposal: Proposal) -> tuple[torch.Tensor, ForwardContext]:
    """The step's T tokens with one more behind those of each of its R rows, all as they are known by now: token ids
    [T + R], and what layers are given."""
    view, columns, step = proposal.view, proposal.columns, proposal.ctx.attention[0]
    device, num_rows = view.starts.device, len(view.starts) - 1
    starts = view.starts + torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    counts, first = starts.diff().long(), view.starts[:-1].long()
    total = len(view.tensors.positions) + num_rows
    row = torch.repeat_interleave(counts, output_size=total)
    begins = view.tensors.positions[first]
    positions = begins[row] + torch.arange(total, device=device) - starts.long()[row]
    rows = view.tensors.rows.long()
    places = rows[row] * columns.width + positions.clamp(max=columns.width - 1)
    assert columns.num_blocks is not None
    exists = (view.tensors.slots[first] >= 0)[row] & (positions // columns.block_size < columns.num_blocks[rows][row])
    tables = tables_of(columns, rows)
    slots = [slots_of(table, row, positions, columns.block_size, exists) for table in tables]
    meta = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=(begins + counts).int(),
        block_table=tables[0],
        slot_mapping=slots[0],
        max_query_len=step.max_query_len + 1,
        max_seq_len=min(step.max_seq_len + 1, columns.width),
        num_decodes=0,
        is_static=step.is_static,
        more_tables=tuple(zip(tables[1:], slots[1:], strict=True)),
    )
    return columns.flat_token_ids[places], proposal.plan(positions, meta)


def check_fit(info: ModelInfo, context: ProposerContext) -> None:
    """ConfigError where a model cannot draft for the target."""
    target_of(context).expect("vocab_size", info.vocab_size, context.info.vocab_size)
    if not runs_natively(info):
        raise ConfigError(
            f"speculative_config: model: {info.architecture} has no modules here, which a draft model needs",
            param="speculative_config",
        )


def check_positions(model: EngineModel, most: int) -> None:
    """ConfigError where a table of learned positions ends too early."""
    s = model.decoder_settings if isinstance(model, CausalLM) else None
    if s is not None and s.num_positions and s.num_positions - s.position_offset < most:
        raise ConfigError(
            f"speculative_config: model: it knows {s.num_positions - s.position_offset} positions, and is to draft up "
            f"to {most}: set max_model_len lower",
            param="speculative_config",
        )
