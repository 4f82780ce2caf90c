"""Buckets of distances; T5's own function is the judge."""

from __future__ import annotations

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from app.distributed.parallel_groups import ParallelGroups
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.layers.relative_bias import RelativeBias
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")
CONTEXT = BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups())


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (5, 9)])
def test_buckets_of_distances(buckets: int, farthest: int) -> None:
    own = RelativeBias(CONTEXT, buckets, 2, farthest)
    distances = torch.arange(-300, 301)
    expected = T5Attention._relative_position_bucket(distances, num_buckets=buckets, max_distance=farthest)
    torch.testing.assert_close(own.bucket_of(distances), expected)


def test_buckets_that_cannot_be() -> None:
    with pytest.raises(CheckpointError, match="relative_attention_max_distance=8"):
        RelativeBias(CONTEXT, 32, 2, 8)
