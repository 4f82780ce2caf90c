"""Norms before the blocks: Llama, GPT-2 and most others."""

from __future__ import annotations

import torch

from app.engine.layers.context import BuildContext, ForwardContext
from app.engine.layers.epilogue import AddNorm
from app.engine.layers.layer import Layer
from app.engine.layers.norm import Norm
from app.engine.models.blocks import Blocks, LayerPlace
from app.engine.models.decoder_settings import DecoderSettings
from app.kernels.gemm import Activations


class PreNormLayer(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)); Granite scales what it adds."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__()
        self.input_layernorm = blocks.norm(ctx, settings, True)
        self.self_attn = blocks.attention(ctx, settings, place)
        self.post_attention_layernorm = blocks.norm(ctx, settings, True)
        self.mlp = blocks.mlp(ctx, settings, place)
        self.scale = settings.residual_scale

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """(x after `input_layernorm`, x [T, C]) -> the same of the next layer, whose norm is `next_norm`: each sum is
        normed where it is made, so that one kernel can do both. No next norm in this stage: the sum twice."""
        normed, x = self.self_attn(normed, AddNorm(x, self.post_attention_layernorm, self.scale), ctx)
        return self.mlp(normed, AddNorm(x, next_norm, self.scale))  # type: ignore[no-any-return]
