"""The flex attention backend (`OPS`): torch's FlexAttention (He et al., 2024) over the blocks of the step's requests.

A layer's blocks are gathered side by side, request after request; a block mask of the step, made once, says which of
them a tile of tokens may see at all, and mask and score functions decide the rest. On a GPU it is compiled, and one
call serves the step. On a CPU it runs as plain operators, which hold all scores at once, so requests go one by one.
Scores are changed by a function, so that a new kind of attention is tried here before it has a kernel.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from app.kernels.attention import FEATURES, KV_FP8, AttentionMetadata, AttentionOps, HeadBias
from app.kernels.attention.reference import write_kv

_TILE = 128  # tokens, and positions, of a tile of the block mask
_Score = Callable[..., torch.Tensor]


@dataclass(slots=True)
class FlexPart:
    """Tokens [first, end) of the step and the blocks of their requests, which lie side by side: K positions."""

    first: int
    end: int
    blocks: torch.Tensor  # int64 [K / S]
    query_request: torch.Tensor  # int64 [end - first]
    query_position: torch.Tensor  # int64, the same
    key_request: torch.Tensor  # int64 [K]
    key_position: torch.Tensor  # int64 [K]
    unseen: torch.Tensor  # bool [K], past a request's end: may hold anything
    masks: dict[int | None, Any] = field(default_factory=dict)  # block masks, by sliding window

    def mask(self, sliding_window: int | None) -> Any:
        """The block mask of layers with this window."""
        if sliding_window not in self.masks:
            self.masks[sliding_window] = self._make_mask(sliding_window)
        return self.masks[sliding_window]

    def sees(self, q: torch.Tensor, k: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
        """Tells whether tokens q see positions k, which are both indices."""
        distance = self.query_position[q] - self.key_position[k]
        seen = (self.query_request[q] == self.key_request[k]) & (distance >= 0)
        return seen if sliding_window is None else seen & (distance < sliding_window)

    def _make_mask(self, sliding_window: int | None) -> Any:
        """A tile of keys is visited by the tiles of tokens that have a request in common with it."""
        from torch.nn.attention.flex_attention import BlockMask

        (q_low, q_high), (k_low, k_high) = (_ranges(ids) for ids in (self.query_request, self.key_request))
        meets = (q_low[:, None] <= k_high) & (k_low <= q_high[:, None])
        counts = meets.sum(1, dtype=torch.int32)
        order = meets.int().argsort(dim=1, descending=True, stable=True).int()
        return BlockMask.from_kv_blocks(
            counts[None, None],
            order[None, None],
            BLOCK_SIZE=_TILE,
            mask_mod=lambda b, h, q, k: self.sees(q, k, sliding_window),
            seq_lengths=(len(self.query_request), len(self.key_request)),
            compute_q_blocks=False,
        )


@dataclass(slots=True)
class FlexPlan:
    """The plan of a step, which its layers share."""

    parts: list[FlexPart]


def prepare(meta: AttentionMetadata, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Set meta.plan; reads the lengths, and so waits for the device."""
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    starts, lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    groups = [range(len(lens))] if meta.seq_lens.is_cuda else [range(r, r + 1) for r in range(len(lens))]
    meta.plan = FlexPlan([_part(group, starts, lens, meta.block_table, block_size) for group in groups if group])


def _part(requests: range, starts: list[int], lens: list[int], table: torch.Tensor, block_size: int) -> FlexPart:
    device = table.device
    blocks, key_position, query_position = [], [], []
    for r in requests:
        num_blocks = -(-lens[r] // block_size)
        blocks.append(table[r, :num_blocks].long())
        key_position.append(torch.arange(num_blocks * block_size, device=device))
        query_position.append(torch.arange(lens[r] - (starts[r + 1] - starts[r]), lens[r], device=device))
    ids = torch.tensor(list(requests), device=device)
    key_request = ids.repeat_interleave(torch.tensor([len(x) for x in key_position], device=device))
    query_request = ids.repeat_interleave(torch.tensor([len(x) for x in query_position], device=device))
    positions = torch.cat(key_position)
    unseen = positions >= torch.tensor(lens, device=device)[key_request]
    return FlexPart(
        starts[requests.start],
        starts[requests.stop],
        torch.cat(blocks),
        query_request,
        torch.cat(query_position),
        key_request,
        positions,
        unseen,
    )


def _ranges(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last of the ascending `ids` in each tile."""
    first = torch.arange(0, len(ids), _TILE, device=ids.device)
    return ids[first], ids[(first + _TILE - 1).clamp_(max=len(ids) - 1)]


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
    assert isinstance(plan, FlexPlan), "call prepare(meta, ...) before the first layer"
    out = torch.empty_like(query)
    for part in plan.parts:
        rows = slice(part.first, part.end)
        key, value = _gather(kv_cache, part, kv_scales, query.dtype)
        attended, log_sum = _attend(query.device.type)(
            query[rows].transpose(0, 1)[None],
            key,
            value,
            score_mod=_score(part, soft_cap, bias or HeadBias()),
            block_mask=part.mask(sliding_window),
            scale=scale,
            enable_gqa=True,
        )
        if bias is not None and bias.sinks is not None:  # one more key, whose value is 0
            attended = attended * torch.sigmoid(log_sum - bias.sinks[:, None])[..., None].to(query.dtype)
        out[rows] = attended[0].transpose(0, 1)
    return out


def _score(part: FlexPart, soft_cap: float | None, bias: HeadBias) -> _Score | None:
    """Returns how scores are changed; None: not at all."""
    slopes, by_distance = bias.slopes, bias.by_distance
    if soft_cap is None and slopes is None and by_distance is None:
        return None
    # A number would be an input of the compiled graph, which FlexAttention's lowering cannot take.
    cap = None if soft_cap is None else torch.full((), soft_cap, device=part.blocks.device)

    def changed(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score + slopes[h] * (part.key_position[k] - part.query_position[q])
        if by_distance is not None:
            distance = part.query_position[q] - part.key_position[k]
            score = score + by_distance[h, distance.clamp(0, by_distance.shape[1] - 1)]
        return score

    return changed


def _gather(
    kv_cache: torch.Tensor, part: FlexPart, kv_scales: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the part, [1, Hkv, K, D] each, 0 where nothing was written."""
    stored = kv_cache.view(torch.uint8) if kv_cache.dtype == KV_FP8 else kv_cache
    context = stored.index_select(0, part.blocks).view(kv_cache.dtype).to(dtype)  # [K / S, 2, Hkv, S, D]
    context = context.permute(1, 2, 0, 3, 4).flatten(2, 3)
    context = context.masked_fill(part.unseen[:, None], 0.0)
    if kv_scales is not None:
        context = context * kv_scales[:, :, None, None].to(dtype)
    key, value = context.unbind(0)
    return key[None], value[None]


@functools.cache
def _attend(device_type: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """(attended [1, Hq, n, D], log of the sums of exp(score) [1, Hq, n]); imported late: it brings torch's compiler."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    flex: Any = flex_attention

    def attend(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, more = flex(*tensors, return_aux=AuxRequest(lse=True), **options)
        return out, more.lse

    if device_type == "cuda":
        return torch.compile(attend, dynamic=True)

    def plainly(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with warnings.catch_warnings():  # that it is not compiled
            warnings.simplefilter("ignore")
            return attend(*tensors, **options)

    return plainly


OPS = AttentionOps(
    prepare=prepare,
    write_kv=write_kv,
    paged_attention=paged_attention,
    device_types=("cpu", "cuda"),
    features=frozenset(FEATURES) - {"kv_int8"},
    name="flex",
)
