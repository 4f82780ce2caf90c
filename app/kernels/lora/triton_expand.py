# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The second half of low-rank products on a GPU, added to products that stand: where these are cuBLAS's, or another
format's. A gate's activation rides along, so that gate and up are read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.fused import GatedActivation
from app.kernels.fused.triton_ops import activate
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.lora import SlotMatrices
from app.kernels.lora.triton_shrink import Hidden
from app.kernels.lora.triton_sort import SortedTokens
from app.kernels.quick_launch import quick_launch

COLUMNS = 256  # outputs of one program
_WIDTH = 64  # of them at a time
_MOST_RANKS = 64  # that are multiplied at a time
_WARPS = 4


@triton.jit
def _product(
    b_h, p_hidden, p_b, ranks, stride_tile, m_m, m_n, RANKS: tl.constexpr, BR: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden second^T, by pointers [BM, 1] to a token's ranks and [BN, 1] to an output's; b_h: its first BR ranks.
    EVEN: m_n holds throughout."""
    o_rank = tl.arange(0, BR)[None, :]
    m_b = o_rank < ranks if EVEN else m_n & (o_rank < ranks)
    b_b = tl.load(p_b + (o_rank // 16) * stride_tile + o_rank % 16, mask=m_b, other=0.0)
    b_acc = tl.dot(b_h, tl.trans(b_b), input_precision=PRECISION)
    if RANKS > BR:
        for i_r in range(BR, ranks, BR):
            o_rank = i_r + tl.arange(0, BR)[None, :]
            b_h = tl.load(p_hidden + o_rank, mask=m_m & (o_rank < ranks), other=0.0)
            b_b = tl.load(p_b + (o_rank // 16) * stride_tile + o_rank % 16, mask=m_n & (o_rank < ranks), other=0.0)
            b_acc = tl.dot(b_h, tl.trans(b_b), b_acc, input_precision=PRECISION)
    return b_acc


@quick_launch
@triton.jit(do_not_specialize=["T", "C"])
def expand_kernel(
    p_y, p_second, p_num_tiles, p_order, p_chunks, p_hidden, p_part_tiles, p_out, T, C, N, stride_y, stride_out,
    stride_slot, stride_tile,
    PARTS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, COPIES: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (pieces of the outputs, C): p_out = p_y + hidden second^T. COPIES: p_out is not p_y, so what has no slot is
    copied. GATED: p_y [T, 2 N] is gate and up, p_out [T, N] their activation and product; pieces of N. EVEN: pieces
    begin and end at multiples of BN."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_n, i_c = tl.program_id(0), tl.program_id(1)
    b_slot = tl.load(p_chunks + i_c).to(tl.int64)
    b_size = tl.load(p_chunks + 2 * C + i_c)
    if b_size == 0:
        return
    if not (COPIES or GATED):  # noqa: SIM102 (a branch of the compiler's around one of the device's)
        if b_slot < 0:
            return
    o_m = tl.arange(0, BM)
    m_m = (o_m < b_size)[:, None]
    o_token = tl.load(p_order + tl.load(p_chunks + C + i_c) + o_m, mask=o_m < b_size, other=0).to(tl.int64)[:, None]
    if GATED:
        i_part = 0
        begin = i_n * COLUMNS
        end = tl.minimum(begin + COLUMNS, N)
    else:
        i_part = tl.load(p_part_tiles + 3 * i_n + 2)
        begin = tl.load(p_part_tiles + 3 * i_n)
        end = tl.load(p_part_tiles + 3 * i_n + 1)
    if EVEN:  # else outputs would be read and written one by one
        begin, end = tl.multiple_of(begin, BN), tl.multiple_of(end, BN)
    ranks = tl.load(p_num_tiles + b_slot, mask=b_slot >= 0, other=0) * 16
    p_h = p_hidden + (o_token * PARTS + i_part) * RANKS
    o_rank = tl.arange(0, BR)[None, :]
    b_h = tl.load(p_h + o_rank, mask=m_m & (o_rank < ranks), other=0.0)
    if GATED:
        b_h_up = tl.load(p_h + RANKS + o_rank, mask=m_m & (o_rank < ranks), other=0.0)
    for i in tl.range(begin, end, BN, num_stages=1):
        o_n = i + tl.arange(0, BN)
        m_n = o_n < end
        m = m_m if EVEN else m_m & m_n[None, :]
        p_in = p_y + o_token * stride_y + o_n[None, :]
        b_y = tl.load(p_in, mask=m, other=0.0)
        if GATED:
            b_up = tl.load(p_in + N, mask=m, other=0.0)
        if b_slot >= 0:
            p_b = p_second + b_slot * stride_slot + o_n[:, None] * 16
            b_more = _product(b_h, p_h, p_b, ranks, stride_tile, m_m, m_n[:, None], RANKS, BR, EVEN, PRECISION)
            b_y = (b_y.to(tl.float32) + b_more).to(p_y.dtype.element_ty)
            if GATED:
                b_more = _product(
                    b_h_up, p_h + RANKS, p_b + N * 16, ranks, stride_tile, m_m, m_n[:, None], RANKS, BR, EVEN, PRECISION
                )  # fmt: skip
                b_up = (b_up.to(tl.float32) + b_more).to(p_y.dtype.element_ty)
        if GATED:
            # Rounded in between, as where the two are written and read again.
            b_y = (activate(b_y.to(tl.float32), ACT) * b_up.to(tl.float32)).to(p_out.dtype.element_ty)
        tl.store(p_out + o_token * stride_out + o_n[None, :], b_y, mask=m)


def expand(
    hidden: Hidden,
    matrices: SlotMatrices,
    rows: SortedTokens,
    y: torch.Tensor,
    *,
    in_place: bool = False,
    activation: GatedActivation | None = None,
) -> torch.Tensor:
    """y [T, N] + the second half; with an activation y is gate and up [T, 2 N], and the result [T, N]."""
    assert matrices.part_tiles is not None
    assert y.stride(1) == 1, "rows must be contiguous"
    _, parts, ranks = hidden.values.shape
    second, columns, pieces = matrices.second, y.shape[1], len(matrices.part_tiles)
    if activation is not None:
        columns //= 2
        pieces = cdiv(columns, COLUMNS)
    out = y if in_place else torch.empty(len(y), columns, dtype=y.dtype, device=y.device)
    num_chunks = rows.chunks.shape[1]
    expand_kernel[(pieces, num_chunks)](
        y, second, matrices.num_tiles, rows.order, rows.chunks, hidden.values, matrices.part_tiles, out, len(y),
        num_chunks, columns, y.stride(0), out.stride(0), second.stride(0), second.stride(1),
        PARTS=parts, RANKS=ranks, COLUMNS=COLUMNS, BM=rows.chunk_size, BN=_WIDTH,
        BR=min(_MOST_RANKS, next_power_of_2(ranks)),
        GATED=activation is not None, ACT=activation or "silu", COPIES=not in_place,
        EVEN=all(size % _WIDTH == 0 for size in matrices.part_sizes),
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32", num_warps=_WARPS, num_stages=2,
        **early_launch(y.device),
    )  # fmt: skip
    return out
