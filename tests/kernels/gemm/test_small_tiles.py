"""Which tile a product of few rows has, and which have none."""

from __future__ import annotations

import pytest
import torch

from app.kernels.gemm.small_tiles import (
    MOST_ROWS,
    SmallTile,
    deferred_tile,
    gated_tile,
    may_defer_norm,
    split_tile,
    stages_within,
    whole_tile,
)


def test_what_is_not_divided_yet_stays_out_of_fp16() -> None:
    assert may_defer_norm(4096, torch.bfloat16)
    assert not may_defer_norm(4096, torch.float16)
    assert not may_defer_norm(4160, torch.bfloat16)  # which a tile of 128 does not divide
    assert may_defer_norm(2880, torch.bfloat16, 64)


def test_sizes_that_no_tile_divides_are_left_to_the_library() -> None:
    for columns, size in ((4096, 4100), (512, 100), (14336, 4090), (200_000, 96)):
        tiles = [of(8, columns, size) for of in (whole_tile, deferred_tile, split_tile, gated_tile)]
        assert all(tile is None for tile in tiles), (columns, size, tiles)


def test_a_size_that_128_does_not_divide_has_smaller_stages() -> None:
    """GPT-OSS's 2,880, at which a norm is deferred to what reads it."""
    for tile in (deferred_tile(8, 5120, 2880), gated_tile(8, 4096, 2880, is_deferred=True)):
        assert tile is not None
        assert (tile.depth, tile.splits) == (64, 1)
    assert whole_tile(8, 201_088, 2880) is split_tile(8, 2880, 2880) is None
    assert deferred_tile(8, 5120, 2048) == SmallTile(64, 128, 4, 5)


@pytest.mark.parametrize(
    ("columns", "size"), [(1024, 2048), (1024, 3072), (4096, 4096), (4096, 14336), (5120, 17920), (896, 4864)]
)
def test_a_split_product_fills_the_device(columns: int, size: int) -> None:
    tile = split_tile(8, columns, size)
    assert tile is not None
    assert -(-columns // tile.columns) * tile.splits >= 100
    assert size % (tile.splits * tile.depth) == 0


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64, 128])
def test_tiles_fit_the_shared_memory_of_smaller_gpus(rows: int) -> None:
    """99 KiB on Ada and consumer Ampere: fewer stages, but still some. A Hopper has those of the table."""
    height = max(16, 1 << (rows - 1).bit_length())
    for columns, size in ((1024, 3072), (3072, 1024), (4096, 4096), (14336, 4096), (128256, 4096), (151936, 1024)):
        tiles = [
            (whole_tile(rows, columns, size), 1),
            (deferred_tile(rows, columns, size), 1),
            (split_tile(rows, columns, size), 1),
            (gated_tile(rows, columns, size), 2),
            (gated_tile(rows, columns, size, is_deferred=True), 2),
        ]
        if rows > MOST_ROWS:  # only a large gate and up is ours
            tiles = tiles[3:4] if columns >= 8192 else []
        for tile, weights in tiles:
            if tile is not None:
                stages = stages_within(99 << 10, tile, height, weights, 2)
                buffered = stages * (height + weights * tile.columns) * tile.depth * 2
                assert stages >= 2, (tile, rows, columns)
                assert buffered <= 99 << 10, (tile, rows, columns)
                assert stages_within(227 << 10, tile, height, weights, 2) == tile.num_stages, (tile, rows, columns)
