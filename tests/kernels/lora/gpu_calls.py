"""Calls of adapters' products, as models' layers make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from app.kernels.gemm import triton_small
from app.kernels.lora import TILE_RANK, AdaptedWeight, SlotMatrices, SlotRows
from app.kernels.lora import triton_ops as lora_ops
from tests.kernels.target_gpu import zeros


def adapted_weight(size: int, parts: tuple[int, ...], max_rank: int, rows: SlotRows) -> AdaptedWeight:
    """One of eight slots."""
    tiles, outputs, first_size = max_rank // TILE_RANK, sum(parts), len(parts) * TILE_RANK * size
    pool = zeros(8, tiles, first_size + outputs * TILE_RANK)
    first = pool[:, :, :first_size].unflatten(2, (len(parts), TILE_RANK, size))
    second = pool[:, :, first_size:].unflatten(2, (outputs, TILE_RANK))
    pieces = lora_ops.part_tiles(parts, torch.device("cpu"))
    matrices = SlotMatrices(first, second, torch.zeros(8, dtype=torch.int32), parts, pieces)
    return AdaptedWeight(triton_small.OPS, zeros(outputs, size), matrices, rows)


def adapted(hidden: int, projected: tuple[int, ...], intermediate: int, max_rank: int) -> None:
    """A layer's products with adapters, in steps of few rows and of many."""
    ops = lora_ops.OPS.linear
    for tokens in (1, 32, 64, 500):
        slots, num_tiles = torch.zeros(tokens, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        rows = lora_ops.OPS.rows_by_slot(slots, num_tiles, max_rank // TILE_RANK)
        over = partial(adapted_weight, max_rank=max_rank, rows=rows)
        x = zeros(tokens, hidden)
        normed, _ = ops.linear_add_norm(x, over(hidden, (hidden,)), None, x, x[0], 1e-6, True)
        ops.linear(normed, over(hidden, projected), None)
        gated = ops.gated_linear(normed, over(hidden, (intermediate, intermediate)), None, "silu")
        ops.linear_add_norm(gated, over(intermediate, (hidden,)), None, x, x[0], 1e-6, True)


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    return [
        partial(adapted, 4096, (4096, 1024, 1024), 14336, 16),
        partial(adapted, 1024, (2048, 1024, 1024), 3072, 64),
    ]
