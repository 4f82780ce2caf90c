"""Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from app.checkpoints.model_info import ModelInfo
from app.layers.context import BuildContext
from app.models.families.qwen2 import Qwen2ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.qwen_vision import QwenVision
from app.models.multimodal.vision_config import VisionConfig


class Qwen2VLForConditionalGeneration(MediaModel, Qwen2ForCausalLM):
    """Qwen2 with pictures; positions of frame, row and column in sections of a head."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return QwenVision(ctx, info)


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """The same; a video's positions go by its seconds."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        if self.media is not None:
            self.rope_seconds = VisionConfig(info, {"tokens_per_second": 4}).number("tokens_per_second")
