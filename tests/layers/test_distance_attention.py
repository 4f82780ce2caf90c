"""A decoder's bias by distance is T5's own, on every rank; a backend without it is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.errors import CheckpointError, ConfigError
from app.layers.attention import AttentionSettings
from app.layers.context import BuildContext
from app.layers.distance_attention import DistanceAttention, DistanceBias
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")
CONTEXT = BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups())
HEADS = 4


class Stored:
    """A tensor as the loader hands it out."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        return self.tensor.narrow(dim, start, length)


@pytest.mark.parametrize(("buckets", "farthest", "most"), [(32, 128, 500), (8, 20, 64), (32, 128, 40)])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_table_is_that_of_transformers(buckets: int, farthest: int, most: int, rank: int) -> None:
    config = T5Config(
        d_model=16, d_kv=4, num_heads=HEADS, is_decoder=True, relative_attention_num_buckets=buckets,
        relative_attention_max_distance=farthest,
    )  # fmt: skip
    judge = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    expected = judge.compute_bias(most + 1, most + 1)[0, :, -1].flip(-1).detach()  # by how far behind the last query
    groups = ParallelGroups(tp=RankGroup.unconnected(rank, 2))
    own = DistanceBias(replace(CONTEXT, max_model_len=most, groups=groups), buckets, HEADS, farthest)
    own.weight.weight_loader(Stored(judge.relative_attention_bias.weight.data))  # type: ignore[arg-type]
    columns = torch.arange(most + 1).clamp(max=own.weight.shape[1] - 1)
    torch.testing.assert_close(own.weight[:, columns].data, expected[2 * rank : 2 * rank + 2])
    assert own.weight.shape[1] == min(most, farthest) + 1


def test_what_cannot_be() -> None:
    with pytest.raises(CheckpointError, match="relative_attention_max_distance=16"):
        DistanceBias(CONTEXT, 32, HEADS, 16)
    settings = AttentionSettings(16, HEADS, HEADS, 4, False, False, 1e-6)
    rotary = RotaryEmbedding(RopeSettings.none(), 64, torch.float32, CPU)
    without = replace(CONTEXT, attention_ops=replace(CONTEXT.attention_ops, features=frozenset(), name="other"))
    with pytest.raises(ConfigError, match="attention_backend=other: it does not serve biases by distance"):
        DistanceAttention(without, settings, 0, rotary, DistanceBias(CONTEXT, 32, HEADS, 128))
