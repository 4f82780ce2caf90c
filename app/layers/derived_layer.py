"""Layers that keep what they compute from weights of several layers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from app.layers.layer import Layer


class DerivedLayer(Layer, ABC):
    """Told when weights have been loaded or changed. What it keeps stays awake while weights sleep."""

    @abstractmethod
    def derive(self) -> None:
        """Compute it anew; where it lies already, as CUDA graphs read it there."""


@torch.inference_mode()
def derive(model: nn.Module) -> None:
    """Have layers compute what they keep: all weights are there, and packed."""
    for module in model.modules():
        if isinstance(module, DerivedLayer):
            module.derive()
