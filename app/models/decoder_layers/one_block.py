"""Layers of one block and one norm: Mamba, and Nemotron-H, where attention, Mamba and feed-forward take turns."""

from __future__ import annotations

from types import MappingProxyType

import torch

from app.kernels.gemm import Activations
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import AddNorm
from app.layers.layer import Layer
from app.layers.norm import Norm
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_settings import DecoderSettings


class OneBlockLayer(Layer):
    """x + mixer(norm(x))."""

    norms = MappingProxyType({"input_layernorm": True})

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__()
        self.input_layernorm = blocks.norm(ctx, settings, True)
        self.mixer = blocks.attention(ctx, settings, place)

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        return self.mixer(normed, AddNorm(x, next_norm), ctx)  # type: ignore[no-any-return]
