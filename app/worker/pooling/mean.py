"""The mean over all tokens, special ones included."""

from __future__ import annotations

import torch

from app.engine.pooling.base import Pooling, segment_reduce


class MeanPooling(Pooling):
    """Sum over the tokens, divided by their number."""

    def of_step(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Sum over the rows of each request."""
        return segment_reduce(hidden, starts, "sum")

    def merge(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        """Add the sums of two chunks."""
        return earlier + later

    def finish(self, vectors: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Divide the sums by the numbers of tokens."""
        return vectors / lengths.unsqueeze(1)


class MeanSqrtLenPooling(MeanPooling):
    """Sum over the tokens, divided by the square root of their number."""

    def finish(self, vectors: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Divide the sums by the roots of the numbers of tokens: mean_sqrt_len_tokens of sentence-transformers."""
        return vectors / lengths.sqrt().unsqueeze(1)
