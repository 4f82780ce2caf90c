"""Norms before and after the blocks: Gemma 2 and 3, GLM-4."""

from __future__ import annotations

from types import MappingProxyType

import torch

from app.kernels.gemm import Activations
from app.layers.context import ForwardContext
from app.layers.epilogue import AddNorm
from app.layers.norm import Norm
from app.models.decoder_layers.base import DecoderLayer


class SandwichLayer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), under Gemma's names."""

    norms = MappingProxyType(
        {
            "input_layernorm": True,
            "post_attention_layernorm": False,
            "pre_feedforward_layernorm": True,
            "post_feedforward_layernorm": False,
        }
    )
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    post_feedforward_layernorm: Norm
    narrows = True

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See PreNormLayer.forward."""
        add = AddNorm(x, self.pre_feedforward_layernorm, first=self.post_attention_layernorm).of(ctx.read)
        normed, x = self.self_attn(normed, add, ctx)
        add = AddNorm(x, next_norm, first=self.post_feedforward_layernorm)
        return self.mlp(normed, add, ctx.behind())  # type: ignore[no-any-return]
