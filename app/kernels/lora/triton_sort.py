# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Sorts a step's tokens by slot on the device, and cuts them into chunks of one slot each: a long prompt of one request
does not make the grid, and many adapters of one token each are as many small chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.lora import SlotRows
from app.kernels.quick_launch import quick_launch

_FEW_TOKENS = 256  # up to so many a chunk has 16 tokens, as in decode steps
_FEW_CHUNK, _MANY_CHUNK = 16, 64
_SORT_TOKENS = 64  # tokens that are sorted at a time
_JOBS = 8  # a reader's at a time at most


@dataclass(slots=True, frozen=True)
class SortedTokens(SlotRows):
    """Tokens in the order of their slots, in chunks; those without a slot come first."""

    slots: torch.Tensor  # int32 [T] of each token, as they were
    order: torch.Tensor  # int32 [T] tokens
    chunks: torch.Tensor  # int32 [3, C]: slot, first place in `order`, how many (0: no chunk)
    jobs: torch.Tensor  # see LowRankRows: each tile of each slot that tokens have
    chunk_size: int


@quick_launch
@triton.jit(do_not_specialize=["T", "C", "num_jobs"])
def sort_kernel(
    p_slots, p_num_tiles, p_order, p_chunks, p_jobs, T, C, num_jobs,
    G: tl.constexpr, BG: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (1,): a stable counting sort of T slots (-1 .. G - 2), the C chunks of CHUNK tokens, and the jobs."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    o_g, o_t = tl.arange(0, BG)[None, :], tl.arange(0, BT)
    b_count = tl.zeros([1, BG], dtype=tl.int32)
    for i_t in range(0, T, BT):
        b_group = tl.load(p_slots + i_t + o_t, mask=i_t + o_t < T, other=-2) + 1
        b_count += tl.sum((b_group[:, None] == o_g).to(tl.int32), 0)[None, :]
    b_first = tl.cumsum(b_count, 1) - b_count
    b_at = b_first
    for i_t in range(0, T, BT):
        b_group = tl.load(p_slots + i_t + o_t, mask=i_t + o_t < T, other=-2) + 1
        b_is = (b_group[:, None] == o_g).to(tl.int32)
        b_place = tl.sum(b_is * (b_at + tl.cumsum(b_is, 0) - 1), 1)
        tl.store(p_order + b_place, (i_t + o_t).to(tl.int32), mask=i_t + o_t < T)
        b_at += tl.sum(b_is, 0)[None, :]
    b_chunks = (b_count + CHUNK - 1) // CHUNK
    b_before = tl.cumsum(b_chunks, 1) - b_chunks
    for i_c in range(0, C, BC):
        o_c = i_c + tl.arange(0, BC)
        b_nth = o_c[:, None] - b_before
        b_is = ((b_nth >= 0) & (b_nth < b_chunks)).to(tl.int32)
        b_begin = tl.sum(b_is * (b_first + b_nth * CHUNK), 1)
        b_size = tl.sum(b_is * tl.minimum(b_count - b_nth * CHUNK, CHUNK), 1)
        tl.store(p_chunks + o_c, tl.sum(b_is * o_g, 1) - 1, mask=o_c < C)
        tl.store(p_chunks + C + o_c, b_begin, mask=o_c < C)
        tl.store(p_chunks + 2 * C + o_c, b_size, mask=o_c < C)
    b_tiles = tl.load(p_num_tiles + o_g - 1, mask=(b_count > 0) & (o_g > 0), other=0)
    b_before = tl.cumsum(b_tiles, 1) - b_tiles
    for i_j in range(0, num_jobs, BC):
        o_j = i_j + tl.arange(0, BC)
        b_nth = o_j[:, None] - b_before
        b_is = ((b_nth >= 0) & (b_nth < b_tiles)).to(tl.int32)
        tl.store(p_jobs + o_j, tl.sum(b_is * o_g, 1) - 1, mask=o_j < num_jobs)
        tl.store(p_jobs + num_jobs + o_j, tl.sum(b_is * b_nth, 1), mask=o_j < num_jobs)
    tl.store(p_jobs + 2 * num_jobs, tl.sum(b_tiles))


def rows_by_slot(slots: torch.Tensor, num_tiles: torch.Tensor, most_tiles: int) -> SortedTokens:
    """See RowsBySlot."""
    num_tokens, groups = len(slots), len(num_tiles) + 1
    chunk = _FEW_CHUNK if num_tokens <= _FEW_TOKENS else _MANY_CHUNK
    num_chunks = min(num_tokens, num_tokens // chunk + groups)
    order = torch.empty(num_tokens, dtype=torch.int32, device=slots.device)
    chunks = torch.empty(3, num_chunks, dtype=torch.int32, device=slots.device)
    num_jobs = cdiv(min(num_tokens, len(num_tiles)) * most_tiles, _JOBS) * _JOBS
    jobs = torch.empty(2 * num_jobs + 1, dtype=torch.int32, device=slots.device)
    sort_kernel[(1,)](
        slots, num_tiles, order, chunks, jobs, num_tokens, num_chunks, num_jobs,
        G=groups, BG=next_power_of_2(groups), BT=_SORT_TOKENS, BC=32, CHUNK=chunk, num_warps=4,
        **early_launch(slots.device),
    )  # fmt: skip
    return SortedTokens(slots, order, chunks, jobs, chunk)
