"""Two attentions and two feed-forward layers in a row, with experts beside the second half (Cai et al., "Shortcut-
connected Expert Parallelism", 2024): LongCat-Flash."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from app.kernels.gemm import Activations
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import PLAIN, AddNorm
from app.layers.norm import Norm
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_layers.base import DecoderLayer
from app.models.decoder_settings import DecoderSettings


class HalfLayer(DecoderLayer):
    """Llama's layer without experts, in two steps."""

    norms = MappingProxyType({"input_layernorm": True, "post_attention_layernorm": True})
    input_layernorm: Norm
    post_attention_layernorm: Norm

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__(ctx, replace(settings, experts=None), place, blocks)

    def attend(self, normed: Activations, x: torch.Tensor, ctx: ForwardContext) -> tuple[Activations, torch.Tensor]:
        """Attention: (the sum's norm, the sum)."""
        return self.self_attn(normed, AddNorm(x, self.post_attention_layernorm), ctx)  # type: ignore[no-any-return]

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        normed, x = self.attend(normed, x, ctx)
        return self.mlp(normed, AddNorm(x, next_norm), ctx)  # type: ignore[no-any-return]


class ShortcutLayer(HalfLayer):
    """Sends what the first feed-forward layer reads through experts, too; their sum is added at the layer's end.

    It has the caches of two layers."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        first = 2 * place.cache_index
        super().__init__(ctx, settings, replace(place, cache_index=first), blocks)
        self.shortcut = blocks.mlp(ctx, settings, place)
        self.second = HalfLayer(ctx, settings, replace(place, cache_index=first + 1), blocks)

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        normed, x = self.attend(normed, x, ctx)
        shortcut: torch.Tensor = self.shortcut(normed, PLAIN, ctx)
        normed, x = self.mlp(normed, AddNorm(x, self.second.input_layernorm), ctx)
        normed, x = self.second.attend(normed, x, ctx)
        return self.second.mlp(normed, AddNorm(x + shortcut, next_norm), ctx)  # type: ignore[no-any-return]
