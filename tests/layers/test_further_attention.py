"""Attention of other kinds: what cannot be split over ranks is named, and what a layer caches. Families hold each to
transformers (tests/models/families)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.errors import UnsupportedError
from app.kernels.moe import RoutingRule
from app.layers.attention import Attention, AttentionSettings
from app.layers.context import BuildContext
from app.layers.differential_attention import DifferentialAttention
from app.layers.experts.settings import ExpertSettings
from app.layers.mixture_of_attention import MixtureOfAttention
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding
from app.layers.weighed_attention import WeighedAttention
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")
SHAPE = AttentionSettings(64, 4, 2, 16, qkv_bias=False, output_bias=False, norm_eps=1e-6)
EXPERTS = ExpertSettings(4, 32, RoutingRule(2, "softmax_of_chosen"), frozenset([0]))
ROTARY = RotaryEmbedding(RopeSettings(16, 1e4), 64, torch.float32, CPU)
KINDS: dict[str, Callable[[BuildContext], Attention]] = {
    "differential": lambda ctx: DifferentialAttention(ctx, SHAPE, 0, ROTARY, layer=0),
    "mixture": lambda ctx: MixtureOfAttention(ctx, SHAPE, EXPERTS, 0, ROTARY),
    "weighed": lambda ctx: WeighedAttention(ctx, SHAPE, 0, ROTARY),
}
RANKS = {"differential": 2, "mixture": 4, "weighed": 4}  # more than their heads can be shared out to


def context(size: int = 1) -> BuildContext:
    groups = ParallelGroups(tp=RankGroup.unconnected(0, size))
    return BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], groups)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_cannot_be_shared_out_are_named(kind: str) -> None:
    with pytest.raises(UnsupportedError, match="num_key_value_heads=2"):
        KINDS[kind](context(RANKS[kind]))


@pytest.mark.parametrize(("kind", "heads", "width"), [("differential", 4, 16), ("mixture", 2, 16), ("weighed", 2, 32)])
def test_what_a_layer_caches(kind: str, heads: int, width: int) -> None:
    spec: Any = KINDS[kind](context()).cache_spec()
    assert (spec.planes, spec.width) == ((2, heads), width)
