"""Mistral: Llama without biases, every layer with the same sliding window."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings, one_window


class MistralForCausalLM(CausalLM):
    """`sliding_window: null` means full attention; a configuration that leaves it out means 4096."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json, with its sliding window in every layer."""
        return replace(DecoderSettings.from_info(info), sliding_windows=one_window(info, 4096))
