# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Token masks in one pass: words are read once and spread over 32 tokens in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv
from app.kernels.quick_launch import quick_launch

_TILE_TOKENS = 1024


@quick_launch
@triton.jit
def token_masks_kernel(p_logits, p_indices, p_words, stride_logits, V, W, BV: tl.constexpr):
    """Grid (G, tiles of BV tokens): -inf into the logits whose bit is 0; past the last word nothing is allowed."""
    i_g, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_n = tl.load(p_indices + i_g).to(tl.int64)
    o_token = i_tile * BV + tl.arange(0, BV)
    o_word = o_token // 32
    b_word = tl.load(p_words + i_g * W + o_word, mask=o_word < W, other=0)
    m_forbidden = ((b_word >> (o_token % 32)) & 1) == 0
    p_row = p_logits + i_n * stride_logits + o_token
    b_none = tl.full([BV], float("-inf"), tl.float32)
    tl.store(p_row, b_none, mask=m_forbidden & (o_token < V))


def apply_token_masks(logits: torch.Tensor, indices: torch.Tensor, words: torch.Tensor) -> None:
    """The same as `reference.apply_token_masks`: fp32 [N, V] in place, int32 [G], int32 [G, W]."""
    num_masks, vocab_size = len(indices), logits.shape[1]
    assert logits.stride(1) == 1, "logits rows must be contiguous"
    if num_masks > 0:
        grid = (num_masks, cdiv(vocab_size, _TILE_TOKENS))
        words = words.contiguous()
        token_masks_kernel[grid](
            logits, indices, words, logits.stride(0), vocab_size, words.shape[1], BV=_TILE_TOKENS, num_warps=4
        )
