"""Calls of a step's first kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from app.kernels.rows import RowColumns, StepTensors
from app.kernels.rows import triton_ops as row_ops


def rows(max_num_seqs: int, width: int, block_size: int, num_groups: int = 1) -> None:
    """The first kernel of a step."""
    counts, cpu = torch.zeros(max_num_seqs, dtype=torch.int32), torch.device("cpu")
    token_ids = torch.zeros(max_num_seqs * width + 2, dtype=torch.int32, device="meta")
    table = counts.repeat(num_groups)[:, None].expand(-1, -(-width // block_size))
    columns = RowColumns(counts, counts, token_ids, table, width, block_size)
    row_ops.begin_step(counts[:8], counts[:9], columns, StepTensors.zeros(8, 8, cpu, num_groups))


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    return [
        partial(rows, 256, 12_288, 16),
        partial(rows, 4096, 1 << 20, 16),  # more tokens than int32 counts
        partial(rows, 256, 12_288, 16, num_groups=7),
    ]
