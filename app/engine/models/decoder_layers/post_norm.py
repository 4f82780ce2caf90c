"""Norms after the blocks: OLMo 2 and 3, Exaone 4, and the smaller OPT, which norms the sums."""

from __future__ import annotations

import torch

from app.engine.layers.context import BuildContext, ForwardContext
from app.engine.layers.epilogue import PLAIN, AddNorm
from app.engine.layers.layer import Layer
from app.engine.layers.norm import Norm
from app.engine.models.blocks import Blocks, LayerPlace
from app.engine.models.decoder_settings import DecoderSettings
from app.kernels.gemm import Activations, materialize


class PostNormLayer(Layer):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    input_layernorm: Norm | None = None

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__()
        self.self_attn = blocks.attention(ctx, settings, place)
        self.post_attention_layernorm = blocks.norm(ctx, settings, False)
        self.mlp = blocks.mlp(ctx, settings, place)
        self.post_feedforward_layernorm = blocks.norm(ctx, settings, False)

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """(x [T, C], x) -> the same of the next layer; of the last one, x after the final norm first."""
        x = x + self.post_attention_layernorm(self.self_attn(x, PLAIN, ctx))
        return AddNorm(x, next_norm).after(self.post_feedforward_layernorm(self.mlp(x, PLAIN)))


class NormedSumLayer(Layer):
    """norm(x + attention(x)), then norm(x + mlp(x)): as the first Transformer did."""

    input_layernorm: Norm | None = None

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__()
        self.self_attn = blocks.attention(ctx, settings, place)
        self.post_attention_layernorm = blocks.norm(ctx, settings, False)
        self.mlp = blocks.mlp(ctx, settings, place)
        self.post_feedforward_layernorm = blocks.norm(ctx, settings, False)

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """(x [T, C], x) -> the same of the next layer."""
        normed, _ = self.self_attn(x, AddNorm(x, self.post_attention_layernorm), ctx)
        normed, _ = self.mlp(normed, AddNorm(materialize(normed), self.post_feedforward_layernorm))
        x = materialize(normed)
        return (x if next_norm is None else next_norm(x)), x
