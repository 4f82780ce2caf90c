"""MiniCPM 1 and 2, as they were published: Llama with scaled embeddings, sums and logits."""

from __future__ import annotations

import math
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings


def with_scales(
    settings: DecoderSettings, info: ModelInfo, *, embeds: float, depth: float, base: float
) -> DecoderSettings:
    """The settings with the scales of config.json, or a family's own."""
    hf = info.hf_config
    return replace(
        settings,
        embedding_scale=float(hf.get("scale_emb", embeds)),
        residual_scale=float(hf.get("scale_depth", depth)) / math.sqrt(info.num_layers),
        logit_scale=float(hf.get("dim_model_base", base)) / info.hidden_size,
    )


class MiniCPMForCausalLM(CausalLM):
    """A dense model with attention to all tokens."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError for experts and for attention to chosen blocks."""
        for name in ("num_experts", "sparse_config"):
            if info.hf_config.get(name):
                raise UnsupportedError(f"MiniCPM with {name} is not supported", param="model")
        bias = bool(info.hf_config.get("attention_bias", False))
        settings = replace(DecoderSettings.from_info(info, tied=True), qkv_bias=bias, output_bias=bias)
        return with_scales(settings, info, embeds=1.0, depth=math.sqrt(info.num_layers), base=info.hidden_size)
