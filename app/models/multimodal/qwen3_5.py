"""Qwen 3.5 and 3.6: Qwen3-VL's encoder without inner features, over layers of delta nets and attention."""

from __future__ import annotations

from app.checkpoints.model_info import ModelInfo
from app.layers.context import BuildContext
from app.models.decoder import Ropes
from app.models.decoder_settings import DecoderSettings
from app.models.families.qwen3_next import Qwen3NextForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.qwen3_vl import interleaved
from app.models.multimodal.qwen_vision import QwenVision


class Qwen3_5ForConditionalGeneration(MediaModel, Qwen3NextForCausalLM):
    """Dense and with experts."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return QwenVision(ctx, info)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """See CausalLM."""
        return interleaved(info, super().ropes(info, settings, max_model_len))
