"""A drafter that replays what a run without drafts said, and lies at imposed places: `benchmarks.speculation` measures
with it. With `model`, it also runs the EAGLE-3 drafter of that checkpoint, whose drafts it drops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from app.backends import PROPOSERS
from app.layers.attention_layer import AttentionLayer
from app.records.step import NewRequest
from app.worker.spec_decode.base import Proposal, Proposer, ProposerContext
from app.worker.spec_decode.eagle3 import Eagle3Proposer

NAME = "replay"
PROPOSERS._table.setdefault(NAME, f"{__name__}:Replay")


@dataclass(slots=True)
class Script:
    """What requests will say, by their prompts, and how often a draft is right: the whole process's."""

    answers: dict[tuple[int, ...], list[int]]
    acceptance: float = 1.0


SCRIPT = Script({})


class Replay(Proposer):
    """Its work is the device's alone, so that steps are captured with it."""

    is_capturable = True

    def __init__(self, num_draft_tokens: int, context: ProposerContext, inner: Proposer | None) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.reads_layers = () if inner is None else inner.reads_layers
        self._inner, self._vocab_size = inner, context.info.vocab_size
        width, device = context.build.max_model_len + num_draft_tokens + 1, context.build.device
        self._said = torch.zeros(context.config.max_num_seqs, width, dtype=torch.int64, device=device)
        self._lies = torch.zeros(width, dtype=torch.int64, device=device)

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        inner, wanted = None, context.wanted
        if wanted.model is not None:
            asked = context.config.model_copy(
                update={"speculative_config": wanted.model_copy(update={"method": "eagle3"})}
            )
            inner = Eagle3Proposer.create(replace(context, config=asked))
        return cls(wanted.num_speculative_tokens, context, inner)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The inner drafter's."""
        return () if self._inner is None else self._inner.attention_layers

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        said = prompt + SCRIPT.answers.get(tuple(prompt), [])
        self._said[row, : len(said)] = torch.tensor(said, device=self._said.device)
        places = torch.arange(len(self._lies), device=self._lies.device)
        self._lies.copy_((places * 2654435761 % 2**32) >= SCRIPT.acceptance * 2**32)

    def propose(self, proposal: Proposal) -> torch.Tensor:
        """See Proposer."""
        if self._inner is not None:
            self._inner.propose(proposal)
        known = proposal.columns.num_tokens[proposal.rows].long()
        places = known[:, None] + torch.arange(self.num_draft_tokens, device=known.device)
        places = places.clamp(max=self._said.shape[1] - 1)
        return (self._said[proposal.rows[:, None], places] + self._lies[places]) % self._vocab_size
