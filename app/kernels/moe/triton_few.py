# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The down product of very few tokens on a GPU, summed over a token's experts in the same launch.

With one token or a few nearly every pair has an expert of its own, so that a program loses nothing by reading some rows
of the weights of all of a token's experts, and then has the sum: no rows are written and read again, and the residual
and the beginning of the next norm follow in the same launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.fused.reference import rms_norm
from app.kernels.gemm import Activations, DeferredNorm
from app.kernels.gemm.small_tiles import may_defer_norm
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.moe import ExpertRows, ExpertWeights, Routing
from app.kernels.quick_launch import quick_launch


@dataclass(slots=True, frozen=True)
class FewTile:
    """Tile sizes and launch options."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int


TILE = FewTile(4, 64, 4, 4)


@quick_launch
@triton.jit
def down_sum_kernel(
    p_h, p_weight, p_bias, p_ids, p_weights, p_shared, p_residual, p_norm, p_out, p_total, p_squares, N, K,
    stride_shared, stride_residual,
    TOP: tl.constexpr, BTOP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T, tiles of N): p_total [T, N] = the sum + residual; with p_norm [N] p_out = p_total * p_norm and p_squares
    [T, tiles]. p_h [T * TOP, K], p_weight [E, N, K]; without p_weights rows are summed as they are."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_t, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_top, o_n, o_k = tl.arange(0, BTOP), i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_n = o_n < N
    b_ids = tl.load(p_ids + i_t * TOP + o_top, mask=o_top < TOP, other=-1)
    m_top = b_ids >= 0
    m_row = m_top[:, None, None] & m_n[None, :, None]
    p_w = p_weight + (b_ids.to(tl.int64)[:, None] * N + o_n[None, :])[:, :, None] * K + o_k[None, None, :]
    p_x = p_h + (i_t * TOP + o_top)[:, None, None] * K + o_k[None, None, :]
    b_acc = tl.zeros([BTOP, BN, BK], dtype=tl.float32)
    for i_k in tl.range(0, K, BK, num_stages=STAGES):
        if EVEN:
            b_x = tl.load(p_x + i_k, mask=m_top[:, None, None], other=0.0)
            b_w = tl.load(p_w + i_k, mask=m_row, other=0.0)
        else:
            m_k = (i_k + o_k < K)[None, None, :]
            b_x = tl.load(p_x + i_k, mask=m_top[:, None, None] & m_k, other=0.0)
            b_w = tl.load(p_w + i_k, mask=m_row & m_k, other=0.0)
        b_acc += b_w.to(tl.float32) * b_x.to(tl.float32)
    b_rows = tl.sum(b_acc, 2)
    if p_bias is not None:
        p_b = p_bias + b_ids[:, None] * N + o_n[None, :]
        b_rows += tl.load(p_b, mask=m_top[:, None] & m_n[None, :], other=0.0).to(tl.float32)
    if p_weights is not None:
        b_rows *= tl.load(p_weights + i_t * TOP + o_top, mask=m_top, other=0.0)[:, None]
    b_sum = tl.sum(b_rows, 0)
    if p_shared is not None:
        b_sum += tl.load(p_shared + i_t * stride_shared + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_total = b_sum.to(p_total.dtype.element_ty)
    if p_residual is not None:
        b_residual = tl.load(p_residual + i_t * stride_residual + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_total = (b_total.to(tl.float32) + b_residual).to(p_total.dtype.element_ty)
    tl.store(p_total + i_t * N + o_n, b_total, mask=m_n)
    if p_norm is not None:
        b_total = tl.where(m_n, b_total.to(tl.float32), 0.0)  # the norm is that of what is stored
        b_norm = tl.load(p_norm + o_n, mask=m_n, other=0.0).to(tl.float32)
        tl.store(p_out + i_t * N + o_n, (b_total * b_norm).to(p_out.dtype.element_ty), mask=m_n)
        tl.store(p_squares + i_t * tl.num_programs(1) + i_n, tl.sum(b_total * b_total, 0))


class FewRows(ExpertRows):
    """Activated rows [T * K, I]; the down product waits for what is to be summed with it."""

    def __init__(self, h: torch.Tensor, routing: Routing, weights: ExpertWeights, tile: FewTile = TILE) -> None:
        self.h, self.routing, self.weights, self.tile = h, routing, weights, tile

    def materialize(self) -> torch.Tensor:
        """[T, C]."""
        return self._launch(None, None)[1]

    def add_norm(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, may_defer: bool
    ) -> tuple[Activations, torch.Tensor]:
        """Both [T, C]; the norm is deferred where it may be."""
        if may_defer and may_defer_norm(len(norm_weight), residual.dtype):
            return self._launch(residual, (norm_weight, eps))
        total = self._launch(residual, None)[1]
        return rms_norm(total, norm_weight, eps), total

    def _launch(
        self, residual: torch.Tensor | None, norm: tuple[torch.Tensor, float] | None
    ) -> tuple[Activations, torch.Tensor]:
        """(the deferred norm, or the sum where there is none; the sum)."""
        down, shared, device = self.weights.down, self.shared, self.h.device
        assert isinstance(down, torch.Tensor)
        assert all(t is None or t.stride(1) == 1 for t in (shared, residual)), "rows must be contiguous"
        (num_tokens, top), (_, size, depth) = self.routing.ids.shape, down.shape
        tiles = cdiv(size, self.tile.columns)
        total = torch.empty(num_tokens, size, dtype=self.h.dtype, device=device)
        out, squares = None, None
        if norm is not None:
            out, squares = torch.empty_like(total), torch.empty(num_tokens, tiles, dtype=torch.float32, device=device)
        down_sum_kernel[(num_tokens, tiles)](
            self.h, down, self.weights.down_bias, self.routing.ids,
            None if self.weights.weighs_input else self.routing.weights, shared, residual, norm[0] if norm else None,
            out, total, squares, size, depth, shared.stride(0) if shared is not None else 0,
            residual.stride(0) if residual is not None else 0, TOP=top, BTOP=next_power_of_2(top),
            BN=self.tile.columns, BK=self.tile.depth, STAGES=self.tile.num_stages, EVEN=depth % self.tile.depth == 0,
            num_warps=self.tile.num_warps, **early_launch(device),
        )  # fmt: skip
        if out is None or squares is None or norm is None:
            return total, total
        return DeferredNorm(out, squares, norm[1]), total
