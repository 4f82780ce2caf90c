"""Qwen3-VL, dense and with experts: sections of positions interleaved, features for the first layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.stacked_experts import DOWN, HALVES, Cuts, transposed_cuts, unstacked
from app.layers.context import BuildContext
from app.layers.rope_scaling import RopeSettings
from app.models.decoder import Ropes
from app.models.decoder_settings import DecoderSettings
from app.models.families.qwen3 import Qwen3ForCausalLM
from app.models.families.qwen_moe import Qwen3MoeForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.qwen_vision import QwenVision
from app.records.media_info import MediaInfo

_CUTS: Mapping[str, Cuts] = {"gate_up_proj": HALVES, "down_proj": DOWN}


# The sections of a head's frequencies where config.json says none, by how many there are.
_SECTIONS = {64: [24, 20, 20], 32: [11, 11, 10]}


def interleaved(info: ModelInfo, ropes: Ropes) -> Ropes:
    """The same with coordinates that take turns, of a model that sees."""
    if MediaInfo.of(info) is None:
        return ropes

    def of(layer_type: str) -> RopeSettings:
        settings = ropes(layer_type)
        sections = settings.parameters.get("mrope_section") or _SECTIONS.get(settings.dim // 2)
        own = {"mrope_interleaved": True, "mrope_section": sections}
        return replace(settings, parameters={**settings.parameters, **own})

    return of


class Qwen3VLForConditionalGeneration(MediaModel, Qwen3ForCausalLM):
    """Qwen3 with pictures."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return QwenVision(ctx, info)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """See CausalLM."""
        return interleaved(info, super().ropes(info, settings, max_model_len))


class Qwen3VLMoeForConditionalGeneration(MediaModel, Qwen3MoeForCausalLM):
    """Qwen3 with experts, and with pictures. Shares of experts always sum up to one."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        settings = Qwen3MoeForCausalLM.settings(info)
        assert settings.experts is not None
        rule = replace(settings.experts.rule, renormalize=True)
        return replace(settings, experts=replace(settings.experts, rule=rule))

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return QwenVision(ctx, info)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """See CausalLM."""
        return interleaved(info, super().ropes(info, settings, max_model_len))

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Experts of a layer lie in one tensor: published ones with inputs along the rows, others along the columns."""
        experts, _, part = name.rpartition(".")
        if not experts.endswith(".mlp.experts") or part not in _CUTS or len(tensor.shape) != 3:
            return [(name, tensor)]
        inputs_first = tensor.shape[1 if part == "gate_up_proj" else 2] == settings.hidden_size
        cuts = transposed_cuts(_CUTS[part]) if inputs_first else _CUTS[part]
        return unstacked(experts, "weight", tensor, cuts)
