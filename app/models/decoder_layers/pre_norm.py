"""Norms before the blocks: Llama, GPT-2 and most others."""

from __future__ import annotations

from types import MappingProxyType

import torch

from app.kernels.gemm import Activations
from app.layers.attention import Attention
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import AddNorm
from app.layers.mlp import GatedMLP
from app.layers.norm import Norm, RMSNorm
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_layers.base import DecoderLayer
from app.models.decoder_settings import DecoderSettings


class PreNormLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); Granite scales what it adds."""

    norms = MappingProxyType({"input_layernorm": True, "post_attention_layernorm": True})
    post_attention_layernorm: Norm
    narrows = True

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__(ctx, settings, place, blocks)
        self.scale = settings.residual_scale
        # One product reads each: of queries, keys and values side by side, or of gate and up.
        for norm, block, kind in (
            (self.input_layernorm, self.self_attn, Attention),
            (self.post_attention_layernorm, self.mlp, GatedMLP),
        ):
            if isinstance(norm, RMSNorm):
                norm.before_product = type(block) is kind and type(self).forward is PreNormLayer.forward

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        add = AddNorm(x, self.post_attention_layernorm, self.scale).of(ctx.read)
        normed, x = self.self_attn(normed, add, ctx)
        return self.mlp(normed, AddNorm(x, next_norm, self.scale), ctx.behind())  # type: ignore[no-any-return]
