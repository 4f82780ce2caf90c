"""Qwen3: Llama with normalised queries and keys, and a sliding window on some layers where asked for."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings, windows_by_layer_type


class Qwen3ForCausalLM(CausalLM):
    """`attention_bias` covers all four projections; the head size is the family's 128 when not given."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json, with norms, biases and the windows of `layer_types`."""
        bias = bool(info.hf_config.get("attention_bias", False))
        return replace(
            DecoderSettings.from_info(info),
            head_dim=int(info.hf_config.get("head_dim") or 128),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="head_rms",
            sliding_windows=windows_by_layer_type(info),
        )
