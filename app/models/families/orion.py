"""Orion 14B, as it was published: Llama with layer norms."""

from __future__ import annotations

from app.checkpoints.model_info import ModelInfo
from app.models.blocks import Blocks, layer_norm
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings


class OrionForCausalLM(CausalLM):
    """Llama's names."""

    blocks = Blocks(norm=layer_norm)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return DecoderSettings.from_info(info, norm_eps=1e-5)
