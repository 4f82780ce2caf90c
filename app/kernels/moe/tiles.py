"""Tiles of the grouped products on a GPU, chosen by how many pairs there are for each expert.

Read off `python -m benchmarks.tune_moe` on an H200 over the sizes of Qwen3-30B-A3B, DeepSeek-V2-Lite and GPT-OSS-20B
at 1 to 8,192 tokens: each is within 5 % of the best tile of any of those cases. What else another model or GPU likes
better, the same command says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.kernels.launch import next_power_of_2
from app.kernels.moe.triton_grouped import GroupedTile

MOST_SCANNED = 512  # pairs: with more, sorting them takes less time than every program's search


@dataclass(slots=True, frozen=True)
class LayerTiles:
    """How a layer's two products run."""

    gate_up: GroupedTile
    down: GroupedTile
    is_sorted: bool
    unpacks: bool = False  # weights of few bits become plain ones first


FEWEST = (  # pairs, a quarter of the experts and fewer: many small tiles start sooner
    GroupedTile(16, 64, 64, 4, 5, swap=True),
    GroupedTile(16, 64, 64, 4, 5, swap=True),
)
# Up to so many pairs for each expert: the tiles of gate and up, and of down.
BY_ROWS: tuple[tuple[float, GroupedTile, GroupedTile], ...] = (
    (10, GroupedTile(16, 64, 128, 4, 3, swap=True, tma=True), GroupedTile(16, 128, 128, 4, 3, swap=True, tma=True)),
    (20, GroupedTile(32, 64, 64, 4, 3, swap=True), GroupedTile(32, 64, 128, 4, 3, swap=True, tma=True)),
    (96, GroupedTile(64, 64, 64, 4, 3, swap=True), GroupedTile(64, 128, 64, 4, 3, tma=True)),
    (256, GroupedTile(128, 128, 64, 8, 4), GroupedTile(128, 256, 64, 8, 4)),
    (float("inf"), GroupedTile(128, 128, 64, 8, 3, tma=True), GroupedTile(128, 256, 64, 8, 3, tma=True, programs=1)),
)
# The same for weights of few bits, whose depth is their own; with more rows they are unpacked first.
STORED_BY_ROWS: tuple[tuple[float, GroupedTile, GroupedTile], ...] = (
    (10, GroupedTile(16, 64, 128, 4, 4), GroupedTile(16, 64, 128, 4, 4)),
    (24, GroupedTile(32, 64, 128, 4, 4), GroupedTile(32, 64, 128, 4, 4)),
    (96, GroupedTile(64, 64, 128, 4, 3), GroupedTile(64, 64, 128, 4, 3)),
)
_EXACT = GroupedTile(16, 16, 32, 4, 2)
EXACT = LayerTiles(_EXACT, _EXACT, is_sorted=True)  # fp32, for any number of pairs (I6)


def layer_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype, *, is_stored: bool = False) -> LayerTiles:
    """The tiles for so many pairs over so many experts, whose weights are of few bits if `is_stored`; in fp32 the same
    for all."""
    if dtype == torch.float32:
        return EXACT
    is_sorted = num_pairs > MOST_SCANNED
    if is_stored and num_pairs <= STORED_BY_ROWS[-1][0] * num_experts:
        rows = num_pairs if is_sorted else 0  # in a scan a tile is small: experts differ in how many pairs they have
        gate_up, down = next(tiles for most, *tiles in STORED_BY_ROWS if rows <= most * num_experts)
        return LayerTiles(gate_up, down, is_sorted=is_sorted)
    if 4 * next_power_of_2(num_pairs) <= num_experts:
        return LayerTiles(*FEWEST, is_sorted=False)
    if num_pairs <= MOST_SCANNED:
        return LayerTiles(*BY_ROWS[0][1:], is_sorted=False)
    gate_up, down = next(tiles for most, *tiles in BY_ROWS if num_pairs <= most * num_experts)
    return LayerTiles(gate_up, down, is_sorted=True, unpacks=is_stored)
