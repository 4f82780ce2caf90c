"""`allowed_token_ids`: every other token becomes impossible."""

from __future__ import annotations

import numpy as np
import torch

from app.kernels.sampling import TOKEN_MASKS
from app.platforms.to_device import to_device
from app.records.step import Int32Array, NewRequest
from app.worker.logits_processors.base import LogitsProcessor, SamplingStep


class AllowedTokenIds(LogitsProcessor):
    """Keeps one bit a token for each row, so that a long list costs its length once, when its request comes."""

    reads = frozenset({"allowed_token_ids"})

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._apply_masks = TOKEN_MASKS.on(device)

    def read(self, request: NewRequest) -> Int32Array | None:
        """The bits of the allowed ids, int32 [ceil(V / 32)]; see TokenMasks."""
        allowed = request.spec.sampling.allowed_token_ids
        if allowed is None:
            return None
        ids = np.array(allowed, np.int64)
        bits = np.zeros(-(-self.vocab_size // 32) * 32, np.bool_)
        bits[ids[(ids >= 0) & (ids < self.vocab_size)]] = True
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)

    def build(self, indices: list[int], states: list[Int32Array]) -> None:
        """The users' masks, one below the other."""
        self._indices = to_device(np.array(indices, np.int32), self.device)
        self._words = to_device(np.stack(states), self.device)

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """-inf where a bit is 0."""
        self._apply_masks(logits, self._indices, self._words)
