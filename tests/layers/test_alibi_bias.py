"""ALiBi both ways, entry by entry."""

from __future__ import annotations

import torch

from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.layers.alibi_bias import AlibiBias
from app.layers.context import BuildContext
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")
SLOPES = [0.5, 0.25, 0.125, 0.0625]


def of(groups: ParallelGroups, length: int) -> torch.Tensor:
    ctx = BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], groups)
    return AlibiBias(ctx, SLOPES).of_length(length, CPU)


def test_a_score_falls_by_the_slope_with_each_place_between() -> None:
    whole = of(ParallelGroups(), 5)
    assert whole.shape == (1, 4, 5, 5)
    for head, slope in enumerate(SLOPES):
        for query in range(5):
            expected = [-slope * abs(key - query) for key in range(5)]
            assert whole[0, head, query].tolist() == expected


def test_a_rank_has_its_own_heads() -> None:
    """The second of two."""
    own = of(ParallelGroups(tp=RankGroup.unconnected(1, 2)), 2)
    assert own[0, :, 0, 1].tolist() == [-0.125, -0.0625]
