"""A step of latent attention in two parts: requests that bring few tokens, and those that bring many.

Few tokens attend to the latents as they lie in the cache (absorbed), many to keys and values that are computed of them
for the step (expanded): that costs R * (Dn + Dv) multiplications for each cached token and head, and saves
2 R - Dn - Dv for each pair of a query and a cached token, R being the latent's size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from app.kernels.attention import AttentionMetadata
from app.platforms.to_device import to_device

NEVER = 1 << 62


def least_expanded(latent_size: int, nope_dim: int, value_dim: int) -> int:
    """Tokens that a request must bring for expanding to pay."""
    saved = 2 * latent_size - nope_dim - value_dim
    return NEVER if saved <= 0 else -(-latent_size * (nope_dim + value_dim) // saved)


@dataclass(slots=True, frozen=True)
class StepPart:
    """Some of a step's requests as a step of their own."""

    meta: AttentionMetadata  # whose slot mapping is the whole step's
    tokens: slice | torch.Tensor  # theirs, among the step's

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Their rows of x [T, ...]."""
        return x[self.tokens]


@dataclass(slots=True)
class LatentStep:
    """The parts; None: no request is in it."""

    absorbed: StepPart | None
    expanded: StepPart | None
    workspace: torch.Tensor | None = None  # [W, H, Dn + Dv], for expanding


def split_step(meta: AttentionMetadata, least: int) -> LatentStep:
    """Requests that bring `least` tokens or more apart from the others. A static step (CUDA graphs) decodes, or holds
    prompts behind its decodes, which all count as long."""
    if meta.holds_prompts:
        return _static_parts(meta)
    whole = StepPart(replace(meta, plan=None), slice(None))
    if meta.is_static or meta.max_query_len < least:
        return LatentStep(whole, None)
    starts = meta.query_start_loc.cpu().numpy() if meta.host_starts is None else meta.host_starts
    is_long = np.diff(starts) >= least
    if is_long.all():
        return LatentStep(None, whole)
    return LatentStep(_part(meta, starts, np.flatnonzero(~is_long)), _part(meta, starts, np.flatnonzero(is_long)))


def _static_parts(meta: AttentionMetadata) -> LatentStep:
    """Both parts are views: the decodes come first."""
    count, starts = meta.num_decodes, meta.query_start_loc
    prompts = replace(
        meta,
        query_start_loc=starts[count:] - count,
        seq_lens=meta.seq_lens[count:],
        block_table=meta.block_table[count:],
        num_decodes=0,
        plan=None,
    )
    if not count:
        return LatentStep(None, StepPart(prompts, slice(None)))
    decodes = replace(
        meta,
        query_start_loc=starts[: count + 1],
        seq_lens=meta.seq_lens[:count],
        block_table=meta.block_table[:count],
        max_query_len=1,
        holds_prompts=False,
        plan=None,
    )
    return LatentStep(StepPart(decodes, slice(count)), StepPart(prompts, slice(count, len(meta.slot_mapping))))


def _part(meta: AttentionMetadata, starts: NDArray[np.int64], requests: NDArray[np.int64]) -> StepPart:
    """The step of these requests alone, in their order. Decodes come first, and all of them are in one part."""
    counts = np.diff(starts)[requests]
    own = np.zeros(len(requests) + 1, dtype=np.int64)
    np.cumsum(counts, out=own[1:])
    device = meta.seq_lens.device
    rows = to_device(requests, device)
    part = replace(
        meta,
        query_start_loc=to_device(own.astype(np.int32), device),
        seq_lens=meta.seq_lens.index_select(0, rows),
        block_table=meta.block_table.index_select(0, rows),
        max_query_len=int(counts.max()),
        num_decodes=min(meta.num_decodes, int((counts == 1).sum())),
        host_starts=own,
        host_lens=None if meta.host_lens is None else meta.host_lens[requests],
        plan=None,
    )
    return StepPart(part, _tokens(starts, requests, own, device))


def _tokens(
    starts: NDArray[np.int64], requests: NDArray[np.int64], own: NDArray[np.int64], device: torch.device
) -> slice | torch.Tensor:
    """Returns where the requests' tokens lie in the step."""
    first, last = int(requests[0]), int(requests[-1])
    if last - first + 1 == len(requests):  # side by side: a view
        return slice(int(starts[first]), int(starts[last + 1]))
    shifts = np.repeat(starts[requests] - own[:-1], np.diff(own))
    return to_device(np.arange(own[-1]) + shifts, device)
