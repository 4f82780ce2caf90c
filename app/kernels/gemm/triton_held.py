# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
"""Products of at most four rows on a GPU, with a weight that is on its way before the launch before has ended.

In the decode step of a few streams of a small model a product waits longer for the kernel before it than it takes to
read its weight. No kernel on the stream writes weights, so a program here loads all rows of its tile into registers,
and waits only then. It lets the next kernel begin as soon as it has waited itself: if that is such a product, its
weight comes while this one computes. Rows are few enough for ordinary multiplications: there is nothing to pad for
tensor cores, and sums stay within a warp. Bias, activation and the sum with the residual ride along. Beside cuBLAS for
Whisper large-v3's layers: benchmarks/RESULTS.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.fused import PlainActivation
from app.kernels.fused.triton_ops import activate
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch

MOST_ROWS = 4
_MOST_ELEMENTS = (
    0,
    8 << 20,
    8 << 20,
    5 << 20,
    5 << 20,
)  # of a weight, by the number of rows: as far as it was measured
_HELD = 20_480  # elements of the weight that a program holds: 80 for each of its threads
_MOST_COLUMNS, _LEAST_COLUMNS = 16, 4
_LOADED = 4096  # elements of one load of all threads
_NUM_WARPS = 8


@dataclass(slots=True, frozen=True)
class HeldTile:
    """Rows of the weight that a program holds, and how many elements of each are one load."""

    columns: int
    depth: int


@quick_launch
@triton.jit(do_not_specialize=["T"])
def held_linear_kernel(
    p_x, p_weight, p_bias, p_residual, p_out, T, N, stride_x, stride_residual,
    ROWS: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N,): x [T, K] times rows of weight [N, K] + bias, then ACT, then + residual [T, N]."""
    o_n, o_k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_n = o_n < N
    p_w = p_weight + o_n[:, None].to(tl.int64) * K + o_k[None, :]
    held = ()
    for i_k in tl.static_range(0, K, BK):
        b_w = tl.load(p_w + i_k) if EVEN else tl.load(p_w + i_k, mask=m_n[:, None], other=0.0)
        held = held + (b_w,)  # noqa: RUF005 (the compiler knows no unpacking)
    b_bias = tl.zeros([BN], dtype=tl.float32)
    if p_bias is not None:
        b_bias = tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p_rows = p_x + (o_n * 0)[:, None] + o_k[None, :]  # read as the weight is laid out: no thread needs another's
    for i in tl.static_range(ROWS):
        i_t = tl.minimum(i, T - 1)  # rows that only pad do the last one again
        b_acc = tl.zeros([BN, BK], dtype=tl.float32)
        for i_k in tl.static_range(0, K, BK):
            b_x = tl.load(p_rows + i_t * stride_x + i_k).to(tl.float32)
            b_acc += held[i_k // BK].to(tl.float32) * b_x
        b_y = (tl.sum(b_acc, 1) + b_bias).to(p_out.dtype.element_ty).to(tl.float32)
        if ACT is not None:
            b_y = activate(b_y, ACT)
        if p_residual is not None:
            b_y += tl.load(p_residual + i_t * stride_residual + o_n, mask=m_n, other=0.0).to(tl.float32)
        tl.store(p_out + i_t * N + o_n, b_y.to(p_out.dtype.element_ty), mask=m_n & (i < T))


def held_tile(num_rows: int, columns: int, size: int) -> HeldTile | None:
    """The tile for so many rows times a weight [columns, size]; None: a larger one is another kernel's."""
    if not 0 < num_rows <= MOST_ROWS or columns * size > _MOST_ELEMENTS[num_rows]:
        return None
    rows = min(_MOST_COLUMNS, next_power_of_2(_HELD // size + 1) // 2) if size <= _HELD else 0
    if rows < _LEAST_COLUMNS or size % (_LOADED // rows):
        return None
    return HeldTile(rows, _LOADED // rows)


def held_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: HeldTile,
    activation: PlainActivation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K], transposed, + bias, its activation, + residual [T, N]."""
    (num_rows, size), columns = x.shape, len(weight)
    assert x.stride(1) == 1, "rows must be contiguous"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert residual is None or residual.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(num_rows, columns, dtype=x.dtype, device=x.device)
    held_linear_kernel[(cdiv(columns, tile.columns),)](
        x, weight, bias, residual, out, num_rows, columns, x.stride(0), 0 if residual is None else residual.stride(0),
        ROWS=next_power_of_2(num_rows), K=size, BN=tile.columns, BK=tile.depth, ACT=activation,
        EVEN=columns % tile.columns == 0, num_warps=_NUM_WARPS, **early_launch(x.device),
    )  # fmt: skip
    return out
