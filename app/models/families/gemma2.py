"""Gemma 2: norms before and after the blocks, soft caps, and a window on every other layer."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.blocks import Blocks, offset_rms_norm
from app.models.decoder import CausalLM
from app.models.decoder_layers.sandwich import SandwichLayer
from app.models.decoder_settings import DecoderSettings, every_nth_full, layer_types, windows_of
from app.models.families.gemma import gemma_settings


class Gemma2ForCausalLM(CausalLM):
    """Scores are scaled by `query_pre_attn_scalar`, not by the head size."""

    blocks = Blocks(norm=offset_rms_norm, layer=SandwichLayer)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; the first layer and then every other one slide."""
        hf = info.hf_config
        return replace(
            gemma_settings(info),
            attention_scale=float(hf.get("query_pre_attn_scalar", 256)) ** -0.5,
            attention_soft_cap=hf.get("attn_logit_softcapping", 50.0),
            logit_soft_cap=hf.get("final_logit_softcapping", 30.0),
            sliding_windows=windows_of(info, layer_types(info, every_nth_full(info, 2)), 4096),
        )
