"""Jina Reranker m0: a score of a query and a document, texts or pictures, by Qwen2-VL and two linear layers."""

from __future__ import annotations

import torch

from app.models.multimodal.media_pooling import MediaForPooling
from app.models.multimodal.qwen2_vl import Qwen2VLForConditionalGeneration

_LOWERED = 2.65  # what its authors take off scores


class JinaVLForRanking(MediaForPooling):
    """The layers are those of reward models."""

    family = Qwen2VLForConditionalGeneration

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """See DecoderForPooling."""
        return super().classify(pooled) - _LOWERED
