"""Llama: optional biases, full attention."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings


class LlamaForCausalLM(CausalLM):
    """`attention_bias` covers all four projections, `mlp_bias` all three."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json, with its biases."""
        bias = bool(info.hf_config.get("attention_bias", False))
        mlp_bias = bool(info.hf_config.get("mlp_bias", False))
        return replace(DecoderSettings.from_info(info), qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
