"""What the engine needs of a model that gives vectors instead of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from app.engine.layers.attention import Attention
from app.engine.layers.context import ForwardContext


class PoolingModel(nn.Module, ABC):
    """Hidden states of all tokens, and logits of classes where the checkpoint has a head for them."""

    num_labels: int = 0  # 0: the model has no classes

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C] after the last layer."""

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [N, C] -> logits [N, num_labels]."""
        raise AssertionError("a model without classes")

    @abstractmethod
    def own_name(self, name: str) -> str | None:
        """What a tensor of the checkpoint is called here; None for one that pooling has no use for."""

    @property
    def attention_layers(self) -> list[Attention]:
        """Layers with a KV cache; an encoder has none."""
        return [module for module in self.modules() if isinstance(module, Attention)]
