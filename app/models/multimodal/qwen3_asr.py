"""Qwen3-ASR: Qwen3-Omni's encoder of sounds over Qwen3, which writes down what is said."""

from __future__ import annotations

from collections.abc import Iterable

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.layers.context import BuildContext
from app.models.families.qwen3 import Qwen3ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.qwen_sound import Qwen3AsrEars


class Qwen3ASRForConditionalGeneration(MediaModel, Qwen3ForCausalLM):
    """A Qwen3 that listens, as published and as transformers writes it."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Qwen3AsrEars(ctx, info)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See SeeingModel."""
        return super().own_tensors(name.removeprefix("thinker."), tensor)
