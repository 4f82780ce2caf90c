"""The end of a step in an engine that drafts: verify, bring states up to what stays, propose, tell the other stages."""

from __future__ import annotations

import torch

from app.distributed.stage_link import StageLink
from app.kernels.rows import RowColumns
from app.worker.spec_decode.base import Proposal, Proposer
from app.worker.spec_decode.drafted_states import DraftedStates
from app.worker.spec_decode.feedback import pack
from app.worker.spec_decode.verify import LogitsPlaces, keep_accepted, write_drafts


class Drafting:
    """Used by the head of the last stage."""

    def __init__(
        self, proposer: Proposer, columns: RowColumns, link: StageLink, states: DraftedStates | None = None
    ) -> None:
        """`states`: of the model's layers; None: they keep none."""
        self.proposer = proposer
        self.states = states
        self._columns = columns
        self._link = link

    @property
    def num_draft_tokens(self) -> int:
        """Drafts of a row."""
        return self.proposer.num_draft_tokens

    def keep(
        self, rows: torch.Tensor, places: LogitsPlaces | None, targets: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Take the tokens [L] that were sampled; how many of them each of rows int64 [N] gets, int64 [N]. No places:
        no row has drafts, and each gets its one."""
        if places is not None:
            return keep_accepted(self._columns, rows, places, targets, token_ids)
        self._columns.flat_token_ids.index_copy_(0, targets, token_ids.int())
        return torch.ones_like(rows)

    def propose(self, rows: torch.Tensor, proposal: Proposal) -> None:
        """New drafts behind the known tokens of `rows`: those of the proposal, below 0 where they only pad."""
        drafts = self.proposer.propose(proposal)[:, : proposal.num_drafts]
        if proposal.num_drafts:
            write_drafts(self._columns, rows, drafts)

    def tell(self, rows: torch.Tensor, num_new: torch.Tensor) -> None:
        """Let the stages before hear of rows [N], none of which pads."""
        if not self._link.is_first:
            self._link.send_tokens(pack(self._columns, rows.long(), num_new, self.num_draft_tokens), to_all=True)
