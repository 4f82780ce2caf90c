"""Ties a draft of a block to the one before it, which the pass over the block did not know."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from app.layers.context import BuildContext
from app.layers.replicated import ReplicatedLinear
from app.layers.vocab import LMHead, VocabEmbedding
from app.layers.weight import REPLICATED, Weight


class TokenLink(nn.Module):
    """Changes the logits of one place once the token before it is known."""

    @abstractmethod
    def forward(self, logits: torch.Tensor, features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """[N, Vd] of the place's features [N, C], int64 [N] the tokens before -> [N, Vd]."""


class MarkovHead(TokenLink):
    """Tells how likely each token makes the next one, by a table of low rank (DSpark)."""

    def __init__(self, ctx: BuildContext, vocab_size: int, num_tokens: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = VocabEmbedding(ctx, vocab_size, rank)
        self.markov_w2 = LMHead(ctx, num_tokens, rank)

    def forward(self, logits: torch.Tensor, features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See TokenLink."""
        return logits + self.markov_w2(self.markov_w1(token_ids))  # type: ignore[no-any-return]


class CandidateSelector(TokenLink):
    """Leaves a place its `best` tokens alone, and adds how well each follows the token before, by codes of low rank
    that the place's features weigh (DFlash 2)."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int, rank: int, best: int) -> None:
        super().__init__()
        self._best = min(best, vocab_size)
        codes = (torch.empty(vocab_size, rank, dtype=ctx.dtype) for _ in range(2))
        self.predecessor_codebook, self.successor_codebook = (Weight(code, REPLICATED) for code in codes)
        self.hidden_projection = ReplicatedLinear(ctx, hidden_size, rank, bias=False)

    def forward(self, logits: torch.Tensor, features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See TokenLink."""
        scores, ids = logits.topk(self._best, dim=-1)
        before = self.predecessor_codebook[token_ids] * self.hidden_projection(features)
        edges = (self.successor_codebook[ids] @ before[:, :, None])[:, :, 0]
        return torch.full_like(logits, float("-inf")).scatter_(1, ids, scores + edges)
