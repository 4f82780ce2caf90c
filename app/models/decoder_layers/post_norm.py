"""Norms after the blocks: OLMo 2 and 3, Exaone 4, and the smaller OPT, which norms the sums."""

from __future__ import annotations

from types import MappingProxyType

import torch

from app.kernels.gemm import Activations, materialize
from app.layers.context import ForwardContext
from app.layers.epilogue import AddNorm
from app.layers.norm import Norm
from app.models.decoder_layers.base import DecoderLayer


class PostNormLayer(DecoderLayer):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    norms = MappingProxyType({"post_attention_layernorm": False, "post_feedforward_layernorm": False})
    post_attention_layernorm: Norm
    post_feedforward_layernorm: Norm
    narrows = True

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """(x [T, C], x) -> the same of the next layer; of the last one, x after the final norm first."""
        add = AddNorm(x, None, first=self.post_attention_layernorm).of(ctx.read)
        _, x = self.self_attn(x, add, ctx)
        add = AddNorm(x, next_norm, first=self.post_feedforward_layernorm)
        return self.mlp(x, add, ctx.behind())  # type: ignore[no-any-return]


class NormedSumLayer(PostNormLayer):
    """norm(x + attention(x)), then norm(x + mlp(x)): as the first Transformer did."""

    narrows = True

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """(x [T, C], x) -> the same of the next layer."""
        normed, _ = self.self_attn(x, AddNorm(x, self.post_attention_layernorm).of(ctx.read), ctx)
        add = AddNorm(materialize(normed), self.post_feedforward_layernorm)
        normed, _ = self.mlp(normed, add, ctx.behind())
        x = materialize(normed)
        return (x if next_norm is None else next_norm(x)), x
