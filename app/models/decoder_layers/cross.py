"""Layers that attend to an encoder's output between their own attention and the feed-forward layer."""

from __future__ import annotations

from types import MappingProxyType

import torch

from app.kernels.gemm import Activations, materialize
from app.layers.context import BuildContext, ForwardContext
from app.layers.cross_attention import CrossAttention
from app.layers.epilogue import AddNorm
from app.layers.norm import Norm
from app.models.blocks import Blocks, LayerPlace, attention_settings
from app.models.decoder_layers.base import DecoderLayer
from app.models.decoder_settings import DecoderSettings


class _CrossLayer(DecoderLayer):
    """Has the attention to the encoder's output."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__(ctx, settings, place, blocks)
        shape = attention_settings(settings, place)
        self.encoder_attn = CrossAttention(ctx, shape, place.cache_index, settings.cross_positions)


class CrossLayer(_CrossLayer):
    """x + attention(norm(x)), x + cross(norm(x)), then x + mlp(norm(x)): Whisper's."""

    norms = MappingProxyType(
        {"input_layernorm": True, "encoder_attn_layer_norm": True, "post_attention_layernorm": True}
    )
    encoder_attn_layer_norm: Norm
    post_attention_layernorm: Norm

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        normed, x = self.self_attn(normed, AddNorm(x, self.encoder_attn_layer_norm), ctx)
        normed, x = self.encoder_attn(normed, AddNorm(x, self.post_attention_layernorm), ctx)
        return self.mlp(normed, AddNorm(x, next_norm), ctx)  # type: ignore[no-any-return]


class NormedSumCrossLayer(_CrossLayer):
    """norm(x + attention(x)), norm(x + cross(x)), then norm(x + mlp(x)): BART's and Marian's."""

    norms = MappingProxyType(
        {"post_attention_layernorm": False, "encoder_attn_layer_norm": False, "post_feedforward_layernorm": False}
    )
    post_attention_layernorm: Norm
    encoder_attn_layer_norm: Norm
    post_feedforward_layernorm: Norm

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        x = materialize(normed)
        normed, _ = self.self_attn(x, AddNorm(x, self.post_attention_layernorm), ctx)
        x = materialize(normed)
        normed, _ = self.encoder_attn(x, AddNorm(x, self.encoder_attn_layer_norm), ctx)
        x = materialize(normed)
        normed, _ = self.mlp(x, AddNorm(x, self.post_feedforward_layernorm), ctx)
        x = materialize(normed)
        return (x if next_norm is None else next_norm(x)), x
