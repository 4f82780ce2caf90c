"""Paged attention in plain PyTorch: the truth (`naive_paged_attention`) and the CPU path (`OPS`).

In fp32, decodes read the cache in place (torch_in_place.py). Otherwise the CPU path copies a head's share of whole
blocks, never single tokens, and calls scaled_dot_product_attention: for decodes of similar length together, as many as
the caches of a CPU hold, with a KV head's query heads as rows; for other requests one by one in query tiles, unless
they have few queries (torch_plan.py). A request's result does not depend on its neighbours beyond the rounding of a
differently padded sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.kernels.attention import (
    FEATURES,
    KV_FP8,
    KV_FP8_MAX,
    KV_INT8,
    AttentionMetadata,
    AttentionOps,
    AttentionOptions,
    HeadBias,
    int8_cache,
    torch_in_place,
)
from app.kernels.attention.torch_biased import attend_biased
from app.kernels.attention.torch_in_place import InPlaceGroup
from app.kernels.attention.torch_plan import DecodeGroup, QueryTile, TorchPlan, plan_step
from app.kernels.float8 import widened

_FEW_TOKENS = 4  # so many are written one by one


def quantize(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x [T, Hkv, D] -> KV_FP8 of x / scales [Hkv], clamped; NaN stays NaN."""
    return (x.float() / scales[:, None]).clamp(-KV_FP8_MAX, KV_FP8_MAX).to(KV_FP8)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Store key and value [T, Hkv, D] into kv_cache [B, 2, Hkv, S, D] at slot_mapping int64 [T]; -1 is not stored."""
    if slot_mapping.numel() == 0:
        return
    if kv_scales is not None:
        key, value = (movable(quantize(x, scales)) for x, scales in zip((key, value), kv_scales, strict=True))
        kv_cache = movable(kv_cache)
    elif kv_cache.dtype == KV_INT8:
        key, value = int8_cache.pack(key), int8_cache.pack(value)
    if slot_mapping.shape[0] <= _FEW_TOKENS and slot_mapping.device.type == "cpu":
        _write_one_by_one(key, value, kv_cache, slot_mapping.tolist())
        return
    if int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    block_size = kv_cache.shape[3]
    blocks = slot_mapping // block_size
    offsets = slot_mapping - blocks * block_size
    kv_cache[blocks, 0, :, offsets] = key
    kv_cache[blocks, 1, :, offsets] = value


def _write_one_by_one(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: list[int]) -> None:
    """Two copies for each token, where indices for all of them cost twenty small operations."""
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, kv_cache.shape[3])
            kv_cache[block, 0, :, offset] = key[token]
            kv_cache[block, 1, :, offset] = value[token]


def readable(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stored vectors as numbers of `dtype`; fp8 without its scales."""
    if stored.dtype == KV_INT8:
        return int8_cache.unpack(stored, dtype)
    return widened(stored, dtype) if stored.dtype == KV_FP8 else stored.to(dtype)


