"""Norms before the blocks, and a weight for each channel of what is added up: Doge."""

from __future__ import annotations

import torch

from app.kernels.gemm import Activations
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import AddNorm
from app.layers.norm import Norm
from app.layers.weight import REPLICATED, Weight
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.models.decoder_settings import DecoderSettings


class WeighedSumLayer(PreNormLayer):
    """w1 * x + attention(norm(x)), then w2 * x + mlp(norm(x))."""

    narrows = True

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__(ctx, settings, place, blocks)
        self.input_residual = Weight(torch.empty(settings.hidden_size, dtype=ctx.dtype), REPLICATED)
        self.post_attention_residual = Weight(torch.empty(settings.hidden_size, dtype=ctx.dtype), REPLICATED)

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        add = AddNorm(x * self.input_residual, self.post_attention_layernorm).of(ctx.read)
        normed, x = self.self_attn(normed, add, ctx)
        return self.mlp(normed, AddNorm(x * self.post_attention_residual, next_norm), ctx.behind())  # type: ignore[no-any-return]
