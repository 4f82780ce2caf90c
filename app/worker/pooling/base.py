"""One vector of a text out of the hidden states of its tokens, which may come in several chunks (I1)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Pooling(ABC):
    """`of_step` for each chunk, `merge` over a request's chunks in order, `finish` at the end."""

    @abstractmethod
    def of_step(self, hidden: torch.Tensor, starts: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, C] of R requests, of which r has the rows starts[r] .. starts[r + 1] - 1 (int64 [R + 1]),
        from its token firsts[r] on (int64 [R]) -> fp32 [R, C], which may be overwritten."""

    @abstractmethod
    def merge(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        """[C] of a request's earlier chunks and of its next one -> [C]."""

    def finish(self, vectors: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[N, C] over whole prompts of `lengths` [N] tokens -> [N, C]."""
        return vectors


def segment_reduce(hidden: torch.Tensor, starts: torch.Tensor, reduce: str) -> torch.Tensor:
    """`sum` or `max` over the rows of each request: [T, C], int64 [R + 1] -> fp32 [R, C]."""
    lengths = starts[1:] - starts[:-1]
    return torch.segment_reduce(hidden.float().contiguous(), reduce, lengths=lengths, axis=0, unsafe=True)