def movable(x: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: PyTorch lacks indexing of fp8 on some devices."""
    return x.view(torch.uint8) if x.dtype == KV_FP8 else x


def naive_paged_attention(
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
    """Attention of query [T, Hq, D] over kv_cache [B, 2, Hkv, S, D], request by request in fp32: the judge.

    `sliding_window` = w lets a token see itself and the w - 1 before it; `soft_cap` = c bounds scores to (-c, c).
    """
    bias = bias or HeadBias()
    out = torch.empty_like(query)
    starts = meta.query_start_loc.tolist()
    group = query.shape[1] // kv_cache.shape[2]
    for request, seq_len in enumerate(meta.seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        positions = torch.arange(seq_len, device=query.device)
        blocks = meta.block_table[request].long()[positions // kv_cache.shape[3]]
        stored = movable(kv_cache)[blocks, :, :, positions % kv_cache.shape[3]].view(kv_cache.dtype)
        context = readable(stored, torch.float32)  # [seq_len, 2, Hkv, D]
        if kv_scales is not None:
            context = context * kv_scales[:, :, None]
        key, value = context.repeat_interleave(group, dim=2).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", query[rows].float() * scale, key)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        query_positions = positions[seq_len - (rows.stop - rows.start) :]
        if bias.slopes is not None:
            scores += bias.slopes[:, None, None] * (positions[None, :] - query_positions[:, None])
        hidden = positions[None, :] > query_positions[:, None]
        if bias.by_distance is not None:
            distances = (query_positions[:, None] - positions[None, :]).clamp(0, bias.by_distance.shape[1] - 1)
            scores += bias.by_distance[:, distances]
        if sliding_window is not None:
            hidden |= positions[None, :] <= query_positions[:, None] - sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if bias.sinks is not None:
            sinks = bias.sinks[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        probs = scores.softmax(-1)[..., :seq_len]
        out[rows] = torch.einsum("hqk,khd->qhd", probs, value).to(query.dtype)
    return out


def prepare(meta: AttentionMetadata, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Set meta.plan: what every layer of the step shares (host copies of the lengths, gather indices, masks)."""
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    meta.plan = plan_step(
        meta, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size
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
    """The CPU path: same arguments and result as `naive_paged_attention`, in the dtype of `query`."""
    plan = meta.plan
    assert isinstance(plan, TorchPlan), "call prepare(meta, ...) before the first layer"
    assert kv_cache.shape[2] == plan.num_kv_heads, "the plan was made for another number of KV heads"
    assert (kv_scales is None) == (kv_cache.dtype != KV_FP8), "a cache in fp8 comes with its scales"
    if bias is not None:
        options = AttentionOptions(scale, sliding_window, soft_cap, kv_scales, bias)
        return attend_biased(naive_paged_attention, query, kv_cache, meta, options)
    of_head = None
    if kv_scales is not None:
        of_head = kv_scales.to(query.dtype).repeat_interleave(query.shape[1] // kv_cache.shape[2], dim=1).unsqueeze(2)
        query = query * of_head[0]
    out = _attend_step(query, kv_cache, plan, scale, sliding_window, soft_cap)
    return out if of_head is None else out.mul_(of_head[1])


def _attend_step(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: TorchPlan,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    in_place = bool(plan.lone.rows) and torch_in_place.serves(query, kv_cache)
    groups = [] if in_place else plan.decode_groups(sliding_window, query.dtype)
    if groups and groups[0].rows is None:
        return _decode(query, kv_cache, groups[0], plan, scale, soft_cap)
    out = torch.empty_like(query)
    if in_place:
        for group in plan.in_place_groups(sliding_window, kv_cache, query.shape[1]):
            _decode_in_place(query, kv_cache, group, plan, out, scale, soft_cap)
    for part in groups:
        assert part.rows is not None, "a group of the whole step stands alone"
        rows = query.index_select(0, part.rows)
        out.index_copy_(0, part.rows, _decode(rows, kv_cache, part, plan, scale, soft_cap))
    for tile in plan.query_tiles(sliding_window, query.dtype):
        out[tile.rows] = _attend_tile(query[tile.rows], kv_cache, tile, plan, scale, soft_cap)
    return out


def _decode_in_place(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    group: InPlaceGroup,
    plan: TorchPlan,
    out: torch.Tensor,
    scale: float,
    soft_cap: float | None,
) -> None:
    if group.rows is None:
        rows = slice(0, len(plan.lone.rows))
        out[rows] = torch_in_place.attend(query[rows], kv_cache, group, scale, soft_cap)
    else:
        part = query.index_select(0, group.rows)
        out.index_copy_(0, group.rows, torch_in_place.attend(part, kv_cache, group, scale, soft_cap))


def _gather(kv_cache: torch.Tensor, pieces: torch.Tensor, plan: TorchPlan, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values of n requests, [2, n, Hkv, length, D] of `dtype`; the next call may overwrite them.

    A cache that is not contiguous is copied as a whole for it.
    """
    gathered = plan.scratch(kv_cache, pieces.numel())
    table = movable(kv_cache).flatten(0, 2).flatten(1)
    torch.index_select(table, 0, pieces.flatten(), out=movable(gathered))
    return readable(gathered.view(*pieces.shape[:3], -1, kv_cache.shape[4]), dtype)


def _decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    group: DecodeGroup,
    plan: TorchPlan,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attention of a group's queries [n, Hq, D] -> [n, Hq, D]."""
    context = _gather(kv_cache, group.pieces, plan, query.dtype)[:, :, :, group.span]
    for edge, hidden in group.edges:
        context[:, :, :, edge].masked_fill_(hidden, 0.0)  # a slot nobody wrote may hold NaN, which no mask outweighs
    heads = query.view(context.shape[1], context.shape[2], -1, context.shape[4])
    return _attend(heads, context, group.mask, scale, soft_cap).reshape(query.shape)


def _attend_tile(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    tile: QueryTile,
    plan: TorchPlan,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attention of one request's query tile [n, Hq, D] over the positions that any of its tokens sees."""
    context = _gather(kv_cache, tile.pieces, plan, query.dtype)[:, :, :, tile.span]
    return _attend(query.transpose(0, 1)[None], context, tile.mask, scale, soft_cap)[0].transpose(0, 1)


def _attend(
    query: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None, scale: float, soft_cap: float | None
) -> torch.Tensor:
    """query [n, H, T, D] over context [2, n, Hkv, length, D]; `mask` is added to the scores [n, H, T, length]."""
    key, value = context.unbind(0)
    group = query.shape[1] // key.shape[1]
    if soft_cap is None:
        # Not bmm in 16 bits: the library would plan it anew whenever a context has grown.
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=group > 1)
    # Query heads of a KV head as rows: [n, Hkv, group * T, D].
    rows = query.float().reshape(*key.shape[:2], -1, query.shape[3])
    scores = torch.tanh(rows @ key.float().transpose(2, 3) * (scale / soft_cap)).mul_(soft_cap)
    if mask is not None:
        scores.view(*query.shape[:3], -1).add_(mask)
    return (torch.softmax(scores, dim=-1) @ value.float()).view_as(query).to(query.dtype)


OPS = AttentionOps(
    prepare=prepare,
    write_kv=write_kv,
    paged_attention=paged_attention,
    device_types=("cpu", "cuda"),
    features=frozenset(FEATURES),
    latent="app.kernels.mla.reference:OPS",
    name="torch",
)
