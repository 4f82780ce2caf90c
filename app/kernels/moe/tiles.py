"""Tiles of the grouped products on a GPU, chosen by how many pairs there are for each expert.

Read off `python -m benchmarks.tune_moe` on an H200 over the sizes of Qwen3-30B-A3B, DeepSeek-V2-Lite and GPT-OSS-20B
at 1 to 8,192 tokens: each is within 5 % of the best tile of any of those cases. What else another model or GPU likes
better, the same command says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from app.kernels.gemm.stored import StoredTiles, bits_of
from app.kernels.kernel_table import HOPPER, Candidate, KernelTable
from app.kernels.launch import cdiv, next_power_of_2
from app.kernels.moe import GLU, ExpertWeights
from app.kernels.moe.gluon_wide import DEPTH
from app.kernels.moe.stored import fp8_tiles, stored_tiles
from app.kernels.moe.triton_fp8 import Fp8Tile
from app.kernels.moe.triton_grouped import GroupedTile

MOST_SCANNED = 512  # pairs: with more, sorting them takes less time than every program's search


@dataclass(slots=True, frozen=True)
class LayerTiles:
    """Says how a layer's two products run."""

    gate_up: GroupedTile
    down: GroupedTile
    is_sorted: bool
    unpacks: bool = False  # weights of few bits become plain ones first


@dataclass(slots=True, frozen=True)
class Fp8LayerTiles:
    """Says how they run where activations are e4m3, too; both have as many rows."""

    gate_up: Fp8Tile
    down: Fp8Tile


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
# Plain weights on a Hopper, from so many pairs for each expert on.
WIDE_ROWS = 64
WIDE = LayerTiles(
    GroupedTile(128, 128, 64, 4, 4, in_gluon=True), GroupedTile(128, 256, 64, 4, 4, in_gluon=True), is_sorted=True
)
# The same for weights of few bits, whose depth is their own; with more rows they are unpacked first. The numbers of
# STORED_FEW are for codes of 4 bits, which come straight to registers, and of 8.
MOST_FEW_ROWS = 6  # pairs for each expert: experts differ, and few have more than the eight rows of a tile
_FEW_ROWS = 8
STORED_FEW = {
    4: (
        GroupedTile(_FEW_ROWS, 32, 128, 4, 3, ahead=2, registers=128),
        GroupedTile(_FEW_ROWS, 64, 128, 4, 3, ahead=2, registers=128),
    ),
    8: (GroupedTile(_FEW_ROWS, 32, 128, 4, 3), GroupedTile(_FEW_ROWS, 64, 128, 4, 3)),
}
# Up to so many pairs for each expert tiles of 16 rows are enough for most, and scaling their sums takes less time than
# scaling weights.
_NARROW_ROWS: dict[str, int] = {"e4m3": 14}
_FEWER_NARROW_ROWS = 10  # of other forms
NARROW = GroupedTile(16, 64, 128, 4, 3), GroupedTile(16, 128, 128, 4, 3)
STORED_BY_ROWS: tuple[tuple[float, GroupedTile, GroupedTile], ...] = (
    (40, GroupedTile(32, 64, 128, 4, 3), GroupedTile(32, 128, 128, 4, 3)),
    (256, GroupedTile(64, 64, 128, 4, 3, is_wide=True), GroupedTile(64, 128, 128, 4, 3, is_wide=True)),
)
# Where both sides are e4m3. With fewer pairs for each expert than FP8_ROWS activations stay as they are: rounding them
# would save a step of decodes less than 8 %.
FP8_ROWS = 32
FP8 = Fp8LayerTiles(Fp8Tile(128, 12, 4, in_gluon=True), Fp8Tile(128, 12, 4, in_gluon=True))
FP8_ANY = Fp8LayerTiles(Fp8Tile(128, 8, 4), Fp8Tile(128, 8, 4))  # any activation
_LEAST_BLOCKS, _PROGRAMS = 12, 264  # a product with more of the former and fewer of the latter is cut in two
_EXACT = GroupedTile(16, 16, 32, 4, 2)
EXACT = LayerTiles(_EXACT, _EXACT, is_sorted=True)  # fp32, for any number of pairs (I6)


def layer_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype) -> LayerTiles:
    """The tiles for so many pairs over so many experts; in fp32 the same for all."""
    if dtype == torch.float32:
        return EXACT
    if 4 * next_power_of_2(num_pairs) <= num_experts:
        return LayerTiles(*FEWEST, is_sorted=False)
    if num_pairs <= MOST_SCANNED:
        return LayerTiles(*BY_ROWS[0][1:], is_sorted=False)
    gate_up, down = next(tiles for most, *tiles in BY_ROWS if num_pairs <= most * num_experts)
    return LayerTiles(gate_up, down, is_sorted=True)


def may_be_wide(weights: ExpertWeights) -> bool:
    """True if the kernel for Hopper GPUs serves plain weights of such sizes with their activation."""
    hidden, intermediate = weights.down.shape[1:]
    is_whole = hidden % DEPTH.value == 0 and intermediate % DEPTH.value == 0
    return is_whole and weights.activation.function == "silu"


