# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton attention backend (`OPS`): decodes go to the split-KV kernel, all other requests to a prefill kernel.

The two write disjoint rows of the output. A static step that verifies drafts is one of decodes with several queries
each. Of few rows it takes each token for a decode by itself: the split-KV kernel reads a context several times then,
but in many programs at once.

Nothing here waits for the device: grids come from host numbers of the metadata, lengths and tables are read by the
kernels. Of those for prefills the one in Gluon is faster where it serves (`python -m benchmarks.kernels` times both).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from app.errors import ConfigError
from app.kernels.attention import (
    FEATURES,
    AttentionMetadata,
    AttentionOps,
    AttentionOptions,
    HeadBias,
    HeadNorm,
)
from app.kernels.attention.triton_decode import DecodeScratch, decode, make_scratch
from app.kernels.attention.triton_encoded import encoded_kernel_for
from app.kernels.attention.triton_quantize import quantize
from app.kernels.attention.triton_rotated import RotatedScratch, rotated_decode, rotated_scratch, serves_rotated
from app.kernels.kernel_table import HOPPER, Candidate, Kernel, KernelTable, chosen
from app.kernels.launch import next_power_of_2
from app.kernels.quick_launch import quick_launch

_MAX_HEAD_DIM = 512
_FEW_TOKENS = 8  # of a step
_MOST_ROWS = 32  # queries and heads of a request that a program of the split-KV kernel holds for a KV head


Prefill = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor, AttentionOptions], None]
# It serves (query, kv_cache, options).
PrefillKernel = Kernel[[torch.Tensor, torch.Tensor, AttentionOptions], bool, Prefill]
PREFILL: KernelTable[PrefillKernel] = KernelTable(
    "prefills of paged attention",
    Candidate("app.kernels.attention.gluon_prefill:KERNEL", HOPPER),
    Candidate("app.kernels.attention.triton_prefill:KERNEL"),
)


@dataclass(slots=True)
class TritonPlan:
    """The plan of a step, which its layers share."""

    scratch: DecodeScratch
    prefills: tuple[PrefillKernel, ...]
    decodes: AttentionMetadata | None = None  # the step's tokens as decodes
    each: int = 1  # queries of a decode
    rotated: RotatedScratch | None = None  # of decodes that do all at once; made by the first layer with them


