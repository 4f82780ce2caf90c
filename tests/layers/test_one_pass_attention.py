"""Attention of texts side by side to their own tokens alone; transformers judges it within models (worker/pooling)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from app.distributed.parallel_groups import ParallelGroups
from app.errors import UnsupportedError
from app.kernels.attention import AttentionMetadata
from app.layers.attention import AttentionSettings
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import PLAIN
from app.layers.one_pass_attention import OnePassAttention
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")
CONTEXT = BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups())
SETTINGS = AttentionSettings(32, 4, 2, 8, qkv_bias=True, output_bias=False, norm_eps=1e-6)
ROTARY = RotaryEmbedding(RopeSettings(8, 10_000.0), 64, torch.float32, CPU)
STARTS = np.array([0, 5, 6, 13])


def layer(**changes: Any) -> OnePassAttention:
    """The second of a model's."""
    return OnePassAttention(CONTEXT, replace(SETTINGS, **changes), 1, ROTARY)


def context(attention: OnePassAttention) -> ForwardContext:
    """A step of three texts, planned."""
    starts, lens = torch.from_numpy(STARTS).int(), torch.from_numpy(np.diff(STARTS)).int()
    table, slots = torch.zeros(3, 0, dtype=torch.int32), torch.zeros(13, dtype=torch.int64)
    meta = AttentionMetadata(starts, lens, table, slots, 7, 7, 0, host_starts=STARTS)
    attention.plan(meta, 16)
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(STARTS.tolist())])
    return ForwardContext(positions, [meta, meta], [])


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T, H, 8] rotated as complex numbers."""
    angles = positions.double()[:, None] * 10_000.0 ** (-torch.arange(4).double() / 4)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


@pytest.mark.parametrize("window", [None, 3])
def test_each_text_is_attended_to_alone(window: int | None) -> None:
    attention = layer(sliding_window=window)
    step = context(attention)
    x = torch.randn(13, 32, generator=torch.Generator().manual_seed(1))
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(2))
    found = attention(x, PLAIN, step)
    heads = attention.project(x).detach().double().view(13, 8, 8)
    query, key, value = heads.split((4, 2, 2), dim=1)
    query, key = turned(query, step.positions), turned(key, step.positions)
    for start, end in pairwise(STARTS.tolist()):
        mine = [one[start:end].transpose(0, 1) for one in (query, key, value)]
        apart = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (apart >= 0) & (apart < (window or 64))
        truth = F.scaled_dot_product_attention(*mine, attn_mask=seen, enable_gqa=True).transpose(0, 1).flatten(1)
        truth = truth @ attention.o_proj.get_parameter("weight").double().T
        torch.testing.assert_close(found[start:end].double(), truth, rtol=1e-4, atol=1e-5)


def test_what_is_normed_over_all_heads_is_clipped_behind_that() -> None:
    """As transformers' OLMoE has it: its norms, then the clip of queries, keys and values alike."""
    attention = layer(qk_norm="projection_rms", clip=0.7)
    x = torch.randn(13, 32, generator=torch.Generator().manual_seed(1))
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, std=0.5, generator=torch.Generator().manual_seed(2))
    heads, norm, _ = attention._projected(x)
    query, key, value = attention.project(x).view(13, 8, 8).split((4, 2, 2), dim=1)
    normed = [F.rms_norm(one.flatten(1), one.flatten(1).shape[1:], eps=1e-6) for one in (query, key)]
    weights = [attention.q_norm.get_parameter("weight"), attention.k_norm.get_parameter("weight")]
    truth = [(one * weight).view(13, -1, 8) for one, weight in zip(normed, weights, strict=True)]
    assert norm is None
    torch.testing.assert_close(heads, torch.cat((*truth, value), dim=1).clamp(-0.7, 0.7), rtol=1e-5, atol=1e-6)


def test_nothing_is_kept_and_layers_share_a_plan() -> None:
    first, second = layer(), layer()
    assert first.cache_spec() is None
    assert first.plan_key == second.plan_key


@pytest.mark.parametrize("asked", [{"soft_cap": 30.0}, {"alibi_slopes": (0.5,) * 4}, {"sinks": True}])
def test_what_its_kernel_has_not_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="without a cache"):
        layer(**asked)