def wide_tiles(ids: torch.Tensor, weights: ExpertWeights, dtype: torch.dtype) -> LayerTiles | None:
    """`WIDE`, for many pairs; weights of few bits are unpacked for still more."""
    num_pairs, num_experts = ids.numel(), weights.down.shape[0]
    is_many = num_pairs > MOST_SCANNED and num_pairs >= WIDE_ROWS * num_experts
    if dtype == torch.float32 or not is_many or not may_be_wide(weights):
        return None
    if stored_tiles(weights.gate_up) is None and stored_tiles(weights.down) is None:
        return WIDE
    return replace(WIDE, unpacks=True) if num_pairs > STORED_BY_ROWS[-1][0] * num_experts else None


def stored_layer_tiles(ids: torch.Tensor, weights: ExpertWeights, dtype: torch.dtype) -> LayerTiles | None:
    """The tiles where weights are of few bits, or one of them is, for pairs of ids [T, K]."""
    gate_up, down = stored_tiles(weights.gate_up), stored_tiles(weights.down)
    if gate_up is None and down is None:
        return None
    num_pairs, num_experts = ids.numel(), weights.down.shape[0]
    if dtype == torch.float32:
        return EXACT
    most_few = min(MOST_SCANNED, MOST_FEW_ROWS * num_experts)
    # An expert that every token goes to has more rows than such a tile.
    has_long = weights.num_shared > 0 and len(ids) > _FEW_ROWS
    if gate_up is not None and down is not None and next_power_of_2(num_pairs) <= most_few and not has_long:
        tiles = STORED_FEW[bits_of(gate_up.form)][0], STORED_FEW[bits_of(down.form)][1]
        widths = gate_up.words.shape[1] // 2, down.words.shape[1]
        tiles = _split(tiles[0], gate_up, widths[0], ids), _split(tiles[1], down, widths[1], ids)
        return LayerTiles(*tiles, is_sorted=False)
    if num_pairs > STORED_BY_ROWS[-1][0] * num_experts:
        return replace(layer_tiles(num_pairs, num_experts, dtype), unpacks=True)
    narrow = min(_NARROW_ROWS.get(one.form, _FEWER_NARROW_ROWS) for one in (gate_up, down) if one is not None)
    if num_pairs <= narrow * num_experts:
        return LayerTiles(*NARROW, is_sorted=True)
    gate_up_tile, down_tile = next(tiles for most, *tiles in STORED_BY_ROWS if num_pairs <= most * num_experts)
    return LayerTiles(_scaled(gate_up_tile, gate_up), _scaled(down_tile, down), is_sorted=True)


def fp8_layer_tiles(ids: torch.Tensor, num_experts: int, activation: GLU, dtype: torch.dtype) -> Fp8LayerTiles | None:
    """The tiles of products that round activations, for pairs of ids [T, K]; None: they stay as they are."""
    is_few = ids.numel() < FP8_ROWS * num_experts
    if dtype == torch.float32 or is_few or not activation.has_gate:
        return None
    return FP8 if activation.function == "silu" else FP8_ANY


def _rounded_tiles(ids: torch.Tensor, weights: ExpertWeights, dtype: torch.dtype) -> Fp8LayerTiles | None:
    if fp8_tiles(weights.gate_up) is None or fp8_tiles(weights.down) is None:
        return None
    return fp8_layer_tiles(ids, weights.down.shape[0], weights.activation, dtype)


def _plain_tiles(ids: torch.Tensor, weights: ExpertWeights, dtype: torch.dtype) -> LayerTiles:
    return layer_tiles(ids.numel(), weights.down.shape[0], dtype)


# (ids [T, K], weights, type of x); the tiles say which kernels they are of.
TILES: KernelTable[Callable[[torch.Tensor, ExpertWeights, torch.dtype], LayerTiles | Fp8LayerTiles | None]] = (
    KernelTable(
        "grouped products",
        Candidate(_rounded_tiles, HOPPER),
        Candidate(wide_tiles, HOPPER),
        Candidate(stored_layer_tiles),
        Candidate(_plain_tiles),
    )
)


def tiles_for(ids: torch.Tensor, weights: ExpertWeights, dtype: torch.dtype) -> LayerTiles | Fp8LayerTiles:
    """The first of the tiles that serve."""
    tiles = (tiles_of(ids, weights, dtype) for tiles_of in TILES.all_on(ids.device))
    return next(one for one in tiles if one is not None)


def _split(tile: GroupedTile, weight: StoredTiles, columns: int, ids: torch.Tensor) -> GroupedTile:
    """K cut in two where there are too few programs for the GPU."""
    programs = cdiv(columns, tile.columns) * next_power_of_2(ids.numel())
    is_long = len(ids) <= tile.rows and cdiv(weight.size, weight.block) >= _LEAST_BLOCKS
    is_split = tile.ahead > 0 and is_long and programs < _PROGRAMS
    return replace(tile, splits=2) if is_split else tile


def _scaled(tile: GroupedTile, weight: StoredTiles | None) -> GroupedTile:
    """Many scales of a block multiply weights, not sums."""
    return replace(tile, is_wide=True) if weight is not None and (weight.scales_of_block or 0) > 1 else tile
