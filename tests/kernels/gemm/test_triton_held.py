"""Products of at most four rows against float64, and which they serve."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from app.kernels.gemm import triton_small
from app.kernels.gemm.small_tiles import tile_to_hold
from app.kernels.gemm.triton_held import HeldTile, held_linear, held_tile
from app.kernels.gemm.triton_small import activated_linear, linear, linear_add
from tests.kernels.gemm.test_triton_small import DEVICE, TOLERANCE, relative_error, tensors

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "size", "tile"),
    [
        (1, 48, 256, HeldTile(16, 256)),
        (3, 100, 512, HeldTile(8, 512)),  # the last tile is not whole
        (4, 8, 1024, HeldTile(4, 1024)),
        (2, 6, 3072, HeldTile(4, 1024)),
    ],
)
def test_products(dtype: torch.dtype, rows: int, columns: int, size: int, tile: HeldTile) -> None:
    wide, weight, bias = tensors(rows, columns, size + 16, dtype)
    x, weight = wide[:, :size], weight[:, :size].contiguous()  # rows with a gap between them
    residual = torch.randn(rows, columns + 8, dtype=dtype, device=DEVICE)[:, :columns] * 5
    for given in (None, bias):
        truth = F.linear(x.double(), weight.double(), None if given is None else given.double())
        assert relative_error(held_linear(x, weight, given, tile), truth) < TOLERANCE[dtype]
        out = held_linear(x, weight, given, tile, "gelu")
        assert relative_error(out, F.gelu(truth)) < 2 * TOLERANCE[dtype]
        total = held_linear(x, weight, given, tile, residual=residual)
        assert total.dtype == dtype
        assert relative_error(total, truth + residual.double()) < TOLERANCE[dtype]


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    x, weight, bias = tensors(4, 32, 512, torch.bfloat16)
    whole = held_linear(x, weight, bias, HeldTile(8, 512))
    for row in range(4):
        assert torch.equal(held_linear(x[row : row + 1], weight, bias, HeldTile(8, 512)), whole[row : row + 1])


def test_tiles() -> None:
    """Whisper's and other small models' layers, as far as they were measured; larger weights and more rows are left."""
    assert held_tile(1, 3840, 1280) == held_tile(4, 3840, 1280) == HeldTile(16, 256)
    assert held_tile(2, 1280, 5120) == HeldTile(4, 1024)
    assert held_tile(1, 1024, 2048) == HeldTile(8, 512)
    assert held_tile(4, 1280, 5120) is None
    assert held_tile(5, 1280, 1280) is held_tile(0, 1280, 1280) is None
    assert held_tile(1, 51_866, 1280) is held_tile(1, 256, 6144) is held_tile(1, 384, 384) is None


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_layers_take_them_where_rows_are_few(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = tensors(rows, 64, 256, torch.bfloat16)
    residual = torch.randn(rows, 64, dtype=torch.bfloat16, device=DEVICE)
    launched: list[str] = []

    def noted(*given: object, **more: object) -> torch.Tensor:
        launched.append("held")
        return held_linear(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_small, "held_linear", noted)
    truth = F.linear(x.double(), weight.double(), bias.double())
    assert relative_error(linear(x, weight, bias), truth) < TOLERANCE[x.dtype]
    assert relative_error(activated_linear(x, weight, bias, "relu2"), F.relu(truth).square()) < 2 * TOLERANCE[x.dtype]
    total = linear_add(x, weight, bias, residual)
    assert (total is None) == (rows > 4)
    if total is not None:
        assert relative_error(total, truth + residual.double()) < TOLERANCE[x.dtype]
    assert len(launched) == (3 if rows <= 4 else 0)
    assert tile_to_hold(x.float(), weight.float()) is None  # a library's products are exact enough
