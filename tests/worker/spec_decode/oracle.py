"""Two proposers that know what requests will say: one tells it, the other never does."""

from __future__ import annotations

from typing import ClassVar, Self

import torch

from app.records.step import NewRequest
from app.worker.spec_decode.base import Proposal, Proposer, ProposerContext

PROPHET, LIAR = f"{__name__}:Prophet", f"{__name__}:Liar"


class Prophet(Proposer):
    """Always right."""

    shift: ClassVar[int] = 0
    said: ClassVar[dict[tuple[int, ...], list[int]]] = {}  # by choice index and prompt

    def __init__(self, context: ProposerContext) -> None:
        self.num_draft_tokens = context.wanted.num_speculative_tokens
        self._vocab_size = context.info.vocab_size
        self._texts: dict[int, list[int]] = {}

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        return cls(context)

    def enter(self, row: int, request: NewRequest) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        self._texts[row] = prompt + self.said.get((request.spec.choice_index, *prompt), [])

    def propose(self, proposal: Proposal) -> torch.Tensor:
        known = proposal.columns.num_tokens
        return torch.tensor([self._drafts(row, int(known[row])) for row in proposal.rows.tolist()])

    def _drafts(self, row: int, known: int) -> list[int]:
        """What follows; anything behind a text's end."""
        text = [*self._texts.get(row, []), *[0] * (known + self.num_draft_tokens)]
        return [(token + self.shift) % self._vocab_size for token in text[known : known + self.num_draft_tokens]]


class Liar(Prophet):
    """Always wrong."""

    shift = 1
