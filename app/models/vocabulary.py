"""Sparse vectors over the vocabulary (SPLADE: Formal et al., 2021): what an encoder's language head says of each token,
of which only what is above 0 counts, by its logarithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.layers.activation import activation
from app.layers.context import BuildContext, ForwardContext
from app.layers.layer_norm import LayerNorm
from app.layers.replicated import ReplicatedLinear
from app.layers.vocab import LMHead, VocabEmbedding
from app.models.encoder import Encoder, EncoderModel
from app.records.pooling_info import PoolingInfo


class VocabularyHead(nn.Module):
    """decode(norm(act(dense(x)))), with the table of embeddings."""

    def __init__(self, ctx: BuildContext, info: ModelInfo, act: str, eps: float, table: VocabEmbedding) -> None:
        super().__init__()
        if not info.hf_config.get("tie_word_embeddings", True):
            raise UnsupportedError("sparse vectors by a head that is not tied are not supported", param="model")
        self.dense = ReplicatedLinear(ctx, info.hidden_size, info.hidden_size)
        self.act = activation(act)
        self.norm = LayerNorm(ctx, info.hidden_size, eps)
        self.head = LMHead(ctx, info.vocab_size, info.hidden_size, bias=True)
        self.head.tie(table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> logits [T, V]."""
        return self.head(self.norm(self.act(self.dense(x))))  # type: ignore[no-any-return]


class EncoderForMaskedLM(EncoderModel):
    """An encoder whose language head is used where the directory's modules ask for sparse vectors, and left out where
    not: stands before the family's encoder among the bases of a class."""

    head_names: ClassVar[Mapping[str, str]]  # what the checkpoint calls the head's parts, and what we do
    head_act: ClassVar[str] = "gelu"

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.saturates = PoolingInfo.of(info).saturates
        self.vocabulary: VocabularyHead | None = None
        if self.saturates:
            assert isinstance(self.encoder, Encoder)
            table, eps = self.encoder.embeddings.word_embeddings, self.settings(info).norm_eps
            act = str(info.hf_config.get("hidden_act", info.hf_config.get("activation", self.head_act)))
            self.vocabulary = VocabularyHead(ctx, info, act, eps, table)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C], or weights of the vocabulary's entries [T, V]."""
        hidden = super().forward(input_ids, ctx)
        if self.vocabulary is None:
            return hidden
        weights: torch.Tensor = self.vocabulary(hidden).float().relu().log1p()
        return weights.log1p() if self.saturates == "twice" else weights

    def own_name(self, name: str) -> str | None:
        """The head's parts where it is used, and the encoder's names."""
        if self.vocabulary is not None:
            for theirs, ours in self.head_names.items():
                if name.startswith(theirs):
                    return f"vocabulary.{ours}{name.removeprefix(theirs)}"
        return super().own_name(name)
