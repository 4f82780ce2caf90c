# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, attr-defined"
"""The sum over the ranks of one host with the residual and the norm that follow, in one launch and without a barrier.

Each rank stores its part straight into boxes that every other rank has for it, over NVLink, and takes the others' parts
out of its own boxes. A word of eight bytes holds two numbers and the count of the sums so far: a device stores such a
word whole, so whoever finds the count of this sum has the numbers as well. Nothing is waited for but the words
themselves. Boxes are two sets that take turns: a rank writes a set again only after it has had all parts of the sum in
between, which the others send only once they have read the set. All ranks add up in the same order, so all have the
same bits. A call that holds more than the boxes do is somebody else's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.fused import RankBoxes
from app.kernels.launch import early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch


@triton.jit
def words_of(b_pairs, b_count):
    """int64: two numbers of 16 bits (an int32), and the count."""
    return (b_count.to(tl.int64) << 32) | (b_pairs.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def first_of(b_pairs, DTYPE: tl.constexpr):
    """fp32: the first numbers of pairs."""
    return (b_pairs & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def second_of(b_pairs, DTYPE: tl.constexpr):
    """fp32: the second numbers of pairs."""
    return ((b_pairs >> 16) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def paired(b_first, b_second):
    """int32: numbers of 16 bits side by side."""
    b_low = b_first.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return (b_second.to(tl.int16, bitcast=True).to(tl.int32) << 16) | b_low


@triton.jit
def weights_of(p_weight, o_w, m, DTYPE: tl.constexpr):
    """fp32: the weights of pairs of columns."""
    if p_weight.dtype.element_ty == tl.float32:  # Gemma's
        b_first = tl.load(p_weight + 2 * o_w, mask=m, other=0.0)
        b_second = tl.load(p_weight + 2 * o_w + 1, mask=m, other=0.0)
    else:
        b_pairs = tl.load(p_weight.to(tl.pointer_type(tl.int32)) + o_w, mask=m, other=0)
        b_first, b_second = first_of(b_pairs, DTYPE), second_of(b_pairs, DTYPE)
    return b_first, b_second


@triton.jit
def send(p_addresses, o_box, b_words, m, rank, RANKS: tl.constexpr):
    """Store words in all other ranks' boxes."""
    for i in tl.static_range(1, RANKS):
        p_box = tl.multiple_of(tl.load(p_addresses + (rank + i) % RANKS).to(tl.pointer_type(tl.int64)), 16)
        tl.store(p_box + o_box, b_words, mask=m)


@triton.jit
def received(p_words, o_words, stride_box, b_own, m, rank, b_count, RANKS: tl.constexpr):
    """The words of all ranks, as soon as they are there, in a tuple in the order of the ranks."""
    found = ()
    for i in tl.static_range(RANKS):  # all are on their way before one is looked at
        m_i = m & (rank != i)
        found = found + (tl.load(p_words + i * stride_box + o_words, mask=m_i, other=b_own, volatile=True),)  # noqa: RUF005
    whole = ()
    for i in tl.static_range(RANKS):
        m_i = m & (rank != i)
        b_words = found[i]
        while tl.min(((b_words >> 32).to(tl.int32) == b_count).to(tl.int32)) == 0:
            b_words = tl.load(p_words + i * stride_box + o_words, mask=m_i, other=b_own, volatile=True)
        whole = whole + (b_words.to(tl.int32),)  # noqa: RUF005
    return whole


@triton.jit
def count_on(p_clock, b_count, num_programs):
    """Whoever is the last of the programs to have read the clock sets it for the next sum."""
    done = tl.atomic_add(p_clock + 1, 1, sem="relaxed")
    if done == num_programs - 1:
        tl.store(p_clock + 1, 0)
        tl.store(p_clock, b_count)


