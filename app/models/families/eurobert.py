"""EuroBERT's classifiers: Llama's layers, in which every token sees the whole text, and a head of two layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.checkpoints.model_info import ModelInfo
from app.layers.context import BuildContext, ForwardContext
from app.layers.replicated import ReplicatedLinear
from app.models.decoder_pooling import DecoderForPooling


class EuroBertForSequenceClassification(DecoderForPooling):
    """classifier(gelu(dense(x))) of the first token, the mean, or (`late`) each token before the mean is taken."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.score = None
        self.is_late = info.hf_config.get("classifier_pooling", "late") == "late"
        self.dense = ReplicatedLinear(ctx, info.hidden_size, info.hidden_size)
        self.classifier = ReplicatedLinear(ctx, info.hidden_size, self.num_labels)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> what is pooled [T, C]; the last layer is linear, so that it may come behind the mean."""
        hidden = super().forward(input_ids, ctx)
        return F.gelu(self.dense(hidden)) if self.is_late else hidden

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Pooled [N, C] -> logits [N, num_labels]."""
        x = pooled if self.is_late else F.gelu(self.dense(pooled))
        return self.classifier(x)  # type: ignore[no-any-return]

    def own_name(self, name: str) -> str | None:
        """Names beside the decoder's: `dense` and `classifier`."""
        return name if name.startswith(("dense.", "classifier.")) else super().own_name(name)
