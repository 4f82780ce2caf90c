"""Doge: attention with a number for each key, sums with a weight for each channel. Contexts of `keep_window_size`
tokens, beyond which a choice of keys would count."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.layers.weighed_attention import WeighedAttention
from app.models.blocks import Blocks, LayerPlace, attention_settings
from app.models.decoder import CausalLM
from app.models.decoder_layers.weighed_sums import WeighedSumLayer
from app.models.decoder_settings import DecoderSettings, one_window


def _attention(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> WeighedAttention:
    return WeighedAttention(ctx, attention_settings(settings, place), place.cache_index, place.rotary)


class DogeForCausalLM(CausalLM):
    """The dense ones."""

    blocks = Blocks(attention=_attention, layer=WeighedSumLayer)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError for experts."""
        hf = info.hf_config
        if hf.get("is_moe"):
            raise UnsupportedError("Doge with experts (is_moe) is not supported", param="model")
        bias = bool(hf.get("attention_bias", False))
        return replace(
            DecoderSettings.from_info(info),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
            qk_norm="head_rms",
            sliding_windows=one_window(info),
        )
