"""Proposes what followed the newest tokens before: in this request, or in past outputs of the same tenant and adapter.

After SuffixDecoding (Oliaro et al., 2024), which keeps trees of texts on the host. Here all is on the device, of one
shape, and captured with the step: past outputs lie in one table, by a hash of the last 3, 5 or 8 tokens and of the root
that the request's KV blocks have (I5), so that no tenant's drafts, whose rightness a client could time, come from
another's outputs. The newest entry at a place stays. The longest run of past outputs comes first, then the request's
own text, then shorter runs.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Self

import torch

from app.kernels.drafts.reference import find_continuation, history
from app.records.step import NewRequest
from app.worker.rows.step_inputs import StepInput
from app.worker.spec_decode.base import Proposal, Proposer, ProposerContext
from app.worker.spec_decode.chain import agreed, no_drafts

LENGTHS = (8, 5, 3)  # tokens that are looked up in past outputs, the longest first
PLACES = 1 << 18  # of the table: with 8 drafts it takes 10 MiB
NO_OUTPUT = 1 << 40
_FACTOR = 6364136223846793005  # Knuth's, of the polynomial in which tokens are hashed; it wraps


class SuffixProposer(Proposer):
    """The drafter `suffix`."""

    is_capturable = True

    def __init__(self, context: ProposerContext) -> None:
        self.num_draft_tokens = context.wanted.most_drafts
        inputs, device = context.inputs, context.build.device
        self._roots: StepInput = inputs.declare("suffix_root", torch.int64)
        self._firsts: StepInput = inputs.declare("suffix_first", torch.int64, idle=NO_OUTPUT)
        # One more place takes what is none of the requests'.
        self._hashes = torch.zeros(PLACES + 1, dtype=torch.int64, device=device)
        self._followers = torch.zeros(PLACES + 1, self.num_draft_tokens, dtype=torch.int32, device=device)
        self._longest = min(LENGTHS[0], context.build.max_model_len)
        self._group = context.build.groups.tp  # the order of two writes to a place is any

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        return cls(context)

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        root = blake2b(request.spec.cache_root, digest_size=8).digest()
        self._roots.values[row] = int.from_bytes(root, "little", signed=True)
        self._firsts.set(row, request.num_prompt_tokens)

    def propose(self, proposal: Proposal) -> torch.Tensor:
        """See Proposer."""
        of_row = proposal.view.row_of_token[proposal.ends]
        roots, firsts = (proposal.view.rows[name][of_row] for name in ("suffix_root", "suffix_first"))
        token_ids, known = history(proposal.columns, proposal.rows)
        self._keep(proposal, token_ids, known, roots, firsts)
        if not proposal.num_drafts:
            return no_drafts(proposal)
        ahead = torch.arange(self.num_draft_tokens, device=known.device)
        first = find_continuation(token_ids, known, LENGTHS[-1], self._longest)
        own = token_ids.gather(1, first[:, None] + ahead % (known - first)[:, None])
        found = torch.where((first < known - 1)[:, None], own, self._past(token_ids, known, roots, LENGTHS[1:], own))
        return agreed(self._past(token_ids, known, roots, LENGTHS[:1], found), self._group)

    def _past(
        self,
        token_ids: torch.Tensor,
        known: torch.Tensor,
        roots: torch.Tensor,
        lengths: tuple[int, ...],
        otherwise: torch.Tensor,
    ) -> torch.Tensor:
        """[N, P] what followed the newest tokens in past outputs, for the first of the lengths that is there."""
        for length in reversed(lengths):
            hashes = hashed(token_ids, known[:, None], roots, length)[:, 0]
            place = place_of(hashes)
            is_there = (known >= length) & (self._hashes[place] == hashes)
            otherwise = torch.where(is_there[:, None], self._followers[place], otherwise)
        return otherwise

    def _keep(
        self,
        proposal: Proposal,
        token_ids: torch.Tensor,
        known: torch.Tensor,
        roots: torch.Tensor,
        firsts: torch.Tensor,
    ) -> None:
        """Take in the runs of outputs whose followers are all known since this step."""
        count = self.num_draft_tokens
        back = torch.arange(count + 1, device=known.device)
        ends = known[:, None] - count - back  # [N, 1 + P] behind each run
        exists = (back < proposal.num_new[:, None]) & (ends >= firsts[:, None])
        exists &= (proposal.view.tensors.slots[proposal.ends] >= 0)[:, None]  # others pad a static step
        places = ends.clamp(min=0)[:, :, None] + torch.arange(count, device=known.device)
        followers = token_ids.gather(1, places.flatten(1)).view(-1, count)
        for length in LENGTHS:
            hashes = hashed(token_ids, ends.clamp(min=0), roots, length)
            place = torch.where(exists & (ends >= length), place_of(hashes), PLACES).flatten()
            self._hashes[place] = hashes.flatten()
            self._followers[place] = followers.int()


def place_of(hashes: torch.Tensor) -> torch.Tensor:
    """Places in the table, by the upper bits."""
    return (hashes >> 24) % PLACES


def hashed(token_ids: torch.Tensor, ends: torch.Tensor, roots: torch.Tensor, length: int) -> torch.Tensor:
    """int64 [N, E], never 0: of the `length` tokens before `ends` [N, E] of each row of token_ids [N, W], and of the
    row's root [N]. Runs that begin before the row does have any."""
    found = (roots + length)[:, None].expand_as(ends)
    for back in range(length, 0, -1):
        token = token_ids.gather(1, (ends - back).clamp(min=0)).long()
        found = (found + token + 1) * _FACTOR
        found = found ^ (found >> 29)
    return found | 1