def check_sizes(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """ConfigError where the kernels cannot serve the shape."""
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    if block_size < 16 or block_size & (block_size - 1):
        raise ConfigError(f"block_size={block_size}: the triton attention backend needs a power of two of at least 16")
    if head_dim > _MAX_HEAD_DIM:
        raise ConfigError(
            f"head_dim={head_dim}: attention_backend=triton holds at most {_MAX_HEAD_DIM}; use attention_backend=torch",
            param="attention_backend",
        )


def prepare(meta: AttentionMetadata, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Set meta.plan. ConfigError where the kernels cannot serve the shape."""
    check_sizes(num_heads, num_kv_heads, head_dim, block_size)
    decodes, each = as_decodes(meta), 1
    if decodes is None and meta.max_query_len * (num_heads // num_kv_heads) <= _MOST_ROWS and brings_alike(meta):
        decodes, each = replace(meta, num_decodes=meta.seq_lens.shape[0]), meta.max_query_len
    scratch = make_scratch(decodes or meta, num_heads * each, num_kv_heads, head_dim)
    meta.plan = TritonPlan(scratch, PREFILL.all_on(meta.seq_lens.device), decodes, each)


def brings_alike(meta: AttentionMetadata) -> bool:
    """True of a static step whose rows bring the same number of tokens, more than one."""
    num_tokens, each = meta.slot_mapping.shape[0], meta.max_query_len
    return meta.is_static and each > 1 and num_tokens == each * meta.seq_lens.shape[0]


def as_decodes(meta: AttentionMetadata) -> AttentionMetadata | None:
    """A static step whose rows bring equally many tokens, of which there are few, with a request for each token; None:
    it is another one."""
    num_tokens, each = meta.slot_mapping.shape[0], meta.max_query_len
    if not 0 < num_tokens <= _FEW_TOKENS or not brings_alike(meta):
        return None
    behind = torch.arange(1 - each, 1, dtype=torch.int32, device=meta.seq_lens.device)
    return replace(
        meta,
        query_start_loc=torch.arange(num_tokens + 1, dtype=torch.int32, device=meta.seq_lens.device),
        seq_lens=(meta.seq_lens[:, None] + behind).flatten(),
        block_table=meta.block_table[:, None].expand(-1, each, -1).flatten(0, 1),
        max_query_len=1,
        num_decodes=num_tokens,
    )


@quick_launch
@triton.jit
def write_kv_kernel(
    p_key,
    p_value,
    p_cache,
    p_scales,
    p_slots,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    stride_value,
    stride_head,
    stride_slot,
    HKV: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (T,): one token's keys and values of all heads."""
    i_t = tl.program_id(0).to(tl.int64)
    b_slot = tl.load(p_slots + i_t)
    if b_slot < 0:
        return
    o_h = tl.arange(0, BH)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    m = (o_h < HKV) & (o_d < D)
    b_k = tl.load(p_key + i_t * stride_key_token + o_h * stride_key_head + o_d, mask=m)
    b_v = tl.load(p_value + i_t * stride_value_token + o_h * stride_value_head + o_d, mask=m)
    p_slot = p_cache + b_slot // S * stride_block + b_slot % S * stride_slot + o_h * stride_head + o_d
    if p_scales is not None:
        p_scale = p_scales + o_h
        b_k = quantize(b_k, tl.load(p_scale, mask=o_h < HKV, other=1.0), p_cache.dtype.element_ty)
        b_v = quantize(b_v, tl.load(p_scale + HKV, mask=o_h < HKV, other=1.0), p_cache.dtype.element_ty)
    tl.store(p_slot, b_k, mask=m)
    tl.store(p_slot + stride_value, b_v, mask=m)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Store key and value [T, Hkv, D] into kv_cache [B, 2, Hkv, S, D] at slot_mapping int64 [T]; -1 is not stored."""
    num_tokens, num_kv_heads, head_dim = key.shape
    assert key.stride(2) == value.stride(2) == kv_cache.stride(4) == 1, "head vectors must be contiguous"
    if num_tokens == 0:
        return
    write_kv_kernel[(num_tokens,)](
        key,
        value,
        kv_cache,
        kv_scales,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        *kv_cache.stride()[:4],
        HKV=num_kv_heads,
        D=head_dim,
        S=kv_cache.shape[3],
        BH=next_power_of_2(num_kv_heads),
        BD=next_power_of_2(head_dim),
        num_warps=4,
    )


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
    bias: HeadBias | None = None,
) -> torch.Tensor:
    """Attention of query [T, Hq, D] over kv_cache [B, 2, Hkv, S, D]; arguments as in `naive_paged_attention`."""
    plan = meta.plan
    assert isinstance(plan, TritonPlan), "call prepare(meta, ...) before the first layer"
    assert query.stride(2) == kv_cache.stride(4) == 1, "head vectors must be contiguous"
    assert (kv_scales is None) == (kv_cache.dtype == query.dtype), "a quantized cache comes with its scales"
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    options = AttentionOptions(scale, sliding_window, soft_cap, kv_scales, bias)
    meta = plan.decodes or meta
    if meta.num_decodes > 0:
        decode(query, kv_cache, meta, plan.scratch, out, options, each=plan.each)
    if meta.num_decodes < meta.seq_lens.shape[0]:
        prefill, _ = chosen(plan.prefills, query, kv_cache, options)
        prefill(query, kv_cache, meta, out, options)
    return out


def at_once(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor | None:
    """See AttendAtOnce: static steps of a few decodes with a token each."""
    plan = meta.plan
    assert isinstance(plan, TritonPlan), "call prepare(meta, ...) before the first layer"
    if (
        plan.decodes is not None
        or plan.scratch.shared is not None
        or not serves_rotated(heads, kv_cache, meta, options)
    ):
        return None
    if plan.rotated is None:
        num_kv_heads = kv_cache.shape[2]
        plan.rotated = rotated_scratch(meta, heads.shape[1] - 2 * num_kv_heads, num_kv_heads, heads.shape[2])
    return rotated_decode(heads, cos, sin, norm, kv_cache, meta, plan.rotated, options)


OPS = AttentionOps(
    prepare=prepare,
    write_kv=write_kv,
    paged_attention=paged_attention,
    shares_prefixes=True,
    is_capturable=True,
    features=frozenset(FEATURES) - {"kv_int8"},
    latent="app.kernels.mla.triton_ops:OPS",
    encoded=encoded_kernel_for,
    at_once=at_once,
    name="triton",
)
