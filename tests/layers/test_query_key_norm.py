"""Norms of queries and keys equal transformers', whole and in the shares of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from app.distributed.parallel_groups import RankGroup
from app.layers.offset_norm import OffsetRMSNorm
from app.layers.query_key_norm import QUERY_KEY_NORMS, HeadLayerNorm, HeadShare, ProjectionRMSNorm
from tests.layers.test_tensor_parallel_shares import Recorded, context

HEADS, DIM, EPS = 4, 8, 1e-5


TOTAL: list[torch.Tensor] = []


class Group(RankGroup):
    """A rank whose sum over the others is known."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return TOTAL[-1]


def share(rank: int, size: int) -> HeadShare:
    """A rank's heads; two ranks hold the same one where there are more ranks than heads."""
    own = max(1, HEADS // size)
    return HeadShare(Group(rank, size, object() if size > 1 else None), HEADS, own)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_norm_of_a_projection_is_split_over_ranks(size: int) -> None:
    weight, x = torch.randn(HEADS * DIM), torch.randn(5, HEADS, DIM)
    judge = Olmo2RMSNorm(HEADS * DIM, EPS)
    judge.weight.data.copy_(weight)
    expected = judge(x.flatten(1)).view_as(x)
    copies = max(1, size // HEADS)
    for rank in range(size):
        heads = share(rank, size)
        TOTAL.append(x.square().sum((1, 2)) * copies)
        norm = ProjectionRMSNorm(context(rank, size), heads, DIM, EPS)
        norm.weight.weight_loader(Recorded(weight))
        own = slice(heads.first, heads.first + heads.own)
        torch.testing.assert_close(norm(x[:, own]), expected[:, own])


@pytest.mark.parametrize("size", [1, 2])
def test_layer_norm_of_each_head(size: int) -> None:
    weight, x = torch.randn(HEADS, DIM), torch.randn(5, HEADS, DIM)
    judge = CohereLayerNorm((HEADS, DIM), EPS)
    judge.weight.data.copy_(weight)
    for rank in range(size):
        heads = share(rank, size)
        norm = HeadLayerNorm(context(rank, size), heads, DIM, EPS, bias=False)
        norm.weight.weight_loader(Recorded(weight))
        own = slice(heads.first, heads.first + heads.own)
        torch.testing.assert_close(norm(x[:, own]), judge(x)[:, own])


def test_layer_norm_common_to_all_heads() -> None:
    weight, bias, x = torch.randn(DIM), torch.randn(DIM), torch.randn(5, HEADS, DIM)
    norm = QUERY_KEY_NORMS["head_biased_layer_norm"](context(0, 1), share(0, 1), DIM, EPS)
    assert isinstance(norm, HeadLayerNorm)
    assert norm.bias is not None
    norm.weight.weight_loader(Recorded(weight))
    norm.bias.weight_loader(Recorded(bias))
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (DIM,), weight, bias, EPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offset_norm_rounds_once(dtype: torch.dtype) -> None:
    stored, x, residual = torch.randn(64).to(dtype), torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    judge = Gemma3RMSNorm(64, EPS)
    judge.weight.data = stored.clone()
    ctx: Any = context(0, 1)
    norm = OffsetRMSNorm(ctx, 64, EPS)
    norm.weight.weight_loader(Recorded(stored))
    assert norm.weight.dtype == torch.float32
    torch.testing.assert_close(norm(x), judge(x))
    normed, total = norm.after_add(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, judge(x + residual))
