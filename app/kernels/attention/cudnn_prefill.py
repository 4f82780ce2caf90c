"""Prefill of one request through torch's cuDNN attention: the new tokens causally, what was cached before without a
mask, and the two merged by their log-sum-exp.

cuDNN prepares a plan for every pair of lengths it meets, tens of milliseconds each. So this serves only lengths on a
coarse grid, of which there are few: whole chunks of a long prompt.
"""

from __future__ import annotations

import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.attention.triton_prefill_descriptors import gather_context

GRID = 512  # tokens; both lengths must be multiples
LEAST_QUERY = 1024


def serves(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    sliding_window: int | None,
    soft_cap: float | None,
) -> bool:
    """One request whose lengths lie on the grid, a head size and a type that cuDNN takes, nothing but a causal mask."""
    num_cached = meta.max_seq_len - meta.max_query_len
    return (
        meta.num_decodes == 0
        and meta.seq_lens.shape[0] == 1
        and not meta.is_static  # there the lengths on the host are only bounds
        and kv_cache.is_contiguous()
        and kv_cache.dtype == query.dtype  # not a quantized cache
        and meta.max_query_len >= LEAST_QUERY
        and meta.max_query_len % GRID == num_cached % GRID == 0
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[2] in (64, 128)
        and sliding_window is None
        and soft_cap is None
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [1, Hq, T, D], key and value [1, Hkv, K, D] -> attention [1, Hq, T, D], log-sum-exp fp32 [1, Hq, T]."""
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out, log_sum.view(out.shape[:3])


def merge(left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Attention over two sets of keys from (attention [..., D], log-sum-exp [...]) over each."""
    share = torch.sigmoid(left[1].float() - right[1].float()).unsqueeze(-1)
    return torch.lerp(right[0].float(), left[0].float(), share).to(left[0].dtype)


def prefill(
    query: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, out: torch.Tensor, *, scale: float
) -> None:
    """Write out [T, Hq, D], where `serves` agrees."""
    num_new, num_cached = meta.max_query_len, meta.max_seq_len - meta.max_query_len
    key, value = gather_context(kv_cache, meta, GRID).unbind(1)  # [1, Hkv, K, D] each
    heads = query.transpose(0, 1).unsqueeze(0)
    own = attend(heads, key[:, :, num_cached:], value[:, :, num_cached:], scale, causal=True)
    attended = own[0]
    if num_cached > 0:
        attended = merge(own, attend(heads, key[:, :, :num_cached], value[:, :, :num_cached], scale, causal=False))
    assert attended.shape[2] == num_new, "the request's tokens are all of the step's"
    out.copy_(attended[0].transpose(0, 1))
