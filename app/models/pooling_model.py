"""Says what the engine needs of a model that gives vectors instead of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from app.layers.adapted_layer import AdaptedLayer
from app.models.base import EngineModel
from app.records.pooling_info import Saturation


class PoolingModel(EngineModel):
    """Hidden states of all tokens, and logits of classes where the checkpoint has a head for them."""

    num_labels: int = 0  # 0: the model has no classes
    saturates: Saturation = ""  # PoolingInfo's, where the model gives weights of the vocabulary

    @property
    def head_layers(self) -> Sequence[AdaptedLayer]:
        """Returns the layers that `classify` computes with, and nothing else does."""
        return ()

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [N, C] -> logits [N, num_labels]."""
        raise AssertionError("a model without classes")

    @abstractmethod
    def own_name(self, name: str) -> str | None:
        """Returns what a tensor of the checkpoint is called here; None for one that pooling has no use for."""
