"""Solar Open: Llama's attention, experts of GLM-4.5 in every layer."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.models.decoder_settings import DecoderSettings
from app.models.families.glm4_moe import Glm4MoeForCausalLM


class SolarOpenForCausalLM(Glm4MoeForCausalLM):
    """Whole heads turn where config.json does not say otherwise."""

    rope_defaults = MappingProxyType({"rope_theta": 1_000_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; a head is 128 wide where it does not say."""
        hf = {"moe_intermediate_size": 1280, "head_dim": 128, **info.hf_config}
        own = replace(info, hf_config={**hf, "first_k_dense_replace": 0, "use_qk_norm": False})
        return Glm4MoeForCausalLM.settings(own)
