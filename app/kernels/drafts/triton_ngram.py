# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""N-grams that are looked up on a GPU: of a row's known tokens alone, however wide its table is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.drafts import MOST_PLACES
from app.kernels.launch import cdiv
from app.kernels.quick_launch import quick_launch
from app.kernels.rows import RowColumns

_TILE = 1024  # places at a time
_PROGRAMS = 512  # at most, where there are fewer rows


@quick_launch
@triton.jit(do_not_specialize=["shortest", "longest"], do_not_specialize_on_alignment=["p_rows"])
def find_kernel(
    p_rows, p_num_tokens, p_token_ids, p_best, shortest, longest, WIDTH: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """Grid (N, programs of a row): the length of the longest match in the upper 32 bits, in the lower ones the latest
    place behind one; 0: there is none."""
    i_n, i_part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b_row = tl.load(p_rows + i_n).to(tl.int64)
    b_known = tl.load(p_num_tokens + b_row)
    p_row = p_token_ids + b_row * WIDTH
    b_best = tl.zeros([BT], dtype=tl.int64)
    for i_tile in range(i_part * BT, b_known, num_parts * BT):
        o_place = i_tile + tl.arange(0, BT)  # behind a match
        b_matches = o_place < b_known
        b_length = tl.zeros([BT], dtype=tl.int64)
        for i_back in range(1, longest + 1):
            b_matches = b_matches & (o_place >= i_back)
            b_newest = tl.load(p_row + b_known - i_back, mask=b_known >= i_back, other=0)
            b_token = tl.load(p_row + o_place - i_back, mask=b_matches, other=0)
            b_matches = b_matches & (b_token == b_newest)
            b_length += b_matches.to(tl.int64)
        b_found = (b_length << 32) + o_place
        b_best = tl.maximum(b_best, tl.where(b_length >= shortest, b_found, 0))
    tl.atomic_max(p_best + i_n, tl.max(b_best, 0))


@quick_launch
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["p_rows"])
def copy_kernel(p_rows, p_num_tokens, p_token_ids, p_best, p_drafts, count, WIDTH: tl.constexpr, BP: tl.constexpr):
    """Grid (N,): what followed the match, again and again where it ends."""
    i_n = tl.program_id(0).to(tl.int64)
    b_row = tl.load(p_rows + i_n).to(tl.int64)
    b_known = tl.load(p_num_tokens + b_row)
    b_best = tl.load(p_best + i_n)
    b_first = tl.where(b_best > 0, (b_best & 0x7FFFFFFF).to(tl.int32), b_known - 1)
    o_draft = tl.arange(0, BP)
    b_source = b_first + o_draft % (b_known - b_first)
    b_draft = tl.load(p_token_ids + b_row * WIDTH + b_source, mask=o_draft < count, other=0)
    tl.store(p_drafts + i_n * count + o_draft, b_draft.to(tl.int64), mask=o_draft < count)


def continue_ngrams(columns: RowColumns, rows: torch.Tensor, shortest: int, longest: int, count: int) -> torch.Tensor:
    """The same as `reference.continue_ngrams`."""
    num_rows = len(rows)
    drafts = torch.empty(num_rows, count, dtype=torch.int64, device=rows.device)
    if not drafts.numel():
        return drafts
    best = torch.zeros(num_rows, dtype=torch.int64, device=rows.device)
    parts = max(1, min(cdiv(columns.width, _TILE), _PROGRAMS // num_rows))
    find_kernel[(num_rows, parts)](
        rows,
        columns.num_tokens,
        columns.flat_token_ids,
        best,
        shortest,
        longest,
        WIDTH=columns.width,
        BT=_TILE,
        num_warps=4,
    )
    copy_kernel[(num_rows,)](
        rows,
        columns.num_tokens,
        columns.flat_token_ids,
        best,
        drafts,
        count,
        WIDTH=columns.width,
        BP=MOST_PLACES,
        num_warps=1,
    )
    return drafts
