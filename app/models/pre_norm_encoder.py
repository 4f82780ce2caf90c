"""Encoders whose blocks read normed inputs, with a norm after the last layer: ModernBERT and T5."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from app.kernels.gemm import Activations, materialize
from app.layers.context import ForwardContext
from app.layers.encoder_attention import EncoderAttention
from app.layers.epilogue import AddNorm
from app.layers.mlp import GatedMLP
from app.layers.norm import Norm
from app.layers.plain_mlp import PlainMLP
from app.layers.vocab import VocabEmbedding


class PreNormEncoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, attention_norm: Norm | None, attention: EncoderAttention, mlp_norm: Norm, mlp: GatedMLP | PlainMLP
    ) -> None:
        """`attention_norm` None: attention reads x as it is."""
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(
        self, normed: Activations, x: torch.Tensor, after: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """x [T, C] and its norm -> what the norm `after` the layer gives, and the layer's output, [T, C] each. Each sum
        is made together with the norm that reads it."""
        normed, x = self.attention(normed, AddNorm(x, self.mlp_norm), ctx)
        return self.mlp(normed, AddNorm(x, after))  # type: ignore[no-any-return]


class PreNormEncoder(nn.Module):
    """Embedding, layers, final norm. `shared` is what all layers use, where it has weights."""

    def __init__(
        self,
        word_embeddings: VocabEmbedding,
        embedding_norm: Norm | None,
        layers: Sequence[PreNormEncoderLayer],
        final_norm: Norm,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.word_embeddings, self.embedding_norm = word_embeddings, embedding_norm
        self.layers, self.final_norm, self.shared = nn.ModuleList(layers), final_norm, shared
        self._norms: tuple[Norm | None, ...] = (*(layer.attention_norm for layer in layers), final_norm)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        x = self.word_embeddings(input_ids)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        first, *following = self._norms
        normed: Activations = x if first is None else first(x)
        for layer, after in zip(self.layers, following, strict=True):
            normed, x = layer(normed, x, after, ctx)
        return materialize(normed)
