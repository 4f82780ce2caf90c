"""The boxes of all ranks in one process: what others would send is put into a rank's boxes before its kernel runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.distributed.rank_boxes import SETS
from app.kernels.fused import RankBoxes


class AllBoxes:
    """Those of some ranks."""

    def __init__(self, num_ranks: int, num_words: int, device: str) -> None:
        self.words = torch.zeros(num_ranks, SETS, num_ranks, num_words, dtype=torch.int64, device=device)
        self.addresses = torch.tensor([words.data_ptr() for words in self.words], device=device)
        self.clocks = torch.zeros(num_ranks, 2, dtype=torch.int32, device=device)
        self.count = 1  # of the sum to come

    def of(self, rank: int, parts: Sequence[torch.Tensor]) -> RankBoxes:
        """A rank's end, once the others have sent their parts [T, C]."""
        for other, part in enumerate(parts):
            if other != rank:
                words = self.sent(part)
                self.words[rank, self.count % SETS, other, : len(words)] = words
        return RankBoxes(rank, self.addresses, self.words[rank], self.clocks[rank])

    def sent(self, part: torch.Tensor) -> torch.Tensor:
        """Words: two numbers each, and the count of the sum."""
        pairs = part.contiguous().view(torch.int32).flatten().long() & 0xFFFFFFFF
        return pairs | self.count << 32

    def got(self, rank: int, sender: int, length: int) -> torch.Tensor:
        """The words of a rank's box for a sender."""
        return self.words[rank, self.count % SETS, sender, :length]
