"""A bias behind the experts' sum: every token gets it, once among the ranks."""

from __future__ import annotations

import torch

from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.kernels.moe import RoutingRule
from app.layers.context import BuildContext
from app.layers.experts.biased import BiasedExpertMLP
from app.layers.experts.settings import ExpertSettings
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")
SETTINGS = ExpertSettings(4, 32, RoutingRule(2), frozenset([0]))


def test_one_rank_adds_the_bias() -> None:
    for rank, adds in ((0, True), (1, False)):
        groups = ParallelGroups(tp=RankGroup.unconnected(rank, 2))
        ctx = BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], groups)
        layer = BiasedExpertMLP(ctx, 8, "silu", SETTINGS)
        layer.bias.data = torch.rand(8)
        added = layer._shared(torch.zeros(3, 8))
        assert (added is not None) is adds
        if added is not None:
            torch.testing.assert_close(added, layer.bias.data.repeat(3, 1))
