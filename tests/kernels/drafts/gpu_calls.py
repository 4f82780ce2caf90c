"""Calls of kernels for drafts, as steps that verify some make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from app.kernels.drafts import LogitsPlaces, triton_ngram
from app.kernels.drafts import triton_ops as draft_ops
from app.kernels.rows import RowColumns, StepTensors


def drafts(width: int, block_size: int, num_groups: int = 1) -> None:
    """The ends of steps with drafts, of two rows."""
    ints, longs = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    token_ids, table = torch.zeros(2 * width + 2, dtype=torch.int32, device="meta"), ints[:2, None]
    table = table.repeat(num_groups, -(-width // block_size))
    columns = RowColumns(ints[:2], ints[:2], token_ids, table, width, block_size, longs[:2])
    for places in (None, LogitsPlaces(ints[:2], ints[:2])):
        draft_ops.accept_drafts(columns, ints[:2], places, longs, longs, 8)
    draft_ops.write_drafts(columns, ints[:2], longs.view(2, 2))
    step = StepTensors.zeros(4, 4, torch.device("cpu"), num_groups)
    for sees_block in (False, True):
        draft_ops.place_drafts(columns, longs[:2], step, longs[:2], 1, 2, sees_block=sees_block)
    floats = torch.zeros(2)
    draft_ops.repeat_parameters((floats, ints[:2], floats, floats, longs.view(2, 2)), 3)
    triton_ngram.continue_ngrams(columns, longs[:2], 2, 4, 3)


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    return [partial(drafts, 12_288, 16), partial(drafts, 1 << 20, 16, num_groups=7)]
