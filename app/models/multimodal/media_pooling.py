"""Models that see and give vectors: of texts, pictures, and both together (Qwen3-VL-Embedding, GME), and
scores (Qwen3-VL-Reranker)."""

from __future__ import annotations

from app.checkpoints.model_info import ModelInfo
from app.layers.context import BuildContext
from app.models.decoder_pooling import DecoderForPooling
from app.models.multimodal.base import MediaModel, SeeingModel


class MediaForPooling(SeeingModel, DecoderForPooling):
    """A family's decoder with its encoder, without the language head."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        assert issubclass(self.family, MediaModel)
        self.see(ctx, info, self.family.encoder_of)
