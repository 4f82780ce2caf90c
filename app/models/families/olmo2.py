"""OLMo 2 and 3: norms after the blocks, and over all queries and all keys together."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.models.blocks import Blocks
from app.models.decoder import CausalLM
from app.models.decoder_layers.post_norm import PostNormLayer
from app.models.decoder_settings import DecoderSettings, every_nth_full, layer_types, windows_of


class Olmo2ForCausalLM(CausalLM):
    """OLMo 2."""

    blocks = Blocks(layer=PostNormLayer)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        bias = bool(info.hf_config.get("attention_bias", False))
        settings = DecoderSettings.from_info(info, norm_eps=1e-5)
        return replace(settings, qkv_bias=bias, output_bias=bias, qk_norm="projection_rms")


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3: three layers with a window to each without."""

    rope_defaults = MappingProxyType({"rope_theta": 500_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        types = layer_types(info, every_nth_full(info, 4))
        windows = windows_of(info, types, 4096)
        return replace(Olmo2ForCausalLM.settings(info), sliding_windows=windows, rope_types=tuple(types))
