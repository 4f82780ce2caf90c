"""The largest value of each dimension over all tokens."""

from __future__ import annotations

import torch

from app.worker.pooling.base import Pooling, segment_reduce


class MaxPooling(Pooling):
    """Maximum over the tokens, dimension by dimension."""

    def of_step(self, hidden: torch.Tensor, starts: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """Maximum over the rows of each request."""
        return segment_reduce(hidden, starts, "max")

    def merge(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        """The larger of two chunks' maxima."""
        return torch.maximum(earlier, later)
