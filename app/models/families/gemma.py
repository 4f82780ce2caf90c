"""Gemma: Llama with norms that hold their weight less one, a scaled embedding and GELU."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.blocks import Blocks, offset_rms_norm
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings


def gemma_settings(info: ModelInfo) -> DecoderSettings:
    """Returns what all Gemmas have in common: 256 is their head size where none is given."""
    settings = DecoderSettings.from_info(info, tied=True, hidden_act="gelu_pytorch_tanh")
    bias = bool(info.hf_config.get("attention_bias", False))
    return replace(
        settings,
        head_dim=int(info.hf_config.get("head_dim") or 256),
        qkv_bias=bias,
        output_bias=bias,
        embedding_scale=settings.hidden_size**0.5,
    )


class GemmaForCausalLM(CausalLM):
    """The first Gemma, whose `hidden_act` "gelu" means the approximation by tanh too."""

    blocks = Blocks(norm=offset_rms_norm)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return gemma_settings(info)
