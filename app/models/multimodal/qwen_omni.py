"""Qwen2.5-Omni and Qwen3-Omni, which see and hear: the half that answers in text. What speaks is left out."""

from __future__ import annotations

from collections.abc import Iterable

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.layers.context import BuildContext
from app.models.decoder_settings import DecoderSettings
from app.models.families.qwen2 import Qwen2ForCausalLM
from app.models.families.qwen_moe import Qwen3MoeForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.qwen3_vl import Qwen3VLMoeForConditionalGeneration
from app.models.multimodal.qwen_sound import Qwen2_5OmniEars, Qwen3OmniEars
from app.models.multimodal.qwen_vision import ApartVision, QwenVision
from app.models.multimodal.vision_config import VisionConfig

_THINKER = "thinker."
_SPEAKS = ("talker.", "token2wav.", "code2wav.")


class OmniModel(MediaModel):
    """Positions go by time: 40 ms of a video or a sound take one, or the part of a second that config.json says."""

    positions_by_time = True

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        if self.media is not None:
            joint = VisionConfig.of_model(info, {"position_id_per_seconds": 25})
            self.rope_seconds = joint.number("position_id_per_seconds")

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See SeeingModel."""
        return [] if name.startswith(_SPEAKS) else super().own_tensors(name.removeprefix(_THINKER), tensor)


class Qwen2_5OmniForConditionalGeneration(OmniModel, Qwen2ForCausalLM):
    """A Qwen2 with Qwen2.5-VL's encoder and one of sounds."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return ApartVision(ctx, info)

    @classmethod
    def ears_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See SeeingModel."""
        return Qwen2_5OmniEars(ctx, info)


class Qwen3OmniForConditionalGeneration(OmniModel, Qwen3VLMoeForConditionalGeneration):
    """A Qwen3 with experts, Qwen3-VL's encoder and one of sounds; shares of experts are as config.json says."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return Qwen3MoeForCausalLM.settings(info)

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return QwenVision(ctx, info)

    @classmethod
    def ears_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See SeeingModel."""
        return Qwen3OmniEars(ctx, info)
