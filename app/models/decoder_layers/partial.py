"""Llama's layer without attention, or without a feed-forward layer, or without both: what a search left out."""

from __future__ import annotations

import torch

from app.kernels.gemm import Activations
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import AddNorm
from app.layers.layer import Layer
from app.layers.norm import Norm
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_settings import DecoderSettings


class PartialLayer(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)), as far as it has them."""

    def __init__(
        self,
        ctx: BuildContext,
        settings: DecoderSettings,
        place: LayerPlace,
        blocks: Blocks,
        *,
        attends: bool,
        feeds: bool,
    ) -> None:
        super().__init__()
        self.attends, self.feeds = attends, feeds
        if attends:
            self.first_norm = blocks.norm(ctx, settings, True)
            self.self_attn = blocks.attention(ctx, settings, place)
        if feeds:
            self.post_attention_layernorm = blocks.norm(ctx, settings, True)
            self.mlp = blocks.mlp(ctx, settings, place)

    @property
    def input_layernorm(self) -> Norm | None:
        """Norms what the layer reads; None: it has nothing that reads."""
        if self.attends:
            return self.first_norm
        return self.post_attention_layernorm if self.feeds else None

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        if self.attends:
            follows = self.post_attention_layernorm if self.feeds else next_norm
            normed, x = self.self_attn(normed, AddNorm(x, follows), ctx)
        if self.feeds:
            return self.mlp(normed, AddNorm(x, next_norm), ctx)  # type: ignore[no-any-return]
        if self.attends:
            return normed, x
        return (x if next_norm is None else next_norm(x)), x
