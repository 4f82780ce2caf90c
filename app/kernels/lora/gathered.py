"""Low-rank products of experts, with each row's matrices gathered: operations of PyTorch that wait for nothing on the
device, so that CUDA graphs capture them. Each row is multiplied by itself, and its sum has one order (I6)."""

from __future__ import annotations

import torch

from app.kernels.lora import ExpertMatrices

_GATHERED_BYTES = 64 << 20  # of matrices at a time, about


def add_expert_products(
    x: torch.Tensor, slots: torch.Tensor, experts: torch.Tensor, matrices: ExpertMatrices, y: torch.Tensor
) -> torch.Tensor:
    """See AddExpertProducts. Tiles behind those of a slot's adapter are gathered, and count for nothing, whatever they
    hold."""
    first, second = matrices.first, matrices.second
    row_bytes = (first[0, :, 0].numel() + second[0, :, 0].numel()) * first.element_size()
    count = max(1, _GATHERED_BYTES // row_bytes)
    for begin in range(0, len(x), count):
        own = slice(begin, begin + count)
        _add(x[own], slots[own].long(), experts[own].long(), matrices, y[own])
    return y


def _add(
    x: torch.Tensor, slots: torch.Tensor, experts: torch.Tensor, matrices: ExpertMatrices, y: torch.Tensor
) -> None:
    is_one = (slots >= 0) & (experts >= 0) & (experts < matrices.first.shape[2])
    slots, experts = slots.clamp(min=0), experts.clamp(0, matrices.first.shape[2] - 1)
    first = matrices.first[slots, :, experts]  # [n, tiles, P, TILE_RANK, K]
    tiles = torch.arange(first.shape[1], device=x.device)
    counts = is_one[:, None] & (tiles < matrices.num_tiles[slots][:, None])  # [n, tiles]
    second = matrices.second[slots, :, experts].masked_fill_(~counts[:, :, None, None], 0.0)  # a copy
    start = 0
    for part, size in enumerate(matrices.part_sizes):
        low = torch.einsum("nk,ntrk->ntr", x, first[:, :, part]).masked_fill(~counts[:, :, None], 0.0)
        added = torch.einsum("ntr,ntor->no", low, second[:, :, start : start + size])
        out = y[:, start : start + size]
        out.copy_(torch.where(is_one[:, None], out + added, out))
        start += size
