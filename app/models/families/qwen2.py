"""Qwen2: Llama with biases on query, key and value, and a sliding window on some layers where asked for."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings, windows_by_layer_type


class Qwen2ForCausalLM(CausalLM):
    """Qwen2, whose biases are not optional."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json, with biases and the windows of `layer_types`."""
        return replace(DecoderSettings.from_info(info), qkv_bias=True, sliding_windows=windows_by_layer_type(info))
