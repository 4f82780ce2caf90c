"""Norms before and after the blocks: Gemma 2 and 3, GLM-4."""

from __future__ import annotations

import torch

from app.engine.layers.context import BuildContext, ForwardContext
from app.engine.layers.epilogue import PLAIN, AddNorm
from app.engine.layers.layer import Layer
from app.engine.layers.norm import Norm
from app.engine.models.blocks import Blocks, LayerPlace
from app.engine.models.decoder_settings import DecoderSettings
from app.kernels.gemm import Activations


class SandwichLayer(Layer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), under Gemma's names."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__()
        self.input_layernorm = blocks.norm(ctx, settings, True)
        self.self_attn = blocks.attention(ctx, settings, place)
        self.post_attention_layernorm = blocks.norm(ctx, settings, False)
        self.pre_feedforward_layernorm = blocks.norm(ctx, settings, True)
        self.mlp = blocks.mlp(ctx, settings, place)
        self.post_feedforward_layernorm = blocks.norm(ctx, settings, False)

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See PreNormLayer.forward."""
        y = self.post_attention_layernorm(self.self_attn(normed, PLAIN, ctx))
        normed, x = AddNorm(x, self.pre_feedforward_layernorm).after(y)
        y = self.post_feedforward_layernorm(self.mlp(normed, PLAIN))
        return AddNorm(x, next_norm).after(y)
