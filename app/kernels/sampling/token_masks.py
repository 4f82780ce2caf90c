"""Token masks in plain PyTorch: the truth, and the CPU path."""

from __future__ import annotations

import torch


def apply_token_masks(logits: torch.Tensor, indices: torch.Tensor, words: torch.Tensor) -> None:
    """The contract of `app.kernels.sampling.apply_token_masks`, on any device."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(2) >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    missing = logits.shape[1] - allowed.shape[1]
    if missing > 0:
        allowed = torch.nn.functional.pad(allowed, (0, missing))
    rows = indices.long()
    logits[rows] = logits[rows].masked_fill_(~allowed, float("-inf"))
