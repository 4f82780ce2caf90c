"""Latent attention in Triton (`OPS`), on a Hopper GPU mostly in Gluon.

Nothing here waits for the device: grids come from host numbers of the metadata, lengths and tables are read by the
kernels. What one layer finds out of a step (who does what, workspaces) is kept for the others in its plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from app.errors import ConfigError
from app.kernels.attention import AttentionMetadata
from app.kernels.kernel_table import HOPPER, Candidate, Kernel, KernelTable, chosen
from app.kernels.launch import multiprocessors
from app.kernels.mla import MLAOps, triton_attend, triton_expanded, triton_heads
from app.kernels.mla.triton_expanded import Carried, Chunk
from app.kernels.mla.triton_schedule import AttendTile, Shares, deal

_MAX_LATENT = 1024


class Attend(Protocol):
    """Launches a kernel of `attend`."""

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        shares: Shares,
        out: torch.Tensor,
        *,
        scale: float,
        kv_scale: torch.Tensor | None,
    ) -> None:
        """The rows of out [T, H, R], but for those of jobs that are cut; `shares` are of the kernel's tiles."""


# It serves (the queries' type, cache, latent_size, (token, head) rows of the longest query) by such a tile.
AttendKernel = Kernel[[torch.dtype, torch.Tensor, int, int], AttendTile, Attend]
ATTEND: KernelTable[AttendKernel] = KernelTable(
    "latent attention",
    Candidate("app.kernels.mla.gluon_few_fp8:KERNEL", HOPPER),
    Candidate("app.kernels.mla.gluon_few_rows:KERNEL", HOPPER),
    Candidate("app.kernels.mla.gluon_attend:KERNEL", HOPPER),
    Candidate("app.kernels.mla.triton_attend:KERNEL"),
)
# (query, meta, offsets, chunk, carried, out, scale); it serves (query, up, value_dim)
AttendChunk = Callable[
    [torch.Tensor, AttentionMetadata, torch.Tensor, Chunk, Carried, torch.Tensor, float],
    None,
]
ChunkKernel = Kernel[[torch.Tensor, torch.Tensor, int], bool, AttendChunk]
ATTEND_CHUNK: KernelTable[ChunkKernel] = KernelTable(
    "attention to expanded latents",
    Candidate("app.kernels.mla.gluon_expanded:KERNEL", HOPPER),
    Candidate("app.kernels.mla.triton_expanded:KERNEL"),
)


@dataclass(slots=True, frozen=True)
class Contexts:
    """The contexts of a step in a row."""

    total: int  # positions, at most
    offsets: torch.Tensor  # int32 [R + 1], where each begins, and the end
    carried: Carried
    latents: torch.Tensor  # [W, R + Dr], a chunk of them


@dataclass(slots=True)
class TritonLatentPlan:
    """Holds what the layers of a step share; shares and contexts are made by the first that needs them."""

    attend: tuple[AttendKernel, ...]
    attend_chunk: tuple[ChunkKernel, ...]
    shares: Shares | None = None
    contexts: Contexts | None = None


def prepare(meta: AttentionMetadata, *, num_heads: int, block_size: int) -> None:
    """Set meta.plan. ConfigError where the kernels cannot serve the blocks."""
    if block_size < 16 or block_size & (block_size - 1):
        raise ConfigError(f"block_size={block_size}: the triton attention backend needs a power of two of at least 16")
    device = meta.seq_lens.device
    meta.plan = TritonLatentPlan(ATTEND.all_on(device), ATTEND_CHUNK.all_on(device))


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    latent_size: int,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `reference.attend`: query [T, H, R + Dr] -> [T, H, R]."""
    plan = _plan(meta)
    assert query.stride(2) == cache.stride(2) == 1, "vectors must be contiguous"
    assert (kv_scale is None) == (cache.dtype == query.dtype), "a quantized cache comes with its scale"
    if latent_size > _MAX_LATENT:
        raise ConfigError(f"kv_lora_rank={latent_size}: the triton attention backend holds at most {_MAX_LATENT}")
    out = query.new_empty(*query.shape[:2], latent_size)
    if query.shape[0] == 0:
        return out
    launch, tile = chosen(plan.attend, query.dtype, cache, latent_size, meta.max_query_len * query.shape[1])
    shares = plan.shares = plan.shares or _deal(out, meta, tile)
    launch(query, cache, meta, shares, out, scale=scale, kv_scale=kv_scale)
    triton_attend.merge(shares, out)
    return out


def _deal(out: torch.Tensor, meta: AttentionMetadata, tile: AttendTile) -> Shares:
    num_tokens, num_heads, latent_size = out.shape
    programs = tile.programs * multiprocessors(out.device)
    return deal(meta, (num_tokens, num_heads, latent_size), tile, programs, is_whole=out.dtype == torch.float32)


def attend_expanded(
    query: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    up: torch.Tensor,
    workspace: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `reference.attend_expanded`: query [T, H, Dn + Dr] -> [T, H, Dv]."""
    assert query.stride(2) == cache.stride(2) == 1, "vectors must be contiguous"
    assert (kv_scale is None) == (cache.dtype == query.dtype), "a quantized cache comes with its scale"
    plan, size = _plan(meta), up.shape[2]
    out = query.new_empty(*query.shape[:2], value_dim)
    contexts = plan.contexts = plan.contexts or _lay_out(query, cache, meta, value_dim, len(workspace))
    attend_chunk, _ = chosen(plan.attend_chunk, query, up, value_dim)
    for first in range(0, contexts.total, len(workspace)):
        rows = min(len(workspace), contexts.total - first)
        chunk = Chunk(first, rows, contexts.latents[:rows], workspace[:rows])
        triton_expanded.gather(cache, meta, contexts.offsets, kv_scale, chunk)
        torch.mm(chunk.latents[:, :size], up.flatten(0, 1).t(), out=chunk.expanded.flatten(1))
        attend_chunk(query, meta, contexts.offsets, chunk, contexts.carried, out, scale)
    return out


def _lay_out(query: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, value_dim: int, chunk: int) -> Contexts:
    """One context behind the other; in fp32 each from a chunk's beginning on, so that it is cut alike whatever its
    neighbours are (I6). The memory is that of any contexts, so that a start's largest step, which has none, counts it.
    """
    step = chunk if query.dtype == torch.float32 and not meta.holds_prompts else 1
    num_requests = meta.seq_lens.shape[0]
    if meta.holds_prompts:  # and no context but these tokens
        total = len(query)
    else:
        lens = np.full(num_requests, meta.max_seq_len) if meta.host_lens is None else meta.host_lens
        total = int((-(-lens // step) * step).sum())
    offsets = torch.zeros(num_requests + 1, dtype=torch.int32, device=query.device)
    torch.cumsum((meta.seq_lens + (step - 1)) // step * step, 0, dtype=torch.int32, out=offsets[1:])
    shape = query.shape[:2]
    carried = Carried(
        query.new_empty(*shape, value_dim, dtype=torch.float32), query.new_empty(*shape, dtype=torch.float32)
    )
    return Contexts(total, offsets, carried, query.new_empty(chunk, cache.shape[2]))


def _plan(meta: AttentionMetadata) -> TritonLatentPlan:
    assert isinstance(meta.plan, TritonLatentPlan), "call prepare(meta, ...) before the first layer"
    return meta.plan


OPS = MLAOps(
    prepare=prepare,
    attend=attend,
    attend_expanded=attend_expanded,
    head_products=triton_heads.head_products,
    is_capturable=True,
)
