"""Products on a GPU whose rows do not depend on how many there are; the interpreter shows that they are right."""

from __future__ import annotations

import pytest
import torch

from app.kernels.fused import FUSED_OPS
from app.kernels.gemm import reference, triton_fixed
from app.kernels.gemm.leaves import LEAVES, add_neighbours, cut
from app.kernels.gemm.triton_fixed import (
    FEW,
    MANY,
    MANY_GATED,
    OPS,
    FixedTile,
    fixed_linear,
    leaf_tile_for,
    tile_for,
)
from tests.kernels.stub_gpu import as_on

SIZES = [(3, 40, 96), (17, 34, 50)]  # rows, columns, inputs: whole vectors, and not


def random(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_against_the_truth(sizes: tuple[int, int, int], swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = FixedTile(16, 32, 32, 4, 2, swap=swap)
    monkeypatch.setattr(triton_fixed, "tile_for", lambda *asked, is_gated: tile)
    num_rows, columns, size = sizes
    x, weight, bias = random(num_rows, size), random(2 * columns, size, seed=1), random(2 * columns, seed=2)
    residual, norm = random(num_rows, 2 * columns, seed=3), random(2 * columns, seed=4)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(OPS.linear(x, weight, None), reference.linear(x, weight, None), **close)
    torch.testing.assert_close(OPS.linear(x, weight, bias), reference.linear(x, weight, bias), **close)
    found = OPS.gated_linear(x, weight, bias, "silu")
    torch.testing.assert_close(found, reference.OPS.gated_linear(x, weight, bias, "silu"), **close)
    normed, total = OPS.linear_add_norm(x, weight, bias, residual, norm, 1e-6, True)
    expected = reference.OPS.linear_add_norm(x, weight, bias, residual, norm, 1e-6, True)
    torch.testing.assert_close((normed, total), expected, **close)


def by_ranks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ranks: int) -> torch.Tensor:
    """The product over leaves as so many ranks make it: the first has the bias."""
    parts = [
        triton_fixed.sum_leaves(rows.contiguous(), cut(part, LEAVES // ranks), None if number else bias, torch.float32)
        for number, (rows, part) in enumerate(zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True))
    ]
    return add_neighbours(torch.stack(parts)).to(x.dtype)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("leaf", [32, 50])
def test_leaves(leaf: int, swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = FixedTile(16, 32, 32, 4, 2, swap=swap)
    monkeypatch.setattr(triton_fixed, "leaf_tile_for", lambda *asked: tile)
    x, weight, bias = random(19, LEAVES * leaf), random(40, LEAVES * leaf, seed=1), random(40, seed=2)
    expected = reference.linear(x, weight, bias)
    for ranks in (1, 2, 4):
        torch.testing.assert_close(by_ranks(x, weight, bias, ranks), expected, rtol=1e-4, atol=1e-4)
    found = triton_fixed.sum_leaves(x, cut(weight, LEAVES), None, torch.float32)
    torch.testing.assert_close(found, reference.linear(x, weight, None), rtol=1e-4, atol=1e-4)


def test_tiles() -> None:
    """Few rows have narrow tiles; of many those whose rounds take the least time."""
    assert [tile_for(rows, 4096, 132, is_gated=False).rows for rows in (1, 16, 17, 64)] == [16, 16, 32, 64]
    assert tile_for(8192, 4096, 132, is_gated=False) == MANY[0][1]
    assert tile_for(256, 4096, 132, is_gated=False) == MANY[2][1]
    assert tile_for(8192, 14336, 132, is_gated=True) == MANY_GATED[0][1]
    assert leaf_tile_for(8192, 4096, 132) == MANY[1][1]


def test_a_norm_of_its_own() -> None:
    with as_on(9):
        exact = FUSED_OPS.on(torch.device("meta"), exact=True)
    x, weight = random(3, 4, 40), random(40, seed=1)
    expected = torch.nn.functional.rms_norm(x, (40,), weight, 1e-6)
    torch.testing.assert_close(exact.rms_norm(x, weight, 1e-6), expected, rtol=1e-5, atol=1e-5)


TILES = [*(tile for _, tile, _ in FEW), *(tile for _, tile in MANY)]
GATED_TILES = [*(tile for *_, tile in FEW), *(tile for _, tile in MANY_GATED)]


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "size"), [(4096, 4096), (1100, 14336), (512, 96), (99, 1000), (70, 50)])
def test_all_tiles_give_the_same_bits(columns: int, size: int) -> None:
    x = random(700, size, device="cuda", dtype=torch.bfloat16)
    weight = random(2 * columns, size, device="cuda", dtype=torch.bfloat16, seed=1)
    bias = random(2 * columns, device="cuda", dtype=torch.bfloat16, seed=2)
    plain = fixed_linear(x, weight, bias, tile=TILES[0])
    torch.testing.assert_close(plain, reference.linear(x, weight, bias), rtol=2e-2, atol=2e-1)
    for tile in TILES:
        assert torch.equal(fixed_linear(x, weight, bias, tile=tile), plain), tile
    gated = fixed_linear(x, weight, bias, "silu", GATED_TILES[0])
    for tile in GATED_TILES:
        assert torch.equal(fixed_linear(x, weight, bias, "silu", tile), gated), tile
    for count in (1, 5, 16, 17, 33, 64, 65, 200, 513):
        part = x[700 - count :].contiguous()
        assert torch.equal(OPS.linear(part, weight, bias), plain[700 - count :]), count
        assert torch.equal(OPS.gated_linear(part, weight, bias, "silu"), gated[700 - count :]), count


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "size"), [(4096, 4096), (4096, 14336), (1100, 512), (99, 200)])
def test_leaves_of_any_number_of_ranks(columns: int, size: int) -> None:
    x = random(8192, size, device="cuda", dtype=torch.bfloat16)
    weight = random(columns, size, device="cuda", dtype=torch.bfloat16, seed=1)
    bias = random(columns, device="cuda", dtype=torch.bfloat16, seed=2)
    plain = triton_fixed.sum_leaves(x, cut(weight, LEAVES), bias, x.dtype)
    torch.testing.assert_close(plain, reference.linear(x, weight, bias), rtol=2e-2, atol=2e-1)
    for count in (1, 5, 16, 17, 33, 64, 65, 200, 513, 8192):
        part = x[len(x) - count :].contiguous()
        for ranks in (1, 2, 4):
            assert torch.equal(by_ranks(part, weight, bias, ranks), plain[len(x) - count :]), (count, ranks)
