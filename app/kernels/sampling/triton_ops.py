# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Gumbel-argmax in one pass over the logits: random numbers are made in registers and never stored.

The same Philox words as `philox.py`, hence the same draw up to the rounding of the two logarithms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv

_TILE_TOKENS = 1024


@triton.jit
def perturb(b_logit, b_word):
    """logit - log(-log1p(-u)) for the uniform number u of a Philox word; see `reference.gumbel_argmax`."""
    b_u = tl.minimum(b_word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.9999999403953552)
    # log1p from log: the rounding of 1 - u is divided out again.
    b_w = 1.0 - b_u
    b_log1p = tl.where(b_w == 1.0, -b_u, tl.log(b_w) * (b_u / (1.0 - b_w)))
    return b_logit - tl.log(-b_log1p)


@triton.jit(do_not_specialize_on_alignment=["p_keys", "p_positions"])  # views may start anywhere
def gumbel_kernel(
    p_logits,
    p_keys,
    p_positions,
    p_best,
    p_token,
    stride_logits,
    V,
    PURPOSE: tl.constexpr,
    BG: tl.constexpr,
):
    """Grid (N, tiles of 4 * BG tokens): the best perturbed logit of a tile and its token id; ties to the lowest id."""
    i_n, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_seed = tl.load(p_keys + i_n * 2)
    b_choice = tl.load(p_keys + i_n * 2 + 1).to(tl.int32)
    b_position = tl.load(p_positions + i_n).to(tl.int32)
    o_group = i_tile * BG + tl.arange(0, BG)
    zeros = tl.zeros([BG], dtype=tl.int32)
    w0, w1, w2, w3 = tl.philox(b_seed, o_group, zeros + b_position, zeros + b_choice, zeros + PURPOSE)
    o_token = o_group * 4
    p_row = p_logits + i_n * stride_logits + o_token
    b_best = perturb(tl.load(p_row, mask=o_token < V, other=float("-inf")), w0)
    b_token = o_token
    b_score = perturb(tl.load(p_row + 1, mask=o_token + 1 < V, other=float("-inf")), w1)
    b_token = tl.where(b_score > b_best, o_token + 1, b_token)
    b_best = tl.maximum(b_score, b_best)
    b_score = perturb(tl.load(p_row + 2, mask=o_token + 2 < V, other=float("-inf")), w2)
    b_token = tl.where(b_score > b_best, o_token + 2, b_token)
    b_best = tl.maximum(b_score, b_best)
    b_score = perturb(tl.load(p_row + 3, mask=o_token + 3 < V, other=float("-inf")), w3)
    b_token = tl.where(b_score > b_best, o_token + 3, b_token)
    b_best = tl.maximum(b_score, b_best)
    b_max = tl.max(b_best, 0)
    o_out = i_n * tl.num_programs(1) + i_tile
    tl.store(p_best + o_out, b_max)
    tl.store(p_token + o_out, tl.min(tl.where(b_best == b_max, b_token, V), 0).to(tl.int64))


def gumbel_argmax(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, *, purpose: int = 0
) -> torch.Tensor:
    """The same as `reference.gumbel_argmax`: fp32 [N, V], int64 [N, 2], int64 [N] -> int64 [N]."""
    num_rows, vocab_size = logits.shape
    num_tiles = cdiv(vocab_size, _TILE_TOKENS)
    best = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1, "logits rows must be contiguous"
    if num_rows > 0:
        gumbel_kernel[(num_rows, num_tiles)](
            logits,
            keys.contiguous(),
            positions.contiguous(),
            best,
            tokens,
            logits.stride(0),
            vocab_size,
            PURPOSE=purpose,
            BG=_TILE_TOKENS // 4,
            num_warps=4,
        )
    return tokens.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)
