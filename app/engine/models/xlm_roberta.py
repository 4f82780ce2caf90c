"""RoBERTa and XLM-RoBERTa (multilingual E5, BGE-M3, BGE rerankers): BERT with positions that begin behind the padding
token's, and a classification head of its own."""

from __future__ import annotations

import torch

from app.engine.layers.context import BuildContext
from app.engine.layers.replicated import ReplicatedLinear
from app.engine.model_info import ModelInfo
from app.engine.models.bert import BertModel
from app.engine.models.encoder import own_encoder_name
from app.engine.pooling.info import PoolingInfo


class RobertaModel(BertModel):
    """RoBERTa without a head."""

    def own_name(self, name: str) -> str | None:
        """Names of RobertaModel, or of a model that holds one as `roberta`."""
        return own_encoder_name(name, "roberta.")


class RobertaForSequenceClassification(RobertaModel):
    """out_proj(tanh(dense(first token)))."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        size = int(info.hf_config["hidden_size"])
        self.num_labels = len(PoolingInfo.of(info).labels)
        self.dense = ReplicatedLinear(ctx, size, size)
        self.out_proj = ReplicatedLinear(ctx, size, self.num_labels)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [N, C] -> logits [N, num_labels]."""
        return self.out_proj(self.dense(pooled).tanh())  # type: ignore[no-any-return]

    def own_name(self, name: str) -> str | None:
        """Names beside the encoder's: `classifier.dense` and `classifier.out_proj`."""
        if name.startswith("classifier."):
            return name.removeprefix("classifier.")
        return super().own_name(name)
