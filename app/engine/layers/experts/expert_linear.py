"""The weights of all experts of a rank, stacked, each filled from tensors of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from app.engine.layers.context import BuildContext
from app.engine.layers.experts.expert_share import ExpertShare
from app.engine.layers.layer import Layer
from app.engine.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape


class ExpertLinear(Layer, ABC):
    """weight [E, N, K], bias [E, N]; the checkpoint has `7.gate_proj.weight` and so on beside it."""

    def __init__(
        self, ctx: BuildContext, share: ExpertShare, sizes: tuple[int, int], parts: tuple[str, ...], bias: bool
    ) -> None:
        """`sizes`: (N, K) on this rank."""
        super().__init__()
        self.experts = share
        self.slots = {expert: slot for slot, expert in enumerate(share.held)}
        names = tuple(f"{expert}.{part}" for expert in self.slots for part in parts)
        weight = torch.empty(len(self.slots), *sizes, dtype=ctx.dtype)
        self.weight = Weight(weight, WeightSpec(self.load_weight, names))
        self.bias = (
            Weight(weight.new_empty(len(self.slots), sizes[0]), WeightSpec(self.load_bias, names)) if bias else None
        )
        self.parts = parts

    @abstractmethod
    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Have this rank's share of an expert's weight read."""

    @abstractmethod
    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """The same of a bias."""

    def place_of(self, weight: Weight, shard_id: str) -> tuple[torch.Tensor, str]:
        """Where an expert lies in a parameter, and which of its parts is meant."""
        expert, _, part = shard_id.partition(".")
        return weight.data[self.slots[int(expert)]], part


class ExpertGateUp(ExpertLinear):
    """Gate above up, [E, 2 I, C]."""

    def __init__(self, ctx: BuildContext, share: ExpertShare, hidden_size: int, width: int, bias: bool) -> None:
        """`width`: an expert's, in the model."""
        super().__init__(ctx, share, (2 * share.width, hidden_size), ("gate_proj", "up_proj"), bias)
        self.whole, self.input_size = width, hidden_size

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """See ExpertLinear.load_weight."""
        expect_shape(tensor, self.whole, self.input_size)
        self._load(weight, tensor, shard_id)

    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """See ExpertLinear.load_bias."""
        expect_shape(tensor, self.whole)
        self._load(weight, tensor, shard_id)

    def _load(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        expert, part = self.place_of(weight, shard_id)
        width = self.experts.width
        tensor.read_into(expert.narrow(0, self.parts.index(part) * width, width), 0, self.experts.first)


class ExpertDown(ExpertLinear):
    """Back to the hidden size, [E, C, I]; where ranks share an expert, the first one adds its bias."""

    def __init__(self, ctx: BuildContext, share: ExpertShare, hidden_size: int, width: int, bias: bool) -> None:
        """`width`: an expert's, in the model."""
        super().__init__(ctx, share, (hidden_size, share.width), ("down_proj",), bias)
        self.whole, self.output_size = width, hidden_size

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """See ExpertLinear.load_weight."""
        expect_shape(tensor, self.output_size, self.whole)
        tensor.read_into(self.place_of(weight, shard_id)[0], 1, self.experts.first)

    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """See ExpertLinear.load_bias."""
        expect_shape(tensor, self.output_size)
        target, _ = self.place_of(weight, shard_id)
        if self.experts.first:
            target.zero_()
        else:
            tensor.read_into(target)
