"""The mean over all tokens, special ones included."""

from __future__ import annotations

import torch

from app.worker.pooling.base import Pooling, segment_reduce


class MeanPooling(Pooling):
    """Sum over the tokens, divided by their number."""

    def of_step(self, hidden: torch.Tensor, starts: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """Sum over the rows of each request."""
        return segment_reduce(hidden, starts, "sum")

    def merge(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        """Add the sums of two chunks."""
        return earlier + later

    def finish(self, vectors: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Divide the sums by the numbers of tokens."""
        return vectors / lengths.unsqueeze(1)


class SumPooling(MeanPooling):
    """Sum over the tokens."""

    def finish(self, vectors: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The sums themselves."""
        return vectors


class MeanSqrtLenPooling(MeanPooling):
    """Sum over the tokens, divided by the square root of their number."""

    def finish(self, vectors: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Divide the sums by the roots of the numbers of tokens: mean_sqrt_len_tokens of sentence-transformers."""
        return vectors / lengths.sqrt().unsqueeze(1)


class WeightedMeanPooling(MeanPooling):
    """The mean with weights 1, 2, 3, ... (SGPT: Muennighoff, 2022): later tokens of a decoder have seen more."""

    def of_step(self, hidden: torch.Tensor, starts: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """Weighted sum over the rows of each request."""
        rows = torch.arange(len(hidden), device=hidden.device)
        places = rows + torch.repeat_interleave(firsts - starts[:-1], starts[1:] - starts[:-1])
        return segment_reduce(hidden.float() * (places + 1).unsqueeze(1), starts, "sum")

    def finish(self, vectors: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Divide the sums by those of the weights."""
        return vectors / (lengths * (lengths + 1) / 2).unsqueeze(1)
