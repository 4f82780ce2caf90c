"""Batches with random blocks for attention tests: every slot that no request owns holds NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.kernels.attention import AttentionMetadata, HeadBias


@dataclass
class Batch:
    """One step over a cache, and the contiguous keys and values that went into it."""

    query: torch.Tensor  # [T, Hq, D]
    kv_cache: torch.Tensor  # [B, 2, Hkv, S, D]
    meta: AttentionMetadata
    keys: list[torch.Tensor]  # per request [seq_len, Hkv, D]
    values: list[torch.Tensor]


def make_batch(
    lens: list[tuple[int, int]],  # (query tokens, seq_len) of each request; decodes first
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    prefix_of: dict[int, tuple[int, int]] | None = None,
) -> Batch:
    """`prefix_of[r] = (other, n)`: r has its first n tokens, whole blocks, from an earlier request."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    seq_lens = [seq_len for _, seq_len in lens]
    blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    table = order[:1].expand(len(lens), max(blocks_of) + 2).clone()  # padding: a block of NaN
    kv_cache = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    keys, values, slots, used = [], [], [], 1
    for request, (num_query, seq_len) in enumerate(lens):
        mine = order[used : used + blocks_of[request]]
        used += blocks_of[request]
        table[request, : len(mine)] = mine
        keys.append(randn(seq_len, num_kv_heads, head_dim))
        values.append(randn(seq_len, num_kv_heads, head_dim))
        other, shared = (prefix_of or {}).get(request, (0, 0))
        assert shared % block_size == 0
        table[request, : shared // block_size] = table[other, : shared // block_size]
        keys[-1][:shared], values[-1][:shared] = keys[other][:shared], values[other][:shared]
        mine = table[request, : len(mine)]
        positions = torch.arange(seq_len)
        slot = mine.long()[positions // block_size] * block_size + positions % block_size
        for index in range(shared, seq_len):  # one by one: the judge's own way of writing
            block, offset = divmod(int(slot[index]), block_size)
            kv_cache[block, 0, :, offset] = keys[-1][index]
            kv_cache[block, 1, :, offset] = values[-1][index]
        slots.append(slot[seq_len - num_query :])
    num_queries = [num_query for num_query, _ in lens]
    num_decodes = next((i for i, count in enumerate(num_queries) if count != 1), len(lens))
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, *num_queries]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.cat(slots).to(device),
        max_query_len=max(num_queries),
        max_seq_len=max(seq_lens),
        num_decodes=num_decodes,
    )
    query = randn(sum(num_queries), num_heads, head_dim).to(device)
    return Batch(query, kv_cache.to(device), meta, [k.to(device) for k in keys], [v.to(device) for v in values])


def contiguous_attention(
    batch: Batch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    bias: HeadBias | None = None,
) -> torch.Tensor:
    """The outside judge: float64 over the contiguous keys and values, without a cache."""
    outputs = []
    starts = batch.meta.query_start_loc.tolist()
    for request, (key, value) in enumerate(zip(batch.keys, batch.values, strict=True)):
        query = batch.query[starts[request] : starts[request + 1]].double()
        group = query.shape[1] // key.shape[1]
        key, value = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))  # [Hq, K, D]
        scores = query.transpose(0, 1) @ key.transpose(1, 2) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        last = torch.arange(key.shape[1] - query.shape[0], key.shape[1], device=key.device)[:, None]
        position = torch.arange(key.shape[1], device=key.device)
        if bias is not None and bias.slopes is not None:
            scores = scores - bias.slopes.double()[:, None, None] * (last - position)
        if bias is not None and bias.by_distance is not None:
            table = bias.by_distance.double()
            scores = scores + table[:, (last - position).clamp(min=0, max=table.shape[1] - 1)]
        visible = position <= last
        if sliding_window is not None:
            visible &= position > last - sliding_window
        weights = scores.masked_fill(~visible, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True)
        if bias is not None and bias.sinks is not None:
            total = total + bias.sinks.double().exp()[:, None, None]
        probs = weights / total
        outputs.append((probs @ value).transpose(0, 1))
    return torch.cat(outputs)
