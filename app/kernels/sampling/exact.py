"""Draws and logprobs of which a row's depend on nothing but the row: each is computed alone, in memory of its own, so
that a library always sees a tensor of the same shape."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from app.kernels.sampling import reference


def gumbel_argmax(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, *, purpose: int = 0
) -> torch.Tensor:
    """The contract of `app.kernels.sampling.gumbel_argmax`, on a CPU."""
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    for row, one in _each(logits):
        token_ids[row] = reference.gumbel_argmax(one, keys[row], positions[row], purpose=purpose)
    return token_ids


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    *,
    purpose: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `app.kernels.sampling.sample_tokens`, on a CPU."""
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    logprobs = torch.empty(len(logits), dtype=torch.float32)
    for row, one in _each(logits):
        token_ids[row], logprobs[row] = reference.sample_tokens(
            one,
            temperature[row],
            top_k[row],
            top_p[row],
            min_p[row],
            keys[row],
            positions[row],
            purpose=purpose,
        )
    return token_ids, logprobs


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Logprobs of fp32 logits [N, V]."""
    out = torch.empty_like(logits)
    for row, one in _each(logits):
        out[row] = reference.log_softmax(one)
    return out


def _each(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """(its place, a copy [1, V]) of each row."""
    for row in range(len(logits)):
        place = slice(row, row + 1)
        yield place, logits[place].clone()
