"""Products of few rows against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from app.kernels.fused import reference as fused_reference
from app.kernels.fused import triton_ops as fused
from app.kernels.gemm import triton_small
from app.kernels.gemm.triton_small import SmallTile, gated_tile, small_linear, split_tile, whole_tile

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}


def tensors(
    rows: int, columns: int, size: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, bias."""
    torch.manual_seed(rows + columns)
    made = torch.randn(rows, size), torch.randn(columns, size) / size**0.5, torch.randn(columns)
    x, weight, bias = (tensor.to(device, dtype) for tensor in made)
    return x, weight, bias


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    return float((out.double() - truth).norm() / truth.norm())


def check(tile: SmallTile, rows: int, columns: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Whole or in parts, with and without a bias; then gated."""
    x, weight, bias = tensors(rows, columns, size, dtype, device)
    for given in (None, bias):
        out = small_linear(x, weight, given, tile)
        assert out.shape == ((rows, columns) if tile.splits == 1 else (tile.splits, rows, columns))
        assert out.dtype == (dtype if tile.splits == 1 else torch.float32)
        truth = F.linear(x.double(), weight.double(), None if given is None else given.double())
        assert relative_error(out if tile.splits == 1 else out.sum(0), truth) < TOLERANCE[dtype]
        if tile.splits == 1 and columns % 2 == 0:
            gate, up = truth.chunk(2, dim=-1)
            out = small_linear(x, weight, given, tile, gated=True)
            assert relative_error(out, F.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tile", "rows", "columns"),
    [
        (SmallTile(32, 64, 4, 3), 1, 64),
        (SmallTile(32, 64, 4, 3), 5, 96),
        (SmallTile(32, 64, 4, 3), 17, 70),  # the last tile of columns is not full
        (SmallTile(16, 64, 4, 3, splits=2), 3, 48),
        (SmallTile(32, 32, 4, 3, splits=8), 33, 40),
    ],
)
def test_against_float64(dtype: torch.dtype, tile: SmallTile, rows: int, columns: int) -> None:
    check(tile, rows, columns, 256, dtype, "cpu")


def test_rows_of_a_wider_tensor() -> None:
    x, weight, _ = tensors(4, 64, 128, torch.float32)
    wide = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)[:, :128]
    out = small_linear(wide, weight, None, SmallTile(32, 64, 4, 3))
    assert relative_error(out, F.linear(x.double(), weight.double())) < 2e-6


def test_parts_are_added_up_by_the_norm() -> None:
    x, weight, norm = tensors(3, 96, 256, torch.float16)
    residual = torch.randn(3, 96, dtype=torch.float16)
    parts = small_linear(x, weight, None, SmallTile(32, 64, 4, 3, splits=4))
    for ops in (fused, fused_reference):
        normed, total = ops.add_rms_norm(parts, residual, norm, 1e-6)
        expected = F.linear(x, weight) + residual
        torch.testing.assert_close(total, expected, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(normed, F.rms_norm(expected, (96,), norm, 1e-6), rtol=5e-3, atol=5e-3)


def test_sizes_that_no_tile_divides_go_to_the_library() -> None:
    for columns, size in ((4096, 4100), (512, 100), (14336, 4090), (200_000, 96)):
        tiles = (whole_tile(8, columns, size), split_tile(columns, size), gated_tile(8, columns, size))
        assert all(tile is None for tile in tiles), (columns, size, tiles)
    x, weight, bias = tensors(4, 96, 100, torch.float16)
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(triton_small.linear_parts(x, weight, bias), expected)
    torch.testing.assert_close(triton_small.linear(x, weight, bias), expected)


@pytest.mark.parametrize(("columns", "size"), [(1024, 2048), (1024, 3072), (4096, 4096), (4096, 14336), (896, 4864)])
def test_a_split_product_fills_the_device(columns: int, size: int) -> None:
    tile = split_tile(columns, size)
    assert tile is not None
    assert -(-columns // tile.columns) * tile.splits >= 100
    assert size % (tile.splits * tile.depth) == 0


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64])
def test_tiles_fit_the_shared_memory_of_smaller_gpus(rows: int) -> None:
    """99 KiB on Ada and consumer Ampere; a tile of x and of the weight is buffered for every stage but one."""
    height = max(16, 1 << (rows - 1).bit_length())
    for columns, size in ((1024, 3072), (3072, 1024), (4096, 4096), (14336, 4096), (128256, 4096), (151936, 1024)):
        tiles = [
            (whole_tile(rows, columns, size), 1),
            (split_tile(columns, size), 1),
            (gated_tile(rows, columns, size), 2),
        ]
        for tile, weights in tiles:
            if tile is not None:
                buffered = (tile.num_stages - 1) * (height + weights * tile.columns) * tile.depth * 2
                assert buffered <= 99 << 10, (tile, rows, columns)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 32, 48, 64])
def test_on_a_gpu(dtype: torch.dtype, rows: int) -> None:
    for columns, size in ((4096, 4096), (1000, 512), (1024, 3072)):
        tile = split_tile(columns, size)
        assert tile is not None
        check(tile, rows, columns, size, dtype, "cuda")
    check(SmallTile(64, 128, 4, 3), rows, 6144, 1024, dtype, "cuda")
    x, weight, _ = tensors(rows, 2 * 14336, 512, dtype, "cuda")
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    assert relative_error(triton_small.gated_linear(x, weight, None), F.silu(gate) * up) < TOLERANCE[dtype]
    x, weight, _ = tensors(rows, 151_936, 256, dtype, "cuda")
    assert relative_error(triton_small.linear(x, weight, None), F.linear(x.double(), weight.double())) < 8e-3
