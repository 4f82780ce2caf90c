"""Attention and feed-forward layer beside each other (GPT-J, GPT-NeoX, PaLM): both read the same x."""

from __future__ import annotations

from typing import ClassVar

import torch

from app.engine.layers.context import BuildContext, ForwardContext
from app.engine.layers.epilogue import PLAIN, AddNorm
from app.engine.layers.layer import Layer
from app.engine.layers.norm import Norm
from app.engine.models.blocks import Blocks, LayerPlace
from app.engine.models.decoder_settings import DecoderSettings
from app.kernels.gemm import Activations


class ParallelLayer(Layer):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm for both."""

    has_own_norms: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__()
        self.input_layernorm = blocks.norm(ctx, settings, not self.has_own_norms)
        self.self_attn = blocks.attention(ctx, settings, place)
        self.post_attention_layernorm = blocks.norm(ctx, settings, False) if self.has_own_norms else None
        self.mlp = blocks.mlp(ctx, settings, place)

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See PreNormLayer.forward."""
        of_mlp = normed if self.post_attention_layernorm is None else self.post_attention_layernorm(x)
        x = x + self.self_attn(normed, PLAIN, ctx)
        return self.mlp(of_mlp, AddNorm(x, next_norm))  # type: ignore[no-any-return]


class TwoNormParallelLayer(ParallelLayer):
    """x + attention(norm1(x)) + mlp(norm2(x)); the second norm has the name that it has in GPT-NeoX."""

    has_own_norms = True
