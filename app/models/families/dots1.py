"""dots.llm1: Qwen 3's attention, experts chosen as in DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings, layer_types, windows_of
from app.models.families.deepseek import sigmoid_experts


class Dots1ForCausalLM(CausalLM):
    """Windows from layer `max_window_layers` on, where config.json names one and no kinds of layers."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf, bias = info.hf_config, bool(info.hf_config.get("attention_bias", False))
        most = int(hf.get("max_window_layers", 62))
        default = ["full_attention" if i < most else "sliding_attention" for i in range(info.num_layers)]
        return replace(
            DecoderSettings.from_info(info),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="head_rms",
            sliding_windows=windows_of(info, layer_types(info, default), 4096),
            experts=sigmoid_experts(info, {}),
        )
