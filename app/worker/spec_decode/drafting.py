"""The end of a step in an engine that drafts: verify, bring states up to what stays, propose, tell the other stages."""

from __future__ import annotations

import torch

from app.distributed.stage_link import StageLink
from app.kernels.drafts import ACCEPT_DRAFTS, WRITE_DRAFTS, LogitsPlaces
from app.kernels.rows import RowColumns
from app.worker.spec_decode.base import Proposal, Proposer
from app.worker.spec_decode.drafted_states import DraftedStates
from app.worker.spec_decode.feedback import pack


class Drafting:
    """Used by the head of the last stage."""

    def __init__(
        self,
        proposer: Proposer,
        columns: RowColumns,
        link: StageLink,
        vocab_size: int,
        states: DraftedStates | None = None,
    ) -> None:
        """`states`: of the model's layers; None: they keep none."""
        self.proposer = proposer
        self.states = states
        self._columns, self._vocab_size = columns, vocab_size
        self._link = link
        device = columns.num_tokens.device
        self._accept, self._write = ACCEPT_DRAFTS.on(device), WRITE_DRAFTS.on(device)

    @property
    def num_draft_tokens(self) -> int:
        """Drafts of a row."""
        return self.proposer.num_draft_tokens

    def keep(
        self, rows: torch.Tensor, places: LogitsPlaces | None, targets: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the tokens [L] that were sampled; int64 [N] how many of them each of rows int32 [N] gets, and where the
        last of these stands. No places: no row has drafts, and each gets its one."""
        return self._accept(self._columns, rows, places, targets, token_ids, self._vocab_size)

    def propose(self, rows: torch.Tensor, proposal: Proposal) -> None:
        """New drafts behind the known tokens of `rows` int32 [N]: those of the proposal, -1 where they only pad."""
        drafts = self.proposer.propose(proposal)[:, : proposal.num_drafts]
        if proposal.num_drafts:
            self._write(self._columns, rows, drafts.long())

    def tell(self, rows: torch.Tensor, num_new: torch.Tensor) -> None:
        """Let the stages before hear of rows [N], none of which pads."""
        if not self._link.is_first:
            self._link.send_tokens(pack(self._columns, rows.long(), num_new, self.num_draft_tokens), to_all=True)
