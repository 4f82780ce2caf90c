"""Granite: Llama with scaled embedding, residual sums, scores and logits."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings
from app.models.families.llama import LlamaForCausalLM


class GraniteForCausalLM(CausalLM):
    """`logits_scaling` divides."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        return replace(
            LlamaForCausalLM.settings(info),
            embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
            residual_scale=float(hf.get("residual_multiplier", 1.0)),
            attention_scale=float(hf.get("attention_multiplier", 1.0)),
            logit_scale=1.0 / float(hf.get("logits_scaling", 1.0)),
        )