@quick_launch
@triton.jit(do_not_specialize=["rank"])
def sum_add_norm_kernel(
    p_y, p_residual, p_weight, p_addresses, p_words, p_clock, p_out, p_total,
    rank, stride_box, stride_y, stride_residual, eps,
    C: tl.constexpr, BW: tl.constexpr, RANKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T,), one token's row of C / 2 pairs: p_total [T, C] = y, summed up over the ranks and rounded, + residual;
    p_out = its norm * weight [C]."""
    i_t, o_w = tl.program_id(0).to(tl.int64), tl.arange(0, BW)
    m = o_w < C // 2
    DTYPE: tl.constexpr = p_total.dtype.element_ty
    pairs: tl.constexpr = tl.pointer_type(tl.int32)
    b_weight, b_weight2 = weights_of(p_weight, o_w, m, DTYPE)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    b_count = tl.load(p_clock) + 1
    b_y = tl.load(p_y.to(pairs) + i_t * (stride_y // 2) + o_w, mask=m, other=0)
    b_own = words_of(b_y, b_count)
    o_set = (b_count & 1).to(tl.int64) * RANKS * stride_box
    o_row = i_t * (C // 2) + o_w
    send(p_addresses, o_set + rank * stride_box + o_row, b_own, m, rank, RANKS)
    b_residual = tl.load(p_residual.to(pairs) + i_t * (stride_residual // 2) + o_w, mask=m, other=0)
    parts = received(p_words + o_set, o_row, stride_box, b_own, m, rank, b_count, RANKS)
    b_first, b_second = first_of(parts[0], DTYPE), second_of(parts[0], DTYPE)
    for i in tl.static_range(1, RANKS):
        b_first += first_of(parts[i], DTYPE)
        b_second += second_of(parts[i], DTYPE)
    b_first = b_first.to(DTYPE).to(tl.float32) + first_of(b_residual, DTYPE)  # rounded, as a sum of its own is
    b_second = b_second.to(DTYPE).to(tl.float32) + second_of(b_residual, DTYPE)
    b_low, b_high = b_first.to(DTYPE), b_second.to(DTYPE)
    tl.store(p_total.to(pairs) + o_row, paired(b_low, b_high), mask=m)
    b_first, b_second = b_low.to(tl.float32), b_high.to(tl.float32)  # the norm is that of what is stored
    b_squares = tl.sum(tl.where(m, b_first * b_first + b_second * b_second, 0.0), 0)
    b_rms = tl.rsqrt(b_squares / C + eps)
    b_first, b_second = (b_first * b_rms * b_weight).to(DTYPE), (b_second * b_rms * b_weight2).to(DTYPE)
    tl.store(p_out.to(pairs) + o_row, paired(b_first, b_second), mask=m)
    count_on(p_clock, b_count, tl.num_programs(0))


def serves(boxes: RankBoxes, y: torch.Tensor, residual: torch.Tensor) -> bool:
    """True if the sum of such a y goes by these boxes."""
    is_held = y.shape[1] % 2 == 0 and 0 < y.numel() // 2 <= boxes.words.shape[2]
    return is_held and y.dtype == residual.dtype and _has_pairs(y) and _has_pairs(residual)


def _has_pairs(rows: torch.Tensor) -> bool:
    return (
        rows.dtype in (torch.bfloat16, torch.float16)
        and rows.stride(1) == 1
        and rows.stride(0) % 2 == 0
        and rows.data_ptr() % 4 == 0
    )


def sum_add_norm(
    boxes: RankBoxes, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See FusedOps.sum_add_norm."""
    if not serves(boxes, y, residual):
        return None
    num_rows, size = y.shape
    total = torch.empty(num_rows, size, dtype=y.dtype, device=y.device)
    out, padded = torch.empty_like(total), next_power_of_2(size // 2)
    sum_add_norm_kernel[(num_rows,)](
        y, residual, weight, boxes.addresses, boxes.words, boxes.clock, out, total, boxes.rank, boxes.words.shape[2],
        y.stride(0), residual.stride(0), eps, C=size, BW=padded, RANKS=boxes.num_ranks,
        num_warps=min(max(padded // 128, 1), 16), **early_launch(y.device),
    )  # fmt: skip
    return out, total
