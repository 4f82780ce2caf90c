"""The plain products of PyTorch, slot by slot: the truth, and what runs on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.kernels.gemm import Inputs, materialize
from app.kernels.lora import ExpertMatrices, LoraOps, SlotChanges, SlotMatrices, SlotRows
from app.kernels.lora.apart import ops_apart


@dataclass(slots=True, frozen=True)
class TokensOfSlots(SlotRows):
    """The tokens of each slot that has any."""

    tokens: tuple[tuple[int, torch.Tensor], ...]  # (slot, int64 [n])


def rows_by_slot(slots: torch.Tensor, num_tiles: torch.Tensor, most_tiles: int) -> TokensOfSlots:
    """Reads the slots: on a CPU they are there."""
    present = sorted(set(slots.tolist()) - {-1})
    assert all(0 <= slot < len(num_tiles) for slot in present), present
    return TokensOfSlots(tuple((slot, (slots == slot).nonzero()[:, 0]) for slot in present))


def add_products(x: Inputs, matrices: SlotMatrices, rows: SlotRows, y: torch.Tensor, *, in_place: bool) -> torch.Tensor:
    """See AddProducts."""
    assert isinstance(rows, TokensOfSlots)
    out, x = y if in_place else y.clone(), materialize(x)
    for slot, tokens in rows.tokens:
        tiles, own, start = int(matrices.num_tiles[slot]), x[tokens], 0
        for part, size in enumerate(matrices.part_sizes):
            first = matrices.first[slot, :tiles, part].flatten(0, 1)  # [ranks, K]
            second = matrices.second[slot, :tiles, start : start + size].transpose(0, 1).flatten(1)  # [size, ranks]
            out[tokens, start : start + size] += (own @ first.T) @ second.T
            start += size
    return out


def add_looked_up(inputs: torch.Tensor, matrices: SlotMatrices, rows: SlotRows, y: torch.Tensor) -> torch.Tensor:
    """See AddLookedUp."""
    assert isinstance(rows, TokensOfSlots)
    for slot, of_slot in rows.tokens:
        tokens, tiles = of_slot[inputs[of_slot] >= 0], int(matrices.num_tiles[slot])
        first = matrices.first[slot, :tiles, 0].flatten(0, 1)  # [ranks, K]
        second = matrices.second[slot, :tiles].transpose(0, 1).flatten(1)  # [N, ranks]
        y[tokens] += first[:, inputs[tokens].long()].T @ second.T
    return y


def add_expert_products(
    x: torch.Tensor, slots: torch.Tensor, experts: torch.Tensor, matrices: ExpertMatrices, y: torch.Tensor
) -> torch.Tensor:
    """See AddExpertProducts."""
    present = set(zip(slots.tolist(), experts.tolist(), strict=True))
    for slot, expert in sorted(one for one in present if one[0] >= 0 and 0 <= one[1] < matrices.first.shape[2]):
        rows = ((slots == slot) & (experts == expert)).nonzero()[:, 0]
        tiles, own, start = int(matrices.num_tiles[slot]), x[rows], 0
        for part, size in enumerate(matrices.part_sizes):
            first = matrices.first[slot, :tiles, expert, part].flatten(0, 1)  # [ranks, K]
            second = matrices.second[slot, :tiles, expert, start : start + size].transpose(0, 1).flatten(1)
            y[rows, start : start + size] += (own @ first.T) @ second.T
            start += size
    return y


def change(y: torch.Tensor, changes: SlotChanges, rows: SlotRows) -> torch.Tensor:
    """See Change."""
    assert isinstance(rows, TokensOfSlots)
    size = changes.factors.shape[1]
    for slot, tokens in rows.tokens:
        changed = torch.addcmul(changes.shifts[slot], y[tokens, :size].float(), changes.factors[slot])
        y[tokens, :size] = changed.to(y.dtype)
    return y


def part_tiles(part_sizes: tuple[int, ...], device: torch.device) -> None:
    """None are needed."""


OPS = LoraOps(
    rows_by_slot=rows_by_slot,
    add_products=add_products,
    linear=ops_apart(add_products),
    changed=ops_apart(add_products, change),
    add_looked_up=add_looked_up,
    add_expert_products=add_expert_products,
    change=change,
    part_tiles=part_tiles,
)
