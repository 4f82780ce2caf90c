"""The base that the kinds of decoder layer share: attention, feed-forward layer, and norms by the names of `norms`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from app.kernels.gemm import Activations
from app.layers.context import BuildContext, ForwardContext
from app.layers.layer import Layer
from app.layers.norm import Norm
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_settings import DecoderSettings


class DecoderLayer(Layer, ABC):
    """A layer of a decoder; its kind says which norms it has, and how `forward` joins them."""

    norms: ClassVar[Mapping[str, bool]]  # name -> whether only linear layers read what it gives
    narrows: ClassVar[bool] = False  # whether behind its attention it heeds ForwardContext.read

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__()
        self.input_layernorm: Norm | None = None  # what the layer reads goes through it; None: it reads x as it is
        self.self_attn = blocks.attention(ctx, settings, place)
        self.mlp = blocks.mlp(ctx, settings, place)
        for name, before_linear in self.norms.items():
            setattr(self, name, blocks.norm(ctx, settings, before_linear))

    @abstractmethod
    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """(x after `input_layernorm`, x [T, C]) -> the same of the next layer, whose norm is `next_norm`: each sum is
        normed where it is made, so that one kernel can do both. No next norm in this stage: the sum twice."""
