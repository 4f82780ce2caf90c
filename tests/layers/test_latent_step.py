"""A step of latent attention is parted by how many tokens its requests bring."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.kernels.attention import AttentionMetadata
from app.layers.latent_step import NEVER, StepPart, least_expanded, split_step


def step(counts: list[int], *, on_host: bool = True, is_static: bool = False) -> AttentionMetadata:
    starts = np.concatenate(([0], np.cumsum(counts)))
    requests = torch.arange(len(counts), dtype=torch.int32)
    decodes = next((i for i, count in enumerate(counts) if count > 1), len(counts))
    return AttentionMetadata(
        torch.from_numpy(starts).int(), 1000 + requests, requests[:, None].expand(-1, 3), torch.arange(starts[-1]),
        max(counts), 2000, decodes, is_static, host_starts=starts if on_host else None,
    )  # fmt: skip


def described(part: StepPart | None) -> tuple[list[int], list[int], list[int], int, int]:
    """Requests, their counts, their tokens, decodes, most tokens."""
    assert part is not None
    meta, tokens = part.meta, part.of(torch.arange(100))
    assert meta.host_starts is not None
    assert meta.query_start_loc.tolist() == meta.host_starts.tolist()
    assert (meta.block_table[:, 2] + 1000).tolist() == meta.seq_lens.tolist()
    counts = np.diff(meta.host_starts).tolist()
    return (meta.seq_lens - 1000).tolist(), counts, tokens.tolist(), meta.num_decodes, meta.max_query_len


@pytest.mark.parametrize("on_host", [True, False])
def test_long_requests_are_a_step_of_their_own(on_host: bool) -> None:
    parts = split_step(step([1, 1, 9, 2, 10, 3], on_host=on_host), 9)
    few = [0, 1, 11, 12, *range(23, 26)]
    assert described(parts.absorbed) == ([0, 1, 3, 5], [1, 1, 2, 3], few, 2, 3)
    assert described(parts.expanded) == ([2, 4], [9, 10], [*range(2, 11), *range(13, 23)], 0, 10)


def test_neighbours_are_a_view() -> None:
    parts = split_step(step([1, 1, 5, 7]), 5)
    assert parts.absorbed is not None
    assert parts.expanded is not None
    assert (parts.absorbed.tokens, parts.expanded.tokens) == (slice(0, 2), slice(2, 14))


@pytest.mark.parametrize(("counts", "least"), [([1, 1, 4], 5), ([7, 8], 5)])
def test_a_step_of_one_kind_is_not_cut(counts: list[int], least: int) -> None:
    meta = step(counts)
    parts = split_step(meta, least)
    part = parts.expanded or parts.absorbed
    assert part is not None
    assert (parts.absorbed is None) == (min(counts) >= least)
    assert (parts.expanded is None) != (parts.absorbed is None)
    assert part.meta.seq_lens is meta.seq_lens
    assert part.of(meta.slot_mapping).data_ptr() == meta.slot_mapping.data_ptr()


def test_a_static_step_is_absorbed() -> None:
    assert split_step(step([1, 1], on_host=False, is_static=True), 1).expanded is None


def test_where_expanding_pays() -> None:
    assert least_expanded(512, 128, 128) == 171  # DeepSeek: 512 * 256 / 768
    assert least_expanded(16, 16, 16) == NEVER
