"""The end of a step in an engine that drafts: verify, propose, tell the other stages."""

from __future__ import annotations

import torch

from app.engine.distributed.stage_link import StageLink
from app.engine.spec_decode.base import Proposer
from app.engine.spec_decode.feedback import pack
from app.engine.spec_decode.verify import keep_accepted, write_drafts
from app.engine.to_device import to_device
from app.engine.worker.input_batch import InputBatch
from app.engine.worker.pending_step import StepResults
from app.kernels.rows import RowColumns


class Drafting:
    """Used by the head of the last stage."""

    def __init__(self, proposer: Proposer, columns: RowColumns, link: StageLink) -> None:
        self._proposer = proposer
        self._columns = columns
        self._link = link

    def finish(self, batch: InputBatch, results: StepResults) -> None:
        """`results` holds a token for each of the batch's logits rows; says which of them the rows get."""
        sampled, columns, tokens = batch.sampled, self._columns, results.sampled_token_ids
        rows = to_device(sampled.rows, tokens.device)
        if sampled.num_drafts is None:
            columns.flat_token_ids.index_copy_(0, batch.targets, tokens.int())
            num_new = torch.ones_like(rows)
        else:
            num_new = keep_accepted(columns, rows, sampled.num_drafts, batch.targets, tokens)
            results.num_sampled, results.num_logits = num_new, sampled.num_drafts + 1
        write_drafts(columns, rows, self._proposer.propose(rows))
        if not self._link.is_first:
            self._link.send_tokens(pack(columns, rows, num_new, self._proposer.num_draft_tokens), to_all=True)
