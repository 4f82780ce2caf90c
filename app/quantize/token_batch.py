"""Texts that run through a layer side by side, and where they lie in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from app.kernels.attention import AttentionMetadata

BLOCK_SIZE = 16
MOST_TOKENS = 4096  # of a batch, unless one text has more


@dataclass(slots=True, frozen=True)
class TokenBatch:
    """Whole texts of token ids."""

    texts: Sequence[Sequence[int]]

    @staticmethod
    def split(texts: Sequence[Sequence[int]]) -> list[TokenBatch]:
        """Batches of a size that a device takes well."""
        batches: list[list[Sequence[int]]] = []
        for text in texts:
            if not batches or sum(map(len, batches[-1])) + len(text) > MOST_TOKENS:
                batches.append([])
            batches[-1].append(text)
        return [TokenBatch(batch) for batch in batches]

    @property
    def input_ids(self) -> torch.Tensor:
        """int32 [T]."""
        return torch.tensor([token for text in self.texts for token in text], dtype=torch.int32)

    @property
    def positions(self) -> torch.Tensor:
        """int64 [T]."""
        return torch.cat([torch.arange(len(text)) for text in self.texts])

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache that they take."""
        return sum(self._blocks)

    @property
    def _blocks(self) -> list[int]:
        return [-(-len(text) // BLOCK_SIZE) for text in self.texts]

    def metadata(self, device: torch.device) -> AttentionMetadata:
        """The step that computes all of them; one text's blocks lie behind those of the one before."""
        lengths = np.array([len(text) for text in self.texts], dtype=np.int64)
        starts, firsts = (np.concatenate(([0], np.cumsum(sizes))) for sizes in (lengths, self._blocks))
        table = torch.from_numpy(firsts[:-1])[:, None] + torch.arange(max(self._blocks))
        slots = self.positions + torch.from_numpy(np.repeat(firsts[:-1] * BLOCK_SIZE, lengths))
        return AttentionMetadata(
            query_start_loc=torch.from_numpy(starts).int().to(device),
            seq_lens=torch.from_numpy(lengths).int().to(device),
            block_table=table.clamp(max=self.num_blocks - 1).int().to(device),
            slot_mapping=slots.to(device),
            max_query_len=int(lengths.max()),
            max_seq_len=int(lengths.max()),
            num_decodes=0,
            host_starts=starts,
            host_lens=lengths,
        )
