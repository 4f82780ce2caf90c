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
        """Sums add up."""
        return earlier + later

    def finish(self, vectors: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Sums to means."""
        return vectors / lengths.unsqueeze(1)


class MeanSqrtLenPooling(MeanPooling):
    """Sum over the tokens, divided by the square root of their number."""

    def finish(self, vectors: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Sums to what sentence-transformers calls mean_sqrt_len_tokens."""
        return vectors / lengths.sqrt().unsqueeze(1)
