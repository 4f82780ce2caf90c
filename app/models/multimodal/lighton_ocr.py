"""LightOnOCR: Mistral 3's encoder over Qwen 3."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from app.checkpoints.model_info import ModelInfo
from app.layers.context import BuildContext
from app.models.decoder_settings import DecoderSettings
from app.models.multimodal.base import MediaEncoder
from app.models.multimodal.over_text import MediaOverText
from app.models.multimodal.pixtral import Mistral3Encoder


class LightOnOcrEncoder(Mistral3Encoder):
    """Named otherwise."""

    rules = ((r"^vision_projection\.", "multi_modal_projector."), *Mistral3Encoder.rules)
    text_eps: ClassVar[float] = 1e-6


class LightOnOcrForConditionalGeneration(MediaOverText):
    """LightOnOCR, whose output head is its embedding where config.json does not say."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """See CausalLM."""
        tied = bool(info.hf_config.get("tie_word_embeddings", True))
        return replace(MediaOverText.settings(info), tie_word_embeddings=tied)

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return LightOnOcrEncoder(ctx, info)
