"""Attention and feed-forward layer beside each other (GPT-J, GPT-NeoX, PaLM): both read the same x."""

from __future__ import annotations

from types import MappingProxyType

import torch

from app.kernels.gemm import Activations
from app.layers.context import ForwardContext
from app.layers.epilogue import PLAIN, AddNorm
from app.layers.norm import Norm
from app.models.decoder_layers.base import DecoderLayer


class ParallelLayer(DecoderLayer):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm for both."""

    norms = MappingProxyType({"input_layernorm": True})

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        of_mlp = self.of_mlp(normed, x)
        x = x + self.self_attn(normed, PLAIN, ctx)
        return self.mlp(of_mlp, AddNorm(x, next_norm), ctx)  # type: ignore[no-any-return]

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
