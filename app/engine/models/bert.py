"""BERT (MiniLM, BGE, E5, GTE, ...): embeddings, and classifiers over the pooled first token."""

from __future__ import annotations

import torch

from app.engine.layers.context import BuildContext, ForwardContext
from app.engine.layers.replicated import ReplicatedLinear
from app.engine.model_info import ModelInfo
from app.engine.models.encoder import Encoder, EncoderSettings, own_encoder_name
from app.engine.models.pooling_model import PoolingModel
from app.engine.pooling.info import PoolingInfo


class BertModel(PoolingModel):
    """BERT without a head. A checkpoint's own pooler or language head is left out."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        self.encoder = Encoder(ctx, EncoderSettings.from_info(info))

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        return self.encoder(input_ids, ctx)  # type: ignore[no-any-return]

    def own_name(self, name: str) -> str | None:
        """Names of BertModel, or of a model that holds one as `bert`."""
        return own_encoder_name(name, "bert.")


class BertForSequenceClassification(BertModel):
    """tanh(dense(first token)), then the classifier."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        size = int(info.hf_config["hidden_size"])
        self.num_labels = len(PoolingInfo.of(info).labels)
        self.dense = ReplicatedLinear(ctx, size, size)
        self.classifier = ReplicatedLinear(ctx, size, self.num_labels)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [N, C] -> logits [N, num_labels]."""
        return self.classifier(self.dense(pooled).tanh())  # type: ignore[no-any-return]

    def own_name(self, name: str) -> str | None:
        """Names beside the encoder's: `bert.pooler.dense` and `classifier`."""
        if name.startswith("classifier."):
            return name
        if name.startswith("bert.pooler.dense."):
            return name.removeprefix("bert.pooler.")
        return super().own_name(name)
