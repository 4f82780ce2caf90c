"""FlexOlmo: OLMo 2 whose feed-forward layers are OLMoE's experts."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.models.decoder_settings import DecoderSettings
from app.models.families.olmo2 import Olmo2ForCausalLM
from app.models.families.olmoe import OlmoeForCausalLM

_DEFAULTS = {"num_experts": 7, "num_experts_per_tok": 5, "rms_norm_eps": 1e-6}


class FlexOlmoForCausalLM(Olmo2ForCausalLM):
    """Norms after the blocks, and over all queries and all keys together."""

    rope_defaults = MappingProxyType({"rope_theta": 500_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return OlmoeForCausalLM.settings(replace(info, hf_config={**_DEFAULTS, **info.hf_config}))
