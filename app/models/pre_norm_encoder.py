"""Encoders whose blocks read normed inputs, with a norm after the last layer: ModernBERT and T5."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from app.layers.context import ForwardContext
from app.layers.encoder_attention import EncoderAttention
from app.layers.epilogue import PLAIN
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

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = x + self.attention(normed, PLAIN, ctx)
        return x + self.mlp(self.mlp_norm(x), PLAIN)  # type: ignore[no-any-return]


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

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        x = self.word_embeddings(input_ids)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for layer in self.layers:
            x = layer(x, ctx)
        return self.final_norm(x)  # type: ignore[no-any-return]
