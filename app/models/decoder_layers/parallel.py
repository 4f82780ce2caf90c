"""Attention and feed-forward layer beside each other (GPT-J, GPT-NeoX, PaLM): both read the same x."""

from __future__ import annotations

from types import MappingProxyType

import torch

from app.kernels.gemm import Activations, materialize
from app.layers.context import ForwardContext
from app.layers.epilogue import PLAIN, AddNorm, Plain
from app.layers.norm import Norm
from app.models.decoder_layers.base import DecoderLayer


class ParallelLayer(DecoderLayer):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm for both."""

    norms = MappingProxyType({"input_layernorm": True})
    narrows = True

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        of_mlp = self.of_mlp(normed, x)
        if ctx.read is None:
            x = x + self.self_attn(normed, PLAIN, ctx)
        else:
            of_mlp = ctx.of_read(materialize(of_mlp))
            x = ctx.of_read(x) + self.self_attn(normed, Plain(ctx.read), ctx)
        return self.mlp(of_mlp, AddNorm(x, next_norm), ctx.behind())  # type: ignore[no-any-return]

    def of_mlp(self, normed: Activations, x: torch.Tensor) -> Activations:
        """Returns what the feed-forward layer reads."""
        return normed


class TwoNormParallelLayer(ParallelLayer):
    """x + attention(norm1(x)) + mlp(norm2(x)); the second norm has the name that it has in GPT-NeoX."""

    norms = MappingProxyType({"input_layernorm": False, "post_attention_layernorm": False})
    post_attention_layernorm: Norm

    def of_mlp(self, normed: Activations, x: torch.Tensor) -> Activations:
        """See ParallelLayer.of_mlp."""
        return self.post_attention_layernorm(x)  # type: ignore[no-any-return]
